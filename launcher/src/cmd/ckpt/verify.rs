//! `launch ckpt verify`: checks every byte of checkpoints.
use super::output::{format_count, log_line, print_result};
use crate::format::replace_all_control_characters;
use ckpt::{VerifyReport, format_bytes};
use clap::Args;
use protocol::exit;
use serde_json::Value;
use std::path::PathBuf;

/// Arguments of `launch ckpt verify`.
#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Checkpoint, or directory of checkpoints
    #[arg(value_name = "CHECKPOINT")]
    pub(super) path: PathBuf,
    /// Also search for NaN and infinite values, and warn about them
    #[arg(long)]
    pub(super) values: bool,
    /// Also exit with code 4 on warnings, such as an outdated `latest`, a missing RNG state or NaN
    /// values
    #[arg(long)]
    pub(super) strict: bool,
}

/// Runs `launch ckpt verify`: verifies the checkpoint, or all checkpoints in the directory, that
/// `args` name and prints the result.
///
/// With `--values`, NaN and infinite values are counted. Returns exit code 4 if a checkpoint is
/// damaged or, with `--strict`, if there are warnings.
pub(super) fn run(args: VerifyArgs, json: bool) -> diagnostic::Result<u8> {
    let VerifyArgs { path, values, strict } = args;
    let report = ckpt::verify_checkpoints_with(&path, ckpt::VerifyOptions { values })?;
    let sound = report.is_sound() && (!strict || report.warnings.is_empty());
    if json {
        let mut value = serde_json::to_value(&report).unwrap_or(Value::Null);
        value["sound"] = sound.into();
        print_result(&format!("{value}\n"))?;
    } else {
        print_result(&format_verify_report(&report))?;
    }
    for warning in &report.warnings {
        let level = if strict { "error" } else { "warning" };
        log_line(format_args!("{level}: {}", replace_all_control_characters(warning)));
    }
    for note in &report.notes {
        log_line(format_args!("note: {}", replace_all_control_characters(note)));
    }
    Ok(if sound { exit::DONE } else { exit::CHECKPOINT })
}

/// Formats the report of a verification as text, with one line for each checkpoint and each
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
        text.extend(
            c.problems
                .iter()
                .map(|p| format!("         {}\n", replace_all_control_characters(&p.to_string()))),
        );
    }
    for problem in &report.problems {
        let (path, problem) = (report.path.display(), replace_all_control_characters(&problem.to_string()));
        text.push_str(&format!("DAMAGED  {path}\n         {problem}\n"));
    }
    text
}
