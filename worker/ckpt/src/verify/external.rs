//! Verifies checkpoints of other programs against the CRC-32s in their files, and against the
//! BLAKE3 hashes that launch recorded if it wrote the files.
use super::digests::{RecordedFileResults, verify_recorded_files};
use super::file_scan;
use super::report::CheckpointReport;
use crate::catalog::{ExternalCheckpoint, StoredFile, TensorSource, TrainingStatePart, verify_all_spans};
use crate::error::{Damage, DamageReason, MissingPart, Result};
use crate::tensor::TensorRole;
use std::collections::BTreeSet;

/// Verifies the checksums of every file of an open checkpoint, including files without tensors.
/// Returns the report, which also lists incomplete parts as problems, and the warnings.
pub(crate) fn verify_opened_checkpoint(
    checkpoint: &ExternalCheckpoint,
) -> Result<(CheckpointReport, Vec<String>)> {
    let recorded = verify_records(checkpoint)?;
    let is_verified = |f: &StoredFile| recorded.is_verified(&f.directory().path().join(&f.name));
    let (mut bytes, mut blocks, mut problems) =
        verify_all_spans(&checkpoint.store, &checkpoint.entries, is_verified)?;
    (bytes, blocks) = (bytes.saturating_add(recorded.bytes), blocks + recorded.count_verified());
    let files = checkpoint.store.files.iter();
    let mut unchecked: Vec<String> =
        files.filter(|f| !f.has_checksums() && !is_verified(f)).map(|f| f.name.clone()).collect();
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
    for scan in scan_other_files(checkpoint, &recorded)? {
        bytes = bytes.saturating_add(scan.bytes);
        blocks += scan.members;
        problems.extend(scan.problems);
        unchecked.extend(scan.unchecked);
    }
    add_record_problems(&mut problems, recorded.problems);
    let mut warnings = checkpoint.facts().warnings.clone();
    warnings.extend(recorded.warnings);
    // if some ranks have an RNG state, all of them should have one
    let absent =
        checkpoint.facts().missing.iter().filter(|m| matches!(m, TrainingStatePart::RankRngState { .. }));
    warnings.extend(absent.map(|m| format!("the {m} is missing")));
    let report = CheckpointReport {
        path: checkpoint.path().to_owned(),
        step: checkpoint.facts().state.step,
        bytes,
        blocks,
        problems,
        unchecked,
        ..Default::default()
    };
    Ok((report, warnings))
}

/// Verifies a checkpoint's files against the hashes in `gathered.json` and `converted.json`, the
/// records of files that launch itself wrote.
fn verify_records(checkpoint: &ExternalCheckpoint) -> Result<RecordedFileResults> {
    let names: BTreeSet<&str> = checkpoint.store.files.iter().map(|f| f.name.as_str()).collect();
    let is_due = |name: &str| !checkpoint.is_single_file || names.contains(name);
    verify_recorded_files(&[checkpoint.path(), checkpoint.facts().root.as_path()].into(), &is_due)
}

/// Appends the damage that recorded hashes revealed (`recorded`) to `problems`, except for files
/// whose names `problems` already contains.
pub(super) fn add_record_problems(problems: &mut Vec<Damage>, recorded: Vec<Damage>) {
    let file_name = |name: &str| name.rsplit('/').next().unwrap_or_default().to_owned();
    let known: BTreeSet<String> = problems.iter().map(|p| file_name(&p.file)).collect();
    problems.extend(recorded.into_iter().filter(|p| !known.contains(&file_name(&p.file))));
}

/// Scans the checkpoint's files without model tensors, such as random generator states, for wrong
/// CRC-32s and invalid safetensors headers. Returns one report per scanned directory, and no report
/// for a single file.
fn scan_other_files(
    checkpoint: &ExternalCheckpoint,
    recorded: &RecordedFileResults,
) -> Result<Vec<file_scan::ScanReport>> {
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
        let known: BTreeSet<String> = checkpoint.store.files.iter().filter_map(name).collect();
        let is_known = |name: &str| known.contains(name) || recorded.is_verified(&path.join(name));
        scans.push(file_scan::check_file_contents_in_directory(&path, &is_known, depth)?);
    }
    Ok(scans)
}
