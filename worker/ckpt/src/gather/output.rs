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
        let refused = |why: &str| CkptError::Refused { path: out.to_owned(), why: why.into() };
        let (parent, name) = match disk::exists(out) {
            true => {
                let real = out.canonicalize().map_err(CkptError::io("look at", out))?;
                check_replaceable(&real, force)?;
                (disk::parent_of(&real), real.file_name().map(|n| n.to_owned()))
            }
            false => {
                disk::make_dirs(&disk::parent_of(out))?;
                let parent = disk::parent_of(out);
                (
                    parent.canonicalize().map_err(CkptError::io("look at", &parent))?,
                    out.file_name().map(|n| n.to_owned()),
                )
            }
        };
        let name = name.ok_or_else(|| refused("it has no name of its own"))?.to_string_lossy().into_owned();
        if parent.starts_with(source.canonicalize().map_err(CkptError::io("look at", source))?) {
            return Err(refused("it lies inside the checkpoint"));
        }
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

/// An existing folder is replaced when it is empty or, with `force`, when all its files are from gathering.
fn check_replaceable(out: &Path, force: bool) -> Result<()> {
    let refused = |why: String| Err(CkptError::Refused { path: out.to_owned(), why });
    if !out.is_dir() {
        return refused("it exists and is not a folder".into());
    }
    let folder = Folder::open(out)?;
    let names = folder.names()?;
    if names.is_empty() {
        return Ok(());
    }
    let gathered: Option<Value> =
        folder.read(GATHERED, 16 << 20).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let Some(gathered) = gathered.filter(|g| g["format"] == GATHERED_FORMAT) else {
        return refused(
            "it exists, is not empty and was not made by gathering; choose another folder".into(),
        );
    };
    let ours: HashSet<&str> =
        gathered["files"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if let Some(other) = names.iter().find(|n| *n != GATHERED && !ours.contains(n.as_str())) {
        return refused(format!("it holds {other}, which is not from gathering; choose another folder"));
    }
    match force {
        true => Ok(()),
        false => refused("it holds gathered weights; add --force to replace them".into()),
    }
}
