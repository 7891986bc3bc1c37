//! [`StorageLayout`]: which ranks see the same checkpoint directory, detected with probe files.
use crate::{
    consensus::exchange_values,
    error::{Error, Result, unwritable_checkpoint},
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

/// Bytes of a probe file.
const NONCE_BYTES: usize = 32;

/// Name and content of the probe file that one rank of a host wrote into its directory.
#[derive(Clone, Serialize, Deserialize)]
struct ProbeFile {
    name: String,
    nonce: Vec<u8>,
}

/// Removes the probe file when dropped.
struct ProbeGuard(PathBuf);

impl Drop for ProbeGuard {
    fn drop(&mut self) {
        // A file that cannot be removed is hidden and has 32 bytes.
        _ = std::fs::remove_file(&self.0);
    }
}

/// Which ranks see the same checkpoint directory.
#[derive(Clone)]
pub struct StorageLayout {
    /// For each rank: the leader of its directory, the lowest rank that sees it.
    leaders: Vec<usize>,
    /// The hosts of the leaders, ordered by leader; empty if all ranks see one directory.
    hosts: Vec<StorageHost>,
}

impl StorageLayout {
    /// The layout in which all `world` ranks see one directory.
    pub fn shared(world: usize) -> Self {
        StorageLayout { leaders: vec![0; world], hosts: Vec::new() }
    }

    /// Whether all ranks see one directory.
    pub fn is_shared(&self) -> bool {
        self.hosts.is_empty()
    }

    /// The lowest rank that sees the same directory as `rank`; it manages this directory.
    pub fn directory_leader(&self, rank: usize) -> usize {
        self.leaders.get(rank).copied().unwrap_or(0)
    }

    /// One host per directory, ordered by the leaders of the directories.
    pub fn hosts(&self) -> &[StorageHost] {
        &self.hosts
    }

    /// For each rank: the index of its host in [`StorageLayout::hosts`].
    pub fn host_indices(&self) -> Vec<usize> {
        let leaders = self.directory_leaders();
        self.leaders.iter().map(|k| leaders.binary_search(k).unwrap_or(0)).collect()
    }

    /// The leaders of all directories, ascending.
    pub fn directory_leaders(&self) -> Vec<usize> {
        let by_rank = self.leaders.iter().enumerate();
        by_rank.filter(|(rank, leader)| rank == *leader).map(|(rank, _)| rank).collect()
    }

    /// Of `total` bytes that all ranks write, those written to the directory of `rank`.
    pub fn bytes_share(&self, rank: usize, total: u64) -> u64 {
        let leader = self.directory_leader(rank);
        let ranks = self.leaders.iter().filter(|k| **k == leader).count() as u64;
        (total / self.leaders.len().max(1) as u64 + 1).saturating_mul(ranks).min(total)
    }
}

/// Detects which ranks see the same `checkpoint.dir`, at `root`. Collective.
///
/// `writes_probe` is true on one rank of each host, which writes a file that all ranks look for.
/// `host` is the name of this rank's host, and `token` differs between runs and attempts.
///
/// # Errors
/// The directory cannot be written; it is shared between some hosts in one direction only; or it is
/// not shared although `is_required`.
pub fn detect_layout(
    queue: &CollectiveQueue,
    writes_probe: bool,
    host: &str,
    token: &str,
    root: &Path,
    is_required: bool,
) -> Result<StorageLayout> {
    let rank = queue.comm().rank();
    let written = writes_probe.then(|| write_probe(root, &format!(".probe-{token}-{rank}"))).transpose();
    let (guard, probe) = match written {
        Ok(written) => written.map_or((None, Ok(None)), |(guard, probe)| (Some(guard), Ok(Some(probe)))),
        Err(e) => (None, Err(e)),
    };
    let probes = exchange_values(queue, probe)?;
    let first = probes.iter().position(|p| p.as_ref().is_some_and(|p| sees_probe(root, p)));
    let first = first.ok_or_else(|| {
        let what = format!("does not show this rank the file that another rank of host {host} wrote");
        Error::from(directory_error(codes::STORAGE_NOT_VISIBLE, root, &what).with_field("host", host))
    });
    let leaders = exchange_values(queue, first);
    drop(guard); // Every rank has looked for the probe files.
    let leaders = leaders?;
    if leaders.iter().any(|k| leaders.get(*k) != Some(k)) {
        let what = "is shared in one direction only: some hosts see files of others that do not see theirs";
        let error = directory_error(codes::STORAGE_PARTIALLY_SHARED, root, what);
        return Err(error.with_help("give each host its own directory, or all hosts the same one").into());
    }
    if leaders.iter().all(|k| *k == 0) {
        return Ok(StorageLayout::shared(leaders.len()));
    }
    if is_required {
        let names = exchange_values(queue, Ok(host.to_owned()))?;
        // No rank ends, and so aborts the others, before every rank has the names.
        _ = queue.run(|comm| comm.barrier());
        return Err(not_shared_error(root, &leaders, &names).into());
    }
    let mine = (leaders[rank] == rank).then(|| StorageHost::load_or_create(root, host)).transpose();
    let hosts = exchange_values(queue, mine.map_err(unwritable_checkpoint))?;
    let hosts: Vec<StorageHost> = hosts.into_iter().flatten().collect();
    match duplicate_id_error(root, &hosts) {
        Some(error) => Err(error.into()),
        None => Ok(StorageLayout { leaders, hosts }),
    }
}

/// An error of `checkpoint.dir`: `checkpoint directory ROOT <what>`.
fn directory_error(code: Code, root: &Path, what: &str) -> Diagnostic {
    Diagnostic::error(code, format!("checkpoint directory {} {what}", root.display()))
        .with_subject("checkpoint.dir")
        .with_field("path", root.display().to_string())
}

/// The error of `checkpoint.require_shared`, with two hosts that see different directories.
fn not_shared_error(root: &Path, leaders: &[usize], names: &[String]) -> Diagnostic {
    let name = |rank: usize| names.get(rank).cloned().unwrap_or_default();
    let other = name(leaders.iter().copied().find(|k| *k != 0).unwrap_or(0));
    let what = format!("is not shared: host {other} does not see what host {} writes", name(0));
    directory_error(codes::STORAGE_NOT_SHARED, root, &what)
        .with_field("hosts", vec![name(0), other])
        .with_help("put it on storage that all hosts share, or set `checkpoint.require_shared: false`")
}

/// The error of two host-local directories with the same identifier, if there are two.
fn duplicate_id_error(root: &Path, hosts: &[StorageHost]) -> Option<Diagnostic> {
    hosts.iter().enumerate().find_map(|(i, host)| {
        let other = hosts[..i].iter().find(|h| h.id == host.id)?;
        let what = format!("has the same identifier on hosts {} and {}", other.name, host.name);
        let error = directory_error(codes::STORAGE_ID_DUPLICATE, root, &what)
            .with_field("hosts", vec![other.name.clone(), host.name.clone()])
            .with_help("one directory is a copy of the other; remove the file .host from one of them");
        Some(error)
    })
}

fn write_probe(root: &Path, name: &str) -> Result<(ProbeGuard, ProbeFile)> {
    let path = root.join(name);
    let failed = |e: std::io::Error| {
        directory_error(codes::STORAGE_NOT_WRITABLE, root, "cannot be written").with_cause(&e)
    };
    let mut nonce = vec![0; NONCE_BYTES];
    File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut nonce)).map_err(failed)?;
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

/// Whether this rank sees the probe file in the directory.
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
