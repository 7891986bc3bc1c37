//! Tests of the decision that a job hangs, from the stalls that agents report.
use super::*;

/// Returns the report of an agent that the worker `rank` makes no progress.
fn build_stall(rank: Rank, shows_hang: bool) -> FromAgent {
    FromAgent::Stalled { attempt: 0, rank, stalled_ms: 600_000, suspended: false, shows_hang }
}

#[test]
fn a_job_hangs_if_all_workers_stall_and_one_of_them_waits() {
    let mut harness = CoreHarness::new_with_running_workers(1, 3, false);
    for rank in [0, 1] {
        let actions = harness.send_from_agent(rank, build_stall(rank, rank == 0));
        assert!(find_kill_messages(&actions).is_empty(), "rank 2 makes progress");
    }
    let actions = harness.send_from_agent(2, build_stall(2, false));
    assert_eq!(find_kill_messages(&actions).len(), 1);
}

#[test]
fn idle_workers_of_which_none_waits_do_not_hang() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, false);
    for rank in [0, 1] {
        let actions = harness.send_from_agent(rank, build_stall(rank, false));
        assert!(find_kill_messages(&actions).is_empty());
    }
    // Rank 1 enters a collective, and waits in it.
    harness.send_from_agent(1, FromAgent::Recovered { attempt: 0, rank: 1 });
    let actions = harness.send_from_agent(1, build_stall(1, true));
    assert_eq!(find_kill_messages(&actions).len(), 1);
}
