//! `launch run`: prepares a job and hands it to the controller.
use super::prepare::{Prepared, prepare};
use crate::{cli::RunArgs, controller, error::Failure, report::plain};
use contract::{
    Problem,
    event::Event,
    ids::RunId,
    judge::{Finding, TrainJudge},
    problem::Place,
};
use std::{
    hash::{BuildHasher, RandomState},
    time::{Duration, Instant, SystemTime},
};

/// Runs the job; the exit code. `typed` is the whole command line.
pub(crate) fn run(args: &RunArgs, json: bool, typed: Vec<String>, judge: &dyn TrainJudge) -> u8 {
    let began = Instant::now();
    let outcome = match args.dry_run {
        true => super::plan::dry_run(&args.job, json, judge),
        false => start(args, json, typed, judge),
    };
    outcome.unwrap_or_else(|failure| {
        if json && !args.dry_run {
            end_events(&failure, began.elapsed());
        }
        super::fail(&failure)
    })
}

fn start(args: &RunArgs, json: bool, typed: Vec<String>, judge: &dyn TrainJudge) -> Result<u8, Failure> {
    let run = new_run_id(SystemTime::now(), random());
    let Prepared { mut plan, warnings, .. } = prepare(&args.job, &run, judge)?;
    // The controller tells them, so that they are in the run's journal too.
    plan.warnings = warnings.into_iter().map(located).collect();
    Ok(controller::run(plan, controller::Options { json, command: typed }))
}

/// A warning as a finding that still says where it was written.
fn located(problem: Problem) -> Finding {
    let path = match &problem.place {
        Place::Line { file, line, column, .. } => format!("{file}:{line}:{column}"),
        Place::File { file } => file.clone(),
        Place::Override { text, .. } => format!("--set {text}"),
    };
    Finding { path, message: problem.message, hint: problem.hint }
}

/// `20261120-223145-7f3a`: UTC and 16 random bits.
fn new_run_id(now: SystemTime, random: u16) -> RunId {
    let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (year, month, day) = date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    RunId(format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}-{random:04x}"))
}

/// Year, month and day of a number of days since 1970-01-01.
fn date(mut days: u64) -> (u64, u64, u64) {
    let leap = |y: u64| (y.is_multiple_of(4) && !y.is_multiple_of(100)) || y.is_multiple_of(400);
    let mut year = 1970;
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = if leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

/// Bits that differ from process to process.
fn random() -> u16 {
    RandomState::new().hash_one(std::process::id()) as u16
}

/// `--json`: a run that never began has its events too.
fn end_events(failure: &Failure, took: Duration) {
    let cause = Event::Failure {
        rank: None,
        host: String::new(),
        pid: 0,
        cause: failure.line(),
        log: None,
        tail: Vec::new(),
    };
    let done = Event::Done { exit_code: failure.kind.exit_code(), step: None, seconds: took.as_secs_f64() };
    for event in [cause, done] {
        if let Ok(line) = serde_json::to_string(&event) {
            // The exit code says the same when nobody reads.
            _ = plain::data(&format!("{line}\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_ids_sort_by_time() {
        let at = |seconds| new_run_id(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds), 0xabc).0;
        assert_eq!(at(0), "19700101-000000-0abc");
        assert_eq!(at(951_782_400), "20000229-000000-0abc");
        assert_eq!(at(1_795_215_105), "20261120-225145-0abc");
        assert_eq!(at(4_102_444_799), "20991231-235959-0abc");
    }
}
