//! Nothing of a job is left, whoever is killed.
use super::*;

/// Leaves a process in a session of its own, and one whose parents are gone.
const FAMILY: &str = "setsid sleep 1001 & setsid sh -c 'sleep 1002 & sleep 1003 &' & sleep 1004 & ";

#[test]
fn descendants_end_with_the_job() {
    let well = format!("{FAMILY} until pgrep -f 'sleep 1003' > /dev/null; do sleep 0.01; done");
    assert_eq!(Job::shell(2, &well, &[]).run(&[]).code(), 0);
    let badly = format!("{FAMILY} [ $RANK = 1 ] && exit 5; wait");
    assert_eq!(Job::shell(2, &badly, &[]).run(&[]).code(), 1);
}

fn family() -> (Job, &'static str) {
    (
        Job::shell(
            2,
            &format!("{FAMILY} echo up $RANK; sleep 1005"),
            &["logs: {show: [0, 1]}", "grace_period: 1s"],
        ),
        "sleep 1005",
    )
}

#[test]
fn kill_9_of_the_controller_leaves_nothing() {
    let (job, _) = family();
    let mut running = job.start(&[]);
    running.until("up");
    running.until("up");
    running.signal(Signal::SIGKILL);
    assert_eq!(running.end().status.signal(), Some(9));
    job.gone();
}

#[test]
fn kill_9_of_the_agent_leaves_nothing() {
    let (job, _) = family();
    let mut running = job.start(&[]);
    running.until("up");
    running.until("up");
    kill(job.find("launch agent"), Signal::SIGKILL).unwrap();
    let ended = running.end();
    assert_eq!(ended.code(), 1);
    assert!(ended.stderr.contains("the agent on") && ended.stderr.contains("SIGKILL"), "{}", ended.stderr);
}

#[test]
fn kill_9_of_a_worker_leaves_nothing() {
    let (job, _) = family();
    let mut running = job.start(&["--json"]);
    wait_for_workers(&job, 2);
    let worker =
        job.alive().into_iter().find(|(pid, line)| line.starts_with("sh -c") && leads(*pid)).unwrap().0;
    kill(Pid::from_raw(worker), Signal::SIGKILL).unwrap();
    let line = running.until("\"failure\"");
    assert!(line.contains("SIGKILL") && line.contains(&worker.to_string()), "{line}");
    assert_eq!(running.end().code(), 1);
}

/// Whether a process leads its group.
fn leads(pid: i32) -> bool {
    nix::unistd::getpgid(Some(Pid::from_raw(pid))).is_ok_and(|group| group.as_raw() == pid)
}

#[test]
fn a_stopped_agent_whose_controller_dies_leaves_nothing() {
    let (job, _) = family();
    let mut running = job.start(&[]);
    running.until("up");
    running.until("up");
    let agent = job.find("launch agent");
    kill(agent, Signal::SIGSTOP).unwrap();
    running.signal(Signal::SIGKILL);
    assert_eq!(running.end().status.signal(), Some(9));
    // Once it runs again (the kernel continues orphaned groups, or a person does) it finds that it is alone.
    _ = kill(agent, Signal::SIGCONT);
    job.gone();
}

#[test]
fn children_that_were_there_before_are_left_alone() {
    let job = Job::shell(1, "true", &[]);
    let mut command = Command::new("sh");
    let script = format!("sleep 1006 & echo $! > other; exec {LAUNCH} job.yaml");
    command.args(["-c", &script]).current_dir(&job.dir).stdout(Stdio::null()).stderr(Stdio::null());
    assert_eq!(command.status().unwrap().code(), Some(0));
    let other = fs::read_to_string(job.path("other")).unwrap().trim().parse().unwrap();
    kill(Pid::from_raw(other), Signal::SIGKILL).expect("it still runs");
}
