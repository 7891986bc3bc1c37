//! Prepares a checkpoint of HF Trainer or Accelerate for another number of ranks, as a directory
//! `launch-wM/NAME` next to it.
//!
//! Files that don't depend on the number of ranks are hard links; RNG states are assigned by the
//! rule in [`super::reconcile`]; DeepSpeed's state is resharded and counters of processes are
//! rescaled. The original is never modified.
use super::link_tree::{self, ScratchDir};
use super::rank_files::{self, RngRecord, StoredStates};
use super::reconcile::{ReconcileOptions, ReconcilePolicy, RngDecision, count_ranks, reconcile};
use super::reshard;
use super::scheduler;
use super::streams::{RankStates, RngFormat};
use crate::commit::{Swap, publish};
use crate::diagnosis::Diagnosis;
use crate::disk::{self, Directory, exists};
use crate::error::{CkptError, MissingPart, OutputProblem, Result};
use crate::external::{self, ExternalCheckpoint};
use crate::formats::deepspeed;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Largest `trainer_state.json` that is read, bytes (it has a line of history per logged step).
const TRAINER_STATE_MAX: u64 = 1 << 30;
const TRAINER_STATE: &str = "trainer_state.json";
/// Directory of the optimizer in FSDP's sharded checkpoints.
const FSDP_OPTIMIZER: &str = "optimizer_0";

/// Where a prepared checkpoint is written.
#[derive(Clone, Debug)]
pub enum Destination {
    /// `launch-wM/NAME`, next to the checkpoint `NAME`.
    Sibling,
    /// A path that doesn't exist yet.
    At(PathBuf),
    /// The checkpoint itself, which is replaced atomically.
    InPlace,
}

/// A checkpoint that is ready for the requested number of ranks.
#[derive(Clone, Debug)]
pub struct PreparedCheckpoint {
    /// The directory to resume from; the original where it fits unchanged.
    pub path: PathBuf,
    /// How RNG states were assigned; `None` when there are none, or they fit unchanged.
    pub decision: Option<RngDecision>,
    /// What was done, as lines for the user.
    pub lines: Vec<String>,
}

/// Makes RNG states for exactly `options.world` ranks and changes nothing else.
///
/// # Errors
/// When the checkpoint has no valid RNG states, when the rule forbids the change, or when the
/// destination exists and isn't a directory that `launch` made.
pub fn prepare_rng(
    dir: &Path,
    options: &ReconcileOptions,
    destination: &Destination,
) -> Result<PreparedCheckpoint> {
    let checkpoint = ProgramCheckpoint::open(dir)?;
    let Some(stored) = &checkpoint.stored else {
        return Err(CkptError::missing(dir, MissingPart::AllRngFiles));
    };
    let (ranks, decision) = checkpoint.reconcile_streams(stored, options)?;
    let lines = vec![decision.summary()];
    let record = RngRecord::new(checkpoint.name.clone(), decision.clone());
    let path = build_directory(
        dir,
        destination,
        options.world,
        &checkpoint.name,
        &|name| rank_files::is_rng_file(name),
        &mut |staged| rank_files::write_ranks(staged, stored.writer, &ranks, &record),
    )?;
    Ok(PreparedCheckpoint { path, decision: Some(decision), lines })
}

/// Makes a directory from which an unmodified script of HF Trainer or Accelerate resumes with
/// `options.world` ranks. Returns the original where it fits unchanged.
///
/// # Errors
/// When the directory isn't such a checkpoint, is damaged, or can't be changed to that number of
/// ranks.
pub fn prepare_resume(dir: &Path, options: &ReconcileOptions) -> Result<PreparedCheckpoint> {
    let checkpoint = ProgramCheckpoint::open(dir)?;
    let Some(old_world) = checkpoint.world() else {
        let lines =
            vec![format!("{} has no RNG states; the program seeds its generators itself", dir.display())];
        if options.policy == ReconcilePolicy::Strict {
            return Err(CkptError::missing(dir, MissingPart::AllRngFiles));
        }
        return Ok(PreparedCheckpoint { path: dir.to_owned(), decision: None, lines });
    };
    let resharded = checkpoint.state.as_ref().filter(|s| reshard::needs_reshard(s, options.world));
    if resharded.is_none() && old_world == options.world && options.policy != ReconcilePolicy::Reseed {
        return Ok(PreparedCheckpoint { path: dir.to_owned(), decision: None, lines: Vec::new() });
    }
    let record = reshard::PreparedRecord::new(
        dir,
        &checkpoint.name,
        options.world,
        format!("{:?}, seed {:?}, GPUs {:?}", options.policy, options.run_seed, options.gpus),
    )?;
    if let Some(state) = resharded {
        reshard::check_loadable(dir, state)?;
        // resharding takes long, so the result of an earlier start from equal files is reused
        if let Some((path, earlier)) =
            checkpoint.earlier_result(options.world).filter(|(_, e)| e.is_same_work(&record))
        {
            let lines = vec![format!("{} (prepared at an earlier start)", earlier.summary)];
            let decision = RngRecord::read(&path)?.map(|r| r.decision);
            return Ok(PreparedCheckpoint { path, decision, lines });
        }
    }
    rewrite_for_world(dir, &checkpoint, old_world, options, resharded, record)
}

/// Builds the directory for another number of ranks, or with reseeded RNG states. `resharded` is
/// DeepSpeed's state, where it must be resharded.
fn rewrite_for_world(
    dir: &Path,
    checkpoint: &ProgramCheckpoint,
    old_world: u32,
    options: &ReconcileOptions,
    resharded: Option<&ExternalCheckpoint>,
    mut record: reshard::PreparedRecord,
) -> Result<PreparedCheckpoint> {
    let mut lines = vec![format!(
        "{} was saved by {}, resuming with {}",
        checkpoint.name,
        count_ranks(old_world),
        options.world
    )];
    let reconciled = match &checkpoint.stored {
        Some(stored) => {
            let (ranks, decision) = checkpoint.reconcile_streams(stored, options)?;
            lines.push(decision.summary());
            Some((stored.writer, ranks, decision))
        }
        None => None,
    };
    let scheduler =
        scheduler::rescale(&Directory::open(dir)?, old_world, options.world, checkpoint.updates(dir)?)?;
    lines.extend(scheduler.iter().map(|s| s.summary.clone()));
    let skip = |name: &str| {
        rank_files::is_rng_file(name)
            || name == reshard::RECORD
            || scheduler.as_ref().is_some_and(|s| s.name == name)
            || resharded.is_some_and(|state| reshard::is_replaced(state, name))
    };
    let fill = &mut |staged: &Path| {
        if let Some(state) = resharded {
            lines.insert(1, reshard::write(state, options.world, staged)?);
        }
        if let Some(s) = &scheduler {
            disk::write_file(staged.join(s.name), &s.bytes)?;
        }
        if let Some((writer, ranks, decision)) = &reconciled {
            let record = RngRecord::new(checkpoint.name.clone(), decision.clone());
            rank_files::write_ranks(staged, *writer, ranks, &record)?;
        }
        record.summary = lines.join("; ");
        record.write(staged)
    };
    let path = build_directory(dir, &Destination::Sibling, options.world, &checkpoint.name, &skip, fill)?;
    let decision = reconciled.map(|(_, _, decision)| decision);
    Ok(PreparedCheckpoint { path, decision, lines: vec![record.summary] })
}

/// The newest complete `checkpoint-N` in an output directory of HF Trainer, with a line for the
/// user about each newer one that is incomplete.
///
/// # Errors
/// When the directory exists and can't be listed.
pub fn newest_complete(dir: &Path) -> Result<(Option<PathBuf>, Vec<String>)> {
    let mut lines = Vec::new();
    if !exists(dir) {
        return Ok((None, lines));
    }
    let number = |name: &String| {
        let digits = name.strip_prefix("checkpoint-")?;
        digits.parse::<u64>().ok().filter(|n| n.to_string() == digits)
    };
    let mut names: Vec<(u64, String)> =
        Directory::open(dir)?.names()?.into_iter().filter_map(|n| Some((number(&n)?, n))).collect();
    names.sort_by(|a, b| b.cmp(a));
    for (step, name) in names {
        let path = dir.join(name);
        match check_complete(&path, step) {
            Ok(()) => return Ok((Some(path), lines)),
            Err(e) => lines.push(format!("skipped {}: {e}", path.display())),
        }
    }
    Ok((None, lines))
}

/// Checks that a `checkpoint-N` is complete: HF Trainer writes `trainer_state.json` last, so that
/// file must exist and be of this step, and the RNG states must be readable.
fn check_complete(path: &Path, step: u64) -> Result<()> {
    match read_global_step(&Directory::open(path)?)? {
        Some(found) if found == step => {}
        Some(found) => {
            return Err(CkptError::damaged(
                path,
                TRAINER_STATE,
                format!("global_step is {found}, expected {step}"),
            ));
        }
        None => return Err(CkptError::missing(path, MissingPart::File(TRAINER_STATE.into()))),
    }
    ProgramCheckpoint::open(path).map(drop)
}

/// Reads `global_step` of `trainer_state.json`; `None` when there is no such file.
fn read_global_step(directory: &Directory) -> Result<Option<u64>> {
    if directory.size_of(TRAINER_STATE)?.is_none() {
        return Ok(None);
    }
    let damaged = |why: String| CkptError::damaged(directory.path(), TRAINER_STATE, why);
    let text = directory.read(TRAINER_STATE, TRAINER_STATE_MAX)?;
    let state: Value = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
    let step = state.get("global_step").and_then(Value::as_u64);
    step.map(Some).ok_or_else(|| damaged("global_step is missing".into()))
}

/// A checkpoint directory of HF Trainer or Accelerate.
struct ProgramCheckpoint {
    name: String,
    parent: PathBuf,
    stored: Option<StoredStates>,
    /// DeepSpeed's state, where there is one.
    state: Option<ExternalCheckpoint>,
    step: u64,
}

impl ProgramCheckpoint {
    fn open(dir: &Path) -> Result<ProgramCheckpoint> {
        let not = |diagnosis: Diagnosis| CkptError::not_a_checkpoint(dir, diagnosis);
        if !exists(dir) {
            return Err(CkptError::NotFound { path: dir.to_owned() });
        }
        let absolute = fs::canonicalize(dir).map_err(CkptError::io("find", dir))?;
        let name = absolute.file_name().and_then(|n| n.to_str());
        let name = name.ok_or_else(|| not(Diagnosis::NameNotUtf8))?.to_owned();
        let opened = Directory::open(dir)?;
        let trainer = read_global_step(&opened)?;
        let state = deepspeed::open(dir)?;
        let stored = rank_files::read_ranks(dir, state.as_ref().and_then(|s| s.facts().world))?;
        if trainer.is_none() && state.is_none() && stored.is_none() && !is_accelerate_directory(&opened)? {
            return Err(not(Diagnosis::NoTrainerState));
        }
        let counted = stored.as_ref().and_then(|s| s.ranks.first()?.step).and_then(|s| u64::try_from(s).ok());
        let step = trainer.or_else(|| state.as_ref()?.facts().step).or(counted).unwrap_or(0);
        Ok(ProgramCheckpoint { name, parent: disk::parent_of(&absolute), stored, state, step })
    }

    /// The number of ranks that saved it, where its files show that.
    fn world(&self) -> Option<u32> {
        let world = self.state.as_ref().and_then(|s| s.facts().world);
        world.or(self.stored.as_ref().map(|s| s.ranks.len() as u32))
    }

    /// The number of optimizer updates, where `optimizer.bin` doesn't have it: with DeepSpeed, and
    /// with FSDP's sharded state.
    fn updates(&self, dir: &Path) -> Result<Option<u64>> {
        let most = |state: &ExternalCheckpoint| state.facts().steps.values().copied().max();
        if let Some(state) = &self.state {
            return Ok(most(state));
        }
        match exists(&dir.join(FSDP_OPTIMIZER)) {
            true => Ok(external::open(dir)?.as_ref().and_then(most)),
            false => Ok(None),
        }
    }

    /// The directory that an earlier start made for `world` ranks, with its record.
    fn earlier_result(&self, world: u32) -> Option<(PathBuf, reshard::PreparedRecord)> {
        let path = sibling_path(&self.parent, world, &self.name);
        let record = reshard::PreparedRecord::read(&path)?;
        Some((path, record))
    }

    fn reconcile_streams(
        &self,
        stored: &StoredStates,
        options: &ReconcileOptions,
    ) -> Result<(Vec<RankStates>, RngDecision)> {
        let options = ReconcileOptions { step: self.step, generation: self.generation()?, ..options.clone() };
        let path = self.parent.join(&self.name);
        let (mut ranks, decision) = reconcile(&stored.ranks, &options).map_err(|error| error.at(&path))?;
        if stored.writer == RngFormat::Accelerate {
            ranks.iter_mut().for_each(|r| r.step = stored.ranks.first().and_then(|f| f.step));
        }
        Ok((ranks, decision))
    }

    /// The next generation: one more than the highest recorded in the directory itself or, for
    /// earlier steps, in the prepared directories next to it.
    fn generation(&self) -> Result<u64> {
        let mut newest = RngRecord::read(&self.parent.join(&self.name))?.map_or(0, |r| r.decision.generation);
        for sibling in Directory::open(&self.parent)?.names()?.iter().filter(|n| n.starts_with("launch-w")) {
            let prepared = self.parent.join(sibling);
            let names = Directory::open(&prepared).and_then(|f| f.names()).unwrap_or_default();
            for name in names.iter().filter(|n| !n.starts_with('.')) {
                // an unreadable record doesn't count
                let record = RngRecord::read(&prepared.join(name)).ok().flatten();
                let earlier = record.filter(|r| r.decision.step < self.step);
                newest = newest.max(earlier.map_or(0, |r| r.decision.generation));
            }
        }
        Ok(newest.saturating_add(1))
    }
}

fn is_accelerate_directory(directory: &Directory) -> Result<bool> {
    Ok(directory.size_of("optimizer.bin")?.is_some()
        || exists(&directory.path().join("pytorch_model_fsdp_0")))
}

fn sibling_path(parent: &Path, world: u32, name: &str) -> PathBuf {
    parent.join(format!("launch-w{world}")).join(name)
}

/// Whether `launch` made the directory `target` from the checkpoint called `name`.
fn was_prepared_from(target: &Path, name: &str) -> Result<bool> {
    let prepared = reshard::PreparedRecord::read(target).is_some_and(|r| r.from == name);
    Ok(prepared || RngRecord::read(target)?.is_some_and(|r| r.from == name))
}

/// Builds the result in a hidden directory: links of everything but the entries that `skip` names,
/// then the files that `fill` writes. Publishes it under its name when it is complete.
fn build_directory(
    dir: &Path,
    destination: &Destination,
    world: u32,
    name: &str,
    skip: &dyn Fn(&str) -> bool,
    fill: &mut dyn FnMut(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let original = fs::canonicalize(dir).map_err(CkptError::io("find", dir))?;
    let target = match destination {
        Destination::Sibling => sibling_path(&disk::parent_of(dir), world, name),
        Destination::At(path) => path.clone(),
        Destination::InPlace => original.clone(),
    };
    let parent = disk::parent_of(&target);
    disk::make_dirs(&parent)?;
    let rejected = |problem: OutputProblem| CkptError::output_rejected(&target, problem);
    match destination {
        Destination::At(_) if exists(&target) => return Err(rejected(OutputProblem::Exists)),
        Destination::Sibling if exists(&target) && !was_prepared_from(&target, name)? => {
            return Err(rejected(OutputProblem::NotOurs { operation: "`launch ckpt rng`" }));
        }
        _ => {}
    }
    let _lock = disk::lock_dir(&parent)?;
    let target_name = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let scratch = ScratchDir::new(&parent, &target_name)?;
    link_tree::link_tree(&original, &scratch.dir, skip)?;
    fill(&scratch.dir)?;
    disk::sync_dir(&scratch.dir)?;
    // the scratch directory now holds what had the name before, and is removed with it
    publish(&scratch.dir, &target, Swap::Atomic)?;
    Ok(target)
}
