//! [`open_checkpoint`]: opens the checkpoint that a command names.
use super::output::write_stderr_line;
use ckpt::{NewestCheckpoint, OpenedCheckpoint};
use std::path::Path;

/// Opens the checkpoint at a path or, if the path is a directory of checkpoints, the newest one
/// that opens without errors. Logs the chosen checkpoint, its warnings, and newer checkpoints that
/// are unusable.
pub(super) fn open_checkpoint(path: &Path) -> diagnostic::Result<OpenedCheckpoint> {
    let found = ckpt::open_checkpoint(path)?;
    match &found {
        OpenedCheckpoint::Native(newest) => {
            let NewestCheckpoint { checkpoint, skipped } = &**newest;
            for error in skipped {
                write_stderr_line(format_args!("warning: skipped an unusable checkpoint: {error}"));
            }
            if checkpoint.path() != path {
                write_stderr_line(format_args!("using {}", checkpoint.path().display()));
            }
        }
        OpenedCheckpoint::External(external) => {
            for warning in external.facts().incomplete.iter().chain(&external.facts().warnings) {
                write_stderr_line(format_args!("warning: {warning}"));
            }
            for notice in &external.facts().notices {
                write_stderr_line(format_args!("note: {notice}"));
            }
        }
    }
    Ok(found)
}
