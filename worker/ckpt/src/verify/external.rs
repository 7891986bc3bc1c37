//! Verifies external checkpoints against the CRC-32s in their files.
use super::report::CheckpointReport;
use super::scan;
use crate::catalog::{ExternalCheckpoint, StatePart, StoredFile, TensorSource};
use crate::error::{Damage, DamageReason, MissingPart, Result};
use crate::tensor::TensorRole;

/// Verifies the CRC-32s of every file, including files without tensors. Returns the report,
/// which also lists incomplete parts as problems, and the warnings.
pub(crate) fn verify_opened_checkpoint(
    checkpoint: &ExternalCheckpoint,
) -> Result<(CheckpointReport, Vec<String>)> {
    let (mut bytes, mut blocks, mut problems) =
        checkpoint.store.verify_all_spans(|inside| checkpoint.list_tensors_with(inside))?;
    let lost = |name: &String| Damage {
        file: checkpoint.facts().tag.clone(),
        block: None,
        tensors: vec![format!("{}/{name}", TensorRole::Weight)],
        reason: DamageReason::PartMissing(MissingPart::Weights(vec![name.clone()])),
    };
    problems.extend(checkpoint.facts().lost.iter().map(lost));
    let file = || checkpoint.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let incomplete = |detail: &String| Damage::for_file(file(), detail.clone());
    problems.extend(checkpoint.facts().incomplete.iter().map(incomplete));
    for scan in scan_other_files(checkpoint)? {
        bytes += scan.bytes;
        blocks += scan.members;
        problems.extend(scan.problems);
    }
    let mut warnings = checkpoint.facts().warnings.clone();
    // if some ranks have an RNG state, all of them should have one
    let absent = checkpoint.facts().missing.iter().filter(|m| matches!(m, StatePart::RankRngState { .. }));
    warnings.extend(absent.map(|m| format!("the {m} is missing")));
    let report = CheckpointReport {
        path: checkpoint.path().to_owned(),
        step: checkpoint.facts().state.step,
        bytes,
        blocks,
        problems,
        ..Default::default()
    };
    Ok((report, warnings))
}

/// Checks the files that hold no tensors of the checkpoint, such as RNG states and schedulers.
/// Returns one report per scanned directory, and no report for a single file.
fn scan_other_files(checkpoint: &ExternalCheckpoint) -> Result<Vec<scan::ScanReport>> {
    if checkpoint.is_single_file {
        return Ok(Vec::new());
    }
    let tag = checkpoint.store.files.first().map(|f| f.directory().path().to_owned());
    let mut paths = vec![(checkpoint.facts().root.clone(), 0)];
    if let Some(tag) = tag.filter(|tag| *tag != checkpoint.facts().root) {
        paths.push((tag, 3));
    }
    let mut scans = Vec::new();
    for (path, depth) in paths {
        let name = |f: &StoredFile| (f.directory().path() == path).then(|| f.name.clone());
        let known = checkpoint.store.files.iter().filter_map(name).collect();
        scans.push(scan::check_directory_files(&path, &known, depth)?);
    }
    Ok(scans)
}
