//! Checkpoints of hosts that share no directory: each host keeps the shards of its own ranks and a copy of the manifest,
//! which says on which host each shard lies.
//!
//! The commit has two phases. Every host prepares: its folder, still hidden, gets the manifest and is synced. Only when
//! all have prepared does any host give its folder its name. A host that was killed in between finds its prepared folder
//! at the next start, and completes it exactly when another host has completed the same ([`prepared`], [`roll_forward`]).
use crate::catalog::Facts;
use crate::commit::{self, Committed, Staging, Swap, publish, require_file};
use crate::disk::{self, Folder};
use crate::error::{CkptError, Result};
pub use crate::host::Host;
use crate::host::{HOST, ID_LEN, NAME_MAX};
use crate::manifest::{MANIFEST, Manifest};
use crate::root::{self, SAVING, step_name};
use crate::save::ShardReport;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// [`HOST`] before it is renamed.
const HOST_NEW: &str = ".host-new";
/// The most checkpoints of a directory that are looked at, newest first.
const LISTED_MAX: usize = 4096;

impl Host {
    /// The host whose directory of checkpoints `root` is, with the name it has now. The id is made at first use.
    pub fn here(root: &Path, name: &str) -> Result<Host> {
        disk::make_dirs(root)?;
        let id = match Host::id_of(root)? {
            Some(id) => id,
            None => Host::make_id(root)?,
        };
        let name: String = name.chars().filter(|c| !c.is_control()).take(NAME_MAX / 4).collect();
        Ok(Host { id, name: if name.is_empty() { "unnamed".into() } else { name } })
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

/// The manifest of a checkpoint whose shard of rank r lies on `hosts[host_of[r]]`: the bytes that every host keeps.
pub fn manifest(
    facts: Facts,
    reports: Vec<ShardReport>,
    hosts: Vec<Host>,
    host_of: &[usize],
) -> Result<Vec<u8>> {
    let manifest = commit::assemble(facts, reports, None)?.scattered(hosts, host_of);
    manifest.check().map_err(CkptError::invalid)?;
    manifest.encode()
}

/// A host's part of a checkpoint, durable under its hidden name. Dropping it leaves it there, since other hosts may
/// complete theirs.
pub struct Prepared {
    staging: Staging,
    bytes: u64,
}

impl Prepared {
    /// Phase one on host `id`: its shards are whole; the manifest is written beside them and everything synced.
    pub fn new(mut staging: Staging, id: &str, text: Vec<u8>) -> Result<Prepared> {
        let manifest = Manifest::parse(&staging.dir, text.clone())?;
        if manifest.facts.step != staging.step {
            let (begun, step) = (staging.step, manifest.facts.step);
            return Err(CkptError::invalid(format!("begun at step {begun}, committed at step {step}")));
        }
        let folder = Folder::open(&staging.dir)?;
        for (i, file) in manifest.files.iter().enumerate() {
            if manifest.host_of(i).is_some_and(|h| h.id == id) {
                require_file(&folder, file)?;
            }
        }
        // From here on a kill must leave it: this host may be taken to have prepared.
        let bytes = manifest.bytes() + disk::write_file(staging.dir.join(MANIFEST), &text)?;
        disk::sync_dir(&staging.dir)?;
        disk::sync_dir(&staging.root)?;
        staging.prepared = true;
        Ok(Prepared { staging, bytes })
    }

    /// Phase two, once every host has prepared: the folder gets its name, then `latest` moves.
    pub fn complete(mut self) -> Result<Committed> {
        let Staging { root, dir, step, .. } = &self.staging;
        let path = root.join(step_name(*step));
        publish(dir, &path, Swap::Atomic)?;
        commit::point_latest(root, *step)?;
        // what was replaced now has the hidden name
        self.staging.prepared = false;
        Ok(Committed { path, bytes: self.bytes })
    }

    /// Removes it: a host could not prepare, so none completes.
    pub fn discard(mut self) {
        self.staging.prepared = false;
    }
}

/// A manifest in a directory: the hash says which checkpoint it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Listed {
    pub step: u64,
    /// BLAKE3 of the manifest, hex.
    pub hash: String,
}

/// The checkpoints in a directory whose manifests are whole, newest first.
pub fn listed(root: &Path) -> Result<Vec<Listed>> {
    let all = root::list(root)?.into_iter().take(LISTED_MAX);
    Ok(all.filter_map(|(step, path)| Some(Listed { step, hash: text_of(&path)?.0 })).collect())
}

/// Hash and text of the manifest in a folder, when it is whole.
pub fn text_of(path: &Path) -> Option<(String, Vec<u8>)> {
    let text = Folder::open(path).and_then(|f| Manifest::read(&f)).ok()?;
    let (hash, _) = Manifest::unsealed(text.clone()).ok()?;
    Some((hash, text))
}

/// Where a step's checkpoint is in this directory, or would be.
pub fn place_of(root: &Path, step: u64) -> PathBuf {
    root::locate(root, step).unwrap_or_else(|| root.join(step_name(step)))
}

/// What a save that was cut short between its phases has left: prepared folders.
pub fn prepared(root: &Path) -> Result<Vec<(Listed, PathBuf)>> {
    if !disk::exists(root) {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for name in Folder::open(root)?.names()?.into_iter().filter(|n| n.starts_with(SAVING)) {
        let path = root.join(name);
        let whole = text_of(&path).and_then(|(hash, text)| Some((hash, Manifest::parse(&path, text).ok()?)));
        if let Some((hash, manifest)) = whole.filter(|(_, m)| !m.hosts.is_empty()) {
            found.push((Listed { step: manifest.facts.step, hash }, path));
        }
    }
    Ok(found)
}

/// Completes a prepared folder, since another host has completed the same checkpoint.
pub fn roll_forward(root: &Path, path: &Path, step: u64) -> Result<()> {
    let _lock = disk::lock_dir(root)?;
    publish(path, &root.join(step_name(step)), Swap::Atomic)?;
    commit::point_latest(root, step)
}
