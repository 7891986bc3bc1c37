//! Which parameters are trained, and groups of parameters with other hyper-parameters.
use super::{
    read::{ReadResult, list, nearest_name, number, out_of_range, text, wrong_type},
    train::positive,
    value_error::ValueError,
    yaml::{YamlNode, YamlValue},
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};

/// An item of `optimizer.groups`. `None` is the optimizer's value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// Patterns of the names of the parameters.
    pub r#match: Vec<String>,
    /// The highest learning rate.
    pub lr: Option<f64>,
    /// The highest learning rate as a multiple of `optimizer.lr`.
    pub lr_scale: Option<f64>,
    /// The weight decay, also for parameters of `no_decay`.
    pub weight_decay: Option<f64>,
    /// The decay rates of the moments.
    pub betas: Option<(f64, f64)>,
    /// Added to the denominator.
    pub eps: Option<f64>,
    /// The momentum.
    pub momentum: Option<f64>,
}

/// Reads a list of at least one pattern.
pub(super) fn patterns(node: &YamlNode) -> ReadResult<Vec<String>> {
    const WHAT: &str = "a list of patterns";
    let patterns = list(WHAT, text)(node)?;
    if patterns.is_empty() { Err(out_of_range(WHAT, node)) } else { Ok(patterns) }
}

/// Reads a number from 0 to below 1.
pub(super) fn share(what: &'static str) -> impl Fn(&YamlNode) -> ReadResult<f64> {
    number(what, |x| (0.0..1.0).contains(&x))
}

/// Reads a list of two numbers from 0 to below 1.
pub(super) fn betas(node: &YamlNode) -> ReadResult<(f64, f64)> {
    const WHAT: &str = "a list of two numbers from 0 to below 1";
    match list(WHAT, share("a number from 0 to below 1"))(node)?[..] {
        [first, second] => Ok((first, second)),
        _ => Err(out_of_range(WHAT, node)),
    }
}

const GROUP_KEYS: [&str; 7] = ["match", "lr", "lr_scale", "weight_decay", "betas", "eps", "momentum"];

/// Reads `optimizer.groups`.
pub(super) fn groups(node: &YamlNode) -> ReadResult<Vec<GroupSpec>> {
    list("a list of groups such as `{match: [\"*embed*\"], lr: 1e-4}`", group)(node)
}

/// Reads one group; reports the errors of all its keys.
fn group(node: &YamlNode) -> ReadResult<GroupSpec> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(wrong_type("a group such as `{match: [\"*embed*\"], lr: 1e-4}`", node));
    };
    let mut group = GroupSpec::default();
    let mut errors = Vec::new();
    for entry in entries {
        let value = &entry.value;
        let in_key = |error: ValueError| error.in_part(&format!("`{}`", entry.key));
        let read = match entry.key.as_str() {
            "match" => patterns(value).map(|v| group.r#match = v),
            "lr" => number("a number above 0", |x| x > 0.0)(value).map(|v| group.lr = Some(v)),
            "lr_scale" => {
                number("a number of 0 or more", |x| x >= 0.0)(value).map(|v| group.lr_scale = Some(v))
            }
            "weight_decay" => {
                number("a number of 0 or more", |x| x >= 0.0)(value).map(|v| group.weight_decay = Some(v))
            }
            "betas" => betas(value).map(|v| group.betas = Some(v)),
            "eps" => positive(value).map(|v| group.eps = Some(v)),
            "momentum" => share("a number from 0 to below 1")(value).map(|v| group.momentum = Some(v)),
            other => {
                let error =
                    ValueError::new(codes::JOB_KEY_UNKNOWN, entry.key_span, "is not a key of a group");
                let help = match nearest_name(other, GROUP_KEYS.into_iter()) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => format!("the keys of a group are {}", GROUP_KEYS.join(", ")),
                };
                Err(error.with_help(help))
            }
        };
        errors.extend(read.err().map(in_key));
    }
    if !entries.iter().any(|e| e.key == "match") {
        let error = ValueError::new(codes::JOB_KEY_REQUIRED, node.span, "has no `match`");
        errors.push(error.with_help("add `match`, a list of patterns of parameter names"));
    }
    if group.lr.is_some() && group.lr_scale.is_some() {
        let error = ValueError::new(codes::JOB_KEYS_CONFLICT, node.span, "has both `lr` and `lr_scale`");
        errors.push(error.with_help("keep one of them"));
    }
    ValueError::merge(errors).map_or(Ok(group), Err)
}
