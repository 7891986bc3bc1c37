//! Verifies every byte of a checkpoint, or of every checkpoint in a directory.
use super::digests::verify_recorded_files;
use super::external::{add_record_problems, verify_opened_checkpoint};
use super::file_scan;
use super::native::verify_native;
use super::non_finite_values::find_non_finite_values;
use super::report::{CheckpointReport, VerifyReport, convert_error_to_damage};
use crate::codec::disk::{Directory, path_exists};
use crate::error::{CkptError, RemoteShard, Result};
use crate::format_constants::{MANIFEST_FILE, RUN_WEIGHTS_DIR};
use crate::layout::native::{
    Checkpoint, DELETING_PREFIX, LATEST_FILE, LATEST_TEMP_FILE, REPLACED_PREFIX, SAVING_PREFIX,
    step_directories,
};
use crate::open::{diagnose_directory, open_external_checkpoint};
use crate::save::output_record::GATHER_RECORD_KIND;
use std::path::Path;

/// Options of [`verify_checkpoints_with`], such as whether to search for NaN and infinite values.
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyOptions {
    /// Whether to also search every tensor for NaN and infinite values, which become warnings.
    pub values: bool,
}

/// Verifies every byte of the checkpoints at `path` against stored hashes, with the default
/// options. Does not search for non-finite values.
pub fn verify_checkpoints(path: &Path) -> Result<VerifyReport> {
    verify_checkpoints_with(path, VerifyOptions::default())
}

/// Verifies every byte of the checkpoints at `path` against stored hashes, and also searches the
/// tensors for NaN and infinite values if `options.values` is set. If `path` is a directory of
/// checkpoints, verifies every checkpoint, `latest`, and the gathered weights of the run.
///
/// # Errors
/// Fails if there is no checkpoint, or a directory cannot be listed. Damage is not an error. The
/// report lists all damage.
pub fn verify_checkpoints_with(path: &Path, options: VerifyOptions) -> Result<VerifyReport> {
    let mut report = verify_files(path, options)?;
    for c in &report.checkpoints {
        let note = |s: &RemoteShard| {
            format!("{}: {} is on host {} and was not verified", c.path.display(), s.file, s.host)
        };
        report.notes.extend(c.elsewhere.iter().map(note));
    }
    let native = report.checkpoints.iter().filter(|c| {
        path_exists(&c.path.join(MANIFEST_FILE)) && c.problems.is_empty() && c.elsewhere.is_empty()
    });
    for path in native.filter(|_| options.values).map(|c| c.path.clone()).collect::<Vec<_>>() {
        let lines = find_non_finite_values(&Checkpoint::open(&path)?)?;
        report.warnings.extend(lines.into_iter().map(|line| format!("{}: {line}", path.display())));
    }
    Ok(report)
}

/// Verifies every stored byte of the checkpoint at `path`, or of the checkpoints in the directory
/// `path`, against stored hashes and CRC-32s. If `options.values` is true, also searches an
/// external checkpoint for NaN and infinite values. Never searches native checkpoints for such
/// values.
fn verify_files(path: &Path, options: VerifyOptions) -> Result<VerifyReport> {
    let mut report = VerifyReport { path: path.to_owned(), ..VerifyReport::default() };
    if !path_exists(path) {
        return Err(CkptError::NotFound { path: path.to_owned() });
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if path.is_file() {
        verify_external(path, &name, options, &mut report)?;
        return Ok(report);
    }
    if path_exists(&path.join(MANIFEST_FILE)) || step_directories::parse_step_dir_name(&name).is_some() {
        report.checkpoints.push(verify_native(path, step_directories::parse_step_dir_name(&name))?);
        return Ok(report);
    }
    let steps = step_directories::list_steps(path)?;
    for &step in &steps {
        let path = step_directories::locate_step_checkpoint(path, step)
            .unwrap_or_else(|| path.join(step_directories::step_dir_name(step)));
        report.checkpoints.push(verify_native(&path, Some(step))?);
    }
    let weights = path.join(RUN_WEIGHTS_DIR);
    if !steps.is_empty() && weights.join(GATHER_RECORD_KIND.file).is_file() {
        verify_external(&weights, RUN_WEIGHTS_DIR, options, &mut report)?;
    }
    if steps.is_empty() && verify_external(path, &name, options, &mut report)? {
        return Ok(report);
    }
    // a native `latest` contains a hash of itself
    let is_native = |text: Vec<u8>| String::from_utf8_lossy(&text).contains("blake3:");
    let latest = Directory::open(path)?.read_file(LATEST_FILE, 4096).ok();
    if steps.is_empty() && latest.is_some_and(|text| !is_native(text)) {
        return Err(CkptError::not_a_checkpoint(path, diagnose_directory(path)));
    }
    if steps.is_empty() && !path_exists(&path.join(LATEST_FILE)) {
        return Err(CkptError::not_a_checkpoint(path, diagnose_directory(path)));
    }
    verify_latest(path, &steps, &mut report);
    for name in Directory::open(path)?.list_names()? {
        if [SAVING_PREFIX, DELETING_PREFIX, REPLACED_PREFIX, LATEST_TEMP_FILE]
            .iter()
            .any(|p| name.starts_with(p))
        {
            report.notes.push(format!(
                "{name} belongs to a save in progress or an interrupted one; the next save removes it"
            ));
        }
    }
    Ok(report)
}

/// Verifies the checkpoint at `path`, which another program wrote, against the CRC-32s in the
/// checkpoint's files, and adds the result to `report`. Returns whether there is an external
/// checkpoint at `path`, damaged or not. `name` is the file name of `path`.
fn verify_external(
    path: &Path,
    name: &str,
    options: VerifyOptions,
    report: &mut VerifyReport,
) -> Result<bool> {
    let opened = match open_external_checkpoint(path) {
        Ok(None) => return Ok(false),
        Ok(Some(found)) => found,
        Err(e @ CkptError::NotACheckpoint { .. }) if path.is_file() => return Err(e),
        Err(e) if e.is_checkpoint_at_fault() => {
            report.checkpoints.push(make_unreadable_report(path, name, e)?);
            return Ok(true);
        }
        Err(e) => return Err(e),
    };
    let (one, warnings) = verify_opened_checkpoint(&opened)?;
    report.warnings.extend(warnings);
    report.notes.extend(opened.facts().notices.iter().cloned());
    if options.values && one.problems.is_empty() {
        report.warnings.extend(find_non_finite_values(&opened)?);
    }
    report.checkpoints.push(one);
    Ok(true)
}

/// Creates the verification report about another program's checkpoint at `path` that failed to open
/// with the error `e`. The problems are the error, and all damage that a scan of the files finds.
fn make_unreadable_report(path: &Path, name: &str, e: CkptError) -> Result<CheckpointReport> {
    let at = match &e {
        CkptError::Damaged { path, .. } | CkptError::Missing { path, .. } if path.is_dir() => path.clone(),
        _ => path.to_owned(),
    };
    let mut problems = vec![convert_error_to_damage(name, e)];
    let scan = match at.is_dir() {
        true => file_scan::check_file_contents_in_directory(&at, &|_| false, file_scan::SCAN_DEPTH_MAX)?,
        false => file_scan::ScanReport::default(),
    };
    problems.extend(scan.problems.into_iter().filter(|p| p.file != problems[0].file).collect::<Vec<_>>());
    if path.is_dir() {
        add_record_problems(&mut problems, verify_recorded_files(&[path].into(), &|_| true)?.problems);
    }
    let (bytes, blocks, unchecked) = (scan.bytes, scan.members, scan.unchecked);
    Ok(CheckpointReport { path: at, bytes, blocks, problems, unchecked, ..Default::default() })
}

/// Verifies the file `latest`, which names the newest checkpoint, in the checkpoint directory
/// `path`. Adds a problem if `latest` is damaged, a warning if it does not name the newest step,
/// and a note if it is missing. `steps` are sorted, newest first.
fn verify_latest(path: &Path, steps: &[u64], report: &mut VerifyReport) {
    match (
        step_directories::find_latest_checkpoint(path).and_then(|_| step_directories::read_latest_step(path)),
        steps.first(),
    ) {
        (Ok(Some(step)), Some(&newest)) if step < newest => report.warnings.push(format!(
            "`latest` names {}, but {} is newer: a save was interrupted after its checkpoint was complete",
            step_directories::step_dir_name(step),
            step_directories::step_dir_name(newest)
        )),
        (Ok(Some(_)), _) => {}
        (Ok(None), _) => report.notes.push("no `latest`; the newest checkpoint is used".into()),
        (Err(e), _) => report.problems.push(convert_error_to_damage(LATEST_FILE, e)),
    }
}
