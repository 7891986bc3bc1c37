//! `launch ps`: active and past runs; and [`resolve_run`], which finds the run that a command
//! names.
use super::plan::table;
use crate::{
    agent::log_times::unix_time_ms,
    cli::PsArgs,
    report::{format_duration, strip_control},
    runs::{self, Run, RunFilter, RunState},
};
use diagnostic::{Diagnostic, codes::command};
use serde_json::{Value, json};

/// Past runs that are shown without `--all`.
const MAX_PAST_RUNS: usize = 20;

/// Shows the runs.
pub(crate) fn run(args: &PsArgs, as_json: bool) -> diagnostic::Result<u8> {
    let mut runs = runs::list(&std::path::absolute(".").unwrap_or_default());
    if !args.show_all {
        let mut past = 0;
        runs.retain(|run| {
            past += usize::from(run.state != RunState::Running);
            run.state == RunState::Running || past <= MAX_PAST_RUNS
        });
    }
    if as_json {
        let runs: Vec<Value> = runs.iter().map(run_json).collect();
        return super::print(&format!("{}\n", Value::from(runs)));
    }
    if runs.is_empty() {
        crate::report::plain::write_message("there are no runs\n");
        return Ok(contract::exit::DONE);
    }
    super::print(&run_table(&runs, unix_time_ms()))
}

fn run_json(run: &Run) -> Value {
    let r = &run.record;
    let (code, seconds) = match run.state {
        RunState::Ended(code, seconds) => (Some(code), Some(seconds)),
        _ => (None, None),
    };
    json!({
        "run": r.run, "name": r.name, "state": state_name(run.state), "exit_code": code, "seconds": seconds,
        "step": run.step, "world": r.world, "began_ms": r.began_ms, "host": r.controller.host,
        "pid": r.controller.pid, "run_dir": r.run_dir, "command": r.command,
    })
}

fn state_name(state: RunState) -> &'static str {
    match state {
        RunState::Running => "running",
        RunState::Ended(0, _) => "done",
        RunState::Ended(130 | 143, _) => "stopped",
        RunState::Ended(..) => "failed",
        RunState::Elsewhere => "elsewhere",
        RunState::Lost => "lost",
    }
}

/// The runs as a table. `now_ms` is the current time, milliseconds since 1970.
pub(super) fn run_table(runs: &[Run], now_ms: u64) -> String {
    let head = ["run", "job", "state", "workers", "step", "began", "took", "host", "files"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for run in runs {
        let record = &run.record;
        let age = now_ms.saturating_sub(record.began_ms) as f64 / 1000.0;
        let duration = match run.state {
            RunState::Running => format_duration(age),
            RunState::Ended(_, seconds) => format_duration(seconds),
            RunState::Elsewhere | RunState::Lost => "-".to_owned(),
        };
        let row = [
            record.run.clone(),
            record.name.clone(),
            state_name(run.state).to_owned(),
            record.world.to_string(),
            run.step.map_or_else(|| "-".to_owned(), |step| step.to_string()),
            format_age(age),
            duration,
            record.controller.host.clone(),
            record.run_dir.display().to_string(),
        ];
        rows.push(row.iter().map(|cell| strip_control(cell)).collect());
    }
    table(&rows)
}

fn format_age(seconds: f64) -> String {
    match seconds as u64 {
        s @ 0..120 => format!("{s} s ago"),
        s @ 120..7200 => format!("{} min ago", s / 60),
        s @ 7200..172_800 => format!("{} h ago", s / 3600),
        s => format!("{} days ago", s / 86_400),
    }
}

/// The run that the command line names: by its directory, or as [`runs::select_run`] resolves
/// names.
pub(super) fn resolve_run(name: Option<&str>, filter: RunFilter) -> diagnostic::Result<Run> {
    let is_path = |text: &&str| text.contains('/') || *text == "." || *text == "..";
    if let Some(directory) = name.filter(is_path) {
        let run = std::path::absolute(directory).ok().and_then(|d| runs::in_directory(&d));
        return run.ok_or_else(|| {
            let message = format!("`{directory}` is not a run directory");
            Diagnostic::error(command::RUN_DIRECTORY_INVALID, message)
                .with_subject(directory)
                .with_help("`launch ps` shows the directories of runs in the column `files`")
        });
    }
    let runs = runs::list(&std::path::absolute(".").unwrap_or_default());
    match runs::select_run(&runs, name, filter) {
        Ok(run) => Ok(run.clone()),
        Err(error) => {
            let candidates: Vec<Run> = error.candidates().iter().map(|run| (*run).clone()).collect();
            let help = match candidates.is_empty() {
                true => "`launch ps` lists the runs".to_owned(),
                false => format!("candidates:\n{}", run_table(&candidates, unix_time_ms()).trim_end()),
            };
            Err(Diagnostic::from(error).with_help(help))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_and_states_are_readable() {
        let ages = [0.0, 119.9, 120.0, 7199.0, 7200.0, 172_800.0].map(format_age);
        assert_eq!(ages, ["0 s ago", "119 s ago", "2 min ago", "119 min ago", "2 h ago", "2 days ago"]);
        let states = [
            RunState::Running,
            RunState::Ended(0, 1.0),
            RunState::Ended(143, 1.0),
            RunState::Ended(1, 1.0),
            RunState::Lost,
        ];
        assert_eq!(states.map(state_name), ["running", "done", "stopped", "failed", "lost"]);
    }
}
