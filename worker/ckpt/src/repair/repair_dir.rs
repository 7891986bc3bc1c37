//! [`RepairDir`]: the working copy of a damaged checkpoint directory, in which a repair changes
//! files so that the original stays unmodified.
use super::repair_loss::RepairLoss;
use crate::codec::disk::{self, Directory};
use crate::error::{CkptError, Result};
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};

/// The copy of a damaged checkpoint directory in which a repair changes files, and the list of the
/// repaired files.
pub(super) struct RepairDir {
    /// The directory to repair, which is never modified.
    pub(super) original: PathBuf,
    /// The hidden copy of the original directory.
    pub(super) dir: PathBuf,
    /// Name of the newest complete checkpoint, if the directory contains several.
    pub(super) newest: Option<String>,
    /// Lines for the user about rebuilt, changed and removed files.
    pub(super) rebuilt: Vec<String>,
    /// Losses that were found so far.
    pub(super) lost: Vec<RepairLoss>,
    /// Files whose previous content was restored, so that recorded hashes still apply to them.
    pub(super) restored: BTreeSet<String>,
}

impl RepairDir {
    /// Replaces the hard link `name` in the working copy of the checkpoint by a separate file, so
    /// that changes do not reach the original file. Only a file that was replaced in this way may
    /// be modified.
    pub(super) fn replace_link_by_copy(&self, name: &str) -> Result<()> {
        self.copy_file_in(&self.original.join(name), name)
    }

    /// Copies the file `from` into the working copy of the checkpoint, where it gets the path
    /// `name` relative to the working copy's root. Replaces an existing file.
    pub(super) fn copy_file_in(&self, from: &Path, name: &str) -> Result<()> {
        let to = self.dir.join(name);
        disk::unlink(&to)?;
        let mut source = disk::open_regular_file(from)?;
        let created = OpenOptions::new().write(true).create_new(true).open(&to);
        let mut target = created.map_err(CkptError::io("create", &to))?;
        io::copy(&mut source, &mut target).map(drop).map_err(CkptError::io("copy", from))
    }

    /// Writes a file with the content `content` to the path `name` within the working copy of the
    /// checkpoint. Replaces an existing file.
    pub(super) fn write_file(&self, name: &str, content: &[u8]) -> Result<()> {
        let to = self.dir.join(name);
        disk::unlink(&to)?;
        disk::write_file(to, content).map(drop)
    }

    /// Returns the path of a temporary directory for intermediate results of the repair, next to
    /// the hidden copy of the checkpoint. Does not create the directory. Dropping the returned
    /// value removes the directory.
    pub(super) fn temp_dir(&self) -> TempDir {
        let mut name = self.dir.file_name().unwrap_or_default().to_owned();
        name.push(".aside");
        TempDir(self.dir.with_file_name(name))
    }

    /// Replaces the hidden path of the working copy in messages to the user by the path of the
    /// original checkpoint.
    pub(super) fn substitute_original_paths(&self, lines: impl Iterator<Item = String>) -> Vec<String> {
        let (hidden, shown) = (self.dir.display().to_string(), self.original.display().to_string());
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (hidden_name, name) = (name(&self.dir), name(&self.original));
        lines.map(|line| line.replace(&hidden, &shown).replace(&hidden_name, &name)).collect()
    }
}

/// A temporary directory that is removed when this value is dropped.
pub(super) struct TempDir(pub(super) PathBuf);

impl Drop for TempDir {
    fn drop(&mut self) {
        // a failure is harmless: the next repair removes the directory
        let _ = disk::remove_tree(&self.0);
    }
}

/// Joins a relative directory path and the name of an entry to the relative path `directory/name`.
/// An empty `directory` stands for the directory that contains the subdirectories.
pub(super) fn join_subpath(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

/// Appends to `found` the path, relative to `dir`, of each file in the subdirectory `directory` of
/// `dir` and in its subdirectories. Descends at most `depth` levels below `directory`, and leaves
/// out deeper files.
pub(super) fn list_files_recursively(
    dir: &Path,
    directory: &str,
    depth: u32,
    found: &mut Vec<String>,
) -> Result<()> {
    let opened = Directory::open(&dir.join(directory))?;
    for name in opened.list_names()? {
        let inner = join_subpath(directory, &name);
        if opened.has_directory(&name)? {
            if depth > 0 {
                list_files_recursively(dir, &inner, depth - 1, found)?;
            }
        } else {
            found.push(inner);
        }
    }
    Ok(())
}
