//! [`ConvertOutput`]: the output directory of a conversion, which is hidden while it is incomplete
//! and reused after a kill.
//!
//! The hidden directory `.NAME.converting` contains the files, `.task.json` (the task: source and
//! options) and `.done` (a line per finished file). A later conversion reuses the directory only
//! for an equal task, and each file only after verifying it.
use super::options::{ConvertOptions, ConvertTarget};
use crate::catalog::TensorSource;
use crate::codec::disk::{self, DirLock, Directory};
use crate::error::{CkptError, Result};
use crate::hash::Hash;
use crate::save::{OutputMarker, ReplaceMethod, ShardReport, publish_directory, resolve_output_path};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Disk space that a conversion needs in addition to tensors, in bytes. Covers headers, pickles and
/// rounding up to file system blocks.
const OVERHEAD_BYTES: u64 = 16 << 20;
const CONVERT_MARKER: OutputMarker = OutputMarker {
    file: "converted.json",
    format: "launch converted checkpoint",
    operation: "`launch ckpt convert`",
};
const TASK_FILE: &str = ".task.json";
const DONE_FILE: &str = ".done";
/// Maximum size of `.done` in bytes.
const DONE_BYTES_MAX: u64 = 1 << 30;
/// Maximum depth of the subdirectories of a source that its fingerprint covers.
const DEPTH_MAX: u32 = 4;

/// The record of a file that a conversion has finished. `.done` has one record per line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FinishedFile {
    pub(super) path: String,
    pub(super) bytes: u64,
    /// For a torch file, the CRC-32 over the names, sizes and CRCs of its members.
    pub(super) members: Option<u32>,
    /// For a native shard, the report with the hashes of its blocks.
    pub(super) shard: Option<ShardReport>,
}

/// The directory to which a conversion writes.
pub(super) struct ConvertOutput {
    pub(super) dir: PathBuf,
    path: PathBuf,
    /// The records of files that an interrupted conversion had finished, by path.
    finished_before: HashMap<String, FinishedFile>,
    /// The file `.done`, open for appending. `None` for a directory of the caller, whose files are
    /// not reused after a kill.
    record: Option<File>,
    _lock: Option<DirLock>,
}

impl ConvertOutput {
    /// Creates and locks the hidden directory next to `out`, or reuses one that an interrupted
    /// conversion with an equal task left. `bytes` is the size of all tensors to write.
    ///
    /// # Errors
    /// Fails if `out` can't be replaced, another conversion is writing to `out`, or the file system
    /// has too little space for `bytes`.
    pub(super) fn create_or_reuse(
        source: &dyn TensorSource,
        out: &Path,
        options: &ConvertOptions,
        bytes: u64,
    ) -> Result<ConvertOutput> {
        let (parent, name) = resolve_output_path(source.path(), out, options.force, &CONVERT_MARKER)?;
        let dir = parent.join(format!(".{name}.converting"));
        let task = describe_task(source, options)?;
        if disk::exists(&dir) {
            let lock = disk::lock_dir(&dir)?;
            if read_task(&dir) != Some(task.clone()) {
                disk::remove_tree(&dir)?;
            }
            drop(lock);
        }
        if !disk::exists(&dir) {
            disk::make_dir(&dir)?;
        }
        let lock = disk::lock_dir(&dir)?;
        let finished_before = read_finished_files(&dir);
        let finished_bytes: u64 = finished_before.values().map(|f| f.bytes).sum();
        require_space(&parent, bytes.saturating_sub(finished_bytes))?;
        disk::unlink(&dir.join(TASK_FILE))?;
        disk::write_file(dir.join(TASK_FILE), task.to_string().as_bytes())?;
        let done = dir.join(DONE_FILE);
        let record =
            OpenOptions::new().append(true).create(true).open(&done).map_err(CkptError::io("open", &done))?;
        let (record, _lock) = (Some(record), Some(lock));
        let mut output = ConvertOutput { path: parent.join(name), dir, finished_before, record, _lock };
        // terminates a line that a kill truncated
        output.append_to_done_file("\n")?;
        Ok(output)
    }

    /// Creates an output in the existing directory `dir`, which the caller publishes or removes.
    /// Fails if the file system has too little space for `bytes`.
    pub(super) fn open_existing_directory(dir: &Path, bytes: u64) -> Result<ConvertOutput> {
        require_space(dir, bytes)?;
        let (dir, path) = (dir.to_owned(), dir.to_owned());
        Ok(ConvertOutput { dir, path, finished_before: HashMap::new(), record: None, _lock: None })
    }

    /// Returns the record of `path` if an interrupted conversion had finished that file.
    pub(super) fn find_finished(&self, path: &str) -> Option<&FinishedFile> {
        self.finished_before.get(path)
    }

    /// Appends `text` to `.done`. Does nothing if the output is a directory of the caller, which
    /// has no `.done`.
    fn append_to_done_file(&mut self, text: &str) -> Result<()> {
        match &mut self.record {
            Some(file) => {
                file.write_all(text.as_bytes()).map_err(CkptError::io("write", &self.dir.join(DONE_FILE)))
            }
            None => Ok(()),
        }
    }

    /// Appends a finished file to `.done`, so that a later conversion can reuse the file.
    pub(super) fn record_finished(&mut self, file: &FinishedFile) -> Result<()> {
        let line = serde_json::to_string(file).map_err(CkptError::invalid_save)?;
        self.append_to_done_file(&(line + "\n"))
    }

    /// Writes the list of files to `converted.json`, syncs all files, and renames the hidden
    /// directory to its final path. Removes the directory that previously had this path. Returns
    /// the final path.
    pub(super) fn publish(&mut self) -> Result<PathBuf> {
        disk::unlink(&self.dir.join(DONE_FILE))?;
        disk::unlink(&self.dir.join(TASK_FILE))?;
        disk::unlink(&self.dir.join(CONVERT_MARKER.file))?;
        let names = Directory::open(&self.dir)?.list_names()?;
        let made = json!({"format": CONVERT_MARKER.format, "program": format!("launch {}", env!("CARGO_PKG_VERSION")), "files": names});
        disk::write_file(self.dir.join(CONVERT_MARKER.file), format!("{made}\n").as_bytes())?;
        disk::sync_file_system(&self.dir)?;
        publish_directory(&self.dir, &self.path, ReplaceMethod::AtomicExchange)?;
        // the hidden name now belongs to the directory that was replaced
        disk::remove_tree(&self.dir)?;
        Ok(self.path.clone())
    }

    /// Removes the hidden directory. The caller does so if the conversion failed. Ignores errors of
    /// the removal.
    pub(super) fn discard(&mut self) {
        // a failure is harmless: the next conversion reuses or removes the directory
        let _ = disk::remove_tree(&self.dir);
    }
}

/// Fails with [`CkptError::InsufficientSpace`] if the file system of `dir` has too little free
/// space for files of `bytes` bytes in total and [`OVERHEAD_BYTES`].
fn require_space(dir: &Path, bytes: u64) -> Result<()> {
    disk::require_free_bytes(dir, bytes.saturating_add(bytes / 500).saturating_add(OVERHEAD_BYTES))
}

/// Reads the task of an interrupted conversion from its hidden directory `dir`. Returns `None` if
/// there is no valid task.
fn read_task(dir: &Path) -> Option<Value> {
    let text = Directory::open(dir).ok()?.read_file(TASK_FILE, 1 << 20).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Reads `.done` in `dir`, and returns the records of finished files by path. Ignores truncated
/// lines.
fn read_finished_files(dir: &Path) -> HashMap<String, FinishedFile> {
    let text = Directory::open(dir).and_then(|f| f.read_file(DONE_FILE, DONE_BYTES_MAX)).unwrap_or_default();
    let lines = text.split(|&b| b == b'\n').filter_map(|l| serde_json::from_slice::<FinishedFile>(l).ok());
    lines.map(|f| (f.path.clone(), f)).collect()
}

/// Makes the JSON task of a conversion, on which its output depends: the version of launch, the
/// source with a fingerprint of its files, and the options.
fn describe_task(source: &dyn TensorSource, options: &ConvertOptions) -> Result<Value> {
    let path = source.path().canonicalize().map_err(CkptError::io("look at", source.path()))?;
    let files = compute_fingerprint(&path)?;
    let to = match options.target {
        ConvertTarget::Native => "native",
        ConvertTarget::DeepSpeed => "deepspeed",
        ConvertTarget::Universal => "universal",
    };
    let groups = Hash::digest(format!("{:?}", options.groups).as_bytes()).to_hex();
    Ok(json!({
        "program": env!("CARGO_PKG_VERSION"), "source": path, "files": files, "to": to, "stage": options.stage,
        "world": options.world, "sub_group_size": options.sub_group_size, "dtype": options.dtype,
        "groups": groups,
    }))
}

/// Computes a digest of the paths, sizes and modification times of all files in a directory tree,
/// down to a depth of [`DEPTH_MAX`].
pub(crate) fn compute_fingerprint(path: &Path) -> Result<String> {
    let mut files = Vec::new();
    list_file_states(path, 0, &mut files)?;
    files.sort();
    Ok(Hash::digest(files.join("\n").as_bytes()).to_hex())
}

/// Appends a line with path, size and modification time to `files` for each file in the directory
/// tree `dir`. `depth` is the depth of `dir` below the root of the source.
fn list_file_states(dir: &Path, depth: u32, files: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(CkptError::io("list", dir))? {
        let path = entry.map_err(CkptError::io("list", dir))?.path();
        let Ok(m) = path.symlink_metadata() else { continue };
        match m.is_dir() {
            true if depth < DEPTH_MAX => list_file_states(&path, depth + 1, files)?,
            true => {}
            false => files.push(format!("{} {} {} {}", path.display(), m.len(), m.mtime(), m.mtime_nsec())),
        }
    }
    Ok(())
}
