//! Repairs a checkpoint or a directory of checkpoints.
use super::repair_dir::RepairDir;
use super::repair_loss::{RepairLoss, format_reason};
use super::{external, native};
use crate::codec::disk::{self, path_exists};
use crate::error::{CkptError, Damage, DamageReason, OutputProblem, Result};
use crate::format_constants::{MANIFEST_FILE, RUN_WEIGHTS_DIR};
use crate::layout::native::{Checkpoint, step_directories};
use crate::open::open_external_checkpoint;
use crate::rng_files::link_tree::{self, ScratchDir};
use crate::save::{ReplaceMethod, output_record, publish_directory};
use crate::verify::{VerifyReport, find_non_finite_values, verify_checkpoints};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Options of [`repair_checkpoints`], which state where the repaired copy is written.
#[derive(Clone, Debug, Default)]
pub struct RepairOptions {
    /// The directory to create. `None` means `NAME.repaired` next to the original `NAME`.
    pub out: Option<PathBuf>,
    /// Whether to give the repaired copy the name of the original, and keep the original as
    /// `NAME.before-repair`.
    pub in_place: bool,
}

/// What is reported to the user after the repair of a checkpoint: what was repaired, and what is
/// lost.
#[derive(Clone, Debug, Serialize)]
pub struct RepairReport {
    /// The directory of the repaired copy. If the original needed no repair, the path of the
    /// original. `None` if nothing could be repaired, or an incomplete repair did not replace the
    /// original.
    pub path: Option<PathBuf>,
    /// The new path of the original, if the repaired copy replaced it.
    pub kept: Option<PathBuf>,
    /// Name of the newest complete checkpoint, if the directory contains several.
    pub newest: Option<String>,
    /// Lines for the user about rebuilt, changed and removed files.
    pub rebuilt: Vec<String>,
    /// Lines for the user about losses and their reasons.
    pub lost: Vec<String>,
    /// Whether the repaired copy is sound: complete, undamaged, and with finite values only.
    pub sound: bool,
}

/// Repairs the checkpoint at `path`, or all checkpoints in the directory `path`, by changing files
/// in a hidden copy of the directory. Writes the result to a new directory only if the repair
/// changed something.
///
/// # Errors
/// Fails if `path` has no checkpoint, the output path can't be used, or I/O fails. A loss is not an
/// error. The report lists all losses.
pub fn repair_checkpoints(path: &Path, options: &RepairOptions) -> Result<RepairReport> {
    let missing = || CkptError::NotFound { path: path.to_owned() };
    if !path.is_dir() {
        return Err(missing());
    }
    let original = path.canonicalize().map_err(CkptError::io("find", path))?;
    let name = original.file_name().ok_or_else(missing)?.to_string_lossy().into_owned();
    let target = choose_target_path(&original, &name, options)?;
    let parent = disk::parent_dir(&target);
    disk::make_dirs(&parent)?;
    let _parent_lock = disk::try_lock_dir(&parent)?;
    // a run that saves to the directory holds its lock
    let _original_lock = options.in_place.then(|| disk::try_lock_dir(&original)).transpose()?;
    let scratch = ScratchDir::new(&parent, &target.file_name().unwrap_or_default().to_string_lossy())?;
    link_tree::link_or_copy_tree(&original, &scratch.dir, &|name| {
        name.starts_with(step_directories::SAVING_PREFIX)
    })?;
    let mut repair_dir = RepairDir {
        original: original.clone(),
        dir: scratch.dir.clone(),
        newest: None,
        rebuilt: Vec::new(),
        lost: Vec::new(),
        restored: BTreeSet::new(),
    };
    let native = path_exists(&repair_dir.dir.join(MANIFEST_FILE))
        || !step_directories::list_steps(&repair_dir.dir)?.is_empty();
    match native {
        true => native::repair_native_checkpoints(&mut repair_dir)?,
        false => external::repair_external_checkpoint(&mut repair_dir)?,
    }
    update_output_records(&repair_dir)?;
    let sound = verify_repaired_copy(&mut repair_dir)?;
    let mut report = RepairReport {
        path: None,
        kept: None,
        newest: repair_dir.newest.clone(),
        rebuilt: repair_dir.substitute_original_paths(repair_dir.rebuilt.iter().cloned()),
        lost: repair_dir.substitute_original_paths(repair_dir.lost.iter().map(RepairLoss::to_string)),
        sound,
    };
    publish_repaired_copy(&repair_dir, &target, path, options, &mut report)?;
    Ok(report)
}

/// Makes the repaired copy of the checkpoint visible at `target` by renaming it, if the repair has
/// changed at least one file. An incomplete repair does not replace the original.
fn publish_repaired_copy(
    repair_dir: &RepairDir,
    target: &Path,
    path: &Path,
    options: &RepairOptions,
    report: &mut RepairReport,
) -> Result<()> {
    match (repair_dir.rebuilt.is_empty(), report.sound) {
        (true, true) => report.path = Some(path.to_owned()),
        (true, false) => {}
        // an incomplete repair doesn't replace the original
        (false, false) if options.in_place => report.rebuilt.clear(),
        (false, _) => {
            disk::sync_file_system(&repair_dir.dir)?;
            report.kept = rename_repaired_copy(&repair_dir.dir, target, &repair_dir.original, options)?;
            report.path = Some(if options.in_place { path } else { target }.to_owned());
        }
    }
    Ok(())
}

/// Returns the final path of the repaired checkpoint copy: the path that the user has given, or
/// `NAME.repaired` next to the original. With `in_place`, the result has this path only until it
/// replaces the original.
///
/// # Errors
/// Fails if the path of the result exists or is inside of the original. With `in_place`, also fails
/// if `NAME.before-repair` exists.
fn choose_target_path(original: &Path, name: &str, options: &RepairOptions) -> Result<PathBuf> {
    let sibling = |suffix: &str| original.with_file_name(format!("{name}.{suffix}"));
    let target = match &options.out {
        Some(out) => out.clone(),
        None => sibling("repaired"),
    };
    let kept = sibling("before-repair");
    let required = if options.in_place && path_exists(&kept) { &kept } else { &target };
    if path_exists(required) {
        return Err(CkptError::output_rejected(required, OutputProblem::Exists));
    }
    let parent = disk::parent_dir(&target);
    if parent.canonicalize().is_ok_and(|p| p.starts_with(original)) {
        return Err(CkptError::output_rejected(&target, OutputProblem::InsideInput));
    }
    Ok(target)
}

/// Renames the repaired copy of the checkpoint to `target`. With `in_place`, renames the result
/// further to `original`, and the original to `NAME.before-repair`. At every moment both
/// directories are complete under a visible name. Returns the new path of the original if the
/// original was renamed.
fn rename_repaired_copy(
    result: &Path,
    target: &Path,
    original: &Path,
    options: &RepairOptions,
) -> Result<Option<PathBuf>> {
    publish_directory(result, target, ReplaceMethod::AtomicExchange)?;
    if !options.in_place {
        return Ok(None);
    }
    publish_directory(target, original, ReplaceMethod::AtomicExchange)?;
    let mut name = original.file_name().unwrap_or_default().to_owned();
    name.push(".before-repair");
    let kept = original.with_file_name(name);
    publish_directory(target, &kept, ReplaceMethod::AtomicExchange)?;
    Ok(Some(kept))
}

/// Updates the files in which launch lists the hashes of exported weights and converted
/// checkpoints, because a repair has changed some listed files.
fn update_output_records(repair_dir: &RepairDir) -> Result<()> {
    for directory in ["", RUN_WEIGHTS_DIR] {
        let (copy, original) = (repair_dir.dir.join(directory), repair_dir.original.join(directory));
        if copy.is_dir() && original.is_dir() {
            output_record::update_file_lists_of_modified_copy(&copy, &original, &repair_dir.restored)?;
        }
    }
    Ok(())
}

/// Verifies the repaired copy of the checkpoint, and adds damage, NaN and infinite values that it
/// still contains to the report of the repair. Returns whether the repaired copy is sound.
fn verify_repaired_copy(repair_dir: &mut RepairDir) -> Result<bool> {
    let report = match verify_checkpoints(&repair_dir.dir) {
        Ok(report) => report,
        Err(e) if e.is_checkpoint_at_fault() => {
            add_loss_if_new(repair_dir, RepairLoss::new("", vec![format_reason(&e)]));
            return Ok(false);
        }
        Err(e) => return Err(e),
    };
    let mut losses: Vec<RepairLoss> =
        report.all_problems().map(|(_, damage)| convert_damage_to_loss(damage)).collect();
    losses.extend(
        list_tensors_with_non_finite_values(&report)?.into_iter().map(|line| RepairLoss::new("", vec![line])),
    );
    let sound = losses.is_empty() && !report.checkpoints.is_empty();
    losses.into_iter().for_each(|loss| add_loss_if_new(repair_dir, loss));
    Ok(sound)
}

/// Returns one line of text for each tensor with NaN or infinite values, in those checkpoints of
/// `report` that have no damage and no shards elsewhere.
fn list_tensors_with_non_finite_values(report: &VerifyReport) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for c in report.checkpoints.iter().filter(|c| c.problems.is_empty() && c.elsewhere.is_empty()) {
        if path_exists(&c.path.join(MANIFEST_FILE)) {
            let found = find_non_finite_values(&Checkpoint::open(&c.path)?)?;
            lines.extend(found.into_iter().map(|line| format!("{}: {line}", c.path.display())));
        } else if let Some(opened) = open_external_checkpoint(&c.path)? {
            lines.extend(find_non_finite_values(&opened)?);
        }
    }
    Ok(lines)
}

/// Converts the description of damage that remains after a repair to an entry of the repair's
/// report to the user. The file is the subject of the loss only if a part is missing, because the
/// text of other damage already names the file.
fn convert_damage_to_loss(damage: &Damage) -> RepairLoss {
    match &damage.reason {
        DamageReason::PartMissing(_) => {
            RepairLoss::new(damage.file.as_str(), vec![damage.reason.to_string()])
        }
        _ => RepairLoss::new("", vec![damage.to_string()]),
    }
}

/// Adds `loss`, a file or checkpoint that could not be repaired, to the report of the repair,
/// unless all of its reasons are already reported.
fn add_loss_if_new(repair_dir: &mut RepairDir, loss: RepairLoss) {
    let is_known = |reason: &String| repair_dir.lost.iter().any(|l| l.reasons.contains(reason));
    if !loss.reasons.iter().all(is_known) {
        repair_dir.lost.push(loss);
    }
}
