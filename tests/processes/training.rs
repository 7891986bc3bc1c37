//! The built-in runtime.
use super::*;

#[test]
fn a_training_job_shows_itself_on_a_terminal() {
    let job = Job::training(20);
    let (mut child, terminal) = on_terminal(&job, &[]);
    let shown = rest_of(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(0), "{shown}");
    for part in ["training", "loss", "tokens/s", "checkpoint", "launch: done in", "└step 1", "run files"] {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
}

#[test]
fn a_training_job_is_told_in_few_plain_lines() {
    let ended = Job::training(100).run(&[]);
    assert_eq!((ended.code(), ended.stdout.as_str()), (0, ""), "{}", ended.stderr);
    let steps: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("step ")).collect();
    assert!((20..40).contains(&steps.len()), "{}", ended.stderr);
    assert!(
        steps[0].starts_with("step 1/100  loss ")
            && steps[steps.len() - 1].starts_with("step 100/100  loss ")
    );
    assert!(!ended.stderr.contains('\x1b') && !ended.stderr.contains('\r'), "{}", ended.stderr);
}

#[test]
fn interrupt_saves_training_and_the_same_command_goes_on() {
    let job = Job::training(100_000);
    let mut running = job.start(&["--json"]);
    running.until("\"step\":3,");
    running.signal(Signal::SIGINT);
    let ended = running.end();
    assert_eq!(ended.code(), 130, "{}", ended.stderr);
    let saved = ended.event("checkpoint")["step"].as_u64().unwrap();
    assert!(
        ended.stderr.contains("resume with") && ended.stderr.contains("job.yaml --json"),
        "{}",
        ended.stderr
    );
    let ended = job.run(&["--json", "--set", &format!("train.steps={}", saved + 2)]);
    assert_eq!(ended.code(), 0, "{}", ended.stderr);
    assert_eq!(ended.event("resume")["step"], saved);
    assert_eq!(ended.event("done")["step"], saved + 2);
}

#[test]
fn kill_9_of_a_training_worker_ends_its_peers() {
    let job = Job::training(100_000);
    let mut running = job.start(&["--json"]);
    running.until("\"step\":3,");
    let workers = job.alive().into_iter().filter(|(_, line)| line.starts_with("launch worker"));
    let victim = workers.map(|(pid, _)| pid).max().unwrap();
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    let line = running.until("\"failure\"");
    assert!(line.contains("SIGKILL") && line.contains(&victim.to_string()), "{line}");
    let ended = running.end();
    assert_eq!(ended.code(), 1);
    assert!(ended.stderr.contains("aborted after the failure"), "{}", ended.stderr);
}

#[test]
fn kill_9_of_controller_or_agent_ends_training() {
    for agent in [false, true] {
        let job = Job::training(100_000);
        let mut running = job.start(&["--json"]);
        running.until("\"step\":3,");
        match agent {
            true => kill(job.find("launch agent"), Signal::SIGKILL).unwrap(),
            false => running.signal(Signal::SIGKILL),
        }
        assert_eq!(running.end().status.code(), agent.then_some(1));
        job.gone();
    }
}
