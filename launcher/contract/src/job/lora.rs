//! `train.lora:` — low-rank adapters beside the model's matrices.
use super::{
    decode::{Decoder, Table},
    read::{Read, boolean, expected, int32, list, text},
    sections::path,
    train::positive,
    tree::{Node, Value},
    tune::share,
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Adapters: their numbers, or the folder that says them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraSpec {
    /// A folder as PEFT writes it, whose adapters training begins with and whose `adapter_config.json` says everything here
    /// but `dropout`; relative to the workdir.
    pub from: Option<PathBuf>,
    pub rank: u32,
    /// What adapters give is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Share of an adapter's inputs that is dropped in training; `None`: the folder's.
    pub dropout: Option<f64>,
    /// By `alpha / √rank` instead.
    pub rslora: bool,
    pub targets: LoraTargets,
}

/// Which matrices have adapters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoraTargets {
    /// Every one of the layers that can have one.
    AllLinear,
    /// Those with one of these names, or whose names end in `.` and one of them.
    Names(Vec<String>),
}

impl LoraSpec {
    /// The same with `from` as it is found from the workdir.
    pub fn at(&self, workdir: &Path) -> LoraSpec {
        LoraSpec { from: self.from.as_ref().map(|f| workdir.join(f)), ..self.clone() }
    }
}

/// Decodes `train.lora`.
pub(crate) fn decode(d: &mut Decoder, train: &Table<'_>) -> Option<LoraSpec> {
    if d.absent(train, "train.lora") {
        return None;
    }
    let t = d.section(train, "train.lora");
    let rank = d.get(&t, "train.lora.rank", int32(1..=1 << 16));
    Some(LoraSpec {
        from: d.opt(&t, "train.lora.from", path),
        rank,
        alpha: d.opt(&t, "train.lora.alpha", positive).unwrap_or(f64::from(rank)),
        dropout: d.opt(&t, "train.lora.dropout", share("a number from 0 to below 1")),
        rslora: d.get(&t, "train.lora.rslora", boolean),
        targets: d.get(&t, "train.lora.targets", targets),
    })
}

fn targets(node: &Node) -> Read<LoraTargets> {
    const WHAT: &str = "`all-linear` or a list of names such as `[q_proj, v_proj]`";
    if let Value::Text = node.value
        && node.raw == "all-linear"
    {
        return Ok(LoraTargets::AllLinear);
    }
    let names = list(WHAT, text)(node)?;
    match names.is_empty() || names.iter().any(String::is_empty) {
        true => Err(expected(WHAT, node)),
        false => Ok(LoraTargets::Names(names)),
    }
}
