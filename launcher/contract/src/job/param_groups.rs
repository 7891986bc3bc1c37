//! Readers of `train.optimizer.groups`, and of patterns of parameter names.
use super::{
    readers::{
        ReadResult, find_nearest_name, list_reader, number_reader, out_of_range_error, read_positive,
        read_text, wrong_type_error,
    },
    value_error::ValueError,
    yaml::{YamlNode, YamlValue},
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};

/// An item of `train.optimizer.groups`: hyper-parameters for the parameters that match its
/// patterns. A `None` stands for the value in `train.optimizer`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParamGroupSpec {
    /// Name patterns (`*`, `?`) of the parameters that belong to the group.
    pub r#match: Vec<String>,
    /// The highest learning rate of the group.
    pub lr: Option<f64>,
    /// The highest learning rate of the group, as a multiple of `optimizer.lr`.
    pub lr_scale: Option<f64>,
    /// The weight decay, which also applies to parameters that `no_decay` names.
    pub weight_decay: Option<f64>,
    /// The decay rates of the first and second moments.
    pub betas: Option<(f64, f64)>,
    /// The constant that is added to the denominator of the update.
    pub eps: Option<f64>,
    /// The momentum of SGD or Muon.
    pub momentum: Option<f64>,
}

/// Reads a list of patterns of parameter names. Fails if the list is empty.
pub(super) fn read_patterns(node: &YamlNode) -> ReadResult<Vec<String>> {
    const WHAT: &str = "a list of patterns";
    let patterns = list_reader(WHAT, read_text)(node)?;
    if patterns.is_empty() { Err(out_of_range_error(WHAT, node)) } else { Ok(patterns) }
}

/// Returns a reader of numbers from 0 to below 1. `what` describes these numbers in messages.
pub(super) fn share_reader(what: &'static str) -> impl Fn(&YamlNode) -> ReadResult<f64> {
    number_reader(what, |x| (0.0..1.0).contains(&x))
}

/// Reads the decay rates of moments: a list of two numbers from 0 to below 1.
pub(super) fn read_betas(node: &YamlNode) -> ReadResult<(f64, f64)> {
    const WHAT: &str = "a list of two numbers from 0 to below 1";
    match list_reader(WHAT, share_reader("a number from 0 to below 1"))(node)?[..] {
        [first, second] => Ok((first, second)),
        _ => Err(out_of_range_error(WHAT, node)),
    }
}

/// The names of the keys of a parameter group.
const GROUP_KEYS: [&str; 7] = ["match", "lr", "lr_scale", "weight_decay", "betas", "eps", "momentum"];

/// Reads `train.optimizer.groups`, a list of parameter groups.
pub(super) fn read_groups(node: &YamlNode) -> ReadResult<Vec<ParamGroupSpec>> {
    list_reader("a list of groups such as `{match: [\"*embed*\"], lr: 1e-4}`", read_group)(node)
}

/// Reads one parameter group. The error contains the mistakes of all its keys.
fn read_group(node: &YamlNode) -> ReadResult<ParamGroupSpec> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(wrong_type_error("a group such as `{match: [\"*embed*\"], lr: 1e-4}`", node));
    };
    let mut group = ParamGroupSpec::default();
    let mut errors = Vec::new();
    for entry in entries {
        let value = &entry.value;
        let in_key = |error: ValueError| error.in_part(&format!("`{}`", entry.key));
        let read = match entry.key.as_str() {
            "match" => read_patterns(value).map(|v| group.r#match = v),
            "lr" => number_reader("a number above 0", |x| x > 0.0)(value).map(|v| group.lr = Some(v)),
            "lr_scale" => {
                number_reader("a number of 0 or more", |x| x >= 0.0)(value).map(|v| group.lr_scale = Some(v))
            }
            "weight_decay" => number_reader("a number of 0 or more", |x| x >= 0.0)(value)
                .map(|v| group.weight_decay = Some(v)),
            "betas" => read_betas(value).map(|v| group.betas = Some(v)),
            "eps" => read_positive(value).map(|v| group.eps = Some(v)),
            "momentum" => share_reader("a number from 0 to below 1")(value).map(|v| group.momentum = Some(v)),
            other => {
                let error =
                    ValueError::new(codes::JOB_KEY_UNKNOWN, entry.key_span, "is not a key of a group");
                let help = match find_nearest_name(other, GROUP_KEYS.into_iter()) {
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
