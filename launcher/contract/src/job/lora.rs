//! `train.lora`: low-rank adapters of the matrices of a model.
use super::{
    decode::{Decoder, Section},
    read::{ReadResult, boolean, int32, list, out_of_range, text},
    sections::path,
    train::positive,
    tune::share,
    yaml::{YamlNode, YamlValue},
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The settings of adapters, or the directory that contains them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraSpec {
    /// A directory in PEFT's layout whose adapters are trained further. Its `adapter_config.json`
    /// has all settings except `dropout`. Relative to the workdir.
    pub from: Option<PathBuf>,
    /// The rank of the adapters: rows of A, columns of B.
    pub rank: u32,
    /// The output of an adapter is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Share of an adapter's inputs that are dropped in training; `None` for that of the directory.
    pub dropout: Option<f64>,
    /// Whether the output is multiplied by `alpha / √rank` instead.
    pub rslora: bool,
    /// Which matrices have adapters.
    pub targets: LoraTargets,
}

/// Which matrices have adapters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoraTargets {
    /// All matrices of the layers that support one.
    AllLinear,
    /// Matrices with one of these names, or whose names end in `.` and one of them.
    Names(Vec<String>),
}

impl LoraSpec {
    /// A copy in which `from` is relative to the current directory instead of the workdir.
    pub fn resolve_paths(&self, workdir: &Path) -> LoraSpec {
        LoraSpec { from: self.from.as_ref().map(|f| workdir.join(f)), ..self.clone() }
    }
}

/// Decodes `train.lora`.
pub(crate) fn decode(d: &mut Decoder, train: &Section<'_>) -> Option<LoraSpec> {
    if d.is_absent(train, "train.lora") {
        return None;
    }
    let t = d.section(train, "train.lora");
    let rank = d.get(&t, "train.lora.rank", int32(1..=1 << 16));
    Some(LoraSpec {
        from: d.get_optional(&t, "train.lora.from", path),
        rank,
        alpha: d.get_optional(&t, "train.lora.alpha", positive).unwrap_or(f64::from(rank)),
        dropout: d.get_optional(&t, "train.lora.dropout", share("a number from 0 to below 1")),
        rslora: d.get(&t, "train.lora.rslora", boolean),
        targets: d.get(&t, "train.lora.targets", read_targets),
    })
}

fn read_targets(node: &YamlNode) -> ReadResult<LoraTargets> {
    const WHAT: &str = "`all-linear` or a list of names such as `[q_proj, v_proj]`";
    if let YamlValue::Text = node.value
        && node.raw == "all-linear"
    {
        return Ok(LoraTargets::AllLinear);
    }
    let names = list(WHAT, text)(node)?;
    match names.is_empty() || names.iter().any(String::is_empty) {
        true => Err(out_of_range(WHAT, node)),
        false => Ok(LoraTargets::Names(names)),
    }
}
