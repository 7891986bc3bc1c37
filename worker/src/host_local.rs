//! Host-local checkpoints: hosts share no directory, so each one stores the shards of its workers.
//! Implements the two-phase commit, the list of checkpoints, and reading shards of other hosts.
mod fetch;
mod fetch_schedule;

use crate::{
    consensus::{broadcast_bytes, exchange_results, exchange_values, values_or_abort},
    error::{Error, Result, unreadable_checkpoint, unwritable_checkpoint},
    storage_layout::StorageLayout,
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{
    Checkpoint, CommittedCheckpoint, RunFacts, ShardReport, Staging,
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
    /// The path of the checkpoint on this host, even if this host has no part of it.
    pub(crate) path: PathBuf,
    /// The hash of its manifest, which identifies it if hosts have different checkpoints of one
    /// step; `None` for any checkpoint at the path.
    pub(crate) hash: Option<String>,
}

impl CheckpointCandidate {
    /// A candidate that is identified only by its path.
    pub(crate) fn from_path(path: PathBuf) -> Self {
        CheckpointCandidate { path, hash: None }
    }
}

/// Commits a checkpoint on all hosts or on none; then each host removes old checkpoints. Returns
/// the path on this host and the bytes of all shards. Collective.
pub(crate) fn commit_on_all_hosts(
    queue: &CollectiveQueue,
    layout: &StorageLayout,
    root: &Path,
    staging: Option<Staging>,
    facts: RunFacts,
    reports: Vec<ShardReport>,
    keep: u32,
) -> Result<(PathBuf, u64)> {
    let rank = queue.comm().rank();
    let (hosts, host_indices) = (layout.hosts().to_vec(), layout.host_indices());
    let host_id =
        host_indices.get(rank).and_then(|h| hosts.get(*h)).map(|h| h.id.clone()).unwrap_or_default();
    let text = match rank {
        0 => host_local::manifest(facts, reports, hosts, &host_indices).map_err(unwritable_checkpoint),
        _ => Ok(Vec::new()),
    };
    let text = broadcast_bytes(queue, 0, text)?;
    let prepared = staging.map(|s| PreparedSave::new(s, &host_id, text)).transpose();
    let prepared = prepared.map_err(unwritable_checkpoint);
    // If this exchange is interrupted, other ranks may know that all have prepared: the prepared
    // directory then stays, and `recover` completes it.
    let votes = exchange_results(queue, prepared.as_ref().map(|_| &()).map_err(Clone::clone))?;
    let prepared = match (prepared, values_or_abort(votes)) {
        (Err(e), _) => return Err(e),
        (Ok(mine), Err(e)) => {
            mine.into_iter().for_each(PreparedSave::discard);
            return Err(e);
        }
        (Ok(mine), Ok(_)) => mine,
    };
    let committed = prepared.map(PreparedSave::complete).transpose().map_err(unwritable_checkpoint);
    let committed: Vec<Option<(PathBuf, u64)>> = exchange_values(
        queue,
        committed.map(|c| c.map(|CommittedCheckpoint { path, bytes }| (path, bytes))),
    )?;
    let pruned = match layout.directory_leader(rank) == rank && keep > 0 {
        true => ckpt::prune(root, keep).map(drop).map_err(unwritable_checkpoint),
        false => Ok(()),
    };
    exchange_values(queue, pruned)?;
    let leader = layout.directory_leader(rank);
    committed.into_iter().nth(leader).flatten().ok_or_else(|| {
        let message = format!("rank {leader} reported no committed checkpoint");
        Error::new(codes::CHECKPOINT_WRITER_FAILED, message)
    })
}

/// Completes commits that were interrupted on this host after the first phase and that another host
/// completed. Collective.
pub(crate) fn complete_interrupted_commits(
    queue: &CollectiveQueue,
    layout: &StorageLayout,
    root: &Path,
) -> Result<()> {
    let rank = queue.comm().rank();
    let read =
        || Ok::<_, ckpt::CkptError>((host_local::list_manifests(root)?, host_local::list_prepared(root)?));
    let mine = match layout.directory_leader(rank) == rank {
        true => read().map_err(unwritable_checkpoint),
        false => Ok(Default::default()),
    };
    let listed = mine.as_ref().map(|(listed, _)| listed.clone()).map_err(Clone::clone);
    let completed: HashSet<ManifestId> = exchange_values(queue, listed)?.into_iter().flatten().collect();
    let (_, prepared) = mine?;
    let result = prepared
        .into_iter()
        .filter(|(listed, _)| completed.contains(listed))
        .try_for_each(|(listed, path)| host_local::roll_forward(root, &path, listed.step));
    exchange_values(queue, result.map_err(unwritable_checkpoint)).map(drop)
}

/// The checkpoints that any host has in `root`, newest first. Collective.
pub(crate) fn list_candidates(
    queue: &CollectiveQueue,
    layout: &StorageLayout,
    root: &Path,
) -> Result<Vec<CheckpointCandidate>> {
    let rank = queue.comm().rank();
    let listed =
        if layout.directory_leader(rank) == rank { host_local::list_manifests(root) } else { Ok(Vec::new()) };
    let listed = exchange_values(queue, listed.map_err(unreadable_checkpoint))?;
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
    /// For each file: the ranks that can read it.
    holders: Vec<Vec<usize>>,
    /// The first failure of a collective. It ends the job, which an error of reading would not.
    collective_error: Mutex<Option<Error>>,
}

impl HostLocalCheckpoint {
    /// Opens the checkpoint on all ranks. `path` is its path on this host, whether it exists or
    /// not; `hash` identifies the checkpoint if hosts have different ones. Collective.
    ///
    /// # Errors
    /// Exit [`contract::exit::WorkerExit::Checkpoint`] on all ranks if the checkpoint is not
    /// usable: no host has it, or a shard is stored on a host that is not part of the job.
    pub(crate) fn open(
        queue: &Arc<CollectiveQueue>,
        layout: &StorageLayout,
        path: &Path,
        hash: Option<&str>,
    ) -> Result<Self> {
        let (rank, world) = (queue.comm().rank(), queue.comm().world());
        let found =
            if layout.directory_leader(rank) == rank { host_local::read_manifest(path) } else { None };
        let hashes = exchange_values(queue, Ok(found.as_ref().map(|(hash, _)| hash.clone())))?;
        let hash = hash.map(str::to_owned).or_else(|| hashes.iter().flatten().next().cloned());
        let has_manifest = |rank: usize| hash.is_some() && hashes.get(rank) == Some(&hash);
        let Some(source) = (0..world).find(|r| has_manifest(*r)) else {
            let message = format!("no host has a complete manifest of checkpoint {}", path.display());
            return Err(Diagnostic::error(codes::RESUME_MANIFEST_MISSING, message)
                .with_subject(path.display().to_string())
                .into());
        };
        let text = broadcast_bytes(queue, source, Ok(found.map(|(_, text)| text).unwrap_or_default()))?;
        let opened = Checkpoint::from_manifest(path, text, has_manifest(layout.directory_leader(rank)));
        let opened = opened.map_err(unreadable_checkpoint);
        let readable_files = opened.as_ref().map(|c| c.local_files().to_vec()).map_err(Clone::clone);
        let readable_files = exchange_results(queue, readable_files.as_ref().map_err(Clone::clone))?;
        let readable_files: Vec<Vec<bool>> = readable_files.into_iter().collect::<Result<_>>()?;
        let checkpoint = opened?;
        let can_read =
            |rank: usize, file: usize| readable_files.get(rank).is_some_and(|f| f.get(file) == Some(&true));
        let holders: Vec<Vec<usize>> = (0..checkpoint.files().count())
            .map(|file| (0..world).filter(|r| can_read(*r, file)).collect())
            .collect();
        match holders.iter().position(Vec::is_empty) {
            Some(file) => Err(unreachable_shard_error(&checkpoint, file, layout).into()),
            None => {
                let collective_error = Mutex::new(None);
                Ok(HostLocalCheckpoint { queue: queue.clone(), checkpoint, holders, collective_error })
            }
        }
    }

    /// The checkpoint as this host sees it: the manifest and the local files.
    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }
}

/// The error of a shard that no host of the job has.
pub(crate) fn unreachable_shard_error(
    checkpoint: &Checkpoint,
    file: usize,
    layout: &StorageLayout,
) -> Diagnostic {
    let path = checkpoint.path().display();
    let name = checkpoint.files().nth(file).map(|(name, _)| name).unwrap_or_default();
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
