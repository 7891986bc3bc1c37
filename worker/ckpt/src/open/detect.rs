//! Finds out which program wrote a checkpoint from its files, and opens the checkpoint.
use super::diagnose::diagnose_directory;
use crate::catalog::{ExternalCheckpoint, ExternalCheckpointBuilder, TrainedWeightNames, TrainingStatePart};
use crate::codec::disk::{Directory, path_exists};
use crate::error::{CkptError, Diagnosis, Result};
use crate::layout::hf::{companion_files, module_order, optimizer_state, weights};
use crate::layout::{dcp, deepspeed};
use std::path::{Path, PathBuf};

/// Name of the subdirectory in which Accelerate stores the weights of a sharded FSDP checkpoint.
const FSDP_MODEL_DIR: &str = "pytorch_model_fsdp_0";
/// Name of the directory with the optimizer state in sharded FSDP checkpoints of Accelerate.
const FSDP_OPTIMIZER_DIR: &str = "optimizer_0";
/// Names of the files in which HF Trainer and Accelerate store the optimizer state.
const OPTIMIZER_FILES: [&str; 2] = ["optimizer.pt", "optimizer.bin"];
/// The largest number of subdirectories that are opened, newest first, in search of a complete
/// checkpoint.
const CHECKPOINTS_TRIED_MAX: usize = 16;

/// Opens the checkpoint of another program at `path`, which may be a file of weights, a checkpoint
/// directory, or a directory with checkpoints. Of several checkpoints, opens the newest that can be
/// opened. Returns `None` if there is no checkpoint.
pub(crate) fn open_external_checkpoint(path: &Path) -> Result<Option<ExternalCheckpoint>> {
    open_external_for_training(path, None)
}

/// Opens the checkpoint of another program at `path` for a job that trains only the weights
/// `trained`, or an unknown set of weights if `None`. If optimizer states are only numbered and
/// some weights were frozen, the states are assigned to the trained weights, provided that their
/// shapes match.
pub(crate) fn open_external_for_training(
    path: &Path,
    trained: Option<&TrainedWeightNames>,
) -> Result<Option<ExternalCheckpoint>> {
    if path.is_file() {
        return open_weights_file(path).map(Some);
    }
    let directory = Directory::open(path)?;
    let inside = directory.list_numbered_directories(parse_step_in_name)?;
    let only_weights = !has_training_state(path, &directory)?;
    if only_weights && !inside.is_empty() {
        return open_newest_readable(path, &inside, trained).map(Some);
    }
    if let Some(found) = open_checkpoint_directory(path, trained)? {
        return Ok(Some(found));
    }
    // Accelerate's automatic naming uses the directory `checkpoints`
    if !directory.has_directory("checkpoints")? {
        return Ok(None);
    }
    let path = path.join("checkpoints");
    let inside = Directory::open(&path)?.list_numbered_directories(parse_step_in_name)?;
    if inside.is_empty() { Ok(None) } else { open_newest_readable(&path, &inside, trained).map(Some) }
}

/// Returns true if the directory at `path` itself contains files from which a training can be
/// resumed, such as an optimizer file.
fn has_training_state(path: &Path, directory: &Directory) -> Result<bool> {
    for name in ["latest", "latest_universal", dcp::METADATA_FILE, FSDP_MODEL_DIR, FSDP_OPTIMIZER_DIR]
        .iter()
        .chain(&OPTIMIZER_FILES)
    {
        if directory.has_entry(name)? {
            return Ok(true);
        }
    }
    Ok(deepspeed::is_tag_directory(path) || deepspeed::universal::is_universal_directory(path))
}

/// Opens the checkpoint of another program whose weights are stored directly in the directory
/// `path`, and not in subdirectories named by step or epoch. Returns `None` if the directory has no
/// weights.
fn open_checkpoint_directory(
    path: &Path,
    trained: Option<&TrainedWeightNames>,
) -> Result<Option<ExternalCheckpoint>> {
    if let Some(found) = deepspeed::open_deepspeed(path)? {
        return Ok(Some(found));
    }
    let mut builder = ExternalCheckpointBuilder::new(path)?;
    builder.trained = trained.cloned();
    match add_torch_checkpoint(&mut builder)? {
        true => {
            builder.facts.incomplete.extend(deepspeed::missing_tag_message(&builder.directory)?);
            builder.finish().map(Some)
        }
        false => Ok(None),
    }
}

/// Opens a single file with weights, such as a safetensors file, as a checkpoint that consists of
/// this file.
///
/// # Errors
/// Fails if the file name does not have a suffix of weights files, such as `.safetensors`, or if
/// the file is damaged.
fn open_weights_file(path: &Path) -> Result<ExternalCheckpoint> {
    let (parent, name) =
        (crate::codec::disk::parent_dir(path), path.file_name().unwrap_or_default().to_string_lossy());
    let mut builder = ExternalCheckpointBuilder::new(&parent)?;
    if ![".safetensors", ".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end)) {
        return Err(CkptError::not_a_checkpoint(path, Diagnosis::NotAWeightsFile));
    }
    weights::add_weights_file(&mut builder, &name)?;
    builder.facts.kind = "weights";
    builder.facts.tag = name.into_owned();
    builder.facts.writer = "unknown".into();
    builder.finish().map(ExternalCheckpoint::mark_as_single_file)
}

/// Adds the weights, optimizer states and other contents of the checkpoint directory, written by
/// any program with torch, to the opened checkpoint. Returns false if the directory has no weights.
fn add_torch_checkpoint(builder: &mut ExternalCheckpointBuilder) -> Result<bool> {
    let directory = builder.directory.clone();
    builder.facts.tag = directory.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    builder.facts.writer = "unknown".into();
    if directory.has_entry(dcp::METADATA_FILE)? {
        return add_distributed_checkpoint(builder).map(|()| true);
    }
    let sharded = directory.has_entry(&format!("{FSDP_MODEL_DIR}/{}", dcp::METADATA_FILE))?;
    let full = directory.has_entry("pytorch_model_fsdp.bin")?;
    if sharded {
        dcp::add_dcp_directory(builder, FSDP_MODEL_DIR)?;
    } else if !weights::add_weights(builder)? {
        return Ok(false);
    }
    sort_by_registration_order(builder);
    let fsdp_optimizer = directory.has_entry(&format!("{FSDP_OPTIMIZER_DIR}/{}", dcp::METADATA_FILE))?;
    if fsdp_optimizer {
        dcp::add_dcp_directory(builder, FSDP_OPTIMIZER_DIR)?;
    }
    let mut states = Vec::new();
    for name in OPTIMIZER_FILES {
        if directory.file_size(name)?.is_some() {
            states.push(name);
        }
    }
    if let Some(first) = states.first().filter(|_| !fsdp_optimizer) {
        optimizer_state::add_optimizer_file(builder, first)?;
    }
    if states.len() > 1 || (fsdp_optimizer && !states.is_empty()) || directory.has_entry("optimizer_1.bin")? {
        builder.add_notice("there are several optimizers; using the first".to_owned());
    }
    check_optimizer_state_shapes(builder)?;
    let (trainer, accelerate) = (
        companion_files::is_hf_trainer_directory(&directory)?,
        companion_files::is_accelerate_directory(&directory)?,
    );
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
        // the run's step is the largest step, since weights may have been added later
        let done = facts.state.steps.values().copied().max();
        facts.state.step = facts.state.step.or(if trainer { None } else { done });
        companion_files::read_companion_files(&mut facts, &directory)?;
        builder.facts = facts;
    }
    Ok(true)
}

/// Adds the tensors, update counts and hyper-parameters of the torch distributed checkpoint (DCP)
/// in the checkpoint directory itself to the opened checkpoint.
fn add_distributed_checkpoint(builder: &mut ExternalCheckpointBuilder) -> Result<()> {
    dcp::add_dcp_directory(builder, "")?;
    check_optimizer_state_shapes(builder)?;
    builder.facts.kind = "torch distributed checkpoint";
    builder.facts.writer = "torch".into();
    builder.facts.state.step = builder.facts.state.steps.values().copied().max();
    let part = match builder.facts.tag.as_str() {
        FSDP_MODEL_DIR => Some("weights"),
        FSDP_OPTIMIZER_DIR => Some("optimizer state"),
        _ => None,
    };
    if let Some(part) = part {
        builder.add_notice(format!(
            "this directory has only the {part}; give its parent for the whole training state"
        ));
    }
    builder.facts.missing.push(TrainingStatePart::Scheduler);
    builder.facts.missing.push(TrainingStatePart::RngStates);
    Ok(())
}

/// Sorts the tensors of the checkpoint that is being opened in the order in which the model
/// registers its weights. Does nothing if the model family is unknown.
fn sort_by_registration_order(builder: &mut ExternalCheckpointBuilder) {
    let names: Vec<&str> = builder.weights().map(|(name, _)| name).collect();
    if let Some(order) = module_order::sort_in_registration_orders(&names).into_iter().next() {
        let order: Vec<String> = order.into_iter().map(str::to_owned).collect();
        builder.sort_tensors(order.iter().map(String::as_str));
    }
}

/// Fails if an optimizer state belongs to no weight of the checkpoint, or has a different shape
/// than its weight. Accepts a checkpoint that has only optimizer states.
fn check_optimizer_state_shapes(builder: &ExternalCheckpointBuilder) -> Result<()> {
    let weights: std::collections::HashMap<&str, &[u64]> = builder.weights().collect();
    if weights.is_empty() {
        return Ok(());
    }
    for info in builder.entries.iter().map(|e| &e.info).filter(|i| i.role.is_optimizer_state()) {
        let label = || format!("{}/{}", info.role, info.name);
        match weights.get(info.name.as_str()) {
            None => return Err(builder.damaged_file_error(&label(), "no weight has this state's name")),
            Some(shape) if *shape != info.shape.as_slice() => {
                return Err(builder.damaged_file_error(
                    &label(),
                    format!("the shape is {:?}, that of the weight {shape:?}", info.shape),
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Returns the number in the directory name of a checkpoint, such as 500 in `checkpoint-500` or 3
/// in `epoch_3`. Returns `None` for other names.
fn parse_step_in_name(name: &str) -> Option<u64> {
    let universal = || name.strip_suffix("_universal").and_then(|n| n.strip_prefix("global_step"));
    let prefixes = ["checkpoint-", "checkpoint_", "step-", "step_", "epoch_"];
    prefixes.iter().find_map(|p| name.strip_prefix(p)).or_else(universal)?.parse().ok()
}

/// Opens the newest readable checkpoint among the subdirectories `names` of `path`, which are in
/// ascending order of their steps. Notices of the checkpoint list the skipped subdirectories.
///
/// # Errors
///
/// Fails with the error of the newest subdirectory if no subdirectory can be opened. Fails with
/// [`Diagnosis::NewestUnreadable`] if the newest [`CHECKPOINTS_TRIED_MAX`] subdirectories cannot be
/// opened and there are older ones, which are not tried.
fn open_newest_readable(
    path: &Path,
    names: &[String],
    trained: Option<&TrainedWeightNames>,
) -> Result<ExternalCheckpoint> {
    let mut skipped: Vec<String> = Vec::new();
    let mut first = None;
    for name in names.iter().rev().take(CHECKPOINTS_TRIED_MAX) {
        let inner: PathBuf = path.join(name);
        let found = open_checkpoint_directory(&inner, trained)
            .and_then(|f| f.ok_or_else(|| CkptError::not_a_checkpoint(&inner, diagnose_directory(&inner))));
        match found {
            Ok(mut found) => {
                let shown = path.display();
                let chosen = std::iter::once(match names.len() {
                    1 => format!("using {name} in {shown}"),
                    total => format!("using {name}, the newest complete of {total} checkpoints in {shown}"),
                });
                let other_weights = weights::WEIGHTS_FILES.iter().find(|f| path_exists(&path.join(f)));
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
    Err(match first {
        Some(error) if names.len() > CHECKPOINTS_TRIED_MAX => {
            let (tried, total, error) = (CHECKPOINTS_TRIED_MAX, names.len(), error.to_string());
            CkptError::not_a_checkpoint(path, Diagnosis::NewestUnreadable { tried, total, error })
        }
        Some(error) => error,
        None => CkptError::not_a_checkpoint(path, Diagnosis::Empty),
    })
}
