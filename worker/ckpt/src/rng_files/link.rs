//! A folder again under another name: hard links where the file system has them, copies elsewhere.
use crate::disk::{self, Folder, exists};
use crate::error::{CkptError, Result};
use std::fs;
use std::io;
use std::path::Path;

/// Deepest nesting of folders.
const DEPTH_MAX: u32 = 16;
/// Most files and folders.
const ENTRIES_MAX: usize = 1 << 20;

/// Makes folder `to` with everything of `from` but the top-level entries that `skip` names. Durable when it returns,
/// except for `to`'s own name.
pub(crate) fn folder(from: &Path, to: &Path, skip: &dyn Fn(&str) -> bool) -> Result<()> {
    let mut left = ENTRIES_MAX;
    level(from, to, skip, DEPTH_MAX, &mut left)
}

fn level(from: &Path, to: &Path, skip: &dyn Fn(&str) -> bool, depth: u32, left: &mut usize) -> Result<()> {
    let unusable = |why: &str| CkptError::Unsupported { path: from.to_owned(), what: why.to_owned() };
    if depth == 0 {
        return Err(unusable("its folders are nested too deep"));
    }
    disk::make_dir(to)?;
    for entry in fs::read_dir(from).map_err(CkptError::io("list", from))? {
        let entry = entry.map_err(CkptError::io("list", from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if skip(&entry.file_name().to_string_lossy()) {
            continue;
        }
        *left = left.checked_sub(1).ok_or_else(|| unusable("it has too many files"))?;
        let kind = entry.file_type().map_err(CkptError::io("look at", &source))?;
        match () {
            () if kind.is_dir() => level(&source, &target, &|_| false, depth - 1, left)?,
            () if kind.is_file() => file(&source, &target)?,
            () => {
                let name = entry.file_name().to_string_lossy().into_owned();
                let why = "it is a link or a device, which is not followed; replace it by the file itself";
                return Err(CkptError::damaged(from, name, why));
            }
        }
    }
    disk::sync_dir(to)
}

fn file(source: &Path, target: &Path) -> Result<()> {
    match fs::hard_link(source, target) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(CkptError::io("link", target)(e)),
        // another file system, or one without hard links, or a file of somebody else's
        Err(_) => {}
    }
    fs::copy(source, target).map_err(CkptError::io("copy", source))?;
    let copied = fs::File::open(target).map_err(CkptError::io("open", target))?;
    copied.sync_all().map_err(CkptError::io("fsync", target))
}

/// A hidden folder in which something is made; removed when dropped, unless it was given its name.
pub(crate) struct Scratch {
    pub(crate) dir: std::path::PathBuf,
}

impl Scratch {
    /// In `parent`, which this process has locked; named after `name`. What a killed process left of one is removed.
    pub(crate) fn new(parent: &Path, name: &str) -> Result<Scratch> {
        let prefix = format!(".saving-{name}-");
        for left in Folder::open(parent)?.names()?.iter().filter(|n| n.starts_with(&prefix)) {
            disk::remove_tree(&parent.join(left))?;
        }
        Ok(Scratch { dir: parent.join(format!("{prefix}{}", std::process::id())) })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if exists(&self.dir) {
            // what can't be removed now is removed by the next attempt
            let _ = disk::remove_tree(&self.dir);
        }
    }
}
