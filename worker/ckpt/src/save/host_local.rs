//! Saves checkpoints on hosts that do not share a checkpoint directory. Each host stores the shards
//! of its ranks and a copy of the manifest, which records the host of each shard.
//!
//! The commit has two phases. First, every host prepares: the host writes the manifest to its
//! staging directory and syncs this directory. When all hosts have prepared, each host renames its
//! staging directory. A host that was killed between the phases finds its prepared directory at the
//! next start ([`list_prepared_saves`]). The host completes this directory if and only if another
//! host has completed the same checkpoint ([`complete_prepared_save`]).
use super::commit::{
    self, CommittedCheckpoint, ReplaceMethod, StagingDir, publish_directory, require_reported_file,
};
use super::shard_writer::ShardReport;
use crate::catalog::RunFacts;
use crate::codec::disk::{self, Directory};
use crate::error::{CkptError, Result, SaveProblem};
use crate::format_constants::MANIFEST_FILE;
pub use crate::layout::native::StorageHost;
use crate::layout::native::{
    HOST_ID_FILE, HOST_ID_LEN, HOST_NAME_BYTES_MAX, Manifest, SAVING_PREFIX, step_dir_name, step_directories,
};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// Temporary name under which a host writes the file with its id ([`HOST_ID_FILE`]) before the
/// complete file gets its final name.
const HOST_ID_TEMP_FILE: &str = ".host-new";
/// Maximum number of checkpoints in one directory that [`list_checkpoint_ids`] reads, newest steps
/// first. Older ones are ignored.
const LISTED_CHECKPOINTS_MAX: usize = 4096;

impl StorageHost {
    /// Returns the identity of this host: the host's id from the checkpoint directory `root`,
    /// created there if missing, and the host's name. The id is the one stored in `root`, which is
    /// created if it is missing or invalid. The name is `name` without control characters,
    /// truncated if it is long, or `unnamed` if it is empty. Creates `root` if needed.
    pub fn load_or_create(root: &Path, name: &str) -> Result<StorageHost> {
        disk::make_dirs(root)?;
        let id = match StorageHost::read_id(root)? {
            Some(id) => id,
            None => StorageHost::create_id(root)?,
        };
        let name: String = name.chars().filter(|c| !c.is_control()).take(HOST_NAME_BYTES_MAX / 4).collect();
        Ok(StorageHost { id, name: if name.is_empty() { "unnamed".into() } else { name } })
    }

    /// Creates a random id of hex digits, and writes the id durably to [`HOST_ID_FILE`] in the
    /// checkpoint directory `root`.
    fn create_id(root: &Path) -> Result<String> {
        let mut random = [0u8; HOST_ID_LEN / 2];
        let filled = getrandom::fill(&mut random).map_err(io::Error::from);
        filled.map_err(CkptError::io("create a random id for", root))?;
        let id: String = random.iter().map(|b| format!("{b:02x}")).collect();
        commit::replace_file(root, HOST_ID_TEMP_FILE, HOST_ID_FILE, format!("{id}\n").as_bytes())?;
        Ok(id)
    }
}

/// Builds the manifest of a checkpoint whose shards are on several hosts without a shared
/// directory, and returns its text. Every host stores a copy of it. `reports` has one report per
/// rank. The shard of rank r is on `hosts[host_of_rank[r]]`.
///
/// # Errors
/// Fails with [`CkptError::InvalidSave`] if the shards aren't a complete checkpoint, or a shard has
/// no host.
pub fn encode_host_local_manifest(
    facts: RunFacts,
    reports: Vec<ShardReport>,
    hosts: Vec<StorageHost>,
    host_of_rank: &[usize],
) -> Result<Vec<u8>> {
    let manifest = commit::assemble_manifest(facts, reports, None)?.with_hosts(hosts, host_of_rank);
    manifest.check_consistency().map_err(CkptError::invalid_save)?;
    manifest.encode()
}

/// A host's complete part of a checkpoint on disk, in a directory that keeps a hidden name until
/// every host has completed its part. Dropping this value keeps the hidden directory, since other
/// hosts may complete their parts.
pub struct PreparedSave {
    staging: StagingDir,
    bytes: u64,
}

impl PreparedSave {
    /// Checks that the shards of this host (with the id `id`) are complete in the hidden directory
    /// of a save, writes the manifest `text` there, and syncs the directory.
    ///
    /// # Errors
    /// Fails if a shard is missing or has the wrong size, or the manifest is of another step. The
    /// staging directory is then removed.
    pub fn prepare(mut staging: StagingDir, id: &str, text: Vec<u8>) -> Result<PreparedSave> {
        let manifest = Manifest::parse(&staging.dir, text.clone())?;
        if manifest.facts.step != staging.step {
            let (begun, committed) = (staging.step, manifest.facts.step);
            return Err(CkptError::invalid_save(SaveProblem::StepMismatch { begun, committed }));
        }
        let directory = Directory::open(&staging.dir)?;
        for (i, file) in manifest.files.iter().enumerate() {
            if manifest.shard_host(i).is_some_and(|h| h.id == id) {
                require_reported_file(&directory, file)?;
            }
        }
        // once this function returns, the directory must survive a kill, since other hosts rely on
        // this host being prepared
        let bytes = manifest.total_shard_bytes() + disk::write_file(staging.dir.join(MANIFEST_FILE), &text)?;
        disk::sync_dir(&staging.dir)?;
        disk::sync_dir(&staging.root)?;
        staging.keep_on_drop = true;
        Ok(PreparedSave { staging, bytes })
    }

    /// Makes this host's part of a checkpoint visible: renames the hidden directory to the name of
    /// the step, and updates the file `latest`, which names the newest checkpoint. The caller must
    /// do so only after every host has prepared.
    pub fn complete(mut self) -> Result<CommittedCheckpoint> {
        let StagingDir { root, dir, step, .. } = &self.staging;
        let path = root.join(step_dir_name(*step));
        publish_directory(dir, &path, ReplaceMethod::AtomicExchange)?;
        commit::update_latest(root, *step)?;
        // the replaced checkpoint now has the hidden name
        self.staging.keep_on_drop = false;
        Ok(CommittedCheckpoint { path, bytes: self.bytes })
    }

    /// Deletes the hidden directory with this host's part of a checkpoint, so that the checkpoint
    /// never becomes visible. The caller must do so only if no host completes the checkpoint, for
    /// example because another host could not prepare.
    pub fn discard(mut self) {
        self.staging.keep_on_drop = false;
    }
}

/// Identity of a checkpoint that several hosts store in parts: the step and the hash of the
/// manifest. All hosts of the checkpoint have the same identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostLocalCheckpointId {
    /// Step of the checkpoint.
    pub step: u64,
    /// BLAKE3 hash of the manifest, as hex digits.
    pub hash: String,
}

/// Returns the steps and manifest hashes of the native checkpoints (launch's own format) with an
/// intact manifest in the directory `root`, newest first. Ignores all checkpoints but the newest
/// 4096.
pub fn list_checkpoint_ids(root: &Path) -> Result<Vec<HostLocalCheckpointId>> {
    let checkpoints = step_directories::list_checkpoints(root)?.into_iter().take(LISTED_CHECKPOINTS_MAX);
    Ok(checkpoints
        .filter_map(|(step, path)| Some(HostLocalCheckpointId { step, hash: read_manifest(&path)?.0 }))
        .collect())
}

/// Reads the text of the manifest of the checkpoint at `path`. Returns the hash and the text of the
/// manifest. Returns `None` if the manifest is missing or does not match its hash.
pub fn read_manifest(path: &Path) -> Option<(String, Vec<u8>)> {
    let text = Directory::open(path).and_then(|f| Manifest::read_text(&f)).ok()?;
    let (hash, _) = Manifest::verify_and_unseal(text.clone()).ok()?;
    Some((hash, text))
}

/// Returns the path of a step's checkpoint in the checkpoint directory `root`, whether or not the
/// checkpoint exists.
pub fn step_checkpoint_path(root: &Path, step: u64) -> PathBuf {
    step_directories::locate_step_checkpoint(root, step).unwrap_or_else(|| root.join(step_dir_name(step)))
}

/// Lists the hidden directories that interrupted saves left in `root` after writing the manifest
/// and before renaming the directory. Returns the identity and the path of each. The list is empty
/// if `root` does not exist.
pub fn list_prepared_saves(root: &Path) -> Result<Vec<(HostLocalCheckpointId, PathBuf)>> {
    if !disk::path_exists(root) {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for name in Directory::open(root)?.list_names()?.into_iter().filter(|n| n.starts_with(SAVING_PREFIX)) {
        let path = root.join(name);
        let valid =
            read_manifest(&path).and_then(|(hash, text)| Some((hash, Manifest::parse(&path, text).ok()?)));
        if let Some((hash, manifest)) = valid.filter(|(_, m)| !m.hosts.is_empty()) {
            found.push((HostLocalCheckpointId { step: manifest.facts.step, hash }, path));
        }
    }
    Ok(found)
}

/// Makes the checkpoint of an interrupted save visible: renames the hidden directory `path` to the
/// name of the step, and updates the file `latest`. Locks the checkpoint directory `root`. The
/// caller must do so only if another host has completed this checkpoint.
pub fn complete_prepared_save(root: &Path, path: &Path, step: u64) -> Result<()> {
    let _lock = disk::try_lock_dir(root)?;
    publish_directory(path, &root.join(step_dir_name(step)), ReplaceMethod::AtomicExchange)?;
    commit::update_latest(root, step)
}
