//! `launch run`: prepares a job and hands it to the controller.
use super::prepare::{Asked, Prepared, prepare};
use crate::{
    cli::RunArgs,
    controller::{self, Starter},
    error::{Failure, Kind},
    report::plain,
    transport::detached::{self, Start},
};
use contract::{
    Problem, Source,
    control::ExitStatus,
    event::Event,
    ids::RunId,
    preflight::{Finding, TrainJudge},
    problem::{Place, Severity, render},
};
use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    hash::{BuildHasher, RandomState},
    io,
    path::Path,
    time::{Duration, Instant, SystemTime},
};

/// Runs the job; the exit code. `typed` is the whole command line.
pub(crate) fn run(args: &RunArgs, json: bool, typed: Vec<String>, judge: &dyn TrainJudge) -> u8 {
    let began = Instant::now();
    let outcome = asked(args).and_then(|asked| match args.dry_run {
        true => super::plan::dry_run(&asked, json, judge),
        false if args.detach => detach(args, &asked, json, judge),
        false => start(args, &asked, json, typed, judge),
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
        "name: {}\ncluster: {{hosts: local, workers_per_host: {workers}}}\nrun: {{command: [{command}]}}\n",
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

/// Starts a controller of its own session, and returns when its workers run.
fn detach(args: &RunArgs, asked: &Asked, json: bool, judge: &dyn TrainJudge) -> Result<u8, Failure> {
    let run = new_run_id(SystemTime::now(), random());
    // What is wrong is told here; the controller would only find the same.
    let Prepared { plan, warnings, .. } = prepare(asked, &run, judge)?;
    plain::say(&render(&warnings, Severity::Warning, plain::color()));
    let directory = &plan.run_dir;
    let cannot = |what: &str, error: &io::Error| Failure::new(Kind::Cluster, what.to_owned()).cause(error);
    let console = directory.join("console.log");
    let file = fs::create_dir_all(directory)
        .and_then(|()| OpenOptions::new().append(true).create(true).open(&console))
        .map_err(|e| cannot(&format!("{} can't be written", console.display()), &e))?;
    let started = detached::start(|fd| controller_args(args, &run, fd), file)
        .map_err(|e| cannot("the controller can't be started", &e))?;
    match started {
        Start::Started(pid) => {
            if json {
                let told = serde_json::json!({"run": run.0, "run_dir": directory, "pid": pid});
                return Ok(super::show(&format!("{told}\n")));
            }
            plain::say(&format!(
                "launch: run {run} goes on without this terminal (pid {pid}, files in {})\n  \
                 launch logs {run} --follow    launch events {run} --follow    launch stop {run}\n",
                directory.display()
            ));
            Ok(super::show(&format!("{run}\n")))
        }
        Start::Ended(status) => {
            plain::say(&fs::read_to_string(&console).unwrap_or_default());
            Ok(match status {
                ExitStatus::Code(code) => code,
                ExitStatus::Signal(..) => contract::exit::FAILED,
            })
        }
    }
}

/// The command line of a detached controller.
fn controller_args(args: &RunArgs, run: &RunId, fd: i32) -> Vec<OsString> {
    let mut all: Vec<OsString> = vec!["run".into()];
    all.extend(args.set.iter().flat_map(|set| ["--set".into(), set.into()]));
    all.extend(["--detached".into(), format!("{run}:{fd}").into()]);
    all.extend(args.requeue.then(|| "--requeue".into()));
    if let Some(job) = &args.job {
        // A file whose name begins with a dash is no option.
        all.push(Path::new(".").join(job).into());
        return all;
    }
    all.extend(args.workers.iter().flat_map(|n| ["--workers".into(), n.to_string().into()]));
    all.push("--".into());
    all.extend(args.command.iter().cloned());
    all
}

/// The run's name and whom to tell of its start, for a detached controller.
fn detached_run(text: &str) -> Result<(RunId, Starter), Failure> {
    let wrong = || Failure::new(Kind::Usage, "--detached is launch's own: use --detach");
    let (run, fd) = text.rsplit_once(':').ok_or_else(wrong)?;
    let safe = !run.is_empty() && run.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let fd = fd.parse().ok().filter(|_| safe).ok_or_else(wrong)?;
    Ok((RunId(run.to_owned()), Starter::inherited(fd).map_err(|e| wrong().cause(&e))?))
}

fn start(
    args: &RunArgs,
    asked: &Asked,
    json: bool,
    mut typed: Vec<String>,
    judge: &dyn TrainJudge,
) -> Result<u8, Failure> {
    let (run, starter) = match args.detached.as_deref().map(detached_run).transpose()? {
        Some((run, starter)) => (run, Some(starter)),
        None => (new_run_id(SystemTime::now(), random()), None),
    };
    if let Some(at) = typed.iter().position(|word| word == "--detached") {
        typed.drain(at..(at + 2).min(typed.len()));
    }
    let Prepared { job, facts, hosts, mut plan, warnings, secrets, .. } = prepare(asked, &run, judge)?;
    // The controller tells them, so that they are in the run's journal too.
    plan.warnings = warnings.into_iter().map(located).collect();
    let fit = super::ckpt::resume::of_program;
    fit(&job, &mut plan)?;
    let transport = super::targets::transport(&job)?;
    let requeue = if args.requeue { Some(super::targets::requeue(&job)?) } else { None };
    let job_file = match &asked.source {
        Source::File(path) => Some(controller::JobFile { path: path.clone(), set: asked.set.clone() }),
        Source::Text { .. } => None,
    };
    let hostfile = controller::HostFile::of(&job);
    let request = controller::Request { job, plan, hosts, transport, here: facts, fit };
    let options = controller::Options { json, command: typed, secrets, requeue, starter, job_file, hostfile };
    Ok(controller::run(request, options))
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
