//! Weights as Hugging Face keeps them: safetensors or `pytorch_model.bin`, whole or in shards with an index.
use super::safetensors;
use super::torch_file::TensorView;
use super::zip::Member;
use crate::catalog::{Role, Tie, is_plain_file_name};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::external::Entry;
use crate::external::draft::{Draft, GLOBALS, some};
use crate::external::store::StoredFile;
use crate::pickle::View;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::FileExt;

const SAFETENSORS: &str = "model.safetensors";
const BIN: &str = "pytorch_model.bin";
const FSDP: &str = "pytorch_model_fsdp.bin";
/// Longest index, bytes.
const INDEX_MAX: u64 = 64 << 20;

/// Which file of weights a folder has; the first that is there counts.
pub(crate) const FILES: [&str; 5] =
    [SAFETENSORS, "model.safetensors.index.json", BIN, "pytorch_model.bin.index.json", FSDP];

/// Adds the weights of the folder. False when it has none.
pub(crate) fn add(draft: &mut Draft) -> Result<bool> {
    let mut there = Vec::new();
    for name in FILES {
        if draft.folder.size_of(name)?.is_some() {
            there.push(name);
        }
    }
    let Some((&first, others)) = there.split_first() else { return Ok(false) };
    if !others.is_empty() {
        draft.notice(format!("weights are those of {first}; {} is there as well", others.join(" and ")));
    }
    match first {
        SAFETENSORS => add_safetensors(draft, first, None)?,
        BIN | FSDP => add_bin(draft, first, None)?,
        index => add_shards(draft, index)?,
    }
    Ok(true)
}

/// Adds a single file whatever its name.
pub(crate) fn add_file(draft: &mut Draft, name: &str) -> Result<()> {
    match name.ends_with(".safetensors") {
        true => add_safetensors(draft, name, None),
        false => add_bin(draft, name, None),
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn add_shards(draft: &mut Draft, index: &str) -> Result<()> {
    let text = draft.folder.read(index, INDEX_MAX)?;
    let parsed: Index = serde_json::from_slice(&text).map_err(|e| draft.damaged(index, e.to_string()))?;
    let mut files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (tensor, file) in &parsed.weight_map {
        if !is_plain_file_name(file) {
            return Err(
                draft.damaged(index, format!("{file:?}, which holds {tensor}, is no name of a file in here"))
            );
        }
        files.entry(file).or_default().insert(tensor);
    }
    let mut absent = Vec::new();
    for file in files.keys() {
        if draft.folder.size_of(file)?.is_none() {
            absent.push((*file).to_owned());
        }
    }
    if !absent.is_empty() {
        return Err(draft.missing(format!("{} (of {} shards, as {index} says)", some(&absent), files.len())));
    }
    for (file, wanted) in files {
        match file.ends_with(".safetensors") {
            true => add_safetensors(draft, file, Some(&wanted))?,
            false => add_bin(draft, file, Some(&wanted))?,
        }
    }
    Ok(())
}

/// The index says which tensors the file has: all of them, and others are told.
fn check_wanted(
    draft: &mut Draft,
    file: &str,
    wanted: Option<&BTreeSet<&str>>,
    found: &[(String, TensorView)],
) -> Result<()> {
    let Some(wanted) = wanted else { return Ok(()) };
    let held: BTreeSet<&str> = found.iter().map(|(n, _)| n.as_str()).collect();
    if let Some(lost) = wanted.difference(&held).next() {
        return Err(draft.damaged(file, format!("{lost}, which the index says it holds, is not in it")));
    }
    let more: Vec<String> = held.difference(wanted).map(|n| (*n).to_owned()).collect();
    if !more.is_empty() {
        draft.notice(format!("{file} holds {}, which the index doesn't name", some(&more)));
    }
    Ok(())
}

fn add_safetensors(draft: &mut Draft, name: &str, wanted: Option<&BTreeSet<&str>>) -> Result<()> {
    let (file, size) = draft.folder.open_file(name, nix::fcntl::OFlag::empty())?;
    let header = safetensors::read_header(size, |at, out| file.read_exact_at(out, at));
    let header = header.map_err(|why| draft.damaged(name, why))?;
    let mut stored = StoredFile::new(draft.folder.clone(), name.to_owned(), size);
    let member = |e: &safetensors::Entry| Member { name: e.name.clone(), data: e.bytes.clone(), crc: None };
    stored.add(header.entries.iter().map(member).collect());
    draft.store.files.push(stored);
    let view = |(member, e): (usize, safetensors::Entry)| {
        let (shape, strides) = (e.shape.clone(), contiguous(&e.shape));
        (e.name, TensorView { dtype: e.dtype, shape, strides, member, offset: 0 })
    };
    let found: Vec<(String, TensorView)> = header.entries.into_iter().enumerate().map(view).collect();
    check_wanted(draft, name, wanted, &found)?;
    add_tensors(draft, draft.store.files.len() - 1, &found);
    Ok(())
}

/// Strides of a tensor whose elements lie one after the other.
fn contiguous(shape: &[u64]) -> Vec<u64> {
    (0..shape.len()).map(|i| shape[i + 1..].iter().fold(1u64, |n, &d| n.saturating_mul(d))).collect()
}

fn add_bin(draft: &mut Draft, name: &str, wanted: Option<&BTreeSet<&str>>) -> Result<()> {
    let (index, file) = draft.torch(name, GLOBALS)?;
    let root = file.value();
    // programs of their own wrap the weights
    let inner =
        ["state_dict", "model", "module", "model_state_dict"].into_iter().find_map(|key| root.get(key));
    let dict = inner.filter(|v| v.pairs().is_some()).unwrap_or(root);
    let pairs = dict.pairs().ok_or_else(|| draft.damaged(name, "it holds no dict of tensors"))?;
    let mut found = Vec::new();
    for (key, value) in pairs {
        let key = key.str().ok_or_else(|| draft.damaged(name, "it has a tensor whose name is no text"))?;
        let tensor = file.tensor(value).map_err(|e| draft.damaged(name, format!("{key}: {e}")))?;
        found.extend(tensor.map(|view| (key.to_owned(), view)));
    }
    if found.is_empty() {
        return Err(draft.damaged(name, "it holds no tensors"));
    }
    check_wanted(draft, name, wanted, &found)?;
    add_tensors(draft, index, &found);
    Ok(())
}

/// Adds tensors of a file. Those that are the same elements are tied to the first.
fn add_tensors(draft: &mut Draft, file: usize, found: &[(String, TensorView)]) {
    let mut seen: HashMap<_, &str> = HashMap::new();
    for (name, view) in found {
        if view.elements() > 0
            && let Some(first) = seen.get(&view.place())
        {
            draft.facts.ties.push(Tie { alias: name.clone(), target: (*first).to_owned() });
            continue;
        }
        seen.insert(view.place(), name);
        let role = if is_trainable(view.dtype) { Role::Weight } else { Role::Buffer };
        draft.entries.push(Entry::whole(name, role, file, view));
    }
}

/// Only numbers with a fraction are trained.
fn is_trainable(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3 | Dtype::F8_E5M2)
}

/// A number that a value is, whether an integer or a float.
pub(crate) fn number(value: View<'_>) -> Option<f64> {
    value.int().map(|i| i as f64).or_else(|| value.json().as_f64())
}
