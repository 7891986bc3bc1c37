//! Checks that all processes of a job end with the job, whichever process is killed.
use super::*;
use crate::support::environment::{LAUNCH_EXECUTABLE, isolated_command};

/// Shell commands that start four processes: some in other sessions, some whose parents have ended.
const START_DESCENDANTS: &str =
    "setsid sleep 1001 & setsid sh -c 'sleep 1002 & sleep 1003 &' & sleep 1004 & ";

#[test]
fn descendants_end_with_the_job() {
    let success = format!("{START_DESCENDANTS} until pgrep -f 'sleep 1003' > /dev/null; do sleep 0.01; done");
    assert_eq!(MarkedJob::with_shell_script(2, &success, &[]).run(&[]).exit_code(), 0);
    let failure = format!("{START_DESCENDANTS} [ $RANK = 1 ] && exit 5; wait");
    assert_eq!(MarkedJob::with_shell_script(2, &failure, &[]).run(&[]).exit_code(), 1);
}

/// Creates a job of two workers with descendants. Each worker prints `up` and then starts `sleep
/// 1005`.
fn create_job_with_descendants() -> MarkedJob {
    MarkedJob::with_shell_script(
        2,
        &format!("{START_DESCENDANTS} echo up $RANK; sleep 1005"),
        &["logs: {show: [0, 1]}", "grace_period: 1s"],
    )
}

/// Waits until `count` workers of [`create_job_with_descendants`] have started `sleep 1005`. Panics
/// on a timeout.
fn wait_for_workers(job: &MarkedJob, count: usize) {
    let start = Instant::now();
    let mut pauses = PollPauses::new();
    while job.list_processes().values().filter(|line| line.trim() == "sleep 1005").count() < count {
        assert!(start.elapsed() < WAIT_LIMIT);
        pauses.pause();
    }
}

#[test]
fn kill_9_of_the_controller_ends_all_processes() {
    let job = create_job_with_descendants();
    let mut running = job.start(&[]);
    running.read_until("up");
    running.read_until("up");
    running.send_signal(Signal::SIGKILL);
    assert_eq!(running.wait_for_end().status.signal(), Some(9));
    job.wait_until_no_process_remains();
}

#[test]
fn kill_9_of_the_agent_ends_all_processes() {
    let job = create_job_with_descendants();
    let mut running = job.start(&["--json"]);
    wait_for_workers(&job, 2);
    kill(job.find_process("launch agent"), Signal::SIGKILL).unwrap();
    let failure = running.read_until_event("failure");
    assert_eq!((&failure["code"], &failure["reason"]["kind"]), (&"agent-lost".into(), &"agent_lost".into()));
    job.assert_snapshot("agent_lost", failure["message"].as_str().unwrap());
    assert_eq!(running.wait_for_end().exit_code(), 1);
}

#[test]
fn kill_9_of_a_worker_ends_all_processes() {
    let job = create_job_with_descendants();
    let mut running = job.start(&["--json"]);
    wait_for_workers(&job, 2);
    let processes = job.list_processes().into_iter();
    let mut workers = processes.filter(|(pid, line)| line.starts_with("sh -c") && is_group_leader(*pid));
    let (worker, _) = workers.next().unwrap();
    kill(Pid::from_raw(worker), Signal::SIGKILL).unwrap();
    let failure = running.read_until_event("failure");
    assert_eq!((&failure["reason"]["name"], &failure["pid"]), (&"SIGKILL".into(), &worker.into()));
    assert_eq!(running.wait_for_end().exit_code(), 1);
}

/// Returns whether a process is the leader of its process group.
fn is_group_leader(pid: i32) -> bool {
    nix::unistd::getpgid(Some(Pid::from_raw(pid))).is_ok_and(|group| group.as_raw() == pid)
}

#[test]
fn a_suspended_agent_whose_controller_is_killed_ends_all_processes() {
    let job = create_job_with_descendants();
    let mut running = job.start(&[]);
    running.read_until("up");
    running.read_until("up");
    let agent = job.find_process("launch agent");
    kill(agent, Signal::SIGSTOP).unwrap();
    running.send_signal(Signal::SIGKILL);
    assert_eq!(running.wait_for_end().status.signal(), Some(9));
    // the kernel may have continued the agent already, because its process group became orphaned
    _ = kill(agent, Signal::SIGCONT);
    job.wait_until_no_process_remains();
}

#[test]
fn children_that_the_controller_inherited_are_not_killed() {
    let job = MarkedJob::with_shell_script(1, "true", &[]);
    let mut command = isolated_command("sh", job.dir.path());
    let script = format!("sleep 1006 & echo $! > other; exec {LAUNCH_EXECUTABLE} job.yaml");
    command.args(["-c", &script]).stdout(Stdio::null()).stderr(Stdio::null());
    assert_eq!(command.status().unwrap().code(), Some(0));
    let other = fs::read_to_string(job.path("other")).unwrap().trim().parse().unwrap();
    kill(Pid::from_raw(other), Signal::SIGKILL).expect("the process still runs");
}
