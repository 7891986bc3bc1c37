//! Makes ranks of the built-in training hang on purpose: the verdict names them from the counters
//! that the workers publish.
use super::stalled_file::StalledFile;
use crate::support::{
    FinishedRun, JobDirectory,
    live_run::{find_worker, read_events, wait_for_event},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use std::fs;

/// The settings of a training with three ranks that runs for longer than a test.
const SETTINGS: [&str; 4] =
    ["cluster.workers_per_host=3", "run.hang_timeout=3s", "train.steps=100000", "checkpoint.every=never"];

/// Returns the verdict of a failed run. Checks that the message names the rank first, and the file
/// with the evidence about all ranks.
fn read_verdict(job_dir: &JobDirectory, failure: &Value, rank: u32) -> Value {
    let verdict = failure["reason"]["verdict"].clone();
    let message = failure["message"].as_str().unwrap();
    assert!(message.contains(&format!("rank {rank} ")), "{message}");
    let file = message.rsplit_once("evidence: ").unwrap().1;
    let file: Value = serde_json::from_slice(&fs::read(job_dir.path(file)).unwrap()).unwrap();
    assert_eq!(file["verdict"], verdict);
    assert_eq!(file["evidence"].as_array().map(Vec::len), Some(3), "{file:#}");
    verdict
}

/// Checks that `verdict` names only this rank, and that all others wait. Returns its place.
fn assert_holds_up(verdict: &Value, rank: u32) -> &Value {
    let others: Vec<u32> = (0..3).filter(|other| *other != rank).collect();
    assert_eq!(verdict["kind"], "not_entered", "{verdict:#}");
    assert_eq!((&verdict["entered"], &verdict["undetermined"]), (&json!(others), &json!([])), "{verdict:#}");
    assert_eq!(verdict["collective"]["group"], "world");
    assert!(verdict["collective"]["operation"].is_string(), "{verdict:#}");
    let places = verdict["not_entered"].as_array().unwrap();
    assert_eq!((places.len(), &places[0]["rank"]), (1, &json!(rank)), "{verdict:#}");
    &places[0]
}

#[test]
fn a_rank_in_an_endless_loop_is_named() {
    let job_dir = JobDirectory::new();
    let ran = job_dir.run_with_env(&SETTINGS, "LAUNCH_FAULT", "1:loop@2");
    assert_eq!(ran.failure_code(), "hang-detected");
    let verdict = read_verdict(&job_dir, ran.expect_failure(), 1);
    let place = assert_holds_up(&verdict, 1);
    assert_eq!(place["activity"]["kind"], "runs_native", "{place:#}");
    assert_eq!(place["task"], "reading samples (step 3)", "{place:#}");
}

#[test]
fn a_rank_whose_data_stall_is_named_with_the_file() {
    let job_dir = JobDirectory::new();
    let test = "hangs::builtin::a_rank_whose_data_stall_is_named_with_the_file";
    let Some(_stalled) = StalledFile::stall(test, &job_dir.path("corpus.txt")) else { return };
    let ran = job_dir.run(&SETTINGS);
    assert_eq!(ran.failure_code(), "hang-detected");
    let verdict = read_verdict(&job_dir, ran.expect_failure(), 0);
    let place = assert_holds_up(&verdict, 0);
    assert_eq!(place["task"], "opening the data (step 1)", "{place:#}");
    assert!(place["file"].as_str().is_some_and(|file| file.ends_with("corpus.txt")), "{place:#}");
    let kind = place["activity"]["kind"].as_str();
    assert!(matches!(kind, Some("uninterruptible" | "waits_for_data")), "{place:#}");
}

#[test]
fn a_stopped_rank_is_named_with_the_collective() {
    let job_dir = JobDirectory::new();
    let mut launch = job_dir.start(&SETTINGS);
    let mut events = read_events(&mut launch);
    wait_for_event(&mut events, |event| event["event"] == "step");
    let rank = 1;
    kill(Pid::from_raw(find_worker(&job_dir, rank) as i32), Signal::SIGSTOP).unwrap();
    let failure = wait_for_event(&mut events, |event| event["event"] == "failure");
    events.for_each(drop);
    let ran = FinishedRun::from_output(&launch.wait_with_output().unwrap());
    assert_eq!((ran.code, &failure["code"]), (1, &json!("worker-suspended")), "{failure:#}");
    let verdict = read_verdict(&job_dir, &failure, rank);
    assert!(verdict["collective"]["seq"].as_u64().is_some_and(|seq| seq > 0), "{verdict:#}");
    // The rank may have been stopped within a collective.
    let is_outside = verdict["kind"] == "not_entered";
    let places = &verdict[if is_outside { "not_entered" } else { "undetermined" }];
    assert!(is_outside || verdict["kind"] == "all_entered", "{verdict:#}");
    assert_eq!(places.as_array().map(Vec::len), Some(1), "{verdict:#}");
    assert_eq!((&places[0]["rank"], &places[0]["activity"]["kind"]), (&json!(rank), &json!("stopped")));
}
