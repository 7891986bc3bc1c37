//! Tests of the root cause if ranks fail because torch has lost the connection to another rank.
use super::*;
use crate::controller::core::CONNECTION_LOSS_TIMEOUT;
use protocol::{failure::LostConnection, hang::RankEvidence};

/// How a rank of a test ends.
#[derive(Clone, Copy)]
enum RankEnd {
    /// The rank exits with this code because it has lost the connection to another rank.
    LosesConnection(u8),
    /// The rank ends for another reason.
    Fails(ExitStatus),
}

/// Builds the report of the agent about the end of a rank.
fn build_exit(rank: Rank, end: RankEnd) -> FromAgent {
    let (status, lost_connection) = match end {
        RankEnd::LosesConnection(code) => (ExitStatus::Code(code), Some(LostConnection::Gloo)),
        RankEnd::Fails(status) => (status, None),
    };
    FromAgent::Exited {
        attempt: 0,
        rank,
        pid: 100 + rank,
        status,
        oom: false,
        tail: Vec::new(),
        error: None,
        gpu: None,
        timeout: None,
        lost_connection,
    }
}

/// Returns the rank and the reason of the root cause if three ranks on two hosts end in this order,
/// `pause` apart. Panics if there is no root cause after the last one.
fn find_cause_of_order(ends: [(Rank, RankEnd); 3], pause: Duration) -> (Option<Rank>, FailureReason) {
    let mut harness = CoreHarness::new_with_running_workers(2, 2, false);
    let mut actions = Vec::new();
    for (rank, end) in ends {
        actions.extend(harness.send_from_agent(rank, build_exit(rank, end)));
        let now = harness.now + pause;
        actions.extend(harness.tick_at(now));
    }
    find_failure_reason(&actions).expect("a root cause")
}

#[test]
fn a_failure_for_another_reason_is_the_root_cause_in_every_order() {
    let losses = [(0, RankEnd::LosesConnection(1)), (3, RankEnd::LosesConnection(1))];
    for (status, reason) in
        [(ExitStatus::Code(3), build_exit_reason(3)), (KILLED_STATUS, build_killed_reason())]
    {
        let failed = (1, RankEnd::Fails(status));
        for order in [
            [failed, losses[0], losses[1]],
            [losses[0], failed, losses[1]],
            [losses[0], losses[1], failed],
            [losses[1], losses[0], failed],
        ] {
            for pause in [Duration::ZERO, CONNECTION_LOSS_TIMEOUT / 3] {
                assert_eq!(find_cause_of_order(order, pause), (Some(1), reason.clone()));
            }
        }
    }
}

#[test]
fn the_first_lost_connection_is_reported_if_no_other_failure_follows() {
    let mut harness = CoreHarness::new_with_running_workers(2, 2, false);
    assert!(harness.send_from_agent(2, build_exit(2, RankEnd::LosesConnection(1))).is_empty());
    harness.now = millis(1000);
    assert!(harness.send_from_agent(0, build_exit(0, RankEnd::LosesConnection(1))).is_empty());
    assert!(harness.tick_at(CONNECTION_LOSS_TIMEOUT - millis(1)).is_empty());
    let actions = harness.tick_at(CONNECTION_LOSS_TIMEOUT);
    let report = find_failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(2), &FailureReason::AbortedByPeer));
    assert_eq!(find_kill_messages(&actions).len(), 2);
    assert_eq!(harness.core.hosts[1].failures, 0, "the host of the rank is not blamed");
    let later = harness.send_from_agent(1, build_exit(1, RankEnd::Fails(ExitStatus::Code(3))));
    assert_eq!(find_failure(&later), None, "the failure came too late");
}

#[test]
fn the_root_cause_is_reported_at_once_if_no_worker_is_left() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, false);
    for rank in 0..2 {
        assert!(harness.send_from_agent(rank, build_exit(rank, RankEnd::LosesConnection(1))).is_empty());
    }
    let actions = harness.report_workers_ended(0);
    assert_eq!(find_failure_reason(&actions), Some((Some(0), FailureReason::AbortedByPeer)));
    assert_eq!(find_outcome(&actions).expect("the end of the run").exit_code, 1);
}

#[test]
fn the_loss_of_an_agent_is_the_root_cause_of_lost_connections() {
    let mut harness = CoreHarness::new_with_running_workers(2, 1, false);
    assert!(harness.send_from_agent(0, build_exit(0, RankEnd::LosesConnection(1))).is_empty());
    harness.now = millis(3000);
    let end = AgentEnd::Exited(KILLED_STATUS);
    let actions = harness.feed_input(ControllerInput::AgentGone { host: 1, end });
    assert_eq!(find_failure_reason(&actions), Some((None, FailureReason::AgentLost)));
}

#[test]
fn memory_that_ran_out_and_timeouts_are_no_lost_connections() {
    let report = |oom: bool, timeout: Option<Box<RankEvidence>>| {
        let mut harness = CoreHarness::new_with_running_workers(1, 2, false);
        let mut exited = build_exit(0, RankEnd::LosesConnection(1));
        if let FromAgent::Exited { oom: of_exit, timeout: of_torch, .. } = &mut exited {
            (*of_exit, *of_torch) = (oom, timeout);
        }
        harness.send_from_agent(0, exited)
    };
    assert!(report(false, None).is_empty());
    let actions = report(true, None);
    assert!(
        matches!(find_failure_reason(&actions), Some((Some(0), FailureReason::Oom { .. }))),
        "{actions:?}"
    );
    assert_eq!(find_kill_messages(&report(false, Some(Box::default()))).len(), 1);
}
