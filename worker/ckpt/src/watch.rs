//! Checkpoints as they land in a directory, whoever writes them.
//!
//! A directory is looked at again and again: file systems that several hosts share tell nobody of what the others write.
//! One look costs a listing and a stat per file. What is complete is decided by content (every file opens, none is
//! missing, a torch file's directory is its last bytes), and only once nothing has changed between two looks.
use crate::disk::{Folder, exists};
use crate::error::Result;
use crate::external;
use crate::formats::deepspeed;
use crate::root::{list, step_of};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Deepest folder of a checkpoint whose files are looked at.
const DEPTH: u32 = 4;
/// Most files of a checkpoint that are looked at.
const FILES_MAX: usize = 1 << 20;
/// Parts of a training state that programs write last: without one of them a folder may still be written.
const LATE: [&str; 3] = ["optimizer state", "scheduler", "random state"];

/// What became of a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Landed {
    /// It is a whole checkpoint. `missing`: parts of a training state that it hasn't and that were waited for.
    Complete { step: Option<u64>, missing: Vec<String> },
    /// Nothing has changed in it for the limit, and it isn't whole. It is looked at again when it changes.
    Incomplete { why: String },
}

/// A folder of which something is to be said; each is said once, and again when it was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sighting {
    pub path: PathBuf,
    #[serde(flatten)]
    pub landed: Landed,
}

/// What was seen of a folder last.
struct Seen {
    /// Names, sizes and times of its files.
    look: Vec<(PathBuf, u64, i64, i64)>,
    since: Instant,
    /// What was said of it.
    told: bool,
}

/// A directory under watch. It needn't exist yet, and may go and come back.
pub struct Watch {
    root: PathBuf,
    settle: Duration,
    limit: Duration,
    seen: BTreeMap<PathBuf, Seen>,
}

impl Watch {
    /// A checkpoint of another program counts as complete once nothing has changed for `settle`; one that isn't whole, or
    /// lacks what is written last, is waited for until nothing has changed for `limit`.
    pub fn new(root: &Path, settle: Duration, limit: Duration) -> Watch {
        Watch { root: root.to_owned(), settle, limit, seen: BTreeMap::new() }
    }

    /// Looks at the directory now, and says what has landed since the last look, the oldest first.
    ///
    /// # Errors
    /// Only when the directory is there and can't be listed.
    pub fn look(&mut self, now: Instant) -> Result<Vec<Sighting>> {
        let mut sightings = Vec::new();
        let found = match self.root.is_dir() {
            true => match candidates(&self.root) {
                // it went while it was listed
                Err(_) if !self.root.is_dir() => Vec::new(),
                other => other?,
            },
            false => Vec::new(),
        };
        self.seen.retain(|path, _| found.contains(path));
        for path in found {
            // one that is being removed is none
            let Some(look) = look_at(&path) else { continue };
            let fresh = || Seen { look: look.clone(), since: now, told: false };
            let seen = self.seen.entry(path.clone()).or_insert_with(fresh);
            if seen.look != look {
                *seen = fresh();
            }
            if seen.told {
                continue;
            }
            let quiet = now.saturating_duration_since(seen.since);
            if let Some(landed) = judge(&path, quiet, self.settle, self.limit) {
                seen.told = true;
                sightings.push(Sighting { path, landed });
            }
        }
        Ok(sightings)
    }
}

/// What can be said of a folder in which nothing has changed for `quiet`.
fn judge(path: &Path, quiet: Duration, settle: Duration, limit: Duration) -> Option<Landed> {
    let ours = path.file_name().is_some_and(|n| step_of(&n.to_string_lossy()).is_some());
    if ours {
        // it got its name when it was complete
        return Some(match crate::Checkpoint::open(path) {
            Ok(checkpoint) => Landed::Complete { step: Some(checkpoint.facts().step), missing: Vec::new() },
            Err(e) => Landed::Incomplete { why: e.to_string() },
        });
    }
    if quiet < settle {
        return None;
    }
    match external::open(path) {
        Ok(Some(found)) => {
            let facts = found.facts();
            // DeepSpeed by itself keeps the scheduler in its model files, and no random states
            let expected = if facts.kind.starts_with("DeepSpeed") { &LATE[..1] } else { &LATE[..] };
            let late = |m: &&String| expected.iter().any(|part| m.starts_with(part));
            let mut missing: Vec<String> = facts.missing.iter().filter(late).cloned().collect();
            missing.extend(facts.lost.iter().map(|name| format!("the weight {name}")));
            if facts.kind == "weights" || unfinished(path) {
                missing.push("trainer state".into());
            }
            let done = missing.is_empty() || quiet >= limit;
            done.then_some(Landed::Complete { step: facts.step, missing })
        }
        Ok(None) if quiet >= limit => Some(Landed::Incomplete { why: crate::diagnosis::seems(path) }),
        Err(e) if quiet >= limit => Some(Landed::Incomplete { why: e.to_string() }),
        Ok(None) | Err(_) => None,
    }
}

/// HF Trainer writes its state last of all, and only it names folders so.
fn unfinished(path: &Path) -> bool {
    let trainer = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("checkpoint-"));
    trainer && !exists(&path.join("trainer_state.json"))
}

/// Folders in the directory that are checkpoints or may become some, the oldest step first.
fn candidates(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<(u64, PathBuf)> = list(root)?;
    let folder = Folder::open(root)?;
    for name in folder.names()? {
        let path = root.join(&name);
        let step = ["checkpoint-", "checkpoint_"].iter().find_map(|p| name.strip_prefix(p)?.parse().ok());
        let base = name.strip_suffix("_universal").unwrap_or(&name);
        let tagged = || base.strip_prefix("global_step").and_then(|n| n.parse().ok());
        let of_deepspeed = || deepspeed::is_tag(&path) || deepspeed::universal::is(&path);
        // Accelerate puts its numbered folders into one of this name
        if name == "checkpoints" && path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            for inner in Folder::open(&path)?.names()? {
                if let Some(step) = inner.strip_prefix("checkpoint_").and_then(|n| n.parse().ok()) {
                    found.push((step, path.join(inner)));
                }
            }
        } else if let Some(step) = step.or_else(tagged) {
            found.push((step, path));
        } else if of_deepspeed() {
            found.push((u64::MAX, path));
        }
    }
    found.retain(|(_, path)| path.symlink_metadata().is_ok_and(|m| m.is_dir()));
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Name, size and time of each file in a folder; `None` when it goes meanwhile.
fn look_at(path: &Path) -> Option<Vec<(PathBuf, u64, i64, i64)>> {
    let mut all = Vec::new();
    let mut folders = vec![(path.to_owned(), DEPTH)];
    while let Some((folder, depth)) = folders.pop() {
        for entry in fs::read_dir(&folder).ok()? {
            let path = entry.ok()?.path();
            let m = path.symlink_metadata().ok()?;
            match m.is_dir() {
                true if depth > 0 => folders.push((path, depth - 1)),
                true => {}
                false => all.push((path, m.size(), m.mtime(), m.mtime_nsec())),
            }
            if all.len() > FILES_MAX {
                return None;
            }
        }
    }
    all.sort();
    Some(all)
}
