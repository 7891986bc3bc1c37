//! `launch ps`: running and past runs.
use super::plan::table;
use crate::{
    agent::times::now_ms,
    cli::PsArgs,
    error::{Failure, Kind},
    report::{clean, took},
    runs::{self, Run, State, Wanted},
};
use serde_json::{Value, json};
use std::path::Path;

/// Past runs that are shown unless all are asked for.
const PAST: usize = 20;

/// Shows the runs; the exit code.
pub(crate) fn run(args: &PsArgs, json: bool) -> u8 {
    let mut runs = runs::list(Path::new(&std::path::absolute(".").unwrap_or_default()));
    if !args.all {
        let mut past = 0;
        runs.retain(|run| {
            past += usize::from(run.state != State::Running);
            run.state == State::Running || past <= PAST
        });
    }
    if json {
        let all: Vec<Value> = runs.iter().map(as_json).collect();
        return super::show(&format!("{}\n", Value::from(all)));
    }
    if runs.is_empty() {
        crate::report::plain::say("there are no runs\n");
        return contract::exit::DONE;
    }
    super::show(&rows(&runs, now_ms()))
}

fn as_json(run: &Run) -> Value {
    let e = &run.entry;
    let (code, seconds) = match run.state {
        State::Ended(code, seconds) => (Some(code), Some(seconds)),
        _ => (None, None),
    };
    json!({
        "run": e.run, "name": e.name, "state": word(run.state), "exit_code": code, "seconds": seconds, "step": run.step,
        "world": e.world, "began_ms": e.began_ms, "host": e.by.host, "pid": e.by.pid, "run_dir": e.run_dir, "command": e.command,
    })
}

fn word(state: State) -> &'static str {
    match state {
        State::Running => "running",
        State::Ended(0, _) => "done",
        State::Ended(130 | 143, _) => "stopped",
        State::Ended(..) => "failed",
        State::Elsewhere => "elsewhere",
        State::Lost => "lost",
    }
}

/// A table of runs.
pub(super) fn rows(runs: &[Run], now: u64) -> String {
    let head = ["run", "job", "state", "workers", "step", "began", "took", "host", "files"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for run in runs {
        let e = &run.entry;
        let since = now.saturating_sub(e.began_ms) as f64 / 1000.0;
        let lasted = match run.state {
            State::Running => took(since),
            State::Ended(_, seconds) => took(seconds),
            State::Elsewhere | State::Lost => "-".to_owned(),
        };
        let row = [
            e.run.clone(),
            e.name.clone(),
            word(run.state).to_owned(),
            e.world.to_string(),
            run.step.map_or_else(|| "-".to_owned(), |step| step.to_string()),
            ago(since),
            lasted,
            e.by.host.clone(),
            e.run_dir.display().to_string(),
        ];
        rows.push(row.iter().map(|cell| clean(cell)).collect());
    }
    table(&rows)
}

fn ago(seconds: f64) -> String {
    match seconds as u64 {
        s @ 0..120 => format!("{s} s ago"),
        s @ 120..7200 => format!("{} min ago", s / 60),
        s @ 7200..172_800 => format!("{} h ago", s / 3600),
        s => format!("{} days ago", s / 86_400),
    }
}

/// The run that a command means: a run directory, or what [`runs::choose`] makes of the word.
pub(super) fn meant(asked: Option<&str>, wanted: Wanted) -> Result<Run, Failure> {
    let by_path = |text: &&str| text.contains('/') || *text == "." || *text == "..";
    if let Some(directory) = asked.filter(by_path) {
        let found = std::path::absolute(directory).ok().and_then(|d| runs::in_directory(&d));
        let failure = || Failure::new(Kind::Usage, format!("`{directory}` is not the directory of a run"));
        return found.ok_or_else(failure);
    }
    let all = runs::list(&std::path::absolute(".").unwrap_or_default());
    match runs::choose(&all, asked, wanted) {
        Ok(run) => Ok(run.clone()),
        Err((why, could_be)) => {
            let could_be: Vec<Run> = could_be.into_iter().cloned().collect();
            let failure = Failure::new(Kind::Usage, why);
            Err(match could_be.len() {
                0 => failure.hint("`launch ps` shows the runs"),
                _ => failure.hint(format!("it could be\n{}", rows(&could_be, now_ms()).trim_end())),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_for_people() {
        let said = [0.0, 119.9, 120.0, 7199.0, 7200.0, 172_800.0].map(ago);
        assert_eq!(said, ["0 s ago", "119 s ago", "2 min ago", "119 min ago", "2 h ago", "2 days ago"]);
        let words =
            [State::Running, State::Ended(0, 1.0), State::Ended(143, 1.0), State::Ended(1, 1.0), State::Lost]
                .map(word);
        assert_eq!(words, ["running", "done", "stopped", "failed", "lost"]);
    }
}
