//! Builds the paths of the files (dumps) to which torch's flight recorder writes the last
//! collectives of a rank.
use jobspec::ids::Rank;
use std::path::{Path, PathBuf};

/// Returns the path of the file to which torch writes the flight recorder's dump of the rank
/// `rank`, in the directory of the rank's log `log`. torch appends the rank to the text that
/// [`build_dump_prefix`] returns.
pub(super) fn build_dump_path(log: &Path, attempt: u32, rank: Rank) -> PathBuf {
    log.with_file_name(format!("{}{rank}", format_dump_prefix(attempt)))
}

/// Returns the path of the dump of the rank `rank`, to which the user has given the prefix
/// `prefix`.
pub(super) fn build_dump_path_of_user(prefix: PathBuf, rank: Rank) -> PathBuf {
    let mut path = prefix.into_os_string();
    path.push(rank.to_string());
    path.into()
}

/// Returns the path prefix of the flight recorder's dumps in the directory of the log `log`; torch
/// appends the rank to the prefix.
pub(super) fn build_dump_prefix(log: &Path, attempt: u32) -> PathBuf {
    log.with_file_name(format_dump_prefix(attempt))
}

/// Returns the file name, without the final rank, of the flight recorder's dumps in an attempt
/// (start of all workers), such as `flight-recorder-0-` for attempt 0.
fn format_dump_prefix(attempt: u32) -> String {
    format!("flight-recorder-{attempt}-")
}
