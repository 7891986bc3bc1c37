//! Tests `launch run --replace-controller`: a controller that dies is replaced without the loss of
//! a step, and each signal has its effect once.
use crate::support::{JobDirectory, live_run::read_events};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::process::{Child, Stdio};

/// The steps of the training.
const STEPS: u64 = 400;

/// Starts a training of [`STEPS`] steps with two workers, whose events appear on standard output.
fn start_training(job_dir: &JobDirectory, options: &[&str]) -> Child {
    let steps = format!("train.steps={STEPS}");
    let mut command = job_dir.launch_command(&["run", "job.yaml", "--json", "--set", &steps]);
    command.args(["--set", "cluster.workers_per_host=2", "--set", "checkpoint.every=never"]);
    command.args(options).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("launch starts")
}

/// Returns the pid of the controller of the only run.
fn find_controller(job_dir: &JobDirectory) -> Pid {
    let output = job_dir.run_launch(&["ps", "--json"]);
    let runs: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a list of runs");
    let [run] = &runs[..] else { panic!("{runs:?}") };
    Pid::from_raw(run["pid"].as_i64().expect("a pid") as i32)
}

/// Returns the bits of the losses by step.
fn collect_losses(events: &[Value]) -> Vec<(u64, u64)> {
    let steps = events.iter().filter(|event| event["event"] == "step");
    let bits = |event: &Value| event["loss"].as_f64().expect("a loss").to_bits();
    steps.map(|event| (event["step"].as_u64().expect("a number"), bits(event))).collect()
}

#[test]
fn a_killed_controller_is_replaced_and_no_step_is_lost_or_repeated() {
    let undisturbed_dir = JobDirectory::new();
    let mut undisturbed = start_training(&undisturbed_dir, &[]);
    let expected = collect_losses(&read_events(&mut undisturbed).collect::<Vec<_>>());
    assert!(undisturbed.wait().expect("launch ends").success());

    let job_dir = JobDirectory::new();
    let mut process = start_training(&job_dir, &["--replace-controller"]);
    let supervisor = Pid::from_raw(process.id() as i32);
    let (mut events, mut next_kill, mut killed) = (Vec::new(), 50, Vec::new());
    for event in read_events(&mut process) {
        let step = event["step"].as_u64().filter(|_| event["event"] == "step");
        events.push(event);
        // The second controller is killed as well.
        if step.is_some_and(|step| step >= next_kill) && killed.len() < 2 {
            let controller = find_controller(&job_dir);
            assert!(controller != supervisor && !killed.contains(&controller));
            kill(controller, Signal::SIGKILL).expect("the controller is a process");
            killed.push(controller);
            next_kill = STEPS / 2;
        }
    }
    let output = process.wait_with_output().expect("launch ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}\n{:?}", events.last());
    let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    let counts = ["start", "takeover", "restart", "failure", "done"].map(count);
    assert_eq!(counts, [1, 2, 0, 0, 1], "{stderr}");
    // Steps are read from the journal, because a controller may die before it has printed a step.
    let journal = job_dir.run_launch(&["events", "--json"]);
    let journal = String::from_utf8(journal.stdout).expect("text");
    let journal: Vec<Value> =
        journal.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
    let losses = collect_losses(&journal);
    assert_eq!(losses.len() as u64, STEPS, "{stderr}");
    assert!(losses == expected, "the losses differ");
}

/// Checks that a run with a supervised controller saves and stops after `stop`, which gets the pids
/// of the controller and of its supervisor.
#[track_caller]
fn expect_one_stop(stop: impl Fn(&JobDirectory, Pid, Pid)) {
    let job_dir = JobDirectory::new();
    let mut process = start_training(&job_dir, &["--replace-controller"]);
    let supervisor = Pid::from_raw(process.id() as i32);
    let mut events = Vec::new();
    for event in read_events(&mut process) {
        let is_first_step = event["event"] == "step" && event["step"] == 1;
        events.push(event);
        if is_first_step {
            stop(&job_dir, find_controller(&job_dir), supervisor);
        }
    }
    let output = process.wait_with_output().expect("launch ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(143), "{stderr}");
    let saved = events.iter().filter(|event| event["event"] == "checkpoint").count();
    assert_eq!(saved, 1, "{stderr}\n{events:?}");
}

#[test]
fn a_request_to_stop_a_supervised_run_counts_once() {
    // A second request would kill the workers before they have saved.
    expect_one_stop(|_, controller, supervisor| {
        for process in [controller, supervisor] {
            kill(process, Signal::SIGTERM).expect("the process exists");
        }
    });
    expect_one_stop(|_, _, supervisor| kill(supervisor, Signal::SIGTERM).expect("the process exists"));
    expect_one_stop(|job_dir, _, _| assert!(job_dir.run_launch(&["stop"]).status.success()));
}
