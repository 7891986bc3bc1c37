//! Resumes from a checkpoint: selects and loads the checkpoint, checks that it fits the job, and
//! reports differences between the job and the checkpoint.
mod adapters;
mod differences;
mod external;
mod pretrained;
mod weight_match;

pub use adapters::open_matching_adapters;
pub use pretrained::{PretrainedModel, start_from_model};

use crate::{
    checkpoint_mapping::{
        ReadPlan, find_params_without_state, read_owned_ranges, require_compatible, sync_replicas,
    },
    consensus::all_gather_values,
    error::{Error, Result, to_unreadable_checkpoint_error},
    host_local::{self, CheckpointCandidate, HostLocalCheckpoint, build_unreachable_shard_error},
    stages::{Cursor, UninitializedTrainer},
    storage_topology::StorageTopology,
    train::loss_scale::LossScaleState,
};
use ckpt::{Checkpoint, ExternalCheckpoint, OpenedCheckpoint, RunFacts, TensorSource};
use contract::{
    event::Event,
    exit::WorkerExit,
    job::{JobSpec, ResumeFrom, RngPolicy},
};
use diagnostic::{Diagnostic, codes::training as codes};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

/// The checkpoint from which a run resumed, and the progress that this checkpoint records.
pub struct ResumePoint {
    /// The directory of the checkpoint.
    pub path: PathBuf,
    /// The progress that the checkpoint records.
    pub cursor: Cursor,
    /// Whether launch wrote the checkpoint. If so, no save is needed before the first step.
    pub is_native: bool,
    /// The number of times that RNG streams were reseeded before the checkpoint was written.
    pub rng_generation: u64,
}

impl ResumePoint {
    /// Computes the new generation of RNG streams, and the decision that the next checkpoint
    /// records.
    ///
    /// The random numbers of the built-in runtime do not depend on the generation. `reseed`
    /// therefore increments the generation, but changes no random number.
    pub fn decide_rng_generation(&self, policy: RngPolicy, world: usize) -> (u64, Value) {
        let generation = self.rng_generation + u64::from(policy == RngPolicy::Reseed);
        let policy = match policy {
            RngPolicy::Reconcile => "reconcile",
            RngPolicy::Strict => "strict",
            RngPolicy::Reseed => "reseed",
        };
        let path = self.path.display().to_string();
        (generation, json!({ "from": path, "world": world, "policy": policy, "streams": "stateless" }))
    }
}

/// A callback that receives the events of resuming. Only the events of rank 0 are reported.
pub type EventSink<'a> = dyn FnMut(Event) -> Result<()> + 'a;

/// The directories in which checkpoints are searched for.
pub struct CheckpointDirs<'a> {
    /// The directory `checkpoint.dir`.
    pub root: &'a Path,
    /// The working directory of the job, to which a relative `resume.from` refers.
    pub workdir: &'a Path,
    /// Which ranks see the same directory at `root`, and which of them leads it.
    pub layout: &'a StorageTopology,
}

/// Loads the checkpoint that the job names. Returns `None` if the run starts at step 0. Collective:
/// every rank must call it.
///
/// `data_digest` is the digest of the training data. With `resume.from: auto`, damaged checkpoints
/// are skipped with a notice in favour of older ones. A checkpoint of another model is an error of
/// the job and never skipped.
pub fn resume_from_checkpoint(
    ready: &mut UninitializedTrainer,
    job: &JobSpec,
    dirs: &CheckpointDirs,
    data_digest: &str,
    events: &mut EventSink,
) -> Result<Option<ResumePoint>> {
    let root = dirs.root;
    let (candidates, is_named) = match &job.resume.from {
        ResumeFrom::Never => return Ok(None),
        ResumeFrom::Auto => (list_candidates(ready, dirs, root)?, false),
        ResumeFrom::Path(path) => match find_named_checkpoint(ready, dirs, &dirs.workdir.join(path))? {
            NamedCheckpoint::Native(candidate) => (vec![candidate], true),
            NamedCheckpoint::External(mut source, path) => {
                source.unfuse_experts(&list_weight_shapes(ready));
                return external::load_external(ready, &source, &path, job, events).map(Some);
            }
        },
    };
    let mut skipped: Vec<(PathBuf, Error)> = Vec::new();
    for candidate in candidates {
        match load_native(ready, dirs, &candidate, data_digest, events) {
            Ok(resumed) => {
                for (path, error) in skipped {
                    let state = if is_unreachable(&error) { "incomplete" } else { "damaged" };
                    let message = format!("skipped {state} checkpoint {}: {error}", path.display());
                    events(Event::new_diagnostic_notice(None, message, error.diagnostic()))?;
                }
                return Ok(Some(resumed));
            }
            Err(LoadError::Fatal(e)) => return Err(e),
            Err(LoadError::Damaged(e)) if is_named => return Err(e),
            Err(LoadError::Damaged(e)) => skipped.push((candidate.path, e)),
        }
    }
    if skipped.is_empty() { Ok(None) } else { Err(build_no_usable_checkpoint_error(root, &skipped)) }
}

/// Returns whether the error is about shards of hosts that are not part of the job. Such an error
/// does not mean that a file is damaged.
fn is_unreachable(error: &Error) -> bool {
    error.code() == codes::RESUME_SHARD_UNREACHABLE
}

/// Builds the error of a job for which no checkpoint is usable. `skipped` has the newest checkpoint
/// first.
fn build_no_usable_checkpoint_error(root: &Path, skipped: &[(PathBuf, Error)]) -> Error {
    let (_, newest) = &skipped[0];
    if skipped.iter().all(|(_, e)| is_unreachable(e)) {
        return newest.clone();
    }
    let message = match skipped.len() {
        1 => format!("the only checkpoint in {} is damaged", root.display()),
        n => format!("all {n} checkpoints in {} are damaged or incomplete", root.display()),
    };
    Diagnostic::error(codes::RESUME_NO_USABLE_CHECKPOINT, message)
        .with_subject(root.display().to_string())
        .with_field("checkpoints", skipped.len())
        .with_cause(newest)
        .with_help("rebuild one with `launch ckpt repair`, or remove them")
        .with_help("or set `resume.from: never` to start at step 0")
        .into()
}

/// Lists the names and shapes of the model's weights.
fn list_weight_shapes(ready: &UninitializedTrainer) -> Vec<(String, Vec<u64>)> {
    let params = ready.trainer.engine.shards.iter().flat_map(|s| &s.unit.params);
    params.map(|p| (p.name.clone(), p.shape.iter().map(|&n| n as u64).collect())).collect()
}

/// The reason why a checkpoint was not loaded.
enum LoadError {
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

/// Lists all checkpoints in `root`, newest first: those that rank 0 sees, or those of any host if
/// hosts have separate directories.
///
/// Collective: every rank must call it.
fn list_candidates(
    ready: &UninitializedTrainer,
    dirs: &CheckpointDirs,
    root: &Path,
) -> Result<Vec<CheckpointCandidate>> {
    let queue = ready.trainer.engine.queue();
    if !dirs.layout.is_shared() {
        return host_local::list_candidates(queue, dirs.layout, root);
    }
    let listed = if ready.trainer.engine.rank() == 0 { ckpt::list_checkpoints(root) } else { Ok(Vec::new()) };
    let paths = listed.map(|list| list.into_iter().map(|(_, path)| path).collect::<Vec<_>>());
    let paths = all_gather_values(queue, paths.map_err(to_unreadable_checkpoint_error))?.swap_remove(0);
    Ok(paths.into_iter().map(CheckpointCandidate::from_path).collect())
}

/// The checkpoint that `resume.from` names.
enum NamedCheckpoint {
    Native(CheckpointCandidate),
    External(Box<ExternalCheckpoint>, PathBuf),
}

/// Finds the checkpoint at `path`: a native checkpoint, the newest native one in the directory, or
/// an external one.
///
/// Collective: every rank must call it.
fn find_named_checkpoint(
    ready: &UninitializedTrainer,
    dirs: &CheckpointDirs,
    path: &Path,
) -> Result<NamedCheckpoint> {
    let has_manifest = path.join("manifest.json").exists();
    // With host-local directories a host without a part of the checkpoint has no manifest.
    if all_gather_values(ready.trainer.engine.queue(), Ok(has_manifest))?.contains(&true) {
        return Ok(NamedCheckpoint::Native(CheckpointCandidate::from_path(path.to_path_buf())));
    }
    if let Some(newest) = list_candidates(ready, dirs, path)?.into_iter().next() {
        return Ok(NamedCheckpoint::Native(newest));
    }
    let trained = weight_match::list_trained_names(ready);
    let found = ckpt::open_with_trained_names(path, Some(&trained)).map_err(|e| {
        Error::from(Diagnostic::from(to_unreadable_checkpoint_error(e)).with_subject("resume.from"))
    });
    if let Some(e) = exchange_first_damage(ready, found.as_ref().err().cloned())? {
        return Err(e);
    }
    match found? {
        OpenedCheckpoint::External(source) => Ok(NamedCheckpoint::External(source, path.to_path_buf())),
        OpenedCheckpoint::Native(newest) => Ok(NamedCheckpoint::Native(CheckpointCandidate::from_path(
            newest.checkpoint.path().to_path_buf(),
        ))),
    }
}

/// Loads a native checkpoint: each rank reads its owned ranges. Collective: every rank must call
/// it.
fn load_native(
    ready: &mut UninitializedTrainer,
    dirs: &CheckpointDirs,
    candidate: &CheckpointCandidate,
    data_digest: &str,
    events: &mut EventSink,
) -> std::result::Result<ResumePoint, LoadError> {
    let path = candidate.path.as_path();
    let opened = open_native(ready, dirs, candidate)?;
    let damage = exchange_first_damage(ready, opened.as_ref().err().cloned())?;
    let opened = match (opened, damage) {
        (Ok(opened), None) => opened,
        (_, Some(e)) | (Err(e), None) => return Err(LoadError::Damaged(e)),
    };
    let (checkpoint, source): (&Checkpoint, &dyn TensorSource) = match &opened {
        ReadableCheckpoint::Shared(c) => (c, &**c),
        ReadableCheckpoint::HostLocal(c) => (c.checkpoint(), &**c),
    };
    let (facts, tensors) = (checkpoint.facts(), source.tensors());
    let units: Vec<_> = ready.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let weights_only = checkpoint.has_only_weights();
    require_compatible(checkpoint, &units, ready.trainer.optimizer.spec())?;
    let (cursor, guess) = match weights_only {
        true => (Cursor::default(), Some(differences::format_weights_only_notice(path))),
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
    let read = read_owned_ranges(ready, &plan).err().map(to_unreadable_checkpoint_error);
    if let Some(e) = exchange_first_damage(ready, read)? {
        return Err(LoadError::Damaged(e));
    }
    sync_replicas(ready)?;
    events(Event::Resume {
        step: facts.step,
        path: path.into(),
        world: Some(facts.world),
        stage: Some(facts.stage),
    })?;
    let mut notices: Vec<String> =
        guess.into_iter().chain(differences::find_master_weight_notice(ready, &tensors)).collect();
    if !weights_only {
        notices.extend(differences::collect_frozen_parameter_notices(&units, &tensors, &reset_states));
        notices.extend(differences::collect_job_setting_notices(ready, facts, data_digest));
    }
    for message in notices {
        events(Event::new_notice(None, message))?;
    }
    let rng_generation = facts.rng.get("generation").and_then(Value::as_u64).unwrap_or(0);
    Ok(ResumePoint { path: path.into(), cursor, is_native: true, rng_generation })
}

/// A native checkpoint of which every rank can read all bytes.
enum ReadableCheckpoint {
    Shared(Box<Checkpoint>),
    HostLocal(Box<HostLocalCheckpoint>),
}

/// Opens a native checkpoint. The inner error is damage of the checkpoint; the outer error ends the
/// job.
///
/// Collective: every rank must call it.
fn open_native(
    ready: &UninitializedTrainer,
    dirs: &CheckpointDirs,
    candidate: &CheckpointCandidate,
) -> Result<Result<ReadableCheckpoint>> {
    if dirs.layout.is_shared() {
        return Ok(match Checkpoint::open(&candidate.path) {
            Ok(checkpoint) => match checkpoint.local_files().iter().position(|is_here| !is_here) {
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

/// Exchanges the damage that each rank found. Every rank returns the damage of the lowest rank that
/// found any, or `None`.
///
/// Collective: every rank must call it.
fn exchange_first_damage(ready: &UninitializedTrainer, mine: Option<Error>) -> Result<Option<Error>> {
    let damage = all_gather_values(ready.trainer.engine.queue(), Ok(mine))?;
    Ok(damage.into_iter().flatten().next())
}

/// Builds an error about the position that a checkpoint records.
fn build_invalid_position_error(path: &Path, what: &str) -> Diagnostic {
    let message = format!("checkpoint {}: {what}", path.display());
    Diagnostic::error(codes::RESUME_POSITION_INVALID, message).with_subject(path.display().to_string())
}

/// Reads the progress that the checkpoint records.
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
                build_invalid_position_error(path, "cannot read the position in its manifest").with_cause(&e)
            })?;
            Ok((cursor, None))
        }
        _ => {
            let batch = ready.trainer.global_batch();
            let samples = facts
                .step
                .checked_mul(batch)
                .ok_or_else(|| build_invalid_position_error(path, "the number of steps is out of range"))?;
            let notice = format!(
                "data resumes at sample {samples} (step {} × global batch {batch}; the checkpoint records no position)",
                facts.step
            );
            Ok((Cursor { step: facts.step, consumed_samples: samples, tokens: facts.tokens }, Some(notice)))
        }
    }
}

/// Restores the loss scale that the checkpoint records. Does nothing if no loss scale is recorded.
fn restore_loss_scale(ready: &mut UninitializedTrainer, facts: &RunFacts, path: &Path) -> Result<()> {
    let Some(state) = facts.cursor.get("loss_scale").filter(|s| !s.is_null()) else { return Ok(()) };
    let invalid = || build_invalid_position_error(path, "cannot use the loss scale in its manifest");
    let state = LossScaleState::deserialize(state).map_err(|e| invalid().with_cause(&e))?;
    Ok(ready.trainer.loss_scale.restore_state(state).map_err(|e| invalid().with_cause(&e))?)
}

/// Reads the step lags that the checkpoint records: by how many updates some parameters are behind
/// the others.
fn read_step_lag(facts: &RunFacts, path: &Path) -> Result<HashMap<String, u64>> {
    match facts.cursor.get("late") {
        None | Some(Value::Null) => Ok(HashMap::new()),
        Some(lag) => Ok(serde_json::from_value(lag.clone()).map_err(|e| {
            build_invalid_position_error(path, "cannot read the update counts in its manifest").with_cause(&e)
        })?),
    }
}
