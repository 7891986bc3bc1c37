//! `train.lora`: low-rank adapters of the matrices of a model.
use crate::keys::{
    collections::described_list_type,
    key::Key,
    key_info::{Condition, Rule},
    numbers::{boolean_type, fraction_type, integer_type, positive_f32_type},
    section::section,
    text::{path_type, text_type},
    value_type::{ValueType, in_variant},
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

section! {
    /// The settings of new low-rank adapters, or the directory of existing ones.
    pub struct LoraSpec at "train.lora", rules NEW_ADAPTER_RULES;
    /// The directory whose adapters are trained further.
    ///
    /// `None` stands for new adapters. The directory has PEFT's layout, and its path is relative to
    /// the workdir. Its `adapter_config.json` replaces all settings below except `dropout`.
    pub from: Option<PathBuf> = Key::optional(path_type(), "none: new adapters").ignoring_section_rules();
    /// The rank: the number of rows of an adapter's matrix A, and of columns of its matrix B.
    ///
    /// An adapter is the matrix product B·A.
    pub rank: u32 = Key::new(integer_type(1..=1 << 16), "8");
    /// The scale of an adapter: its output is multiplied by `alpha / rank`.
    pub alpha: f64 = Key::computed(positive_f32_type(), "`rank`", |lora: &LoraSpec, _| f64::from(lora.rank));
    /// The dropout rate of an adapter's inputs.
    ///
    /// If this value is `None`, new adapters have no dropout and existing adapters keep theirs.
    pub dropout: Option<f64> =
        Key::optional(fraction_type(), "0; with `from` the value of adapter_config.json").ignoring_section_rules();
    /// Multiply the output by `alpha / √rank` instead of `alpha / rank`.
    pub rslora: bool = Key::new(boolean_type(), "false");
    /// The matrices of the layers that get adapters.
    pub targets: LoraTargets = Key::new(targets_type(), "all-linear");
}

/// The rule that rejects other keys of `train.lora` in a job with `train.lora.from`, whose
/// adapter_config.json contains their values.
const NEW_ADAPTER_RULES: &[Rule] = &[Rule::conflict(&[Condition::Given("train.lora.from")])
    .with_help("remove it; adapter_config.json of the directory has {name}")];

/// Returns the parser and printer ([`ValueType`]) for `train.lora.targets`: `all-linear` or a list
/// of at least one matrix name.
fn targets_type() -> ValueType<LoraTargets> {
    let names = described_list_type(
        "list of module names",
        "a list of names such as `[q_proj, v_proj]`",
        text_type(),
    );
    in_variant!(names.not_empty(), LoraTargets::Names).or_keywords(&[("all-linear", LoraTargets::AllLinear)])
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
    /// Returns a copy of the settings in which the path of existing adapters (`from`) is joined to
    /// the working directory `workdir`.
    pub fn resolve_paths(&self, workdir: &Path) -> LoraSpec {
        LoraSpec { from: self.from.as_ref().map(|f| workdir.join(f)), ..self.clone() }
    }
}
