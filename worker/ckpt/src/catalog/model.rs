//! Types that describe a checkpoint: its tensors, the config and tokenizer of its model, and the
//! settings of the run that saved it.
use crate::codec::disk::is_plain_file_name;
use crate::codec::json;
use crate::error::{CkptError, ManifestError, Result};
use crate::format_constants::TENSORS_MAX;
use crate::tensor::{Dtype, TensorRole, check_tensor_name, count_elements, deserialize_shape, tensor_label};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Limit on the number of JSON values in a model's config.
pub(crate) const CONFIG_VALUES_MAX: usize = 1 << 18;
/// Maximum number of JSON values in a checkpoint's list of parameter groups, or in another field of
/// the manifest that has entries for all weights.
const STATE_JSON_VALUES_MAX: usize = 2 * TENSORS_MAX;
/// Limit on the number of text files that are stored with a checkpoint.
const TEXT_FILES_MAX: usize = 64;

/// Name, role (weight, optimizer state or buffer), dtype and shape of a tensor of a checkpoint.
/// Several files may store its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the Hugging Face model.
    pub name: String,
    /// Purpose of the tensor: weight, optimizer state or buffer.
    pub role: TensorRole,
    /// Dtype of the stored elements.
    pub dtype: Dtype,
    /// Number of elements in each dimension, outermost first.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Returns the number of elements of the tensor, which is the product of its dimensions.
    pub fn element_count(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Formats the label `role/name` of the tensor, such as `weight/lm_head.weight`.
    pub(crate) fn label(&self) -> String {
        tensor_label(self.role, &self.name)
    }

    /// Returns the size of all elements of the tensor in bytes.
    pub fn size_in_bytes(&self) -> u64 {
        self.element_count() * self.dtype.size()
    }
}

/// Name and shape of one weight or buffer of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightShape {
    /// Name in the Hugging Face model.
    pub name: String,
    /// Number of elements in each dimension, outermost first.
    #[serde(deserialize_with = "deserialize_shape")]
    pub shape: Vec<u64>,
}

/// A tied weight: a weight that has a second name, `alias`, and is stored only as `target`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TiedWeight {
    /// Name of the weight that is not stored.
    pub alias: String,
    /// Name of the stored weight, whose elements belong to both names.
    pub target: String,
}

/// The description of the model whose weights a checkpoint stores: names and shapes of its weights,
/// its config, and its tokenizer. Readers check the tensors against this description, and an export
/// writes a Hugging Face directory from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Model family, such as `qwen3`.
    pub family: String,
    /// Content of `config.json`, a JSON object.
    #[serde(deserialize_with = "json::deserialize_value::<_, CONFIG_VALUES_MAX>")]
    pub hf_config: Value,
    /// Every stored weight, in the order in which the model lists its parameters.
    #[serde(deserialize_with = "json::deserialize_list::<_, _, TENSORS_MAX>")]
    pub weights: Vec<WeightShape>,
    /// Tied weights: further names of stored weights.
    #[serde(deserialize_with = "json::deserialize_list::<_, _, TENSORS_MAX>")]
    pub ties: Vec<TiedWeight>,
    /// Weights that are not trained and therefore have no optimizer state.
    #[serde(default, deserialize_with = "json::deserialize_list::<_, _, TENSORS_MAX>")]
    pub frozen: Vec<String>,
    /// Name and shape of each tensor of the role [`TensorRole::Buffer`].
    #[serde(default, deserialize_with = "json::deserialize_list::<_, _, TENSORS_MAX>")]
    pub buffers: Vec<WeightShape>,
    /// Content of PEFT's `adapter_config.json` if the model has LoRA adapters. The matrices of the
    /// adapters are listed in `weights`.
    #[serde(default, deserialize_with = "json::deserialize_optional_value::<_, CONFIG_VALUES_MAX>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<Value>,
}

/// A small text file that is stored in the checkpoint and exported with the weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextFile {
    /// File name without directories.
    pub name: String,
    /// Content of the file.
    pub text: String,
}

/// What the manifest of a checkpoint records about the training run that saved it, such as the
/// step, the model and the optimizer settings. The caller of a save provides these facts.
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
    /// Progress of the run: consumed samples, scale of the FP16 loss, and the step lag of each
    /// weight that was frozen for a while. Also has the id of the batch job of the run, if a
    /// scheduler started the run.
    #[serde(deserialize_with = "json::deserialize_value::<_, STATE_JSON_VALUES_MAX>")]
    pub cursor: Value,
    /// States of the RNG streams. Null in a checkpoint that was converted from another format.
    #[serde(deserialize_with = "json::deserialize_value::<_, CONFIG_VALUES_MAX>")]
    pub rng: Value,
    /// Parameter groups with their hyper-parameters.
    #[serde(deserialize_with = "json::deserialize_value::<_, STATE_JSON_VALUES_MAX>")]
    pub groups: Value,
    /// Description of the model.
    pub model: ModelSpec,
    /// Tokenizer files, which are exported with the weights.
    #[serde(deserialize_with = "json::deserialize_list::<_, _, TEXT_FILES_MAX>")]
    pub tokenizer: Vec<TextFile>,
    /// The resolved job file. In a checkpoint that was converted from another format: the path and
    /// the scheduler of the source.
    #[serde(deserialize_with = "json::deserialize_value::<_, CONFIG_VALUES_MAX>")]
    pub job: Value,
}

/// The key in the JSON object `cursor` of a checkpoint's manifest under which each weight's number
/// of optimizer steps without an update is stored.
pub(crate) const STEP_LAG_KEY: &str = "late";

/// Fails if a tensor in `tensors` has an invalid or repeated name, or a shape with too many
/// dimensions or elements. `kind` (weight or buffer) precedes the tensor's name in the error.
fn check_names_and_shapes(kind: &str, tensors: &[WeightShape]) -> std::result::Result<(), ManifestError> {
    let mut seen = HashSet::new();
    for t in tensors {
        check_tensor_name(&t.name)?;
        if !seen.insert(t.name.as_str()) {
            return Err(ManifestError::Duplicate(format!("{kind} {}", t.name)));
        }
        if count_elements(&t.shape).is_none() {
            return Err(ManifestError::ImpossibleShape {
                tensor: format!("{kind} {}", t.name),
                shape: t.shape.clone(),
            });
        }
    }
    Ok(())
}

impl ModelSpec {
    /// Fails if the parts of the model's description contradict each other, such as a tied weight
    /// that refers to a missing weight.
    pub(crate) fn check(&self) -> std::result::Result<(), ManifestError> {
        if !self.hf_config.is_object() {
            return Err(ManifestError::ConfigNotAnObject);
        }
        check_names_and_shapes("weight", &self.weights)?;
        check_names_and_shapes("buffer", &self.buffers)?;
        let weights: HashSet<&str> = self.weights.iter().map(|w| w.name.as_str()).collect();
        for tie in &self.ties {
            check_tensor_name(&tie.alias)?;
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

    /// Finds the first weight whose presence or shape differs between this model and the list
    /// `other`, which describes the weights of a second model. Returns the name of this weight and
    /// two texts, first for this model, then for `other`. Each text gives the name and shape there,
    /// or states that the weight is missing. Returns `None` if both have the same weights, in any
    /// order.
    pub(crate) fn find_first_difference(&self, other: &[WeightShape]) -> Option<(String, String, String)> {
        /// Returns a map from the name of each tensor to the tensor.
        fn index_by_name(tensors: &[WeightShape]) -> HashMap<&str, &WeightShape> {
            tensors.iter().map(|w| (w.name.as_str(), w)).collect()
        }
        let shown = |w: Option<&&WeightShape>| match w {
            Some(w) => format!("{} {:?}", w.name, w.shape),
            None => "no such tensor".to_owned(),
        };
        let (ours, theirs) = (index_by_name(&self.weights), index_by_name(other));
        let listed = other.iter().chain(&self.weights).map(|w| w.name.as_str());
        let name = listed.into_iter().find(|name| ours.get(name) != theirs.get(name))?;
        Some((name.to_owned(), shown(ours.get(name)), shown(theirs.get(name))))
    }
}

impl RunFacts {
    /// Returns how many optimizer updates a weight has received: the step of the run, minus the
    /// updates that it missed while it was frozen.
    pub(crate) fn count_updates(&self, weight: &str) -> u64 {
        self.step.saturating_sub(self.cursor[STEP_LAG_KEY][weight].as_u64().unwrap_or(0))
    }

    /// Fails if the model's description contradicts itself, the number of ranks or the ZeRO stage
    /// is impossible, the parameter groups are not a list of objects, or the file name of a
    /// tokenizer file is unsafe or repeated.
    pub(crate) fn check(&self) -> std::result::Result<(), ManifestError> {
        self.model.check()?;
        if self.world == 0 {
            return Err(ManifestError::NoRanks);
        }
        if self.stage > 3 {
            return Err(ManifestError::UnknownStage(self.stage));
        }
        if !self.groups.as_array().is_some_and(|groups| groups.iter().all(Value::is_object)) {
            return Err(ManifestError::GroupsNotObjects);
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

/// Fails if a weight's name or shape differs between the model `stored` in a checkpoint and the
/// list `wanted` of weights that the job expects. The error names the first tensor that differs,
/// and the checkpoint at `path` that stores the model.
pub(crate) fn require_same_model(
    path: &std::path::Path,
    stored: &ModelSpec,
    wanted: &[WeightShape],
) -> Result<()> {
    match stored.find_first_difference(wanted) {
        None => Ok(()),
        Some((tensor, found, expected)) => {
            Err(CkptError::ModelMismatch { path: path.to_owned(), tensor, expected, found })
        }
    }
}

/// References to the name and the shape of a weight.
pub(crate) type BorrowedWeightShape<'a> = (&'a str, &'a [u64]);

/// Returns references to the name and the shape of each weight in `weights`.
pub(crate) fn borrow_weight_shapes(weights: &[(String, Vec<u64>)]) -> Vec<BorrowedWeightShape<'_>> {
    weights.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect()
}
