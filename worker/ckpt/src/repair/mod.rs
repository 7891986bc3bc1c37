//! Repairs what can be derived from what is left, and says what can't.
//!
//! Everything happens in a hidden copy made of hard links (the [`Bench`]): a file is replaced there, never written into.
//! The copy gets its name when it is done, so the original is untouched until the very end, and after it too.
mod bits;
mod foreign;
mod model_files;
mod native;
mod universal;
mod weights;

use crate::commit::{Swap, publish};
use crate::disk::{self, Folder, exists};
use crate::error::{CkptError, Result};
use crate::manifest::MANIFEST;
use crate::rng_files::link::{self, Scratch};
use crate::root;
use crate::verify::{VerifyOptions, verify_with};
use serde::Serialize;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Where the result goes.
#[derive(Clone, Debug, Default)]
pub struct RepairOptions {
    /// The folder to make; `NAME.repaired` beside the folder `NAME` when not given.
    pub out: Option<PathBuf>,
    /// The result takes the original's name; the original is kept as `NAME.before-repair`.
    pub in_place: bool,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct RepairReport {
    /// The folder to use: the original where nothing had to be done; `None` when nothing could be repaired.
    pub path: Option<PathBuf>,
    /// Where the original is now, when it was replaced.
    pub kept: Option<PathBuf>,
    /// Name of the checkpoint that is the newest whole one now, where there are several.
    pub newest: Option<String>,
    /// One line for each thing that was made anew.
    pub rebuilt: Vec<String>,
    /// One line for each thing that is lost, with why.
    pub lost: Vec<String>,
    /// The result verifies: complete, undamaged, all values finite.
    pub sound: bool,
}

/// A copy that is worked on.
struct Bench {
    /// What is repaired; never written to.
    original: PathBuf,
    dir: PathBuf,
    newest: Option<String>,
    rebuilt: Vec<String>,
    lost: Vec<String>,
}

impl Bench {
    /// Takes the place of a file of the bench by its own copy, which may be written to.
    fn own(&self, name: &str) -> Result<()> {
        self.take(&self.original.join(name), name)
    }

    /// Copies a file to the bench.
    fn take(&self, from: &Path, name: &str) -> Result<()> {
        let to = self.dir.join(name);
        disk::unlink(&to)?;
        let mut source = fs::File::open(from).map_err(CkptError::io("open", from))?;
        let made = OpenOptions::new().write(true).create_new(true).open(&to);
        let mut target = made.map_err(CkptError::io("create", &to))?;
        io::copy(&mut source, &mut target).map(drop).map_err(CkptError::io("copy", from))
    }

    /// Writes a file of the bench anew.
    fn write(&self, name: &str, content: &[u8]) -> Result<()> {
        let to = self.dir.join(name);
        disk::unlink(&to)?;
        disk::write_file(to, content).map(drop)
    }

    /// A folder beside the bench for what is made on the way; removed when dropped.
    fn aside(&self) -> Aside {
        let mut name = self.dir.file_name().unwrap_or_default().to_owned();
        name.push(".aside");
        Aside(self.dir.with_file_name(name))
    }

    /// Lines speak of the original, not of the hidden copy.
    fn plain(&self, lines: &[String]) -> Vec<String> {
        let (hidden, shown) = (self.dir.display().to_string(), self.original.display().to_string());
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (hidden_name, name) = (name(&self.dir), name(&self.original));
        let plain = |line: &String| line.replace(&hidden, &shown).replace(&hidden_name, &name);
        lines.iter().map(plain).collect()
    }
}

struct Aside(PathBuf);

impl Drop for Aside {
    fn drop(&mut self) {
        // what can't be removed now is removed by the next repair
        let _ = disk::remove_tree(&self.0);
    }
}

/// Path of a name in a folder of the bench; `folder` is empty for the bench itself.
fn within(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
}

/// Repairs the checkpoint at `path`, or a directory of them.
///
/// # Errors
/// When there is nothing like a checkpoint, or the disk or the place of the result refuses. That something is lost is no
/// error: the report says it.
pub fn repair(path: &Path, options: &RepairOptions) -> Result<RepairReport> {
    let missing =
        || CkptError::NotACheckpoint { path: path.to_owned(), why: "there is no such directory".into() };
    if !path.is_dir() {
        return Err(missing());
    }
    let original = path.canonicalize().map_err(CkptError::io("find", path))?;
    let name = original.file_name().ok_or_else(missing)?.to_string_lossy().into_owned();
    let target = target(&original, &name, options)?;
    let parent = disk::parent_of(&target);
    disk::make_dirs(&parent)?;
    let _parent = disk::lock_dir(&parent)?;
    // a run that saves into the folder holds its lock
    let _own = options.in_place.then(|| disk::lock_dir(&original)).transpose()?;
    let scratch = Scratch::new(&parent, &target.file_name().unwrap_or_default().to_string_lossy())?;
    link::folder(&original, &scratch.dir, &|name| name.starts_with(root::SAVING))?;
    let mut bench = Bench {
        original: original.clone(),
        dir: scratch.dir.clone(),
        newest: None,
        rebuilt: Vec::new(),
        lost: Vec::new(),
    };
    let native = exists(&bench.dir.join(MANIFEST)) || !root::steps(&bench.dir)?.is_empty();
    match native {
        true => native::mend(&mut bench)?,
        false => foreign::mend(&mut bench)?,
    }
    let sound = check(&mut bench)?;
    let mut report = RepairReport {
        path: None,
        kept: None,
        newest: bench.newest.clone(),
        rebuilt: bench.plain(&bench.rebuilt),
        lost: bench.plain(&bench.lost),
        sound,
    };
    finish(&bench, &target, path, options, &mut report)?;
    Ok(report)
}

/// Gives the bench its name, if that is of use.
fn finish(
    bench: &Bench,
    target: &Path,
    path: &Path,
    options: &RepairOptions,
    report: &mut RepairReport,
) -> Result<()> {
    match (bench.rebuilt.is_empty(), report.sound) {
        (true, true) => report.path = Some(path.to_owned()),
        (true, false) => {}
        // half of a repair is no reason to replace anything
        (false, false) if options.in_place => report.rebuilt.clear(),
        (false, _) => {
            disk::sync_all_of(&bench.dir)?;
            report.kept = place(&bench.dir, target, &bench.original, options)?;
            report.path = Some(if options.in_place { path } else { target }.to_owned());
        }
    }
    Ok(())
}

/// The folder to make. In place it is what the original will be called while the two change places.
fn target(original: &Path, name: &str, options: &RepairOptions) -> Result<PathBuf> {
    let beside = |end: &str| original.with_file_name(format!("{name}.{end}"));
    let target = match &options.out {
        Some(out) => out.clone(),
        None => beside("repaired"),
    };
    let kept = beside("before-repair");
    let taken = if options.in_place && exists(&kept) { &kept } else { &target };
    if exists(taken) {
        let why = "it is there already, from an earlier repair; move or remove it, or give --out".into();
        return Err(CkptError::Refused { path: taken.clone(), why });
    }
    let parent = disk::parent_of(&target);
    if parent.canonicalize().is_ok_and(|p| p.starts_with(original)) {
        let why = "it lies inside the folder that is repaired".into();
        return Err(CkptError::Refused { path: target, why });
    }
    Ok(target)
}

/// Gives the result its name, and in place the original another: at every moment both are whole, under some name that
/// isn't hidden. Returns where the original is.
fn place(made: &Path, target: &Path, original: &Path, options: &RepairOptions) -> Result<Option<PathBuf>> {
    publish(made, target, Swap::Atomic)?;
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

/// True when the bench verifies; what is wrong is lost.
fn check(bench: &mut Bench) -> Result<bool> {
    let report = match verify_with(&bench.dir, VerifyOptions { values: true }) {
        Ok(report) => report,
        Err(e) if e.is_checkpoint_at_fault() => {
            note(bench, e.to_string());
            return Ok(false);
        }
        Err(e) => return Err(e),
    };
    let mut wrong: Vec<String> = report.problems().map(|(_, p)| p.to_string()).collect();
    wrong.extend(report.warnings.into_iter().filter(|w| w.contains(" NaN and ")));
    let sound = wrong.is_empty() && !report.checkpoints.is_empty();
    wrong.into_iter().for_each(|line| note(bench, line));
    Ok(sound)
}

/// Adds a loss that no line names yet.
fn note(bench: &mut Bench, line: String) {
    if !bench.lost.iter().any(|l| l.contains(&line)) {
        bench.lost.push(line);
    }
}

/// Files below a folder of the bench, with the folders of at most this depth.
fn files_below(dir: &Path, folder: &str, depth: u32, found: &mut Vec<String>) -> Result<()> {
    let opened = Folder::open(&dir.join(folder))?;
    for name in opened.names()? {
        let inner = within(folder, &name);
        if opened.has_folder(&name)? {
            if depth > 0 {
                files_below(dir, &inner, depth - 1, found)?;
            }
        } else {
            found.push(inner);
        }
    }
    Ok(())
}
