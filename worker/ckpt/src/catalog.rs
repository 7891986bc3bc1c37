//! What a checkpoint holds: tensors by role and name, and the facts beside them.
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fmt;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A parameter of the model (the fp32 master copy).
    Weight,
    /// AdamW's first moment.
    ExpAvg,
    /// AdamW's second moment.
    ExpAvgSq,
    /// SGD's momentum.
    Momentum,
    /// Model state that is not trained.
    Buffer,
}

impl Role {
    /// All of them, in the order in which a manifest lists them.
    pub const ALL: [Role; 5] = [Role::Weight, Role::ExpAvg, Role::ExpAvgSq, Role::Momentum, Role::Buffer];

    /// Its name in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Role::Weight => "weight",
            Role::ExpAvg => "exp_avg",
            Role::ExpAvgSq => "exp_avg_sq",
            Role::Momentum => "momentum",
            Role::Buffer => "buffer",
        }
    }

    /// State of the optimizer, shaped like the weight of the same name.
    pub fn is_optimizer_state(self) -> bool {
        matches!(self, Role::ExpAvg | Role::ExpAvgSq | Role::Momentum)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One logical tensor, whole, however it is spread over files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Hugging Face name.
    pub name: String,
    pub role: Role,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size()
    }
}

/// Name and shape of one tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightShape {
    pub name: String,
    pub shape: Vec<u64>,
}

/// `alias` is the same tensor as `target` and is not stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tie {
    pub alias: String,
    pub target: String,
}

/// The model: enough to check the tensors and to write a Hugging Face folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelCard {
    pub family: String,
    /// What goes into `config.json`; an object.
    pub hf_config: Value,
    /// Every stored weight in canonical order.
    pub weights: Vec<WeightShape>,
    pub ties: Vec<Tie>,
    /// Weights that are not trained and so have no optimizer state.
    #[serde(default)]
    pub frozen: Vec<String>,
    /// Tensors of role [`Role::Buffer`].
    #[serde(default)]
    pub buffers: Vec<WeightShape>,
    /// PEFT's `adapter_config.json` of a model with low-rank adapters, whose tensors are among the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<Value>,
}

/// A small text file kept in the checkpoint, written beside gathered weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextFile {
    /// A plain file name.
    pub name: String,
    pub text: String,
}

/// Everything in the manifest that the caller supplies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Optimizer steps done.
    pub step: u64,
    /// Ranks that wrote the checkpoint.
    pub world: u32,
    /// ZeRO stage of the run.
    pub stage: u8,
    pub run_seed: u64,
    /// Tokens trained on since step 0.
    pub tokens: u64,
    /// Version of the program that wrote it.
    pub program: String,
    /// Where the data order stands.
    pub cursor: Value,
    /// How randomness goes on.
    pub rng: Value,
    /// Hyper-parameters per optimizer group.
    pub groups: Value,
    pub model: ModelCard,
    /// Tokenizer files.
    pub tokenizer: Vec<TextFile>,
    /// The job as it was run.
    pub job: Value,
}

/// In the cursor: weight → updates by which it is behind the run.
pub(crate) const LATE: &str = "late";

/// Longest name of a tensor or file, bytes.
const NAME_MAX: usize = 1024;
/// Most dimensions of a tensor.
const RANK_MAX: usize = 16;

/// Number of elements of a shape, `None` when its bytes would overflow.
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    // zero-sized dimensions must not hide an overflow from readers that multiply in another order
    let nonzero = shape.iter().filter(|&&d| d > 0).try_fold(1u64, |n, &d| n.checked_mul(d))?;
    nonzero.checked_mul(8).filter(|&b| b <= i64::MAX as u64)?;
    Some(if shape.contains(&0) { 0 } else { nonzero })
}

/// `Err` says what is wrong with a tensor's name.
pub(crate) fn check_name(name: &str) -> std::result::Result<(), String> {
    if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
        let shown: String = name.chars().take(60).collect();
        return Err(format!(
            "{shown:?} is no name for a tensor (1 to {NAME_MAX} bytes, no control characters)"
        ));
    }
    Ok(())
}

/// True for a name that stays inside its folder and is not hidden.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.starts_with('.')
        && !name.chars().any(|c| c == '/' || c == '\\' || c.is_control())
}

fn check_shapes(kind: &str, tensors: &[WeightShape]) -> std::result::Result<(), String> {
    let mut seen = HashSet::new();
    for t in tensors {
        check_name(&t.name)?;
        if !seen.insert(t.name.as_str()) {
            return Err(format!("{kind} {} is listed twice", t.name));
        }
        if t.shape.len() > RANK_MAX || elements(&t.shape).is_none() {
            return Err(format!("{kind} {} has the impossible shape {:?}", t.name, t.shape));
        }
    }
    Ok(())
}

impl ModelCard {
    /// `Err` says which part contradicts itself.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        if !self.hf_config.is_object() {
            return Err("hf_config is not an object".into());
        }
        check_shapes("weight", &self.weights)?;
        check_shapes("buffer", &self.buffers)?;
        let weights: HashSet<&str> = self.weights.iter().map(|w| w.name.as_str()).collect();
        for tie in &self.ties {
            check_name(&tie.alias)?;
            if weights.contains(tie.alias.as_str()) || !weights.contains(tie.target.as_str()) {
                return Err(format!(
                    "{} is tied to {}, which does not fit the weights",
                    tie.alias, tie.target
                ));
            }
        }
        match self.frozen.iter().find(|n| !weights.contains(n.as_str())) {
            Some(name) => Err(format!("{name} is frozen but is not a weight")),
            None => Ok(()),
        }
    }

    /// The first tensor in which two models differ, as `(what, ours, theirs)`. Tensors go by their names: other programs
    /// list them in other orders.
    pub(crate) fn first_difference(&self, other: &[WeightShape]) -> Option<(String, String, String)> {
        fn by_name(all: &[WeightShape]) -> HashMap<&str, &WeightShape> {
            all.iter().map(|w| (w.name.as_str(), w)).collect()
        }
        let shown = |w: Option<&&WeightShape>| match w {
            Some(w) => format!("{} {:?}", w.name, w.shape),
            None => "no such tensor".to_owned(),
        };
        let (ours, theirs) = (by_name(&self.weights), by_name(other));
        let listed = other.iter().chain(&self.weights).map(|w| w.name.as_str());
        let name = listed.into_iter().find(|name| ours.get(name) != theirs.get(name))?;
        Some((format!("tensor {name}"), shown(ours.get(name)), shown(theirs.get(name))))
    }
}

impl Facts {
    /// Updates that a trained weight has had: those that joined later are behind the run.
    pub(crate) fn updates(&self, weight: &str) -> u64 {
        self.step.saturating_sub(self.cursor[LATE][weight].as_u64().unwrap_or(0))
    }

    /// Refuses facts that could not be read back or gathered.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        self.model.check()?;
        if self.world == 0 {
            return Err("a world of 0 ranks".into());
        }
        let mut seen = HashSet::new();
        for file in &self.tokenizer {
            if !is_plain_file_name(&file.name) || !seen.insert(file.name.as_str()) {
                return Err(format!("{:?} is no file name for a tokenizer, or is there twice", file.name));
            }
        }
        Ok(())
    }
}

/// Refuses another model's checkpoint, naming the first differing tensor.
pub(crate) fn require_same_model(
    path: &std::path::Path,
    stored: &ModelCard,
    wanted: &[WeightShape],
) -> Result<()> {
    match stored.first_difference(wanted) {
        None => Ok(()),
        Some((what, found, expected)) => Err(CkptError::Mismatch {
            path: path.to_owned(),
            what: format!("it is of another model: {what}"),
            expected,
            found,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_shapes_are_checked() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[3, 0]), Some(0));
        assert_eq!(elements(&[1 << 40, 1 << 40]), None);
        assert_eq!(elements(&[0, u64::MAX, 3]), None);
    }
}
