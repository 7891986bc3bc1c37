//! Finds the checkpoints from which a run may resume.
use super::weight_match::list_trained_names;
use crate::{
    checkpoint::{
        host_local::{self, CheckpointCandidate},
        memory_copies::HostMemoryCopies,
        storage_topology::StorageTopology,
    },
    consensus::{all_gather_values, exchange_first_error},
    error::{Error, Result, to_unreadable_checkpoint_error},
    trainer_stages::UninitializedTrainer,
};
use ckpt::{ExternalCheckpoint, OpenedCheckpoint};
use diagnostic::Diagnostic;
use std::path::{Path, PathBuf};

/// Where a resume searches for the training state: `checkpoint.dir`, the base directory of a
/// relative `resume.from`, and the memory of hosts.
pub struct CheckpointLocations<'a> {
    /// The directory `checkpoint.dir`.
    pub root: &'a Path,
    /// The working directory of the job, to which a relative `resume.from` refers.
    pub workdir: &'a Path,
    /// Which ranks see the same directory at `root`, and which of these ranks commits and removes
    /// checkpoints in it.
    pub layout: &'a StorageTopology,
    /// The copies of the training state that hosts keep in their memory; `None` without
    /// `checkpoint.memory`.
    pub memory: Option<&'a HostMemoryCopies>,
}

/// Lists the checkpoints in the directory `root` that the filter `accepts` allows, newest first;
/// without a shared directory, lists those of all hosts. Calls `accepts` with the path of each
/// checkpoint, from the newest to the oldest, on the ranks that list their directory.
///
/// Collective: every rank must call it.
pub(super) fn list_candidates(
    ready: &UninitializedTrainer,
    dirs: &CheckpointLocations,
    root: &Path,
    accepts: &mut dyn FnMut(&Path) -> bool,
) -> Result<Vec<CheckpointCandidate>> {
    let queue = ready.trainer.engine.queue();
    if !dirs.layout.is_shared() {
        return host_local::list_candidates_of_all_hosts(queue, dirs.layout, root, accepts);
    }
    let listed = if ready.trainer.engine.rank() == 0 { ckpt::list_checkpoints(root) } else { Ok(Vec::new()) };
    let paths = listed
        .map(|list| list.into_iter().map(|(_, path)| path).filter(|path| accepts(path)).collect::<Vec<_>>());
    let paths = all_gather_values(queue, paths.map_err(to_unreadable_checkpoint_error))?.swap_remove(0);
    Ok(paths.into_iter().map(CheckpointCandidate::from_path).collect())
}

/// The checkpoint that `resume.from` names, either in the format of launch (native) or in the
/// format of another program (external).
pub(super) enum NamedCheckpoint {
    Native(CheckpointCandidate),
    External(Box<ExternalCheckpoint>, PathBuf),
}

/// Finds the checkpoint to which `resume.from` (`path`) refers: a checkpoint at this path, or the
/// newest checkpoint in this directory.
///
/// Collective: every rank must call it.
pub(super) fn find_named_checkpoint(
    ready: &UninitializedTrainer,
    dirs: &CheckpointLocations,
    path: &Path,
) -> Result<NamedCheckpoint> {
    let has_manifest = path.join("manifest.json").exists();
    // With host-local directories a host without a part of the checkpoint has no manifest.
    if all_gather_values(ready.trainer.engine.queue(), Ok(has_manifest))?.contains(&true) {
        return Ok(NamedCheckpoint::Native(CheckpointCandidate::from_path(path.to_path_buf())));
    }
    if let Some(newest) = list_candidates(ready, dirs, path, &mut |_| true)?.into_iter().next() {
        return Ok(NamedCheckpoint::Native(newest));
    }
    let trained = list_trained_names(ready);
    let found = ckpt::open_checkpoint_for_training(path, Some(&trained)).map_err(|e| {
        Error::from(Diagnostic::from(to_unreadable_checkpoint_error(e)).with_subject("resume.from"))
    });
    if let Some(e) = exchange_first_error(ready.trainer.engine.queue(), found.as_ref().err().cloned())? {
        return Err(e);
    }
    match found? {
        OpenedCheckpoint::External(source) => Ok(NamedCheckpoint::External(source, path.to_path_buf())),
        OpenedCheckpoint::Native(newest) => Ok(NamedCheckpoint::Native(CheckpointCandidate::from_path(
            newest.checkpoint.path().to_path_buf(),
        ))),
    }
}
