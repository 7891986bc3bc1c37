//! Tests that workers save and stop if no controller returns within `run.controller_timeout`.
use super::*;

/// Kills the controller of a training, and waits until its workers have stopped. Checks that they
/// trained without a controller and then saved, and that another run continues from there with the
/// weights of an undisturbed run.
#[test]
fn workers_save_and_stop_if_no_controller_returns() {
    /// The time for which the workers wait for a controller.
    const TIMEOUT: Duration = Duration::from_secs(4);
    let test = "takeovers::controller_timeout::workers_save_and_stop_if_no_controller_returns";
    let Some(hosts) = RunHosts::start(test, 3, false) else { return };
    // A slowed training makes at most 15 steps per second.
    let steps = 400;
    let undisturbed = hosts.train_undisturbed(steps);
    let timeout = format!("run.controller_timeout={}s", TIMEOUT.as_secs());
    let set = [timeout.as_str(), "checkpoint.every=never", "checkpoint.dir=saved"];
    let run = hosts.start_training("unattended", steps, &set);
    let slowed = SlowedWorker::start(&hosts.hosts, "h1");
    wait_until("the journal has steps", || run.last_step() >= 3);
    let began = Instant::now();
    run.signal_controller(Signal::SIGKILL);
    hosts.wait_for_no_process();
    let elapsed = began.elapsed();
    drop(slowed);
    println!("no process after {elapsed:.2?}");
    assert!(elapsed >= TIMEOUT && elapsed < TIMEOUT + Duration::from_secs(6), "{elapsed:?}");
    let reported = run.last_step();
    assert!(run.read_journal().events_named("done").is_empty(), "no controller has recorded an end");
    assert_eq!(read_listed_state(&hosts, "unattended"), "unattended");

    let ran = hosts.start_training("continued", steps, &set[1..]).wait_for_end();
    let resumed = ran.events_named("resume")[0]["step"].as_u64().unwrap();
    assert!(reported + 10 < resumed && resumed < steps, "reported {reported}, saved {resumed}");
    assert_eq!(ran.code, 0);
    assert_eq!(ran.collect_losses(), undisturbed.collect_losses()[resumed as usize..]);
    hosts.check_weights("saved", steps);
    hosts.wait_for_no_process();
}
