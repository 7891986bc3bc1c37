//! Tests signals to the controller, from other processes and from terminals.
use super::*;
use crate::support::environment::isolated_command;

#[test]
fn after_a_signal_programs_may_end_by_themselves() {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 143)] {
        let script =
            "trap 'echo saved > saved.$RANK; exit 0' TERM; echo up $RANK; while :; do sleep 0.01; done";
        let job = MarkedJob::with_shell_script(2, script, &["logs: {show: [0, 1]}"]);
        let mut running = job.start(&[]);
        running.read_until("up");
        running.read_until("up");
        running.send_signal(signal);
        let ended = running.wait_for_end();
        assert_eq!(ended.exit_code(), code);
        job.assert_snapshot(&format!("stopped_by_{signal}"), &ended.stderr);
        assert!(job.path("saved.0").exists() && job.path("saved.1").exists());
    }
}

#[test]
fn a_second_interrupt_kills_the_workers() {
    let script = "trap 'echo not yet' TERM; echo up $RANK; while :; do sleep 0.01; done";
    let job = MarkedJob::with_shell_script(2, script, &["grace_period: 1h", "logs: {show: [0, 1]}"]);
    let mut running = job.start(&[]);
    running.read_until("up");
    running.read_until("up");
    running.send_signal(Signal::SIGINT);
    running.read_until("not yet");
    running.send_signal(Signal::SIGINT);
    let ended = running.wait_for_end();
    assert_eq!(ended.exit_code(), 130);
    job.assert_snapshot("killed_by_a_second_interrupt", &ended.stderr);
}

#[test]
fn programs_that_ignore_sigterm_are_killed_after_the_grace_period() {
    let script = "trap '' TERM; touch up.$RANK; until [ -e up.0 ]; do sleep 0.01; done; [ $RANK = 1 ] && exit 9; \
                  while :; do sleep 0.01; done";
    let job = MarkedJob::with_shell_script(2, script, &["grace_period: 200ms"]);
    let ended = job.run(&[]);
    assert_eq!(ended.exit_code(), 1);
    job.assert_snapshot("killed_after_the_grace_period", &ended.stderr);
}

#[test]
fn under_nohup_the_controller_ignores_sighup() {
    let job =
        MarkedJob::with_shell_script(1, "echo up; until [ -e go ]; do sleep 0.01; done; echo fine", &[]);
    let mut command = isolated_command("nohup", job.dir.path());
    let plain = job.launch_command(&[]);
    command.arg(plain.get_program()).args(plain.get_args());
    command.envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let mut running = RunningJob { job: &job, child, stdout };
    running.read_until("up");
    running.send_signal(Signal::SIGHUP);
    fs::write(job.path("go"), "").unwrap();
    let ended = running.wait_for_end();
    assert_eq!((ended.exit_code(), ended.stdout.as_str()), (0, "[rank 0] fine\n"));
}

#[test]
fn ctrl_c_on_a_terminal_reaches_only_the_controller() {
    let script =
        "trap 'echo interrupted > wrong' INT; trap 'exit 0' TERM; echo up > up; while :; do sleep 0.01; done";
    let job = MarkedJob::with_shell_script(1, script, &[]);
    let (mut child, mut terminal) = start_on_terminal(&job, &[]);
    wait_for_file(&job.path("up"));
    terminal.write_all(b"\x03").unwrap();
    let screen = read_terminal(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(130), "{screen}");
    assert!(!job.path("wrong").exists(), "{screen}");
    let journal = fs::read_to_string(job.find_newest_run_dir().join("events.jsonl")).unwrap();
    let events = journal.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let notices = events.filter(|event| event["event"] == "notice");
    let messages: Vec<String> = notices.map(|event| event["message"].to_string()).collect();
    job.assert_snapshot("ctrl_c_on_a_terminal", &messages.join("\n"));
    assert_eq!(job.list_processes(), BTreeMap::new());
}

#[test]
fn a_closed_terminal_stops_the_job() {
    let job = MarkedJob::with_shell_script(
        1,
        "trap 'echo saved > saved; exit 0' TERM; echo up > up; while :; do sleep 0.01; done",
        &[],
    );
    let (mut child, terminal) = start_on_terminal(&job, &[]);
    wait_for_file(&job.path("up"));
    drop(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(job.path("saved").exists());
    assert_eq!(job.list_processes(), BTreeMap::new());
}

/// The settings of `run` with which programs are asked to stop by SIGUSR1, and get SIGTERM after
/// `stop_timeout`.
fn stop_signal_settings(stop_timeout: &str) -> [String; 2] {
    ["stop_signal: SIGUSR1".to_owned(), format!("stop_timeout: {stop_timeout}")]
}

#[test]
fn a_program_saves_on_its_stop_signal_before_sigterm() {
    let program = "trap 'sleep 0.5; echo saved > saved.$RANK; exit 0' USR1; \
                   trap 'echo term > term.$RANK; exit 1' TERM; echo up > up.$RANK; \
                   while :; do sleep 0.01; done\n";
    // The program of rank 1 is started by a shell, which does not handle the signal.
    let script = "[ $RANK = 0 ] && . ./program.sh; sh ./program.sh; :";
    let settings = stop_signal_settings("1h");
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let job = MarkedJob::with_shell_script(2, script, &settings.each_ref().map(String::as_str));
        fs::write(job.path("program.sh"), program).unwrap();
        let running = job.start(&[]);
        ["up.0", "up.1"].iter().for_each(|name| wait_for_file(&job.path(name)));
        running.send_signal(signal);
        let ended = running.wait_for_end();
        assert_eq!(ended.exit_code(), if signal == Signal::SIGINT { 130 } else { 143 }, "{}", ended.stderr);
        for rank in 0..2 {
            assert!(job.path(&format!("saved.{rank}")).exists(), "{signal} {rank}: {}", ended.stderr);
            assert!(!job.path(&format!("term.{rank}")).exists(), "{signal} {rank}: {}", ended.stderr);
        }
    }
}

#[test]
fn a_program_that_continues_after_its_stop_signal_gets_sigterm_and_sigkill() {
    let script = "trap 'date +%s%N > usr1.$RANK' USR1; trap 'date +%s%N > term.$RANK' TERM; \
                  echo up $RANK; while :; do sleep 0.01; done";
    let mut settings = stop_signal_settings("700ms").to_vec();
    settings.push("grace_period: 300ms".to_owned());
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let job = MarkedJob::with_shell_script(1, script, &settings);
    let mut running = job.start(&[]);
    running.read_until("up");
    running.send_signal(Signal::SIGTERM);
    let ended = running.wait_for_end();
    assert_eq!(ended.exit_code(), 143, "{}", ended.stderr);
    job.assert_snapshot("stopped_after_its_stop_signal", &ended.stderr);
    let read_ms =
        |name: &str| fs::read_to_string(job.path(name)).unwrap().trim().parse::<u64>().unwrap() / 1_000_000;
    let (usr1, term) = (read_ms("usr1.0"), read_ms("term.0"));
    // The handler of the shell runs up to a sleep later than the signal.
    assert!(term >= usr1 + 500, "SIGUSR1 at {usr1} ms, SIGTERM at {term} ms");
}

#[test]
fn a_program_that_ignores_its_stop_signal_gets_sigterm_at_once() {
    let script = "trap '' USR1; trap 'echo term > term.$RANK; exit 0' TERM; echo up > up.$RANK; \
                  while :; do sleep 0.01; done";
    let settings = stop_signal_settings("1h");
    let job = MarkedJob::with_shell_script(2, script, &settings.each_ref().map(String::as_str));
    let running = job.start(&["--json"]);
    ["up.0", "up.1"].iter().for_each(|name| wait_for_file(&job.path(name)));
    running.send_signal(Signal::SIGTERM);
    let ended = running.wait_for_end();
    assert_eq!(ended.exit_code(), 143, "{}", ended.stderr);
    assert!(job.path("term.0").exists() && job.path("term.1").exists());
    let events = ended.parse_events();
    let of_rank = events.iter().filter(|event| event["event"] == "notice" && event["rank"].is_u64());
    assert_eq!(of_rank.count(), 1, "one warning for all ranks: {events:?}");
}
