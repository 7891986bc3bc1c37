//! Gathers the weights and buffers of a checkpoint into a Hugging Face directory.
//!
//! Tensors are streamed: read ahead, converted, written behind. The memory doesn't depend on the
//! model size: six windows of 4 MiB, one converted window, the buffers of the readers (2 MiB each)
//! and of one write (24 MiB).
mod adapters;
mod order;
pub(crate) mod output;
mod stream;

use self::output::Output;
use self::stream::{Window, write_weights};
use crate::catalog::{TensorInfo, TensorRole};
use crate::commit::{Swap, publish};
use crate::disk::{self, Directory};
use crate::dtype::Dtype;
use crate::error::{CkptError, OptionProblem, Result};
use crate::formats::safetensors::{self, PlannedTensor};
use crate::source::TensorSource;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Elements converted at a time: 4 MiB of f32.
const WINDOW_ELEMENTS: usize = 1 << 20;
/// Name of the file that identifies a directory of gathered weights and lists its files.
const GATHER_RECORD: &str = "gathered.json";
const GATHER_RECORD_FORMAT: &str = "launch gathered weights";
const CONFIG: &str = "config.json";
/// Stem of the weight files' names.
const MODEL: &str = "model";
const GENERATION: &str = "generation_config.json";
const INDEX: &str = "model.safetensors.index.json";

/// Options of [`gather`].
#[derive(Clone, Debug)]
pub struct GatherOptions {
    /// F32, BF16 or F16. By default the dtype in which a native checkpoint stores its weights, F32
    /// for an external checkpoint.
    pub dtype: Option<Dtype>,
    /// Most bytes of tensors in one file; a larger tensor gets a separate file.
    pub max_shard_size: u64,
    /// Replace an output directory that an earlier gather made.
    pub force: bool,
    /// Merge low-rank adapters into their matrices. Otherwise a checkpoint with adapters is
    /// gathered as a PEFT directory with only the adapters.
    pub merge_lora: bool,
}

impl Default for GatherOptions {
    fn default() -> GatherOptions {
        GatherOptions { dtype: None, max_shard_size: 5_000_000_000, force: false, merge_lora: false }
    }
}

/// The result of a gather.
#[derive(Clone, Debug, serde::Serialize)]
pub struct GatherReport {
    /// The output directory.
    pub path: PathBuf,
    /// Dtype of the written tensors.
    pub dtype: Dtype,
    /// Number of tensors.
    pub tensors: u64,
    /// Total size of the tensors.
    pub bytes: u64,
    /// The weight files.
    pub files: Vec<GatheredFile>,
    /// Whether `config.json` was written; an external checkpoint may have none.
    pub config: bool,
    /// Names of integer buffers, which are not gathered.
    pub left_out: Vec<String>,
    /// Names of tensors with NaN or infinite values, which are gathered unchanged.
    pub not_finite: Vec<String>,
}

/// One file of weights.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GatheredFile {
    /// Name in the output directory.
    pub name: String,
    /// Size of the file.
    pub bytes: u64,
}

/// Writes the directory `out`: config.json, the weights in one file or in shards with an index, and
/// the tokenizer's files. A checkpoint with low-rank adapters gives a PEFT directory unless the
/// adapters are merged. Values are rounded to nearest, ties to even. `progress` gets (bytes
/// written, total bytes).
///
/// `out` is either complete or absent. It may exist if it is empty or, with `force`, if a gather
/// made it.
///
/// # Errors
/// When a finite value is outside of the range of the dtype, the checkpoint is damaged or
/// incomplete, `out` can't be replaced, or I/O fails.
pub fn gather(
    checkpoint: &dyn TensorSource,
    out: &Path,
    options: &GatherOptions,
    progress: impl FnMut(u64, u64),
) -> Result<GatherReport> {
    checkpoint.require_weights()?;
    let view = adapters::adapter_view(checkpoint, options.merge_lora)?;
    let (checkpoint, stem) = view.as_ref().map_or((checkpoint, MODEL), |v| (v.source.as_ref(), v.stem));
    let plan = GatherPlan::new(checkpoint, options, stem)?;
    let out = Output::begin(checkpoint.path(), out, options.force, plan.bytes)?;
    let (files, not_finite) = write_weights(checkpoint, &plan, &out.dir, progress)?;
    let mut names: Vec<&str> = files.iter().map(|f| f.name.as_str()).collect();
    let texts = plan.texts(checkpoint)?;
    for (name, text) in &texts {
        if names.contains(&name.as_str()) {
            return Err(CkptError::invalid_option(OptionProblem::FileNameTaken { name: name.clone() }));
        }
        names.push(name);
        disk::write_file(out.dir.join(name), text.as_bytes())?;
    }
    checkpoint.verify_reads(false)?;
    plan.check_written(&out.dir, &files)?;
    let gathered = json!({
        "format": GATHER_RECORD_FORMAT, "program": format!("launch {}", env!("CARGO_PKG_VERSION")), "files": names,
        "step": checkpoint.step(), "tokens": checkpoint.tokens(), "dtype": plan.dtype.torch_name(),
    });
    disk::write_file(out.dir.join(GATHER_RECORD), to_pretty_json(&gathered)?.as_bytes())?;
    disk::sync_dir(&out.dir)?;
    publish(&out.dir, &out.path, Swap::Atomic)?;
    let path = out.path.clone();
    Ok(GatherReport {
        path,
        dtype: plan.dtype,
        tensors: plan.tensors.len() as u64,
        bytes: plan.bytes,
        files,
        config: checkpoint.hf_config().is_some() || stem != MODEL,
        left_out: plan.left_out,
        not_finite: not_finite.into_iter().collect(),
    })
}

fn to_pretty_json(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_json::to_string_pretty(value).map_err(CkptError::invalid_save)?;
    Ok(text + "\n")
}

/// The tensors to write and their files.
struct GatherPlan {
    dtype: Dtype,
    tensors: Vec<TensorInfo>,
    /// Each file's name and the indices of its tensors.
    files: Vec<(String, Vec<usize>)>,
    bytes: u64,
    left_out: Vec<String>,
}

impl GatherPlan {
    fn new(checkpoint: &dyn TensorSource, options: &GatherOptions, stem: &str) -> Result<GatherPlan> {
        let dtype = options.dtype.unwrap_or_else(|| checkpoint.weights_dtype());
        if !dtype.is_float() {
            return Err(CkptError::invalid_option(OptionProblem::Dtype { dtype }));
        }
        let is_model_tensor = |t: &TensorInfo| matches!(t.role, TensorRole::Weight | TensorRole::Buffer);
        let readable = |t: &TensorInfo| t.role == TensorRole::Weight || t.dtype.is_float();
        let (tensors, others): (Vec<TensorInfo>, Vec<TensorInfo>) =
            checkpoint.tensors().into_iter().filter(is_model_tensor).partition(readable);
        let tensors = order::sort_as_saved(tensors);
        let left_out = others.into_iter().map(|t| t.name).collect();
        let sizes: Vec<u64> = tensors.iter().map(|t| t.elements() * dtype.size()).collect();
        // PEFT reads a single file
        let limit = if stem == MODEL { options.max_shard_size } else { u64::MAX };
        let units = order::shard_units(&tensors);
        let unit_sizes: Vec<u64> = units.iter().map(|unit| sizes[unit.clone()].iter().sum()).collect();
        let groups = split(&unit_sizes, limit);
        let count = groups.len();
        let file_name = |i: usize| match count {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let members = |group: Vec<usize>| group.into_iter().flat_map(|unit| units[unit].clone()).collect();
        let files = groups.into_iter().enumerate().map(|(i, group)| (file_name(i), members(group))).collect();
        Ok(GatherPlan { dtype, tensors, files, bytes: sizes.iter().sum(), left_out })
    }

    fn encode_header(&self, file: usize) -> Result<Vec<u8>> {
        let tensor = |&i: &usize| {
            let t = &self.tensors[i];
            PlannedTensor { name: t.name.clone(), dtype: self.dtype, shape: &t.shape }
        };
        let planned: Vec<PlannedTensor<'_>> = self.files[file].1.iter().map(tensor).collect();
        safetensors::header(&[("format", "pt".to_owned())], &planned).map_err(CkptError::invalid_save)
    }

    /// The windows of one file, in the order of writing.
    fn windows(&self, file: usize) -> Vec<Window> {
        let mut windows = vec![Window::default()];
        for &tensor in &self.files[file].1 {
            let total = self.tensors[tensor].elements();
            let mut start = 0;
            while start < total {
                let mut last = windows.len() - 1;
                if windows[last].elements == WINDOW_ELEMENTS {
                    windows.push(Window::default());
                    last += 1;
                }
                let count = (total - start).min((WINDOW_ELEMENTS - windows[last].elements) as u64);
                windows[last].spans.push((tensor, start..start + count));
                windows[last].elements += count as usize;
                start += count;
            }
        }
        windows
    }

    /// The text files, as names and contents.
    fn texts(&self, checkpoint: &dyn TensorSource) -> Result<Vec<(String, String)>> {
        let mut texts = Vec::new();
        if let Some(config) = checkpoint.hf_config() {
            texts = self.config(checkpoint, config.clone())?;
        }
        if self.files.len() > 1 {
            texts.push((INDEX.to_owned(), to_pretty_json(&self.index())?));
        }
        if checkpoint.texts().iter().any(|t| t.name == GATHER_RECORD) {
            let name = GATHER_RECORD.to_owned();
            return Err(CkptError::invalid_option(OptionProblem::FileNameTaken { name }));
        }
        texts.extend(checkpoint.texts().iter().map(|t| (t.name.clone(), t.text.clone())));
        Ok(texts)
    }

    /// `config.json` with the gathered dtype, and `generation_config.json` where the checkpoint has
    /// none.
    fn config(
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
        let mut texts = vec![(CONFIG.to_owned(), to_pretty_json(&sorted(&config))?)];
        let has_text = |name: &str| checkpoint.texts().iter().any(|t| t.name == name);
        if let Some(generation) = generation_config(&config).filter(|_| !has_text(GENERATION)) {
            texts.push((GENERATION.to_owned(), to_pretty_json(&generation)?));
        }
        Ok(texts)
    }

    fn index(&self) -> Value {
        let file_of = |(name, group): &(String, Vec<usize>)| {
            group.iter().map(|&i| (self.tensors[i].name.clone(), name.clone())).collect::<Vec<_>>()
        };
        let map: BTreeMap<String, String> = self.files.iter().flat_map(file_of).collect();
        let parameters: u64 = self.tensors.iter().map(TensorInfo::elements).sum();
        json!({"metadata": {"total_parameters": parameters, "total_size": self.bytes}, "weight_map": map})
    }

    /// Reads the headers back and checks that the files contain each planned tensor with its shape,
    /// and nothing else.
    fn check_written(&self, dir: &Path, files: &[GatheredFile]) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let directory = Directory::open(dir)?;
        let mut found: HashMap<String, (Dtype, Vec<u64>)> = HashMap::new();
        let mut bytes = 0;
        for file in files {
            let (open, size) = directory.open_file(&file.name, nix::fcntl::OFlag::empty())?;
            let header = safetensors::read_header(size, |at, out| open.read_exact_at(out, at))
                .map_err(|why| CkptError::damaged(dir, &file.name, why))?;
            for e in header.entries {
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

/// The map with its keys sorted.
fn sorted(map: &Map<String, Value>) -> BTreeMap<&String, &Value> {
    map.iter().collect()
}

/// The generation config that transformers derives from a model config: its special tokens.
fn generation_config(config: &Map<String, Value>) -> Option<BTreeMap<String, Value>> {
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

/// Splits tensors into groups of at most `max` bytes, at least one group. A larger tensor is alone
/// in its group and doesn't end the group around it, like in transformers.
fn split(sizes: &[u64], max: u64) -> Vec<Vec<usize>> {
    let (mut groups, mut current, mut filled) = (Vec::new(), Vec::new(), 0u64);
    for (i, &size) in sizes.iter().enumerate() {
        if size > max {
            groups.push(vec![i]);
            continue;
        }
        if filled + size > max && !current.is_empty() {
            groups.push(std::mem::take(&mut current));
            filled = 0;
        }
        current.push(i);
        filled += size;
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
        assert_eq!(split(&[4, 4, 4], 8), [vec![0, 1], vec![2]]);
        assert_eq!(split(&[4, 9, 4], 8), [vec![1], vec![0, 2]]);
        assert_eq!(split(&[1], 100), [vec![0]]);
        assert_eq!(split(&[], 100), [Vec::<usize>::new()]);
        assert_eq!(split(&[5, 5], 1), [vec![0], vec![1]]);
    }
}
