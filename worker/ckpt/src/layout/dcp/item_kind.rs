//! [`DcpItemKind`]: what an entry of a torch distributed checkpoint (DCP) stores, such as a weight
//! or an optimizer state.
//!
//! The item's key determines whether the item is a weight, an optimizer state or a hyper-parameter.
use super::metadata::ItemMetadata;

/// What an entry of a torch distributed checkpoint (DCP) stores, such as a weight or the optimizer
/// state of a named weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DcpItemKind {
    /// A weight or buffer, with its name.
    Weight(String),
    /// An optimizer state, with the name of the weight and the key of the state.
    State(String, String),
    /// A hyper-parameter, with the name of the parameter group and the key of the hyper-parameter.
    Group(String, String),
    /// Any other item. Such items are ignored when the checkpoint is read.
    Other,
}

/// Names under which training programs store the weights in the state dict that they save, such as
/// `model` in `{"model": …, "optimizer": …}`.
const MODEL_KEYS: [&str; 5] = ["model", "module", "state_dict", "model_state_dict", "model_state"];
/// Prefixes of the keys by which optimizer states are recognized, in checkpoints whose metadata has
/// only flattened keys such as `optimizer.state.NAME.exp_avg`.
const OPTIMIZER_PREFIXES: [&str; 4] = ["optimizer.", "optim.", "optimizer_state_dict.", ""];

/// Finds out from the keys of a torch distributed checkpoint's entries what each entry stores.
pub(super) struct ItemKeyParser {
    /// Name of the dict that contains all weights. The flattened keys of weights begin with this
    /// name. `None` if the keys begin with the names of weights.
    model_dict: Option<&'static str>,
}

impl ItemKeyParser {
    /// Creates a parser for the keys of one torch distributed checkpoint, and finds out from all
    /// keys in `items` whether the keys of weights have a prefix. Derives from all keys whether the
    /// keys of weights begin with the name of a dict.
    pub(super) fn new(items: &[ItemMetadata]) -> ItemKeyParser {
        let is_weight = |i: &&ItemMetadata| {
            i.path.is_none() && matches!(parse_kind_from_key(&i.key), DcpItemKind::Weight(_))
        };
        let keys: Vec<&str> = items.iter().filter(is_weight).map(|i| i.key.as_str()).collect();
        // names of Hugging Face weights begin with `model.`, too. `model` is the key of a dict only
        // if a second `model.` or the name of a head follows it
        let inner = ["model.", "transformer.", "lm_head."];
        let is_dict = |dict: &&'static str| {
            let rest: Option<Vec<&str>> =
                keys.iter().map(|k| k.strip_prefix(dict)?.strip_prefix('.')).collect();
            rest.is_some_and(|r| r.iter().any(|name| inner.iter().any(|i| name.starts_with(i))))
        };
        ItemKeyParser { model_dict: MODEL_KEYS.into_iter().find(is_dict) }
    }

    /// Returns what an entry of a torch distributed checkpoint stores, according to the entry's
    /// key. Uses the recorded path of nested keys if the item has one, and the flattened key
    /// otherwise.
    pub(super) fn parse_item_kind(&self, item: &ItemMetadata) -> DcpItemKind {
        match &item.path {
            Some(path) => parse_kind_from_path(path),
            None => match (parse_kind_from_key(&item.key), self.model_dict) {
                (DcpItemKind::Weight(name), Some(dict)) => DcpItemKind::Weight(
                    name.strip_prefix(dict).and_then(|n| n.strip_prefix('.')).unwrap_or(&name).to_owned(),
                ),
                (kind, _) => kind,
            },
        }
    }
}

/// Determines what an entry of a torch distributed checkpoint stores from `path`, the nested dict
/// keys such as `["optimizer", "state", NAME, "exp_avg"]`.
fn parse_kind_from_path(path: &[String]) -> DcpItemKind {
    let at = |key: &str| path.iter().take(2).position(|p| p == key);
    if let Some(at) = at("state").filter(|at| path.len() == at + 3) {
        return DcpItemKind::State(path[at + 1].clone(), path[at + 2].clone());
    }
    if let Some(at) = at("param_groups").filter(|at| path.len() >= at + 3) {
        return DcpItemKind::Group(path[at + 1].clone(), path[at + 2..].join("."));
    }
    match path {
        [name] => parse_kind_from_key(name),
        [dict, name] if MODEL_KEYS.contains(&dict.as_str()) => DcpItemKind::Weight(name.clone()),
        // optimizer states whose dict was flattened before the save
        [dict, name] if OPTIMIZER_PREFIXES.iter().any(|o| o.strip_suffix('.') == Some(dict)) => {
            match parse_kind_from_key(name) {
                DcpItemKind::Weight(_) => DcpItemKind::Other,
                kind => kind,
            }
        }
        _ => DcpItemKind::Other,
    }
}

/// Returns what an entry of a torch distributed checkpoint with the flattened key `key` stores,
/// such as `optimizer.state.NAME.exp_avg`. Keys without a known prefix are names of weights.
fn parse_kind_from_key(key: &str) -> DcpItemKind {
    for prefix in OPTIMIZER_PREFIXES {
        let Some(rest) = key.strip_prefix(prefix) else { continue };
        if let Some((name, key)) = rest.strip_prefix("state.").and_then(|rest| rest.rsplit_once('.')) {
            return DcpItemKind::State(name.to_owned(), key.to_owned());
        }
        if let Some((group, key)) = rest.strip_prefix("param_groups.").and_then(split_group_key) {
            return DcpItemKind::Group(group.to_owned(), key.to_owned());
        }
    }
    DcpItemKind::Weight(key.to_owned())
}

/// Splits the flattened key of a hyper-parameter, such as `0.betas.1`, into the name of the
/// parameter group and the key of the hyper-parameter, here `0` and `betas.1`. The number of an
/// item of a list belongs to the key.
fn split_group_key(text: &str) -> Option<(&str, &str)> {
    let (group, last) = text.rsplit_once('.')?;
    match group.rsplit_once('.').filter(|_| last.bytes().all(|b| b.is_ascii_digit())) {
        Some((group, key)) => Some((group, &text[text.len() - key.len() - 1 - last.len()..])),
        None => Some((group, last)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::dcp::metadata::{ItemContent, StorageLocation};

    /// Creates an entry with the flattened key `key` and the nested keys `path`, for tests.
    fn make_item(key: &str, path: Option<&[&str]>) -> ItemMetadata {
        let location = StorageLocation { file: String::new(), offset: 0, length: 0 };
        let path = path.map(|p| p.iter().map(|s| (*s).to_owned()).collect());
        ItemMetadata { key: key.into(), path, content: ItemContent::Bytes(location) }
    }

    #[test]
    fn keys_identify_weights_states_and_groups() {
        let weight = |n: &str| DcpItemKind::Weight(n.into());
        let state = |n: &str, k: &str| DcpItemKind::State(n.into(), k.into());
        for (path, expected) in [
            (&["model", "a.weight"][..], weight("a.weight")),
            (&["a.weight"], weight("a.weight")),
            (&["optim", "state", "a.weight", "exp_avg"], state("a.weight", "exp_avg")),
            (&["state", "a.weight", "step"], state("a.weight", "step")),
            (&["optimizer", "state.a.weight.exp_avg"], state("a.weight", "exp_avg")),
            (&["optimizer", "param_groups", "1", "lr"], DcpItemKind::Group("1".into(), "lr".into())),
            (&["optimizer.param_groups.a.weight.lr"], DcpItemKind::Group("a.weight".into(), "lr".into())),
            (&["optimizer.param_groups.0.betas.1"], DcpItemKind::Group("0".into(), "betas.1".into())),
            (&["optim", "param_groups", "0", "betas", "1"], DcpItemKind::Group("0".into(), "betas.1".into())),
            (&["extra", "step"], DcpItemKind::Other),
        ] {
            assert_eq!(
                parse_kind_from_path(&path.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()),
                expected,
                "{path:?}"
            );
        }
        let wrapped = [make_item("model.model.a", None), make_item("model.lm_head.weight", None)];
        assert_eq!(ItemKeyParser::new(&wrapped).parse_item_kind(&wrapped[0]), weight("model.a"));
        let plain = [make_item("model.a", None), make_item("lm_head.weight", None)];
        assert_eq!(ItemKeyParser::new(&plain).parse_item_kind(&plain[0]), weight("model.a"));
    }
}
