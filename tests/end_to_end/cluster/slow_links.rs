//! Tests that a slow network of one host is reported.
use super::{ALL_HOSTS, TINY_JOB, assert_nothing_left, start_hosts, start_run, write_job};

/// Settings of a training whose ranks exchange megabytes in each step.
const SETTINGS: [&str; 7] = [
    "train.model.hidden_size=252",
    "train.model.intermediate_size=504",
    "train.data.seq_len=16",
    "train.batch.micro=1",
    "train.steps=100000",
    "checkpoint.every=never",
    "run.straggler.steps=5",
];

#[test]
fn a_slow_link_is_named_within_twenty_steps() {
    check_slow_link("cluster::slow_links::a_slow_link_is_named_within_twenty_steps", 1);
}

#[test]
fn a_slow_link_of_two_ranks_is_named_within_twenty_steps() {
    check_slow_link("cluster::slow_links::a_slow_link_of_two_ranks_is_named_within_twenty_steps", 2);
}

/// Runs the body of the test `test`: slows down the network of one host, which has `workers` ranks.
/// Checks that the first rank of the host is reported.
fn check_slow_link(test: &str, workers: u64) {
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let args = write_job(&job_dir, &hosts, "slow", TINY_JOB, ALL_HOSTS);
    let sizes =
        [format!("cluster.workers_per_host={workers}"), format!("train.batch.global={}", 4 * workers)];
    let settings: Vec<&str> = SETTINGS.into_iter().chain(sizes.iter().map(String::as_str)).collect();
    let mut run = start_run(&job_dir, &args, &settings);
    run.wait_for_event("step", 3);
    let limit = "tc qdisc add dev eth0 root tbf rate 40mbit burst 64k latency 400ms";
    hosts.run_shell("h2", limit);
    // Steps that are already in the pipe are not slow.
    let slowed = run.wait_for_event("step", 4)["step"].as_u64().unwrap();
    let report = run.wait_for_event("straggler", 0);
    assert_eq!((&report["kind"], &report["state"]), (&"network".into(), &"slow".into()), "{report}");
    assert_eq!((&report["host"], &report["rank"]), (&"h2".into(), &(2 * workers).into()), "{report}");
    let steps = report["step"].as_u64().unwrap() - slowed;
    assert!(steps <= 20, "{steps} steps: {report}");
    // SAFETY: the process is a child that was not waited for.
    unsafe { libc::kill(run.child.id() as i32, libc::SIGTERM) };
    let ended = run.wait_for_end();
    let ends = ended.events.iter().filter(|e| e["event"] == "straggler" && e["state"] == "recovered");
    assert!(ends.count() >= 1, "the end of the run ends the report");
    assert_nothing_left(&hosts, &super::HOSTS);
}
