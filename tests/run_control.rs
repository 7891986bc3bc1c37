//! What an operator does while a job runs, from another terminal, with the real executable.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    process::{Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use support::JobDirectory;

/// Longest wait for anything; far more than it takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A place with a list of runs of its own.
struct Desk(JobDirectory);

impl Desk {
    fn new(job: &str) -> Desk {
        let place = JobDirectory::new();
        fs::write(place.path("job.yaml"), job).unwrap();
        Desk(place)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.0.command(args);
        command.env("XDG_STATE_HOME", self.0.path("state"));
        command
    }

    fn launch(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// What a command that succeeds prints.
    #[track_caller]
    fn said(&self, args: &[&str]) -> String {
        let ran = self.launch(args);
        assert!(ran.status.success(), "{args:?}: {}", all(&ran));
        String::from_utf8(ran.stdout).unwrap()
    }

    #[track_caller]
    fn runs(&self) -> Vec<Value> {
        serde_json::from_str(&self.said(&["ps", "--json"])).unwrap()
    }

    fn start(&self, args: &[&str]) -> std::process::Child {
        let mut command = self.command(args);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Waits until the path exists.
    #[track_caller]
    fn wait_for(&self, name: &str) {
        wait(&format!("{name} appears"), || self.0.path(name).exists());
    }
}

#[track_caller]
fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LIMIT, "in vain: {what}");
        sleep(Duration::from_millis(10));
    }
}

fn all(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Two ranks that say hello, and go on until they are told to stop.
const JOB: &str = "\
name: desk
cluster: {workers_per_host: 2}
run:
  command: [sh, -c, 'trap \"echo bye; exit 0\" TERM; echo hello $RANK; echo wörk >&2; : > up.$RANK; while :; do sleep 0.05; done']
  grace_period: 20s
";

#[test]
fn a_run_is_seen_read_and_stopped_from_another_terminal() {
    let desk = Desk::new(JOB);
    let nothing = desk.launch(&["stop"]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(all(&nothing).contains("nothing is running"), "{}", all(&nothing));
    let mut job = desk.start(&["job.yaml"]);
    desk.wait_for("up.0");
    desk.wait_for("up.1");
    let runs = desk.runs();
    assert_eq!((runs.len(), &runs[0]["state"], &runs[0]["name"]), (1, &"running".into(), &"desk".into()));
    assert_eq!(runs[0]["pid"], job.id());
    let run = runs[0]["run"].as_str().unwrap();
    assert!(desk.said(&["ps"]).contains(run));

    wait("the log has it", || desk.said(&["logs", "--rank", "1"]) == "hello 1\nwörk\n");
    let both = desk.said(&["logs", "desk"]);
    assert_eq!(both.lines().filter(|l| l.starts_with("[rank 0] ")).count(), 2, "{both}");
    assert_eq!(desk.said(&["logs", &run[..8], "--grep", "^w.rk$"]), "[rank 0] wörk\n[rank 1] wörk\n");
    assert_eq!(desk.said(&["logs", "--rank", "0-1", "--since", "1h", "--grep", "hello"]).lines().count(), 2);
    for (args, part) in [
        (&["logs", "--rank", "2"][..], "there is no rank 2"),
        (&["logs", "nobody"], "no run is named `nobody`"),
        (&["logs", "--grep", "("], "--grep"),
        (&["logs", "--since", "soon"], "30s"),
        (&["events", "./nowhere/"], "not the directory of a run"),
    ] {
        let ran = desk.launch(args);
        assert!(ran.status.code() == Some(2) && all(&ran).contains(part), "{args:?}: {}", all(&ran));
    }

    let follower = desk.command(&["logs", "--rank", "0", "--follow"]).stdout(Stdio::piped()).spawn().unwrap();
    let events = desk.command(&["events", "--follow", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let stopped = desk.launch(&["stop", "desk"]);
    assert!(
        stopped.status.success() && all(&stopped).contains("ended with exit code 143"),
        "{}",
        all(&stopped)
    );
    assert_eq!(job.wait().unwrap().code(), Some(143));
    let followed = String::from_utf8(follower.wait_with_output().unwrap().stdout).unwrap();
    let to_the_end = followed.starts_with("hello 0\nwörk\n") && followed.contains("bye\n");
    assert!(to_the_end, "{followed}");
    let events = String::from_utf8(events.wait_with_output().unwrap().stdout).unwrap();
    let last: Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
    assert_eq!((&last["event"], &last["exit_code"]), (&"done".into(), &143.into()));
    assert!(last["time"].as_f64().unwrap() > 1.7e9);
    assert!(desk.said(&["events", run]).contains("ended with exit code 143"));
    assert_eq!(desk.runs()[0]["state"], "stopped");
    let again = desk.launch(&["stop", run]);
    assert!(again.status.success() && all(&again).contains("is not running"));
}

#[test]
fn stop_now_kills_and_a_killed_controller_is_told_from_a_running_one() {
    let stubborn = JOB.replace("echo bye; exit 0", "echo no");
    let desk = Desk::new(&stubborn);
    let (mut first, mut second) = (desk.start(&["job.yaml"]), desk.start(&["job.yaml"]));
    wait("both run", || desk.runs().iter().filter(|r| r["state"] == "running").count() == 2);
    let which = desk.launch(&["stop", "desk", "--now"]);
    let said = all(&which);
    assert!(which.status.code() == Some(2) && said.contains("2 runs of `desk` go on"), "{said}");
    for run in desk.runs() {
        assert!(said.contains(run["run"].as_str().unwrap()), "{said}");
    }
    kill(Pid::from_raw(second.id() as i32), Signal::SIGKILL).unwrap();
    second.wait().unwrap();
    let lost: Vec<Value> = desk.runs().into_iter().filter(|r| r["state"] == "lost").collect();
    assert_eq!((lost.len(), &lost[0]["pid"]), (1, &second.id().into()));
    desk.wait_for("up.1");
    let began = Instant::now();
    assert!(desk.launch(&["stop", "--now"]).status.success());
    assert!(began.elapsed() < Duration::from_secs(15), "not after `grace`");
    assert_eq!(first.wait().unwrap().code(), Some(143));
}

#[test]
fn a_detached_run_survives_and_refusals_come_back() {
    let desk = Desk::new(JOB);
    let started = desk.launch(&["run", "job.yaml", "--detach", "--set", "run.env.A=1"]);
    assert!(started.status.success(), "{}", all(&started));
    let run = String::from_utf8(started.stdout.clone()).unwrap().trim().to_owned();
    assert!(all(&started).contains(&format!("launch logs {run} --follow")));
    let runs = desk.runs();
    assert_eq!((runs.len(), &runs[0]["run"], &runs[0]["state"]), (1, &run.clone().into(), &"running".into()));
    let pid = Pid::from_raw(runs[0]["pid"].as_i64().unwrap() as i32);
    assert_eq!(nix::unistd::getsid(Some(pid)), Ok(pid), "a session of its own");
    let command: Vec<&str> =
        runs[0]["command"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
    assert_eq!(command[1..], ["run", "--set", "run.env.A=1", "./job.yaml"], "what goes on with it");
    desk.wait_for("up.1");
    assert!(desk.launch(&["stop"]).status.success());
    let console = fs::read_to_string(desk.0.path(&format!("runs/desk/{run}/console.log"))).unwrap();
    assert!(console.contains("[rank 0] hello 0") && console.contains("stopped after"), "{console}");

    for (args, code, part) in [
        (&["job.yaml", "--detach", "--set", "run.commandd=x"][..], 2, "`commandd` is not a key"),
        (&["run", "--detach", "--", "./not-there"], 1, "cannot start `./not-there`"),
        (&["job.yaml", "--detached", "x:0"], 2, "--detach"),
    ] {
        let refused = desk.launch(args);
        assert_eq!(refused.status.code(), Some(code), "{args:?}: {}", all(&refused));
        assert!(all(&refused).contains(part), "{args:?}: {}", all(&refused));
    }
    let short = desk.launch(&["run", "--json", "--detach", "--", "true"]);
    let told: Value = serde_json::from_slice(&short.stdout).unwrap();
    wait("it is done", || desk.runs().iter().any(|r| r["run"] == told["run"] && r["state"] == "done"));
}

/// Equal lines of the ranks are one line; a rank's own line stays its own.
#[test]
fn lines_of_many_ranks_collapse() {
    let job = "name: many\ncluster: {workers_per_host: 4}\n\
               run: {command: [sh, -c, 'echo same; echo I am $RANK; echo same'], logs: {show: [0, 1, 2, 3]}}\n";
    let desk = Desk::new(job);
    let said = desk.said(&["job.yaml"]);
    let (mut counted, mut own) = ([0; 4], 0);
    for line in said.lines() {
        let (ranks, text) = line.split_once("] ").unwrap();
        let ranks = ranks.trim_start_matches("[ranks ").trim_start_matches("[rank ");
        if text.starts_with("I am") {
            assert_eq!(text, format!("I am {ranks}"));
            own += 1;
            continue;
        }
        for part in ranks.split(", ") {
            let (a, b) = part.split_once('-').unwrap_or((part, part));
            (a.parse().unwrap()..=b.parse::<usize>().unwrap()).for_each(|rank| counted[rank] += 1);
        }
    }
    assert_eq!((counted, own), ([2; 4], 4), "{said}");
}

#[test]
fn a_changed_job_file_takes_effect_while_the_training_runs() {
    let steps = "steps: 100000";
    let job = support::TINY
        .replace("steps: 20", steps)
        .replace("checkpoint: {every: 10", "checkpoint: {every: never");
    let desk = Desk::new(&job);
    let mut running = desk.start(&["job.yaml"]);
    let journal = || {
        let found = fs::read_dir(desk.0.path("runs/tiny")).into_iter().flatten().flatten();
        let text = found.filter_map(|e| fs::read_to_string(e.path().join("events.jsonl")).ok()).next();
        let lines: Vec<Value> =
            text.unwrap_or_default().lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
        lines
    };
    let noticed = |part: &str| {
        let notices = journal().into_iter().filter(|e| e["event"] == "notice");
        notices.filter(|e| e["message"].as_str().unwrap().contains(part)).count()
    };
    wait("it trains", || journal().iter().any(|e| e["event"] == "step"));
    // Broken, then with a key that can't change and one that can, then the end.
    fs::write(desk.0.path("job.yaml"), "train: {steps: [").unwrap();
    wait("the broken file is told", || noticed("is not valid, and the run continues unchanged") == 1);
    fs::write(
        desk.0.path("job.yaml"),
        job.replace("seed: 11", "seed: 12").replace("every: never", "every: 5"),
    )
    .unwrap();
    wait("checkpoints are saved", || journal().iter().any(|e| e["event"] == "checkpoint"));
    assert_eq!(noticed("`train.seed` can't change"), 1);
    let reload = journal().into_iter().find(|e| e["event"] == "reload").unwrap();
    let first = journal().into_iter().find(|e| e["event"] == "checkpoint").unwrap();
    assert!(first["step"].as_u64().unwrap() - reload["step"].as_u64().unwrap() <= 5, "{reload} {first}");
    let temporary = desk.0.path("job.yaml.new");
    let last = journal().iter().filter_map(|e| e["step"].as_u64()).max().unwrap();
    let end = last + 40;
    fs::write(&temporary, job.replace(steps, &format!("steps: {end}"))).unwrap();
    fs::rename(&temporary, desk.0.path("job.yaml")).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(0), "it ends by itself");
    let events = journal();
    let steps: Vec<u64> =
        events.iter().filter(|e| e["event"] == "step").map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
    let reloads: Vec<u64> =
        events.iter().filter(|e| e["event"] == "reload").map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(reloads.len(), 2);
    assert_eq!(*steps.last().unwrap(), end.max(reloads[1]), "the new end, or where it was already");
    assert_eq!(noticed("`train.seed` can't change"), 1, "once");
}

/// What other launchers were told becomes a job that can be planned; the job is stdout, the notes are stderr.
#[test]
fn other_launchers_settings_become_jobs() {
    let place = JobDirectory::new();
    fs::write(place.path("hosts"), "a slots=2\nb slots=2\n").unwrap();
    let config =
        "distributed_type: MULTI_CPU\nnum_machines: 1\nnum_processes: 2\nuse_cpu: true\nfrobnicate: 3\n";
    fs::write(place.path("config.yaml"), config).unwrap();
    fs::write(
        place.path("ds.json"),
        r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}"#,
    )
    .unwrap();
    let ok = |args: &[&str]| {
        let ran = place.launch(args);
        assert!(ran.status.success(), "{args:?}: {}", all(&ran));
        (String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap())
    };
    let world = |job: &str| -> Value {
        fs::write(place.path("imported.yaml"), job).unwrap();
        serde_json::from_str::<Value>(&ok(&["plan", "imported.yaml", "--json"]).0).unwrap()["world"].clone()
    };
    let (job, notes) = ok(&["import", "accelerate", "config.yaml", "--", "train.py", "--lr", "1"]);
    assert!(job.contains("[python, train.py, \"--lr\", \"1\"]") && world(&job) == 2, "{job}");
    assert!(notes.contains("not carried: frobnicate: "), "{notes}");
    let (job, notes) = ok(&["import", "deepspeed", "ds.json"]);
    assert_eq!(world(&job.replace("data/*.txt", "corpus.txt")), 1, "{job}");
    assert!(job.contains("stage: 2") && notes.contains("zero_optimization.overlap_comm"), "{job}{notes}");
    let (job, _) =
        ok(&["import", "torchrun", "--hostfile", "hosts", "--", "--nproc-per-node", "2", "-m", "a.b", "-x"]);
    assert!(job.contains("[python, \"-m\", a.b, \"-x\"]") && world(&job) == 4, "{job}");
    let (object, _) = ok(&["import", "torchrun", "--json", "--", "a.py"]);
    let object: Value = serde_json::from_str(&object).unwrap();
    assert!(object["job"].is_string() && object["notes"].is_array());
    fs::write(place.path("wrong.yaml"), "distributed_type: FSDP\nnum_processes: []\n").unwrap();
    fs::write(place.path("sagemaker.yaml"), "compute_environment: AMAZON_SAGEMAKER\n").unwrap();
    fs::write(place.path("large.json"), " ".repeat(2 << 20)).unwrap();
    for (args, part) in [
        (&["import", "accelerate", "absent.yaml"][..], "there is no such file"),
        (&["import", "accelerate", "wrong.yaml"], "`num_processes` must be an integer"),
        (&["import", "accelerate", "sagemaker.yaml"], "isn't one that launch runs in"),
        (&["import", "accelerate", "corpus.txt"], "corpus.txt"),
        (&["import", "deepspeed", "config.yaml"], "no `{`"),
        (&["import", "deepspeed", "large.json"], "too large"),
        (&["import", "deepspeed", "ds.json", "--hostfile", "corpus.txt"], "can't be used"),
        (&["import", "torchrun", "--", "--frobnicate", "a.py"], "no option `--frobnicate`"),
        (&["import", "torchrun"], "ARGS"),
    ] {
        let ran = place.launch(args);
        assert!(ran.status.code() == Some(2) && ran.stdout.is_empty(), "{args:?}: {}", all(&ran));
        assert!(all(&ran).contains(part), "{args:?}: {}", all(&ran));
    }
}
