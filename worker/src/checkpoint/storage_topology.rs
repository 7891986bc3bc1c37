//! Detects which ranks see the same checkpoint directory ([`StorageTopology`]), by small files that
//! one rank of each host writes and all ranks look for.
use crate::{
    consensus::all_gather_values,
    error::{Error, Result, to_unwritable_checkpoint_error},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::host_local::StorageHost;
use diagnostic::{Code, Diagnostic, codes::training as codes};
use serde::{Deserialize, Serialize};
use std::{
    fs::{File, OpenOptions},
    io::{ErrorKind, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Number of random bytes in a probe file, a small file by which ranks detect whether they see the
/// same checkpoint directory.
const NONCE_BYTES: usize = 32;

/// Name and random content of a probe file, a small file by which ranks detect whether they see the
/// same checkpoint directory.
#[derive(Clone, Serialize, Deserialize)]
struct ProbeFile {
    name: String,
    nonce: Vec<u8>,
}

/// Guard that, when dropped, removes a probe file (by which ranks detect a shared directory) from
/// the checkpoint directory.
struct ProbeGuard(PathBuf);

impl Drop for ProbeGuard {
    fn drop(&mut self) {
        // A file that cannot be removed is hidden and has 32 bytes.
        _ = std::fs::remove_file(&self.0);
    }
}

/// Which ranks see one checkpoint directory at the configured path, and on which host each separate
/// directory is. The directory may be on a file system that hosts share, or on a local file system
/// of each host.
#[derive(Clone)]
pub struct StorageTopology {
    /// For each rank, the leader of its directory, which is the lowest rank that sees the
    /// directory.
    leaders: Vec<usize>,
    /// The hosts of the leaders, ordered by leader; empty if all ranks see one directory.
    hosts: Vec<StorageHost>,
}

impl StorageTopology {
    /// Describes `world` ranks that all see the same checkpoint directory.
    pub fn for_shared_directory(world: usize) -> Self {
        StorageTopology { leaders: vec![0; world], hosts: Vec::new() }
    }

    /// Returns whether all ranks see the same checkpoint directory.
    pub fn is_shared(&self) -> bool {
        self.hosts.is_empty()
    }

    /// Returns the lowest rank that sees the checkpoint directory of `rank`; this rank, the
    /// directory leader, commits and removes checkpoints there.
    pub fn find_directory_leader(&self, rank: usize) -> usize {
        self.leaders.get(rank).copied().unwrap_or(0)
    }

    /// Returns true if `rank` is a directory leader: the lowest rank that sees a checkpoint
    /// directory, which commits and removes checkpoints there.
    pub fn is_directory_leader(&self, rank: usize) -> bool {
        self.find_directory_leader(rank) == rank
    }

    /// Returns the host of each separate checkpoint directory, ordered by the lowest rank that sees
    /// the directory. The slice is empty if all ranks see one directory.
    pub fn list_directory_hosts(&self) -> &[StorageHost] {
        &self.hosts
    }

    /// Returns for each rank the index of the checkpoint directory that it sees; directories are
    /// ordered by the lowest rank that sees each of them.
    pub fn list_directory_index_by_rank(&self) -> Vec<usize> {
        let leaders = self.list_directory_leaders();
        self.leaders.iter().map(|k| leaders.binary_search(k).unwrap_or(0)).collect()
    }

    /// Returns the lowest rank that sees each separate checkpoint directory (the directory leader),
    /// in ascending order.
    pub fn list_directory_leaders(&self) -> Vec<usize> {
        let by_rank = self.leaders.iter().enumerate();
        by_rank.filter(|(rank, leader)| rank == *leader).map(|(rank, _)| rank).collect()
    }

    /// Estimates how many of a checkpoint's `total` bytes are written to the checkpoint directory
    /// that `rank` sees, by all ranks that share this directory.
    pub fn compute_directory_bytes(&self, rank: usize, total: u64) -> u64 {
        let leader = self.find_directory_leader(rank);
        let ranks = self.leaders.iter().filter(|k| **k == leader).count() as u64;
        (total / self.leaders.len().max(1) as u64 + 1).saturating_mul(ranks).min(total)
    }
}

/// Detects which ranks see the same checkpoint directory at the path `root` (`checkpoint.dir`).
/// Collective: every rank must call it.
///
/// `writes_probe` must be true on exactly one rank of each host. This rank writes a probe file, and
/// all ranks look for it. `host` is the name of this rank's host. `token` becomes part of the
/// file's name and must differ between runs and attempts, so that old probe files are ignored.
///
/// # Errors
///
/// Fails if the directory cannot be written, or if only one of two hosts sees the probe file of the
/// other. Also fails if two host-local directories have the same identifier, or if `is_required` is
/// set and the directory is not shared.
pub fn detect_topology(
    queue: &CollectiveQueue,
    writes_probe: bool,
    host: &str,
    token: &str,
    root: &Path,
    is_required: bool,
) -> Result<StorageTopology> {
    let rank = queue.comm().rank();
    let written = writes_probe.then(|| write_probe(root, &format!(".probe-{token}-{rank}"))).transpose();
    let (guard, probe) = match written {
        Ok(written) => written.map_or((None, Ok(None)), |(guard, probe)| (Some(guard), Ok(Some(probe)))),
        Err(e) => (None, Err(e)),
    };
    let probes = all_gather_values(queue, probe)?;
    let first = probes.iter().position(|p| p.as_ref().is_some_and(|p| sees_probe(root, p)));
    let first = first.ok_or_else(|| {
        let what = format!("does not show this rank the file that another rank of host {host} wrote");
        Error::from(build_directory_error(codes::STORAGE_NOT_VISIBLE, root, &what).with_field("host", host))
    });
    let leaders = all_gather_values(queue, first);
    drop(guard); // Every rank has looked for the probe files.
    let leaders = leaders?;
    if leaders.iter().any(|k| leaders.get(*k) != Some(k)) {
        let what = "is shared in one direction only: some hosts see files of others that do not see theirs";
        let error = build_directory_error(codes::STORAGE_PARTIALLY_SHARED, root, what);
        return Err(error.with_help("give each host its own directory, or all hosts the same one").into());
    }
    if leaders.iter().all(|k| *k == 0) {
        return Ok(StorageTopology::for_shared_directory(leaders.len()));
    }
    if is_required {
        let names = all_gather_values(queue, Ok(host.to_owned()))?;
        // Wait, so that no rank ends and thereby aborts the others before every rank has the names.
        _ = queue.run_and_wait(|comm| comm.barrier());
        return Err(build_not_shared_error(root, &leaders, &names).into());
    }
    let mine = (leaders[rank] == rank).then(|| StorageHost::load_or_create(root, host)).transpose();
    let hosts = all_gather_values(queue, mine.map_err(to_unwritable_checkpoint_error))?;
    let hosts: Vec<StorageHost> = hosts.into_iter().flatten().collect();
    match find_duplicate_id_error(root, &hosts) {
        Some(error) => Err(error.into()),
        None => Ok(StorageTopology { leaders, hosts }),
    }
}

/// Creates an error about the checkpoint directory `root`, whose text names the directory and the
/// problem `what`, such as `cannot be written`.
fn build_directory_error(code: Code, root: &Path, what: &str) -> Diagnostic {
    Diagnostic::error(code, format!("checkpoint directory {} {what}", root.display()))
        .with_subject("checkpoint.dir")
        .with_field("path", root.display().to_string())
}

/// Builds the error which reports that `checkpoint.require_shared` is set but two hosts see
/// different directories.
fn build_not_shared_error(root: &Path, leaders: &[usize], names: &[String]) -> Diagnostic {
    let name = |rank: usize| names.get(rank).cloned().unwrap_or_default();
    let other = name(leaders.iter().copied().find(|k| *k != 0).unwrap_or(0));
    let what = format!("is not shared: host {other} does not see what host {} writes", name(0));
    build_directory_error(codes::STORAGE_NOT_SHARED, root, &what)
        .with_field("hosts", vec![name(0), other])
        .with_help("put it on storage that all hosts share, or set `checkpoint.require_shared: false`")
}

/// Returns an error if checkpoint directories on different hosts have the same id, for example
/// because one is a copy of the other.
fn find_duplicate_id_error(root: &Path, hosts: &[StorageHost]) -> Option<Diagnostic> {
    hosts.iter().enumerate().find_map(|(i, host)| {
        let other = hosts[..i].iter().find(|h| h.id == host.id)?;
        let what = format!("has the same identifier on hosts {} and {}", other.name, host.name);
        let error = build_directory_error(codes::STORAGE_ID_DUPLICATE, root, &what)
            .with_field("hosts", vec![other.name.clone(), host.name.clone()])
            .with_help("one directory is a copy of the other; remove the file .host from one of them");
        Some(error)
    })
}

/// Writes a probe file with random content into the checkpoint directory `root`; ranks that find
/// this file know that they see this directory. Creates the directory if necessary.
fn write_probe(root: &Path, name: &str) -> Result<(ProbeGuard, ProbeFile)> {
    let path = root.join(name);
    let failed = |e: std::io::Error| {
        build_directory_error(codes::STORAGE_NOT_WRITABLE, root, "cannot be written").with_cause(&e)
    };
    let mut nonce = vec![0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| failed(error.into()))?;
    std::fs::create_dir_all(root).map_err(failed)?;
    // An existing file of this name was written by a worker that was killed.
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(failed(e).into()),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path).map_err(failed)?;
    let guard = ProbeGuard(path.clone());
    file.write_all(&nonce).and_then(|()| file.sync_all()).map_err(failed)?;
    Ok((guard, ProbeFile { name: name.into(), nonce }))
}

/// Returns true if this rank finds another rank's probe file in the checkpoint directory `root`,
/// with the content that the other rank has reported.
fn sees_probe(root: &Path, probe: &ProbeFile) -> bool {
    // The name comes from another rank and must not leave the directory.
    if probe.name.contains('/') || probe.nonce.len() != NONCE_BYTES {
        return false;
    }
    let mut content = Vec::with_capacity(NONCE_BYTES + 1);
    let read = File::open(root.join(&probe.name))
        .and_then(|f| f.take(NONCE_BYTES as u64 + 1).read_to_end(&mut content));
    read.is_ok() && content == probe.nonce
}
