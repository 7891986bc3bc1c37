//! Checkpoints in a directory that hosts do not share (host-local checkpoints): each host stores
//! only the shards of the ranks that run on it. Implements the two-phase commit, the list of
//! checkpoints, and reading shards of other hosts.
mod fetch_schedule;
mod host_local_checkpoint;

pub(crate) use host_local_checkpoint::{HostLocalCheckpoint, build_unreachable_shard_error};

use crate::{
    checkpoint::storage_topology::StorageTopology,
    consensus::{
        all_gather_results, all_gather_values, broadcast_bytes, require_on_all_ranks, values_or_abort,
    },
    error::{Error, Result, to_unreadable_checkpoint_error, to_unwritable_checkpoint_error},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{
    CommittedCheckpoint, RunFacts, ShardReport, StagingDir,
    host_local::{self, HostLocalCheckpointId, PreparedSave},
};
use diagnostic::codes::training as codes;
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

/// A checkpoint from which the run can try to resume: the path on this host, and the hash of the
/// manifest if it is known.
pub(crate) struct CheckpointCandidate {
    /// The path of the checkpoint on this host, even if this host has no part of the checkpoint.
    pub(crate) path: PathBuf,
    /// The hash of the checkpoint's manifest, which identifies the checkpoint if hosts have
    /// different ones of the same step. `None` accepts any checkpoint at the path.
    pub(crate) hash: Option<String>,
}

impl CheckpointCandidate {
    /// Creates a [`CheckpointCandidate`] without a manifest hash, which matches any checkpoint at
    /// `path`.
    pub(crate) fn from_path(path: PathBuf) -> Self {
        CheckpointCandidate { path, hash: None }
    }

    /// Returns the optimizer step in the name of the checkpoint's directory, or `None` if the name
    /// contains no step.
    pub(crate) fn step(&self) -> Option<u64> {
        ckpt::parse_step_dir_name(self.path.file_name()?.to_str()?)
    }
}

/// Commits a checkpoint whose shards are stored on several hosts: either on all of these hosts or,
/// after an error, on no host. Then each host removes old checkpoints.
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
    let (hosts, host_indices) =
        (layout.list_directory_hosts().to_vec(), layout.list_directory_index_by_rank());
    let host_id =
        host_indices.get(rank).and_then(|h| hosts.get(*h)).map(|h| h.id.clone()).unwrap_or_default();
    let text = match rank {
        0 => host_local::encode_host_local_manifest(facts, reports, hosts, &host_indices)
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
    let pruned = match layout.is_directory_leader(rank) && keep > 0 {
        true => ckpt::prune_checkpoints(root, keep).map(drop).map_err(to_unwritable_checkpoint_error),
        false => Ok(()),
    };
    require_on_all_ranks(queue, pruned)?;
    let leader = layout.find_directory_leader(rank);
    committed.into_iter().nth(leader).flatten().ok_or_else(|| {
        let message = format!("rank {leader} reported no committed checkpoint");
        Error::new(codes::CHECKPOINT_WRITER_FAILED, message)
    })
}

/// Completes interrupted commits: commits on this host each fully written checkpoint that at least
/// one host has already committed. Collective: every rank must call it.
pub(crate) fn complete_interrupted_commits(
    queue: &CollectiveQueue,
    layout: &StorageTopology,
    root: &Path,
) -> Result<()> {
    let rank = queue.comm().rank();
    let read = || {
        Ok::<_, ckpt::CkptError>((
            host_local::list_checkpoint_ids(root)?,
            host_local::list_prepared_saves(root)?,
        ))
    };
    let mine = match layout.is_directory_leader(rank) {
        true => read().map_err(to_unwritable_checkpoint_error),
        false => Ok(Default::default()),
    };
    let listed = mine.as_ref().map(|(listed, _)| listed.clone()).map_err(Clone::clone);
    let completed: HashSet<HostLocalCheckpointId> =
        all_gather_values(queue, listed)?.into_iter().flatten().collect();
    let (_, prepared) = mine?;
    let result = prepared
        .into_iter()
        .filter(|(listed, _)| completed.contains(listed))
        .try_for_each(|(listed, path)| host_local::complete_prepared_save(root, &path, listed.step));
    require_on_all_ranks(queue, result.map_err(to_unwritable_checkpoint_error))
}

/// Lists all checkpoints that at least one host has in its checkpoint directory `root`, newest
/// first, as possible sources of a resume. Each host leaves out those for whose path on this host
/// `accepts` returns false. Collective: every rank must call it.
pub(crate) fn list_candidates_of_all_hosts(
    queue: &CollectiveQueue,
    layout: &StorageTopology,
    root: &Path,
    accepts: &mut dyn FnMut(&Path) -> bool,
) -> Result<Vec<CheckpointCandidate>> {
    let rank = queue.comm().rank();
    let listed =
        if layout.is_directory_leader(rank) { host_local::list_checkpoint_ids(root) } else { Ok(Vec::new()) };
    let listed = listed.map(|mut list| {
        list.retain(|l| accepts(&host_local::step_checkpoint_path(root, l.step)));
        list
    });
    let listed = all_gather_values(queue, listed.map_err(to_unreadable_checkpoint_error))?;
    let mut seen = HashSet::new();
    let mut distinct: Vec<HostLocalCheckpointId> =
        listed.into_iter().flatten().filter(|l| seen.insert(l.clone())).collect();
    // The sort is stable: among checkpoints of one step, the one of the lowest rank comes first.
    distinct.sort_by_key(|l| std::cmp::Reverse(l.step));
    let candidate = |l: HostLocalCheckpointId| CheckpointCandidate {
        path: host_local::step_checkpoint_path(root, l.step),
        hash: Some(l.hash),
    };
    Ok(distinct.into_iter().map(candidate).collect())
}
