//! The folder that is gathered into: made beside the one it will be, which is complete or absent.
use super::{GATHERED, GATHERED_FORMAT};
use crate::disk::{self, DirLock, Folder};
use crate::error::{CkptError, Result};
use serde_json::Value;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Space beside the tensors: headers and rounding up.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// The folder being made, beside the one it will be.
pub(super) struct Output {
    pub(super) dir: PathBuf,
    pub(super) path: PathBuf,
    _lock: DirLock,
}

impl Output {
    pub(super) fn begin(source: &Path, out: &Path, force: bool, bytes: u64) -> Result<Output> {
        let (parent, name) = place(source, out, force, &BY_GATHERING)?;
        let hidden = format!(".{name}.gathering-");
        clean(&parent, &hidden)?;
        let free = disk::free_bytes(&parent)?;
        let needed = bytes.saturating_add(OVERHEAD_BYTES);
        if needed > free {
            return Err(CkptError::NoSpace { path: parent, needed, free });
        }
        let dir = parent.join(format!("{hidden}{}", std::process::id()));
        disk::make_dir(&dir)?;
        let lock = disk::lock_dir(&dir)?;
        Ok(Output { path: parent.join(name), dir, _lock: lock })
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // after success this holds what was replaced; what can't be removed now is removed by the next gather
        let _ = disk::remove_tree(&self.dir);
    }
}

/// Where a new folder will be: its parent and its name there. One that exists may be replaced; none may lie inside the
/// checkpoint that it is made from.
pub(crate) fn place(source: &Path, out: &Path, force: bool, made: &Made) -> Result<(PathBuf, String)> {
    let refused = |why: &str| CkptError::Refused { path: out.to_owned(), why: why.into() };
    let (parent, name) = match disk::exists(out) {
        true => {
            let real = out.canonicalize().map_err(CkptError::io("look at", out))?;
            check_replaceable(&real, force, made)?;
            (disk::parent_of(&real), real.file_name().map(|n| n.to_owned()))
        }
        false => {
            disk::make_dirs(&disk::parent_of(out))?;
            let parent = disk::parent_of(out);
            let name = out.file_name().map(|n| n.to_owned());
            (parent.canonicalize().map_err(CkptError::io("look at", &parent))?, name)
        }
    };
    let name = name.ok_or_else(|| refused("it has no name of its own"))?.to_string_lossy().into_owned();
    if parent.starts_with(source.canonicalize().map_err(CkptError::io("look at", source))?) {
        return Err(refused("it lies inside the checkpoint"));
    }
    Ok((parent, name))
}

/// Removes what interrupted gathers have left; one that is still running holds a lock.
fn clean(parent: &Path, hidden: &str) -> Result<()> {
    for name in Folder::open(parent)?.names()? {
        let path = parent.join(&name);
        if name.starts_with(hidden) && path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            match disk::lock_dir(&path) {
                Ok(_lock) => disk::remove_tree(&path)?,
                Err(CkptError::Busy { .. }) => {
                    return Err(CkptError::Busy { path: parent.to_owned() });
                }
                Err(e) => return Err(e),
            }
        }
    }
    Ok(())
}

/// How a folder that a program made says so.
pub(crate) struct Made {
    /// A JSON file in it that lists the others.
    pub(crate) file: &'static str,
    /// Its `format`.
    pub(crate) format: &'static str,
    /// What made it: `gathering`.
    pub(crate) by: &'static str,
}

const BY_GATHERING: Made = Made { file: GATHERED, format: GATHERED_FORMAT, by: "gathering" };

/// An existing folder is replaced when it is empty or, with `force`, when everything in it was made so.
pub(crate) fn check_replaceable(out: &Path, force: bool, made: &Made) -> Result<()> {
    let refused = |why: String| Err(CkptError::Refused { path: out.to_owned(), why });
    if !out.is_dir() {
        return refused("it exists and is not a folder".into());
    }
    let folder = Folder::open(out)?;
    let names = folder.names()?;
    if names.is_empty() {
        return Ok(());
    }
    let said: Option<Value> =
        folder.read(made.file, 16 << 20).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let by = made.by;
    let Some(said) = said.filter(|g| g["format"] == made.format) else {
        return refused(format!("it exists, is not empty and was not made by {by}; choose another folder"));
    };
    let ours: HashSet<&str> =
        said["files"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if let Some(other) = names.iter().find(|n| *n != made.file && !ours.contains(n.as_str())) {
        return refused(format!("it holds {other}, which is not from {by}; choose another folder"));
    }
    match force {
        true => Ok(()),
        false => refused(format!("it was made by {by}; add --force to replace it")),
    }
}
