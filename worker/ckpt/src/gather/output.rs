//! [`GatherOutput`]: the directory to which gathered weights are written, which has a hidden name
//! until all files are complete.
use crate::codec::disk::{self, DirLock, Directory};
use crate::error::{CkptError, Result};
use crate::save::output_record::GATHER_RECORD_KIND;
use crate::save::resolve_output_path;
use std::path::{Path, PathBuf};

/// Disk space in bytes that gathering the weights of a checkpoint needs in addition to the tensors,
/// for headers and rounding up to whole blocks.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// The hidden directory to which the full weights are exported, and the path that the directory
/// gets when all files are complete. Dropping this value removes the hidden directory.
pub(super) struct GatherOutput {
    pub(super) dir: PathBuf,
    pub(super) path: PathBuf,
    _lock: DirLock,
}

impl GatherOutput {
    /// Creates and locks a hidden directory next to `out`, to which the full weights of a
    /// checkpoint will be written. `source` is the path of the checkpoint, `bytes` the size of the
    /// tensors.
    ///
    /// # Errors
    /// Fails if `out` can't be replaced, another gather is writing to `out`, or the file system has
    /// too little free space.
    pub(super) fn create(source: &Path, out: &Path, force: bool, bytes: u64) -> Result<GatherOutput> {
        let (parent, name) = resolve_output_path(source, out, force, &GATHER_RECORD_KIND)?;
        let hidden = format!(".{name}.gathering-");
        remove_interrupted_gathers(&parent, &hidden)?;
        disk::require_free_bytes(&parent, bytes.saturating_add(OVERHEAD_BYTES))?;
        let dir = parent.join(format!("{hidden}{}", std::process::id()));
        disk::make_dir(&dir)?;
        let lock = disk::try_lock_dir(&dir)?;
        Ok(GatherOutput { path: parent.join(name), dir, _lock: lock })
    }
}

impl Drop for GatherOutput {
    fn drop(&mut self) {
        // after success, the hidden name belongs to the replaced directory. A failure is harmless,
        // since the next gather removes the directory.
        let _ = disk::remove_tree(&self.dir);
    }
}

/// Removes the hidden directories, in the directory `parent`, of exports of weights that were
/// interrupted before they were complete. Their names begin with `hidden`. Fails with
/// [`CkptError::DirectoryBusy`] if a running gather has locked such a directory.
fn remove_interrupted_gathers(parent: &Path, hidden: &str) -> Result<()> {
    for name in Directory::open(parent)?.list_names()? {
        let path = parent.join(&name);
        if name.starts_with(hidden) && path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            match disk::try_lock_dir(&path) {
                Ok(_lock) => disk::remove_tree(&path)?,
                Err(CkptError::DirectoryBusy { .. }) => {
                    return Err(CkptError::DirectoryBusy { path: parent.to_owned() });
                }
                Err(e) => return Err(e),
            }
        }
    }
    Ok(())
}
