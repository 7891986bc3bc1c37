//! The output directory of a conversion: hidden while it is incomplete, and reused after a kill.
//!
//! `.NAME.converting` holds the files, `.task.json` (the source and options that they belong to)
//! and `.done` (a line per finished file). A later conversion reuses the directory only for an
//! equal task, and each file only after verifying it.
use super::{ConvertOptions, ConvertTarget};
use crate::commit::{Swap, publish};
use crate::disk::{self, DirLock, Directory};
use crate::error::{CkptError, Result};
use crate::gather::output::{OutputMarker, resolve_output};
use crate::hash::Hash;
use crate::save::ShardReport;
use crate::source::TensorSource;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes needed in addition to tensors: headers, pickles, rounding up.
const OVERHEAD_BYTES: u64 = 16 << 20;
const CONVERT_MARKER: OutputMarker = OutputMarker {
    file: "converted.json",
    format: "launch converted checkpoint",
    operation: "`launch ckpt convert`",
};
const TASK: &str = ".task.json";
const DONE: &str = ".done";
/// Maximum bytes of `.done` that are read.
const DONE_MAX: u64 = 1 << 30;
/// Depth of directories of a source that its fingerprint covers.
const DEPTH_MAX: u32 = 4;

/// The record of a finished file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FinishedFile {
    pub(super) path: String,
    pub(super) bytes: u64,
    /// For a torch file: CRC-32 over the names, sizes and CRCs of its members.
    pub(super) members: Option<u32>,
    /// For a native shard: the report with the hashes of its blocks.
    pub(super) shard: Option<ShardReport>,
}

/// The directory that a conversion writes to.
pub(super) struct Output {
    pub(super) dir: PathBuf,
    path: PathBuf,
    /// Files that an interrupted conversion had finished, by path.
    earlier: HashMap<String, FinishedFile>,
    /// `.done`, open for appending; `None` in a caller's directory, which isn't reused after a
    /// kill.
    record: Option<File>,
    _lock: Option<DirLock>,
}

impl Output {
    /// Creates or reuses the hidden directory next to `out`.
    ///
    /// # Errors
    /// When `out` can't be replaced, another conversion is writing to it, or there is too little
    /// space for `bytes`.
    pub(super) fn begin(
        source: &dyn TensorSource,
        out: &Path,
        options: &ConvertOptions,
        bytes: u64,
    ) -> Result<Output> {
        let (parent, name) = resolve_output(source.path(), out, options.force, &CONVERT_MARKER)?;
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
        let earlier = earlier(&dir);
        let finished_bytes: u64 = earlier.values().map(|f| f.bytes).sum();
        require_space(&parent, bytes.saturating_sub(finished_bytes))?;
        disk::unlink(&dir.join(TASK))?;
        disk::write_file(dir.join(TASK), task.to_string().as_bytes())?;
        let done = dir.join(DONE);
        let record =
            OpenOptions::new().append(true).create(true).open(&done).map_err(CkptError::io("open", &done))?;
        let (record, _lock) = (Some(record), Some(lock));
        let mut output = Output { path: parent.join(name), dir, earlier, record, _lock };
        // terminates a line that a kill truncated
        output.append_line("\n")?;
        Ok(output)
    }

    /// Writes into an existing directory, which the caller publishes or removes.
    pub(super) fn in_directory(dir: &Path, bytes: u64) -> Result<Output> {
        require_space(dir, bytes)?;
        let (dir, path) = (dir.to_owned(), dir.to_owned());
        Ok(Output { dir, path, earlier: HashMap::new(), record: None, _lock: None })
    }

    /// Returns the record of `path` if an interrupted conversion had finished that file.
    pub(super) fn earlier(&self, path: &str) -> Option<&FinishedFile> {
        self.earlier.get(path)
    }

    fn append_line(&mut self, text: &str) -> Result<()> {
        match &mut self.record {
            Some(file) => {
                file.write_all(text.as_bytes()).map_err(CkptError::io("write", &self.dir.join(DONE)))
            }
            None => Ok(()),
        }
    }

    /// Appends a finished file to `.done`, so that a later conversion can reuse the file.
    pub(super) fn record(&mut self, file: &FinishedFile) -> Result<()> {
        let line = serde_json::to_string(file).map_err(CkptError::invalid_save)?;
        self.append_line(&(line + "\n"))
    }

    /// Makes all files durable, then renames the directory to its final name.
    pub(super) fn publish(&mut self) -> Result<PathBuf> {
        disk::unlink(&self.dir.join(DONE))?;
        disk::unlink(&self.dir.join(TASK))?;
        disk::unlink(&self.dir.join(CONVERT_MARKER.file))?;
        let names = Directory::open(&self.dir)?.names()?;
        let made = json!({"format": CONVERT_MARKER.format, "program": format!("launch {}", env!("CARGO_PKG_VERSION")), "files": names});
        disk::write_file(self.dir.join(CONVERT_MARKER.file), format!("{made}\n").as_bytes())?;
        disk::sync_all_of(&self.dir)?;
        publish(&self.dir, &self.path, Swap::Atomic)?;
        // the hidden name now belongs to the directory that was replaced
        disk::remove_tree(&self.dir)?;
        Ok(self.path.clone())
    }

    /// Removes the directory after an error.
    pub(super) fn discard(&mut self) {
        // a failure is harmless: the next conversion reuses or removes the directory
        let _ = disk::remove_tree(&self.dir);
    }
}

/// Fails when the file system has too little free space.
fn require_space(dir: &Path, bytes: u64) -> Result<()> {
    let free = disk::free_bytes(dir)?;
    let needed = bytes.saturating_add(bytes / 500).saturating_add(OVERHEAD_BYTES);
    match needed > free {
        true => Err(CkptError::InsufficientSpace { path: dir.to_owned(), needed, free }),
        false => Ok(()),
    }
}

fn read_task(dir: &Path) -> Option<Value> {
    let text = Directory::open(dir).ok()?.read(TASK, 1 << 20).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Reads the records of the files that an interrupted conversion had finished, by path. Ignores
/// truncated lines.
fn earlier(dir: &Path) -> HashMap<String, FinishedFile> {
    let text = Directory::open(dir).and_then(|f| f.read(DONE, DONE_MAX)).unwrap_or_default();
    let lines = text.split(|&b| b == b'\n').filter_map(|l| serde_json::from_slice::<FinishedFile>(l).ok());
    lines.map(|f| (f.path.clone(), f)).collect()
}

/// Describes what the output depends on: the source with the state of its files, and the options.
fn describe_task(source: &dyn TensorSource, options: &ConvertOptions) -> Result<Value> {
    let path = source.path().canonicalize().map_err(CkptError::io("look at", source.path()))?;
    let files = fingerprint(&path)?;
    let to = match options.target {
        ConvertTarget::Native => "native",
        ConvertTarget::DeepSpeed => "deepspeed",
        ConvertTarget::Universal => "universal",
    };
    let groups = Hash::digest(format!("{:?}", options.groups).as_bytes()).hex();
    Ok(json!({
        "program": env!("CARGO_PKG_VERSION"), "source": path, "files": files, "to": to, "stage": options.stage,
        "world": options.world, "sub_group_size": options.sub_group_size, "dtype": options.dtype,
        "groups": groups,
    }))
}

/// A digest of the names, sizes and modification times of all files in a directory tree.
pub(crate) fn fingerprint(path: &Path) -> Result<String> {
    let mut files = Vec::new();
    list_files(path, 0, &mut files)?;
    files.sort();
    Ok(Hash::digest(files.join("\n").as_bytes()).hex())
}

fn list_files(dir: &Path, depth: u32, files: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(CkptError::io("list", dir))? {
        let path = entry.map_err(CkptError::io("list", dir))?.path();
        let Ok(m) = path.symlink_metadata() else { continue };
        match m.is_dir() {
            true if depth < DEPTH_MAX => list_files(&path, depth + 1, files)?,
            true => {}
            false => files.push(format!("{} {} {} {}", path.display(), m.len(), m.mtime(), m.mtime_nsec())),
        }
    }
    Ok(())
}
