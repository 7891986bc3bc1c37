//! The output directory of a gather, which has a hidden name until all files are complete.
use super::{GATHER_RECORD_FILE, GATHER_RECORD_FORMAT};
use crate::disk::{self, DirLock, Directory};
use crate::error::{CkptError, OutputProblem, Result};
use serde_json::Value;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Disk space that a gather needs in addition to the tensors, in bytes: headers and rounding up.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// Maximum size of a record of written files that is read, in bytes.
const RECORD_MAX: u64 = 16 << 20;

/// The hidden directory to which a gather writes, and the final path of that directory. Dropping
/// this value removes the hidden directory.
pub(super) struct GatherOutput {
    pub(super) dir: PathBuf,
    pub(super) path: PathBuf,
    _lock: DirLock,
}

impl GatherOutput {
    /// Creates and locks the hidden directory next to `out`, after removing the hidden directories
    /// of interrupted gathers. `source` is the path of the checkpoint, `bytes` the size of the
    /// tensors.
    ///
    /// # Errors
    /// Fails if `out` can't be replaced, another gather is writing to `out`, or the file system has
    /// too little free space.
    pub(super) fn create(source: &Path, out: &Path, force: bool, bytes: u64) -> Result<GatherOutput> {
        let (parent, name) = resolve_output_path(source, out, force, &GATHER_MARKER)?;
        let hidden = format!(".{name}.gathering-");
        remove_interrupted_gathers(&parent, &hidden)?;
        let free = disk::query_free_bytes(&parent)?;
        let needed = bytes.saturating_add(OVERHEAD_BYTES);
        if needed > free {
            return Err(CkptError::InsufficientSpace { path: parent, needed, free });
        }
        let dir = parent.join(format!("{hidden}{}", std::process::id()));
        disk::make_dir(&dir)?;
        let lock = disk::lock_dir(&dir)?;
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

/// Resolves an output path to its parent directory and its name. Creates the parent directory if
/// needed.
///
/// # Errors
/// Fails if `out` exists and can't be replaced (see [`check_replaceable`]), or is inside of the
/// checkpoint `source`.
pub(crate) fn resolve_output_path(
    source: &Path,
    out: &Path,
    force: bool,
    marker: &OutputMarker,
) -> Result<(PathBuf, String)> {
    let rejected = |problem| CkptError::output_rejected(out, problem);
    let (parent, name) = match disk::exists(out) {
        true => {
            let real = out.canonicalize().map_err(CkptError::io("look at", out))?;
            check_replaceable(&real, force, marker)?;
            (disk::parent_dir(&real), real.file_name().map(|n| n.to_owned()))
        }
        false => {
            disk::make_dirs(&disk::parent_dir(out))?;
            let parent = disk::parent_dir(out);
            let name = out.file_name().map(|n| n.to_owned());
            (parent.canonicalize().map_err(CkptError::io("look at", &parent))?, name)
        }
    };
    let name = name.ok_or_else(|| rejected(OutputProblem::NoName))?.to_string_lossy().into_owned();
    if parent.starts_with(source.canonicalize().map_err(CkptError::io("look at", source))?) {
        return Err(rejected(OutputProblem::InsideInput));
    }
    Ok((parent, name))
}

/// Removes the hidden directories of interrupted gathers, whose names begin with `hidden`, from
/// `parent`. Fails with [`CkptError::DirectoryBusy`] if a running gather has locked such a
/// directory.
fn remove_interrupted_gathers(parent: &Path, hidden: &str) -> Result<()> {
    for name in Directory::open(parent)?.list_names()? {
        let path = parent.join(&name);
        if name.starts_with(hidden) && path.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            match disk::lock_dir(&path) {
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

/// The file by which an operation recognizes a directory that it wrote.
pub(crate) struct OutputMarker {
    /// Name of a JSON file in the directory that lists all other files.
    pub(crate) file: &'static str,
    /// Value of the key `format` in the JSON file.
    pub(crate) format: &'static str,
    /// The command that wrote the directory, as messages show it.
    pub(crate) operation: &'static str,
}

const GATHER_MARKER: OutputMarker = OutputMarker {
    file: GATHER_RECORD_FILE,
    format: GATHER_RECORD_FORMAT,
    operation: "`launch ckpt gather`",
};

/// Fails with [`CkptError::OutputRejected`] if the directory `out` may not be replaced. An empty
/// directory may be replaced. Other directories may be replaced if `force` is true and the
/// operation of the marker wrote every file.
pub(crate) fn check_replaceable(out: &Path, force: bool, marker: &OutputMarker) -> Result<()> {
    let rejected = |problem| Err(CkptError::output_rejected(out, problem));
    if !out.is_dir() {
        return rejected(OutputProblem::NotADirectory);
    }
    let directory = Directory::open(out)?;
    let names = directory.list_names()?;
    if names.is_empty() {
        return Ok(());
    }
    let record: Option<Value> =
        directory.read_file(marker.file, RECORD_MAX).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let operation = marker.operation;
    let Some(record) = record.filter(|r| r["format"] == marker.format) else {
        return rejected(OutputProblem::NotOurs { operation });
    };
    let written: HashSet<&str> =
        record["files"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if let Some(file) = names.iter().find(|n| *n != marker.file && !written.contains(n.as_str())) {
        return rejected(OutputProblem::OtherFile { file: file.clone(), operation });
    }
    match force {
        true => Ok(()),
        false => rejected(OutputProblem::NeedsForce { operation }),
    }
}
