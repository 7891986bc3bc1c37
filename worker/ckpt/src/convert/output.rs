//! The folder that a conversion makes: hidden beside the one it will be, and kept when the conversion is killed.
//!
//! `.NAME.converting` holds the files, `.task.json` (which source and options they are of) and `.done` (a line for each
//! finished file). What is in it counts for the same task only, and each file only after it was checked.
use super::{ConvertOptions, Target};
use crate::commit::{Swap, publish};
use crate::disk::{self, DirLock, Folder};
use crate::error::{CkptError, Result};
use crate::gather::output::{Made, place};
use crate::hash::Hash;
use crate::save::ShardReport;
use crate::source::Source;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Space beside tensors: headers, pickles, rounding up.
const OVERHEAD_BYTES: u64 = 16 << 20;
const MADE: Made = Made { file: "converted.json", format: "launch converted checkpoint", by: "converting" };
const TASK: &str = ".task.json";
const DONE: &str = ".done";
/// Longest record of finished files that is read.
const DONE_MAX: u64 = 1 << 30;
/// Deepest folder of a source that is looked at to see whether it has changed.
const DEPTH_MAX: u32 = 4;

/// A finished file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Finished {
    pub(super) path: String,
    pub(super) bytes: u64,
    /// Of a torch file: a CRC of the names, sizes and CRCs of its members.
    pub(super) members: Option<u32>,
    /// Of a shard of ours.
    pub(super) shard: Option<ShardReport>,
}

/// The folder being made.
pub(super) struct Output {
    pub(super) dir: PathBuf,
    path: PathBuf,
    /// What an earlier run had finished.
    earlier: HashMap<String, Finished>,
    /// What is finished, for a later run; `None` in a folder that is thrown away when this run dies.
    record: Option<File>,
    _lock: Option<DirLock>,
}

impl Output {
    pub(super) fn begin(
        source: &dyn Source,
        out: &Path,
        options: &ConvertOptions,
        bytes: u64,
    ) -> Result<Output> {
        let (parent, name) = place(source.path(), out, options.force, &MADE)?;
        let dir = parent.join(format!(".{name}.converting"));
        let task = task(source, options)?;
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
        let there: u64 = earlier.values().map(|f| f.bytes).sum();
        require_space(&parent, bytes.saturating_sub(there))?;
        disk::unlink(&dir.join(TASK))?;
        disk::write_file(dir.join(TASK), task.to_string().as_bytes())?;
        let done = dir.join(DONE);
        let record =
            OpenOptions::new().append(true).create(true).open(&done).map_err(CkptError::io("open", &done))?;
        let (record, _lock) = (Some(record), Some(lock));
        let mut output = Output { path: parent.join(name), dir, earlier, record, _lock };
        // ends a line that a kill has cut
        output.line("\n")?;
        Ok(output)
    }

    /// An existing folder of the caller's, who gives it its name or removes it.
    pub(super) fn within(dir: &Path, bytes: u64) -> Result<Output> {
        require_space(dir, bytes)?;
        let (dir, path) = (dir.to_owned(), dir.to_owned());
        Ok(Output { dir, path, earlier: HashMap::new(), record: None, _lock: None })
    }

    /// What an earlier run had finished of this path.
    pub(super) fn earlier(&self, path: &str) -> Option<&Finished> {
        self.earlier.get(path)
    }

    fn line(&mut self, text: &str) -> Result<()> {
        match &mut self.record {
            Some(file) => {
                file.write_all(text.as_bytes()).map_err(CkptError::io("write", &self.dir.join(DONE)))
            }
            None => Ok(()),
        }
    }

    /// Remembers a finished file.
    pub(super) fn record(&mut self, file: &Finished) -> Result<()> {
        let line = serde_json::to_string(file).map_err(|e| CkptError::invalid(e.to_string()))?;
        self.line(&(line + "\n"))
    }

    /// Gives the folder its name; everything in it is durable before.
    pub(super) fn publish(&mut self) -> Result<PathBuf> {
        disk::unlink(&self.dir.join(DONE))?;
        disk::unlink(&self.dir.join(TASK))?;
        disk::unlink(&self.dir.join(MADE.file))?;
        let names = Folder::open(&self.dir)?.names()?;
        let made = json!({"format": MADE.format, "program": format!("launch {}", env!("CARGO_PKG_VERSION")), "files": names});
        disk::write_file(self.dir.join(MADE.file), format!("{made}\n").as_bytes())?;
        disk::sync_all_of(&self.dir)?;
        publish(&self.dir, &self.path, Swap::Atomic)?;
        // what had the name before has the hidden one now
        disk::remove_tree(&self.dir)?;
        Ok(self.path.clone())
    }

    /// Removes all of it after an error.
    pub(super) fn discard(&mut self) {
        // what can't be removed now is of no use to the next run, which removes or replaces it
        let _ = disk::remove_tree(&self.dir);
    }
}

/// Refuses to begin what the file system has no room for.
fn require_space(dir: &Path, bytes: u64) -> Result<()> {
    let free = disk::free_bytes(dir)?;
    let needed = bytes.saturating_add(bytes / 500).saturating_add(OVERHEAD_BYTES);
    match needed > free {
        true => Err(CkptError::NoSpace { path: dir.to_owned(), needed, free }),
        false => Ok(()),
    }
}

fn read_task(dir: &Path) -> Option<Value> {
    let text = Folder::open(dir).ok()?.read(TASK, 1 << 20).ok()?;
    serde_json::from_slice(&text).ok()
}

/// The finished files of an earlier run; a line that was cut short is none.
fn earlier(dir: &Path) -> HashMap<String, Finished> {
    let text = Folder::open(dir).and_then(|f| f.read(DONE, DONE_MAX)).unwrap_or_default();
    let lines = text.split(|&b| b == b'\n').filter_map(|l| serde_json::from_slice::<Finished>(l).ok());
    lines.map(|f| (f.path.clone(), f)).collect()
}

/// What the files are of: the source as it is, and the options that decide what is written.
fn task(source: &dyn Source, options: &ConvertOptions) -> Result<Value> {
    let path = source.path().canonicalize().map_err(CkptError::io("look at", source.path()))?;
    let files = fingerprint(&path)?;
    let to = match options.to {
        Target::Native => "native",
        Target::DeepSpeed => "deepspeed",
        Target::Universal => "universal",
    };
    let groups = Hash::of(format!("{:?}", options.groups).as_bytes()).hex();
    Ok(json!({
        "program": env!("CARGO_PKG_VERSION"), "source": path, "files": files, "to": to, "stage": options.stage,
        "world": options.world, "sub_group_size": options.sub_group_size, "dtype": options.dtype,
        "groups": groups,
    }))
}

/// Changes when a file below the folder comes, goes, or is written.
pub(crate) fn fingerprint(path: &Path) -> Result<String> {
    let mut files = Vec::new();
    list(path, 0, &mut files)?;
    files.sort();
    Ok(Hash::of(files.join("\n").as_bytes()).hex())
}

fn list(dir: &Path, depth: u32, files: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(CkptError::io("list", dir))? {
        let path = entry.map_err(CkptError::io("list", dir))?.path();
        let Ok(m) = path.symlink_metadata() else { continue };
        match m.is_dir() {
            true if depth < DEPTH_MAX => list(&path, depth + 1, files)?,
            true => {}
            false => files.push(format!("{} {} {} {}", path.display(), m.len(), m.mtime(), m.mtime_nsec())),
        }
    }
    Ok(())
}
