//! Tests that trainings whose controllers and agents are killed at random times lose no step.
use super::*;

/// Checks that the steps of each attempt follow each other without a gap, beginning after the step
/// from which the attempt resumed, and have the losses of the undisturbed run.
#[track_caller]
pub(super) fn check_attempts(ran: &FinishedRun, undisturbed: &FinishedRun) {
    let losses = undisturbed.collect_losses();
    let mut next = 1;
    for event in &ran.events {
        match event["event"].as_str() {
            Some("placement") => next = 1,
            Some("resume") => next = event["step"].as_u64().unwrap() + 1,
            Some("step") => {
                let step = event["step"].as_u64().unwrap();
                assert_eq!(step, next, "{event}");
                let bits = event["loss"].as_f64().unwrap().to_bits();
                assert_eq!(bits, losses[step as usize - 1].1, "{event}");
                next += 1;
            }
            _ => {}
        }
    }
    assert_eq!(next, losses.len() as u64 + 1, "the last attempt has the last step");
}

/// A training whose controllers and agents were killed at random times.
struct DisturbedTraining {
    ran: FinishedRun,
    undisturbed: FinishedRun,
}

/// Trains on three hosts with the settings `set`, and kills controllers and agents at random times,
/// `kills` altogether. Each controller that is killed is replaced. Checks, as the test `test`, the
/// counts of events and the weights. Returns `None` if the test is skipped.
fn train_with_random_kills(test: &str, kills: u64, set: &[&str]) -> Option<DisturbedTraining> {
    let hosts = RunHosts::start(test, 3, false)?;
    let steps = 40 * kills;
    let undisturbed = hosts.train_undisturbed(steps);
    let set = [&["checkpoint.dir=saved", "run.restarts=1000"], set].concat();
    let mut run = hosts.start_training("training", steps, &set);
    let mut slowed = Some(SlowedWorker::start(&hosts.hosts, "h1"));
    // With this seed and 20 kills, the agent of each host is killed once.
    let (mut random, mut controllers, mut agents) = (read_kill_seed(36), 0, 0);
    for _ in 0..kills {
        run.wait_for_step();
        thread::sleep(Duration::from_millis(draw_number(&mut random, 700)));
        let host = HOSTS[draw_number(&mut random, 3) as usize];
        // A host whose agent was killed is used again after twelve seconds.
        match draw_number(&mut random, 6) {
            1.. => {
                run.kill_and_replace_controller(&mut random);
                controllers += 1;
            }
            0 => {
                kill(hosts.find_agent(host, "launch worker"), Signal::SIGKILL).unwrap();
                agents += 1;
            }
        }
    }
    slowed.take();
    let ran = run.wait_for_end();
    println!("killed {controllers} controllers and {agents} agents");
    let counts = ["start", "takeover", "restart", "failure", "done"].map(|name| ran.events_named(name).len());
    assert_eq!(counts, [1, controllers, agents, 0, 1], "{:?}", ran.notice_messages());
    assert_eq!(ran.code, 0);
    hosts.check_weights("saved", steps);
    hosts.wait_for_no_process();
    Some(DisturbedTraining { ran, undisturbed })
}

#[test]
fn random_kills_of_controllers_and_agents_lose_no_step() {
    let test = "takeovers::random_kills::random_kills_of_controllers_and_agents_lose_no_step";
    let kills = read_kill_count(20);
    let Some(training) = train_with_random_kills(test, kills, &["checkpoint.every=20"]) else { return };
    check_attempts(&training.ran, &training.undisturbed);
}

/// Kills controllers and agents of a training that saves no checkpoint before its end. Checks that
/// each step is reported once.
#[test]
fn random_kills_lose_and_repeat_no_step_with_copies_in_memory() {
    let test = "takeovers::random_kills::random_kills_lose_and_repeat_no_step_with_copies_in_memory";
    let set = ["checkpoint.every=never", "checkpoint.memory.copies=1"];
    let Some(training) = train_with_random_kills(test, read_kill_count(12), &set) else { return };
    let DisturbedTraining { ran, undisturbed } = training;
    assert_eq!(ran.collect_losses(), undisturbed.collect_losses());
    let resumes = ran.events_named("resume");
    assert_eq!(resumes.len(), ran.events_named("restart").len());
    assert!(resumes.iter().all(|resume| resume["source"] == "memory"), "{resumes:?}");
}
