//! `train.experts`: the distribution of a model's experts over ranks, and the losses of its
//! routers.
use super::{
    decode::{JobDecoder, JobSection},
    readers::{ReadResult, int32_reader, number_reader, out_of_range_error, wrong_type_error},
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, make_excerpt},
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `train.experts`: the distribution of experts over ranks, and the losses of routers. Models
/// without experts use the default values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertsSpec {
    /// The number of ranks over which the experts of a layer are distributed.
    #[serde(rename = "parallel")]
    pub expert_parallel_size: u32,
    /// The assignment of experts to the ranks of an expert-parallel group.
    pub placement: ExpertPlacement,
    /// The factor of the load-balancing loss. If this value is `None`, `router_aux_loss_coef` of
    /// config.json is used.
    pub aux_loss: Option<f64>,
    /// The factor of the routers' z-loss.
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

/// `train.experts.placement`: the assignment of experts to the ranks of an expert-parallel group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpertPlacement {
    /// Each rank gets an equal number of consecutive experts.
    Balanced,
    /// The rank of each expert, which is the same in all layers.
    Experts(BTreeMap<u32, u32>),
    /// The rank of each expert in the layers that are named. The other layers are balanced.
    Layers(BTreeMap<u32, BTreeMap<u32, u32>>),
}

/// Decodes the section `train.experts`. Reports errors to `d`.
pub(crate) fn decode_experts(d: &mut JobDecoder, train: &JobSection<'_>) -> ExpertsSpec {
    let t = d.open_section(train, "train.experts");
    let factor = number_reader("a number of 0 or more", |x| x >= 0.0 && (x as f32).is_finite());
    ExpertsSpec {
        expert_parallel_size: d.decode_value(
            &t,
            "train.experts.expert_parallel_size",
            int32_reader(1..=1024),
        ),
        placement: d.decode_value(&t, "train.experts.placement", read_placement),
        aux_loss: d.decode_optional(&t, "train.experts.aux_loss", &factor),
        z_loss: d.decode_value(&t, "train.experts.z_loss", &factor),
    }
}

/// Reads `train.experts.placement`: `balanced`, a mapping of experts to ranks, or a mapping of
/// layers to such mappings.
fn read_placement(node: &YamlNode) -> ReadResult<ExpertPlacement> {
    let what = "`balanced`, experts with their ranks, or layers with such mappings";
    match &node.value {
        YamlValue::Text if node.raw == "balanced" => Ok(ExpertPlacement::Balanced),
        YamlValue::Map(entries) if entries.is_empty() => Err(out_of_range_error(what, node)),
        YamlValue::Map(entries) if entries.iter().all(|e| matches!(e.value.value, YamlValue::Map(_))) => {
            let experts = |node: &YamlNode| match &node.value {
                YamlValue::Map(entries) => {
                    read_numbered_map(entries, "the number of an expert", int32_reader(0..=1023))
                }
                _ => Err(wrong_type_error("a mapping of experts to ranks", node)),
            };
            read_numbered_map(entries, "the number of a layer", experts).map(ExpertPlacement::Layers)
        }
        YamlValue::Map(entries) => {
            read_numbered_map(entries, "the number of an expert", int32_reader(0..=1023))
                .map(ExpertPlacement::Experts)
        }
        _ => Err(wrong_type_error(what, node)),
    }
}

/// Reads a mapping whose keys are numbers and whose values `read` reads. The error contains the
/// mistakes of all entries. `what` describes the keys in messages.
fn read_numbered_map<T>(
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
                let message = format!("has the key `{}`, which is not {what}", make_excerpt(&entry.key));
                errors.push(ValueError::new(codes::JOB_VALUE_FORMAT, entry.key_span, message));
            }
            (_, Err(error)) => errors.push(error.in_part(&format!("at {}", entry.key))),
        }
    }
    ValueError::merge(errors).map_or(Ok(map), Err)
}
