//! `train.experts`: the distribution of a model's experts over ranks, and the losses of its
//! routers.
use crate::{
    keys::{
        key::Key,
        numbers::{integer_type, non_negative_f32_type},
        section::{default_section, section},
        value_type::{ReadResult, ValueType, out_of_range_error, wrong_type_error},
    },
    yaml::{
        format::{YamlText, format_map},
        tree::{YamlEntry, YamlNode, YamlValue, make_excerpt},
        value_error::ValueError,
    },
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

section! {
    /// The distribution of experts over ranks, and the losses of routers. Models without experts
    /// use the default values.
    pub struct ExpertsSpec at "train.experts";
    /// The number of ranks in an expert-parallel group.
    ///
    /// The experts of a layer are distributed over these ranks.
    #[serde(rename = "parallel")]
    pub expert_parallel_size: u32 = Key::new(integer_type(1..=1024), "1").with_deprecated_name("parallel");
    /// The assignment of experts to the ranks of a group.
    pub placement: ExpertPlacement = Key::new(placement_type(), "balanced");
    /// The factor of the load-balancing loss ([numerics.md](numerics.md#experts)).
    pub aux_loss: Option<f64> = Key::optional(non_negative_f32_type(), "`router_aux_loss_coef` of config.json");
    /// The factor of the mean squared log-sum-exp of the router's logits.
    pub z_loss: f64 = Key::new(non_negative_f32_type(), "0");
}

impl Default for ExpertsSpec {
    fn default() -> Self {
        default_section()
    }
}

/// `train.experts.placement`: the assignment of experts to the ranks of an expert-parallel group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExpertPlacement {
    /// Each rank gets an equal number of consecutive experts.
    Balanced,
    /// The rank of each expert, which is the same in all layers.
    Experts(BTreeMap<u32, u32>),
    /// The rank of each expert, for each of the named layers. The other layers are balanced.
    Layers(BTreeMap<u32, BTreeMap<u32, u32>>),
}

/// The phrase by which docs/job.md and messages describe the values of `train.experts.placement`.
const EXPECTED_PLACEMENT: &str = "`balanced`, experts with their ranks, or layers with such mappings";

/// Returns the parser and printer ([`ValueType`]) for `train.experts.placement`: `balanced`, or a
/// mapping of experts to ranks, for all layers or for each layer.
fn placement_type() -> ValueType<ExpertPlacement> {
    let numbered = |values| {
        json!({"type": "object", "minProperties": 1, "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": values})
    };
    let rank = rank_in_group_type().schema;
    let schema = json!({"anyOf": [{"enum": ["balanced"]}, numbered(rank.clone()), numbered(numbered(rank))]});
    ValueType::new(EXPECTED_PLACEMENT, schema, read_placement, |placement| {
        Some(match placement {
            ExpertPlacement::Balanced => YamlText::Line("balanced".to_owned()),
            ExpertPlacement::Experts(ranks) => YamlText::Line(format_expert_ranks(ranks)),
            ExpertPlacement::Layers(layers) => YamlText::Block(
                layers
                    .iter()
                    .map(|(layer, of)| (layer.to_string(), YamlText::Line(format_expert_ranks(of))))
                    .collect(),
            ),
        })
    })
}

/// Formats a mapping of expert numbers to ranks as YAML on one line.
fn format_expert_ranks(ranks: &BTreeMap<u32, u32>) -> String {
    format_map(ranks.iter().map(|(expert, rank)| (expert.to_string(), rank.to_string())))
}

/// Returns the parser and printer ([`ValueType`]) for the ranks in `train.experts.placement`, which
/// count from 0 within an expert-parallel group.
fn rank_in_group_type() -> ValueType<u32> {
    integer_type(0..=1023)
}

/// Reads `train.experts.placement`: `balanced`, a mapping of experts to ranks, or a mapping of
/// layers to such mappings.
fn read_placement(node: &YamlNode) -> ReadResult<ExpertPlacement> {
    match &node.value {
        YamlValue::Text if node.raw == "balanced" => Ok(ExpertPlacement::Balanced),
        YamlValue::Map(entries) if entries.is_empty() => Err(out_of_range_error(EXPECTED_PLACEMENT, node)),
        YamlValue::Map(entries) if entries.iter().all(|e| matches!(e.value.value, YamlValue::Map(_))) => {
            let experts = |node: &YamlNode| match &node.value {
                YamlValue::Map(entries) => read_numbered_map(entries, "the number of an expert", |node| {
                    rank_in_group_type().read(node)
                }),
                _ => Err(wrong_type_error("a mapping of experts to ranks", node)),
            };
            read_numbered_map(entries, "the number of a layer", experts).map(ExpertPlacement::Layers)
        }
        YamlValue::Map(entries) => {
            read_numbered_map(entries, "the number of an expert", |node| rank_in_group_type().read(node))
                .map(ExpertPlacement::Experts)
        }
        _ => Err(wrong_type_error(EXPECTED_PLACEMENT, node)),
    }
}

/// Reads a YAML mapping whose keys are numbers, such as those of experts or layers. The function
/// `read` reads each value. The error contains the mistakes of all entries. `what` describes the
/// keys in messages.
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
            (_, Err(error)) => errors.push(error.with_part(&format!("at {}", entry.key))),
        }
    }
    ValueError::merge(errors).map_or(Ok(map), Err)
}
