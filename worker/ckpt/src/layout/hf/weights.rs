//! Reads weights in the Hugging Face layout, which is safetensors or `pytorch_model.bin`, in one
//! file or in shards with an index.
use crate::catalog::{ExternalCheckpointBuilder, ExternalTensor, GLOBALS, StoredFile, TiedWeight};
use crate::codec::disk::is_plain_file_name;
use crate::codec::pickle::PickleView;
use crate::codec::safetensors;
use crate::codec::torch_file::TensorView;
use crate::codec::zip::ZipMember;
use crate::error::{DamageReason, MissingPart, Result, format_names};
use crate::tensor::{Dtype, TensorRole};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::FileExt;

/// Name of a safetensors file with all weights.
const SAFETENSORS_FILE: &str = "model.safetensors";
/// Name of a torch file with all weights.
const TORCH_FILE: &str = "pytorch_model.bin";
/// Name of the torch file with the full weights of FSDP training.
const FSDP_FILE: &str = "pytorch_model_fsdp.bin";
/// Limit on the size of an index file, in bytes.
const INDEX_MAX: u64 = 64 << 20;

/// Names of weights files and of their indices, in order of preference.
pub(crate) const WEIGHTS_FILES: [&str; 5] =
    [SAFETENSORS_FILE, "model.safetensors.index.json", TORCH_FILE, "pytorch_model.bin.index.json", FSDP_FILE];

/// Adds the weights in the builder's directory to the builder. Of several weights files, uses the
/// first in [`WEIGHTS_FILES`]. Returns false if the directory has no weights file.
pub(crate) fn add_weights(builder: &mut ExternalCheckpointBuilder) -> Result<bool> {
    let mut present = Vec::new();
    for name in WEIGHTS_FILES {
        if builder.directory.file_size(name)?.is_some() {
            present.push(name);
        }
    }
    let Some((&first, others)) = present.split_first() else { return Ok(false) };
    if !others.is_empty() {
        builder.add_notice(format!("using the weights in {first}; there is also {}", others.join(" and ")));
    }
    match first {
        SAFETENSORS_FILE => add_safetensors(builder, first, None)?,
        TORCH_FILE | FSDP_FILE => add_bin(builder, first, None)?,
        index => add_shards(builder, index)?,
    }
    Ok(true)
}

/// Adds the weights in the file `name` to the builder. Files without the suffix `.safetensors` are
/// read as torch files.
pub(crate) fn add_weights_file(builder: &mut ExternalCheckpointBuilder, name: &str) -> Result<()> {
    match name.ends_with(".safetensors") {
        true => add_safetensors(builder, name, None),
        false => add_bin(builder, name, None),
    }
}

/// The content of an index file, such as `model.safetensors.index.json`.
#[derive(Deserialize)]
struct WeightIndex {
    /// Name of the file that has each tensor, by tensor name.
    weight_map: BTreeMap<String, String>,
}

/// Adds the tensors of all shards that the index file `index` lists to the builder.
///
/// # Errors
/// Fails if the index is invalid, or if a shard is missing or lacks a listed tensor. The error
/// names all missing shards.
fn add_shards(builder: &mut ExternalCheckpointBuilder, index: &str) -> Result<()> {
    let text = builder.directory.read_file(index, INDEX_MAX)?;
    let parsed: WeightIndex = serde_json::from_slice(&text).map_err(|e| builder.damaged(index, e))?;
    let mut files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (tensor, file) in &parsed.weight_map {
        if !is_plain_file_name(file) {
            let detail = format!("{tensor} is in {file:?}, which is not a valid file name");
            return Err(builder.damaged(index, detail));
        }
        files.entry(file).or_default().insert(tensor);
    }
    let mut absent = Vec::new();
    for file in files.keys() {
        if builder.directory.file_size(file)?.is_none() {
            absent.push((*file).to_owned());
        }
    }
    if !absent.is_empty() {
        return Err(builder.missing(MissingPart::IndexedShards {
            files: absent,
            total: files.len(),
            index: index.to_owned(),
        }));
    }
    for (file, expected) in files {
        match file.ends_with(".safetensors") {
            true => add_safetensors(builder, file, Some(&expected))?,
            false => add_bin(builder, file, Some(&expected))?,
        }
    }
    Ok(())
}

/// Fails if the shard `file` lacks a tensor in `expected`, the tensors that the index lists for
/// this shard. Adds a notice about tensors that the index does not list. Does nothing without an
/// index.
fn check_indexed_tensors(
    builder: &mut ExternalCheckpointBuilder,
    file: &str,
    expected: Option<&BTreeSet<&str>>,
    found: &[(String, TensorView)],
) -> Result<()> {
    let Some(expected) = expected else { return Ok(()) };
    let stored: BTreeSet<&str> = found.iter().map(|(n, _)| n.as_str()).collect();
    if let Some(lost) = expected.difference(&stored).next() {
        return Err(builder.damaged(file, DamageReason::TensorMissing { tensor: (*lost).to_owned() }));
    }
    let more: Vec<String> = stored.difference(expected).map(|n| (*n).to_owned()).collect();
    if !more.is_empty() {
        builder
            .add_notice(format!("{file} has tensors that the index does not list: {}", format_names(&more)));
    }
    Ok(())
}

/// Adds the tensors of the safetensors file `name` to the builder. `expected` are the tensors that
/// the index lists for this file, or `None` without an index.
fn add_safetensors(
    builder: &mut ExternalCheckpointBuilder,
    name: &str,
    expected: Option<&BTreeSet<&str>>,
) -> Result<()> {
    let (file, size) = builder.directory.open_file(name, nix::fcntl::OFlag::empty())?;
    let header = safetensors::read_header(size, |at, out| file.read_exact_at(out, at));
    let header = header.map_err(|error| builder.damaged(name, error))?;
    let mut stored = StoredFile::new(builder.directory.clone(), name.to_owned(), size);
    let member = |e: &safetensors::SafetensorsEntry| ZipMember {
        name: e.name.clone(),
        data: e.bytes.clone(),
        crc: None,
    };
    stored.add_spans(header.entries.iter().map(member).collect());
    builder.store.files.push(stored);
    let view = |(member, e): (usize, safetensors::SafetensorsEntry)| {
        let (shape, strides) = (e.shape.clone(), compute_contiguous_strides(&e.shape));
        (e.name, TensorView { dtype: e.dtype, shape, strides, member, offset: 0 })
    };
    let found: Vec<(String, TensorView)> = header.entries.into_iter().enumerate().map(view).collect();
    check_indexed_tensors(builder, name, expected, &found)?;
    add_tensors(builder, builder.store.files.len() - 1, &found);
    Ok(())
}

/// Computes the strides of a contiguous row-major tensor, in elements.
fn compute_contiguous_strides(shape: &[u64]) -> Vec<u64> {
    (0..shape.len()).map(|i| shape[i + 1..].iter().fold(1u64, |n, &d| n.saturating_mul(d))).collect()
}

/// Adds the tensors of the torch file `name` to the builder. `expected` are the tensors that the
/// index lists for this file, or `None` without an index.
fn add_bin(
    builder: &mut ExternalCheckpointBuilder,
    name: &str,
    expected: Option<&BTreeSet<&str>>,
) -> Result<()> {
    let (index, file) = builder.add_torch_file(name, GLOBALS)?;
    let root = file.value();
    // some programs save the weights as one entry of a larger dict
    let inner =
        ["state_dict", "model", "module", "model_state_dict"].into_iter().find_map(|key| root.get(key));
    let dict = inner.filter(|v| v.as_pairs().is_some()).unwrap_or(root);
    let pairs = dict.as_pairs().ok_or_else(|| builder.damaged(name, "the file has no dict of tensors"))?;
    let mut found = Vec::new();
    for (key, value) in pairs {
        let key = key.as_str().ok_or_else(|| builder.damaged(name, "the name of a tensor is not text"))?;
        let tensor = file.parse_tensor(value).map_err(|e| builder.damaged(name, e))?;
        found.extend(tensor.map(|view| (key.to_owned(), view)));
    }
    if found.is_empty() {
        return Err(builder.damaged(name, "the file has no tensors"));
    }
    check_indexed_tensors(builder, name, expected, &found)?;
    add_tensors(builder, index, &found);
    Ok(())
}

/// Adds the tensors `found` of the file with index `file` to the builder. A tensor at the location
/// of an earlier tensor is recorded as tied to the earlier tensor instead.
fn add_tensors(builder: &mut ExternalCheckpointBuilder, file: usize, found: &[(String, TensorView)]) {
    let mut seen: HashMap<_, &str> = HashMap::new();
    for (name, view) in found {
        if view.elements() > 0
            && let Some(first) = seen.get(&view.location())
        {
            builder.facts.state.ties.push(TiedWeight { alias: name.clone(), target: (*first).to_owned() });
            continue;
        }
        seen.insert(view.location(), name);
        let role = if is_trainable(view.dtype) { TensorRole::Weight } else { TensorRole::Buffer };
        builder.entries.push(ExternalTensor::from_whole_view(name, role, file, view));
    }
}

/// Returns true for floating-point dtypes. Tensors of other dtypes are buffers.
fn is_trainable(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3 | Dtype::F8_E5M2)
}

/// Returns the number in an integer or float. Returns `None` for other values.
pub(crate) fn parse_number(value: PickleView<'_>) -> Option<f64> {
    value.as_int().map(|i| i as f64).or_else(|| value.to_json().as_f64())
}
