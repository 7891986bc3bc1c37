//! Which hosts share the checkpoint directory? Found out by looking, before training starts.
use crate::{
    agree::agree,
    error::{Error, Result},
    zero::queue::Queue,
};
use ckpt::host_local::Host;
use serde::{Deserialize, Serialize};
use std::{
    fs::{File, OpenOptions},
    io::{ErrorKind, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Bytes of a mark's content.
const NONCE: usize = 32;

/// What one host's leader left in its directory.
#[derive(Clone, Serialize, Deserialize)]
struct Mark {
    name: String,
    nonce: Vec<u8>,
}

/// A file that is gone when this is.
struct Left(PathBuf);

impl Drop for Left {
    fn drop(&mut self) {
        // What can't be removed is a hidden file of 32 bytes.
        _ = std::fs::remove_file(&self.0);
    }
}

/// Which ranks see the same directory of checkpoints.
#[derive(Clone)]
pub struct Layout {
    /// Of each rank: the lowest rank that sees the same directory, which keeps it.
    keeper: Vec<usize>,
    /// The keepers' hosts, by keeper; empty when all ranks see one directory.
    hosts: Vec<Host>,
}

impl Layout {
    /// All `world` ranks see one directory.
    pub fn shared(world: usize) -> Self {
        Layout { keeper: vec![0; world], hosts: Vec::new() }
    }

    /// Do all ranks see one directory?
    pub fn is_shared(&self) -> bool {
        self.hosts.is_empty()
    }

    /// The lowest rank that sees the same directory as this one.
    pub fn keeper(&self, rank: usize) -> usize {
        self.keeper.get(rank).copied().unwrap_or(0)
    }

    /// Of the directories' hosts, one each.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Index into [`Layout::hosts`] of every rank.
    pub fn host_of(&self) -> Vec<usize> {
        let keepers = self.keepers();
        self.keeper.iter().map(|k| keepers.binary_search(k).unwrap_or(0)).collect()
    }

    /// One rank of each directory, ascending.
    pub fn keepers(&self) -> Vec<usize> {
        let all = self.keeper.iter().enumerate();
        all.filter(|(rank, keeper)| rank == *keeper).map(|(rank, _)| rank).collect()
    }

    /// Of `total` bytes of all ranks, what the ranks of this rank's directory write.
    pub fn share(&self, rank: usize, total: u64) -> u64 {
        let keeper = self.keeper(rank);
        let ranks = self.keeper.iter().filter(|k| **k == keeper).count() as u64;
        (total / self.keeper.len().max(1) as u64 + 1).saturating_mul(ranks).min(total)
    }
}

/// Finds out which ranks see the same `checkpoint.dir`. `leader`: one rank of each host, which leaves a mark that all look
/// for; `host` is its name; `token` differs between runs and epochs; `required` refuses more than one directory. Collective.
pub fn survey(
    queue: &Queue,
    leader: bool,
    host: &str,
    token: &str,
    root: &Path,
    required: bool,
) -> Result<Layout> {
    let rank = queue.comm().rank();
    let left = leader.then(|| leave(root, &format!(".probe-{token}-{rank}"))).transpose();
    let (left, mark) = match left {
        Ok(both) => (both.as_ref().map(|(l, _)| Left(l.clone())), Ok(both.map(|(_, m)| m))),
        Err(e) => (None, Err(e)),
    };
    let marks = agree(queue, mark)?;
    let seen = marks.iter().position(|m| m.as_ref().is_some_and(|m| sees(root, m)));
    let first = seen.ok_or_else(|| {
        let dir = root.display();
        Error::cluster(format!(
            "checkpoint.dir: {dir}: a file that a rank of host {host} wrote is not seen by another"
        ))
    });
    let keeper = agree(queue, first);
    drop(left); // everybody has looked
    let keeper = keeper?;
    if keeper.iter().any(|k| keeper.get(*k) != Some(k)) {
        return Err(Error::cluster(format!(
            "checkpoint.dir: {}: hosts see each other's files there only one way; give each host a directory of its own, \
             or all the same",
            root.display()
        )));
    }
    if keeper.iter().all(|k| *k == 0) {
        return Ok(Layout::shared(keeper.len()));
    }
    if required {
        let names = agree(queue, Ok(host.to_owned()))?;
        return Err(not_shared(root, &keeper, &names));
    }
    let mine = (keeper[rank] == rank).then(|| Host::here(root, host)).transpose();
    let hosts = agree(queue, mine.map_err(|e| Error::cluster(format!("checkpoint.dir: {e}"))))?;
    let hosts: Vec<Host> = hosts.into_iter().flatten().collect();
    for (i, host) in hosts.iter().enumerate() {
        if let Some(other) = hosts[..i].iter().find(|h| h.id == host.id) {
            return Err(Error::cluster(format!(
                "checkpoint.dir: {} of {} and of {} carry the same id, so one is a copy; remove the file .host in one of them",
                root.display(),
                other.name,
                host.name
            )));
        }
    }
    Ok(Layout { keeper, hosts })
}

/// `checkpoint.require_shared`: the refusal of a layout of more than one directory, naming two hosts that differ.
fn not_shared(root: &Path, keeper: &[usize], names: &[String]) -> Error {
    let there = keeper.iter().find(|k| **k != 0).and_then(|k| names.get(*k));
    let name = |n: Option<&String>| n.cloned().unwrap_or_default();
    Error::cluster(format!(
        "checkpoint.dir: {} is not one directory on all hosts: what {} writes there, {} does not see. Put it on storage \
         that all hosts share, or set checkpoint.require_shared: false",
        root.display(),
        name(names.first()),
        name(there)
    ))
}

fn leave(root: &Path, name: &str) -> Result<(PathBuf, Mark)> {
    let path = root.join(name);
    let failed = |e: std::io::Error| Error::cluster(format!("checkpoint.dir: {}: {e}", path.display()));
    let mut nonce = vec![0; NONCE];
    File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut nonce)).map_err(failed)?;
    std::fs::create_dir_all(root).map_err(failed)?;
    // A mark of that name is what a killed predecessor left.
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path).map_err(failed)?;
    file.write_all(&nonce).and_then(|()| file.sync_all()).map_err(failed)?;
    Ok((path, Mark { name: name.into(), nonce }))
}

/// Is this mark in the directory as it is seen from here?
fn sees(root: &Path, mark: &Mark) -> bool {
    // A name from another rank: it must stay in the directory.
    if mark.name.contains('/') || mark.nonce.len() != NONCE {
        return false;
    }
    let mut found = Vec::with_capacity(NONCE + 1);
    let read =
        File::open(root.join(&mark.name)).and_then(|f| f.take(NONCE as u64 + 1).read_to_end(&mut found));
    read.is_ok() && found == mark.nonce
}
