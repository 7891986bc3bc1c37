//! Writes the weights and buffers of a checkpoint as a Hugging Face folder, streaming: read ahead, convert, write behind.
//!
//! Extra memory is the same for every model size: six windows of 4 MiB, one converted window, and the buffers of the
//! readers (2 MiB each) and of one write (24 MiB).
mod adapters;
mod order;
pub(crate) mod output;
mod stream;

use self::output::Output;
use self::stream::{Window, write_weights};
use crate::catalog::{Role, TensorInfo};
use crate::commit::{Swap, publish};
use crate::disk::{self, Folder};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::formats::safetensors::{self, Planned};
use crate::source::Source;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Elements converted at a time: 4 MiB of f32.
const WINDOW_ELEMENTS: usize = 1 << 20;
/// Says that a folder is ours and which files in it are.
const GATHERED: &str = "gathered.json";
const GATHERED_FORMAT: &str = "launch gathered weights";
const CONFIG: &str = "config.json";
/// Name of the weight files, without their ending.
const MODEL: &str = "model";
const GENERATION: &str = "generation_config.json";
const INDEX: &str = "model.safetensors.index.json";

/// How to gather.
#[derive(Clone, Debug)]
pub struct GatherOptions {
    /// F32, BF16 or F16; `None`: as a checkpoint of ours keeps them, of others F32.
    pub dtype: Option<Dtype>,
    /// Files are begun anew before they would exceed this many bytes of tensors; a larger tensor has its own file.
    pub max_shard_size: u64,
    /// Replace a folder that was made by gathering.
    pub force: bool,
    /// Add low-rank adapters to the matrices that they belong to; else a checkpoint with adapters gives a folder of them alone.
    pub merge_lora: bool,
}

impl Default for GatherOptions {
    fn default() -> GatherOptions {
        GatherOptions { dtype: None, max_shard_size: 5_000_000_000, force: false, merge_lora: false }
    }
}

/// What was written.
#[derive(Clone, Debug, serde::Serialize)]
pub struct GatherReport {
    pub path: PathBuf,
    pub dtype: Dtype,
    pub tensors: u64,
    /// Of the tensors.
    pub bytes: u64,
    /// The weight files.
    pub files: Vec<GatheredFile>,
    /// There is a configuration; a checkpoint of another program may have none.
    pub config: bool,
    /// Buffers that are no floating point numbers, which are not gathered.
    pub left_out: Vec<String>,
    /// Tensors with NaN or infinite values, which are gathered as they are.
    pub not_finite: Vec<String>,
}

/// One file of weights.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GatheredFile {
    pub name: String,
    pub bytes: u64,
}

/// Writes `out`: config.json, the weights in one file or in shards with an index, and the tokenizer's files; of a checkpoint
/// with low-rank adapters a folder as PEFT writes it, unless they are merged. Values
/// are rounded to the nearest, ties to even; a finite value that the dtype can't hold is an error. `progress` gets
/// (bytes written, bytes to write) of the tensors.
///
/// `out` is complete or absent. It may exist when it is empty or, with `force`, when it was made by gathering.
pub fn gather(
    checkpoint: &dyn Source,
    out: &Path,
    options: &GatherOptions,
    progress: impl FnMut(u64, u64),
) -> Result<GatherReport> {
    checkpoint.require_weights()?;
    let seen = adapters::seen(checkpoint, options.merge_lora)?;
    let (checkpoint, stem) = seen.as_ref().map_or((checkpoint, MODEL), |s| (s.source.as_ref(), s.stem));
    let plan = Plan::new(checkpoint, options, stem)?;
    let out = Output::begin(checkpoint.path(), out, options.force, plan.bytes)?;
    let (files, not_finite) = write_weights(checkpoint, &plan, &out.dir, progress)?;
    let mut names: Vec<&str> = files.iter().map(|f| f.name.as_str()).collect();
    let texts = plan.texts(checkpoint)?;
    for (name, text) in &texts {
        if names.contains(&name.as_str()) {
            return Err(CkptError::invalid(format!(
                "the tokenizer has a file {name}, which is the name of another"
            )));
        }
        names.push(name);
        disk::write_file(out.dir.join(name), text.as_bytes())?;
    }
    checkpoint.settle(false)?;
    plan.check_written(&out.dir, &files)?;
    let gathered = json!({
        "format": GATHERED_FORMAT, "program": format!("launch {}", env!("CARGO_PKG_VERSION")), "files": names,
        "step": checkpoint.step(), "tokens": checkpoint.tokens(), "dtype": plan.dtype.torch_name(),
    });
    disk::write_file(out.dir.join(GATHERED), pretty(&gathered)?.as_bytes())?;
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

fn pretty(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_json::to_string_pretty(value).map_err(|e| CkptError::invalid(e.to_string()))?;
    Ok(text + "\n")
}

/// What goes where.
struct Plan {
    dtype: Dtype,
    tensors: Vec<TensorInfo>,
    /// Name of each file and the indices of its tensors.
    files: Vec<(String, Vec<usize>)>,
    bytes: u64,
    left_out: Vec<String>,
}

impl Plan {
    fn new(checkpoint: &dyn Source, options: &GatherOptions, stem: &str) -> Result<Plan> {
        let dtype = options.dtype.unwrap_or_else(|| checkpoint.weights_dtype());
        if !dtype.is_float() {
            return Err(CkptError::invalid(format!("weights are gathered as F32, BF16 or F16, not {dtype}")));
        }
        let of_model = |t: &TensorInfo| matches!(t.role, Role::Weight | Role::Buffer);
        let readable = |t: &TensorInfo| t.role == Role::Weight || t.dtype.is_float();
        let (tensors, others): (Vec<TensorInfo>, Vec<TensorInfo>) =
            checkpoint.tensors().into_iter().filter(of_model).partition(readable);
        let tensors = order::sort(tensors);
        let left_out = others.into_iter().map(|t| t.name).collect();
        let sizes: Vec<u64> = tensors.iter().map(|t| t.elements() * dtype.size()).collect();
        // PEFT knows one file only
        let limit = if stem == MODEL { options.max_shard_size } else { u64::MAX };
        let units = order::units(&tensors);
        let unit_sizes: Vec<u64> = units.iter().map(|unit| sizes[unit.clone()].iter().sum()).collect();
        let groups = split(&unit_sizes, limit);
        let count = groups.len();
        let name = |i: usize| match count {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let members = |group: Vec<usize>| group.into_iter().flat_map(|unit| units[unit].clone()).collect();
        let files = groups.into_iter().enumerate().map(|(i, group)| (name(i), members(group))).collect();
        Ok(Plan { dtype, tensors, files, bytes: sizes.iter().sum(), left_out })
    }

    fn header(&self, file: usize) -> Result<Vec<u8>> {
        let tensor = |&i: &usize| {
            let t = &self.tensors[i];
            Planned { name: t.name.clone(), dtype: self.dtype, shape: &t.shape }
        };
        let planned: Vec<Planned<'_>> = self.files[file].1.iter().map(tensor).collect();
        safetensors::header(&[("format", "pt".to_owned())], &planned).map_err(CkptError::invalid)
    }

    /// The windows of one file, in the order in which they are written.
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

    /// The text files: name and content.
    fn texts(&self, checkpoint: &dyn Source) -> Result<Vec<(String, String)>> {
        let mut texts = Vec::new();
        if let Some(config) = checkpoint.hf_config() {
            texts = self.config(checkpoint, config.clone())?;
        }
        if self.files.len() > 1 {
            texts.push((INDEX.to_owned(), pretty(&self.index())?));
        }
        if checkpoint.texts().iter().any(|t| t.name == GATHERED) {
            return Err(CkptError::invalid(format!(
                "the tokenizer has a file {GATHERED}, which is the name of another"
            )));
        }
        texts.extend(checkpoint.texts().iter().map(|t| (t.name.clone(), t.text.clone())));
        Ok(texts)
    }

    /// `config.json` of the gathered dtype, and `generation_config.json` where the checkpoint has none.
    fn config(
        &self,
        checkpoint: &dyn Source,
        mut config: Map<String, Value>,
    ) -> Result<Vec<(String, String)>> {
        // both names are in use: `torch_dtype` up to transformers 4, `dtype` from 5; the older one is known to all
        let named = ["torch_dtype", "dtype"].map(|key| config.contains_key(key).then_some(key));
        let named = if named == [None, None] { [Some("torch_dtype"), None] } else { named };
        for key in named.into_iter().flatten() {
            config.insert(key.into(), self.dtype.torch_name().into());
        }
        let mut texts = vec![(CONFIG.to_owned(), pretty(&sorted(&config))?)];
        let own = |name: &str| checkpoint.texts().iter().any(|t| t.name == name);
        if let Some(generation) = generation_config(&config).filter(|_| !own(GENERATION)) {
            texts.push((GENERATION.to_owned(), pretty(&generation)?));
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

    /// Reads the headers back: every weight of the model card is there once, with its shape, and nothing else is.
    fn check_written(&self, dir: &Path, files: &[GatheredFile]) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let folder = Folder::open(dir)?;
        let mut found: HashMap<String, (Dtype, Vec<u64>)> = HashMap::new();
        let mut bytes = 0;
        for file in files {
            let (open, size) = folder.open_file(&file.name, nix::fcntl::OFlag::empty())?;
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
                format!("{} is not as in the model", t.name),
            ));
        }
        if found.len() != self.tensors.len() || bytes != self.bytes {
            let why = format!(
                "{} tensors of {bytes} bytes, not {} of {}",
                found.len(),
                self.tensors.len(),
                self.bytes
            );
            return Err(CkptError::damaged(dir, "the gathered weights", why));
        }
        Ok(())
    }
}

/// Keys in order, whatever order the map keeps.
fn sorted(map: &Map<String, Value>) -> BTreeMap<&String, &Value> {
    map.iter().collect()
}

/// The special tokens of the model config, as transformers derives its generation config from it.
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

/// Groups of consecutive tensors of at most `max` bytes; a larger tensor is alone. At least one group.
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
    fn tensors_are_split_as_transformers_does() {
        assert_eq!(split(&[4, 4, 4], 8), [vec![0, 1], vec![2]]);
        // a tensor above the limit is alone and does not end the group around it
        assert_eq!(split(&[4, 9, 4], 8), [vec![1], vec![0, 2]]);
        assert_eq!(split(&[1], 100), [vec![0]]);
        assert_eq!(split(&[], 100), [Vec::<usize>::new()]);
        assert_eq!(split(&[5, 5], 1), [vec![0], vec![1]]);
    }
}
