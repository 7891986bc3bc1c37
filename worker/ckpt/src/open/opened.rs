//! [`OpenedCheckpoint`]: an open checkpoint in launch's native format or of another program.
use super::detect::open_external_for_training;
use super::diagnose::diagnose_directory;
use crate::catalog::{ExternalCheckpoint, TensorSource};
use crate::codec::disk::path_exists;
use crate::error::{CkptError, Result};
use crate::format_constants::MANIFEST_FILE;
use crate::layout::native::{Checkpoint, list_checkpoints};
use std::collections::HashSet;
use std::path::Path;

/// The newest readable checkpoint of a directory, and for each newer but unreadable checkpoint in
/// the directory the error that opening it caused.
#[derive(Debug)]
pub struct NewestCheckpoint {
    /// The newest checkpoint that could be opened.
    pub checkpoint: Checkpoint,
    /// The error of each newer checkpoint, which was skipped, newest first.
    pub skipped: Vec<CkptError>,
}

/// Opens the checkpoint in launch's own (native) format at `path`, or the newest readable one if
/// `path` is a directory of such checkpoints.
///
/// # Errors
/// Fails with the error of the newest checkpoint if no checkpoint is readable. Fails with a
/// diagnosis of the directory if there is no native checkpoint.
pub fn open_newest_native(path: &Path) -> Result<NewestCheckpoint> {
    if path_exists(&path.join(MANIFEST_FILE)) {
        return Ok(NewestCheckpoint { checkpoint: Checkpoint::open(path)?, skipped: Vec::new() });
    }
    if !path_exists(path) {
        return Err(CkptError::NotFound { path: path.to_owned() });
    }
    let mut skipped = Vec::new();
    for (_, path) in list_checkpoints(path)? {
        match Checkpoint::open(&path) {
            Ok(checkpoint) => return Ok(NewestCheckpoint { checkpoint, skipped }),
            Err(e) => skipped.push(e),
        }
    }
    match skipped.into_iter().next() {
        Some(first) => Err(first),
        None => Err(CkptError::not_a_checkpoint(path, diagnose_directory(path))),
    }
}

/// An open checkpoint, either in launch's native format or of another program.
#[derive(Debug)]
pub enum OpenedCheckpoint {
    /// A native checkpoint, with the errors of newer checkpoints that were skipped.
    Native(Box<NewestCheckpoint>),
    /// A checkpoint of another program.
    External(Box<ExternalCheckpoint>),
}

impl OpenedCheckpoint {
    /// Returns the checkpoint as a [`TensorSource`], through which tensors and the training state
    /// are read in the same way for every format.
    pub fn tensor_source(&self) -> &dyn TensorSource {
        match self {
            OpenedCheckpoint::Native(newest) => &newest.checkpoint,
            OpenedCheckpoint::External(checkpoint) => &**checkpoint,
        }
    }
}

/// Opens the checkpoint at `path`, which any supported program may have written. If `path` is a
/// directory of native checkpoints, opens the newest readable one. If `path` is a DeepSpeed
/// directory, opens the checkpoint that `latest` names.
pub fn open_checkpoint(path: &Path) -> Result<OpenedCheckpoint> {
    open_checkpoint_for_training(path, None)
}

/// Opens the checkpoint at `path`, in any supported format, for a job that trains only the weights
/// `trained` and freezes the others. HF Trainer and Accelerate store optimizer states by number. If
/// some weights were frozen, assigning the states to weights needs the names in `trained`. With
/// `None`, the result is that of [`open_checkpoint`].
pub fn open_checkpoint_for_training(
    path: &Path,
    trained: Option<&HashSet<String>>,
) -> Result<OpenedCheckpoint> {
    let native = path_exists(&path.join(MANIFEST_FILE))
        || !path_exists(path)
        || (path.is_dir() && !list_checkpoints(path)?.is_empty());
    if !native && let Some(checkpoint) = open_external_for_training(path, trained)? {
        return Ok(OpenedCheckpoint::External(Box::new(checkpoint)));
    }
    open_newest_native(path).map(|n| OpenedCheckpoint::Native(Box::new(n)))
}
