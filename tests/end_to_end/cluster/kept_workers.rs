//! Tests that workers which did not fail keep their processes when an attempt ends, and that the
//! losses and weights are those of the undisturbed run.
use super::{
    memory_copies::{
        NO_CHECKPOINTS, check_resumes, check_weights, list_workers, run_undisturbed, start_with_spare_host,
    },
    *,
};
use crate::{emulated_gpu, support::slowed_worker::SlowedWorker};
use std::collections::BTreeSet;

/// Starts the job with the settings `set`, with copies in memory. The checkpoints are in the
/// directory `kept`.
fn start_with_copies(job_dir: &JobDirectory, set: &[&str]) -> ActiveRun {
    let args = ["job.yaml", "--json"].map(str::to_owned);
    let copies = ["checkpoint.memory.copies=0", "run.restarts=100", "checkpoint.dir=kept"];
    start_run(job_dir, &args, &[&copies, set].concat())
}

/// Kills a process with SIGKILL.
fn kill_process(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
}

/// Waits until the run has resumed, and checks that there are `count` workers, among them the
/// processes `kept`.
#[track_caller]
fn assert_workers_kept(job: &mut ActiveRun, kept: &[i32], count: usize) {
    job.wait_for_event("resume", 0);
    let workers: BTreeSet<i32> = list_workers(job.child.id()).into_iter().collect();
    assert!(kept.iter().all(|pid| workers.contains(pid)), "{kept:?} in {workers:?}");
    assert_eq!(workers.len(), count, "{workers:?}");
}

/// Returns the numbers of open descriptors and of threads, and the resident memory in bytes, of a
/// process.
fn measure_process(pid: i32) -> (usize, usize, u64) {
    let count = |directory: &str| fs::read_dir(format!("/proc/{pid}/{directory}")).unwrap().count();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let rss = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let kib: u64 = rss.trim().trim_end_matches(" kB").parse().unwrap();
    (count("fd"), count("task"), kib * 1024)
}

#[test]
fn workers_that_did_not_fail_keep_their_processes_at_every_stage() {
    for stage in 0..4 {
        let job_dir = JobDirectory::new();
        let stage_setting = format!("train.zero.stage={stage}");
        let set = ["train.steps=150", "cluster.workers_per_host=3", &stage_setting];
        let whole = run_undisturbed(&job_dir, &set);
        let mut job = start_with_copies(&job_dir, &[&set[..], &[NO_CHECKPOINTS]].concat());
        let mut step = 0;
        for kill_number in 0..4_usize {
            step = job.wait_for_event("step", step + 3)["step"].as_u64().unwrap();
            thread::sleep(Duration::from_millis(kill_number as u64 * 7 % 13));
            let mut workers = list_workers(job.child.id());
            assert_eq!(workers.len(), 3, "{workers:?}");
            kill_process(workers.remove((kill_number + stage) % 3));
            assert_workers_kept(&mut job, &workers, 3);
        }
        let ran = job.wait_for_end().expect_success();
        check_resumes(&ran, &whole, 4);
        check_weights(&job_dir, ["undisturbed", "kept"], whole.len());
    }
}

/// Kills workers at arbitrary moments of evaluations and of saves in the background.
#[test]
fn workers_leave_evaluations_and_saves() {
    let job_dir = JobDirectory::new();
    let set = ["train.steps=150", "train.eval.every=2", "train.eval.files=[corpus.txt]"];
    let whole = run_undisturbed(&job_dir, &set);
    let saves = ["checkpoint.every=3", "checkpoint.async=true", "checkpoint.keep=2"];
    let mut job = start_with_copies(&job_dir, &[&set[..], &saves].concat());
    let mut step = 0;
    for kill_number in 0..10_usize {
        step = job.wait_for_event("step", step + 2)["step"].as_u64().unwrap();
        thread::sleep(Duration::from_millis(kill_number as u64 * 5 % 23));
        let mut workers = list_workers(job.child.id());
        assert_eq!(workers.len(), 2, "{workers:?}");
        kill_process(workers.remove(kill_number % 2));
        assert_workers_kept(&mut job, &workers, 2);
    }
    let ran = job.wait_for_end().expect_success();
    for step in ran.collect_losses() {
        assert_eq!(step, whole[step.0 as usize - 1]);
    }
    check_weights(&job_dir, ["undisturbed", "kept"], whole.len());
    let left = fs::read_dir(job_dir.path("kept")).unwrap().flatten().map(|entry| entry.file_name());
    let hidden: Vec<_> = left.filter(|name| name.to_string_lossy().contains("saving")).collect();
    assert!(hidden.is_empty(), "{hidden:?}");
}

#[test]
fn a_second_kill_while_the_next_attempt_starts_changes_no_loss() {
    let job_dir = JobDirectory::new();
    let set = ["train.steps=150", "cluster.workers_per_host=3"];
    let whole = run_undisturbed(&job_dir, &set);
    let mut job = start_with_copies(&job_dir, &[&set[..], &[NO_CHECKPOINTS]].concat());
    let mut step = 0;
    for kill_number in 0..8_usize {
        step = job.wait_for_event("step", step + 2)["step"].as_u64().unwrap();
        kill_process(list_workers(job.child.id())[kill_number % 3]);
        job.wait_for_event("restart", 0);
        thread::sleep(Duration::from_millis(kill_number as u64 * 6));
        // kept and new workers are killed, before and after they have joined
        let workers = list_workers(job.child.id());
        if let Some(pid) = workers.get(kill_number / 2 % workers.len().max(1)) {
            _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
    }
    let ran = job.wait_for_end().expect_success();
    for step in ran.collect_losses() {
        assert_eq!(step, whole[step.0 as usize - 1]);
    }
    check_weights(&job_dir, ["undisturbed", "kept"], whole.len());
}

#[test]
fn a_worker_that_does_not_leave_is_replaced() {
    let job_dir = JobDirectory::new();
    let set = ["train.steps=150", "cluster.workers_per_host=3"];
    let whole = run_undisturbed(&job_dir, &set);
    let mut job = start_with_copies(&job_dir, &[&set[..], &[NO_CHECKPOINTS]].concat());
    job.wait_for_event("step", 5);
    let workers = list_workers(job.child.id());
    kill(Pid::from_raw(workers[0]), Signal::SIGSTOP).unwrap();
    kill_process(workers[1]);
    assert_workers_kept(&mut job, &workers[2..], 3);
    assert!(!list_workers(job.child.id()).contains(&workers[0]), "the suspended worker was killed");
    let ran = job.wait_for_end().expect_success();
    check_resumes(&ran, &whole, 1);
    check_weights(&job_dir, ["undisturbed", "kept"], whole.len());
}

/// Starts the job with the settings `set` and two workers that share an emulated GPU.
fn start_on_emulated_gpu(job_dir: &JobDirectory, set: &[&str]) -> ActiveRun {
    let args = ["job.yaml", "--json"].map(str::to_owned);
    let gpu = ["cluster.devices=cuda", "cluster.workers_per_host=2", "cluster.workers_per_gpu=2"];
    let model = [
        "train.steps=60",
        "train.model.hidden_size=12",
        "train.model.intermediate_size=17",
        "train.model.num_hidden_layers=1",
        "train.data.seq_len=8",
        "train.batch.global=4",
        "train.cuda_graphs=true",
    ];
    let variables =
        [("LD_LIBRARY_PATH", emulated_gpu::library_directory()), ("LAUNCH_GPUS", std::path::Path::new("1"))];
    start_run_with_variables(job_dir, &args, &[&gpu[..], &model, set].concat(), &variables)
}

#[test]
fn workers_on_gpus_that_did_not_fail_keep_their_processes() {
    let job_dir = JobDirectory::new();
    fs::create_dir(job_dir.path("home")).unwrap();
    let whole = start_on_emulated_gpu(&job_dir, &[NO_CHECKPOINTS, "checkpoint.dir=undisturbed"]);
    let whole = whole.wait_for_end().expect_success().collect_losses();
    let copies = ["checkpoint.memory.copies=0", "run.restarts=100", "checkpoint.dir=kept"];
    let mut job = start_on_emulated_gpu(&job_dir, &[&copies[..], &[NO_CHECKPOINTS]].concat());
    let mut step = 0;
    for kill_number in 0..4_usize {
        step = job.wait_for_event("step", step + 4)["step"].as_u64().unwrap();
        thread::sleep(Duration::from_millis(kill_number as u64 * 11 % 17));
        let mut workers = list_workers(job.child.id());
        assert_eq!(workers.len(), 2, "{workers:?}");
        kill_process(workers.remove(kill_number % 2));
        assert_workers_kept(&mut job, &workers, 2);
    }
    let ran = job.wait_for_end().expect_success();
    check_resumes(&ran, &whole, 4);
    check_weights(&job_dir, ["undisturbed", "kept"], whole.len());
}

#[test]
fn restarts_do_not_make_a_kept_worker_grow() {
    const KILLS: usize = 40;
    let job_dir = JobDirectory::new();
    fs::create_dir(job_dir.path("home")).unwrap();
    let set =
        ["train.steps=100000", "checkpoint.every=5", "train.eval.every=3", "train.eval.files=[corpus.txt]"];
    let mut job = start_with_copies(&job_dir, &set);
    job.wait_for_event("step", 1);
    let kept = list_workers(job.child.id())[0];
    let (mut step, mut first) = (0, (0, 0, 0));
    for kill_number in 0..KILLS {
        step = job.wait_for_event("step", step + 1)["step"].as_u64().unwrap();
        if kill_number == KILLS / 4 {
            first = measure_process(kept);
        }
        let other = list_workers(job.child.id()).into_iter().find(|pid| *pid != kept).unwrap();
        kill_process(other);
        assert_workers_kept(&mut job, &[kept], 2);
    }
    job.wait_for_event("step", step + 1);
    let last = measure_process(kept);
    assert!(last.0 <= first.0 + 4 && last.1 <= first.1 + 2, "{first:?} {last:?}");
    assert!(last.2 < first.2 + first.2 / 4 + (8 << 20), "{first:?} {last:?}");
    for _ in 0..2 {
        kill(Pid::from_raw(job.child.id() as i32), Signal::SIGINT).unwrap();
    }
    job.wait_for_end();
    assert!(!std::path::Path::new(&format!("/proc/{kept}")).exists(), "the kept worker has ended");
}

#[test]
fn without_keep_workers_all_workers_are_started_again() {
    let job_dir = JobDirectory::new();
    let set = ["train.steps=150"];
    let whole = run_undisturbed(&job_dir, &set);
    let mut job = start_with_copies(
        &job_dir,
        &[&set[..], &[NO_CHECKPOINTS, "checkpoint.memory.keep_workers=false"]].concat(),
    );
    job.wait_for_event("step", 3);
    let workers = list_workers(job.child.id());
    kill_process(workers[0]);
    job.wait_for_event("resume", 0);
    let later = list_workers(job.child.id());
    assert!(later.len() == 2 && later.iter().all(|pid| !workers.contains(pid)), "{workers:?} {later:?}");
    check_resumes(&job.wait_for_end().expect_success(), &whole, 1);
}

#[test]
fn the_workers_of_other_hosts_keep_their_processes_after_the_loss_of_a_host() {
    let test =
        "cluster::kept_workers::the_workers_of_other_hosts_keep_their_processes_after_the_loss_of_a_host";
    check_loss_of_a_host(test, &[]);
}

/// The agents form a chain in any order. The lost agent may have another one below it.
#[test]
fn workers_below_other_agents_keep_their_processes_after_the_loss_of_a_host() {
    let test =
        "cluster::kept_workers::workers_below_other_agents_keep_their_processes_after_the_loss_of_a_host";
    // On a busy machine, a reconnection takes seconds.
    let set = ["cluster.ssh.fanout=1", "run.host_lease=10s"];
    check_loss_of_a_host(test, &set);
}

/// Trains on three hosts, with the settings `set`, and loses a host and then a worker of another
/// one. Checks, as the test `test`, that the other workers keep their processes.
fn check_loss_of_a_host(test: &str, set: &[&str]) {
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let steps = "train.steps=150";
    let whole = run_undisturbed(&job_dir, &[steps]);
    let set = [&[steps, "run.restarts=3", "run.min_hosts=3"], set].concat();
    let mut job = start_with_spare_host(&job_dir, &hosts, "kept", &set);
    // The training must take longer than the commands of the test.
    let slowed = SlowedWorker::start(&hosts, "h0");
    job.wait_for_event("step", 10);
    // the spare host has the last index, so the ranks of the hosts before the lost one are
    // unchanged
    let list = |host: &str| {
        let pids = hosts.run_shell(host, "pgrep -f '^launch worker' | sort -n");
        pids.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()).collect::<Vec<_>>()
    };
    let before = ["h0", "h1"].map(list);
    hosts.run_hosts_command(&["crash", "h2"]);
    let resumed = job.wait_for_event("resume", 0);
    assert_eq!((&resumed["source"], &resumed["world"]), (&"memory".into(), &6.into()), "{resumed}");
    assert_eq!(["h0", "h1"].map(list), before);
    job.wait_for_event("step", resumed["step"].as_u64().unwrap() + 3);
    // a worker of another host is killed, too
    hosts.run_shell("h1", "kill -9 $(pgrep -f '^launch worker' | head -1)");
    drop(slowed);
    let ran = job.wait_for_end().expect_success();
    check_resumes(&ran, &whole, 2);
    check_weights(&job_dir, ["undisturbed", "runs/kept/checkpoints"], whole.len());
    assert_nothing_left(&hosts, &["h0", "h1", "h3"]);
}
