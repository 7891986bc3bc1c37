//! The checkpoint directory: names of checkpoints, `latest`, and opening the newest checkpoint.
use crate::checkpoint::Checkpoint;
use crate::disk::{Directory, exists};
use crate::error::{CkptError, DamageReason, MissingPart, Result};
use crate::external::{self, ExternalCheckpoint};
use crate::hash::Hash;
use crate::manifest::MANIFEST;
use crate::source::TensorSource;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The file with the name of the checkpoint that was completed last.
pub(crate) const LATEST: &str = "latest";
/// Prefix of the staging directory of a save.
pub(crate) const SAVING: &str = ".saving-";
/// Prefix of a checkpoint that is being removed.
pub(crate) const DELETING: &str = ".deleting-";
/// Prefix of an old checkpoint while it is replaced, on file systems without atomic exchange.
pub(crate) const REPLACED: &str = ".replaced-";
/// Temporary name of `latest`.
pub(crate) const LATEST_NEW: &str = ".latest-new";

/// The directory name of a step's checkpoint: `step-00000010`.
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step in a directory name such as `step-00000010`.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// Content of `latest`: the name and its hash, so that a flipped bit cannot select another
/// checkpoint.
pub(crate) fn latest_text(step: u64) -> String {
    let name = step_name(step);
    format!("{name} blake3:{}\n", Hash::digest(name.as_bytes()).hex())
}

/// The path of a step's checkpoint, if it exists.
pub(crate) fn locate(root: &Path, step: u64) -> Option<PathBuf> {
    let name = step_name(step);
    [root.join(&name), root.join(format!("{REPLACED}{name}"))].into_iter().find(|p| holds_manifest(p))
}

fn holds_manifest(path: &Path) -> bool {
    let is_dir = path.symlink_metadata().is_ok_and(|m| m.is_dir());
    is_dir && path.join(MANIFEST).symlink_metadata().is_ok_and(|m| m.is_file())
}

/// The steps of all directories that are named like a checkpoint, newest first.
pub(crate) fn steps(root: &Path) -> Result<Vec<u64>> {
    let mut steps = Vec::new();
    for entry in std::fs::read_dir(root).map_err(CkptError::io("list", root))? {
        let name = entry.map_err(CkptError::io("list", root))?.file_name();
        let name = name.to_string_lossy();
        steps.extend(step_of(name.strip_prefix(REPLACED).unwrap_or(&name)));
    }
    steps.sort_by(|a, b| b.cmp(a));
    steps.dedup();
    Ok(steps)
}

/// Lists the native checkpoints in a directory, newest first: subdirectories `step-…` with a
/// manifest. The list is empty when the directory does not exist.
pub fn list(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    if !exists(root) {
        return Ok(Vec::new());
    }
    Ok(steps(root)?.into_iter().filter_map(|step| Some((step, locate(root, step)?))).collect())
}

/// The step in `latest`; `None` when the file does not exist.
pub(crate) fn latest_step(root: &Path) -> Result<Option<u64>> {
    if !exists(&root.join(LATEST)) {
        return Ok(None);
    }
    let text = Directory::open(root)?.read(LATEST, 4096)?;
    let step = std::str::from_utf8(&text).ok().and_then(|t| step_of(t.split(' ').next()?));
    match step {
        Some(step) if latest_text(step).as_bytes() == text => Ok(Some(step)),
        _ => Err(CkptError::damaged(root, LATEST, DamageReason::HashMismatch)),
    }
}

/// The checkpoint that `latest` names; `None` when the file does not exist. An error when the
/// checkpoint does not exist.
pub fn latest(root: &Path) -> Result<Option<PathBuf>> {
    let Some(step) = latest_step(root)? else { return Ok(None) };
    match locate(root, step) {
        Some(path) => Ok(Some(path)),
        None => Err(CkptError::missing(
            root,
            MissingPart::LatestTarget { target: step_name(step), pointer: LATEST, present: Vec::new() },
        )),
    }
}

/// The newest readable checkpoint of a directory.
#[derive(Debug)]
pub struct NewestCheckpoint {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// Why newer checkpoints were skipped.
    pub skipped: Vec<CkptError>,
}

/// Opens the native checkpoint at `path`, or the newest readable one in the directory `path`.
pub fn newest(path: &Path) -> Result<NewestCheckpoint> {
    if exists(&path.join(MANIFEST)) {
        return Ok(NewestCheckpoint { checkpoint: Checkpoint::open(path)?, skipped: Vec::new() });
    }
    if !exists(path) {
        return Err(CkptError::NotFound { path: path.to_owned() });
    }
    let mut skipped = Vec::new();
    for (_, path) in list(path)? {
        match Checkpoint::open(&path) {
            Ok(checkpoint) => return Ok(NewestCheckpoint { checkpoint, skipped }),
            Err(e) => skipped.push(e),
        }
    }
    match skipped.into_iter().next() {
        Some(first) => Err(first),
        None => Err(CkptError::not_a_checkpoint(path, crate::diagnosis::diagnose(path))),
    }
}

/// An open checkpoint of any format.
#[derive(Debug)]
pub enum OpenedCheckpoint {
    /// A native checkpoint.
    Native(Box<NewestCheckpoint>),
    /// A checkpoint of another program.
    External(Box<ExternalCheckpoint>),
}

impl OpenedCheckpoint {
    /// Access to tensors and state, independent of the format.
    pub fn source(&self) -> &dyn TensorSource {
        match self {
            OpenedCheckpoint::Native(newest) => &newest.checkpoint,
            OpenedCheckpoint::External(checkpoint) => &**checkpoint,
        }
    }
}

/// Opens the checkpoint at `path`, of any program. Of a directory of native checkpoints, opens the
/// newest readable one; of a DeepSpeed directory, the one that `latest` names.
pub fn find(path: &Path) -> Result<OpenedCheckpoint> {
    find_trained(path, None)
}

/// Like [`find`], for a reader that trains weights of these names. HF Trainer and Accelerate number
/// the states of the optimizer; if some weights were frozen, only these names identify the states.
pub fn find_trained(path: &Path, trained: Option<&HashSet<String>>) -> Result<OpenedCheckpoint> {
    let native = exists(&path.join(MANIFEST)) || !exists(path) || (path.is_dir() && !list(path)?.is_empty());
    if !native && let Some(checkpoint) = external::open_trained(path, trained)? {
        return Ok(OpenedCheckpoint::External(Box::new(checkpoint)));
    }
    newest(path).map(|n| OpenedCheckpoint::Native(Box::new(n)))
}
