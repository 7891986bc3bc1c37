//! The only place that renames: a checkpoint is complete or absent, at every possible kill.
use crate::catalog::{Facts, Role, WeightShape};
use crate::disk::{self, DirLock, Folder};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
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

/// Space beside the tensors: headers, manifest, rounding up.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// A save in progress: a hidden folder under the root, which only this process writes checkpoints into until this is
/// committed or dropped. Dropping it removes the folder.
pub struct Staging {
    pub(crate) root: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) step: u64,
    /// Stays when this is dropped: other hosts may have completed it.
    pub(crate) prepared: bool,
    _lock: DirLock,
}

impl Staging {
    /// Makes `root` if needed, removes what interrupted saves have left in it, and makes a folder for the shards.
    /// `total_bytes` is what all ranks together are going to write.
    ///
    /// # Errors
    /// [`CkptError::NoSpace`] before anything is written; [`CkptError::Busy`] when another process saves here.
    pub fn begin(root: &Path, step: u64, total_bytes: u64) -> Result<Staging> {
        disk::make_dirs(root)?;
        let lock = disk::lock_dir(root)?;
        clean(root)?;
        let needed = total_bytes.saturating_add(total_bytes / 1000).saturating_add(OVERHEAD_BYTES);
        let free = disk::free_bytes(root)?;
        if needed > free {
            return Err(CkptError::NoSpace { path: root.to_owned(), needed, free });
        }
        let dir = root.join(unique_name(&step_name(step)));
        disk::make_dir(&dir)?;
        Ok(Staging { root: root.to_owned(), dir, step, prepared: false, _lock: lock })
    }

    /// Where the ranks write their shards; rank 0 tells them.
    pub fn path(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.prepared {
            // what can't be removed now is removed by the next `begin`
            let _ = disk::remove_tree(&self.dir);
        }
    }
}

/// A name that a straggler of an earlier run cannot be writing into.
fn unique_name(step: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{SAVING}{step}-{}-{now}", std::process::id())
}

/// A checkpoint that is complete on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    pub path: PathBuf,
    /// Of all its files.
    pub bytes: u64,
}

/// Completes a save: checks that the shards hold every tensor of the model, and of the optimizer state if there is any,
/// exactly once; writes the manifest; gives the folder its name; then moves `latest`. A checkpoint of the same step is
/// replaced, and stays complete until the new one is.
pub fn commit(staging: Staging, facts: Facts, reports: Vec<ShardReport>) -> Result<Committed> {
    commit_with(staging, facts, reports, None, Swap::Atomic)
}

/// The same of a save with parity: `parity` are the stripes of all ranks, from [`crate::write_parity`].
pub fn commit_parity(
    staging: Staging,
    facts: Facts,
    reports: Vec<ShardReport>,
    parity: Vec<ParityReport>,
) -> Result<Committed> {
    commit_with(staging, facts, reports, Some(parity), Swap::Atomic)
}

pub(crate) fn commit_with(
    staging: Staging,
    facts: Facts,
    reports: Vec<ShardReport>,
    parity: Option<Vec<ParityReport>>,
    swap: Swap,
) -> Result<Committed> {
    if facts.step != staging.step {
        return Err(CkptError::invalid(format!(
            "begun at step {}, committed at step {}",
            staging.step, facts.step
        )));
    }
    let bytes = write_manifest(&staging.dir, facts, reports, parity)?;
    let path = staging.root.join(step_name(staging.step));
    publish(&staging.dir, &path, swap)?;
    point_latest(&staging.root, staging.step)?;
    // a replaced checkpoint now has the hidden name; removed when `staging` drops, or by the next `begin`
    drop(staging);
    Ok(Committed { path, bytes })
}

/// Checks that the shards in `dir` are all there and hold every tensor, and writes the manifest. Bytes of all files.
pub(crate) fn write_manifest(
    dir: &Path,
    facts: Facts,
    reports: Vec<ShardReport>,
    parity: Option<Vec<ParityReport>>,
) -> Result<u64> {
    let manifest = assemble(facts, reports, parity)?;
    let folder = Folder::open(dir)?;
    manifest.all_files().try_for_each(|file| require_file(&folder, file))?;
    let files: u64 = manifest.all_files().map(|f| f.bytes).sum();
    let bytes = files + disk::write_file(dir.join(MANIFEST), &manifest.encode()?)?;
    disk::sync_dir(dir)?;
    Ok(bytes)
}

/// The shard is in the folder, with all its bytes.
pub(crate) fn require_file(folder: &Folder, file: &FileEntry) -> Result<()> {
    let found = folder.size_of(&file.name)?;
    if found == Some(file.bytes) {
        return Ok(());
    }
    let found = found.map_or("no such file".to_owned(), |n| format!("{n} bytes"));
    Err(CkptError::invalid(format!("{} should have {} bytes, found {found}", file.name, file.bytes)))
}

/// Pieces of every rank, as the manifest of whole tensors.
pub(crate) fn assemble(
    facts: Facts,
    mut reports: Vec<ShardReport>,
    parity: Option<Vec<ParityReport>>,
) -> Result<Manifest> {
    reports.sort_by_key(|r| r.rank);
    let ranks: Vec<u32> = reports.iter().map(|r| r.rank).collect();
    if !ranks.iter().copied().eq(0..facts.world) {
        return Err(CkptError::invalid(format!("reports of ranks {ranks:?} for a world of {}", facts.world)));
    }
    let mut pieces: HashMap<(Role, String), (Dtype, Vec<Extent>)> = HashMap::new();
    let mut files = Vec::with_capacity(reports.len());
    for (file, report) in reports.into_iter().enumerate() {
        if report.world != facts.world || report.file != shard_name(report.rank, facts.world) {
            return Err(CkptError::invalid(format!(
                "{} is not a shard of a world of {}",
                report.file, facts.world
            )));
        }
        for p in report.pieces {
            let extent = Extent { start: p.start, count: p.count, file, offset: p.offset };
            let (dtype, held) = pieces.entry((p.role, p.name)).or_insert((p.dtype, Vec::new()));
            if *dtype != p.dtype {
                return Err(CkptError::invalid(format!(
                    "pieces of one {} are {dtype} and {}",
                    p.role, p.dtype
                )));
            }
            held.push(extent);
        }
        files.push(FileEntry { name: report.file, bytes: report.bytes, blocks: report.blocks, host: None });
    }
    let frozen: HashSet<&str> = facts.model.frozen.iter().map(String::as_str).collect();
    let mut tensors = Vec::new();
    for role in Role::ALL {
        let listed = if role == Role::Buffer { &facts.model.buffers } else { &facts.model.weights };
        let present = !role.is_optimizer_state() || pieces.keys().any(|(r, _)| *r == role);
        for t in listed {
            // no shard has a piece of a tensor without elements, yet it belongs to the checkpoint
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
        return Err(CkptError::invalid(format!("{role}/{name} is no tensor of the model")));
    }
    let parity = parity.map(|mut stripes| {
        stripes.sort_by_key(|p| p.rank);
        let entry =
            |p: ParityReport| FileEntry { name: p.file, bytes: p.bytes, blocks: p.blocks, host: None };
        stripes.into_iter().map(entry).collect()
    });
    let manifest = Manifest::new(facts, files, tensors, parity);
    manifest.check().map_err(CkptError::invalid)?;
    Ok(manifest)
}

/// One tensor with all its pieces.
fn entry(role: Role, t: &WeightShape, dtype: Dtype, mut pieces: Vec<Extent>) -> TensorEntry {
    pieces.sort_by_key(|e| e.start);
    TensorEntry { name: t.name.clone(), role, dtype, shape: t.shape.clone(), pieces }
}

/// How a folder takes the place of another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Swap {
    /// In one go where the file system can.
    Atomic,
    /// As on a file system that can't.
    #[cfg_attr(not(test), allow(dead_code))]
    TwoSteps,
}

/// Gives a complete, synced folder its name, durably. What had the name before has `from`'s name afterwards.
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
    // between the two renames the old one is found under its `.replaced-` name
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

/// Makes `latest` name this step.
pub(crate) fn point_latest(root: &Path, step: u64) -> Result<()> {
    replace_file(root, LATEST_NEW, LATEST, latest_text(step).as_bytes())
}

/// Gives a small file in the directory this content, durably: it has the old or the new one, never a part. `new` is its
/// name until it is whole.
pub(crate) fn replace_file(root: &Path, new: &str, name: &str, content: &[u8]) -> Result<()> {
    let new = root.join(new);
    disk::unlink(&new)?;
    disk::write_file(new.clone(), content)?;
    rename(&new, &root.join(name))?;
    disk::sync_dir(root)
}

/// Removes what interrupted saves and removals have left, and undoes a half-done replacement.
pub(crate) fn clean(root: &Path) -> Result<()> {
    for name in Folder::open(root)?.names()? {
        let path = root.join(&name);
        if let Some(step) = name.strip_prefix(REPLACED).filter(|n| step_of(n).is_some()) {
            match disk::exists(&root.join(step)) {
                true => remove_folder(&path)?,
                false => {
                    rename(&path, &root.join(step))?;
                    disk::sync_dir(root)?;
                }
            }
        } else if name.starts_with(SAVING) || name.starts_with(DELETING) {
            remove_folder(&path)?;
        } else if name == LATEST_NEW {
            disk::unlink(&path)?;
        }
    }
    Ok(())
}

/// Removes a hidden folder (or a file or link of that name).
fn remove_folder(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(m) if m.is_dir() => disk::remove_tree(path),
        _ => disk::unlink(path),
    }
}

/// Removes the oldest checkpoints until `keep` are left (0: all are kept), never the one that `latest` names. Each is
/// renamed away before anything in it is removed. Returns what was removed.
pub fn prune(root: &Path, keep: u32) -> Result<Vec<PathBuf>> {
    if keep == 0 {
        return Ok(Vec::new());
    }
    let _lock = disk::lock_dir(root)?;
    // a damaged `latest` protects nothing: the newest ones are kept in any case
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
