//! `train.experts:` — where the experts of a mixture lie, and what their router is trained with beside the loss.
use super::{
    decode::{Decoder, Table},
    read::{Read, expected, int32, number},
    tree::{Entry, Fault, Node, Value, shown},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The experts of the model's layers; the default is what a model without experts has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertsSpec {
    /// Ranks over which a layer's experts are spread.
    pub parallel: u32,
    pub placement: ExpertPlacement,
    /// Factor of the load-balancing loss; `None`: the `router_aux_loss_coef` of config.json.
    pub aux_loss: Option<f64>,
    /// Factor of the router's z loss.
    pub z_loss: f64,
}

impl Default for ExpertsSpec {
    fn default() -> Self {
        ExpertsSpec { parallel: 1, placement: ExpertPlacement::Balanced, aux_loss: None, z_loss: 0.0 }
    }
}

/// Which rank of an expert group keeps which expert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpertPlacement {
    /// Equal numbers of neighbours.
    Balanced,
    /// Expert → rank, the same in every layer.
    Experts(BTreeMap<u32, u32>),
    /// Layer → expert → rank; layers that aren't named are balanced.
    Layers(BTreeMap<u32, BTreeMap<u32, u32>>),
}

/// Decodes `train.experts`.
pub(crate) fn decode(d: &mut Decoder, train: &Table<'_>) -> ExpertsSpec {
    let t = d.section(train, "train.experts");
    let factor = number("a number of 0 or more", |x| x >= 0.0 && (x as f32).is_finite());
    ExpertsSpec {
        parallel: d.get(&t, "train.experts.parallel", int32(1..=1024)),
        placement: d.get(&t, "train.experts.placement", placement),
        aux_loss: d.opt(&t, "train.experts.aux_loss", &factor),
        z_loss: d.get(&t, "train.experts.z_loss", &factor),
    }
}

fn placement(node: &Node) -> Read<ExpertPlacement> {
    let what = "`balanced`, experts with their ranks, or layers with such mappings";
    match &node.value {
        Value::Text if node.raw == "balanced" => Ok(ExpertPlacement::Balanced),
        Value::Map(entries) if entries.is_empty() => Err(expected(what, node)),
        Value::Map(entries) if entries.iter().all(|e| matches!(e.value.value, Value::Map(_))) => {
            let experts = |node: &Node| match &node.value {
                Value::Map(entries) => numbered(entries, "an expert's number", int32(0..=1023)),
                _ => Err(expected("a mapping of experts to ranks", node)),
            };
            numbered(entries, "a layer's number", experts).map(ExpertPlacement::Layers)
        }
        Value::Map(entries) => {
            numbered(entries, "an expert's number", int32(0..=1023)).map(ExpertPlacement::Experts)
        }
        _ => Err(expected(what, node)),
    }
}

/// A mapping whose keys are numbers; the faults of all entries.
fn numbered<T>(entries: &[Entry], what: &str, read: impl Fn(&Node) -> Read<T>) -> Read<BTreeMap<u32, T>> {
    let (mut map, mut faults) = (BTreeMap::new(), Vec::new());
    for entry in entries {
        let key = entry.key.parse::<u32>().ok().filter(|n| n.to_string() == entry.key);
        match (key, read(&entry.value)) {
            (Some(key), Ok(value)) => drop(map.insert(key, value)),
            (None, _) => {
                let message = format!("has the key `{}`, which is not {what}", shown(&entry.key));
                faults.push(Fault::at(entry.key_span, message));
            }
            (_, Err(fault)) => faults.push(fault.of(&format!("at {}", entry.key))),
        }
    }
    Fault::all(faults).map_or(Ok(map), Err)
}
