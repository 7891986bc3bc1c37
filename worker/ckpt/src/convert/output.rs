//! [`ConvertOutput`]: the directory to which a conversion writes. It has a hidden name until all
//! files are complete, and a later conversion reuses it after a kill.
//!
//! The hidden directory `.NAME.converting` contains the files, `.task.json` (the task: source and
//! options) and `.done` (a line per finished file). A later conversion reuses the directory only
//! for an equal task, and each file only after verifying it.
use super::options::{ConvertOptions, ConvertTarget};
use crate::catalog::TensorSource;
use crate::codec::disk::{self, DirLock, Directory};
use crate::codec::json::{LimitedValue, read_json};
use crate::error::{CkptError, Result};
use crate::hash::Hash;
use crate::layout::deepspeed::{LATEST_FILE, LATEST_UNIVERSAL_FILE};
use crate::save::output_record::{CONVERT_RECORD_KIND, RecordedContent, RecordedFile};
use crate::save::{ReplaceMethod, ShardReport, publish_directory, resolve_output_path};
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Disk space in bytes that a conversion needs in addition to tensors, for headers, pickles and
/// rounding up to whole blocks.
const OVERHEAD_BYTES: u64 = 16 << 20;
/// Name of the file in the hidden output directory that describes an unfinished conversion.
const CONVERSION_TASK_FILE: &str = ".task.json";
/// Limit on the number of JSON values in `.task.json`, the file that describes an unfinished
/// conversion.
const TASK_FILE_VALUES_MAX: usize = 100;
/// Name of the file in the hidden output directory that lists the files that an unfinished
/// conversion has completed.
const FINISHED_LIST_FILE: &str = ".done";
/// Limit on the size in bytes of `.done`, the list of files that an unfinished conversion has
/// completed.
const FINISHED_LIST_FILE_BYTES_MAX: u64 = 1 << 30;
/// How many levels of subdirectories of the source checkpoint are checked for changes.
const SOURCE_DEPTH_MAX: u32 = 4;

/// The path, size and hash of a file that a conversion has completed, as one line of the list
/// `.done` stores them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FinishedFile {
    pub(super) path: String,
    pub(super) bytes: u64,
    /// The BLAKE3 hash of the file. `None` for a native shard.
    pub(super) blake3: Option<Hash>,
    /// For a native shard, the report with the hashes of its blocks.
    pub(super) shard: Option<ShardReport>,
}

/// The directory to which a conversion writes, with the list of the files that were completed.
pub(super) struct ConvertOutput {
    pub(super) dir: PathBuf,
    path: PathBuf,
    /// Maps the path of each file that an interrupted conversion had finished to the record of the
    /// file.
    finished_before: HashMap<String, FinishedFile>,
    /// The file `.done`, open for appending. `None` for a directory of the caller, whose files are
    /// not reused after a kill.
    record: Option<File>,
    _lock: Option<DirLock>,
}

impl ConvertOutput {
    /// Creates and locks the hidden output directory of a conversion next to `out`, or reuses that
    /// of an interrupted conversion with equal source and options. `bytes` is the size of all
    /// tensors to write.
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
        let (parent, name) = resolve_output_path(source.path(), out, options.force, &CONVERT_RECORD_KIND)?;
        let dir = parent.join(format!(".{name}.converting"));
        let task = describe_conversion_task(source, options)?;
        disk::remove_unless_directory(&dir)?;
        if disk::path_exists(&dir) {
            let lock = disk::try_lock_dir(&dir)?;
            if read_conversion_task(&dir) != Some(task.clone()) {
                disk::remove_tree(&dir)?;
            }
            drop(lock);
        }
        if !disk::path_exists(&dir) {
            disk::make_dir(&dir)?;
        }
        let lock = disk::try_lock_dir(&dir)?;
        let finished_before = read_finished_files(&dir);
        let finished_bytes: u64 = finished_before.values().map(|f| f.bytes).sum();
        require_space(&parent, bytes.saturating_sub(finished_bytes))?;
        disk::unlink(&dir.join(CONVERSION_TASK_FILE))?;
        disk::write_file(dir.join(CONVERSION_TASK_FILE), task.to_string().as_bytes())?;
        let record = open_finished_list(&dir.join(FINISHED_LIST_FILE))?;
        let (record, _lock) = (Some(record), Some(lock));
        let mut output = ConvertOutput { path: parent.join(name), dir, finished_before, record, _lock };
        // terminates a line that a kill truncated
        output.append_to_finished_list("\n")?;
        Ok(output)
    }

    /// Returns a [`ConvertOutput`] that writes directly to the existing directory `dir`, for
    /// callers that rename or remove this directory themselves. Fails if the file system has too
    /// little space for `bytes`.
    pub(super) fn open_existing_directory(dir: &Path, bytes: u64) -> Result<ConvertOutput> {
        require_space(dir, bytes)?;
        let (dir, path) = (dir.to_owned(), dir.to_owned());
        Ok(ConvertOutput { dir, path, finished_before: HashMap::new(), record: None, _lock: None })
    }

    /// Returns the recorded size and hash of the output file `path`, if an interrupted conversion
    /// had completed this file.
    pub(super) fn find_finished_file(&self, path: &str) -> Option<&FinishedFile> {
        self.finished_before.get(path)
    }

    /// Appends `text` to `.done`, the list of the files that the conversion has completed. Does
    /// nothing if the output is a directory of the caller, which has no `.done`.
    fn append_to_finished_list(&mut self, text: &str) -> Result<()> {
        match &mut self.record {
            Some(file) => file
                .write_all(text.as_bytes())
                .map_err(CkptError::io("write", &self.dir.join(FINISHED_LIST_FILE))),
            None => Ok(()),
        }
    }

    /// Appends the path, size and hash of a completed file to `.done`, so that a later conversion
    /// can reuse the file.
    pub(super) fn record_finished_file(&mut self, file: &FinishedFile) -> Result<()> {
        let line = serde_json::to_string(file).map_err(CkptError::invalid_save)?;
        self.append_to_finished_list(&(line + "\n"))
    }

    /// Completes the output: writes the list of files to `converted.json`, syncs all files, and
    /// renames the hidden directory to its final path. Removes the directory that previously had
    /// this path. Returns the final path. `files` are the records of the planned files.
    pub(super) fn publish(&mut self, files: &[FinishedFile]) -> Result<PathBuf> {
        disk::unlink(&self.dir.join(FINISHED_LIST_FILE))?;
        disk::unlink(&self.dir.join(CONVERSION_TASK_FILE))?;
        disk::unlink(&self.dir.join(CONVERT_RECORD_KIND.file))?;
        let record = CONVERT_RECORD_KIND.make_record(list_files_for_record(&self.dir, files)?);
        CONVERT_RECORD_KIND.write_record(&self.dir, record)?;
        disk::sync_file_system(&self.dir)?;
        publish_directory(&self.dir, &self.path, ReplaceMethod::AtomicExchange)?;
        // the hidden name now belongs to the directory that was replaced
        disk::remove_tree(&self.dir)?;
        Ok(self.path.clone())
    }

    /// Removes the hidden directory of a failed conversion, ignoring errors.
    pub(super) fn discard(&mut self) {
        // a failure is harmless: the next conversion reuses or removes the directory
        let _ = disk::remove_tree(&self.dir);
    }
}

/// Lists all files of the output directory `dir` with their hashes, for `converted.json`. The files
/// `latest` and `latest_universal` get no hash, because a later save replaces them. The shards of
/// native checkpoints get no hash, because the manifest has their hashes.
fn list_files_for_record(dir: &Path, finished: &[FinishedFile]) -> Result<Vec<RecordedFile>> {
    let hashes: HashMap<&str, RecordedContent> = finished
        .iter()
        .filter_map(|f| Some((f.path.as_str(), RecordedContent { bytes: f.bytes, blake3: f.blake3? })))
        .collect();
    let mut files = Vec::new();
    for (path, ..) in disk::list_file_states(dir, SOURCE_DEPTH_MAX)? {
        let Some(name) = path.strip_prefix(dir).ok().and_then(Path::to_str) else { continue };
        let is_pointer = [LATEST_FILE, LATEST_UNIVERSAL_FILE].contains(&name);
        let content = hashes.get(name).copied().filter(|_| !is_pointer);
        files.push(RecordedFile { name: name.to_owned(), content });
    }
    Ok(files)
}

/// Opens the list of the files that a conversion has completed, `.done`, for appending. Does not
/// follow a symbolic link, and does not wait for the reader of a FIFO.
fn open_finished_list(path: &Path) -> Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let opened = OpenOptions::new().append(true).create(true).custom_flags(flags.bits()).open(path);
    opened.map_err(CkptError::io("open", path))
}

/// Fails with [`CkptError::InsufficientSpace`] if the file system of `dir` has less free space than
/// a conversion to `bytes` bytes of tensors needs.
fn require_space(dir: &Path, bytes: u64) -> Result<()> {
    disk::require_free_bytes(dir, bytes.saturating_add(bytes / 500).saturating_add(OVERHEAD_BYTES))
}

/// Reads from `.task.json` in the hidden directory `dir` which source checkpoint and which options
/// an interrupted conversion had. Returns `None` if `dir` has no valid description.
fn read_conversion_task(dir: &Path) -> Option<Value> {
    let task = read_json::<LimitedValue<TASK_FILE_VALUES_MAX>>(
        &Directory::open(dir).ok()?,
        CONVERSION_TASK_FILE,
        1 << 20,
    );
    task.ok().map(|task| task.0)
}

/// Returns the size and hash of each file that an interrupted conversion had completed, by path,
/// from the list `.done` in the hidden directory `dir`. Ignores truncated lines.
fn read_finished_files(dir: &Path) -> HashMap<String, FinishedFile> {
    let text = Directory::open(dir)
        .and_then(|f| f.read_file(FINISHED_LIST_FILE, FINISHED_LIST_FILE_BYTES_MAX))
        .unwrap_or_default();
    let lines = text.split(|&b| b == b'\n').filter_map(|l| serde_json::from_slice::<FinishedFile>(l).ok());
    lines.map(|f| (f.path.clone(), f)).collect()
}

/// Returns JSON with the source and options of a conversion, which a restarted conversion compares
/// with that of the interrupted one to reuse its files. This is the version of launch, the source
/// with a fingerprint of its files, and the options.
fn describe_conversion_task(source: &dyn TensorSource, options: &ConvertOptions) -> Result<Value> {
    let path = source.path().canonicalize().map_err(CkptError::io("look at", source.path()))?;
    let files = compute_source_fingerprint(&path)?;
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

/// Computes a digest of the paths, sizes and modification times of all files below `path`, at most
/// [`SOURCE_DEPTH_MAX`] levels deep.
pub(crate) fn compute_source_fingerprint(path: &Path) -> Result<String> {
    let line = |(path, size, seconds, nanoseconds): disk::FileState| {
        format!("{} {size} {seconds} {nanoseconds}", path.display())
    };
    let mut lines: Vec<String> =
        disk::list_file_states(path, SOURCE_DEPTH_MAX)?.into_iter().map(line).collect();
    lines.sort_unstable();
    Ok(Hash::digest(lines.join("\n").as_bytes()).to_hex())
}
