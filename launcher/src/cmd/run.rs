//! `launch run`: prepares a job and hands it to the controller.
use super::prepare::{Asked, Prepared, prepare};
use crate::{
    cli::RunArgs,
    controller,
    error::{Failure, Kind},
    report::plain,
};
use contract::{
    Problem, Source,
    event::Event,
    ids::RunId,
    judge::{Finding, TrainJudge},
    problem::Place,
};
use std::{
    hash::{BuildHasher, RandomState},
    path::Path,
    time::{Duration, Instant, SystemTime},
};

/// Runs the job; the exit code. `typed` is the whole command line.
pub(crate) fn run(args: &RunArgs, json: bool, typed: Vec<String>, judge: &dyn TrainJudge) -> u8 {
    let began = Instant::now();
    let outcome = asked(args).and_then(|asked| match args.dry_run {
        true => super::plan::dry_run(&asked, json, judge),
        false => start(&asked, json, typed, judge),
    });
    outcome.unwrap_or_else(|failure| {
        if json && !args.dry_run {
            end_events(&failure, began.elapsed());
        }
        super::fail(&failure)
    })
}

/// The job file, or a job of the program that was typed.
fn asked(args: &RunArgs) -> Result<Asked, Failure> {
    let set = args.set.clone();
    if let Some(job) = &args.job {
        return Ok(Asked { source: Source::File(job.clone()), set });
    }
    let words = args.command.iter().map(|word| word.to_str()).collect::<Option<Vec<_>>>();
    let words =
        words.ok_or_else(|| Failure::new(Kind::Usage, "the program's arguments aren't UTF-8 text"))?;
    let text = job_of_program(&words, args.workers.unwrap_or(1));
    Ok(Asked { source: Source::Text { name: "the command line".to_owned(), text }, set })
}

/// A job.yaml that runs a program.
fn job_of_program(words: &[&str], workers: u32) -> String {
    let quoted: Vec<String> = words.iter().map(|word| yaml(word)).collect();
    let (name, command) = (program_name(words), quoted.join(", "));
    format!(
        "name: {}\ncluster: {{workers_per_host: {workers}}}\nrun: {{command: [{command}]}}\n",
        yaml(&name)
    )
}

/// The job's name: the program's, or its script's: `python -u train.py` is `train`.
fn program_name(words: &[&str]) -> String {
    let stem = |word: &str| Path::new(word).file_stem().map(|s| s.to_string_lossy().into_owned());
    let program = words.first().and_then(|word| stem(word)).unwrap_or_default();
    let script = words.iter().skip(1).find(|word| !word.starts_with('-')).and_then(|word| stem(word));
    let interpreted = ["python", "sh", "bash"].iter().any(|i| program.starts_with(i));
    let is_script = |name: &String| name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    let name = script.filter(|name| interpreted && is_script(name)).unwrap_or(program);
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let name: String = name.chars().take(100).map(safe).collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() { "program".to_owned() } else { name.to_owned() }
}

/// Text as a double-quoted YAML scalar that is ASCII.
fn yaml(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            ' '..='~' => quoted.push(c),
            _ => quoted.push_str(&format!("\\U{:08x}", u32::from(c))),
        }
    }
    quoted + "\""
}

fn start(asked: &Asked, json: bool, typed: Vec<String>, judge: &dyn TrainJudge) -> Result<u8, Failure> {
    let run = new_run_id(SystemTime::now(), random());
    let Prepared { mut plan, warnings, secrets, .. } = prepare(asked, &run, judge)?;
    // The controller tells them, so that they are in the run's journal too.
    plan.warnings = warnings.into_iter().map(located).collect();
    Ok(controller::run(plan, controller::Options { json, command: typed, secrets }))
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
    use proptest::prelude::*;

    fn loaded(words: &[&str], workers: u32) -> contract::JobSpec {
        let text = job_of_program(words, workers);
        match contract::load(Source::Text { name: "x".to_owned(), text: text.clone() }, &[]) {
            Ok((job, _, _)) => job,
            Err(problems) => panic!("{text}: {problems:?}"),
        }
    }

    #[test]
    fn a_program_is_named_after_its_script() {
        for (words, name) in [
            (&["python", "train.py", "--lr", "1"][..], "train"),
            (&["/usr/bin/python3.11", "-u", "src/my train.py"], "python3"),
            (&["python", "-m", "package.main"], "package"),
            (&["./a.out", "x"], "a"),
            (&["sh", "-c", "echo a; exit 1"], "sh"),
            (&[".."], "program"),
            (&["-"], "program"),
        ] {
            assert_eq!(loaded(words, 1).name, name, "{words:?}");
        }
    }

    proptest! {
        #[test]
        fn any_program_is_a_job(words in proptest::collection::vec("[^\0]{0,12}", 0..4), workers in 1u32..=1024) {
            let words: Vec<&str> = std::iter::once("program").chain(words.iter().map(String::as_str)).collect();
            let job = loaded(&words, workers);
            prop_assert_eq!(job.run.command, Some(words.iter().map(|w| (*w).to_owned()).collect()));
            prop_assert_eq!(job.cluster.workers_per_host, contract::job::Count::Exactly(workers));
        }
    }

    #[test]
    fn run_ids_sort_by_time() {
        let at = |seconds| new_run_id(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds), 0xabc).0;
        assert_eq!(at(0), "19700101-000000-0abc");
        assert_eq!(at(951_782_400), "20000229-000000-0abc");
        assert_eq!(at(1_795_215_105), "20261120-225145-0abc");
        assert_eq!(at(4_102_444_799), "20991231-235959-0abc");
    }
}
