//! Recognizes the program and layout of a checkpoint, and opens the checkpoint.
use super::builder::{CheckpointBuilder, Trained};
use super::{ExternalCheckpoint, StatePart, companion_files};
use crate::diagnosis::{Diagnosis, diagnose};
use crate::disk::{Directory, exists};
use crate::error::{CkptError, Result};
use crate::formats::{dcp, deepspeed, optimizer, weights};
use std::path::{Path, PathBuf};

/// Directories of FSDP's sharded states.
const FSDP_MODEL: &str = "pytorch_model_fsdp_0";
const FSDP_OPTIMIZER: &str = "optimizer_0";
/// Optimizer files of HF Trainer and Accelerate.
const OPTIMIZERS: [&str; 2] = ["optimizer.pt", "optimizer.bin"];
/// Limit on the checkpoints that are tried in a directory.
const ATTEMPTS: usize = 16;

/// Opens the checkpoint of another program at `path`: the directory itself, or the newest of
/// several in it. `None` when there is none.
pub(crate) fn open(path: &Path) -> Result<Option<ExternalCheckpoint>> {
    open_trained(path, None)
}

/// Like [`open`], for a reader that trains the given weights. If the optimizer states are numbered
/// and some weights were frozen, the states are assigned to these weights when they match.
pub(crate) fn open_trained(path: &Path, trained: Option<&Trained>) -> Result<Option<ExternalCheckpoint>> {
    if path.is_file() {
        return open_weights_file(path).map(Some);
    }
    let directory = Directory::open(path)?;
    let inside = numbered_directories(&directory)?;
    let only_weights = !has_state(path, &directory)?;
    if only_weights && !inside.is_empty() {
        return open_newest(path, &inside, trained).map(Some);
    }
    if let Some(found) = open_directory(path, trained)? {
        return Ok(Some(found));
    }
    // Accelerate's automatic naming uses the directory `checkpoints`
    match directory.has_directory("checkpoints")? {
        true => {
            let path = path.join("checkpoints");
            let inside = numbered_directories(&Directory::open(&path)?)?;
            if inside.is_empty() { Ok(None) } else { open_newest(&path, &inside, trained).map(Some) }
        }
        false => Ok(None),
    }
}

/// True when the directory itself has a training state.
fn has_state(path: &Path, directory: &Directory) -> Result<bool> {
    for name in
        ["latest", "latest_universal", dcp::METADATA, FSDP_MODEL, FSDP_OPTIMIZER].iter().chain(&OPTIMIZERS)
    {
        if directory.has(name)? {
            return Ok(true);
        }
    }
    Ok(deepspeed::is_tag(path) || deepspeed::universal::is_universal(path))
}

/// Opens the checkpoint in the directory itself.
fn open_directory(path: &Path, trained: Option<&Trained>) -> Result<Option<ExternalCheckpoint>> {
    if let Some(found) = deepspeed::open(path)? {
        return Ok(Some(found));
    }
    let mut builder = CheckpointBuilder::new(path)?;
    builder.trained = trained.cloned();
    match add_torch_files(&mut builder)? {
        true => {
            builder.facts.incomplete.extend(deepspeed::missing_tag(&builder.directory)?);
            builder.finish().map(Some)
        }
        false => Ok(None),
    }
}

/// Opens a single file of weights.
fn open_weights_file(path: &Path) -> Result<ExternalCheckpoint> {
    let (parent, name) =
        (crate::disk::parent_of(path), path.file_name().unwrap_or_default().to_string_lossy());
    let mut builder = CheckpointBuilder::new(&parent)?;
    if ![".safetensors", ".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end)) {
        return Err(CkptError::not_a_checkpoint(path, Diagnosis::NotAWeightsFile));
    }
    weights::add_file(&mut builder, &name)?;
    builder.facts.kind = "weights";
    builder.facts.tag = name.into_owned();
    builder.facts.writer = "unknown".into();
    builder.finish().map(ExternalCheckpoint::single_file)
}

/// Adds what torch writes: weights, optimizer, distributed checkpoints. False when there are no
/// weights.
fn add_torch_files(builder: &mut CheckpointBuilder) -> Result<bool> {
    let directory = builder.directory.clone();
    builder.facts.tag = directory.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    builder.facts.writer = "unknown".into();
    if directory.has(dcp::METADATA)? {
        return add_distributed(builder).map(|()| true);
    }
    let sharded = directory.has(&format!("{FSDP_MODEL}/{}", dcp::METADATA))?;
    let full = directory.has("pytorch_model_fsdp.bin")?;
    let has_weights = match sharded {
        true => {
            dcp::add(builder, FSDP_MODEL)?;
            true
        }
        false => weights::add(builder)?,
    };
    if !has_weights {
        return Ok(false);
    }
    sort_by_registration(builder);
    let fsdp_optimizer = directory.has(&format!("{FSDP_OPTIMIZER}/{}", dcp::METADATA))?;
    if fsdp_optimizer {
        dcp::add(builder, FSDP_OPTIMIZER)?;
    }
    let mut states = Vec::new();
    for name in OPTIMIZERS {
        if directory.size_of(name)?.is_some() {
            states.push(name);
        }
    }
    if let Some(first) = states.first().filter(|_| !fsdp_optimizer) {
        optimizer::add(builder, first)?;
    }
    if states.len() > 1 || (fsdp_optimizer && !states.is_empty()) || directory.has("optimizer_1.bin")? {
        builder.add_notice("there are several optimizers; using the first".to_owned());
    }
    check_states(builder)?;
    let (trainer, accelerate) =
        (companion_files::is_trainer(&directory)?, companion_files::is_accelerate(&directory)?);
    (builder.facts.kind, builder.facts.writer) = match (trainer, accelerate, sharded, full) {
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
    if builder.facts.kind != "weights" {
        let mut facts = std::mem::take(&mut builder.facts);
        // the largest step is that of the run, since groups may have been added later
        let done = facts.steps.values().copied().max();
        facts.step = facts.step.or(if trainer { None } else { done });
        companion_files::add(&mut facts, &directory)?;
        builder.facts = facts;
    }
    Ok(true)
}

/// Adds a distributed checkpoint that is the directory itself.
fn add_distributed(builder: &mut CheckpointBuilder) -> Result<()> {
    dcp::add(builder, "")?;
    check_states(builder)?;
    builder.facts.kind = "torch distributed checkpoint";
    builder.facts.writer = "torch".into();
    builder.facts.step = builder.facts.steps.values().copied().max();
    let part = match builder.facts.tag.as_str() {
        FSDP_MODEL => Some("weights"),
        FSDP_OPTIMIZER => Some("optimizer state"),
        _ => None,
    };
    if let Some(part) = part {
        builder.add_notice(format!(
            "this directory has only the {part}; give its parent for the whole training state"
        ));
    }
    builder.facts.missing.push(StatePart::Scheduler);
    builder.facts.missing.push(StatePart::RandomStates);
    Ok(())
}

/// Sorts the weights in the order of the model, if it is known.
fn sort_by_registration(builder: &mut CheckpointBuilder) {
    let names: Vec<&str> = builder.weights().map(|(name, _)| name).collect();
    if let Some(order) = crate::formats::module_order::registration_orders(&names).into_iter().next() {
        let order: Vec<String> = order.into_iter().map(str::to_owned).collect();
        builder.sort_by(&order);
    }
}

/// Checks that every state belongs to a weight of the same shape.
fn check_states(builder: &CheckpointBuilder) -> Result<()> {
    let weights: std::collections::HashMap<&str, &[u64]> = builder.weights().collect();
    if weights.is_empty() {
        return Ok(());
    }
    for info in builder.entries.iter().map(|e| &e.info).filter(|i| i.role.is_optimizer_state()) {
        let label = || format!("{}/{}", info.role, info.name);
        match weights.get(info.name.as_str()) {
            None => return Err(builder.damaged(&label(), "no weight has this state's name")),
            Some(shape) if *shape != info.shape.as_slice() => {
                return Err(builder.damaged(
                    &label(),
                    format!("the shape is {:?}, that of the weight {shape:?}", info.shape),
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Subdirectories whose names end in a step or epoch number, oldest first.
fn numbered_directories(directory: &Directory) -> Result<Vec<String>> {
    let mut found: Vec<(u64, String)> = Vec::new();
    for name in directory.names()? {
        if let Some(step) = step_of(&name)
            && directory.has_directory(&name)?
        {
            found.push((step, name));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// The step of `checkpoint-20`, `checkpoint_20`, `step-20`, `step_20`, `epoch_3` or
/// `global_step20_universal`.
fn step_of(name: &str) -> Option<u64> {
    let universal = || name.strip_suffix("_universal").and_then(|n| n.strip_prefix("global_step"));
    let prefixes = ["checkpoint-", "checkpoint_", "step-", "step_", "epoch_"];
    prefixes.iter().find_map(|p| name.strip_prefix(p)).or_else(universal)?.parse().ok()
}

/// Opens the newest readable checkpoint of a directory.
fn open_newest(path: &Path, names: &[String], trained: Option<&Trained>) -> Result<ExternalCheckpoint> {
    let mut skipped: Vec<String> = Vec::new();
    let mut first = None;
    for name in names.iter().rev().take(ATTEMPTS) {
        let inner: PathBuf = path.join(name);
        let found = open_directory(&inner, trained)
            .and_then(|f| f.ok_or_else(|| CkptError::not_a_checkpoint(&inner, diagnose(&inner))));
        match found {
            Ok(mut found) => {
                let others = names.len() - 1;
                let chosen = match others {
                    0 => format!("using {name} in {}", path.display()),
                    _ => format!(
                        "using {name}, the newest complete of {} checkpoints in {}",
                        others + 1,
                        path.display()
                    ),
                };
                let chosen = std::iter::once(chosen);
                let other_weights = weights::FILES.iter().find(|f| exists(&path.join(f)));
                let other_weights = other_weights
                    .map(|f| format!("there is also {f}; give its path to use only these weights"));
                found.prepend_notices(chosen.chain(other_weights).chain(skipped).collect());
                return Ok(found);
            }
            Err(e) => {
                skipped.push(format!("skipped: {e}"));
                first = first.or(Some(e));
            }
        }
    }
    Err(first.unwrap_or(CkptError::not_a_checkpoint(path, Diagnosis::Empty)))
}
