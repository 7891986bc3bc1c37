//! What of a model is trained and with which numbers: patterns of parameters, groups of the optimizer.
use super::{
    read::{Read, expected, list, nearest, number, text},
    train::positive,
    tree::{Fault, Node, Value},
};
use serde::{Deserialize, Serialize};

/// An item of `optimizer.groups`: parameters whose numbers differ from the rest's. `None`: as the rest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// Patterns of parameter names.
    pub r#match: Vec<String>,
    /// Highest learning rate.
    pub lr: Option<f64>,
    /// The same as a share of `optimizer.lr`.
    pub lr_scale: Option<f64>,
    pub weight_decay: Option<f64>,
    pub betas: Option<(f64, f64)>,
    pub eps: Option<f64>,
    pub momentum: Option<f64>,
}

/// Patterns, at least one.
pub(super) fn patterns(node: &Node) -> Read<Vec<String>> {
    const WHAT: &str = "a list of patterns";
    let patterns = list(WHAT, text)(node)?;
    if patterns.is_empty() { Err(expected(WHAT, node)) } else { Ok(patterns) }
}

pub(super) fn share(what: &'static str) -> impl Fn(&Node) -> Read<f64> {
    number(what, |x| (0.0..1.0).contains(&x))
}

pub(super) fn betas(node: &Node) -> Read<(f64, f64)> {
    const WHAT: &str = "a list of two numbers from 0 to below 1";
    match list(WHAT, share("a number from 0 to below 1"))(node)?[..] {
        [first, second] => Ok((first, second)),
        _ => Err(expected(WHAT, node)),
    }
}

const GROUP_KEYS: [&str; 7] = ["match", "lr", "lr_scale", "weight_decay", "betas", "eps", "momentum"];

/// The items of `optimizer.groups`.
pub(super) fn groups(node: &Node) -> Read<Vec<GroupSpec>> {
    list("a list of groups such as `{match: [\"*embed*\"], lr: 1e-4}`", group)(node)
}

fn group(node: &Node) -> Read<GroupSpec> {
    let Value::Map(entries) = &node.value else {
        return Err(expected("a group such as `{match: [\"*embed*\"], lr: 1e-4}`", node));
    };
    let mut group = GroupSpec::default();
    let mut faults = Vec::new();
    for entry in entries {
        let value = &entry.value;
        let of = |f: Fault| f.of(&format!("`{}`", entry.key));
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
                let fault = Fault::at(entry.key_span, "is not a key of a group");
                let hint = match nearest(other, GROUP_KEYS.into_iter()) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => format!("the keys of a group are {}", GROUP_KEYS.join(", ")),
                };
                Err(fault.hint(hint))
            }
        };
        faults.extend(read.err().map(of));
    }
    if !entries.iter().any(|e| e.key == "match") {
        faults.push(Fault::at(node.span, "has no `match`: the patterns of its parameters"));
    }
    if group.lr.is_some() && group.lr_scale.is_some() {
        faults.push(Fault::at(node.span, "has both `lr` and `lr_scale`").hint("keep one of them"));
    }
    Fault::all(faults).map_or(Ok(group), Err)
}
