//! Resumes from a native checkpoint, which is one that launch itself wrote.
use super::{
    candidates::CheckpointLocations,
    differences::{
        collect_frozen_parameter_notices, collect_job_setting_notices, find_precision_change_notice,
        format_weights_only_notice,
    },
    resume_point::{EventSink, MemoryResumeState, ResumePoint},
};
use crate::{
    checkpoint::{
        host_local::{CheckpointCandidate, HostLocalCheckpoint, build_unreachable_shard_error},
        memory_copies::RecentStepEvents,
        tensor_mapping::{ReadPlan, find_params_without_state, read_on_all_ranks, require_compatible},
    },
    consensus::exchange_first_error,
    error::{Error, Result, build_checkpoint_error, to_unreadable_checkpoint_error},
    train::{loss_scale::LossScaleState, running_trainer::Cursor},
    trainer_stages::UninitializedTrainer,
};
use ckpt::{Checkpoint, RunFacts, TensorSource};
use diagnostic::{Diagnostic, codes::training as codes};
use protocol::{
    control::FromWorker,
    event::{Event, ResumeSource},
    exit::WorkerExit,
};
use serde::Deserialize;
use serde_json::Value;
use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

/// Why a checkpoint was not loaded: its files are damaged (an older checkpoint may then be tried),
/// or another error, which ends the run.
pub(super) enum LoadError {
    /// The checkpoint is damaged: its bytes are not those that were written. An older checkpoint
    /// may be usable.
    Damaged(Error),
    /// The checkpoint is intact but not of this job, or the job is ending.
    Fatal(Error),
}

impl From<Error> for LoadError {
    fn from(e: Error) -> Self {
        LoadError::Fatal(e)
    }
}

impl From<Diagnostic> for LoadError {
    fn from(e: Diagnostic) -> Self {
        LoadError::Fatal(e.into())
    }
}

/// Loads a native checkpoint (one that launch wrote) into the trainers of all ranks; each rank
/// reads the ranges of tensors that it owns. Collective: every rank must call it.
///
/// `reason` states why newer copies in memory are not used; `None` if there are none.
pub(super) fn load_native_checkpoint(
    ready: &mut UninitializedTrainer,
    dirs: &CheckpointLocations,
    candidate: &CheckpointCandidate,
    (data_digest, reason): (&str, Option<String>),
    events: &mut EventSink,
) -> std::result::Result<ResumePoint, LoadError> {
    let opened = open_native_checkpoint(ready, dirs, candidate)?;
    let opened = require_readable_on_all_ranks(ready, opened)?;
    let origin = ResumeOrigin { source: ResumeSource::Checkpoint, reason };
    load_opened_checkpoint(ready, &opened, &candidate.path, data_digest, origin, events)
}

/// Source of the training state to resume from, a checkpoint directory or the memory of hosts, with
/// the reason why it was chosen instead of another.
pub(super) struct ResumeOrigin {
    pub(super) source: ResumeSource,
    pub(super) reason: Option<String>,
}

/// Returns `opened`, the checkpoint that this rank opened, if all ranks could open it; otherwise
/// fails on every rank with the first rank's error. Collective: every rank must call it.
pub(super) fn require_readable_on_all_ranks(
    ready: &UninitializedTrainer,
    opened: Result<ReadableCheckpoint>,
) -> std::result::Result<ReadableCheckpoint, LoadError> {
    let damage = exchange_first_error(ready.trainer.engine.queue(), opened.as_ref().err().cloned())?;
    match (opened, damage) {
        (Ok(opened), None) => Ok(opened),
        (_, Some(e)) | (Err(e), None) => Err(LoadError::Damaged(e)),
    }
}

/// Loads a native checkpoint (one that launch wrote), which every rank has opened, into the
/// trainers of all ranks. `path` names the checkpoint in events. Collective: every rank must call
/// it.
pub(super) fn load_opened_checkpoint(
    ready: &mut UninitializedTrainer,
    opened: &ReadableCheckpoint,
    path: &Path,
    data_digest: &str,
    origin: ResumeOrigin,
    events: &mut EventSink,
) -> std::result::Result<ResumePoint, LoadError> {
    let (checkpoint, source): (&Checkpoint, &dyn TensorSource) = match opened {
        ReadableCheckpoint::Shared(c) => (c, &**c),
        ReadableCheckpoint::HostLocal(c) => (c.local_checkpoint_view(), &**c),
    };
    let (facts, tensors) = (checkpoint.run_facts(), source.tensors());
    let units = ready.trainer.engine.clone_units();
    let weights_only = checkpoint.has_only_weights();
    require_compatible(checkpoint, &units, ready.trainer.optimizer.spec())?;
    let (cursor, guess) = match weights_only {
        true => (Cursor::default(), Some(format_weights_only_notice(path))),
        false => read_cursor(ready, facts, path)?,
    };
    let reset_states = match weights_only {
        true => HashSet::new(),
        false => find_params_without_state(&tensors, &units, ready.trainer.optimizer.spec()),
    };
    let mut step_lag = read_step_lag(facts, path)?;
    step_lag.extend(reset_states.iter().map(|name| (name.clone(), cursor.step)));
    ready.trainer.optimizer.set_step_lags(&units, &step_lag);
    restore_loss_scale(ready, facts, path)?;
    let plan = ReadPlan {
        source,
        renamed: &HashMap::new(),
        with_states: !weights_only,
        reset_states: &reset_states,
        selects: |_| true,
    };
    if let Some(e) = read_on_all_ranks(ready, &plan)? {
        return Err(LoadError::Damaged(e));
    }
    let step_events = match origin.source {
        ResumeSource::Memory => RecentStepEvents::from_cursor(&facts.cursor)?,
        ResumeSource::Checkpoint => RecentStepEvents::default(),
    };
    for event in step_events.decode()? {
        events(FromWorker::RestoredStep(event))?;
    }
    events(FromWorker::Event(Event::Resume {
        step: facts.step,
        path: path.into(),
        world: Some(facts.world),
        stage: Some(facts.stage),
        source: origin.source,
        reason: origin.reason,
    }))?;
    let mut notices: Vec<String> =
        guess.into_iter().chain(find_precision_change_notice(ready, &tensors)).collect();
    if !weights_only {
        notices.extend(collect_frozen_parameter_notices(&units, &tensors, &reset_states));
        notices.extend(collect_job_setting_notices(ready, facts, data_digest));
    }
    for message in notices {
        events(FromWorker::Event(Event::new_notice(None, message)))?;
    }
    let rng_generation = facts.rng.get("generation").and_then(Value::as_u64).unwrap_or(0);
    let memory = MemoryResumeState { step_events, ..MemoryResumeState::default() };
    Ok(ResumePoint { path: path.into(), cursor, is_native: true, rng_generation, memory })
}

/// An open checkpoint that launch wrote, of which every rank can read all files: in a shared
/// directory, or with the help of ranks on other hosts.
pub(super) enum ReadableCheckpoint {
    Shared(Box<Checkpoint>),
    HostLocal(Box<HostLocalCheckpoint>),
}

/// Opens a native checkpoint (one that launch wrote), from a shared directory or from the
/// directories of several hosts. The inner result is an error if the checkpoint is damaged. An
/// outer error ends the job.
///
/// Collective: every rank must call it.
fn open_native_checkpoint(
    ready: &UninitializedTrainer,
    dirs: &CheckpointLocations,
    candidate: &CheckpointCandidate,
) -> Result<Result<ReadableCheckpoint>> {
    if dirs.layout.is_shared() {
        return Ok(match Checkpoint::open(&candidate.path) {
            Ok(checkpoint) => match checkpoint.local_shard_flags().iter().position(|is_here| !is_here) {
                None => Ok(ReadableCheckpoint::Shared(Box::new(checkpoint))),
                Some(file) => Err(build_unreachable_shard_error(&checkpoint, file, dirs.layout).into()),
            },
            Err(e) => Err(to_unreadable_checkpoint_error(e)),
        });
    }
    let queue = ready.trainer.engine.queue();
    match HostLocalCheckpoint::open(queue, dirs.layout, &candidate.path, candidate.hash.as_deref()) {
        Ok(opened) => Ok(Ok(ReadableCheckpoint::HostLocal(Box::new(opened)))),
        // After an unusable checkpoint an older one may be usable; a failed collective ends the
        // job.
        Err(e) if e.to_worker_exit() == WorkerExit::Checkpoint => Ok(Err(e)),
        Err(e) => Err(e),
    }
}

/// Builds the error which reports that a checkpoint contains invalid numbers of completed steps,
/// samples or tokens.
fn build_invalid_progress_error(path: &Path, what: &str) -> Diagnostic {
    let message = format!("checkpoint {}: {what}", path.display());
    build_checkpoint_error(codes::RESUME_POSITION_INVALID, path, message)
}

/// Reads the progress of training (steps, samples and tokens done) from a native checkpoint (one
/// that launch wrote).
///
/// A checkpoint that was converted from another program's records no progress. The position is then
/// the checkpoint's step times the batch size, which the returned notice reports.
fn read_cursor(
    ready: &UninitializedTrainer,
    facts: &RunFacts,
    path: &Path,
) -> Result<(Cursor, Option<String>)> {
    match facts.cursor.get("at") {
        Some(position) if !position.is_null() => {
            let cursor = serde_json::from_value(position.clone()).map_err(|e| {
                build_invalid_progress_error(path, "cannot read the position in its manifest").with_cause(&e)
            })?;
            Ok((cursor, None))
        }
        _ => {
            let batch = ready.trainer.global_batch_size();
            let samples = facts
                .step
                .checked_mul(batch)
                .ok_or_else(|| build_invalid_progress_error(path, "the number of steps is out of range"))?;
            let notice = format!(
                "data resumes at sample {samples} (step {} × global batch {batch}; the checkpoint records no position)",
                facts.step
            );
            let cursor = Cursor {
                step: facts.step,
                consumed_samples: samples,
                tokens: facts.tokens,
                is_evaluation_due: false,
            };
            Ok((cursor, Some(notice)))
        }
    }
}

/// Sets the trainer's fp16 loss scale to the one in the checkpoint, if the checkpoint has one. Does
/// nothing if no loss scale is recorded.
fn restore_loss_scale(ready: &mut UninitializedTrainer, facts: &RunFacts, path: &Path) -> Result<()> {
    let Some(state) = facts.cursor.get("loss_scale").filter(|s| !s.is_null()) else { return Ok(()) };
    let invalid = || build_invalid_progress_error(path, "cannot use the loss scale in its manifest");
    let state = LossScaleState::deserialize(state).map_err(|e| invalid().with_cause(&e))?;
    Ok(ready.trainer.loss_scale.restore_state(state).map_err(|e| invalid().with_cause(&e))?)
}

/// Reads from a checkpoint, for each parameter that was frozen for a while, how many of the run's
/// optimizer updates the parameter has missed.
fn read_step_lag(facts: &RunFacts, path: &Path) -> Result<HashMap<String, u64>> {
    match facts.cursor.get("late") {
        None | Some(Value::Null) => Ok(HashMap::new()),
        Some(lag) => Ok(serde_json::from_value(lag.clone()).map_err(|e| {
            build_invalid_progress_error(path, "cannot read the update counts in its manifest").with_cause(&e)
        })?),
    }
}
