//! [`GatherPlan`]: the weight files that an export of a checkpoint's full weights will write, and
//! the tensors in each file.
use super::save_order;
use crate::catalog::{TensorInfo, TensorSource};
use crate::codec::disk::Directory;
use crate::codec::safetensors::{self, PlannedTensor};
use crate::error::{CkptError, OptionProblem, Result};
use crate::hash::Hash;
use crate::save::output_record::GATHER_RECORD_KIND;
use crate::tensor::{Dtype, TensorRole};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;

/// Maximum number of elements that are converted at a time while weights are gathered: 4 MiB of
/// F32.
const WINDOW_ELEMENTS: usize = 1 << 20;
/// Name of the file with the model's config in a Hugging Face directory.
const CONFIG_FILE: &str = "config.json";
/// The first part of the name of each file with exported weights, as in `model.safetensors` and
/// `model-00001-of-00003.safetensors`.
pub(super) const WEIGHT_FILE_STEM: &str = "model";
/// Name of the file with the settings of text generation in a Hugging Face directory.
pub(super) const GENERATION_CONFIG_FILE: &str = "generation_config.json";
/// Name of the file that lists the weight file of each tensor in a Hugging Face directory.
const WEIGHT_INDEX_FILE: &str = "model.safetensors.index.json";

/// Options of [`crate::gather_weights`], such as the dtype and the size of files.
#[derive(Clone, Debug)]
pub struct GatherOptions {
    /// Dtype of the written tensors: F32, BF16 or F16. `None` means the dtype in which a native
    /// checkpoint stores its weights, or F32 for an external checkpoint.
    pub dtype: Option<Dtype>,
    /// Maximum total size of the tensors in one file, in bytes. A larger tensor gets a separate
    /// file. Has no effect on a PEFT directory, whose adapters are in one file.
    pub max_shard_size: u64,
    /// Whether to replace an output directory that an earlier gather wrote.
    pub force: bool,
    /// Whether to merge low-rank adapters into the matrices that they adapt. If false, a checkpoint
    /// with adapters is gathered as a PEFT directory with only the adapters.
    pub merge_lora: bool,
}

impl Default for GatherOptions {
    fn default() -> GatherOptions {
        GatherOptions { dtype: None, max_shard_size: 5_000_000_000, force: false, merge_lora: false }
    }
}

/// A weight file that was written while gathering the weights of a checkpoint: its name, size and
/// hash.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GatheredFile {
    /// Name of the file in the output directory.
    pub name: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of the file.
    pub blake3: Hash,
}

/// Encodes a value as indented JSON that ends with a line break.
pub(super) fn encode_pretty_json(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_json::to_string_pretty(value).map_err(CkptError::invalid_save)?;
    Ok(text + "\n")
}

/// The weight files that an export of a checkpoint's full weights will write, with the dtype and
/// the tensors of each file.
pub(super) struct GatherPlan {
    pub(super) dtype: Dtype,
    pub(super) tensors: Vec<TensorInfo>,
    /// For each file its name, and the indices of its tensors in `tensors`.
    pub(super) files: Vec<(String, Vec<usize>)>,
    pub(super) bytes: u64,
    pub(super) integer_buffers: Vec<String>,
}

impl GatherPlan {
    /// Plans which weights and floating-point buffers of the checkpoint are exported to which file,
    /// where all file names begin with `stem`.
    ///
    /// # Errors
    /// Fails if the dtype in `options` isn't F32, BF16 or F16.
    pub(super) fn new(
        checkpoint: &dyn TensorSource,
        options: &GatherOptions,
        stem: &str,
    ) -> Result<GatherPlan> {
        let dtype = options.dtype.unwrap_or_else(|| checkpoint.default_export_dtype());
        if !dtype.is_float() {
            return Err(CkptError::invalid_option(OptionProblem::Dtype { dtype }));
        }
        let is_model_tensor = |t: &TensorInfo| matches!(t.role, TensorRole::Weight | TensorRole::Buffer);
        let readable = |t: &TensorInfo| t.role == TensorRole::Weight || t.dtype.is_float();
        let (tensors, others): (Vec<TensorInfo>, Vec<TensorInfo>) =
            checkpoint.tensors().into_iter().filter(is_model_tensor).partition(readable);
        let tensors = save_order::sort_as_save_pretrained(tensors);
        let left_out = others.into_iter().map(|t| t.name).collect();
        let sizes: Vec<u64> =
            tensors.iter().map(|t| t.element_count().saturating_mul(dtype.size())).collect();
        // PEFT reads a single file
        let limit = if stem == WEIGHT_FILE_STEM { options.max_shard_size } else { u64::MAX };
        let units = save_order::group_inseparable_tensors(&tensors);
        let unit_sizes: Vec<u64> = units.iter().map(|unit| sum_sizes(&sizes[unit.clone()])).collect();
        let groups = split_into_files_by_size(&unit_sizes, limit);
        let count = groups.len();
        let file_name = |i: usize| match count {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let members = |group: Vec<usize>| group.into_iter().flat_map(|unit| units[unit].clone()).collect();
        let files = groups.into_iter().enumerate().map(|(i, group)| (file_name(i), members(group))).collect();
        Ok(GatherPlan { dtype, tensors, files, bytes: sum_sizes(&sizes), integer_buffers: left_out })
    }

    /// Encodes the safetensors header of the planned weight file number `file`.
    pub(super) fn encode_header(&self, file: usize) -> Result<Vec<u8>> {
        let tensor = |&i: &usize| {
            let t = &self.tensors[i];
            PlannedTensor { name: t.name.clone(), dtype: self.dtype, shape: &t.shape }
        };
        let planned: Vec<PlannedTensor<'_>> = self.files[file].1.iter().map(tensor).collect();
        safetensors::encode_header(&[("format", "pt".to_owned())], &planned).map_err(CkptError::invalid_save)
    }

    /// Divides the tensors of one planned weight file into groups of at most [`WINDOW_ELEMENTS`]
    /// elements, in the order in which they are written.
    pub(super) fn divide_into_windows(&self, file: usize) -> Vec<GatherWindow> {
        let mut windows = vec![GatherWindow::default()];
        for &tensor in &self.files[file].1 {
            let mut rest = 0..self.tensors[tensor].element_count();
            while !rest.is_empty() {
                if windows.last().is_some_and(|window| window.elements == WINDOW_ELEMENTS) {
                    windows.push(GatherWindow::default());
                }
                let Some(window) = windows.last_mut() else { break };
                let end = rest.end.min(rest.start + (WINDOW_ELEMENTS - window.elements) as u64);
                window.elements += (end - rest.start) as usize;
                window.spans.push((tensor, rest.start..end));
                rest.start = end;
            }
        }
        windows
    }

    /// Returns the names and contents of the text files of an export, such as the model's config,
    /// the index of the weight files, and the tokenizer files.
    ///
    /// # Errors
    /// Fails if the checkpoint stores a file with the name of the record ([`GATHER_RECORD_KIND`]).
    pub(super) fn make_text_files(&self, checkpoint: &dyn TensorSource) -> Result<Vec<(String, String)>> {
        let mut texts = Vec::new();
        if let Some(config) = checkpoint.hf_config() {
            texts = self.make_config_files(checkpoint, config.clone())?;
        }
        if self.files.len() > 1 {
            texts.push((WEIGHT_INDEX_FILE.to_owned(), encode_pretty_json(&self.make_weight_index())?));
        }
        if checkpoint.exported_text_files().iter().any(|t| t.name == GATHER_RECORD_KIND.file) {
            let name = GATHER_RECORD_KIND.file.to_owned();
            return Err(CkptError::invalid_option(OptionProblem::FileNameTaken { name }));
        }
        texts.extend(checkpoint.exported_text_files().iter().map(|t| (t.name.clone(), t.text.clone())));
        Ok(texts)
    }

    /// Returns the contents of `config.json` and, if the checkpoint does not store one,
    /// `generation_config.json` for a directory of exported weights.
    fn make_config_files(
        &self,
        checkpoint: &dyn TensorSource,
        mut config: Map<String, Value>,
    ) -> Result<Vec<(String, String)>> {
        // transformers 4 writes `torch_dtype`, version 5 `dtype`; all versions read the older name
        let keys = ["torch_dtype", "dtype"].map(|key| config.contains_key(key).then_some(key));
        let keys = if keys == [None, None] { [Some("torch_dtype"), None] } else { keys };
        for key in keys.into_iter().flatten() {
            config.insert(key.into(), self.dtype.torch_name().into());
        }
        let mut texts = vec![(CONFIG_FILE.to_owned(), encode_pretty_json(&sort_keys(&config))?)];
        let has_text = |name: &str| checkpoint.exported_text_files().iter().any(|t| t.name == name);
        if let Some(generation) =
            derive_generation_config(&config).filter(|_| !has_text(GENERATION_CONFIG_FILE))
        {
            texts.push((GENERATION_CONFIG_FILE.to_owned(), encode_pretty_json(&generation)?));
        }
        Ok(texts)
    }

    /// Returns the content of [`WEIGHT_INDEX_FILE`]: the file name of each tensor, and the total
    /// numbers of parameters and bytes.
    fn make_weight_index(&self) -> Value {
        let file_of = |(name, group): &(String, Vec<usize>)| {
            group.iter().map(|&i| (self.tensors[i].name.clone(), name.clone())).collect::<Vec<_>>()
        };
        let map: BTreeMap<String, String> = self.files.iter().flat_map(file_of).collect();
        let parameters = sum_sizes(&self.tensors.iter().map(TensorInfo::element_count).collect::<Vec<_>>());
        json!({"metadata": {"total_parameters": parameters, "total_size": self.bytes}, "weight_map": map})
    }

    /// Checks that the headers of the exported weight files in `dir` together list exactly the
    /// planned tensors. Fails if their headers do not list exactly the planned tensors with their
    /// dtypes, shapes and sizes.
    pub(super) fn check_written_files(&self, dir: &Path, files: &[GatheredFile]) -> Result<()> {
        let directory = Directory::open(dir)?;
        let mut found: HashMap<String, (Dtype, Vec<u64>)> = HashMap::new();
        let mut bytes = 0;
        for file in files {
            for e in safetensors::open_header(&directory, &file.name)?.0.entries {
                bytes += e.bytes.end - e.bytes.start;
                found.insert(e.name, (e.dtype, e.shape));
            }
        }
        let differs = |t: &&TensorInfo| found.get(&t.name) != Some(&(self.dtype, t.shape.clone()));
        if let Some(t) = self.tensors.iter().find(differs) {
            return Err(CkptError::damaged(
                dir,
                "the gathered weights",
                format!("{} has another dtype or shape than planned", t.name),
            ));
        }
        if found.len() != self.tensors.len() || bytes != self.bytes {
            let why = format!(
                "{} tensors with {bytes} bytes, expected {} with {}",
                found.len(),
                self.tensors.len(),
                self.bytes
            );
            return Err(CkptError::damaged(dir, "the gathered weights", why));
        }
        Ok(())
    }
}

/// Consecutive elements of an exported weight file, possibly from several tensors, which are read
/// from the checkpoint, converted and written in one step.
#[derive(Default)]
pub(super) struct GatherWindow {
    /// Indices of tensors, each with a range of the tensor's elements.
    pub(super) spans: Vec<(usize, Range<u64>)>,
    /// Total number of elements in `spans`.
    pub(super) elements: usize,
}

impl GatherWindow {
    /// Adds to `names` the name of each tensor that has a NaN or infinite value among `values`, the
    /// elements of this part of a weight file.
    pub(super) fn collect_non_finite_names(
        &self,
        plan: &GatherPlan,
        values: &[f32],
        names: &mut BTreeSet<String>,
    ) {
        let mut rest = values;
        for (tensor, range) in &self.spans {
            let (span, tail) = rest.split_at((range.end - range.start) as usize);
            rest = tail;
            // a fold without early exit is vectorized
            if span.iter().fold(false, |any, x| any | !x.is_finite()) {
                names.insert(plan.tensors[*tensor].name.clone());
            }
        }
    }
}

/// Returns the entries of a JSON object in the order of their keys.
fn sort_keys(map: &Map<String, Value>) -> BTreeMap<&String, &Value> {
    map.iter().collect()
}

/// Derives the content of `generation_config.json` (settings of text generation) from a model's
/// config, in the way in which transformers does. The result contains the special tokens of the
/// model config. Returns `None` if the model config has no special tokens.
fn derive_generation_config(config: &Map<String, Value>) -> Option<BTreeMap<String, Value>> {
    let mut generation: BTreeMap<String, Value> = ["bos_token_id", "eos_token_id", "pad_token_id"]
        .into_iter()
        .filter_map(|key| Some((key.to_owned(), config.get(key).filter(|v| !v.is_null())?.clone())))
        .collect();
    if generation.is_empty() {
        return None;
    }
    generation.insert("_from_model_config".into(), true.into());
    Some(generation)
}

/// Returns the sum of `sizes`, or `u64::MAX` if the sum overflows, because sparse files may have
/// any size.
fn sum_sizes(sizes: &[u64]) -> u64 {
    sizes.iter().fold(0, |sum, size| sum.saturating_add(*size))
}

/// Divides items with the sizes `sizes` into groups (files) of at most `max` bytes, by the
/// algorithm of transformers. An item larger than `max` is alone in its group, and the group of its
/// neighbours continues after the item. Returns the indices of the items of each group, and at
/// least one group.
fn split_into_files_by_size(sizes: &[u64], max: u64) -> Vec<Vec<usize>> {
    let (mut groups, mut current, mut filled) = (Vec::new(), Vec::new(), 0u64);
    for (i, &size) in sizes.iter().enumerate() {
        if size > max {
            groups.push(vec![i]);
            continue;
        }
        if filled.saturating_add(size) > max && !current.is_empty() {
            groups.push(std::mem::take(&mut current));
            filled = 0;
        }
        current.push(i);
        filled = filled.saturating_add(size);
    }
    if !current.is_empty() || groups.is_empty() {
        groups.push(current);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_split_like_in_transformers() {
        assert_eq!(split_into_files_by_size(&[4, 4, 4], 8), [vec![0, 1], vec![2]]);
        assert_eq!(split_into_files_by_size(&[4, 9, 4], 8), [vec![1], vec![0, 2]]);
        assert_eq!(split_into_files_by_size(&[1], 100), [vec![0]]);
        assert_eq!(split_into_files_by_size(&[], 100), [Vec::<usize>::new()]);
        assert_eq!(split_into_files_by_size(&[5, 5], 1), [vec![0], vec![1]]);
    }
}
