//! Opens a checkpoint of another program only if every byte is intact and all values are finite.
use super::repair_loss::format_reason;
use crate::catalog::ExternalCheckpoint;
use crate::open::{diagnose_directory, open_external_checkpoint};
use crate::verify::{find_non_finite_values, verify_opened_checkpoint};
use std::path::Path;

/// Opens the checkpoint of another program at `path` if every byte is intact and all values are
/// finite. Otherwise, returns the problems.
///
/// # Errors
/// Fails if the checkpoint isn't sound, with the list of reasons as lines for the user.
pub(super) fn open_if_sound(path: &Path) -> std::result::Result<ExternalCheckpoint, Vec<String>> {
    let line = |e: crate::error::CkptError| vec![format_reason(&e)];
    let Some(found) = open_external_checkpoint(path).map_err(line)? else {
        return Err(vec![diagnose_directory(path).to_string()]);
    };
    let (report, _) = verify_opened_checkpoint(&found).map_err(line)?;
    if !report.problems.is_empty() {
        return Err(report.problems.iter().map(ToString::to_string).collect());
    }
    match find_non_finite_values(&found).map_err(line)? {
        lines if lines.is_empty() => Ok(found),
        lines => Err(lines),
    }
}
