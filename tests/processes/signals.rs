//! Signals and terminals.
use super::*;

#[test]
fn interrupt_lets_programs_finish() {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 143)] {
        let script =
            "trap 'echo saved > saved.$RANK; exit 0' TERM; echo up $RANK; while :; do sleep 0.01; done";
        let job = Job::shell(2, script, &["logs: {show: [0, 1]}"]);
        let mut running = job.start(&[]);
        running.until("up");
        running.until("up");
        running.signal(signal);
        let ended = running.end();
        assert_eq!(ended.code(), code);
        assert!(ended.stderr.contains("launch: stopped after"), "{}", ended.stderr);
        assert!(job.path("saved.0").exists() && job.path("saved.1").exists());
    }
}

#[test]
fn a_second_interrupt_kills() {
    let script = "trap 'echo not yet' TERM; echo up $RANK; while :; do sleep 0.01; done";
    let job = Job::shell(2, script, &["grace_period: 1h", "logs: {show: [0, 1]}"]);
    let mut running = job.start(&[]);
    running.until("up");
    running.until("up");
    running.signal(Signal::SIGINT);
    running.until("not yet");
    running.signal(Signal::SIGINT);
    let ended = running.end();
    assert_eq!(ended.code(), 130);
    assert!(ended.stderr.contains("launch: killed after"), "{}", ended.stderr);
}

#[test]
fn programs_that_ignore_sigterm_are_killed_after_their_grace() {
    let script = "trap '' TERM; echo up; [ $RANK = 1 ] && exit 9; while :; do sleep 0.01; done";
    let job = Job::shell(2, script, &["grace_period: 200ms"]);
    let ended = job.run(&[]);
    assert_eq!(ended.code(), 1);
    assert!(ended.stderr.contains("rank 0: killed by SIGKILL"), "{}", ended.stderr);
}

#[test]
fn an_ignored_hangup_stays_ignored() {
    let job = Job::shell(1, "echo up; until [ -e go ]; do sleep 0.01; done; echo fine", &[]);
    let mut command = Command::new("nohup");
    let plain = job.command(&[]);
    command.arg(plain.get_program()).args(plain.get_args()).current_dir(&job.dir);
    command.envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let mut running = Started { job: &job, child, stdout };
    running.until("up");
    running.signal(Signal::SIGHUP);
    fs::write(job.path("go"), "").unwrap();
    let ended = running.end();
    assert_eq!((ended.code(), ended.stdout.as_str()), (0, "[rank 0] fine\n"));
}

#[test]
fn ctrl_c_on_a_terminal_reaches_the_controller_alone() {
    let script =
        "trap 'echo interrupted > wrong' INT; trap 'exit 0' TERM; echo up > up; while :; do sleep 0.01; done";
    let job = Job::shell(1, script, &[]);
    let (mut child, mut terminal) = on_terminal(&job, &[]);
    wait_for(&job.path("up"));
    terminal.write_all(b"\x03").unwrap();
    let shown = rest_of(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(130), "{shown}");
    assert!(!job.path("wrong").exists() && shown.contains("SIGINT: the workers got SIGTERM"), "{shown}");
    assert_eq!(job.alive(), BTreeMap::new());
}

#[test]
fn a_terminal_that_hangs_up_ends_the_job() {
    let job = Job::shell(
        1,
        "trap 'echo saved > saved; exit 0' TERM; echo up > up; while :; do sleep 0.01; done",
        &[],
    );
    let (mut child, terminal) = on_terminal(&job, &[]);
    wait_for(&job.path("up"));
    drop(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(job.path("saved").exists());
    assert_eq!(job.alive(), BTreeMap::new());
}
