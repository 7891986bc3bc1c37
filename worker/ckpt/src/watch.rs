//! [`CheckpointWatch`]: watches a directory, and reports when launch or another program (such as
//! DeepSpeed or HF Trainer) has written a checkpoint there.
//!
//! The caller polls the directory after changes and while checkpoints are being written. A poll
//! lists the directory and calls stat on every file. An external checkpoint is complete if no file
//! is missing, every file can be opened (a torch file ends with its zip directory), and no file has
//! changed for a while. A native checkpoint gets its final name when it is complete.
use crate::catalog::TrainingStatePart;
use crate::codec::disk::{Directory, FileState, list_file_states, path_exists};
use crate::error::Result;
use crate::layout::deepspeed;
use crate::layout::native::{list_checkpoints, parse_step_dir_name};
use crate::open::open_external_checkpoint;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How many levels of subdirectories of a checkpoint are checked for changes.
const WATCH_DEPTH_MAX: u32 = 4;

/// Returns true if programs write this part of a checkpoint last, such as the optimizer state, so
/// that its absence may mean an unfinished save. If `is_deepspeed` is true, DeepSpeed wrote the
/// checkpoint, which then has no separate scheduler file and no random generator states.
fn is_state_part_written_last(part: &TrainingStatePart, is_deepspeed: bool) -> bool {
    match part {
        TrainingStatePart::OptimizerState => true,
        // DeepSpeed keeps the scheduler in its model files, and saves no RNG states
        TrainingStatePart::Scheduler
        | TrainingStatePart::RngStates
        | TrainingStatePart::RankRngState { .. } => !is_deepspeed,
        TrainingStatePart::Config | TrainingStatePart::Tokenizer => false,
    }
}

/// Result of inspecting a watched directory: a complete checkpoint, or an incomplete one with the
/// reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectoryStatus {
    /// The directory is a complete checkpoint.
    Complete {
        /// Step of the checkpoint, if known.
        step: Option<u64>,
        /// Parts of a training state that were still missing after no file had changed for the
        /// `limit` of [`CheckpointWatch::new`].
        missing: Vec<String>,
    },
    /// The directory is not a complete checkpoint. An external checkpoint gets this status only
    /// after no file has changed for the `limit` of [`CheckpointWatch::new`]. The directory is
    /// checked again when a file in it changes.
    Incomplete {
        /// The message about the missing or damaged part.
        why: String,
    },
}

/// What [`CheckpointWatch`] reports about a directory that is new or has changed: its path, and
/// whether it is a complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DirectoryReport {
    /// Path of the directory.
    pub path: PathBuf,
    /// Whether the directory is a complete checkpoint.
    #[serde(flatten)]
    pub status: DirectoryStatus,
}

/// The files that the previous poll found in a checkpoint directory, and since when these files
/// have not changed.
struct DirectoryState {
    /// Names, sizes and modification times of the files.
    snapshot: Vec<FileState>,
    /// Time of the first poll that found this snapshot.
    since: Instant,
    /// Whether the status of the directory with this snapshot was reported.
    reported: bool,
}

/// Watches a directory for checkpoints, and reports each complete checkpoint once. The directory
/// may not exist yet, and may be removed and recreated.
pub struct CheckpointWatch {
    root: PathBuf,
    settle: Duration,
    limit: Duration,
    states: BTreeMap<PathBuf, DirectoryState>,
}

impl CheckpointWatch {
    /// Creates an object that watches the directory `root` for new checkpoints. Native checkpoints
    /// are reported by the next poll. A complete external checkpoint is reported after no file has
    /// changed for `settle`. An external checkpoint that is incomplete, or lacks parts that
    /// programs write last, is reported after no file has changed for `limit`.
    pub fn new(root: &Path, settle: Duration, limit: Duration) -> CheckpointWatch {
        CheckpointWatch { root: root.to_owned(), settle, limit, states: BTreeMap::new() }
    }

    /// Returns true if the watched directory exists and every checkpoint in it was already reported
    /// as complete or incomplete. If so, further polls report nothing until a file changes.
    pub fn is_settled(&self) -> bool {
        self.states.values().all(|state| state.reported) && self.root.is_dir()
    }

    /// Inspects the watched directory once, at the time `now`, for checkpoints that are new or have
    /// changed since the previous poll. Returns a report for each subdirectory whose status is
    /// known and was not reported since its files last changed, oldest step first.
    ///
    /// # Errors
    /// Fails if the watched directory exists and cannot be listed.
    pub fn poll(&mut self, now: Instant) -> Result<Vec<DirectoryReport>> {
        let mut reports = Vec::new();
        let found = match self.root.is_dir() {
            true => match list_candidates(&self.root) {
                // the directory was removed during the poll
                Err(_) if !self.root.is_dir() => Vec::new(),
                other => other?,
            },
            false => Vec::new(),
        };
        self.states.retain(|path, _| found.contains(path));
        for path in found {
            // a directory that is being removed, or has too many files, is skipped
            let Ok(snapshot) = list_file_states(&path, WATCH_DEPTH_MAX) else { continue };
            let fresh = || DirectoryState { snapshot: snapshot.clone(), since: now, reported: false };
            let state = self.states.entry(path.clone()).or_insert_with(fresh);
            if state.snapshot != snapshot {
                *state = fresh();
            }
            if state.reported {
                continue;
            }
            let quiet = now.saturating_duration_since(state.since);
            if let Some(status) = determine_status(&path, quiet, self.settle, self.limit) {
                state.reported = true;
                reports.push(DirectoryReport { path, status });
            }
        }
        Ok(reports)
    }
}

/// Determines whether the directory `path`, whose files last changed `quiet` ago, is a complete
/// checkpoint, an incomplete one, or still being written. Returns `None` while a save may still be
/// in progress. This is so until `quiet` reaches `settle` for a complete external checkpoint, and
/// `limit` for an incomplete one. A native checkpoint always has a status.
fn determine_status(
    path: &Path,
    quiet: Duration,
    settle: Duration,
    limit: Duration,
) -> Option<DirectoryStatus> {
    let is_native = path.file_name().is_some_and(|n| parse_step_dir_name(&n.to_string_lossy()).is_some());
    if is_native {
        // a directory gets the name of a native checkpoint when the checkpoint is complete
        return Some(match crate::Checkpoint::open(path) {
            Ok(checkpoint) => {
                DirectoryStatus::Complete { step: Some(checkpoint.run_facts().step), missing: Vec::new() }
            }
            Err(e) => DirectoryStatus::Incomplete { why: e.to_string() },
        });
    }
    if quiet < settle {
        return None;
    }
    match open_external_checkpoint(path) {
        Ok(Some(found)) => {
            let facts = found.facts();
            let is_deepspeed = facts.kind.starts_with("DeepSpeed");
            let late = facts.missing.iter().filter(|part| is_state_part_written_last(part, is_deepspeed));
            let mut missing: Vec<String> = late.map(TrainingStatePart::to_string).collect();
            missing.extend(facts.lost.iter().map(|name| format!("weight {name}")));
            if facts.kind == "weights" || lacks_trainer_state(path) {
                missing.push("trainer state".into());
            }
            let done = missing.is_empty() || quiet >= limit;
            done.then_some(DirectoryStatus::Complete { step: facts.state.step, missing })
        }
        Ok(None) if quiet >= limit => {
            Some(DirectoryStatus::Incomplete { why: crate::open::diagnose_directory(path).to_string() })
        }
        Err(e) if quiet >= limit => Some(DirectoryStatus::Incomplete { why: e.to_string() }),
        Ok(None) | Err(_) => None,
    }
}

/// Returns true if the directory is a checkpoint of HF Trainer that lacks `trainer_state.json`, the
/// file that HF Trainer writes last. Only HF Trainer names directories `checkpoint-…`.
fn lacks_trainer_state(path: &Path) -> bool {
    let trainer = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("checkpoint-"));
    trainer && !path_exists(&path.join("trainer_state.json"))
}

/// Lists the subdirectories of `root` whose names or contents mark them as checkpoints, complete or
/// not, oldest step first.
fn list_candidates(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<(u64, PathBuf)> = list_checkpoints(root)?;
    let directory = Directory::open(root)?;
    for name in directory.list_names()? {
        let path = root.join(&name);
        let step = ["checkpoint-", "checkpoint_"].iter().find_map(|p| name.strip_prefix(p)?.parse().ok());
        let base = name.strip_suffix("_universal").unwrap_or(&name);
        let tagged = || base.strip_prefix("global_step").and_then(|n| n.parse().ok());
        let is_deepspeed =
            || deepspeed::is_tag_directory(&path) || deepspeed::universal::is_universal_directory(&path);
        // Accelerate puts its numbered directories into a directory of this name
        if name == "checkpoints" && path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            for inner in Directory::open(&path)?.list_names()? {
                if let Some(step) = inner.strip_prefix("checkpoint_").and_then(|n| n.parse().ok()) {
                    found.push((step, path.join(inner)));
                }
            }
        } else if let Some(step) = step.or_else(tagged) {
            found.push((step, path));
        } else if is_deepspeed() {
            found.push((u64::MAX, path));
        }
    }
    found.retain(|(_, path)| path.symlink_metadata().is_ok_and(|m| m.is_dir()));
    found.sort_unstable();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}
