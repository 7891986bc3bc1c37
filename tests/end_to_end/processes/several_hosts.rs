//! Tests jobs on several simulated hosts. Each host is a separate agent on this machine.
use super::*;

/// Returns a command that runs the job with one agent on this machine for each of `hosts` simulated
/// hosts.
fn build_several_hosts_command(job: &MarkedJob, hosts: u32, args: &[&str]) -> Command {
    let mut command = job.launch_command(args);
    command.env("LAUNCH_LOCAL_AGENTS", hosts.to_string());
    command
}

#[test]
fn ranks_of_several_hosts_have_their_numbers_in_the_environment() {
    let job = MarkedJob::with_shell_script(
        2,
        "echo $GROUP_RANK $LOCAL_RANK $WORLD_SIZE $CROSS_SIZE > out.$RANK",
        &[],
    );
    let run = job.run_command(build_several_hosts_command(&job, 3, &["--json"]));
    assert_eq!(run.exit_code(), 0, "{}", run.stderr);
    for rank in 0..6 {
        let text = fs::read_to_string(job.path(&format!("out.{rank}"))).unwrap();
        assert_eq!(text, format!("{} {} 6 3\n", rank / 2, rank % 2));
    }
    assert_eq!(run.expect_one_event("placement")["hosts"].as_array().unwrap().len(), 3);
}

#[test]
fn a_restart_has_the_same_number_on_every_rank() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS >> count.$RANK; \
                  while [ ! -s count.0 -o ! -s count.1 -o ! -s count.3 ]; do sleep 0.02; done; \
                  if [ $TORCHELASTIC_RESTART_COUNT-$RANK = 0-2 ]; then exit 3; fi; \
                  if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then sleep 100; fi";
    let job = MarkedJob::with_shell_script(2, script, &["restarts: 2", "grace_period: 1s"]);
    let run = job.run_command(build_several_hosts_command(&job, 2, &["--json"]));
    assert_eq!(run.exit_code(), 0, "{}", run.stderr);
    for rank in 0..4 {
        assert_eq!(fs::read_to_string(job.path(&format!("count.{rank}"))).unwrap(), "0/2\n1/2\n");
    }
    let restart = run.expect_one_event("restart");
    assert_eq!(
        (&restart["rank"], &restart["reason"]["code"], &restart["restarts_left"]),
        (&2.into(), &3.into(), &1.into())
    );
    assert!(run.parse_events().iter().all(|e| e["event"] != "failure"));
}

#[test]
fn kill_9_of_one_agent_takes_one_restart() {
    let script = "echo $RANK >> started; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 100";
    let job = MarkedJob::with_shell_script(1, script, &["restarts: 1", "grace_period: 1s"]);
    let child = build_several_hosts_command(&job, 3, &["--json"]).spawn().unwrap();
    let start = Instant::now();
    while fs::read_to_string(job.path("started")).unwrap_or_default().lines().count() < 3 {
        assert!(start.elapsed() < WAIT_LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    let agents: Vec<i32> =
        job.list_processes().into_iter().filter(|(_, l)| l.contains("agent")).map(|(pid, _)| pid).collect();
    kill(Pid::from_raw(agents[1]), Signal::SIGKILL).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(job.list_processes(), BTreeMap::new(), "processes remain");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_to_string(job.path("started")).unwrap().lines().count(), 6);
}

#[test]
fn a_suspended_rank_is_reported_with_its_stacks_in_the_log() {
    let job = MarkedJob::with_shell_script(
        2,
        "if [ $RANK = 1 ]; then kill -STOP $$; fi; sleep 100",
        &["hang_timeout: 2s", "grace_period: 1s"],
    );
    let run = job.run(&["--json"]);
    assert_eq!(run.exit_code(), 1);
    let failure = run.expect_one_event("failure");
    assert!(failure["rank"] == 1 && failure["code"] == "worker-suspended", "{failure}");
    assert!(job.read_rank_log(1).contains("state T"), "{}", job.read_rank_log(1));
}

#[test]
fn a_request_to_save_reaches_only_workers_that_handle_it() {
    let script = "if [ $RANK = 0 ]; then trap 'echo saved > saved' USR1; fi; touch up.$RANK; \
                  while [ ! -e saved ]; do sleep 0.05; done";
    let job = MarkedJob::with_shell_script(2, script, &[]);
    let mut child = job.launch_command(&["--json"]).spawn().unwrap();
    wait_for_file(&job.path("up.0"));
    wait_for_file(&job.path("up.1"));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGUSR1).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "SIGUSR1 killed rank 1, which has no handler");
}
