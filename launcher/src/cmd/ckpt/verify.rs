//! `launch ckpt verify`: checks every byte of checkpoints.
use super::output::{report_to_json, write_stderr_line};
use crate::cmd::output::{print_json, print_text};
use ckpt::{CheckpointReport, VerifyReport};
use clap::Args;
use diagnostic::quantity::{format_bytes, format_count};
use diagnostic::terminal_text::filter_line;
use protocol::exit;
use std::path::PathBuf;

/// The largest number of files without checksums that a message names.
const MAX_LISTED_FILES: usize = 4;

/// Arguments of `launch ckpt verify`.
#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Checkpoint, or directory of checkpoints
    #[arg(value_name = "CHECKPOINT")]
    pub(super) path: PathBuf,
    /// Also search for NaN and infinite values, and warn about them
    #[arg(long)]
    pub(super) values: bool,
    /// Also exit with code 4 if there are tensor files without checksums, or warnings, such as an
    /// outdated `latest`, a missing RNG state or NaN values
    #[arg(long)]
    pub(super) strict: bool,
}

/// Runs `launch ckpt verify`: verifies the checkpoint at the given path, or all checkpoints in the
/// directory at that path, and prints the result.
///
/// With `--values`, NaN and infinite values are counted. Returns exit code 4 if a checkpoint is
/// damaged or, with `--strict`, if there are warnings or files without checksums.
pub(super) fn run(args: VerifyArgs, json: bool) -> diagnostic::Result<u8> {
    let VerifyArgs { path, values, strict } = args;
    let report = ckpt::verify_checkpoints_with(&path, ckpt::VerifyOptions { values })?;
    let unchecked = list_unchecked_files(&report);
    let is_clean = report.warnings.is_empty() && unchecked.is_empty();
    let sound = report.is_sound() && (is_clean || !strict);
    if json {
        let mut value = report_to_json(&report);
        value["sound"] = sound.into();
        print_json(&value)?;
    } else {
        print_text(&format_verify_report(&report))?;
    }
    for warning in &report.warnings {
        let level = if strict { "error" } else { "warning" };
        write_stderr_line(format_args!("{level}: {warning}"));
    }
    for line in &unchecked {
        let level = if strict { "error" } else { "note" };
        write_stderr_line(format_args!("{level}: {line}"));
    }
    for note in &report.notes {
        write_stderr_line(format_args!("note: {note}"));
    }
    Ok(if sound { exit::DONE } else { exit::CHECKPOINT })
}

/// Formats a line about each checkpoint in `report` that has files without checksums, with the
/// number and the first names of these files.
pub(super) fn list_unchecked_files(report: &VerifyReport) -> Vec<String> {
    let line = |c: &CheckpointReport| {
        let (path, files) = (c.path.display(), format_count(c.unchecked.len(), "file"));
        let more = if c.unchecked.len() > MAX_LISTED_FILES { ", …" } else { "" };
        let names: Vec<&str> = c.unchecked.iter().take(MAX_LISTED_FILES).map(String::as_str).collect();
        let names = filter_line(&names.join(", "));
        format!("{path}: {files} without checksums, whose content was not verified: {names}{more}")
    };
    report.checkpoints.iter().filter(|c| !c.unchecked.is_empty()).map(line).collect()
}

/// Formats the result of verifying checkpoints as text, with one line for each checkpoint and each
/// problem.
pub(super) fn format_verify_report(report: &VerifyReport) -> String {
    let mut text = String::new();
    for c in &report.checkpoints {
        let (path, size) = (c.path.display(), format_bytes(c.bytes));
        text.push_str(&match c.problems.len() {
            0 if !c.elsewhere.is_empty() => {
                let remote = format_count(c.elsewhere.len(), "file");
                format!("partial  {path}  {} blocks, {size} sound; {remote} on other hosts\n", c.blocks)
            }
            0 => format!("sound    {path}  {} blocks, {size}\n", c.blocks),
            n => format!("DAMAGED  {path}  {}\n", format_count(n, "problem")),
        });
        for problem in &c.problems {
            text.push_str(&format!("         {}\n", filter_line(&problem.to_string())));
        }
    }
    for problem in &report.problems {
        let (path, problem) = (report.path.display(), filter_line(&problem.to_string()));
        text.push_str(&format!("DAMAGED  {path}\n         {problem}\n"));
    }
    text
}
