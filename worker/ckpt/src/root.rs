//! The directory that holds checkpoints: names, `latest`, what is there.
use crate::checkpoint::Checkpoint;
use crate::disk::{Folder, exists};
use crate::error::{CkptError, Result};
use crate::external::{self, Foreign};
use crate::hash::Hash;
use crate::manifest::MANIFEST;
use crate::source::Source;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Name of the file that says which checkpoint was completed last.
pub(crate) const LATEST: &str = "latest";
/// A save in progress, or what is left of one.
pub(crate) const SAVING: &str = ".saving-";
/// A checkpoint on its way out.
pub(crate) const DELETING: &str = ".deleting-";
/// The old checkpoint of a step while the new one takes its place, where the two can't be swapped in one go.
pub(crate) const REPLACED: &str = ".replaced-";
/// `latest` before it is renamed.
pub(crate) const LATEST_NEW: &str = ".latest-new";

/// Name of the folder of a step's checkpoint: `step-00000010`.
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step that a folder's name says.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// Content of `latest`: the name and a hash of it, so that a flip cannot make it name another checkpoint.
pub(crate) fn latest_text(step: u64) -> String {
    let name = step_name(step);
    format!("{name} blake3:{}\n", Hash::of(name.as_bytes()).hex())
}

/// Where the step's checkpoint lies, if it is there.
pub(crate) fn locate(root: &Path, step: u64) -> Option<PathBuf> {
    let name = step_name(step);
    [root.join(&name), root.join(format!("{REPLACED}{name}"))].into_iter().find(|p| holds_manifest(p))
}

fn holds_manifest(path: &Path) -> bool {
    let is_dir = path.symlink_metadata().is_ok_and(|m| m.is_dir());
    is_dir && path.join(MANIFEST).symlink_metadata().is_ok_and(|m| m.is_file())
}

/// Steps of all folders with a checkpoint's name, whatever is in them; newest first.
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

/// The checkpoints in a directory, newest first, by name: only folders `step-…` with a manifest. A directory that does
/// not exist holds none.
pub fn list(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    if !exists(root) {
        return Ok(Vec::new());
    }
    Ok(steps(root)?.into_iter().filter_map(|step| Some((step, locate(root, step)?))).collect())
}

/// The step that `latest` says; `None` when there is no such file.
pub(crate) fn latest_step(root: &Path) -> Result<Option<u64>> {
    if !exists(&root.join(LATEST)) {
        return Ok(None);
    }
    let text = Folder::open(root)?.read(LATEST, 4096)?;
    let step = std::str::from_utf8(&text).ok().and_then(|t| step_of(t.split(' ').next()?));
    match step {
        Some(step) if latest_text(step).as_bytes() == text => Ok(Some(step)),
        _ => Err(CkptError::damaged(root, LATEST, "it does not fit its own BLAKE3")),
    }
}

/// The checkpoint that `latest` names; `None` when there is no such file. It is an error when that checkpoint is gone.
pub fn latest(root: &Path) -> Result<Option<PathBuf>> {
    let Some(step) = latest_step(root)? else { return Ok(None) };
    match locate(root, step) {
        Some(path) => Ok(Some(path)),
        None => Err(CkptError::Missing {
            path: root.to_owned(),
            what: format!("{}, which `latest` names,", step_name(step)),
        }),
    }
}

/// What [`newest`] found.
#[derive(Debug)]
pub struct Newest {
    pub checkpoint: Checkpoint,
    /// Why newer ones were passed over.
    pub skipped: Vec<CkptError>,
}

/// Opens the checkpoint at `path`, or the newest of the directory `path` that opens.
pub fn newest(path: &Path) -> Result<Newest> {
    if exists(&path.join(MANIFEST)) {
        return Ok(Newest { checkpoint: Checkpoint::open(path)?, skipped: Vec::new() });
    }
    if !exists(path) {
        return Err(CkptError::NotACheckpoint {
            path: path.to_owned(),
            why: "there is no such directory".into(),
        });
    }
    let mut skipped = Vec::new();
    for (_, path) in list(path)? {
        match Checkpoint::open(&path) {
            Ok(checkpoint) => return Ok(Newest { checkpoint, skipped }),
            Err(e) => skipped.push(e),
        }
    }
    match skipped.into_iter().next() {
        Some(first) => Err(first),
        None => Err(CkptError::NotACheckpoint { path: path.to_owned(), why: crate::diagnosis::seems(path) }),
    }
}

/// A checkpoint of any format.
#[derive(Debug)]
pub enum Found {
    /// One of ours.
    Native(Box<Newest>),
    /// One of another program.
    Foreign(Box<Foreign>),
}

impl Found {
    /// Its tensors and its state, whatever format it has.
    pub fn source(&self) -> &dyn Source {
        match self {
            Found::Native(newest) => &newest.checkpoint,
            Found::Foreign(foreign) => &**foreign,
        }
    }
}

/// Opens the checkpoint at `path`, whatever program wrote it; of a directory of ours the newest that opens, of
/// DeepSpeed's the one that `latest` names.
pub fn find(path: &Path) -> Result<Found> {
    find_trained(path, None)
}

/// The same for a reader that trains weights of these names. Optimizers of HF Trainer and Accelerate number their states;
/// where some weights were frozen, only a reader that knows which can tell them apart.
pub fn find_trained(path: &Path, trained: Option<&HashSet<String>>) -> Result<Found> {
    let native = exists(&path.join(MANIFEST)) || !exists(path) || (path.is_dir() && !list(path)?.is_empty());
    if !native && let Some(foreign) = external::open_trained(path, trained)? {
        return Ok(Found::Foreign(Box::new(foreign)));
    }
    newest(path).map(|n| Found::Native(Box::new(n)))
}
