//! Repairs a checkpoint: rebuilds what can be derived from the remaining files, and reports what is
//! lost.
//!
//! All work happens in a hidden copy made of hard links (the [`RepairDir`]), where files are
//! replaced and never modified. The copy gets its final name when it is complete, and the original
//! stays unchanged.
mod bit_flips;
mod external;
mod model_files;
mod native_repair;
mod universal;
mod weights;

use crate::checkpoint::Checkpoint;
use crate::commit::{Swap, publish};
use crate::disk::{self, Directory, exists};
use crate::error::{CkptError, Damage, DamageReason, OutputProblem, Result};
use crate::external::values::non_finite_values;
use crate::manifest::MANIFEST;
use crate::rng_files::link_tree::{self, ScratchDir};
use crate::root;
use crate::verify::{VerifyReport, verify};
use serde::Serialize;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Where [`repair`] writes its result.
#[derive(Clone, Debug, Default)]
pub struct RepairOptions {
    /// The directory to create; by default `NAME.repaired` next to the directory `NAME`.
    pub out: Option<PathBuf>,
    /// Give the result the original's name, and keep the original as `NAME.before-repair`.
    pub in_place: bool,
}

/// The result of a repair.
#[derive(Clone, Debug, Serialize)]
pub struct RepairReport {
    /// The directory to use: the original if it needed no repair; `None` if nothing could be
    /// repaired.
    pub path: Option<PathBuf>,
    /// Where the original is now, if it was replaced.
    pub kept: Option<PathBuf>,
    /// Name of the newest complete checkpoint in a directory of several.
    pub newest: Option<String>,
    /// What was rebuilt, as lines for the user.
    pub rebuilt: Vec<String>,
    /// What is lost and why, as lines for the user.
    pub lost: Vec<String>,
    /// Whether the result verifies: complete, undamaged, all values finite.
    pub sound: bool,
}

/// Something that a repair could not rebuild.
struct Loss {
    /// The file or checkpoint that is lost; empty when the reasons name it.
    subject: String,
    reasons: Vec<String>,
    /// Why it could not be rebuilt; may be empty.
    remark: String,
}

impl Loss {
    fn new(subject: impl Into<String>, reasons: Vec<String>) -> Loss {
        Loss { subject: subject.into(), reasons, remark: String::new() }
    }

    fn with_remark(mut self, remark: impl Into<String>) -> Loss {
        self.remark = remark.into();
        self
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.subject.is_empty() {
            write!(f, "{}: ", self.subject)?;
        }
        f.write_str(&self.reasons.join("; "))?;
        match self.remark.is_empty() {
            true => Ok(()),
            false => write!(f, " ({})", self.remark),
        }
    }
}

/// The hidden copy in which a checkpoint is repaired.
struct RepairDir {
    /// The directory that is repaired; it is never modified.
    original: PathBuf,
    /// The copy.
    dir: PathBuf,
    newest: Option<String>,
    rebuilt: Vec<String>,
    lost: Vec<Loss>,
}

impl RepairDir {
    /// Replaces the hard link `name` by a copy of the original file, which may be modified.
    fn copy_original(&self, name: &str) -> Result<()> {
        self.copy_in(&self.original.join(name), name)
    }

    /// Copies the file `from` to `name`.
    fn copy_in(&self, from: &Path, name: &str) -> Result<()> {
        let to = self.dir.join(name);
        disk::unlink(&to)?;
        let mut source = fs::File::open(from).map_err(CkptError::io("open", from))?;
        let created = OpenOptions::new().write(true).create_new(true).open(&to);
        let mut target = created.map_err(CkptError::io("create", &to))?;
        io::copy(&mut source, &mut target).map(drop).map_err(CkptError::io("copy", from))
    }

    /// Replaces the file `name`.
    fn write(&self, name: &str, content: &[u8]) -> Result<()> {
        let to = self.dir.join(name);
        disk::unlink(&to)?;
        disk::write_file(to, content).map(drop)
    }

    /// A directory next to the copy for intermediate results. Dropping removes it.
    fn temp_dir(&self) -> TempDir {
        let mut name = self.dir.file_name().unwrap_or_default().to_owned();
        name.push(".aside");
        TempDir(self.dir.with_file_name(name))
    }

    /// The lines with the paths of the original in place of those of the hidden copy.
    fn with_original_paths(&self, lines: impl Iterator<Item = String>) -> Vec<String> {
        let (hidden, shown) = (self.dir.display().to_string(), self.original.display().to_string());
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (hidden_name, name) = (name(&self.dir), name(&self.original));
        lines.map(|line| line.replace(&hidden, &shown).replace(&hidden_name, &name)).collect()
    }
}

struct TempDir(PathBuf);

impl Drop for TempDir {
    fn drop(&mut self) {
        // a failure is harmless: the next repair removes the directory
        let _ = disk::remove_tree(&self.0);
    }
}

/// Path of `name` in the subdirectory `directory` of the copy; `directory` is empty for the copy
/// itself.
fn join_name(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

/// Repairs the checkpoint at `path`, or a directory of checkpoints.
///
/// # Errors
/// When `path` has no checkpoint, the output path can't be used, or I/O fails. A loss is not an
/// error; it is in the report.
pub fn repair(path: &Path, options: &RepairOptions) -> Result<RepairReport> {
    let missing = || CkptError::NotFound { path: path.to_owned() };
    if !path.is_dir() {
        return Err(missing());
    }
    let original = path.canonicalize().map_err(CkptError::io("find", path))?;
    let name = original.file_name().ok_or_else(missing)?.to_string_lossy().into_owned();
    let target = target_path(&original, &name, options)?;
    let parent = disk::parent_of(&target);
    disk::make_dirs(&parent)?;
    let _parent_lock = disk::lock_dir(&parent)?;
    // a run that saves to the directory holds its lock
    let _original_lock = options.in_place.then(|| disk::lock_dir(&original)).transpose()?;
    let scratch = ScratchDir::new(&parent, &target.file_name().unwrap_or_default().to_string_lossy())?;
    link_tree::link_tree(&original, &scratch.dir, &|name| name.starts_with(root::SAVING))?;
    let mut bench = RepairDir {
        original: original.clone(),
        dir: scratch.dir.clone(),
        newest: None,
        rebuilt: Vec::new(),
        lost: Vec::new(),
    };
    let native = exists(&bench.dir.join(MANIFEST)) || !root::steps(&bench.dir)?.is_empty();
    match native {
        true => native_repair::repair_native(&mut bench)?,
        false => external::repair_external(&mut bench)?,
    }
    let sound = verify_result(&mut bench)?;
    let mut report = RepairReport {
        path: None,
        kept: None,
        newest: bench.newest.clone(),
        rebuilt: bench.with_original_paths(bench.rebuilt.iter().cloned()),
        lost: bench.with_original_paths(bench.lost.iter().map(Loss::to_string)),
        sound,
    };
    publish_result(&bench, &target, path, options, &mut report)?;
    Ok(report)
}

/// Publishes the copy if the repair changed something.
fn publish_result(
    bench: &RepairDir,
    target: &Path,
    path: &Path,
    options: &RepairOptions,
    report: &mut RepairReport,
) -> Result<()> {
    match (bench.rebuilt.is_empty(), report.sound) {
        (true, true) => report.path = Some(path.to_owned()),
        (true, false) => {}
        // an incomplete repair doesn't replace the original
        (false, false) if options.in_place => report.rebuilt.clear(),
        (false, _) => {
            disk::sync_all_of(&bench.dir)?;
            report.kept = publish_at(&bench.dir, target, &bench.original, options)?;
            report.path = Some(if options.in_place { path } else { target }.to_owned());
        }
    }
    Ok(())
}

/// The path of the result. With `in_place` the result has this path until it replaces the original.
///
/// # Errors
/// When the path exists or is inside of the original.
fn target_path(original: &Path, name: &str, options: &RepairOptions) -> Result<PathBuf> {
    let sibling = |suffix: &str| original.with_file_name(format!("{name}.{suffix}"));
    let target = match &options.out {
        Some(out) => out.clone(),
        None => sibling("repaired"),
    };
    let kept = sibling("before-repair");
    let required = if options.in_place && exists(&kept) { &kept } else { &target };
    if exists(required) {
        return Err(CkptError::output_rejected(required, OutputProblem::Exists));
    }
    let parent = disk::parent_of(&target);
    if parent.canonicalize().is_ok_and(|p| p.starts_with(original)) {
        return Err(CkptError::output_rejected(&target, OutputProblem::InsideInput));
    }
    Ok(target)
}

/// Renames the result to its final path and, with `in_place`, the original to `NAME.before-repair`.
/// At every moment both directories are complete under a visible name. Returns the new path of the
/// original.
fn publish_at(
    result: &Path,
    target: &Path,
    original: &Path,
    options: &RepairOptions,
) -> Result<Option<PathBuf>> {
    publish(result, target, Swap::Atomic)?;
    if !options.in_place {
        return Ok(None);
    }
    publish(target, original, Swap::Atomic)?;
    let mut name = original.file_name().unwrap_or_default().to_owned();
    name.push(".before-repair");
    let kept = original.with_file_name(name);
    publish(target, &kept, Swap::Atomic)?;
    Ok(Some(kept))
}

/// Whether the copy verifies. Problems are added to the losses.
fn verify_result(bench: &mut RepairDir) -> Result<bool> {
    let report = match verify(&bench.dir) {
        Ok(report) => report,
        Err(e) if e.is_checkpoint_at_fault() => {
            add_loss(bench, Loss::new("", vec![reason_of(&e)]));
            return Ok(false);
        }
        Err(e) => return Err(e),
    };
    let mut losses: Vec<Loss> = report.problems().map(|(_, damage)| loss_of(damage)).collect();
    losses.extend(list_non_finite(&report)?.into_iter().map(|line| Loss::new("", vec![line])));
    let sound = losses.is_empty() && !report.checkpoints.is_empty();
    losses.into_iter().for_each(|loss| add_loss(bench, loss));
    Ok(sound)
}

/// A line for each tensor of the verified checkpoints that has NaN or infinite values.
fn list_non_finite(report: &VerifyReport) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for c in report.checkpoints.iter().filter(|c| c.problems.is_empty() && c.elsewhere.is_empty()) {
        if exists(&c.path.join(MANIFEST)) {
            let found = non_finite_values(&Checkpoint::open(&c.path)?)?;
            lines.extend(found.into_iter().map(|line| format!("{}: {line}", c.path.display())));
        } else if let Some(opened) = crate::external::open(&report.path)? {
            lines.extend(non_finite_values(&opened)?);
        }
    }
    Ok(lines)
}

/// The reason in an error: without the path of the checkpoint, where the error is about one.
fn reason_of(error: &CkptError) -> String {
    match error {
        CkptError::Damaged { damage, .. } => damage.to_string(),
        CkptError::Missing { part, .. } => DamageReason::PartMissing(part.clone()).to_string(),
        other => other.to_string(),
    }
}

/// The loss of a damaged file. A missing part is the subject's loss, other damage names its file
/// itself.
fn loss_of(damage: &Damage) -> Loss {
    match &damage.reason {
        DamageReason::PartMissing(_) => Loss::new(damage.file.as_str(), vec![damage.reason.to_string()]),
        _ => Loss::new("", vec![damage.to_string()]),
    }
}

/// Adds a loss unless another loss has its reasons.
fn add_loss(bench: &mut RepairDir, loss: Loss) {
    let is_known = |reason: &String| bench.lost.iter().any(|l| l.reasons.contains(reason));
    if !loss.reasons.iter().all(is_known) {
        bench.lost.push(loss);
    }
}

/// Lists the files in subdirectory `directory` of `dir`, down to this depth of directories.
fn list_files(dir: &Path, directory: &str, depth: u32, found: &mut Vec<String>) -> Result<()> {
    let opened = Directory::open(&dir.join(directory))?;
    for name in opened.names()? {
        let inner = join_name(directory, &name);
        if opened.has_directory(&name)? {
            if depth > 0 {
                list_files(dir, &inner, depth - 1, found)?;
            }
        } else {
            found.push(inner);
        }
    }
    Ok(())
}
