//! Tests the commands that control runs (`ps`, `logs`, `events`, `stop`), detached runs, changed
//! job files and `launch import` with the real executable.
use crate::support::{
    self, FinishedRun, JobDirectory,
    environment::{LAUNCH_EXECUTABLE, isolated_command},
    expand_details, output_to_text, parse_rejection,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use std::{
    fs,
    process::{Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// How long a test waits for a condition. After that, the test fails.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A directory with a job. `launch ps` lists only the runs of this job.
struct ControlledJob(JobDirectory);

impl ControlledJob {
    /// Creates a directory with a job file of the content `job`.
    fn new(job: &str) -> ControlledJob {
        let job_dir = JobDirectory::new();
        fs::write(job_dir.path("job.yaml"), job).unwrap();
        ControlledJob(job_dir)
    }

    /// Runs `launch ARGS…` and waits for its end.
    fn run_launch(&self, args: &[&str]) -> Output {
        self.0.run_launch(args)
    }

    /// Runs `launch ARGS…` and returns its stdout. Panics if the command fails.
    #[track_caller]
    fn read_stdout(&self, args: &[&str]) -> String {
        let output = self.run_launch(args);
        assert!(output.status.success(), "{args:?}: {}", output_to_text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the runs that `launch ps` lists, as JSON.
    #[track_caller]
    fn list_runs(&self) -> Vec<Value> {
        serde_json::from_str(&self.read_stdout(&["ps", "--json"])).unwrap()
    }

    /// Starts `launch ARGS…` and does not wait for its end. Discards stdout and stderr.
    fn start(&self, args: &[&str]) -> std::process::Child {
        let mut command = self.0.launch_command(args);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Waits until a file in the directory exists. Panics after [`WAIT_LIMIT`].
    #[track_caller]
    fn wait_for_file(&self, name: &str) {
        wait_until(&format!("{name} exists"), || self.0.path(name).exists());
    }
}

/// Waits until `condition` returns `true`. Panics after [`WAIT_LIMIT`], with `name` as the
/// description of the condition.
#[track_caller]
fn wait_until(name: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < WAIT_LIMIT, "timeout: {name}");
        sleep(Duration::from_millis(10));
    }
}

/// A job of two ranks that print two lines each and then run until SIGTERM.
const SERVICE_JOB: &str = "\
name: service
cluster: {workers_per_host: 2}
run:
  command: [sh, -c, 'trap \"echo bye; exit 0\" TERM; echo hello $RANK; echo wörk >&2; : > up.$RANK; while :; do sleep 0.05; done']
  grace_period: 20s
";

#[test]
fn another_terminal_can_list_follow_and_stop_a_run() {
    let operator = ControlledJob::new(SERVICE_JOB);
    let (exit_code, idle) = operator.0.expect_rejection(&["stop"]);
    assert_eq!((exit_code, &idle["code"]), (2, &"run-not-active".into()));
    let mut job = operator.start(&["job.yaml"]);
    operator.wait_for_file("up.0");
    operator.wait_for_file("up.1");
    let runs = operator.list_runs();
    assert_eq!((runs.len(), &runs[0]["state"], &runs[0]["name"]), (1, &"running".into(), &"service".into()));
    assert_eq!(runs[0]["pid"], job.id());
    let run = runs[0]["run"].as_str().unwrap();
    let table = operator.read_stdout(&["ps"]);
    assert_eq!(table.lines().nth(1).and_then(|row| row.split_whitespace().next()), Some(run), "{table}");

    wait_until("the log is complete", || operator.read_stdout(&["logs", "--rank", "1"]) == "hello 1\nwörk\n");
    let both = operator.read_stdout(&["logs", "service"]);
    assert_eq!(both.lines().filter(|l| l.starts_with("[rank 0] ")).count(), 2, "{both}");
    assert_eq!(
        operator.read_stdout(&["logs", &run[..8], "--grep", "^w.rk$"]),
        "[rank 0] wörk\n[rank 1] wörk\n"
    );
    let recent = operator.read_stdout(&["logs", "--rank", "0-1", "--since", "1h", "--grep", "hello"]);
    assert_eq!(recent.lines().count(), 2, "{recent}");
    for (args, code) in [
        (&["logs", "--rank", "2"][..], "rank-out-of-range"),
        (&["logs", "other"], "run-not-found"),
        (&["logs", "--grep", "("], "pattern-invalid"),
        (&["logs", "--since", "soon"], "usage"),
        (&["events", "./nowhere/"], "run-directory-invalid"),
    ] {
        let (exit_code, error) = operator.0.expect_rejection(args);
        assert_eq!((exit_code, &error["code"]), (2, &code.into()), "{args:?}: {error}");
    }

    let follow = |args: &[&str]| operator.0.launch_command(args).stdout(Stdio::piped()).spawn().unwrap();
    let logs = follow(&["logs", "--rank", "0", "--follow"]);
    let events = follow(&["events", "--follow", "--json"]);
    let stopped = operator.run_launch(&["stop", "service"]);
    assert!(stopped.status.success(), "{}", output_to_text(&stopped));
    operator.0.assert_snapshot("stopped_run", &output_to_text(&stopped));
    assert_eq!(job.wait().unwrap().code(), Some(143));
    let logs = String::from_utf8(logs.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(logs.replace("Terminated\n", ""), "hello 0\nwörk\nbye\n", "the shell may report its child");
    let events = String::from_utf8(events.wait_with_output().unwrap().stdout).unwrap();
    let last: Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
    assert_eq!((&last["event"], &last["exit_code"]), (&"done".into(), &143.into()));
    assert!(last["time"].as_f64().unwrap() > 1.7e9);
    let text = operator.read_stdout(&["events", run]);
    let (_, last) = text.lines().last().unwrap().trim_start().split_once("  ").unwrap();
    operator.0.assert_snapshot("last_event", last);
    assert_eq!(operator.list_runs()[0]["state"], "stopped");
    let again = operator.run_launch(&["stop", run]);
    assert!(again.status.success(), "{}", output_to_text(&again));
    operator.0.assert_snapshot("stop_of_an_ended_run", &output_to_text(&again));
}

#[test]
fn stop_now_kills_a_run_and_a_run_with_a_killed_controller_is_lost() {
    let ignores_sigterm = SERVICE_JOB.replace("echo bye; exit 0", "echo no");
    let operator = ControlledJob::new(&ignores_sigterm);
    let (mut first, mut second) = (operator.start(&["job.yaml"]), operator.start(&["job.yaml"]));
    let are_running = || operator.list_runs().iter().filter(|r| r["state"] == "running").count() == 2;
    wait_until("both run", are_running);
    let (exit_code, ambiguous) = operator.0.expect_rejection(&["stop", "service", "--now"]);
    assert_eq!((exit_code, &ambiguous["code"]), (2, &"run-ambiguous".into()), "{ambiguous}");
    let mut candidates: Vec<&Value> = ambiguous["fields"]["candidates"].as_array().unwrap().iter().collect();
    let runs = operator.list_runs();
    let mut names: Vec<&Value> = runs.iter().map(|run| &run["run"]).collect();
    candidates.sort_by_key(|name| name.to_string());
    names.sort_by_key(|name| name.to_string());
    assert_eq!(candidates, names);
    kill(Pid::from_raw(second.id() as i32), Signal::SIGKILL).unwrap();
    second.wait().unwrap();
    let lost: Vec<Value> = operator.list_runs().into_iter().filter(|r| r["state"] == "lost").collect();
    assert_eq!((lost.len(), &lost[0]["pid"]), (1, &second.id().into()));
    operator.wait_for_file("up.1");
    let began = Instant::now();
    assert!(operator.run_launch(&["stop", "--now"]).status.success());
    assert!(began.elapsed() < Duration::from_secs(15), "the grace period does not delay `--now`");
    assert_eq!(first.wait().unwrap().code(), Some(143));
}

#[test]
fn a_detached_run_has_a_separate_session_and_its_start_is_awaited() {
    let operator = ControlledJob::new(SERVICE_JOB);
    let started = operator.run_launch(&["run", "job.yaml", "--detach", "--set", "run.env.A=1"]);
    assert!(started.status.success(), "{}", output_to_text(&started));
    operator.0.assert_snapshot("detached", &output_to_text(&started));
    let run = String::from_utf8(started.stdout).unwrap().trim().to_owned();
    let runs = operator.list_runs();
    assert_eq!((runs.len(), &runs[0]["run"], &runs[0]["state"]), (1, &run.clone().into(), &"running".into()));
    let pid = Pid::from_raw(runs[0]["pid"].as_i64().unwrap() as i32);
    assert_eq!(nix::unistd::getsid(Some(pid)), Ok(pid), "the controller leads a session");
    let command: Vec<&str> =
        runs[0]["command"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
    assert_eq!(command[1..], ["run", "--set=run.env.A=1", "./job.yaml"], "the command that resumes it");
    operator.wait_for_file("up.1");
    assert!(operator.run_launch(&["stop"]).status.success());
    let console = fs::read_to_string(operator.0.path(&format!("runs/service/{run}/console.log"))).unwrap();
    operator.0.assert_snapshot("console_of_a_detached_run", &sort_lines(&console));
}

/// Sorts the lines of a log, so that they can be compared. Their order differs between runs,
/// because the controller reads stdout and stderr of a worker independently. Removes the line that
/// a shell prints when its child is killed.
fn sort_lines(text: &str) -> String {
    let mut lines: Vec<&str> = text.lines().filter(|line| !line.ends_with("] Terminated")).collect();
    lines.sort_unstable();
    lines.join("\n")
}

#[test]
fn a_detached_run_that_does_not_start_returns_the_error() {
    let operator = ControlledJob::new(SERVICE_JOB);
    for (name, args, exit_code) in [
        ("detached_wrong_job", &["job.yaml", "--detach", "--set", "run.commands=x"][..], 2),
        ("detached_missing_program", &["run", "--detach", "--", "./not-there"], 3),
        ("detached_internal_option", &["job.yaml", "--detached", "x:0"], 2),
    ] {
        let rejected = operator.run_launch(args);
        assert_eq!(rejected.status.code(), Some(exit_code), "{args:?}: {}", output_to_text(&rejected));
        operator.0.assert_snapshot(name, &output_to_text(&rejected));
    }
    let ended = operator.run_launch(&["run", "--json", "--detach", "--", "true"]);
    let started: Value = serde_json::from_slice(&ended.stdout).unwrap();
    let is_done = |run: &Value| run["run"] == started["run"] && run["state"] == "done";
    wait_until("the run is done", || operator.list_runs().iter().any(is_done));
}

#[test]
fn a_controller_that_may_open_too_few_files_starts_nothing() {
    let job_dir = JobDirectory::new();
    let job = "name: many\ncluster: {hosts: ['h[0-39]']}\nrun: {command: ['true']}\n";
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let mut shell = isolated_command("bash", &job_dir.path(""));
    shell.args(["-c", "ulimit -n 200 && exec \"$0\" job.yaml --json", LAUNCH_EXECUTABLE]);
    let ran = FinishedRun::from_output(&shell.output().unwrap());
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert_eq!(ran.failure_reason_kind(), "controller_failed");
    assert_eq!(ran.failure_diagnostics()[0]["code"], "descriptors-too-few");
    assert_eq!(ran.failure_diagnostics()[0]["fields"], serde_json::json!({"needed": 416, "available": 200}));
}

#[test]
fn equal_lines_of_ranks_are_deduplicated() {
    let job = "name: many\ncluster: {workers_per_host: 4}\n\
               run: {command: [sh, -c, 'echo same; echo I am $RANK; echo same'], logs: {show: [0, 1, 2, 3]}}\n";
    let operator = ControlledJob::new(job);
    let stdout = operator.read_stdout(&["job.yaml"]);
    let (mut shared_lines, mut distinct_lines) = ([0; 4], 0);
    for line in stdout.lines() {
        let (ranks, text) = line.split_once("] ").unwrap();
        let ranks = ranks.trim_start_matches("[ranks ").trim_start_matches("[rank ");
        if text != "same" {
            assert_eq!(text, format!("I am {ranks}"));
            distinct_lines += 1;
            continue;
        }
        for part in ranks.split(", ") {
            let (a, b) = part.split_once('-').unwrap_or((part, part));
            (a.parse().unwrap()..=b.parse::<usize>().unwrap()).for_each(|rank| shared_lines[rank] += 1);
        }
    }
    assert_eq!((shared_lines, distinct_lines), ([2; 4], 4), "{stdout}");
}

#[test]
fn a_changed_job_file_takes_effect_while_the_training_runs() {
    let steps = "steps: 100000";
    let job = support::TINY_JOB
        .replace("steps: 20", steps)
        .replace("checkpoint: {every: 10", "checkpoint: {every: never");
    let operator = ControlledJob::new(&job);
    let mut running = operator.start(&["job.yaml"]);
    let journal = || {
        let runs = fs::read_dir(operator.0.path("runs/tiny")).into_iter().flatten().flatten();
        let text = runs.filter_map(|e| fs::read_to_string(e.path().join("events.jsonl")).ok()).next();
        let lines: Vec<Value> =
            text.unwrap_or_default().lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
        lines
    };
    let notices = || journal().into_iter().filter(|e| e["event"] == "notice").count();
    wait_until("the first step is done", || journal().iter().any(|e| e["event"] == "step"));
    let before = notices();
    // a file that is not valid YAML
    fs::write(operator.0.path("job.yaml"), "train: {steps: [").unwrap();
    wait_until("the invalid file is reported", || notices() == before + 1);
    // a change of a key that cannot change during a run, and of one that can
    fs::write(
        operator.0.path("job.yaml"),
        job.replace("seed: 11", "seed: 12").replace("every: never", "every: 5"),
    )
    .unwrap();
    wait_until("checkpoints are saved", || journal().iter().any(|e| e["event"] == "checkpoint"));
    let reload = journal().into_iter().find(|e| e["event"] == "reload").unwrap();
    let first = journal().into_iter().find(|e| e["event"] == "checkpoint").unwrap();
    assert!(first["step"].as_u64().unwrap() - reload["step"].as_u64().unwrap() <= 5, "{reload} {first}");
    // a new last step, in a file that replaces the job file
    let temporary = operator.0.path("job.yaml.new");
    let last = journal().iter().filter_map(|e| e["step"].as_u64()).max().unwrap();
    let end = last + 40;
    fs::write(&temporary, job.replace(steps, &format!("steps: {end}"))).unwrap();
    fs::rename(&temporary, operator.0.path("job.yaml")).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(0));
    let events = journal();
    let steps: Vec<u64> =
        events.iter().filter(|e| e["event"] == "step").map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
    let reloads: Vec<u64> =
        events.iter().filter(|e| e["event"] == "reload").map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(reloads.len(), 2);
    assert_eq!(*steps.last().unwrap(), end.max(reloads[1]), "the new last step, or the step of the reload");
    let messages: Vec<&str> =
        events.iter().filter(|e| e["event"] == "notice").map(|e| e["message"].as_str().unwrap()).collect();
    let messages = messages[before..].join("\n").replace(&format!("→ {end},"), "→ [END],");
    let messages =
        reloads.iter().fold(messages, |text, step| text.replace(&(step + 1).to_string(), "[STEP]"));
    operator.0.assert_snapshot("notices_of_changed_job_files", &messages);
}

#[test]
fn configurations_of_other_launchers_are_converted_to_jobs() {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("hosts"), "a slots=2\nb slots=2\n").unwrap();
    let config =
        "distributed_type: MULTI_CPU\nnum_machines: 1\nnum_processes: 2\nuse_cpu: true\nfrobnicate: 3\n";
    fs::write(job_dir.path("config.yaml"), config).unwrap();
    fs::write(
        job_dir.path("ds.json"),
        r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}"#,
    )
    .unwrap();
    let import = |args: &[&str]| {
        let output = job_dir.run_launch(&[&["import"], args].concat());
        assert!(output.status.success(), "{args:?}: {}", output_to_text(&output));
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let world = |job: &str| -> Value {
        fs::write(job_dir.path("imported.yaml"), job).unwrap();
        let plan = job_dir.run_launch(&["plan", "imported.yaml", "--json"]);
        assert!(plan.status.success(), "{}", output_to_text(&plan));
        serde_json::from_slice::<Value>(&plan.stdout).unwrap()["world"].clone()
    };
    let (job, notes) = import(&["accelerate", "config.yaml", "--", "train.py", "--lr", "1"]);
    assert_eq!(world(&job), 2, "{job}");
    job_dir.assert_snapshot("import_accelerate", &format!("{job}\n# stderr\n{notes}"));
    let (job, notes) = import(&["deepspeed", "ds.json"]);
    assert_eq!(world(&job.replace("data/*.txt", "corpus.txt")), 1, "{job}");
    job_dir.assert_snapshot("import_deepspeed", &format!("{job}\n# stderr\n{notes}"));
    let arguments = ["--nproc-per-node", "2", "-m", "a.b", "-x"];
    let (job, notes) = import(&[&["torchrun", "--hostfile", "hosts", "--"], &arguments[..]].concat());
    assert_eq!(world(&job), 4, "{job}");
    job_dir.assert_snapshot("import_torchrun", &format!("{job}\n# stderr\n{notes}"));
    let (object, _) = import(&["torchrun", "--json", "--", "a.py"]);
    let object: Value = serde_json::from_str(&object).unwrap();
    assert!(object["job"].is_string() && object["notes"].is_array());
    fs::write(job_dir.path("wrong.yaml"), "distributed_type: FSDP\nnum_processes: []\n").unwrap();
    fs::write(job_dir.path("sagemaker.yaml"), "compute_environment: AMAZON_SAGEMAKER\n").unwrap();
    fs::write(job_dir.path("large.json"), " ".repeat(2 << 20)).unwrap();
    let mut messages = String::new();
    for (args, code) in [
        (&["accelerate", "absent.yaml"][..], "job-file-not-found"),
        (&["accelerate", "wrong.yaml"], "import-value-invalid"),
        (&["accelerate", "sagemaker.yaml"], "import-unsupported"),
        (&["accelerate", "corpus.txt"], "import-not-a-config"),
        (&["deepspeed", "config.yaml"], "import-not-a-config"),
        (&["deepspeed", "large.json"], "job-too-large"),
        (&["deepspeed", "ds.json", "--hostfile", "corpus.txt"], "hostfile-invalid"),
        (&["torchrun", "--", "--frobnicate", "a.py"], "import-arguments-invalid"),
        (&["torchrun"], "usage"),
    ] {
        let args = [&["import"], args].concat();
        let text = job_dir.run_launch(&args);
        assert!(text.stdout.is_empty(), "{args:?}: {}", output_to_text(&text));
        messages += &format!("launch {}\n{}\n", args.join(" "), output_to_text(&text));
        let (exit_code, error) = parse_rejection(&job_dir.run_launch(&[&["--json"], &args[..]].concat()));
        assert_eq!((exit_code, &expand_details(&error)[0]["code"]), (2, &code.into()), "{args:?}: {error}");
    }
    job_dir.assert_snapshot("wrong_imports", &messages);
}

/// Checks that `launch logs` shows all logs of a run that has more ranks than a process may open
/// files. With `--follow`, the soft limit of open files is raised.
#[test]
fn logs_of_more_ranks_than_open_files_are_shown() {
    const RANKS: usize = 200;
    let job_dir = JobDirectory::new();
    let run_dir = job_dir.path("runs/job/many");
    fs::create_dir_all(run_dir.join("logs")).unwrap();
    let record = json!({
        "version": 1, "run": "many", "name": "job", "run_dir": run_dir, "world": RANKS, "began_ms": 1,
        "by": {"host": "another", "boot": "b", "pid": 1, "started": 1},
    });
    fs::write(run_dir.join("run.json"), record.to_string()).unwrap();
    for rank in 0..RANKS {
        fs::write(run_dir.join(format!("logs/rank-{rank}.log.1")), "old\n").unwrap();
        fs::write(run_dir.join(format!("logs/rank-{rank}.log")), "new\nunfinished").unwrap();
    }
    let list_lines = |rank| ["old", "new", "unfinished"].map(|line| format!("[rank {rank}] {line}"));
    let mut expected: Vec<String> = (0..RANKS).flat_map(list_lines).collect();
    for (limit, option) in [("ulimit -n 64", ""), ("ulimit -S -n 64", "--follow")] {
        let mut shell = isolated_command("sh", &job_dir.path("."));
        shell.args(["-c", &format!("{limit} && exec \"$0\" logs many {option}"), LAUNCH_EXECUTABLE]);
        let output = shell.output().expect("a shell");
        assert!(output.status.success(), "{option}: {}", output_to_text(&output));
        let text = String::from_utf8_lossy(&output.stdout);
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        if option == "--follow" {
            // The newest logs are printed after all older ones.
            lines.sort();
            expected.sort();
        }
        assert_eq!(lines, expected, "{option}");
    }
}
