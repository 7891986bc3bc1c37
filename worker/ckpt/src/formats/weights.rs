//! Reads weights in the Hugging Face layout: safetensors or `pytorch_model.bin`, one file or shards
//! with an index.
use super::safetensors;
use super::torch_file::TensorView;
use super::zip::Member;
use crate::catalog::{TensorRole, Tie, is_plain_file_name};
use crate::dtype::Dtype;
use crate::error::{DamageReason, MissingPart, Result, list_some};
use crate::external::ExternalTensor;
use crate::external::builder::{CheckpointBuilder, GLOBALS};
use crate::external::store::StoredFile;
use crate::pickle::View;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::FileExt;

const SAFETENSORS: &str = "model.safetensors";
const BIN: &str = "pytorch_model.bin";
const FSDP: &str = "pytorch_model_fsdp.bin";
/// Limit on the index, bytes.
const INDEX_MAX: u64 = 64 << 20;

/// The names of weights files, in order of preference.
pub(crate) const FILES: [&str; 5] =
    [SAFETENSORS, "model.safetensors.index.json", BIN, "pytorch_model.bin.index.json", FSDP];

/// Adds the weights in the directory. False when it has none.
pub(crate) fn add(builder: &mut CheckpointBuilder) -> Result<bool> {
    let mut present = Vec::new();
    for name in FILES {
        if builder.directory.size_of(name)?.is_some() {
            present.push(name);
        }
    }
    let Some((&first, others)) = present.split_first() else { return Ok(false) };
    if !others.is_empty() {
        builder.add_notice(format!("using the weights in {first}; there is also {}", others.join(" and ")));
    }
    match first {
        SAFETENSORS => add_safetensors(builder, first, None)?,
        BIN | FSDP => add_bin(builder, first, None)?,
        index => add_shards(builder, index)?,
    }
    Ok(true)
}

/// Adds the weights in a single file.
pub(crate) fn add_file(builder: &mut CheckpointBuilder, name: &str) -> Result<()> {
    match name.ends_with(".safetensors") {
        true => add_safetensors(builder, name, None),
        false => add_bin(builder, name, None),
    }
}

#[derive(Deserialize)]
struct WeightIndex {
    weight_map: BTreeMap<String, String>,
}

fn add_shards(builder: &mut CheckpointBuilder, index: &str) -> Result<()> {
    let text = builder.directory.read(index, INDEX_MAX)?;
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
        if builder.directory.size_of(file)?.is_none() {
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

/// Checks that a shard has every tensor that the index lists for it; reports additional ones.
fn check_index(
    builder: &mut CheckpointBuilder,
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
        builder.add_notice(format!("{file} has tensors that the index does not list: {}", list_some(&more)));
    }
    Ok(())
}

fn add_safetensors(
    builder: &mut CheckpointBuilder,
    name: &str,
    expected: Option<&BTreeSet<&str>>,
) -> Result<()> {
    let (file, size) = builder.directory.open_file(name, nix::fcntl::OFlag::empty())?;
    let header = safetensors::read_header(size, |at, out| file.read_exact_at(out, at));
    let header = header.map_err(|error| builder.damaged(name, error))?;
    let mut stored = StoredFile::new(builder.directory.clone(), name.to_owned(), size);
    let member = |e: &safetensors::Entry| Member { name: e.name.clone(), data: e.bytes.clone(), crc: None };
    stored.add(header.entries.iter().map(member).collect());
    builder.store.files.push(stored);
    let view = |(member, e): (usize, safetensors::Entry)| {
        let (shape, strides) = (e.shape.clone(), contiguous_strides(&e.shape));
        (e.name, TensorView { dtype: e.dtype, shape, strides, member, offset: 0 })
    };
    let found: Vec<(String, TensorView)> = header.entries.into_iter().enumerate().map(view).collect();
    check_index(builder, name, expected, &found)?;
    add_tensors(builder, builder.store.files.len() - 1, &found);
    Ok(())
}

/// The strides of a contiguous tensor.
fn contiguous_strides(shape: &[u64]) -> Vec<u64> {
    (0..shape.len()).map(|i| shape[i + 1..].iter().fold(1u64, |n, &d| n.saturating_mul(d))).collect()
}

fn add_bin(builder: &mut CheckpointBuilder, name: &str, expected: Option<&BTreeSet<&str>>) -> Result<()> {
    let (index, file) = builder.open_torch_file(name, GLOBALS)?;
    let root = file.value();
    // some programs save the weights within a larger dict
    let inner =
        ["state_dict", "model", "module", "model_state_dict"].into_iter().find_map(|key| root.get(key));
    let dict = inner.filter(|v| v.pairs().is_some()).unwrap_or(root);
    let pairs = dict.pairs().ok_or_else(|| builder.damaged(name, "the file has no dict of tensors"))?;
    let mut found = Vec::new();
    for (key, value) in pairs {
        let key = key.str().ok_or_else(|| builder.damaged(name, "the name of a tensor is not text"))?;
        let tensor = file.tensor(value).map_err(|e| builder.damaged(name, e))?;
        found.extend(tensor.map(|view| (key.to_owned(), view)));
    }
    if found.is_empty() {
        return Err(builder.damaged(name, "the file has no tensors"));
    }
    check_index(builder, name, expected, &found)?;
    add_tensors(builder, index, &found);
    Ok(())
}

/// Adds the tensors of a file. Tensors at the same location are tied to the first one.
fn add_tensors(builder: &mut CheckpointBuilder, file: usize, found: &[(String, TensorView)]) {
    let mut seen: HashMap<_, &str> = HashMap::new();
    for (name, view) in found {
        if view.elements() > 0
            && let Some(first) = seen.get(&view.location())
        {
            builder.facts.ties.push(Tie { alias: name.clone(), target: (*first).to_owned() });
            continue;
        }
        seen.insert(view.location(), name);
        let role = if is_trainable(view.dtype) { TensorRole::Weight } else { TensorRole::Buffer };
        builder.entries.push(ExternalTensor::whole(name, role, file, view));
    }
}

/// True for floating-point dtypes; other tensors are buffers.
fn is_trainable(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3 | Dtype::F8_E5M2)
}

/// The number in a value, whether an integer or a float.
pub(crate) fn number(value: View<'_>) -> Option<f64> {
    value.int().map(|i| i as f64).or_else(|| value.json().as_f64())
}
