//! `train.lora`: low-rank adapters of the matrices of a model.
use super::{
    decode::{JobDecoder, JobSection},
    param_groups::share_reader,
    readers::{
        ReadResult, int32_reader, list_reader, out_of_range_error, read_boolean, read_positive, read_text,
    },
    sections::read_path,
    yaml::{YamlNode, YamlValue},
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// `train.lora`: the settings of new low-rank adapters, or the directory of existing ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraSpec {
    /// A directory in PEFT's layout whose adapters are trained further; `None` for new adapters.
    /// The path is relative to the workdir. `adapter_config.json` in the directory replaces all
    /// settings below except `dropout`.
    pub from: Option<PathBuf>,
    /// The rank of the adapters. An adapter is the matrix product B·A. The rank is the number of
    /// rows of A and of columns of B.
    pub rank: u32,
    /// The numerator of the scale of an adapter's output. The scale is `alpha / rank`.
    pub alpha: f64,
    /// The share of an adapter's inputs that are dropped in training, from 0 to below 1. If this
    /// value is `None`, new adapters have no dropout and existing adapters keep theirs.
    pub dropout: Option<f64>,
    /// Whether the scale of an adapter's output is `alpha / √rank` instead of `alpha / rank`.
    pub rslora: bool,
    /// The matrices of the model that get adapters.
    pub targets: LoraTargets,
}

/// `train.lora.targets`: the matrices of the model that get adapters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoraTargets {
    /// Every matrix in the model's layers for which adapters are supported.
    AllLinear,
    /// The matrices whose name is one of these texts, or ends in `.` and one of these texts.
    Names(Vec<String>),
}

impl LoraSpec {
    /// Returns a copy of the settings in which `from` is joined to `workdir`.
    pub fn resolve_paths(&self, workdir: &Path) -> LoraSpec {
        LoraSpec { from: self.from.as_ref().map(|f| workdir.join(f)), ..self.clone() }
    }
}

/// Decodes the section `train.lora`. Returns `None` if the job does not contain the section.
/// Reports errors to `d`.
pub(crate) fn decode_lora(d: &mut JobDecoder, train: &JobSection<'_>) -> Option<LoraSpec> {
    if d.is_absent(train, "train.lora") {
        return None;
    }
    let t = d.open_section(train, "train.lora");
    let rank = d.decode_value(&t, "train.lora.rank", int32_reader(1..=1 << 16));
    Some(LoraSpec {
        from: d.decode_optional(&t, "train.lora.from", read_path),
        rank,
        alpha: d.decode_optional(&t, "train.lora.alpha", read_positive).unwrap_or(f64::from(rank)),
        dropout: d.decode_optional(&t, "train.lora.dropout", share_reader("a number from 0 to below 1")),
        rslora: d.decode_value(&t, "train.lora.rslora", read_boolean),
        targets: d.decode_value(&t, "train.lora.targets", read_targets),
    })
}

/// Reads `train.lora.targets`: `all-linear`, or a list of at least one matrix name.
fn read_targets(node: &YamlNode) -> ReadResult<LoraTargets> {
    const WHAT: &str = "`all-linear` or a list of names such as `[q_proj, v_proj]`";
    if let YamlValue::Text = node.value
        && node.raw == "all-linear"
    {
        return Ok(LoraTargets::AllLinear);
    }
    let names = list_reader(WHAT, read_text)(node)?;
    match names.is_empty() || names.iter().any(String::is_empty) {
        true => Err(out_of_range_error(WHAT, node)),
        false => Ok(LoraTargets::Names(names)),
    }
}
