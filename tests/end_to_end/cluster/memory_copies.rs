//! Tests that a run with copies of its state in memory repeats no step before its most recent copy
//! after a worker was killed or a host was lost, and that its weights do not change.
use super::*;
use crate::support::{process_list::list_processes, slowed_worker::SlowedWorker};

/// The setting of a run that makes no checkpoints while it trains.
pub(super) const NO_CHECKPOINTS: &str = "checkpoint.every=never";

/// Runs the job undisturbed with the settings `set`. Returns its losses. The checkpoints are in the
/// directory `undisturbed`.
pub(super) fn run_undisturbed(job_dir: &JobDirectory, set: &[&str]) -> Vec<(u64, u64, u64)> {
    fs::create_dir_all(job_dir.path("home")).unwrap();
    let alone = [set, &["resume.from=never", NO_CHECKPOINTS, "checkpoint.dir=undisturbed"]].concat();
    job_dir.run(&alone).expect_success().collect_losses()
}

/// Starts the tiny job on three of the four hosts, with copies in memory and one spare host. `set`
/// are further settings.
pub(super) fn start_with_spare_host(
    job_dir: &JobDirectory,
    hosts: &SimulatedHosts,
    name: &str,
    set: &[&str],
) -> ActiveRun {
    let args = write_job(job_dir, hosts, name, TINY_JOB, ALL_HOSTS);
    let copies = [NO_CHECKPOINTS, "checkpoint.memory.copies=1", "cluster.use_hosts=3"];
    start_run(job_dir, &args, &[&copies, set].concat())
}

/// Lists the pids of the built-in workers of the run whose controller is `controller`, in ascending
/// order.
pub(super) fn list_workers(controller: u32) -> Vec<i32> {
    let parent = |pid: i32| -> Option<i32> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
    };
    let is_worker = |pid: &i32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_builtin = words.split(|byte| *byte == 0).nth(1) == Some(b"worker");
        is_builtin && parent(*pid).and_then(parent) == Some(controller as i32)
    };
    let mut pids: Vec<i32> = list_processes().filter(is_worker).collect();
    pids.sort_unstable();
    pids
}

/// Checks the events of a run that resumed from memory `resumes` times: each resume follows the
/// newest reported step, and each step is reported once, with the loss of the undisturbed run.
#[track_caller]
pub(super) fn check_resumes(ran: &FinishedRun, whole: &[(u64, u64, u64)], resumes: usize) {
    let mut newest = 0;
    let mut found = 0;
    for event in &ran.events {
        let step = event["step"].as_u64().unwrap_or(0);
        match event["event"].as_str() {
            Some("step") => newest = step,
            Some("resume") => {
                assert_eq!(event["source"], "memory", "{event}");
                assert_eq!(step, newest, "{event}");
                found += 1;
            }
            _ => {}
        }
    }
    assert_eq!(found, resumes);
    assert_eq!(ran.collect_losses(), whole);
}

/// Checks that the last checkpoints of two directories have the same weights and optimizer states.
#[track_caller]
pub(super) fn check_weights(job_dir: &JobDirectory, directories: [&str; 2], step: usize) {
    let [a, b] = directories.map(|directory| format!("{directory}/step-{step:08}"));
    let compared = job_dir.run_launch(&["ckpt", "diff", &a, &b]);
    assert!(compared.status.success(), "{}", support::output_to_text(&compared));
}

#[test]
fn workers_that_are_killed_ten_times_resume_from_memory() {
    const KILLS: usize = 10;
    let job_dir = JobDirectory::new();
    fs::create_dir(job_dir.path("home")).unwrap();
    let steps = "train.steps=400";
    let whole = run_undisturbed(&job_dir, &[steps]);
    let args = ["job.yaml", "--json"].map(str::to_owned);
    let set =
        [steps, NO_CHECKPOINTS, "checkpoint.memory.copies=0", "run.restarts=10", "checkpoint.dir=copied"];
    let mut job = start_run(&job_dir, &args, &set);
    let mut step = 0;
    for kill_number in 0..KILLS {
        // some kills follow a step at once, and others some milliseconds later
        step = job.wait_for_event("step", step + 3 + kill_number as u64 * 5 % 7)["step"].as_u64().unwrap();
        thread::sleep(Duration::from_millis(kill_number as u64 * 3 % 11));
        let workers = list_workers(job.child.id());
        assert_eq!(workers.len(), 2, "{workers:?}");
        kill(Pid::from_raw(workers[kill_number % 2]), Signal::SIGKILL).unwrap();
        job.wait_for_event("resume", 0);
    }
    let ran = job.wait_for_end().expect_success();
    check_resumes(&ran, &whole, KILLS);
    let pauses: Vec<_> = ran.events_named("restart").iter().map(|event| event["pause_s"].as_f64()).collect();
    assert_eq!(pauses, vec![Some(0.0); KILLS], "progress was made before each kill");
    check_weights(&job_dir, ["undisturbed", "copied"], whole.len());
}

/// Kills a worker again and again, either before its copy of a step is complete, or when all copies
/// of the step are complete and the step is not yet reported.
#[test]
fn workers_that_are_killed_around_the_end_of_a_copy_report_each_step_once() {
    let job_dir = JobDirectory::new();
    let steps = "train.steps=21";
    let whole = run_undisturbed(&job_dir, &[steps]);
    let copies = ["checkpoint.memory.copies=0", "run.restarts=100", "checkpoint.dir=copied"];
    let set = [&[steps, "resume.from=never", NO_CHECKPOINTS], &copies[..]].concat();
    // Each process of the rank is killed in its fourth copy, which is incomplete in the first case.
    for (fault_point, resumes) in [("complete_copy", 6), ("report_copied_step", 5)] {
        for rank in 0..2 {
            _ = fs::remove_dir_all(job_dir.path("copied"));
            let ran = job_dir.run_with_env(&set, "LAUNCH_FAULT", &format!("{rank}:{fault_point}@4"));
            check_resumes(&ran.expect_success(), &whole, resumes);
            check_weights(&job_dir, ["undisturbed", "copied"], whole.len());
        }
    }
}

#[test]
fn hosts_that_are_lost_are_replaced_from_the_memory_of_their_peers() {
    let test = "cluster::memory_copies::hosts_that_are_lost_are_replaced_from_the_memory_of_their_peers";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let steps = "train.steps=150";
    let whole = run_undisturbed(&job_dir, &[steps]);
    let mut job =
        start_with_spare_host(&job_dir, &hosts, "copied", &[steps, "run.restarts=2", "run.min_hosts=2"]);
    // The training must not end before both hosts are lost.
    let slowed = SlowedWorker::start(&hosts, "h0");
    job.wait_for_event("step", 10);
    hosts.run_hosts_command(&["crash", "h1"]);
    let resumed = job.wait_for_event("resume", 0);
    assert_eq!((&resumed["source"], &resumed["world"]), (&"memory".into(), &6.into()), "{resumed}");
    job.wait_for_event("step", resumed["step"].as_u64().unwrap() + 5);
    // no spare host is left
    hosts.run_hosts_command(&["crash", "h2"]);
    drop(slowed);
    let ran = job.wait_for_end().expect_success();
    check_resumes(&ran, &whole, 2);
    let worlds: Vec<_> = ran.events_named("placement").iter().map(|e| e["world"].clone()).collect();
    assert_eq!(worlds, [6, 6, 4]);
    check_weights(&job_dir, ["undisturbed", "runs/copied/checkpoints"], whole.len());
    assert_nothing_left(&hosts, &["h0", "h3"]);
}
