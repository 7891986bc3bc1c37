//! What the items of a distributed checkpoint are, by the keys that lead to them.
use super::metadata::Item;

/// What an item is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Weight(String),
    /// State of the optimizer: the weight and the key.
    State(String, String),
    /// A setting of one of its groups: the group as it is called, and the key.
    Group(String, String),
    Other,
}

/// Dicts in which programs keep weights.
const MODELS: [&str; 5] = ["model", "module", "state_dict", "model_state_dict", "model_state"];
/// Beginnings of keys of optimizers that are written without paths.
const OPTIMIZERS: [&str; 4] = ["optimizer.", "optim.", "optimizer_state_dict.", ""];

/// How keys are read.
pub(super) struct Names {
    /// Weights without paths are all in a dict of this name.
    model: Option<&'static str>,
}

impl Names {
    pub(super) fn of(items: &[Item]) -> Names {
        let alone = |i: &&Item| i.path.is_none() && matches!(flat(&i.key), Kind::Weight(_));
        let keys: Vec<&str> = items.iter().filter(alone).map(|i| i.key.as_str()).collect();
        // `model.` begins names of Hugging Face as well: it is a dict's when it is there twice, or before a head
        let inner = ["model.", "transformer.", "lm_head."];
        let is_dict = |dict: &&'static str| {
            let rest: Option<Vec<&str>> =
                keys.iter().map(|k| k.strip_prefix(dict)?.strip_prefix('.')).collect();
            rest.is_some_and(|r| r.iter().any(|name| inner.iter().any(|i| name.starts_with(i))))
        };
        Names { model: MODELS.into_iter().find(is_dict) }
    }

    pub(super) fn kind(&self, item: &Item) -> Kind {
        match &item.path {
            Some(path) => by_path(path),
            None => match (flat(&item.key), self.model) {
                (Kind::Weight(name), Some(dict)) => Kind::Weight(
                    name.strip_prefix(dict).and_then(|n| n.strip_prefix('.')).unwrap_or(&name).to_owned(),
                ),
                (kind, _) => kind,
            },
        }
    }
}

fn by_path(path: &[String]) -> Kind {
    let at = |key: &str| path.iter().take(2).position(|p| p == key);
    if let Some(at) = at("state").filter(|at| path.len() == at + 3) {
        return Kind::State(path[at + 1].clone(), path[at + 2].clone());
    }
    if let Some(at) = at("param_groups").filter(|at| path.len() >= at + 3) {
        return Kind::Group(path[at + 1].clone(), path[at + 2..].join("."));
    }
    match path {
        [name] => flat(name),
        [dict, name] if MODELS.contains(&dict.as_str()) => Kind::Weight(name.clone()),
        // states whose dict was flattened before
        [dict, name] if OPTIMIZERS.iter().any(|o| o.strip_suffix('.') == Some(dict)) => match flat(name) {
            Kind::Weight(_) => Kind::Other,
            kind => kind,
        },
        _ => Kind::Other,
    }
}

/// By one key alone, such as `optimizer.state.NAME.exp_avg`.
fn flat(key: &str) -> Kind {
    for prefix in OPTIMIZERS {
        let Some(rest) = key.strip_prefix(prefix) else { continue };
        let split = |rest: &str| rest.rsplit_once('.').map(|(a, b)| (a.to_owned(), b.to_owned()));
        if let Some((name, key)) = rest.strip_prefix("state.").and_then(split) {
            return Kind::State(name, key);
        }
        if let Some((group, key)) = rest.strip_prefix("param_groups.").and_then(split) {
            return Kind::Group(group, key);
        }
    }
    Kind::Weight(key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::metadata::{Content, Place};
    use super::*;

    fn item(key: &str, path: Option<&[&str]>) -> Item {
        let place = Place { file: String::new(), offset: 0, length: 0 };
        let path = path.map(|p| p.iter().map(|s| (*s).to_owned()).collect());
        Item { key: key.into(), path, content: Content::Bytes(place) }
    }

    #[test]
    fn keys_lead_to_weights_states_and_groups() {
        let weight = |n: &str| Kind::Weight(n.into());
        let state = |n: &str, k: &str| Kind::State(n.into(), k.into());
        for (path, expected) in [
            (&["model", "a.weight"][..], weight("a.weight")),
            (&["a.weight"], weight("a.weight")),
            (&["optim", "state", "a.weight", "exp_avg"], state("a.weight", "exp_avg")),
            (&["state", "a.weight", "step"], state("a.weight", "step")),
            (&["optimizer", "state.a.weight.exp_avg"], state("a.weight", "exp_avg")),
            (&["optimizer", "param_groups", "1", "lr"], Kind::Group("1".into(), "lr".into())),
            (&["optimizer.param_groups.a.weight.lr"], Kind::Group("a.weight".into(), "lr".into())),
            (&["extra", "step"], Kind::Other),
        ] {
            assert_eq!(
                by_path(&path.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()),
                expected,
                "{path:?}"
            );
        }
        let wrapped = [item("model.model.a", None), item("model.lm_head.weight", None)];
        assert_eq!(Names::of(&wrapped).kind(&wrapped[0]), weight("model.a"));
        let plain = [item("model.a", None), item("lm_head.weight", None)];
        assert_eq!(Names::of(&plain).kind(&plain[0]), weight("model.a"));
    }
}
