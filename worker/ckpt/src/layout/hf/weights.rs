//! Reads weights in the Hugging Face layout: safetensors or `pytorch_model.bin`, each in one file
//! or in shards with an index.
use crate::catalog::{ALLOWED_GLOBALS, ExternalCheckpointBuilder, ExternalTensor, TiedWeight};
use crate::codec::disk::{Directory, is_plain_file_name};
use crate::codec::json::{deserialize_map, parse_object};
use crate::codec::pickle::PickleView;
use crate::codec::safetensors::{self, SafetensorsEntry};
use crate::codec::torch_file::TensorView;
use crate::codec::zip::ZipMember;
use crate::error::{CkptError, DamageReason, MissingPart, Result, format_names};
use crate::format_constants::TENSORS_MAX;
use crate::tensor::{Dtype, TensorRole, check_tensor_name};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Name of the safetensors file that contains all weights of a model, in the Hugging Face layout.
const SAFETENSORS_FILE: &str = "model.safetensors";
/// Name of the torch file that contains all weights of a model, in the Hugging Face layout.
const TORCH_FILE: &str = "pytorch_model.bin";
/// Name of the torch file with the full weights that FSDP training saves.
const FSDP_FILE: &str = "pytorch_model_fsdp.bin";
/// Limit in bytes on the size of an index file, which lists the weight file of each tensor.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// Names of files with weights and of the indices of such files, in order of preference.
pub(crate) const WEIGHTS_FILES: [&str; 5] =
    [SAFETENSORS_FILE, "model.safetensors.index.json", TORCH_FILE, "pytorch_model.bin.index.json", FSDP_FILE];

/// Adds the weights in the Hugging Face files of the checkpoint directory to the checkpoint that is
/// being opened. Of several weights files, uses the first in [`WEIGHTS_FILES`]. Returns false if
/// the directory has no weights file.
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
        TORCH_FILE | FSDP_FILE => add_torch_weights(builder, first, None)?,
        index => add_shards(builder, index)?,
    }
    Ok(true)
}

/// Adds the weights in the file `name`, a weights file or an index of several weights files, to the
/// checkpoint that is being opened. Files without the suffix `.safetensors` are read as torch
/// files.
pub(crate) fn add_weights_file(builder: &mut ExternalCheckpointBuilder, name: &str) -> Result<()> {
    match name.ends_with(".safetensors") {
        true => add_safetensors(builder, name, None),
        false => add_torch_weights(builder, name, None),
    }
}

/// The content of an index file, such as `model.safetensors.index.json`.
#[derive(Deserialize)]
struct WeightIndex {
    /// Maps the name of each tensor to the name of the file that stores it.
    #[serde(deserialize_with = "deserialize_map::<_, _, TENSORS_MAX>")]
    weight_map: BTreeMap<String, String>,
}

/// Reads the index file `name`, which states in which weights file each tensor is stored. Returns a
/// map from the name of each tensor to the name of the file that stores it.
pub(crate) fn read_weight_map(directory: &Directory, name: &str) -> Result<BTreeMap<String, String>> {
    let text = directory.read_file(name, INDEX_BYTES_MAX)?;
    parse_weight_map(&text).map_err(|reason| CkptError::damaged(directory.path(), name, *reason))
}

/// Parses the text of an index file, which states in which weights file each tensor is stored.
/// Returns a map from the name of each tensor to the name of the file that stores it.
pub(crate) fn parse_weight_map(
    text: &[u8],
) -> std::result::Result<BTreeMap<String, String>, Box<DamageReason>> {
    let index: WeightIndex = parse_object(text).map_err(DamageReason::from)?;
    for tensor in index.weight_map.keys() {
        check_tensor_name(tensor).map_err(DamageReason::from)?;
    }
    Ok(index.weight_map)
}

/// Reads the headers of all weights files that the index file `index` lists, and adds their tensors
/// to the opened checkpoint.
///
/// # Errors
/// Fails if the index is invalid, or if a shard is missing or lacks a listed tensor. The error
/// names all missing shards.
fn add_shards(builder: &mut ExternalCheckpointBuilder, index: &str) -> Result<()> {
    let weight_map = read_weight_map(&builder.directory, index)?;
    let mut files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (tensor, file) in &weight_map {
        if !is_plain_file_name(file) {
            let detail = format!("{tensor} is in {file:?}, which is not a valid file name");
            return Err(builder.damaged_file_error(index, detail));
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
        return Err(builder.missing_part_error(MissingPart::IndexedShards {
            files: absent,
            total: files.len(),
            index: index.to_owned(),
        }));
    }
    for (file, expected) in files {
        match file.ends_with(".safetensors") {
            true => add_safetensors(builder, file, Some(&expected))?,
            false => add_torch_weights(builder, file, Some(&expected))?,
        }
    }
    Ok(())
}

/// Fails if the weights file `file` lacks one of the tensors `expected`, which according to the
/// index file are stored in it. `stored` are the names of the tensors in the shard. Adds a notice
/// about tensors that the index does not list. Does nothing without an index.
fn check_indexed_tensors<'n>(
    builder: &mut ExternalCheckpointBuilder,
    file: &str,
    expected: Option<&BTreeSet<&str>>,
    stored: impl Iterator<Item = &'n str>,
) -> Result<()> {
    let Some(expected) = expected else { return Ok(()) };
    let stored: BTreeSet<&str> = stored.collect();
    if let Some(lost) = expected.difference(&stored).next() {
        return Err(
            builder.damaged_file_error(file, DamageReason::TensorMissing { tensor: (*lost).to_owned() })
        );
    }
    let more: Vec<String> = stored.difference(expected).map(|n| (*n).to_owned()).collect();
    if !more.is_empty() {
        builder
            .add_notice(format!("{file} has tensors that the index does not list: {}", format_names(&more)));
    }
    Ok(())
}

/// Adds the tensors of the safetensors file `name` to the checkpoint that is being opened.
/// `expected` are the tensors that the index lists for this file, or `None` without an index.
fn add_safetensors(
    builder: &mut ExternalCheckpointBuilder,
    name: &str,
    expected: Option<&BTreeSet<&str>>,
) -> Result<()> {
    let (header, size) = safetensors::open_header(&builder.directory, name)?;
    check_indexed_tensors(builder, name, expected, header.entries.iter().map(|e| e.name.as_str()))?;
    builder.require_tensor_capacity(name, header.entries.len())?;
    // the format has no CRC-32s, so no message names a member
    let member = |e: &SafetensorsEntry| ZipMember { name: String::new(), data: e.bytes.clone(), crc: None };
    let members = header.entries.iter().map(member).collect();
    let file = builder.store.add_file(&builder.directory, name, size, members);
    for (member, entry) in header.entries.into_iter().enumerate() {
        let role = choose_role(entry.dtype);
        builder.entries.push(ExternalTensor::from_safetensors_entry(entry, role, file, member));
    }
    Ok(())
}

/// Adds the tensors of the torch file `name` to the checkpoint that is being opened. `expected` are
/// the tensors that the index lists for this file, or `None` without an index.
fn add_torch_weights(
    builder: &mut ExternalCheckpointBuilder,
    name: &str,
    expected: Option<&BTreeSet<&str>>,
) -> Result<()> {
    let (index, file) = builder.add_torch_file(name, ALLOWED_GLOBALS)?;
    let root = file.value();
    // some programs save the weights as one entry of a larger dict
    let inner =
        ["state_dict", "model", "module", "model_state_dict"].into_iter().find_map(|key| root.get(key));
    let dict = inner.filter(|v| v.as_pairs().is_some()).unwrap_or(root);
    let pairs =
        dict.as_pairs().ok_or_else(|| builder.damaged_file_error(name, "the file has no dict of tensors"))?;
    let mut found = Vec::new();
    for (key, value) in pairs {
        let key = key
            .as_short_str()
            .ok_or_else(|| builder.damaged_file_error(name, "the name of a tensor is not short text"))?;
        let tensor = file.parse_tensor(value).map_err(|e| builder.damaged_file_error(name, e))?;
        found.extend(tensor.map(|view| (key.to_owned(), view)));
    }
    if found.is_empty() {
        return Err(builder.damaged_file_error(name, "the file has no tensors"));
    }
    check_indexed_tensors(builder, name, expected, found.iter().map(|(n, _)| n.as_str()))?;
    builder.require_tensor_capacity(name, found.len())?;
    add_tensors(builder, index, &found);
    Ok(())
}

/// Adds the tensors that the torch file with the index `file` contains to the checkpoint's tensors,
/// and records a second name of the same data as a tied weight. A tensor at the location of an
/// earlier tensor is recorded as tied to the earlier tensor instead.
fn add_tensors(builder: &mut ExternalCheckpointBuilder, file: usize, found: &[(String, TensorView)]) {
    let mut seen: HashMap<_, &str> = HashMap::new();
    for (name, view) in found {
        if view.element_count() > 0
            && let Some(first) = seen.get(&view.location())
        {
            builder.facts.state.ties.push(TiedWeight { alias: name.clone(), target: (*first).to_owned() });
            continue;
        }
        seen.insert(view.location(), name);
        builder.entries.push(ExternalTensor::from_whole_view(name, choose_role(view.dtype), file, view));
    }
}

/// Determines whether a tensor in a file of weights is a weight or a buffer: floating-point tensors
/// are weights, and all others are buffers.
fn choose_role(dtype: Dtype) -> TensorRole {
    match dtype {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3 | Dtype::F8_E5M2 => {
            TensorRole::Weight
        }
        _ => TensorRole::Buffer,
    }
}

/// Converts a pickled integer or finite float to f64. Returns `None` for other values.
pub(crate) fn read_pickled_number(value: PickleView<'_>) -> Option<f64> {
    value.as_int().map(|i| i as f64).or_else(|| value.as_float().filter(|x| x.is_finite()))
}
