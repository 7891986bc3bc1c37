//! Commits saved checkpoints by renaming their directories, so that a killed process never leaves
//! an incomplete checkpoint under its final name. Every rename of the crate happens in this module.
use super::parity::ParityFileReport;
use super::shard_writer::ShardReport;
use crate::catalog::RunFacts;
use crate::codec::disk::{self, DirLock, Directory};
use crate::error::{CkptError, Result, SaveProblem};
use crate::fault_points;
use crate::format_constants::MANIFEST_FILE;
use crate::layout::native::{
    DELETING_PREFIX, FileEntry, LATEST_FILE, LATEST_TEMP_FILE, Manifest, REPLACED_PREFIX, SAVING_PREFIX,
    TensorEntry, TensorPieceEntry, encode_latest, list_checkpoints, parse_step_dir_name, read_latest_step,
    shard_file_name, step_dir_name,
};
use crate::tensor::{Dtype, TensorRole};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Disk space in bytes that a save needs in addition to the tensors: for headers, the manifest, and
/// rounding up to whole blocks.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// The hidden directory to which all ranks write their shards during a save, and the lock on the
/// checkpoint directory that prevents concurrent saves. Dropping the value releases the lock. The
/// drop also removes the hidden directory if the save was neither committed nor prepared.
pub struct StagingDir {
    pub(crate) root: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) step: u64,
    /// Whether a drop keeps the staging directory. True for a prepared save, since other hosts may
    /// have completed the checkpoint.
    pub(crate) keep_on_drop: bool,
    _lock: DirLock,
}

impl StagingDir {
    /// Locks the checkpoint directory `root`, removes the remains of interrupted saves, and creates
    /// the hidden directory for a new checkpoint. `total_bytes` is the number of bytes that all
    /// ranks together write.
    ///
    /// # Errors
    /// Fails with [`CkptError::InsufficientSpace`] if the file system of `root` has too little free
    /// space, before any file is written. Fails with [`CkptError::DirectoryBusy`] if another
    /// process holds the lock of `root`.
    pub fn create(root: &Path, step: u64, total_bytes: u64) -> Result<StagingDir> {
        disk::make_dirs(root)?;
        let lock = disk::try_lock_dir(root)?;
        remove_save_leftovers(root)?;
        let needed = total_bytes.saturating_add(total_bytes / 1000).saturating_add(OVERHEAD_BYTES);
        disk::require_free_bytes(root, needed)?;
        let dir = root.join(make_staging_name(&step_dir_name(step)));
        disk::make_dir(&dir)?;
        Ok(StagingDir { root: root.to_owned(), dir, step, keep_on_drop: false, _lock: lock })
    }

    /// Returns the path of the hidden directory to which all ranks write their shards during a
    /// save.
    pub fn path(&self) -> &Path {
        &self.dir
    }
}

impl Drop for StagingDir {
    fn drop(&mut self) {
        if !self.keep_on_drop {
            // if the removal fails, the next `StagingDir::create` removes the directory
            let _ = disk::remove_tree(&self.dir);
        }
    }
}

/// Returns a unique name for the hidden directory of a save, which contains step, process id and
/// time.
fn make_staging_name(step: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{SAVING_PREFIX}{step}-{}-{now}", std::process::id())
}

/// A saved checkpoint that is complete on disk, and its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedCheckpoint {
    /// Directory of this checkpoint, such as `checkpoints/step-00000010`.
    pub path: PathBuf,
    /// Total size of the checkpoint's files in bytes.
    pub bytes: u64,
}

/// Completes a save after all ranks have written their shards: writes the manifest and renames the
/// hidden directory to its final name. Also updates the file `latest`. `reports` has one report per
/// rank. An existing checkpoint of this step is replaced.
///
/// # Errors
/// Fails with [`CkptError::InvalidSave`] if the shards and `facts` don't form a complete
/// checkpoint. Also fails if I/O fails. After an error the staging directory is removed.
pub fn commit_save(
    staging: StagingDir,
    facts: RunFacts,
    reports: Vec<ShardReport>,
) -> Result<CommittedCheckpoint> {
    commit_save_replacing(staging, facts, reports, None, ReplaceMethod::AtomicExchange)
}

/// Completes a save with parity files (XOR redundancy over the shards): writes the manifest, and
/// renames the hidden directory to its final name. `parity` has one report per rank.
pub fn commit_save_with_parity(
    staging: StagingDir,
    facts: RunFacts,
    reports: Vec<ShardReport>,
    parity: Vec<ParityFileReport>,
) -> Result<CommittedCheckpoint> {
    commit_save_replacing(staging, facts, reports, Some(parity), ReplaceMethod::AtomicExchange)
}

/// Completes a save, and replaces an existing checkpoint of equal step in the way that `swap`
/// selects: an atomic exchange or two renames.
pub(crate) fn commit_save_replacing(
    staging: StagingDir,
    facts: RunFacts,
    reports: Vec<ShardReport>,
    parity: Option<Vec<ParityFileReport>>,
    swap: ReplaceMethod,
) -> Result<CommittedCheckpoint> {
    if facts.step != staging.step {
        return Err(CkptError::invalid_save(SaveProblem::StepMismatch {
            begun: staging.step,
            committed: facts.step,
        }));
    }
    let bytes = write_manifest(&staging.dir, facts, reports, parity)?;
    let path = staging.root.join(step_dir_name(staging.step));
    publish_directory(&staging.dir, &path, swap)?;
    update_latest(&staging.root, staging.step)?;
    // a replaced checkpoint now has the hidden name, and is removed by dropping `staging` or the
    // next `StagingDir::create`
    drop(staging);
    Ok(CommittedCheckpoint { path, bytes })
}

/// Checks that the shards in `dir` are complete, and writes the manifest of the checkpoint to `dir`
/// durably. Returns the total size of all files in bytes.
pub(crate) fn write_manifest(
    dir: &Path,
    facts: RunFacts,
    reports: Vec<ShardReport>,
    parity: Option<Vec<ParityFileReport>>,
) -> Result<u64> {
    let manifest = assemble_manifest(facts, reports, parity)?;
    let directory = Directory::open(dir)?;
    manifest.all_files().try_for_each(|file| require_reported_file(&directory, file))?;
    let files: u64 = manifest.all_files().map(|f| f.bytes).sum();
    let bytes = files + disk::write_file(dir.join(MANIFEST_FILE), &manifest.encode()?)?;
    disk::sync_dir(dir)?;
    Ok(bytes)
}

/// Fails with [`SaveProblem::FileSize`] if the size of a rank's file on disk differs from the size
/// that the rank reported.
pub(crate) fn require_reported_file(directory: &Directory, file: &FileEntry) -> Result<()> {
    let found = directory.file_size(&file.name)?;
    if found == Some(file.bytes) {
        return Ok(());
    }
    let (file, expected) = (file.name.clone(), file.bytes);
    Err(CkptError::invalid_save(SaveProblem::FileSize { file, expected, found }))
}

/// Creates the manifest of a checkpoint from the lists of tensors and hashes that all ranks report
/// about their shards.
///
/// # Errors
/// Fails with [`CkptError::InvalidSave`] if a rank's report is missing, or if the tensors in the
/// reports differ from those of the model.
pub(crate) fn assemble_manifest(
    facts: RunFacts,
    mut reports: Vec<ShardReport>,
    parity: Option<Vec<ParityFileReport>>,
) -> Result<Manifest> {
    reports.sort_unstable_by_key(|r| r.rank);
    let ranks: Vec<u32> = reports.iter().map(|r| r.rank).collect();
    if !ranks.iter().copied().eq(0..facts.world) {
        return Err(CkptError::invalid_save(SaveProblem::RankReports { ranks, world: facts.world }));
    }
    let mut pieces: HashMap<(TensorRole, String), (Dtype, Vec<TensorPieceEntry>)> = HashMap::new();
    let mut files = Vec::with_capacity(reports.len());
    for (file, report) in reports.into_iter().enumerate() {
        if report.world != facts.world || report.file != shard_file_name(report.rank, facts.world) {
            return Err(CkptError::invalid_save(SaveProblem::NotAShard {
                file: report.file,
                world: facts.world,
            }));
        }
        for p in report.pieces {
            let extent = TensorPieceEntry { start: p.start, count: p.count, file, offset: p.offset };
            let (dtype, held) = pieces.entry((p.role, p.name)).or_insert((p.dtype, Vec::new()));
            if *dtype != p.dtype {
                return Err(CkptError::invalid_save(SaveProblem::MixedDtypes {
                    role: p.role,
                    first: *dtype,
                    second: p.dtype,
                }));
            }
            held.push(extent);
        }
        files.push(FileEntry { name: report.file, bytes: report.bytes, blocks: report.blocks, host: None });
    }
    let frozen: HashSet<&str> = facts.model.frozen.iter().map(String::as_str).collect();
    let mut tensors = Vec::new();
    for role in TensorRole::ALL {
        let listed = if role == TensorRole::Buffer { &facts.model.buffers } else { &facts.model.weights };
        let present = !role.is_optimizer_state() || pieces.keys().any(|(r, _)| *r == role);
        for t in listed {
            let Some(shape) = role.tensor_shape_for_weight(&t.shape) else { continue };
            // a tensor without elements has no piece, but belongs to the checkpoint
            let empty = shape.contains(&0) && present;
            let empty = empty && !(role.is_optimizer_state() && frozen.contains(t.name.as_str()));
            match pieces.remove(&(role, t.name.clone())) {
                Some((dtype, held)) => tensors.push(make_tensor_entry(role, &t.name, shape, dtype, held)),
                None if empty => {
                    tensors.push(make_tensor_entry(role, &t.name, shape, Dtype::F32, Vec::new()))
                }
                None => {}
            }
        }
    }
    if let Some((role, name)) = pieces.keys().next() {
        return Err(CkptError::invalid_save(SaveProblem::UnknownTensor { tensor: format!("{role}/{name}") }));
    }
    let parity = parity.map(|mut stripes| {
        stripes.sort_unstable_by_key(|p| p.rank);
        let entry =
            |p: ParityFileReport| FileEntry { name: p.file, bytes: p.bytes, blocks: p.blocks, host: None };
        stripes.into_iter().map(entry).collect()
    });
    let manifest = Manifest::new(facts, files, tensors, parity);
    manifest.check_consistency().map_err(CkptError::invalid_save)?;
    Ok(manifest)
}

/// Returns the manifest's entry of one tensor, in which the pieces of the tensor are sorted by the
/// index of their first element.
fn make_tensor_entry(
    role: TensorRole,
    name: &str,
    shape: &[u64],
    dtype: Dtype,
    mut pieces: Vec<TensorPieceEntry>,
) -> TensorEntry {
    pieces.sort_by_key(|e| e.start);
    TensorEntry { name: name.to_owned(), role, dtype, shape: shape.to_vec(), pieces }
}

/// How a new checkpoint directory replaces an existing one of the same name: by an atomic exchange
/// or by two renames.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplaceMethod {
    /// Exchange both names atomically, or rename twice if the file system can't exchange names.
    AtomicExchange,
    /// Always rename twice. Tests use this method to imitate file systems without atomic exchange.
    #[cfg_attr(not(test), allow(dead_code))]
    TwoRenames,
}

/// Renames the complete hidden directory `from` to its final path `to`, and makes this durable. An
/// existing directory `to` gets the name `from` instead. The caller must then remove this old
/// directory.
pub(crate) fn publish_directory(from: &Path, to: &Path, how: ReplaceMethod) -> Result<()> {
    let parent = disk::parent_dir(to);
    if !disk::path_exists(to) {
        rename_path(from, to)?;
        return disk::sync_dir(&parent);
    }
    if how == ReplaceMethod::AtomicExchange {
        let swap = || renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_EXCHANGE);
        match fault_points::run_between_fault_points("rename", swap) {
            Ok(()) => return disk::sync_dir(&parent),
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::ENOTSUP) => {}
            Err(e) => return Err(CkptError::io("rename", from)(e)),
        }
    }
    // between the two renames, readers find the old directory under its `.replaced-` name
    let aside =
        parent.join(format!("{REPLACED_PREFIX}{}", to.file_name().unwrap_or_default().to_string_lossy()));
    disk::remove_tree(&aside)?;
    rename_path(to, &aside)?;
    disk::sync_dir(&parent)?;
    if let Err(e) = rename_path(from, to) {
        rename_path(&aside, to)?;
        return Err(e);
    }
    disk::sync_dir(&parent)?;
    rename_path(&aside, from)
}

/// Renames a file or directory from `from` to `to`, between two fault points at which a test can
/// kill the process. Does not sync the parent directory.
fn rename_path(from: &Path, to: &Path) -> Result<()> {
    fault_points::run_between_fault_points("rename", || fs::rename(from, to))
        .map_err(CkptError::io("rename", from))
}

/// Replaces the file `latest`, which names the newest checkpoint, atomically and durably by one
/// that names the checkpoint of `step`.
pub(crate) fn update_latest(root: &Path, step: u64) -> Result<()> {
    replace_file(root, LATEST_TEMP_FILE, LATEST_FILE, encode_latest(step).as_bytes())
}

/// Replaces the file `name` in the directory `root` by one with the content `content`, atomically
/// and durably.
pub(crate) fn replace_file(root: &Path, new: &str, name: &str, content: &[u8]) -> Result<()> {
    let new = root.join(new);
    disk::unlink(&new)?;
    disk::write_file(new.clone(), content)?;
    rename_path(&new, &root.join(name))?;
    disk::sync_dir(root)
}

/// Removes the directories and files that interrupted saves and removals have left in the
/// checkpoint directory `root`, whose lock the caller must hold. If a save was interrupted while it
/// replaced a checkpoint, and no checkpoint of this step is visible, gives the old checkpoint its
/// name back.
pub(crate) fn remove_save_leftovers(root: &Path) -> Result<()> {
    for name in Directory::open(root)?.list_names()? {
        let path = root.join(&name);
        if let Some(step) = name.strip_prefix(REPLACED_PREFIX).filter(|n| parse_step_dir_name(n).is_some()) {
            match disk::path_exists(&root.join(step)) {
                true => remove_hidden_entry(&path)?,
                false => {
                    rename_path(&path, &root.join(step))?;
                    disk::sync_dir(root)?;
                }
            }
        } else if name.starts_with(SAVING_PREFIX) || name.starts_with(DELETING_PREFIX) {
            remove_hidden_entry(&path)?;
        } else if name == LATEST_TEMP_FILE {
            disk::unlink(&path)?;
        }
    }
    Ok(())
}

/// Removes the directory, file or symbolic link at `path`, which an interrupted save or removal
/// left. Does not follow a link.
fn remove_hidden_entry(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(m) if m.is_dir() => disk::remove_tree(path),
        _ => disk::unlink(path),
    }
}

/// Removes all checkpoints in the directory `root` except the newest `keep` ones and the one that
/// the file `latest` names. Removes nothing if `keep` is 0. Renames each checkpoint before removing
/// its files, so that no incomplete checkpoint is visible. Returns the paths of the removed
/// checkpoints.
pub fn prune_checkpoints(root: &Path, keep: u32) -> Result<Vec<PathBuf>> {
    if keep == 0 {
        return Ok(Vec::new());
    }
    let _lock = disk::try_lock_dir(root)?;
    // a damaged `latest` protects nothing; the newest checkpoints are kept in any case
    let protected = read_latest_step(root).unwrap_or(None);
    let mut removed = Vec::new();
    for (step, path) in list_checkpoints(root)?.into_iter().skip(keep as usize) {
        if Some(step) == protected {
            continue;
        }
        let hidden = root.join(format!("{DELETING_PREFIX}{}-{}", step_dir_name(step), std::process::id()));
        disk::remove_tree(&hidden)?;
        rename_path(&path, &hidden)?;
        disk::sync_dir(root)?;
        disk::remove_tree(&hidden)?;
        removed.push(path);
    }
    Ok(removed)
}
