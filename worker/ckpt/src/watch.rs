//! [`DirectoryWatch`]: reports new checkpoints in a directory, written by any program.
//!
//! The directory is polled, since shared file systems do not notify other hosts of changes. A poll
//! lists the directory and calls stat on every file. A checkpoint is complete when every file can
//! be opened and none is missing (a torch file ends with its zip directory), and nothing changed
//! between two polls.
use crate::disk::{Directory, exists};
use crate::error::Result;
use crate::external::{self, StatePart};
use crate::formats::deepspeed;
use crate::root::{list, step_of};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Depth of the subdirectories of a checkpoint whose files are checked for changes.
const DEPTH: u32 = 4;
/// Limit on the files of a checkpoint.
const FILES_MAX: usize = 1 << 20;
/// True for parts of a training state that programs write last: without one of them a save may
/// still be in progress.
fn is_written_late(part: &StatePart, is_deepspeed: bool) -> bool {
    match part {
        StatePart::OptimizerState => true,
        // DeepSpeed keeps the scheduler in its model files, and saves no random states
        StatePart::Scheduler | StatePart::RandomStates | StatePart::RandomState { .. } => !is_deepspeed,
        StatePart::Config | StatePart::Tokenizer => false,
    }
}

/// Whether a watched directory is a complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectoryStatus {
    /// The directory is a complete checkpoint.
    Complete {
        /// Step of the checkpoint, if known.
        step: Option<u64>,
        /// Parts of a training state that were not written within the time limit.
        missing: Vec<String>,
    },
    /// The checkpoint is not complete, and nothing changed within the time limit. The directory is
    /// checked again when it changes.
    Incomplete {
        /// What is missing or damaged.
        why: String,
    },
}

/// A new or changed directory with its status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DirectoryReport {
    /// The directory.
    pub path: PathBuf,
    /// Its status.
    #[serde(flatten)]
    pub status: DirectoryStatus,
}

/// What the previous poll found in a directory.
struct DirectoryState {
    /// Names, sizes and modification times of the files.
    snapshot: Snapshot,
    /// When the directory was first seen in this state.
    since: Instant,
    /// Whether the status of this snapshot was reported.
    reported: bool,
}

/// Watches a directory for checkpoints. The directory may not exist yet, or may be removed and
/// recreated.
pub struct DirectoryWatch {
    root: PathBuf,
    settle: Duration,
    limit: Duration,
    states: BTreeMap<PathBuf, DirectoryState>,
}

impl DirectoryWatch {
    /// Creates a watch of the directory `root`. A complete external checkpoint is reported when
    /// nothing has changed for `settle`. A checkpoint that is incomplete, or lacks parts that
    /// programs write last, is reported when nothing has changed for `limit`.
    pub fn new(root: &Path, settle: Duration, limit: Duration) -> DirectoryWatch {
        DirectoryWatch { root: root.to_owned(), settle, limit, states: BTreeMap::new() }
    }

    /// Polls the directory; returns new reports, oldest step first.
    ///
    /// # Errors
    /// Only when the directory exists and cannot be listed.
    pub fn poll(&mut self, now: Instant) -> Result<Vec<DirectoryReport>> {
        let mut reports = Vec::new();
        let found = match self.root.is_dir() {
            true => match candidates(&self.root) {
                // the directory was removed during the poll
                Err(_) if !self.root.is_dir() => Vec::new(),
                other => other?,
            },
            false => Vec::new(),
        };
        self.states.retain(|path, _| found.contains(path));
        for path in found {
            // a directory that is being removed is skipped
            let Some(snapshot) = take_snapshot(&path) else { continue };
            let fresh = || DirectoryState { snapshot: snapshot.clone(), since: now, reported: false };
            let state = self.states.entry(path.clone()).or_insert_with(fresh);
            if state.snapshot != snapshot {
                *state = fresh();
            }
            if state.reported {
                continue;
            }
            let quiet = now.saturating_duration_since(state.since);
            if let Some(status) = directory_status(&path, quiet, self.settle, self.limit) {
                state.reported = true;
                reports.push(DirectoryReport { path, status });
            }
        }
        Ok(reports)
    }
}

/// The status of a directory in which nothing has changed for `quiet`; `None` while a save may
/// still be in progress.
fn directory_status(
    path: &Path,
    quiet: Duration,
    settle: Duration,
    limit: Duration,
) -> Option<DirectoryStatus> {
    let is_native = path.file_name().is_some_and(|n| step_of(&n.to_string_lossy()).is_some());
    if is_native {
        // a native checkpoint gets its name when it is complete
        return Some(match crate::Checkpoint::open(path) {
            Ok(checkpoint) => {
                DirectoryStatus::Complete { step: Some(checkpoint.facts().step), missing: Vec::new() }
            }
            Err(e) => DirectoryStatus::Incomplete { why: e.to_string() },
        });
    }
    if quiet < settle {
        return None;
    }
    match external::open(path) {
        Ok(Some(found)) => {
            let facts = found.facts();
            let is_deepspeed = facts.kind.starts_with("DeepSpeed");
            let late = facts.missing.iter().filter(|part| is_written_late(part, is_deepspeed));
            let mut missing: Vec<String> = late.map(StatePart::to_string).collect();
            missing.extend(facts.lost.iter().map(|name| format!("weight {name}")));
            if facts.kind == "weights" || lacks_trainer_state(path) {
                missing.push("trainer state".into());
            }
            let done = missing.is_empty() || quiet >= limit;
            done.then_some(DirectoryStatus::Complete { step: facts.step, missing })
        }
        Ok(None) if quiet >= limit => {
            Some(DirectoryStatus::Incomplete { why: crate::diagnosis::diagnose(path).to_string() })
        }
        Err(e) if quiet >= limit => Some(DirectoryStatus::Incomplete { why: e.to_string() }),
        Ok(None) | Err(_) => None,
    }
}

/// Whether the directory is a checkpoint of HF Trainer without `trainer_state.json`, which HF
/// Trainer writes last. Only HF Trainer uses these directory names.
fn lacks_trainer_state(path: &Path) -> bool {
    let trainer = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("checkpoint-"));
    trainer && !exists(&path.join("trainer_state.json"))
}

/// Subdirectories that are checkpoints or may become complete, oldest step first.
fn candidates(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<(u64, PathBuf)> = list(root)?;
    let directory = Directory::open(root)?;
    for name in directory.names()? {
        let path = root.join(&name);
        let step = ["checkpoint-", "checkpoint_"].iter().find_map(|p| name.strip_prefix(p)?.parse().ok());
        let base = name.strip_suffix("_universal").unwrap_or(&name);
        let tagged = || base.strip_prefix("global_step").and_then(|n| n.parse().ok());
        let is_deepspeed = || deepspeed::is_tag(&path) || deepspeed::universal::is_universal(&path);
        // Accelerate puts its numbered directories into a directory of this name
        if name == "checkpoints" && path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            for inner in Directory::open(&path)?.names()? {
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
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Name, size, and modification time (seconds, nanoseconds) of each file.
type Snapshot = Vec<(PathBuf, u64, i64, i64)>;

/// Takes a snapshot of a directory; `None` when it is removed meanwhile.
fn take_snapshot(path: &Path) -> Option<Snapshot> {
    let mut files = Vec::new();
    let mut directories = vec![(path.to_owned(), DEPTH)];
    while let Some((directory, depth)) = directories.pop() {
        for entry in fs::read_dir(&directory).ok()? {
            let path = entry.ok()?.path();
            let m = path.symlink_metadata().ok()?;
            match m.is_dir() {
                true if depth > 0 => directories.push((path, depth - 1)),
                true => {}
                false => files.push((path, m.size(), m.mtime(), m.mtime_nsec())),
            }
            if files.len() > FILES_MAX {
                return None;
            }
        }
    }
    files.sort();
    Some(files)
}
