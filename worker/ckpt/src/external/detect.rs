//! Finds out what a folder is.
use super::draft::{Draft, Trained};
use super::{Foreign, beside};
use crate::disk::{Folder, exists};
use crate::error::{CkptError, Result};
use crate::formats::{dcp, deepspeed, optimizer, weights};
use std::path::{Path, PathBuf};

/// Folders of FSDP's sharded states.
const FSDP_MODEL: &str = "pytorch_model_fsdp_0";
const FSDP_OPTIMIZER: &str = "optimizer_0";
/// Files of optimizers of HF Trainer and Accelerate.
const OPTIMIZERS: [&str; 2] = ["optimizer.pt", "optimizer.bin"];
/// Checkpoints in a directory that are tried before giving up.
const TRIES: usize = 16;

/// Opens the checkpoint of another program at `path`: its own folder, or the newest in a directory of them. `None` when
/// nothing of the kind is there.
pub(crate) fn open(path: &Path) -> Result<Option<Foreign>> {
    open_trained(path, None)
}

/// The same for a reader that trains these weights: where states of the optimizer have numbers and some weights were
/// frozen, they are taken for those, if that fits.
pub(crate) fn open_trained(path: &Path, trained: Option<&Trained>) -> Result<Option<Foreign>> {
    if path.is_file() {
        return single(path).map(Some);
    }
    let folder = Folder::open(path)?;
    let inside = numbered(&folder)?;
    let only_weights = !has_state(path, &folder)?;
    if only_weights && !inside.is_empty() {
        return newest(path, &inside, trained).map(Some);
    }
    if let Some(found) = one(path, trained)? {
        return Ok(Some(found));
    }
    // Accelerate's own naming puts them into a folder `checkpoints`
    match folder.has_folder("checkpoints")? {
        true => {
            let path = path.join("checkpoints");
            let inside = numbered(&Folder::open(&path)?)?;
            if inside.is_empty() { Ok(None) } else { newest(&path, &inside, trained).map(Some) }
        }
        false => Ok(None),
    }
}

/// True when the folder itself holds a training state.
fn has_state(path: &Path, folder: &Folder) -> Result<bool> {
    for name in
        ["latest", "latest_universal", dcp::METADATA, FSDP_MODEL, FSDP_OPTIMIZER].iter().chain(&OPTIMIZERS)
    {
        if folder.has(name)? {
            return Ok(true);
        }
    }
    Ok(deepspeed::is_tag(path) || deepspeed::universal::is(path))
}

/// The folder's own checkpoint.
fn one(path: &Path, trained: Option<&Trained>) -> Result<Option<Foreign>> {
    if let Some(found) = deepspeed::open(path)? {
        return Ok(Some(found));
    }
    let mut draft = Draft::new(path)?;
    draft.trained = trained.cloned();
    match torch(&mut draft)? {
        true => {
            draft.facts.incomplete.extend(deepspeed::absent(&draft.folder)?);
            draft.finish().map(Some)
        }
        false => Ok(None),
    }
}

/// A single file of weights.
fn single(path: &Path) -> Result<Foreign> {
    let (parent, name) =
        (crate::disk::parent_of(path), path.file_name().unwrap_or_default().to_string_lossy());
    let mut draft = Draft::new(&parent)?;
    if ![".safetensors", ".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end)) {
        let why = "it is a file, and its name doesn't end in .safetensors, .bin, .pt or .pth".into();
        return Err(CkptError::NotACheckpoint { path: path.to_owned(), why });
    }
    weights::add_file(&mut draft, &name)?;
    draft.facts.kind = "weights";
    draft.facts.tag = name.into_owned();
    draft.facts.writer = "unknown".into();
    draft.finish().map(Foreign::single)
}

/// What torch alone wrote: weights, optimizer, distributed checkpoints. False when nothing of it is there.
fn torch(draft: &mut Draft) -> Result<bool> {
    let folder = draft.folder.clone();
    draft.facts.tag = folder.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    draft.facts.writer = "unknown".into();
    if folder.has(dcp::METADATA)? {
        return distributed(draft).map(|()| true);
    }
    let sharded = folder.has(&format!("{FSDP_MODEL}/{}", dcp::METADATA))?;
    let full = folder.has("pytorch_model_fsdp.bin")?;
    let whole = match sharded {
        true => {
            dcp::add(draft, FSDP_MODEL)?;
            true
        }
        false => weights::add(draft)?,
    };
    if !whole {
        return Ok(false);
    }
    put_in_order(draft);
    let fsdp_optimizer = folder.has(&format!("{FSDP_OPTIMIZER}/{}", dcp::METADATA))?;
    if fsdp_optimizer {
        dcp::add(draft, FSDP_OPTIMIZER)?;
    }
    let mut states = Vec::new();
    for name in OPTIMIZERS {
        if folder.size_of(name)?.is_some() {
            states.push(name);
        }
    }
    if let Some(first) = states.first().filter(|_| !fsdp_optimizer) {
        optimizer::add(draft, first)?;
    }
    if states.len() > 1 || (fsdp_optimizer && !states.is_empty()) || folder.has("optimizer_1.bin")? {
        draft.notice("there is more than one optimizer; the first is read".to_owned());
    }
    check_states(draft)?;
    let (trainer, accelerate) = (beside::is_trainer(&folder)?, beside::is_accelerate(&folder)?);
    (draft.facts.kind, draft.facts.writer) = match (trainer, accelerate, sharded, full) {
        (true, _, true, _) => ("HF Trainer with FSDP, sharded", "HF Trainer".into()),
        (true, _, _, true) => ("HF Trainer with FSDP, full", "HF Trainer".into()),
        (true, ..) => ("HF Trainer", "HF Trainer".into()),
        (_, true, true, _) => ("Accelerate with FSDP, sharded", "Accelerate".into()),
        (_, true, _, true) => ("Accelerate with FSDP, full", "Accelerate".into()),
        (_, true, ..) => ("Accelerate", "Accelerate".into()),
        (_, _, true, _) => ("FSDP, sharded", "torch".into()),
        (_, _, _, true) => ("FSDP, full", "torch".into()),
        _ => ("weights", "unknown".into()),
    };
    if draft.facts.kind != "weights" {
        let mut facts = std::mem::take(&mut draft.facts);
        // the last one is where the run was; groups may have begun later
        let done = facts.steps.values().copied().max();
        facts.step = facts.step.or(if trainer { None } else { done });
        beside::add(&mut facts, &folder)?;
        draft.facts = facts;
    }
    Ok(true)
}

/// A distributed checkpoint by itself.
fn distributed(draft: &mut Draft) -> Result<()> {
    dcp::add(draft, "")?;
    check_states(draft)?;
    draft.facts.kind = "torch distributed checkpoint";
    draft.facts.writer = "torch".into();
    draft.facts.step = draft.facts.steps.values().copied().max();
    let part = match draft.facts.tag.as_str() {
        FSDP_MODEL => Some("the weights"),
        FSDP_OPTIMIZER => Some("the optimizer"),
        _ => None,
    };
    if let Some(part) = part {
        draft.notice(format!("this folder is {part} alone; give the one that holds it for the whole state"));
    }
    draft.facts.missing.push("scheduler".into());
    draft.facts.missing.push("random states".into());
    Ok(())
}

/// Weights in their model's order where it is known.
fn put_in_order(draft: &mut Draft) {
    let names: Vec<&str> = draft.weights().map(|(name, _)| name).collect();
    if let Some(order) = crate::formats::order::registered(&names).into_iter().next() {
        let order: Vec<String> = order.into_iter().map(str::to_owned).collect();
        draft.sort_by(&order);
    }
}

/// Every state belongs to a weight of its shape.
fn check_states(draft: &Draft) -> Result<()> {
    let weights: std::collections::HashMap<&str, &[u64]> = draft.weights().collect();
    if weights.is_empty() {
        return Ok(());
    }
    for info in draft.entries.iter().map(|e| &e.info).filter(|i| i.role.is_optimizer_state()) {
        let label = || format!("{}/{}", info.role, info.name);
        match weights.get(info.name.as_str()) {
            None => return Err(draft.damaged(&label(), "it is the state of no weight in here")),
            Some(shape) if *shape != info.shape.as_slice() => {
                return Err(draft
                    .damaged(&label(), format!("it has the shape {:?}, the weight {shape:?}", info.shape)));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Folders in here whose names end in the number of a step, oldest first.
fn numbered(folder: &Folder) -> Result<Vec<String>> {
    let mut found: Vec<(u64, String)> = Vec::new();
    for name in folder.names()? {
        if let Some(step) = step_of(&name)
            && folder.has_folder(&name)?
        {
            found.push((step, name));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// The step of `checkpoint-20`, `checkpoint_20`, `step-20`, `step_20`, `epoch_3` or `global_step20_universal`.
fn step_of(name: &str) -> Option<u64> {
    let universal = || name.strip_suffix("_universal").and_then(|n| n.strip_prefix("global_step"));
    let prefixes = ["checkpoint-", "checkpoint_", "step-", "step_", "epoch_"];
    prefixes.iter().find_map(|p| name.strip_prefix(p)).or_else(universal)?.parse().ok()
}

/// The newest that opens.
fn newest(path: &Path, names: &[String], trained: Option<&Trained>) -> Result<Foreign> {
    let mut passed: Vec<String> = Vec::new();
    let mut first = None;
    for name in names.iter().rev().take(TRIES) {
        let inner: PathBuf = path.join(name);
        let found = one(&inner, trained).and_then(|f| {
            f.ok_or_else(|| CkptError::NotACheckpoint {
                path: inner.clone(),
                why: crate::diagnosis::seems(&inner),
            })
        });
        match found {
            Ok(mut found) => {
                let others = names.len() - 1;
                let which = format!(
                    "of the {} checkpoints in {} the newest that is whole, {name}, is used",
                    others + 1,
                    path.display()
                );
                let only = format!("{name} in {} is used", path.display());
                let said = std::iter::once(if others > 0 { which } else { only });
                let beside = weights::FILES.iter().find(|f| exists(&path.join(f)));
                let beside = beside.map(|f| format!("{f} lies beside it: to use that alone, give its path"));
                found.say_first(said.chain(beside).chain(passed).collect());
                return Ok(found);
            }
            Err(e) => {
                passed.push(format!("passed over: {e}"));
                first = first.or(Some(e));
            }
        }
    }
    Err(first.unwrap_or(CkptError::NotACheckpoint { path: path.to_owned(), why: "it is empty".into() }))
}
