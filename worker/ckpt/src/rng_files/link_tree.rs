//! Duplicates a directory tree with hard links to its files, or with copies where hard links are
//! not possible.
use crate::codec::disk::{self, Directory, path_exists};
use crate::error::{CkptError, DamageReason, Result};
use std::path::Path;
use std::{fs, io};

/// Limit on the nesting of directories in a tree that is duplicated, in levels.
const DEPTH_MAX: u32 = 16;
/// Limit on the number of files and directories in a tree that is duplicated.
const ENTRIES_MAX: usize = 1 << 20;

/// Creates the directory `to` with hard links to all files in `from` and its subdirectories, or
/// with copies where links are impossible. Leaves out the top-level entries whose names satisfy
/// `skip`. The content of `to` is durable on return, but not the entry of `to` in its parent.
///
/// # Errors
/// Fails if `from` holds a symbolic link or a device, is nested too deep, has too many entries, or
/// I/O fails.
pub(crate) fn link_or_copy_tree(from: &Path, to: &Path, skip: &dyn Fn(&str) -> bool) -> Result<()> {
    let mut left = ENTRIES_MAX;
    link_or_copy_subtree(from, to, skip, DEPTH_MAX, &mut left)
}

/// Duplicates the directory `from` as the new directory `to`, with hard links or copies of its
/// files, including at most `depth` levels of directories. Leaves out the entries of `from` itself
/// whose names satisfy `skip`. Subtracts the number of duplicated entries from `left`.
///
/// # Errors
///
/// Fails if the directories are nested more than `depth` levels deep, there are more than `left`
/// entries, an entry is neither a directory nor a regular file, or I/O fails.
fn link_or_copy_subtree(
    from: &Path,
    to: &Path,
    skip: &dyn Fn(&str) -> bool,
    depth: u32,
    left: &mut usize,
) -> Result<()> {
    let unusable = |why: &str| CkptError::unsupported(from, why);
    if depth == 0 {
        return Err(unusable("the directories in the checkpoint are nested too deep"));
    }
    disk::make_dir(to)?;
    for entry in fs::read_dir(from).map_err(CkptError::io("list", from))? {
        let entry = entry.map_err(CkptError::io("list", from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if skip(&entry.file_name().to_string_lossy()) {
            continue;
        }
        *left = left.checked_sub(1).ok_or_else(|| unusable("the checkpoint has too many files"))?;
        let kind = entry.file_type().map_err(CkptError::io("look at", &source))?;
        match () {
            () if kind.is_dir() => link_or_copy_subtree(&source, &target, &|_| false, depth - 1, left)?,
            () if kind.is_file() => link_or_copy_file(&source, &target)?,
            () => {
                let name = entry.file_name().to_string_lossy().into_owned();
                return Err(CkptError::damaged(from, name, DamageReason::NotRegularFile));
            }
        }
    }
    disk::sync_dir(to)
}

/// Makes `target` a hard link to the file `source`, or a durable copy if a link is not possible.
fn link_or_copy_file(source: &Path, target: &Path) -> Result<()> {
    match fs::hard_link(source, target) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(CkptError::io("link", target)(e)),
        // `target` is on another file system or one without hard links, or another user owns the
        // file
        Err(_) => {}
    }
    fs::copy(source, target).map_err(CkptError::io("copy", source))?;
    let copied = fs::File::open(target).map_err(CkptError::io("open", target))?;
    copied.sync_all().map_err(CkptError::io("fsync", target))
}

/// A hidden directory to which the files of a new directory are written until it is complete and
/// gets its final name. Dropping the value removes the directory if `dir` still exists.
pub(crate) struct ScratchDir {
    /// Path of the scratch directory, which may not exist yet.
    pub(crate) dir: std::path::PathBuf,
}

impl ScratchDir {
    /// Returns a hidden path in `parent` for building the directory `name`, and does not create the
    /// directory yet. Removes every existing scratch directory for `name`. The caller must hold the
    /// lock of `parent`, so that only killed processes can have left such directories behind.
    pub(crate) fn new(parent: &Path, name: &str) -> Result<ScratchDir> {
        let prefix = format!(".saving-{name}-");
        for left in Directory::open(parent)?.list_names()?.iter().filter(|n| n.starts_with(&prefix)) {
            disk::remove_tree(&parent.join(left))?;
        }
        Ok(ScratchDir { dir: parent.join(format!("{prefix}{}", std::process::id())) })
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if path_exists(&self.dir) {
            // a failure is harmless: the next attempt removes the directory
            let _ = disk::remove_tree(&self.dir);
        }
    }
}
