//! Host-local checkpoints: hosts share no directory, so each one stores the shards of its workers.
//! Implements the two-phase commit, the list of checkpoints, and reading shards of other hosts.
mod fetch;
mod fetch_schedule;

use crate::{
    checkpoint::storage_topology::StorageTopology,
    consensus::{all_gather_results, all_gather_values, broadcast_bytes, values_or_abort},
    error::{Error, Result, to_unreadable_checkpoint_error, to_unwritable_checkpoint_error},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{
    Checkpoint, CommittedCheckpoint, RunFacts, ShardReport, StagingDir,
    host_local::{self, ManifestId, PreparedSave},
};
use diagnostic::{Diagnostic, codes::training as codes};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// A checkpoint from which the run may resume.
pub(crate) struct CheckpointCandidate {
    /// The path of the checkpoint on this host, even if this host has no part of the checkpoint.
    pub(crate) path: PathBuf,
    /// The hash of the checkpoint's manifest, which identifies the checkpoint if hosts have
    /// different ones of the same step. `None` accepts any checkpoint at the path.
    pub(crate) hash: Option<String>,
}

impl CheckpointCandidate {
    /// Creates a candidate that is identified only by its path.
    pub(crate) fn from_path(path: PathBuf) -> Self {
        CheckpointCandidate { path, hash: None }
    }
}

/// Commits a checkpoint on all hosts or on none. Then each host removes old checkpoints.
///
/// Returns the path on this host and the number of bytes of all shards. Collective: every rank must
/// call it.
pub(crate) fn commit_on_all_hosts(
    queue: &CollectiveQueue,
    layout: &StorageTopology,
    root: &Path,
    staging: Option<StagingDir>,
    facts: RunFacts,
    reports: Vec<ShardReport>,
    keep: u32,
) -> Result<(PathBuf, u64)> {
    let rank = queue.comm().rank();
    let (hosts, host_indices) = (layout.hosts().to_vec(), layout.list_host_indices());
    let host_id =
        host_indices.get(rank).and_then(|h| hosts.get(*h)).map(|h| h.id.clone()).unwrap_or_default();
    let text = match rank {
        0 => host_local::encode_manifest(facts, reports, hosts, &host_indices)
            .map_err(to_unwritable_checkpoint_error),
        _ => Ok(Vec::new()),
    };
    let text = broadcast_bytes(queue, 0, text)?;
    let prepared = staging.map(|s| PreparedSave::prepare(s, &host_id, text)).transpose();
    let prepared = prepared.map_err(to_unwritable_checkpoint_error);
    // If this exchange is interrupted, other ranks may already know that all have prepared. The
    // prepared directory is therefore kept, and `complete_interrupted_commits` completes the
    // commit.
    let votes = all_gather_results(queue, prepared.as_ref().map(|_| &()).map_err(Clone::clone))?;
    let prepared = match (prepared, values_or_abort(votes)) {
        (Err(e), _) => return Err(e),
        (Ok(mine), Err(e)) => {
            mine.into_iter().for_each(PreparedSave::discard);
            return Err(e);
        }
        (Ok(mine), Ok(_)) => mine,
    };
    let committed = prepared.map(PreparedSave::complete).transpose().map_err(to_unwritable_checkpoint_error);
    let committed: Vec<Option<(PathBuf, u64)>> = all_gather_values(
        queue,
        committed.map(|c| c.map(|CommittedCheckpoint { path, bytes }| (path, bytes))),
    )?;
    let pruned = match layout.find_directory_leader(rank) == rank && keep > 0 {
        true => ckpt::prune_checkpoints(root, keep).map(drop).map_err(to_unwritable_checkpoint_error),
        false => Ok(()),
    };
    all_gather_values(queue, pruned)?;
    let leader = layout.find_directory_leader(rank);
    committed.into_iter().nth(leader).flatten().ok_or_else(|| {
        let message = format!("rank {leader} reported no committed checkpoint");
        Error::new(codes::CHECKPOINT_WRITER_FAILED, message)
    })
}

/// Completes commits that were interrupted on this host after the first phase, if another host
/// completed the same commits. Collective: every rank must call it.
pub(crate) fn complete_interrupted_commits(
    queue: &CollectiveQueue,
    layout: &StorageTopology,
    root: &Path,
) -> Result<()> {
    let rank = queue.comm().rank();
    let read = || {
        Ok::<_, ckpt::CkptError>((host_local::list_manifests(root)?, host_local::list_prepared_saves(root)?))
    };
    let mine = match layout.find_directory_leader(rank) == rank {
        true => read().map_err(to_unwritable_checkpoint_error),
        false => Ok(Default::default()),
    };
    let listed = mine.as_ref().map(|(listed, _)| listed.clone()).map_err(Clone::clone);
    let completed: HashSet<ManifestId> = all_gather_values(queue, listed)?.into_iter().flatten().collect();
    let (_, prepared) = mine?;
    let result = prepared
        .into_iter()
        .filter(|(listed, _)| completed.contains(listed))
        .try_for_each(|(listed, path)| host_local::complete_prepared_save(root, &path, listed.step));
    all_gather_values(queue, result.map_err(to_unwritable_checkpoint_error)).map(drop)
}

/// Lists the checkpoints that any host has in `root`, newest first. Collective: every rank must
/// call it.
pub(crate) fn list_candidates(
    queue: &CollectiveQueue,
    layout: &StorageTopology,
    root: &Path,
) -> Result<Vec<CheckpointCandidate>> {
    let rank = queue.comm().rank();
    let listed = if layout.find_directory_leader(rank) == rank {
        host_local::list_manifests(root)
    } else {
        Ok(Vec::new())
    };
    let listed = all_gather_values(queue, listed.map_err(to_unreadable_checkpoint_error))?;
    let mut seen = HashSet::new();
    let mut distinct: Vec<ManifestId> =
        listed.into_iter().flatten().filter(|l| seen.insert(l.clone())).collect();
    // The sort is stable: among checkpoints of one step, the one of the lowest rank comes first.
    distinct.sort_by_key(|l| std::cmp::Reverse(l.step));
    let candidate = |l: ManifestId| CheckpointCandidate {
        path: host_local::checkpoint_path(root, l.step),
        hash: Some(l.hash),
    };
    Ok(distinct.into_iter().map(candidate).collect())
}

/// An open checkpoint whose shards are stored on several hosts. Reading is collective.
pub(crate) struct HostLocalCheckpoint {
    queue: Arc<CollectiveQueue>,
    checkpoint: Checkpoint,
    /// For each file of the checkpoint, the ranks that can read the file.
    holders: Vec<Vec<usize>>,
    /// The first failure of a collective, which ends the job. An error of reading alone does not
    /// end the job.
    collective_error: Mutex<Option<Error>>,
}

impl HostLocalCheckpoint {
    /// Opens the checkpoint on all ranks. Collective: every rank must call it.
    ///
    /// `path` is the checkpoint's path on this host, even if this host has no part of the
    /// checkpoint. `hash` identifies the checkpoint if hosts have different ones.
    ///
    /// # Errors
    ///
    /// Fails on all ranks with exit [`protocol::exit::WorkerExit::Checkpoint`] if no host has the
    /// checkpoint, or if a shard is stored on a host that is not part of the job.
    pub(crate) fn open(
        queue: &Arc<CollectiveQueue>,
        layout: &StorageTopology,
        path: &Path,
        hash: Option<&str>,
    ) -> Result<Self> {
        let (rank, world) = (queue.comm().rank(), queue.comm().world());
        let found =
            if layout.find_directory_leader(rank) == rank { host_local::read_manifest(path) } else { None };
        let hashes = all_gather_values(queue, Ok(found.as_ref().map(|(hash, _)| hash.clone())))?;
        let hash = hash.map(str::to_owned).or_else(|| hashes.iter().flatten().next().cloned());
        let has_manifest = |rank: usize| hash.is_some() && hashes.get(rank) == Some(&hash);
        let Some(source) = (0..world).find(|r| has_manifest(*r)) else {
            let message = format!("no host has a complete manifest of checkpoint {}", path.display());
            return Err(Diagnostic::error(codes::RESUME_MANIFEST_MISSING, message)
                .with_subject(path.display().to_string())
                .into());
        };
        let text = broadcast_bytes(queue, source, Ok(found.map(|(_, text)| text).unwrap_or_default()))?;
        let opened = Checkpoint::from_manifest(path, text, has_manifest(layout.find_directory_leader(rank)));
        let opened = opened.map_err(to_unreadable_checkpoint_error);
        let readable_files = opened.as_ref().map(|c| c.local_files().to_vec()).map_err(Clone::clone);
        let readable_files = all_gather_results(queue, readable_files.as_ref().map_err(Clone::clone))?;
        let readable_files: Vec<Vec<bool>> = readable_files.into_iter().collect::<Result<_>>()?;
        let checkpoint = opened?;
        let can_read =
            |rank: usize, file: usize| readable_files.get(rank).is_some_and(|f| f.get(file) == Some(&true));
        let holders: Vec<Vec<usize>> = (0..checkpoint.shard_sizes().count())
            .map(|file| (0..world).filter(|r| can_read(*r, file)).collect())
            .collect();
        match holders.iter().position(Vec::is_empty) {
            Some(file) => Err(build_unreachable_shard_error(&checkpoint, file, layout).into()),
            None => {
                let collective_error = Mutex::new(None);
                Ok(HostLocalCheckpoint { queue: queue.clone(), checkpoint, holders, collective_error })
            }
        }
    }

    /// Returns the checkpoint from the point of view of this host: the manifest and the local
    /// files.
    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }
}

/// Builds the error of a shard that no host of the job has.
pub(crate) fn build_unreachable_shard_error(
    checkpoint: &Checkpoint,
    file: usize,
    layout: &StorageTopology,
) -> Diagnostic {
    let path = checkpoint.path().display();
    let name = checkpoint.shard_sizes().nth(file).map(|(name, _)| name).unwrap_or_default();
    let host = checkpoint.shard_host(file);
    let what = match host {
        Some(host) if layout.hosts().iter().any(|h| h.id == host.id) => {
            format!("{name} is missing or damaged on host {host}")
        }
        Some(host) => format!("{name} is stored on host {host}, which is not part of this job"),
        None => format!("no host has {name}"),
    };
    let error = Diagnostic::error(codes::RESUME_SHARD_UNREACHABLE, format!("checkpoint {path}: {what}"))
        .with_subject(path.to_string())
        .with_field("file", name.to_string());
    match host {
        Some(host) => error.with_field("host", host.name.clone()),
        None => error,
    }
    .with_help(format!(
        "add the host, copy {name} into the checkpoint on any host, or use another checkpoint"
    ))
}
