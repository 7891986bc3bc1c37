//! Tests of the decision that a job hangs, from the stalls that agents report.
use super::*;
use protocol::hang::{CollectiveTimeout, GroupCounters, HangKind, RankEvidence, ThreadState};

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

#[test]
fn a_timeout_of_torch_is_the_reason_and_gets_a_verdict() {
    let mut harness = CoreHarness::new_with_running_workers(2, 1, false);
    let group = |completed| GroupCounters {
        name: "0".into(),
        backend: "nccl".into(),
        ranks: vec![0, 1],
        enqueued: 3,
        completed,
    };
    let timeout = CollectiveTimeout { rank: 0, seq: 3, operation: "ALLREDUCE".into() };
    let of_ended = RankEvidence {
        groups: vec![group(2)],
        answered: true,
        collective_timeouts: vec![timeout],
        ..RankEvidence::default()
    };
    let exited = FromAgent::Exited {
        attempt: 0,
        rank: 0,
        pid: 100,
        status: ExitStatus::Signal(6, false),
        oom: false,
        tail: Vec::new(),
        error: None,
        gpu: None,
        timeout: Some(Box::new(of_ended)),
        lost_connection: None,
    };
    let actions = harness.send_from_agent(0, exited);
    assert!(find_failure_reason(&actions).is_none(), "there is no evidence about rank 1 yet");
    let asks_for_evidence = |action: &ControllerAction| {
        matches!(action, ControllerAction::Send(1, ToAgent::Kill { stacks: true, .. }))
    };
    assert!(actions.iter().any(asks_for_evidence), "{actions:?}");
    let of_running = RankEvidence {
        rank: 1,
        groups: vec![GroupCounters { enqueued: 2, ..group(2) }],
        answered: true,
        thread: Some(ThreadState::default()),
        ..RankEvidence::default()
    };
    let evidence = FromAgent::HangEvidence { attempt: 0, evidence: Box::new(of_running) };
    let actions = harness.send_from_agent(1, evidence);
    let Some((Some(0), FailureReason::CollectiveTimeout { verdict: Some(verdict) })) =
        find_failure_reason(&actions)
    else {
        panic!("{actions:?}")
    };
    assert_eq!((verdict.kind, verdict.entered), (HangKind::NotEntered, vec![0]));
    assert_eq!(verdict.not_entered.iter().map(|place| place.rank).collect::<Vec<_>>(), [1]);
    assert_eq!(verdict.collective_timeouts.len(), 1);
}
