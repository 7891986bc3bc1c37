//! Prepares a checkpoint of HF Trainer or Accelerate for resuming with another number of ranks, in
//! a directory next to the checkpoint.
//!
//! Files that don't depend on the number of ranks become hard links. RNG states are assigned by the
//! rule in [`super::reconcile`], DeepSpeed's state is resharded, and counters of processes are
//! rescaled. The original is never modified.
use super::link_tree::{self, ScratchDir};
use super::rank_files::{self, AllRankRngStates, RngRecord};
use super::reconcile::{ReconcileOptions, ReconcilePolicy, RngDecision, reconcile_rng_states};
use super::streams::{RankRngStates, RngFormat};
use super::{deepspeed_reshard, scheduler};
use crate::catalog::ExternalCheckpoint;
use crate::codec::disk::{self, Directory, path_exists};
use crate::error::{CkptError, Diagnosis, MissingPart, OutputProblem, Result};
use crate::layout::deepspeed;
use crate::layout::hf::companion_files::{TRAINER_STATE_FILE, read_global_step};
use crate::open::open_external_checkpoint;
use crate::save::output_record::update_file_lists_of_modified_copy;
use crate::save::{ReplaceMethod, publish_directory};
use diagnostic::quantity::format_count;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the directory with the optimizer state in sharded FSDP checkpoints of Accelerate.
const FSDP_OPTIMIZER_DIR: &str = "optimizer_0";

/// The place to which a checkpoint copy for another number of ranks is written: next to the
/// original, at a given path, or over the original.
#[derive(Clone, Debug)]
pub enum PrepareDestination {
    /// The path `launch-wM/NAME` next to the checkpoint `NAME`, where M is the number of ranks.
    Sibling,
    /// A path that must not exist yet.
    At(PathBuf),
    /// The checkpoint's own path. The checkpoint is replaced atomically.
    InPlace,
}

/// A checkpoint of HF Trainer or Accelerate from which the requested number of ranks can resume.
#[derive(Clone, Debug)]
pub struct PreparedCheckpoint {
    /// The directory to resume from. This is the original checkpoint if it fits unchanged.
    pub path: PathBuf,
    /// How RNG states were assigned to ranks. `None` if the checkpoint has no RNG states, or fits
    /// unchanged.
    pub decision: Option<RngDecision>,
    /// Messages for the user about the changes.
    pub lines: Vec<String>,
    /// Whether an earlier start made the directory, and this one reuses it.
    pub is_reused: bool,
}

impl PreparedCheckpoint {
    /// Creates the result for a checkpoint in `dir` from which the requested number of ranks can
    /// resume without a modified copy.
    fn from_unchanged_original(dir: &Path, lines: Vec<String>) -> PreparedCheckpoint {
        PreparedCheckpoint { path: dir.to_owned(), decision: None, lines, is_reused: false }
    }
}

/// Writes a copy of a checkpoint in which the random generator states (RNG) are assigned to
/// `options.world` ranks. All other files are hard links to the original files.
///
/// # Errors
/// Fails if the checkpoint has no valid RNG states, the rule forbids the assignment, or the
/// destination exists and isn't a directory that `launch` made.
pub fn prepare_rng_states(
    dir: &Path,
    options: &ReconcileOptions,
    destination: &PrepareDestination,
) -> Result<PreparedCheckpoint> {
    let checkpoint = HfCheckpoint::open(dir)?;
    let Some(stored) = &checkpoint.stored else {
        return Err(CkptError::missing(dir, MissingPart::AllRngFiles));
    };
    let (ranks, decision) = checkpoint.reconcile_rng_streams(stored, options)?;
    let lines = vec![decision.summary()];
    let record = RngRecord::new(checkpoint.name.clone(), decision.clone());
    let path = build_prepared_directory(
        dir,
        destination,
        options.world,
        &checkpoint.name,
        &|name| rank_files::is_rng_file(name),
        &mut |staged| rank_files::write_all_rank_states(staged, stored.writer, &ranks, &record),
    )?;
    Ok(PreparedCheckpoint { path, decision: Some(decision), lines, is_reused: false })
}

/// Prepares a directory from which an unmodified script of HF Trainer or Accelerate resumes with
/// `options.world` ranks. Returns the original if it fits unchanged.
///
/// # Errors
/// Fails if the directory isn't a checkpoint of these programs, is damaged, or can't be changed to
/// `options.world` ranks.
pub fn prepare_resume_directory(dir: &Path, options: &ReconcileOptions) -> Result<PreparedCheckpoint> {
    let checkpoint = HfCheckpoint::open(dir)?;
    let Some(old_world) = checkpoint.world_size() else {
        let lines =
            vec![format!("{} has no RNG states; the program seeds its generators itself", dir.display())];
        if options.policy == ReconcilePolicy::Strict {
            return Err(CkptError::missing(dir, MissingPart::AllRngFiles));
        }
        return Ok(PreparedCheckpoint::from_unchanged_original(dir, lines));
    };
    let resharded =
        checkpoint.state.as_ref().filter(|s| deepspeed_reshard::needs_deepspeed_reshard(s, options.world));
    if resharded.is_none() && old_world == options.world && options.policy != ReconcilePolicy::Reseed {
        return Ok(PreparedCheckpoint::from_unchanged_original(dir, Vec::new()));
    }
    let record = deepspeed_reshard::PreparedRecord::new(
        dir,
        &checkpoint.name,
        options.world,
        format!("{:?}, seed {:?}, GPUs {:?}", options.policy, options.run_seed, options.gpus),
    )?;
    if let Some(state) = resharded {
        deepspeed_reshard::check_loadable_by_deepspeed(dir, state)?;
        // resharding takes long, so a result that an earlier start made from equal files is reused
        if let Some((path, earlier)) =
            checkpoint.find_earlier_prepared_dir(options.world).filter(|(_, e)| e.has_same_request(&record))
        {
            let lines = vec![format!("{} (prepared at an earlier start)", earlier.summary)];
            let decision = RngRecord::read(&path)?.map(|r| r.decision);
            return Ok(PreparedCheckpoint { path, decision, lines, is_reused: true });
        }
    }
    rewrite_for_world_size(dir, &checkpoint, old_world, options, resharded, record)
}

/// Writes a copy of a checkpoint for `options.world` ranks, with assigned random generator states
/// and resharded DeepSpeed state, and returns the path of the copy. `resharded` is DeepSpeed's
/// state, or `None` if no state must be resharded.
fn rewrite_for_world_size(
    dir: &Path,
    checkpoint: &HfCheckpoint,
    old_world: u32,
    options: &ReconcileOptions,
    resharded: Option<&ExternalCheckpoint>,
    mut record: deepspeed_reshard::PreparedRecord,
) -> Result<PreparedCheckpoint> {
    let mut lines = vec![format!(
        "{} was saved by {}, resuming with {}",
        checkpoint.name,
        format_count(old_world, "rank"),
        options.world
    )];
    let reconciled = match &checkpoint.stored {
        Some(stored) => {
            let (ranks, decision) = checkpoint.reconcile_rng_streams(stored, options)?;
            lines.push(decision.summary());
            Some((stored.writer, ranks, decision))
        }
        None => None,
    };
    let scheduler = scheduler::rescale_scheduler(
        &Directory::open(dir)?,
        old_world,
        options.world,
        checkpoint.count_updates(dir)?,
    )?;
    lines.extend(scheduler.iter().map(|s| s.summary.clone()));
    let skip = |name: &str| {
        rank_files::is_rng_file(name)
            || name == deepspeed_reshard::PREPARED_RECORD_FILE
            || scheduler.as_ref().is_some_and(|s| s.name == name)
            || resharded.is_some_and(|state| deepspeed_reshard::is_replaced_entry(state, name))
    };
    let fill = &mut |staged: &Path| {
        if let Some(state) = resharded {
            lines.insert(1, deepspeed_reshard::write_resharded_state(state, options.world, staged)?);
        }
        if let Some(s) = &scheduler {
            disk::write_file(staged.join(s.name), &s.bytes)?;
        }
        if let Some((writer, ranks, decision)) = &reconciled {
            let record = RngRecord::new(checkpoint.name.clone(), decision.clone());
            rank_files::write_all_rank_states(staged, *writer, ranks, &record)?;
        }
        record.summary = lines.join("; ");
        record.write(staged)
    };
    let path = build_prepared_directory(
        dir,
        &PrepareDestination::Sibling,
        options.world,
        &checkpoint.name,
        &skip,
        fill,
    )?;
    let decision = reconciled.map(|(_, _, decision)| decision);
    Ok(PreparedCheckpoint { path, decision, lines: vec![record.summary], is_reused: false })
}

/// Finds the newest complete checkpoint (`checkpoint-N`) in an output directory of HF Trainer. Also
/// returns a message for the user about each newer checkpoint that was skipped as incomplete.
///
/// # Errors
/// Fails if the directory exists and can't be listed.
pub fn find_newest_complete(dir: &Path) -> Result<(Option<PathBuf>, Vec<String>)> {
    let mut lines = Vec::new();
    if !path_exists(dir) {
        return Ok((None, lines));
    }
    let number = |name: &String| {
        let digits = name.strip_prefix("checkpoint-")?;
        digits.parse::<u64>().ok().filter(|n| n.to_string() == digits)
    };
    let mut names: Vec<(u64, String)> =
        Directory::open(dir)?.list_names()?.into_iter().filter_map(|n| Some((number(&n)?, n))).collect();
    names.sort_unstable_by(|a, b| b.cmp(a));
    for (step, name) in names {
        let path = dir.join(name);
        match check_trainer_checkpoint_complete(&path, step) {
            Ok(()) => return Ok((Some(path), lines)),
            Err(e) => lines.push(format!("skipped {}: {e}", path.display())),
        }
    }
    Ok((None, lines))
}

/// Checks that a checkpoint of HF Trainer (`checkpoint-N`) has all files that a resume needs. HF
/// Trainer writes `trainer_state.json` last, so that file must exist and be of step `step`. The RNG
/// states must be readable.
fn check_trainer_checkpoint_complete(path: &Path, step: u64) -> Result<()> {
    match read_global_step(&Directory::open(path)?)? {
        Some(found) if found == step => {}
        Some(found) => {
            return Err(CkptError::damaged(
                path,
                TRAINER_STATE_FILE,
                format!("global_step is {found}, expected {step}"),
            ));
        }
        None => return Err(CkptError::missing(path, MissingPart::File(TRAINER_STATE_FILE.into()))),
    }
    HfCheckpoint::open(path).map(drop)
}

/// A checkpoint of HF Trainer or Accelerate, and the random generator states of its ranks.
struct HfCheckpoint {
    /// Name of the checkpoint directory.
    name: String,
    /// Absolute path of the checkpoint's parent directory.
    parent: PathBuf,
    /// The RNG states; `None` if the checkpoint has none.
    stored: Option<AllRankRngStates>,
    /// DeepSpeed's state; `None` if the checkpoint has none.
    state: Option<ExternalCheckpoint>,
    /// Number of completed optimizer steps, or 0 if no file records the number.
    step: u64,
}

impl HfCheckpoint {
    /// Opens the checkpoint in `dir` and reads the random generator states of its ranks.
    ///
    /// # Errors
    /// Fails if `dir` does not exist, isn't a checkpoint of these programs, or is damaged.
    fn open(dir: &Path) -> Result<HfCheckpoint> {
        let not = |diagnosis: Diagnosis| CkptError::not_a_checkpoint(dir, diagnosis);
        if !path_exists(dir) {
            return Err(CkptError::NotFound { path: dir.to_owned() });
        }
        let absolute = fs::canonicalize(dir).map_err(CkptError::io("find", dir))?;
        let name = absolute.file_name().and_then(|n| n.to_str());
        let name = name.ok_or_else(|| not(Diagnosis::NameNotUtf8))?.to_owned();
        let opened = Directory::open(dir)?;
        let trainer = read_global_step(&opened)?;
        let state = deepspeed::open_deepspeed(dir)?;
        let stored =
            rank_files::read_all_rank_states(dir, state.as_ref().and_then(|s| s.facts().state.world))?;
        if trainer.is_none() && state.is_none() && stored.is_none() && !is_accelerate_directory(&opened)? {
            return Err(not(Diagnosis::NoTrainerState));
        }
        let counted = stored.as_ref().and_then(|s| s.ranks.first()?.step).and_then(|s| u64::try_from(s).ok());
        let step = trainer.or_else(|| state.as_ref()?.facts().state.step).or(counted).unwrap_or(0);
        Ok(HfCheckpoint { name, parent: disk::parent_dir(&absolute), stored, state, step })
    }

    /// Returns the number of ranks that saved the checkpoint, or `None` if its files do not reveal
    /// the number.
    fn world_size(&self) -> Option<u32> {
        let world = self.state.as_ref().and_then(|s| s.facts().state.world);
        world.or(self.stored.as_ref().map(|s| s.ranks.len() as u32))
    }

    /// Reads how many optimizer updates the checkpoint has had, from DeepSpeed's state or FSDP's
    /// sharded optimizer state. Returns `None` if the checkpoint has neither, or the state records
    /// no number. Does not read `optimizer.bin`.
    fn count_updates(&self, dir: &Path) -> Result<Option<u64>> {
        let most = |state: &ExternalCheckpoint| state.facts().state.steps.values().copied().max();
        if let Some(state) = &self.state {
            return Ok(most(state));
        }
        match path_exists(&dir.join(FSDP_OPTIMIZER_DIR)) {
            true => Ok(open_external_checkpoint(dir)?.as_ref().and_then(most)),
            false => Ok(None),
        }
    }

    /// Finds the copy of this checkpoint for `world` ranks that an earlier start of the job has
    /// made, and returns its path and its record. Returns `None` if no such directory has a valid
    /// record. The caller must check that the record matches the original checkpoint and the
    /// options.
    fn find_earlier_prepared_dir(&self, world: u32) -> Option<(PathBuf, deepspeed_reshard::PreparedRecord)> {
        let path = prepared_sibling_path(&self.parent, world, &self.name);
        let record = deepspeed_reshard::PreparedRecord::read(&path)?;
        Some((path, record))
    }

    /// Assigns the random generator states (RNG) in the checkpoint to `options.world` ranks. The
    /// seeds of new states depend on the step of this checkpoint and the number of the assignment
    /// (generation).
    fn reconcile_rng_streams(
        &self,
        stored: &AllRankRngStates,
        options: &ReconcileOptions,
    ) -> Result<(Vec<RankRngStates>, RngDecision)> {
        let options =
            ReconcileOptions { step: self.step, generation: self.next_rng_generation()?, ..options.clone() };
        let path = self.parent.join(&self.name);
        let (mut ranks, decision) = reconcile_rng_states(&stored.ranks, &options)
            .map_err(|error| CkptError::unsupported(&path, error))?;
        if stored.writer == RngFormat::Accelerate {
            ranks.iter_mut().for_each(|r| r.step = stored.ranks.first().and_then(|f| f.step));
        }
        Ok((ranks, decision))
    }

    /// Returns the number of the next assignment of random generator states to ranks within this
    /// run, counted from 1 by the records of earlier assignments. Reads the record of the
    /// checkpoint, and the records of earlier steps in the prepared directories next to the
    /// checkpoint.
    fn next_rng_generation(&self) -> Result<u64> {
        let mut newest = RngRecord::read(&self.parent.join(&self.name))?.map_or(0, |r| r.decision.generation);
        for sibling in
            Directory::open(&self.parent)?.list_names()?.iter().filter(|n| n.starts_with("launch-w"))
        {
            let prepared = self.parent.join(sibling);
            let names = Directory::open(&prepared).and_then(|f| f.list_names()).unwrap_or_default();
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

/// Returns true if Accelerate wrote the directory, which then has `optimizer.bin` or FSDP's
/// directory of sharded weights.
fn is_accelerate_directory(directory: &Directory) -> Result<bool> {
    Ok(directory.file_size("optimizer.bin")?.is_some()
        || path_exists(&directory.path().join("pytorch_model_fsdp_0")))
}

/// Returns the path in `parent` at which a copy of the checkpoint `name` is prepared for `world`
/// ranks.
fn prepared_sibling_path(parent: &Path, world: u32, name: &str) -> PathBuf {
    parent.join(format!("launch-w{world}")).join(name)
}

/// Returns true if the directory `target` is a copy, made by launch for another number of ranks, of
/// the checkpoint `name`.
fn was_prepared_from(target: &Path, name: &str) -> Result<bool> {
    let prepared = deepspeed_reshard::PreparedRecord::read(target).is_some_and(|r| r.from == name);
    Ok(prepared || RngRecord::read(target)?.is_some_and(|r| r.from == name))
}

/// Creates a directory with links to the files of the checkpoint directory `dir` and with new
/// files, which the callback `fill` writes. Then renames the directory to its final name, and
/// returns the final path.
///
/// # Errors
/// Fails if the destination exists and may not be replaced, another process works in its parent
/// directory, or I/O fails.
fn build_prepared_directory(
    dir: &Path,
    destination: &PrepareDestination,
    world: u32,
    name: &str,
    skip: &dyn Fn(&str) -> bool,
    fill: &mut dyn FnMut(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let original = fs::canonicalize(dir).map_err(CkptError::io("find", dir))?;
    let target = match destination {
        PrepareDestination::Sibling => prepared_sibling_path(&disk::parent_dir(dir), world, name),
        PrepareDestination::At(path) => path.clone(),
        PrepareDestination::InPlace => original.clone(),
    };
    let parent = disk::parent_dir(&target);
    disk::make_dirs(&parent)?;
    let rejected = |problem: OutputProblem| CkptError::output_rejected(&target, problem);
    match destination {
        PrepareDestination::At(_) if path_exists(&target) => return Err(rejected(OutputProblem::Exists)),
        PrepareDestination::Sibling if path_exists(&target) && !was_prepared_from(&target, name)? => {
            return Err(rejected(OutputProblem::NotOurs { operation: "`launch ckpt rng`" }));
        }
        _ => {}
    }
    let _lock = disk::try_lock_dir(&parent)?;
    let target_name = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let scratch = ScratchDir::new(&parent, &target_name)?;
    link_tree::link_or_copy_tree(&original, &scratch.dir, skip)?;
    fill(&scratch.dir)?;
    update_file_lists_of_modified_copy(&scratch.dir, &original, &BTreeSet::new())?;
    disk::sync_dir(&scratch.dir)?;
    // the scratch directory now has the previous content of `target`, and is removed on drop
    publish_directory(&scratch.dir, &target, ReplaceMethod::AtomicExchange)?;
    Ok(target)
}
