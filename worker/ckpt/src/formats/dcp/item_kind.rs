//! Decides by its key whether an item of a distributed checkpoint is a weight, an optimizer state
//! or a hyper-parameter.
use super::metadata::ItemMetadata;

/// The meaning of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ItemKind {
    /// A weight, by name.
    Weight(String),
    /// An optimizer state: the name of the weight and the key.
    State(String, String),
    /// A hyper-parameter: the name of the parameter group and the key.
    Group(String, String),
    /// Anything else.
    Other,
}

/// Keys under which programs save the weights.
const MODELS: [&str; 5] = ["model", "module", "state_dict", "model_state_dict", "model_state"];
/// Prefixes of the keys of an optimizer, when paths are not recorded.
const OPTIMIZERS: [&str; 4] = ["optimizer.", "optim.", "optimizer_state_dict.", ""];

/// Interprets keys.
pub(super) struct KeyReader {
    /// The dict that contains all weights without a path.
    model: Option<&'static str>,
}

impl KeyReader {
    pub(super) fn new(items: &[ItemMetadata]) -> KeyReader {
        let is_weight =
            |i: &&ItemMetadata| i.path.is_none() && matches!(kind_from_key(&i.key), ItemKind::Weight(_));
        let keys: Vec<&str> = items.iter().filter(is_weight).map(|i| i.key.as_str()).collect();
        // Hugging Face names begin with `model.` too; it is the key of a dict when it occurs twice
        // or precedes a head
        let inner = ["model.", "transformer.", "lm_head."];
        let is_dict = |dict: &&'static str| {
            let rest: Option<Vec<&str>> =
                keys.iter().map(|k| k.strip_prefix(dict)?.strip_prefix('.')).collect();
            rest.is_some_and(|r| r.iter().any(|name| inner.iter().any(|i| name.starts_with(i))))
        };
        KeyReader { model: MODELS.into_iter().find(is_dict) }
    }

    pub(super) fn item_kind(&self, item: &ItemMetadata) -> ItemKind {
        match &item.path {
            Some(path) => kind_from_path(path),
            None => match (kind_from_key(&item.key), self.model) {
                (ItemKind::Weight(name), Some(dict)) => ItemKind::Weight(
                    name.strip_prefix(dict).and_then(|n| n.strip_prefix('.')).unwrap_or(&name).to_owned(),
                ),
                (kind, _) => kind,
            },
        }
    }
}

fn kind_from_path(path: &[String]) -> ItemKind {
    let at = |key: &str| path.iter().take(2).position(|p| p == key);
    if let Some(at) = at("state").filter(|at| path.len() == at + 3) {
        return ItemKind::State(path[at + 1].clone(), path[at + 2].clone());
    }
    if let Some(at) = at("param_groups").filter(|at| path.len() >= at + 3) {
        return ItemKind::Group(path[at + 1].clone(), path[at + 2..].join("."));
    }
    match path {
        [name] => kind_from_key(name),
        [dict, name] if MODELS.contains(&dict.as_str()) => ItemKind::Weight(name.clone()),
        // states whose dict was flattened before the save
        [dict, name] if OPTIMIZERS.iter().any(|o| o.strip_suffix('.') == Some(dict)) => {
            match kind_from_key(name) {
                ItemKind::Weight(_) => ItemKind::Other,
                kind => kind,
            }
        }
        _ => ItemKind::Other,
    }
}

/// Interprets a flattened key, such as `optimizer.state.NAME.exp_avg`.
fn kind_from_key(key: &str) -> ItemKind {
    for prefix in OPTIMIZERS {
        let Some(rest) = key.strip_prefix(prefix) else { continue };
        let split = |rest: &str| rest.rsplit_once('.').map(|(a, b)| (a.to_owned(), b.to_owned()));
        if let Some((name, key)) = rest.strip_prefix("state.").and_then(split) {
            return ItemKind::State(name, key);
        }
        if let Some((group, key)) = rest.strip_prefix("param_groups.").and_then(split) {
            return ItemKind::Group(group, key);
        }
    }
    ItemKind::Weight(key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::metadata::{ItemContent, StorageLocation};
    use super::*;

    fn item(key: &str, path: Option<&[&str]>) -> ItemMetadata {
        let location = StorageLocation { file: String::new(), offset: 0, length: 0 };
        let path = path.map(|p| p.iter().map(|s| (*s).to_owned()).collect());
        ItemMetadata { key: key.into(), path, content: ItemContent::Bytes(location) }
    }

    #[test]
    fn keys_identify_weights_states_and_groups() {
        let weight = |n: &str| ItemKind::Weight(n.into());
        let state = |n: &str, k: &str| ItemKind::State(n.into(), k.into());
        for (path, expected) in [
            (&["model", "a.weight"][..], weight("a.weight")),
            (&["a.weight"], weight("a.weight")),
            (&["optim", "state", "a.weight", "exp_avg"], state("a.weight", "exp_avg")),
            (&["state", "a.weight", "step"], state("a.weight", "step")),
            (&["optimizer", "state.a.weight.exp_avg"], state("a.weight", "exp_avg")),
            (&["optimizer", "param_groups", "1", "lr"], ItemKind::Group("1".into(), "lr".into())),
            (&["optimizer.param_groups.a.weight.lr"], ItemKind::Group("a.weight".into(), "lr".into())),
            (&["extra", "step"], ItemKind::Other),
        ] {
            assert_eq!(
                kind_from_path(&path.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()),
                expected,
                "{path:?}"
            );
        }
        let wrapped = [item("model.model.a", None), item("model.lm_head.weight", None)];
        assert_eq!(KeyReader::new(&wrapped).item_kind(&wrapped[0]), weight("model.a"));
        let plain = [item("model.a", None), item("lm_head.weight", None)];
        assert_eq!(KeyReader::new(&plain).item_kind(&plain[0]), weight("model.a"));
    }
}
