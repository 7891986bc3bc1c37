//! `train.experts`: how the experts of a model are distributed, and the auxiliary losses of its
//! router.
use super::{
    decode::{Decoder, Section},
    read::{ReadResult, int32, number, out_of_range, wrong_type},
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, excerpt},
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The distribution of experts and the losses of the router. The default is that of a model without
/// experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertsSpec {
    /// The number of ranks over which the experts of a layer are distributed.
    #[serde(rename = "parallel")]
    pub expert_parallel_size: u32,
    /// Which rank of an expert group has which expert.
    pub placement: ExpertPlacement,
    /// Factor of the load-balancing loss; `None` for `router_aux_loss_coef` of config.json.
    pub aux_loss: Option<f64>,
    /// Factor of the router's z-loss.
    pub z_loss: f64,
}

impl Default for ExpertsSpec {
    fn default() -> Self {
        ExpertsSpec {
            expert_parallel_size: 1,
            placement: ExpertPlacement::Balanced,
            aux_loss: None,
            z_loss: 0.0,
        }
    }
}

/// Which rank of an expert group has which expert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpertPlacement {
    /// Each rank has the same number of consecutive experts.
    Balanced,
    /// The rank of each expert, for all layers.
    Experts(BTreeMap<u32, u32>),
    /// The rank of each expert by layer; other layers are balanced.
    Layers(BTreeMap<u32, BTreeMap<u32, u32>>),
}

/// Decodes `train.experts`.
pub(crate) fn decode(d: &mut Decoder, train: &Section<'_>) -> ExpertsSpec {
    let t = d.section(train, "train.experts");
    let factor = number("a number of 0 or more", |x| x >= 0.0 && (x as f32).is_finite());
    ExpertsSpec {
        expert_parallel_size: d.get(&t, "train.experts.expert_parallel_size", int32(1..=1024)),
        placement: d.get(&t, "train.experts.placement", placement),
        aux_loss: d.get_optional(&t, "train.experts.aux_loss", &factor),
        z_loss: d.get(&t, "train.experts.z_loss", &factor),
    }
}

/// Reads `balanced`, a mapping of experts to ranks, or a mapping of layers to such mappings.
fn placement(node: &YamlNode) -> ReadResult<ExpertPlacement> {
    let what = "`balanced`, experts with their ranks, or layers with such mappings";
    match &node.value {
        YamlValue::Text if node.raw == "balanced" => Ok(ExpertPlacement::Balanced),
        YamlValue::Map(entries) if entries.is_empty() => Err(out_of_range(what, node)),
        YamlValue::Map(entries) if entries.iter().all(|e| matches!(e.value.value, YamlValue::Map(_))) => {
            let experts = |node: &YamlNode| match &node.value {
                YamlValue::Map(entries) => numbered(entries, "the number of an expert", int32(0..=1023)),
                _ => Err(wrong_type("a mapping of experts to ranks", node)),
            };
            numbered(entries, "the number of a layer", experts).map(ExpertPlacement::Layers)
        }
        YamlValue::Map(entries) => {
            numbered(entries, "the number of an expert", int32(0..=1023)).map(ExpertPlacement::Experts)
        }
        _ => Err(wrong_type(what, node)),
    }
}

/// Reads a mapping whose keys are numbers; reports the errors of all entries.
fn numbered<T>(
    entries: &[YamlEntry],
    what: &str,
    read: impl Fn(&YamlNode) -> ReadResult<T>,
) -> ReadResult<BTreeMap<u32, T>> {
    let (mut map, mut errors) = (BTreeMap::new(), Vec::new());
    for entry in entries {
        let key = entry.key.parse::<u32>().ok().filter(|n| n.to_string() == entry.key);
        match (key, read(&entry.value)) {
            (Some(key), Ok(value)) => drop(map.insert(key, value)),
            (None, _) => {
                let message = format!("has the key `{}`, which is not {what}", excerpt(&entry.key));
                errors.push(ValueError::new(codes::JOB_VALUE_FORMAT, entry.key_span, message));
            }
            (_, Err(error)) => errors.push(error.in_part(&format!("at {}", entry.key))),
        }
    }
    ValueError::merge(errors).map_or(Ok(map), Err)
}
