//! Tests built-in training: output, interrupts and killed processes.
use super::*;
use crate::support::environment::LAUNCH_EXECUTABLE;

#[test]
fn training_on_a_terminal_shows_progress_and_a_loss_curve() {
    let job = MarkedJob::with_training(20);
    let (mut child, terminal) = start_on_terminal(&job, &[]);
    let screen = read_terminal(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(0), "{screen}");
    // the words of the progress bar, of the loss curve and of the summary
    let words = ["training", "loss", "tokens/s", "checkpoint", "done", "└step", "files"];
    let absent: Vec<_> = words.iter().filter(|word| !screen.contains(**word)).collect();
    assert!(absent.is_empty(), "{absent:?} missing in {screen}");
}

#[test]
fn training_without_a_terminal_prints_few_plain_lines() {
    let ended = MarkedJob::with_training(100).run(&[]);
    assert_eq!((ended.exit_code(), ended.stdout.as_str()), (0, ""), "{}", ended.stderr);
    let step_line = regex::Regex::new(r"(?m)^step (\d+)/100  loss \d").unwrap();
    let steps: Vec<u32> = step_line.captures_iter(&ended.stderr).map(|c| c[1].parse().unwrap()).collect();
    assert!((20..40).contains(&steps.len()), "{}", ended.stderr);
    assert_eq!((steps.first(), steps.last()), (Some(&1), Some(&100)), "{}", ended.stderr);
    assert!(!ended.stderr.contains('\x1b') && !ended.stderr.contains('\r'), "{}", ended.stderr);
}

#[test]
fn an_interrupt_saves_and_the_same_command_resumes() {
    let job = MarkedJob::with_training(100_000);
    let mut running = job.start(&["--json"]);
    running.read_until("\"step\":3,");
    running.send_signal(Signal::SIGINT);
    let ended = running.wait_for_end();
    assert_eq!(ended.exit_code(), 130, "{}", ended.stderr);
    let saved = ended.expect_one_event("checkpoint")["step"].as_u64().unwrap();
    let stderr = ended.stderr.replace(&format!("{saved:08}"), "[STEP]");
    let stderr = stderr.replace(&format!("step {saved}"), "step [STEP]").replace(LAUNCH_EXECUTABLE, "launch");
    job.assert_snapshot("interrupted_training", &stderr);
    let ended = job.run(&["--json", "--set", &format!("train.steps={}", saved + 2)]);
    assert_eq!(ended.exit_code(), 0, "{}", ended.stderr);
    assert_eq!(ended.expect_one_event("resume")["step"], saved);
    assert_eq!(ended.expect_one_event("done")["step"], saved + 2);
}

#[test]
fn kill_9_of_a_training_worker_ends_its_peers() {
    let job = MarkedJob::with_training(100_000);
    let mut running = job.start(&["--json"]);
    running.read_until("\"step\":3,");
    let workers = job.list_processes().into_iter().filter(|(_, line)| line.starts_with("launch worker"));
    let victim = workers.map(|(pid, _)| pid).max().unwrap();
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    let failure = running.read_until_event("failure");
    assert_eq!((&failure["reason"]["name"], &failure["pid"]), (&"SIGKILL".into(), &victim.into()));
    let ended = running.wait_for_end();
    assert_eq!(ended.exit_code(), 1);
    let peers: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("  then ")).collect();
    let victim = failure["rank"].as_u64().unwrap();
    let peers = peers.join("\n").replace(&format!("rank {}", 1 - victim), "rank [PEER]");
    job.assert_snapshot("end_of_the_peer_of_a_killed_worker", &peers);
}

#[test]
fn kill_9_of_controller_or_agent_ends_training() {
    for agent in [false, true] {
        let job = MarkedJob::with_training(100_000);
        let mut running = job.start(&["--json"]);
        running.read_until("\"step\":3,");
        match agent {
            true => kill(job.find_process("launch agent"), Signal::SIGKILL).unwrap(),
            false => running.send_signal(Signal::SIGKILL),
        }
        assert_eq!(running.wait_for_end().status.code(), agent.then_some(1));
        job.wait_until_no_process_remains();
    }
}
