//! What a checkpoint contains: tensors by role and name, the model, and facts about the run.
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::manifest_error::ManifestError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fmt;

/// The purpose of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorRole {
    /// A parameter of the model: the FP32 master copy, or BF16.
    Weight,
    /// First moment of Adam.
    ExpAvg,
    /// Second moment of Adam.
    ExpAvgSq,
    /// Momentum of SGD, Muon and Lion.
    Momentum,
    /// A buffer of the model, which is not trained.
    Buffer,
}

impl TensorRole {
    /// Every role, in the order in which a manifest lists tensors.
    pub const ALL: [TensorRole; 5] = [
        TensorRole::Weight,
        TensorRole::ExpAvg,
        TensorRole::ExpAvgSq,
        TensorRole::Momentum,
        TensorRole::Buffer,
    ];

    /// The name of the role in files and tables, such as `exp_avg`.
    pub fn name(self) -> &'static str {
        match self {
            TensorRole::Weight => "weight",
            TensorRole::ExpAvg => "exp_avg",
            TensorRole::ExpAvgSq => "exp_avg_sq",
            TensorRole::Momentum => "momentum",
            TensorRole::Buffer => "buffer",
        }
    }

    /// True for optimizer states, which have the shape of the weight of the same name.
    pub fn is_optimizer_state(self) -> bool {
        matches!(self, TensorRole::ExpAvg | TensorRole::ExpAvgSq | TensorRole::Momentum)
    }
}

impl fmt::Display for TensorRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A whole logical tensor, independent of how it is split among files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the Hugging Face model.
    pub name: String,
    /// Purpose of the tensor.
    pub role: TensorRole,
    /// Stored element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Size of all elements, bytes.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size()
    }
}

/// Name and shape of one tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightShape {
    /// Name in the Hugging Face model.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<u64>,
}

/// A tied weight: `alias` is the same tensor as `target` and is not stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tie {
    /// Name of the tied weight.
    pub alias: String,
    /// Name of the stored weight.
    pub target: String,
}

/// A description of the model: enough to check the tensors and to export a Hugging Face directory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Name of the architecture, such as `qwen3`.
    pub family: String,
    /// Content of `config.json`; an object.
    pub hf_config: Value,
    /// Every stored weight in canonical order.
    pub weights: Vec<WeightShape>,
    /// Tied weights.
    pub ties: Vec<Tie>,
    /// Weights that are not trained and therefore have no optimizer state.
    #[serde(default)]
    pub frozen: Vec<String>,
    /// Tensors of role [`Role::Buffer`].
    #[serde(default)]
    pub buffers: Vec<WeightShape>,
    /// PEFT's `adapter_config.json`, when the model has LoRA adapters. Their tensors are in
    /// `weights`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<Value>,
}

/// A small text file that is stored in the checkpoint and exported with the weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextFile {
    /// File name without directories.
    pub name: String,
    /// Content.
    pub text: String,
}

/// Facts about the run and its state, which the caller of a save supplies for the manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunFacts {
    /// Completed optimizer steps.
    pub step: u64,
    /// Number of ranks that wrote the checkpoint.
    pub world: u32,
    /// ZeRO stage of the run.
    pub stage: u8,
    /// Seed of the run.
    pub run_seed: u64,
    /// Tokens trained on since step 0.
    pub tokens: u64,
    /// Version of launch that wrote the checkpoint.
    pub program: String,
    /// Position in the data order.
    pub cursor: Value,
    /// State of the random number generators.
    pub rng: Value,
    /// Hyper-parameters per parameter group.
    pub groups: Value,
    /// The model.
    pub model: ModelSpec,
    /// Tokenizer files.
    pub tokenizer: Vec<TextFile>,
    /// The resolved job file.
    pub job: Value,
}

/// Key in the cursor: a map from weights to the number of updates by which they are behind the run.
pub(crate) const LATE: &str = "late";

/// Limit on the name of a tensor, bytes.
const NAME_MAX: usize = 1024;
/// Limit on the dimensions of a tensor.
const RANK_MAX: usize = 16;

/// Number of elements of a shape; `None` when the size in bytes would overflow.
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    // a dimension of size 0 must not hide an overflow from readers that multiply in another order
    let nonzero = shape.iter().filter(|&&d| d > 0).try_fold(1u64, |n, &d| n.checked_mul(d))?;
    nonzero.checked_mul(8).filter(|&b| b <= i64::MAX as u64)?;
    Some(if shape.contains(&0) { 0 } else { nonzero })
}

/// A tensor name that is empty, too long, or has control characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a valid tensor name (1 to {NAME_MAX} bytes, no control characters)")]
pub struct InvalidTensorName {
    /// The first characters of the name.
    pub name: String,
}

/// Rejects invalid tensor names.
pub(crate) fn check_name(name: &str) -> std::result::Result<(), InvalidTensorName> {
    if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
        return Err(InvalidTensorName { name: name.chars().take(60).collect() });
    }
    Ok(())
}

/// True for a file name without directories that is not hidden.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.starts_with('.')
        && !name.chars().any(|c| c == '/' || c == '\\' || c.is_control())
}

fn check_shapes(kind: &str, tensors: &[WeightShape]) -> std::result::Result<(), ManifestError> {
    let mut seen = HashSet::new();
    for t in tensors {
        check_name(&t.name)?;
        if !seen.insert(t.name.as_str()) {
            return Err(ManifestError::Duplicate(format!("{kind} {}", t.name)));
        }
        if t.shape.len() > RANK_MAX || elements(&t.shape).is_none() {
            return Err(ManifestError::ImpossibleShape {
                tensor: format!("{kind} {}", t.name),
                shape: t.shape.clone(),
            });
        }
    }
    Ok(())
}

impl ModelSpec {
    /// Rejects a model that contradicts itself.
    pub(crate) fn check(&self) -> std::result::Result<(), ManifestError> {
        if !self.hf_config.is_object() {
            return Err(ManifestError::ConfigNotAnObject);
        }
        check_shapes("weight", &self.weights)?;
        check_shapes("buffer", &self.buffers)?;
        let weights: HashSet<&str> = self.weights.iter().map(|w| w.name.as_str()).collect();
        for tie in &self.ties {
            check_name(&tie.alias)?;
            if weights.contains(tie.alias.as_str()) || !weights.contains(tie.target.as_str()) {
                return Err(ManifestError::InvalidTie {
                    alias: tie.alias.clone(),
                    target: tie.target.clone(),
                });
            }
        }
        match self.frozen.iter().find(|n| !weights.contains(n.as_str())) {
            Some(name) => Err(ManifestError::FrozenNotAWeight(name.clone())),
            None => Ok(()),
        }
    }

    /// The first tensor in which two models differ: its name, and name and shape in this and in the
    /// other model. The order of tensors is ignored, since programs list them in different orders.
    pub(crate) fn first_difference(&self, other: &[WeightShape]) -> Option<(String, String, String)> {
        fn by_name(tensors: &[WeightShape]) -> HashMap<&str, &WeightShape> {
            tensors.iter().map(|w| (w.name.as_str(), w)).collect()
        }
        let shown = |w: Option<&&WeightShape>| match w {
            Some(w) => format!("{} {:?}", w.name, w.shape),
            None => "no such tensor".to_owned(),
        };
        let (ours, theirs) = (by_name(&self.weights), by_name(other));
        let listed = other.iter().chain(&self.weights).map(|w| w.name.as_str());
        let name = listed.into_iter().find(|name| ours.get(name) != theirs.get(name))?;
        Some((name.to_owned(), shown(ours.get(name)), shown(theirs.get(name))))
    }
}

impl RunFacts {
    /// Number of updates of a trained weight. A weight that was unfrozen later is behind the run.
    pub(crate) fn updates(&self, weight: &str) -> u64 {
        self.step.saturating_sub(self.cursor[LATE][weight].as_u64().unwrap_or(0))
    }

    /// Rejects facts that could not be read back or exported.
    pub(crate) fn check(&self) -> std::result::Result<(), ManifestError> {
        self.model.check()?;
        if self.world == 0 {
            return Err(ManifestError::NoRanks);
        }
        let mut seen = HashSet::new();
        for file in &self.tokenizer {
            if !is_plain_file_name(&file.name) || !seen.insert(file.name.as_str()) {
                return Err(ManifestError::TokenizerFileName(file.name.clone()));
            }
        }
        Ok(())
    }
}

/// Rejects a checkpoint of another model and names the first tensor that differs.
pub(crate) fn require_same_model(
    path: &std::path::Path,
    stored: &ModelSpec,
    wanted: &[WeightShape],
) -> Result<()> {
    match stored.first_difference(wanted) {
        None => Ok(()),
        Some((tensor, found, expected)) => {
            Err(CkptError::ModelMismatch { path: path.to_owned(), tensor, expected, found })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflowing_shapes_have_no_element_count() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[3, 0]), Some(0));
        assert_eq!(elements(&[1 << 40, 1 << 40]), None);
        assert_eq!(elements(&[0, u64::MAX, 3]), None);
    }
}
