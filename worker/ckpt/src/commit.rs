//! Commits a save with renames, so that a checkpoint is complete or absent whenever the process is
//! killed. No other module renames.
use crate::catalog::{RunFacts, TensorRole, WeightShape};
use crate::disk::{self, DirLock, Directory};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result, SaveProblem};
use crate::fault;
use crate::manifest::{Extent, FileEntry, MANIFEST, Manifest, TensorEntry, shard_name};
use crate::parity::ParityReport;
use crate::root::{
    DELETING, LATEST, LATEST_NEW, REPLACED, SAVING, latest_step, latest_text, list, step_name, step_of,
};
use crate::save::ShardReport;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Space needed in addition to the tensors: headers, manifest, rounding.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// A save in progress: a hidden staging directory in the checkpoint directory. The process holds
/// the lock of the checkpoint directory until the save is committed or dropped. Dropping it removes
/// the staging directory.
pub struct Staging {
    pub(crate) root: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) step: u64,
    /// Whether to keep the staging directory on drop, because other hosts may have completed the
    /// checkpoint.
    pub(crate) prepared: bool,
    _lock: DirLock,
}

impl Staging {
    /// Creates `root` if needed, removes the remains of interrupted saves, and creates the staging
    /// directory. `total_bytes` is the number of bytes that all ranks together write.
    ///
    /// # Errors
    /// [`CkptError::InsufficientSpace`] if `root` has too little free space, before anything is
    /// written; [`CkptError::DirectoryBusy`] if another process holds the lock of `root`.
    pub fn begin(root: &Path, step: u64, total_bytes: u64) -> Result<Staging> {
        disk::make_dirs(root)?;
        let lock = disk::lock_dir(root)?;
        clean(root)?;
        let needed = total_bytes.saturating_add(total_bytes / 1000).saturating_add(OVERHEAD_BYTES);
        let free = disk::free_bytes(root)?;
        if needed > free {
            return Err(CkptError::InsufficientSpace { path: root.to_owned(), needed, free });
        }
        let dir = root.join(unique_name(&step_name(step)));
        disk::make_dir(&dir)?;
        Ok(Staging { root: root.to_owned(), dir, step, prepared: false, _lock: lock })
    }

    /// The staging directory, to which all ranks write their shards.
    pub fn path(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.prepared {
            // if the removal fails, the next `begin` removes the directory
            let _ = disk::remove_tree(&self.dir);
        }
    }
}

/// A name that no process of an earlier run can be writing to.
fn unique_name(step: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{SAVING}{step}-{}-{now}", std::process::id())
}

/// A checkpoint that is complete on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedCheckpoint {
    /// The checkpoint directory.
    pub path: PathBuf,
    /// Size of all files.
    pub bytes: u64,
}

/// Completes a save: checks that the shards contain every tensor of the model and of the optimizer
/// state exactly once, writes the manifest, renames the staging directory, and updates `latest`. An
/// existing checkpoint of the same step remains complete until it is replaced.
pub fn commit(staging: Staging, facts: RunFacts, reports: Vec<ShardReport>) -> Result<CommittedCheckpoint> {
    commit_with(staging, facts, reports, None, Swap::Atomic)
}

/// Completes a save as [`commit`] does, and includes the parity files that [`crate::write_parity`]
/// wrote.
pub fn commit_parity(
    staging: Staging,
    facts: RunFacts,
    reports: Vec<ShardReport>,
    parity: Vec<ParityReport>,
) -> Result<CommittedCheckpoint> {
    commit_with(staging, facts, reports, Some(parity), Swap::Atomic)
}

pub(crate) fn commit_with(
    staging: Staging,
    facts: RunFacts,
    reports: Vec<ShardReport>,
    parity: Option<Vec<ParityReport>>,
    swap: Swap,
) -> Result<CommittedCheckpoint> {
    if facts.step != staging.step {
        return Err(CkptError::invalid_save(SaveProblem::StepMismatch {
            begun: staging.step,
            committed: facts.step,
        }));
    }
    let bytes = write_manifest(&staging.dir, facts, reports, parity)?;
    let path = staging.root.join(step_name(staging.step));
    publish(&staging.dir, &path, swap)?;
    update_latest(&staging.root, staging.step)?;
    // a replaced checkpoint now has the hidden name, and is removed by dropping `staging` or the
    // next `begin`
    drop(staging);
    Ok(CommittedCheckpoint { path, bytes })
}

/// Checks that all shards in `dir` exist and contain every tensor, and writes the manifest. Returns
/// the size of all files.
pub(crate) fn write_manifest(
    dir: &Path,
    facts: RunFacts,
    reports: Vec<ShardReport>,
    parity: Option<Vec<ParityReport>>,
) -> Result<u64> {
    let manifest = assemble(facts, reports, parity)?;
    let directory = Directory::open(dir)?;
    manifest.all_files().try_for_each(|file| require_file(&directory, file))?;
    let files: u64 = manifest.all_files().map(|f| f.bytes).sum();
    let bytes = files + disk::write_file(dir.join(MANIFEST), &manifest.encode()?)?;
    disk::sync_dir(dir)?;
    Ok(bytes)
}

/// Requires that the file exists and has the reported size.
pub(crate) fn require_file(directory: &Directory, file: &FileEntry) -> Result<()> {
    let found = directory.size_of(&file.name)?;
    if found == Some(file.bytes) {
        return Ok(());
    }
    let (file, expected) = (file.name.clone(), file.bytes);
    Err(CkptError::invalid_save(SaveProblem::FileSize { file, expected, found }))
}

/// Assembles the manifest from the reports of all ranks.
pub(crate) fn assemble(
    facts: RunFacts,
    mut reports: Vec<ShardReport>,
    parity: Option<Vec<ParityReport>>,
) -> Result<Manifest> {
    reports.sort_by_key(|r| r.rank);
    let ranks: Vec<u32> = reports.iter().map(|r| r.rank).collect();
    if !ranks.iter().copied().eq(0..facts.world) {
        return Err(CkptError::invalid_save(SaveProblem::RankReports { ranks, world: facts.world }));
    }
    let mut pieces: HashMap<(TensorRole, String), (Dtype, Vec<Extent>)> = HashMap::new();
    let mut files = Vec::with_capacity(reports.len());
    for (file, report) in reports.into_iter().enumerate() {
        if report.world != facts.world || report.file != shard_name(report.rank, facts.world) {
            return Err(CkptError::invalid_save(SaveProblem::NotAShard {
                file: report.file,
                world: facts.world,
            }));
        }
        for p in report.pieces {
            let extent = Extent { start: p.start, count: p.count, file, offset: p.offset };
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
            // a tensor without elements has no piece, but belongs to the checkpoint
            let empty = t.shape.contains(&0) && present;
            let empty = empty && !(role.is_optimizer_state() && frozen.contains(t.name.as_str()));
            match pieces.remove(&(role, t.name.clone())) {
                Some((dtype, held)) => tensors.push(entry(role, t, dtype, held)),
                None if empty => tensors.push(entry(role, t, Dtype::F32, Vec::new())),
                None => {}
            }
        }
    }
    if let Some((role, name)) = pieces.keys().next() {
        return Err(CkptError::invalid_save(SaveProblem::UnknownTensor { tensor: format!("{role}/{name}") }));
    }
    let parity = parity.map(|mut stripes| {
        stripes.sort_by_key(|p| p.rank);
        let entry =
            |p: ParityReport| FileEntry { name: p.file, bytes: p.bytes, blocks: p.blocks, host: None };
        stripes.into_iter().map(entry).collect()
    });
    let manifest = Manifest::new(facts, files, tensors, parity);
    manifest.check().map_err(CkptError::invalid_save)?;
    Ok(manifest)
}

/// Returns the manifest entry of one tensor.
fn entry(role: TensorRole, t: &WeightShape, dtype: Dtype, mut pieces: Vec<Extent>) -> TensorEntry {
    pieces.sort_by_key(|e| e.start);
    TensorEntry { name: t.name.clone(), role, dtype, shape: t.shape.clone(), pieces }
}

/// How one directory replaces another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Swap {
    /// Exchange both names atomically, if the file system supports it.
    Atomic,
    /// Two renames, as on a file system without atomic exchange.
    #[cfg_attr(not(test), allow(dead_code))]
    TwoSteps,
}

/// Renames the complete, synced directory `from` to `to`, durably. A previous directory `to` is
/// renamed to `from`.
pub(crate) fn publish(from: &Path, to: &Path, how: Swap) -> Result<()> {
    let parent = disk::parent_of(to);
    if !disk::exists(to) {
        rename(from, to)?;
        return disk::sync_dir(&parent);
    }
    if how == Swap::Atomic {
        let swap = || renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_EXCHANGE);
        match fault::around("rename", swap) {
            Ok(()) => return disk::sync_dir(&parent),
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::ENOTSUP) => {}
            Err(e) => return Err(CkptError::errno("rename", from)(e)),
        }
    }
    // between the two renames, readers find the old directory under its `.replaced-` name
    let aside = parent.join(format!("{REPLACED}{}", to.file_name().unwrap_or_default().to_string_lossy()));
    disk::remove_tree(&aside)?;
    rename(to, &aside)?;
    disk::sync_dir(&parent)?;
    if let Err(e) = rename(from, to) {
        rename(&aside, to)?;
        return Err(e);
    }
    disk::sync_dir(&parent)?;
    rename(&aside, from)
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fault::around("rename", || fs::rename(from, to)).map_err(CkptError::io("rename", from))
}

/// Makes `latest` name the checkpoint of `step`, atomically and durably.
pub(crate) fn update_latest(root: &Path, step: u64) -> Result<()> {
    replace_file(root, LATEST_NEW, LATEST, latest_text(step).as_bytes())
}

/// Replaces a small file atomically and durably. `new` is the temporary name.
pub(crate) fn replace_file(root: &Path, new: &str, name: &str, content: &[u8]) -> Result<()> {
    let new = root.join(new);
    disk::unlink(&new)?;
    disk::write_file(new.clone(), content)?;
    rename(&new, &root.join(name))?;
    disk::sync_dir(root)
}

/// Removes the remains of interrupted saves and removals, and undoes an incomplete replacement.
pub(crate) fn clean(root: &Path) -> Result<()> {
    for name in Directory::open(root)?.names()? {
        let path = root.join(&name);
        if let Some(step) = name.strip_prefix(REPLACED).filter(|n| step_of(n).is_some()) {
            match disk::exists(&root.join(step)) {
                true => remove_hidden(&path)?,
                false => {
                    rename(&path, &root.join(step))?;
                    disk::sync_dir(root)?;
                }
            }
        } else if name.starts_with(SAVING) || name.starts_with(DELETING) {
            remove_hidden(&path)?;
        } else if name == LATEST_NEW {
            disk::unlink(&path)?;
        }
    }
    Ok(())
}

/// Removes a hidden directory, or a file or symbolic link of that name.
fn remove_hidden(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(m) if m.is_dir() => disk::remove_tree(path),
        _ => disk::unlink(path),
    }
}

/// Removes all checkpoints except the newest `keep` and the one that `latest` names; 0 keeps all.
/// Each checkpoint is renamed before its contents are removed. Returns the removed paths.
pub fn prune(root: &Path, keep: u32) -> Result<Vec<PathBuf>> {
    if keep == 0 {
        return Ok(Vec::new());
    }
    let _lock = disk::lock_dir(root)?;
    // a damaged `latest` protects nothing; the newest checkpoints are kept in any case
    let protected = latest_step(root).unwrap_or(None);
    let mut removed = Vec::new();
    for (step, path) in list(root)?.into_iter().skip(keep as usize) {
        if Some(step) == protected {
            continue;
        }
        let hidden = root.join(format!("{DELETING}{}-{}", step_name(step), std::process::id()));
        disk::remove_tree(&hidden)?;
        rename(&path, &hidden)?;
        disk::sync_dir(root)?;
        disk::remove_tree(&hidden)?;
        removed.push(path);
    }
    Ok(removed)
}
