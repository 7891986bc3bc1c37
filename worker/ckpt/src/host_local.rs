//! Host-local checkpoints, for hosts that do not share a checkpoint directory. Each host stores the
//! shards of the ranks on this host and a copy of the manifest, which records the host of each
//! shard.
//!
//! The commit has two phases. First, every host prepares: it writes the manifest to its staging
//! directory and syncs it. When all hosts have prepared, each renames its staging directory. A host
//! that was killed between the phases finds its prepared directory at the next start, and completes
//! it if and only if another host has completed the same checkpoint ([`list_prepared`],
//! [`roll_forward`]).
use crate::catalog::RunFacts;
use crate::commit::{self, CommittedCheckpoint, Staging, Swap, publish, require_file};
use crate::disk::{self, Directory};
use crate::error::{CkptError, Result, SaveProblem};
pub use crate::host::StorageHost;
use crate::host::{HOST, ID_LEN, NAME_MAX};
use crate::manifest::{MANIFEST, Manifest};
use crate::root::{self, SAVING, step_name};
use crate::save::ShardReport;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Temporary name of [`HOST`].
const HOST_NEW: &str = ".host-new";
/// Limit on the checkpoints that are listed, newest first.
const LISTED_MAX: usize = 4096;

impl StorageHost {
    /// Returns the host whose checkpoint directory is `root`, with its current name. Creates the id
    /// of the host at first use.
    pub fn load_or_create(root: &Path, name: &str) -> Result<StorageHost> {
        disk::make_dirs(root)?;
        let id = match StorageHost::read_id(root)? {
            Some(id) => id,
            None => StorageHost::make_id(root)?,
        };
        let name: String = name.chars().filter(|c| !c.is_control()).take(NAME_MAX / 4).collect();
        Ok(StorageHost { id, name: if name.is_empty() { "unnamed".into() } else { name } })
    }

    fn make_id(root: &Path) -> Result<String> {
        let mut random = [0u8; ID_LEN / 2];
        let source = Path::new("/dev/urandom");
        let read = File::open(source).and_then(|mut f| f.read_exact(&mut random));
        read.map_err(CkptError::io("read", source))?;
        let id: String = random.iter().map(|b| format!("{b:02x}")).collect();
        commit::replace_file(root, HOST_NEW, HOST, format!("{id}\n").as_bytes())?;
        Ok(id)
    }
}

/// Makes the manifest, of which every host stores a copy. The shard of rank r is on
/// `hosts[host_of_rank[r]]`.
pub fn manifest(
    facts: RunFacts,
    reports: Vec<ShardReport>,
    hosts: Vec<StorageHost>,
    host_of_rank: &[usize],
) -> Result<Vec<u8>> {
    let manifest = commit::assemble(facts, reports, None)?.with_hosts(hosts, host_of_rank);
    manifest.check().map_err(CkptError::invalid_save)?;
    manifest.encode()
}

/// A host's prepared part of a checkpoint, durable under a hidden name. Dropping this value keeps
/// the directory, since other hosts may complete their parts.
pub struct PreparedSave {
    staging: Staging,
    bytes: u64,
}

impl PreparedSave {
    /// Phase one on host `id`: checks its shards, adds the manifest and syncs the directory.
    pub fn new(mut staging: Staging, id: &str, text: Vec<u8>) -> Result<PreparedSave> {
        let manifest = Manifest::parse(&staging.dir, text.clone())?;
        if manifest.facts.step != staging.step {
            let (begun, committed) = (staging.step, manifest.facts.step);
            return Err(CkptError::invalid_save(SaveProblem::StepMismatch { begun, committed }));
        }
        let directory = Directory::open(&staging.dir)?;
        for (i, file) in manifest.files.iter().enumerate() {
            if manifest.shard_host(i).is_some_and(|h| h.id == id) {
                require_file(&directory, file)?;
            }
        }
        // from here on the directory must survive a kill, since other hosts may consider this host
        // prepared
        let bytes = manifest.bytes() + disk::write_file(staging.dir.join(MANIFEST), &text)?;
        disk::sync_dir(&staging.dir)?;
        disk::sync_dir(&staging.root)?;
        staging.prepared = true;
        Ok(PreparedSave { staging, bytes })
    }

    /// Phase two, after every host has prepared: renames the directory and updates `latest`.
    pub fn complete(mut self) -> Result<CommittedCheckpoint> {
        let Staging { root, dir, step, .. } = &self.staging;
        let path = root.join(step_name(*step));
        publish(dir, &path, Swap::Atomic)?;
        commit::update_latest(root, *step)?;
        // the replaced checkpoint now has the hidden name
        self.staging.prepared = false;
        Ok(CommittedCheckpoint { path, bytes: self.bytes })
    }

    /// Removes the prepared directory, since another host could not prepare.
    pub fn discard(mut self) {
        self.staging.prepared = false;
    }
}

/// Identifies a checkpoint by the hash of its manifest.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ManifestId {
    /// Step of the checkpoint.
    pub step: u64,
    /// BLAKE3 hash of the manifest, as hex digits.
    pub hash: String,
}

/// Lists the checkpoints in a directory that have a valid manifest, newest first.
pub fn list_manifests(root: &Path) -> Result<Vec<ManifestId>> {
    let checkpoints = root::list(root)?.into_iter().take(LISTED_MAX);
    Ok(checkpoints
        .filter_map(|(step, path)| Some(ManifestId { step, hash: read_manifest(&path)?.0 }))
        .collect())
}

/// Reads the manifest of a checkpoint. Returns its hash and its text; `None` if the manifest is
/// missing or its hash is invalid.
pub fn read_manifest(path: &Path) -> Option<(String, Vec<u8>)> {
    let text = Directory::open(path).and_then(|f| Manifest::read(&f)).ok()?;
    let (hash, _) = Manifest::unsealed(text.clone()).ok()?;
    Some((hash, text))
}

/// The path of a step's checkpoint in this directory, whether or not it exists.
pub fn checkpoint_path(root: &Path, step: u64) -> PathBuf {
    root::locate(root, step).unwrap_or_else(|| root.join(step_name(step)))
}

/// Lists the prepared directories of saves that were interrupted between the phases.
pub fn list_prepared(root: &Path) -> Result<Vec<(ManifestId, PathBuf)>> {
    if !disk::exists(root) {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for name in Directory::open(root)?.names()?.into_iter().filter(|n| n.starts_with(SAVING)) {
        let path = root.join(name);
        let valid =
            read_manifest(&path).and_then(|(hash, text)| Some((hash, Manifest::parse(&path, text).ok()?)));
        if let Some((hash, manifest)) = valid.filter(|(_, m)| !m.hosts.is_empty()) {
            found.push((ManifestId { step: manifest.facts.step, hash }, path));
        }
    }
    Ok(found)
}

/// Completes a prepared directory, since another host has completed the same checkpoint.
pub fn roll_forward(root: &Path, path: &Path, step: u64) -> Result<()> {
    let _lock = disk::lock_dir(root)?;
    publish(path, &root.join(step_name(step)), Swap::Atomic)?;
    commit::update_latest(root, step)
}
