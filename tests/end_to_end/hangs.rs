//! Makes ranks of programs hang on purpose, with real torch over Gloo: the verdict names the ranks
//! that hold up the others, and where they are.
mod builtin;
mod containers;
mod stalled_file;
mod torch_timeouts;
mod waits;

use crate::support::{self, JobDirectory};
use serde_json::{Value, json};
use std::{fs, os::unix::fs::PermissionsExt, path::Path};

/// A script in which rank 1 does what its argument names instead of entering the fourth collective.
const SCRIPT: &str = r#"
import os, signal, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, mode = dist.get_rank(), sys.argv[1]
x = torch.ones(4)
for _ in range(3):
    dist.all_reduce(x)

def hold_up():
    if mode == "sleep":
        time.sleep(600)
    elif mode == "python":
        while True:
            pass
    elif mode == "native":
        pow(3, 10 ** 9)
    elif mode == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif mode == "fifo":
        os.mkfifo("fifo")
        open("fifo").read()
    elif mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)

if mode == "shapes":
    dist.all_reduce(x if rank == 0 else torch.ones(0))
if mode == "order":
    outputs = [torch.zeros(4) for _ in range(2)]
    calls = [lambda: dist.all_reduce(x), lambda: dist.all_gather(outputs, x)]
    for call in calls if rank == 0 else reversed(calls):
        call()
if rank == 1:
    hold_up()
dist.all_reduce(x)
"#;

/// Runs [`SCRIPT`] and returns the reason of the failure. Returns `None` if torch is missing.
fn run_hanging_script(test: &str, mode: &str) -> Option<Value> {
    let python = support::find_python_or_skip(test)?;
    Some(run_job(&JobDirectory::new(), &python, mode, ""))
}

/// Runs [`SCRIPT`] in the directory of a job, and returns the reason of the failure. `run` is
/// appended to this section of the job.
fn run_job(job_dir: &JobDirectory, python: &Path, mode: &str, run: &str) -> Value {
    fs::write(job_dir.path("script.py"), SCRIPT).unwrap();
    let python = serde_json::to_string(&python).unwrap();
    let job = format!(
        "name: hang\ncluster: {{workers_per_host: 2}}\n\
         run: {{command: [{python}, script.py, {mode}], grace_period: 1s, hang_timeout: 3s{run}}}\n"
    );
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let ran = job_dir.run(&[]);
    let code = if mode == "stop" { "worker-suspended" } else { "hang-detected" };
    assert_eq!(ran.failure_code(), code);
    let reason = ran.expect_failure()["reason"].clone();
    let run_dir = ran.events_named("start")[0]["run_dir"].as_str().unwrap().to_owned();
    let file = fs::read(job_dir.path(&run_dir).join("hang-0.json")).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    assert_eq!(file["verdict"], reason["verdict"]);
    assert_eq!(file["evidence"].as_array().map(Vec::len), Some(2), "{file:#}");
    reason
}

/// Checks that rank 1 is named in `hold_up`, doing `activity`, while rank 0 waits. Returns the
/// place of rank 1, or `None` if torch is missing.
fn assert_holds_up(test: &str, mode: &str, activity: &str) -> Option<Value> {
    let python = support::find_python_or_skip(test)?;
    Some(assert_job_holds_up(&JobDirectory::new(), &python, mode, "", activity))
}

/// Checks that rank 1 is named in `hold_up`, doing `activity`, while rank 0 waits. `run` is
/// appended to this section of the job. Returns the place of rank 1.
fn assert_job_holds_up(
    job_dir: &JobDirectory,
    python: &Path,
    mode: &str,
    run: &str,
    activity: &str,
) -> Value {
    let reason = run_job(job_dir, python, mode, run);
    let verdict = &reason["verdict"];
    assert_eq!(verdict["kind"], "not_entered", "{reason:#}");
    assert_eq!(verdict["collective"], json!({"group": "0", "seq": 4, "operation": "gloo:all_reduce"}));
    assert_eq!((&verdict["entered"], &verdict["undetermined"]), (&json!([0]), &json!([])), "{reason:#}");
    let place = &verdict["not_entered"][0];
    assert_eq!((&place["rank"], &place["activity"]["kind"]), (&json!(1), &json!(activity)), "{reason:#}");
    assert_eq!(place["frame"]["function"], "hold_up", "{reason:#}");
    assert!(place["frame"]["file"].as_str().is_some_and(|file| file.ends_with("script.py")), "{reason:#}");
    place.clone()
}

#[test]
fn a_rank_that_never_enters_a_collective_is_named() {
    assert_holds_up("a_rank_that_never_enters_a_collective_is_named", "sleep", "sleeps");
}

#[test]
fn a_rank_in_a_loop_of_python_is_named() {
    assert_holds_up("a_rank_in_a_loop_of_python_is_named", "python", "runs_python");
}

#[test]
fn a_rank_in_native_code_that_holds_the_lock_of_python_is_named() {
    assert_holds_up("a_rank_in_native_code_that_holds_the_lock_of_python_is_named", "native", "runs_native");
}

#[test]
fn a_rank_that_waits_for_a_lock_is_named() {
    assert_holds_up("a_rank_that_waits_for_a_lock_is_named", "lock", "waits_for_lock");
}

#[test]
fn a_rank_that_waits_for_a_fifo_is_named() {
    let test = "a_rank_that_waits_for_a_fifo_is_named";
    let Some(place) = assert_holds_up(test, "fifo", "waits_for_data") else { return };
    assert_eq!(place["file"], "fifo", "{place:#}");
}

#[test]
fn ranks_with_different_orders_of_collectives_are_named() {
    let test = "ranks_with_different_orders_of_collectives_are_named";
    let Some(reason) = run_hanging_script(test, "order") else { return };
    assert_eq!(reason["verdict"]["kind"], "different_order", "{reason:#}");
    let calls = reason["verdict"]["calls"].as_array().unwrap();
    for call in calls {
        assert_eq!(call["frame"]["function"], "<lambda>", "{reason:#}");
    }
    let mut calls: Vec<(&Value, &Value)> = calls.iter().map(|c| (&c["operation"], &c["ranks"])).collect();
    calls.sort_by_key(|call| call.1.to_string());
    assert_eq!(
        calls,
        [(&json!("gloo:all_reduce"), &json!([0])), (&json!("gloo:all_gather"), &json!([1]))],
        "{reason:#}"
    );
}

#[test]
fn a_stopped_rank_is_named_with_the_collective_in_which_others_wait() {
    let test = "a_stopped_rank_is_named_with_the_collective_in_which_others_wait";
    let Some(reason) = run_hanging_script(test, "stop") else { return };
    let verdict = &reason["verdict"];
    assert_eq!(verdict["collective"]["seq"], 4, "{reason:#}");
    assert_eq!((&verdict["entered"], &verdict["not_entered"]), (&json!([0]), &json!([])), "{reason:#}");
    let place = &verdict["undetermined"][0];
    assert_eq!((&place["rank"], &place["activity"]["kind"]), (&json!(1), &json!("stopped")), "{reason:#}");
}

#[test]
fn ranks_with_different_shapes_are_named() {
    let Some(reason) = run_hanging_script("ranks_with_different_shapes_are_named", "shapes") else { return };
    assert_eq!(reason["verdict"]["kind"], "different_shapes", "{reason:#}");
    let calls = reason["verdict"]["calls"].as_array().unwrap();
    // Gloo completes the call of one of the ranks, which then waits in the next one.
    assert!(calls.iter().any(|call| call["frame"]["function"] == "<module>"), "{reason:#}");
    let mut calls: Vec<(&Value, &Value)> = calls.iter().map(|c| (&c["ranks"], &c["inputs"])).collect();
    calls.sort_by_key(|call| call.0.to_string());
    assert_eq!(calls, [(&json!([0]), &json!("[[4]]")), (&json!([1]), &json!("[[0]]"))], "{reason:#}");
}

/// A program in the place of py-spy, with the arguments `dump --json --pid PID`.
const PY_SPY: &str = r#"#!/bin/sh
sleep 1
cat <<END
[{"pid": $4, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": $4, "active": false,
  "owns_gil": false, "frames": [{"name": "load", "filename": "/a/train.py", "line": 17}]}]
END
"#;

#[test]
fn py_spy_shows_where_ranks_without_the_hook_are() {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("py-spy"), PY_SPY).unwrap();
    fs::set_permissions(job_dir.path("py-spy"), fs::Permissions::from_mode(0o755)).unwrap();
    let job = "name: hang\ncluster: {workers_per_host: 8}\n\
               run: {command: [sh, -c, exec sleep 600], grace_period: 1s, hang_timeout: 2s}\n";
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let path = format!("{}:{}", job_dir.path("").display(), std::env::var("PATH").unwrap());
    let ran = job_dir.run_with_env(&[], "PATH", &path);
    assert_eq!(ran.failure_code(), "hang-detected");
    let verdict = &ran.expect_failure()["reason"]["verdict"];
    let places = verdict["undetermined"].as_array().unwrap();
    assert_eq!(places.len(), 8, "{verdict:#}");
    for place in places {
        // One after another, the dumps of eight ranks would take 8 s, which is too long.
        let frame = json!({"file": "/a/train.py", "line": 17, "function": "load"});
        assert_eq!((&place["frame"], &place["activity"]["kind"]), (&frame, &json!("sleeps")), "{verdict:#}");
    }
    let run_dir = ran.events_named("start")[0]["run_dir"].as_str().unwrap().to_owned();
    let log = fs::read_to_string(job_dir.path(&run_dir).join("logs/rank-7.log")).unwrap();
    assert!(log.contains("load (/a/train.py:17)"), "{log}");
}
