//! The paths of the dumps of torch's flight recorder.
use jobspec::ids::Rank;
use std::path::{Path, PathBuf};

/// Returns the path of the dump that torch writes for the rank `rank`, next to its log `log`. torch
/// appends the rank to the text that [`build_dump_prefix`] returns.
pub(super) fn build_dump_path(log: &Path, attempt: u32, rank: Rank) -> PathBuf {
    log.with_file_name(format!("{}{rank}", format_dump_prefix(attempt)))
}

/// Returns the text to which torch appends the rank to get the path of the dump of its flight
/// recorder, next to the log `log`.
pub(super) fn build_dump_prefix(log: &Path, attempt: u32) -> PathBuf {
    log.with_file_name(format_dump_prefix(attempt))
}

/// Formats the first part of the name of the dumps of an attempt.
fn format_dump_prefix(attempt: u32) -> String {
    format!("flight-recorder-{attempt}-")
}
