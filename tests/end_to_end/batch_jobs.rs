//! Tests of batch jobs that their scheduler starts again, without a scheduler: the tests set the
//! variables by which launch recognizes a batch job. Module `slurm` has tests with a real
//! scheduler.
use crate::support::{
    FinishedRun, JobDirectory,
    live_run::{find_worker, read_events, wait_for_event},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// The variables of the batch job in which a run takes place.
type BatchJob<'a> = &'a [(&'a str, &'a str)];

/// The first start of a Slurm job, its start after a requeue, and a requeued job with another id.
const FIRST: BatchJob<'_> = &[("SLURM_JOB_ID", "7"), ("SLURM_CLUSTER_NAME", "c")];
const REQUEUED: BatchJob<'_> =
    &[("SLURM_JOB_ID", "7"), ("SLURM_CLUSTER_NAME", "c"), ("SLURM_RESTART_COUNT", "1")];
const OTHER_JOB: BatchJob<'_> =
    &[("SLURM_JOB_ID", "8"), ("SLURM_CLUSTER_NAME", "c"), ("SLURM_RESTART_COUNT", "1")];
/// A batch job whose scheduler does not count its starts.
const POD: BatchJob<'_> = &[("LAUNCH_BATCH_JOB", "0f1c3e9a-6a43-4c1e-9df0-8b8a4b9f6f0e")];

/// Creates the command `launch job.yaml --json --set …` in a batch job. The workers run on this
/// machine.
fn launch_in(job_dir: &JobDirectory, batch_job: BatchJob<'_>, set: &[&str]) -> Command {
    let set = ["cluster.hosts=local"].iter().chain(set).flat_map(|set| ["--set", *set]);
    let arguments: Vec<&str> = ["job.yaml", "--json"].into_iter().chain(set).collect();
    let mut command = job_dir.launch_command(&arguments);
    command.envs(batch_job.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a job to its end. Panics if the job fails.
#[track_caller]
fn run_in(job_dir: &JobDirectory, batch_job: BatchJob<'_>, set: &[&str]) -> FinishedRun {
    let output = launch_in(job_dir, batch_job, set).output().expect("launch starts");
    FinishedRun::from_output(&output).expect_success()
}

/// Runs a job until it has reported an event of this kind, and then kills the controller. Returns
/// the events up to this one, and the processes of both workers.
fn kill_controller_after(
    job_dir: &JobDirectory,
    batch_job: BatchJob<'_>,
    set: &[&str],
    kind: &str,
) -> (FinishedRun, [u32; 2]) {
    let mut child = launch_in(job_dir, batch_job, set).spawn().expect("launch starts");
    let mut events = Vec::new();
    let mut lines = read_events(&mut child).inspect(|event| events.push(event.clone()));
    wait_for_event(&mut lines, |event| event["event"] == kind);
    drop(lines);
    let workers = [find_worker(job_dir, 0), find_worker(job_dir, 1)];
    kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL).expect("the controller is alive");
    child.wait().expect("an exit status");
    (FinishedRun { code: -1, events, stderr: String::new() }, workers)
}

/// Runs a job until it has reported an event of this kind, and then kills the controller and with
/// it all workers. Returns the events up to this one.
fn kill_run_after(job_dir: &JobDirectory, batch_job: BatchJob<'_>, set: &[&str], kind: &str) -> FinishedRun {
    let (ran, workers) = kill_controller_after(job_dir, batch_job, set, kind);
    wait_until("the end of the workers", || workers.iter().all(|pid| !is_alive(*pid)));
    ran
}

/// Returns whether a process runs.
fn is_alive(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Waits until `condition` returns `true`. Panics after a minute.
#[track_caller]
fn wait_until(name: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(60), "timeout: {name}");
        sleep(Duration::from_millis(10));
    }
}

/// Returns the steps of the checkpoints in the directory of the job, the newest first.
fn list_saved_steps(job_dir: &JobDirectory) -> Vec<u64> {
    let names = fs::read_dir(job_dir.checkpoint_dir()).unwrap().flatten().map(|entry| entry.file_name());
    let mut steps: Vec<u64> =
        names.filter_map(|name| name.to_str()?.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable_by_key(|step| std::cmp::Reverse(*step));
    steps
}

/// Returns the diagnostic of the notice about the batch job; `None` without such a notice.
fn batch_job_notice(ran: &FinishedRun) -> Option<&Value> {
    let diagnostics =
        ran.events_named("notice").into_iter().filter_map(|event| event["diagnostics"].as_array());
    diagnostics.flatten().find(|diagnostic| diagnostic["code"] == "resume-batch-job")
}

/// Checks that a run has continued from the checkpoint of this step in the directory of the job,
/// and that a notice reports this.
#[track_caller]
fn check_continued(job_dir: &JobDirectory, ran: &FinishedRun, step: u64) {
    let resumes = ran.events_named("resume");
    assert_eq!(resumes.len(), 1, "{resumes:?}");
    let path = job_dir.checkpoint_dir().join(format!("step-{step:08}")).display().to_string();
    assert_eq!((&resumes[0]["step"], &resumes[0]["path"]), (&step.into(), &path.as_str().into()));
    assert_eq!(batch_job_notice(ran).expect("a notice")["fields"]["path"], path);
}

/// Checks that a run has begun at step 0.
#[track_caller]
fn check_not_continued(ran: &FinishedRun) {
    assert!(ran.events_named("resume").is_empty());
    assert_eq!(ran.collect_losses().first().map(|(step, ..)| *step), Some(1));
    assert!(batch_job_notice(ran).is_none_or(|notice| notice["fields"].get("path").is_none()));
}

#[test]
fn a_requeued_job_continues_from_its_checkpoint_and_from_no_other() {
    let job_dir = JobDirectory::new();
    let steps = "train.steps=200";
    let undisturbed = run_in(&job_dir, &[], &[steps, "name=undisturbed"]).collect_losses();
    // Checkpoints of an unrelated run, of higher steps, are in the same directory.
    let unrelated = ["name=unrelated", "train.seed=5", "checkpoint.dir=runs/tiny/checkpoints"];
    run_in(&job_dir, &[], &[&unrelated[..], &["train.steps=250"]].concat());
    assert_eq!(list_saved_steps(&job_dir), [250, 240]);
    let never = [steps, "resume.from=never", "checkpoint.keep=0"];
    let first = kill_run_after(&job_dir, FIRST, &never, "checkpoint");
    check_not_continued(&first);
    let newest = list_saved_steps(&job_dir)[2];
    let rest = run_in(&job_dir, REQUEUED, &never);
    check_continued(&job_dir, &rest, newest);
    assert!(newest < 200, "the run ended before it was killed");
    assert_eq!(rest.collect_losses(), undisturbed[newest as usize..]);
    let begun = first.collect_losses();
    assert_eq!(begun, undisturbed[..begun.len()]);
    // Another command of the batch job, another batch job, and the first start of the batch job.
    let other_command = [&never[..], &["run.restarts=1"]].concat();
    for (batch_job, set) in [(REQUEUED, &other_command[..]), (OTHER_JOB, &never), (FIRST, &never)] {
        let ran = kill_run_after(&job_dir, batch_job, set, "step");
        check_not_continued(&ran);
        let notice = batch_job_notice(&ran);
        assert_eq!(notice.is_some(), batch_job != FIRST);
        let names_other_command = notice.is_some_and(|notice| notice["fields"]["other_command"].is_string());
        assert_eq!(names_other_command, batch_job == REQUEUED);
    }
}

#[test]
fn a_pod_that_is_started_again_continues_instead_of_resuming_from_a_path() {
    let job_dir = JobDirectory::new();
    run_in(&job_dir, &[], &["name=start", "train.steps=5"]);
    let from_path = ["train.steps=200", "resume.from=runs/start/checkpoints/step-00000005"];
    let undisturbed = run_in(&job_dir, &[], &[&from_path[..], &["name=undisturbed"]].concat());
    let first = kill_run_after(&job_dir, POD, &from_path, "checkpoint");
    assert_eq!(first.events_named("resume")[0]["step"], 5);
    assert!(batch_job_notice(&first).is_none(), "the scheduler does not state how often it has started it");
    let newest = list_saved_steps(&job_dir)[0];
    let rest = run_in(&job_dir, POD, &from_path);
    check_continued(&job_dir, &rest, newest);
    assert!(newest > 5 && newest < 200, "{newest}");
    assert_eq!(rest.collect_losses(), undisturbed.collect_losses()[newest as usize - 5..]);
}

/// Checks that checkpoints record the batch job even if another controller, outside of the batch
/// job, has started their attempt.
#[test]
fn a_batch_job_continues_from_checkpoints_of_a_run_that_was_taken_over() {
    let job_dir = JobDirectory::new();
    let set = ["train.steps=200", "resume.from=never", "run.on_controller_loss=continue", "run.restarts=1"];
    let (_, workers) = kill_controller_after(&job_dir, POD, &set, "step");
    kill(Pid::from_raw(workers[0] as i32), Signal::SIGKILL).expect("the worker is alive");
    let attached = job_dir.run_launch(&["attach", "--json"]);
    let attached = FinishedRun::from_output(&attached).expect_success();
    assert_eq!(attached.events_named("restart").len(), 1);
    let rest = run_in(&job_dir, POD, &set);
    check_continued(&job_dir, &rest, 200);
    assert!(rest.collect_losses().is_empty());
}

#[test]
fn a_malformed_id_of_a_batch_job_is_rejected() {
    let job_dir = JobDirectory::new();
    let output = launch_in(&job_dir, &[("LAUNCH_BATCH_JOB", "two words")], &[]).output().unwrap();
    let ran = FinishedRun::from_output(&output);
    assert_eq!((ran.code, ran.failure_code()), (2, "batch-job-id-invalid"), "{}", ran.stderr);
    assert!(!job_dir.path("runs").exists(), "nothing was started");
}
