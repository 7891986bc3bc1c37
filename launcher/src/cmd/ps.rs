//! `launch ps`: lists active and past runs. [`resolve_run`] finds the run that a command names.
use super::{
    context::CommandContext,
    output::{output_error, print_text},
};
use crate::{
    clock::read_unix_time_ms,
    format::format_table,
    report::command_output,
    runs::{self, Run, RunFilter, RunLossReason, RunState},
};
use clap::Args;
use diagnostic::{Diagnostic, codes::command, quantity::format_duration, terminal_text::filter_line};
use serde_json::{Value, json};
use std::io;

/// The largest number of past runs that `launch ps` shows without `--all`.
const MAX_PAST_RUNS: usize = 20;

/// Arguments of `launch ps`.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Show all past runs instead of the newest 20
    #[arg(long = "all", short = 'a')]
    show_all: bool,
}

/// Runs `launch ps`: prints a table of the user's active and past runs.
pub(crate) fn run(args: PsArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let mut runs = runs::list_runs(&std::path::absolute(".").unwrap_or_default());
    if !args.show_all {
        let mut past = 0;
        runs.retain(|run| {
            let is_past = !matches!(run.state, RunState::Running | RunState::Unattended);
            past += usize::from(is_past);
            !is_past || past <= MAX_PAST_RUNS
        });
    }
    if context.format.json {
        write_json_list(runs.iter().map(run_to_json)).map_err(|error| output_error(&error))?;
        return Ok(protocol::exit::DONE);
    }
    if runs.is_empty() {
        command_output::write_message("there are no runs\n");
        return Ok(protocol::exit::DONE);
    }
    print_text(&format_run_table(&runs, read_unix_time_ms()))
}

/// Writes `values` to stdout as a JSON list on one line. Only one of the values is in memory at a
/// time.
fn write_json_list(values: impl Iterator<Item = Value>) -> io::Result<()> {
    let mut separator = "[";
    for value in values {
        command_output::write_json(&format!("{separator}{value}"))?;
        separator = ",";
    }
    command_output::write_json(if separator == "[" { "[]\n" } else { "]\n" })
}

/// Returns a run as the JSON object that `--json` prints.
fn run_to_json(run: &Run) -> Value {
    let r = &run.record;
    let (code, seconds) = match run.state {
        RunState::Ended(code, seconds) => (Some(code), Some(seconds)),
        _ => (None, None),
    };
    let loss_reason = match run.state {
        RunState::Lost(RunLossReason::ControllerDied) => Some("controller-died"),
        RunState::Lost(RunLossReason::HostRebooted) => Some("host-rebooted"),
        _ => None,
    };
    json!({
        "run": r.run, "name": r.name, "state": format_state(run.state), "loss_reason": loss_reason,
        "exit_code": code, "seconds": seconds,
        "step": run.step, "world": r.world, "began_ms": r.began_ms, "host": r.controller.host,
        "pid": r.controller.pid, "run_dir": r.run_dir, "command": runs::read_command(r),
    })
}

/// Returns the word for the state of a run: `running`, `done`, `stopped`, `failed`,
/// `unattended`, `elsewhere` or `lost`. Exit codes 130 and 143 mean that a signal stopped the run.
pub(super) fn format_state(state: RunState) -> &'static str {
    match state {
        RunState::Running => "running",
        RunState::Ended(0, _) => "done",
        RunState::Ended(130 | 143, _) => "stopped",
        RunState::Ended(..) => "failed",
        RunState::Unattended => "unattended",
        RunState::Elsewhere => "elsewhere",
        RunState::Lost(_) => "lost",
    }
}

/// Formats runs as a table with a row for each run. `now_ms` is the current time in milliseconds
/// since 1970.
pub(super) fn format_run_table(runs: &[Run], now_ms: u64) -> String {
    let head = ["run", "job", "state", "workers", "step", "began", "took", "host", "files"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for run in runs {
        let record = &run.record;
        let age = now_ms.saturating_sub(record.began_ms) as f64 / 1000.0;
        let duration = match run.state {
            RunState::Running | RunState::Unattended => format_duration(age),
            RunState::Ended(_, seconds) => format_duration(seconds),
            RunState::Elsewhere | RunState::Lost(_) => "-".to_owned(),
        };
        let row = [
            record.run.clone(),
            record.name.clone(),
            format_state(run.state).to_owned(),
            record.world.to_string(),
            run.step.map_or_else(|| "-".to_owned(), |step| step.to_string()),
            format_age(age),
            duration,
            record.controller.host.clone(),
            record.run_dir.display().to_string(),
        ];
        rows.push(row.iter().map(|cell| filter_line(cell)).collect());
    }
    format_table(&rows)
}

/// Formats how long ago a run began, given in seconds, in the largest fitting unit: `5 min ago`.
fn format_age(seconds: f64) -> String {
    match seconds as u64 {
        s @ 0..120 => format!("{s} s ago"),
        s @ 120..7200 => format!("{} min ago", s / 60),
        s @ 7200..172_800 => format!("{} h ago", s / 3600),
        s => format!("{} days ago", s / 86_400),
    }
}

/// Finds the run that a command-line argument selects by run directory, run ID or name, and fails
/// unless exactly one run matches.
///
/// A `name` with a `/` is the path of a run directory. Any other `name`, or `None`, and the
/// `filter` are passed to [`runs::select_run`]. If several runs match, the help text of the error
/// lists them.
pub(super) fn resolve_run(name: Option<&str>, filter: RunFilter) -> diagnostic::Result<Run> {
    let is_path = |text: &&str| text.contains('/') || *text == "." || *text == "..";
    if let Some(directory) = name.filter(is_path) {
        let run = std::path::absolute(directory).ok().and_then(|d| runs::load_run_in_directory(&d));
        return run.ok_or_else(|| {
            let message = format!("`{directory}` is not a run directory");
            Diagnostic::error(command::RUN_DIRECTORY_INVALID, message)
                .with_subject(directory)
                .with_help("`launch ps` shows the directories of runs in the column `files`")
        });
    }
    let runs = runs::list_runs(&std::path::absolute(".").unwrap_or_default());
    match runs::select_run(&runs, name, filter) {
        Ok(run) => Ok(run.clone()),
        Err(error) => {
            let candidates: Vec<Run> = error.ambiguous_runs().iter().map(|run| (*run).clone()).collect();
            let help = match candidates.is_empty() {
                true => "`launch ps` lists the runs".to_owned(),
                false => {
                    format!("candidates:\n{}", format_run_table(&candidates, read_unix_time_ms()).trim_end())
                }
            };
            Err(Diagnostic::from(error).with_help(help))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_and_states_of_runs_are_formatted() {
        let ages = [0.0, 119.9, 120.0, 7199.0, 7200.0, 172_800.0].map(format_age);
        assert_eq!(ages, ["0 s ago", "119 s ago", "2 min ago", "119 min ago", "2 h ago", "2 days ago"]);
        let states = [
            RunState::Running,
            RunState::Ended(0, 1.0),
            RunState::Ended(143, 1.0),
            RunState::Ended(1, 1.0),
            RunState::Unattended,
            RunState::Lost(RunLossReason::HostRebooted),
        ];
        assert_eq!(states.map(format_state), ["running", "done", "stopped", "failed", "unattended", "lost"]);
    }
}
