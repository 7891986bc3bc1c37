//! Tests of the controller's state machine.
use super::{
    harness::{
        CoreHarness, create_rendezvous_request, create_setup, find_failure, find_failure_reason,
        find_kill_messages, find_outcome, millis,
    },
    *,
};
use crate::{
    cluster::AgentStartStep,
    leases::{HELLO_TIMEOUT, LOCAL_AGENT_LEASE},
    worker_end::WorkerEnd,
};
use diagnostic::codes::{self, run};
use jobspec::{ReloadValues, ids::Rank};
use protocol::control::{HostInventory, PROTOCOL_VERSION, WorkerAddresses};

mod hangs;
mod host_selection;
mod lost_connections;
mod random_events;
mod stop_requests;
mod takeover;
mod worker_events;

/// The exit status of a process that succeeded.
const SUCCESS_STATUS: ExitStatus = ExitStatus::Code(0);
/// The exit status of a process that was killed by SIGKILL.
const KILLED_STATUS: ExitStatus = ExitStatus::Signal(9, false);

/// Builds the failure reason for a program that exited with this exit code.
fn build_exit_reason(code: u8) -> FailureReason {
    FailureReason::Exit { code, error: None }
}

/// Builds the failure reason for a worker that was killed by SIGKILL.
fn build_killed_reason() -> FailureReason {
    FailureReason::Signal { name: "SIGKILL".into(), number: 9, core_dumped: false }
}

/// Builds the reason of the failure that [`CoreHarness::send_final_report`] reports.
fn build_worker_error_reason() -> FailureReason {
    FailureReason::WorkerError { code: run::INTERNAL }
}

#[test]
fn a_successful_run_ends_with_exit_code_0() {
    for builtin in [true, false] {
        let mut harness = CoreHarness::new_with_running_workers(2, 2, builtin);
        for rank in 0..4 {
            assert!(harness.report_worker_exit(rank, SUCCESS_STATUS).is_empty());
        }
        assert!(harness.report_workers_ended(0).is_empty());
        let actions = harness.report_workers_ended(1);
        assert_eq!(
            find_outcome(&actions),
            Some(&RunOutcome { made_progress: !builtin, ..RunOutcome::default() })
        );
    }
}

#[test]
fn the_first_failure_is_the_root_cause_and_all_workers_are_killed() {
    let mut harness = CoreHarness::new_with_running_workers(2, 2, false);
    let actions = harness.report_worker_exit(2, ExitStatus::Code(3));
    assert_eq!(find_kill_messages(&actions), [(0, 3000), (1, 3000)]);
    let report = find_failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(2), &build_exit_reason(3)));
    assert_eq!(report.tail, ["last of 2"]);
    for rank in [0, 1, 3] {
        assert!(
            harness.report_worker_exit(rank, ExitStatus::Signal(11, false)).is_empty(),
            "a consequence is not a root cause"
        );
    }
    harness.report_workers_ended(0);
    let actions = harness.report_workers_ended(1);
    let outcome = find_outcome(&actions).unwrap();
    assert_eq!(outcome.exit_code, 1);
    assert_eq!(outcome.peers.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [0, 1, 3]);
    let status = ExitStatus::Signal(11, false);
    assert_eq!(outcome.peers[0].end, WorkerEnd::Exited { status, builtin: false });
}

#[test]
fn the_error_that_a_program_recorded_is_part_of_the_reason() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, false);
    let (tail, error) = (Vec::new(), Some("ValueError: bad".to_owned()));
    let exited = FromAgent::Exited {
        attempt: 0,
        oom: false,
        rank: 1,
        pid: 101,
        status: ExitStatus::Code(1),
        tail,
        error: error.clone(),
        gpu: None,
        timeout: None,
        lost_connection: None,
    };
    let actions = harness.send_from_agent(1, exited);
    assert_eq!(find_failure_reason(&actions), Some((Some(1), FailureReason::Exit { code: 1, error })));
}

#[test]
fn built_in_workers_have_a_short_grace_period() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
    let actions = harness.report_worker_exit(1, KILLED_STATUS);
    assert_eq!(find_kill_messages(&actions), [(0, 500)]);
    assert_eq!(find_failure_reason(&actions), Some((Some(1), build_killed_reason())));
}

#[test]
fn the_final_report_of_a_worker_is_the_reason_and_decides_the_exit_code() {
    for (exit, code) in [
        (WorkerExit::Failed, 1),
        (WorkerExit::BadJob, 2),
        (WorkerExit::Cluster, 3),
        (WorkerExit::Checkpoint, 4),
    ] {
        let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
        let actions = harness.send_final_report(0, exit);
        assert_eq!(find_kill_messages(&actions).len(), 1, "no need to wait for its exit");
        assert_eq!(find_failure(&actions), None, "its last lines have not arrived");
        let actions = harness.report_worker_exit(0, ExitStatus::Code(exit.exit_code()));
        let report = find_failure(&actions).expect("a failure");
        assert_eq!((report.rank, &report.reason), (Some(0), &build_worker_error_reason()));
        assert_eq!((report.tail[0].as_str(), report.diagnostics.len()), ("last of 0", 1));
        harness.report_worker_exit(1, ExitStatus::Code(76));
        assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, code);
    }
}

#[test]
fn a_failure_report_waits_for_the_last_lines_up_to_a_limit() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
    harness.send_final_report(0, WorkerExit::Failed);
    assert_eq!(find_failure(&harness.tick_at(OUTPUT_TAIL_TIMEOUT - millis(1))), None);
    let actions = harness.tick_at(OUTPUT_TAIL_TIMEOUT);
    let report = find_failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(0), &build_worker_error_reason()));
    assert!(report.tail.is_empty());
    assert_eq!(find_failure(&harness.report_worker_exit(0, ExitStatus::Code(1))), None, "reported once");
}

#[test]
fn an_aborted_rank_is_not_the_root_cause_when_another_failure_follows() {
    let mut harness = CoreHarness::new_with_running_workers(1, 3, true);
    let actions = harness.report_worker_exit(0, ExitStatus::Code(76));
    assert!(actions.is_empty());
    harness.now = millis(60);
    let actions = harness.report_worker_exit(2, KILLED_STATUS);
    assert_eq!(find_failure_reason(&actions), Some((Some(2), build_killed_reason())));
    assert!(harness.tick_at(millis(500)).is_empty());
}

#[test]
fn an_aborted_rank_is_reported_when_no_other_failure_follows() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
    harness.send_final_report(0, WorkerExit::Aborted);
    harness.report_worker_exit(0, ExitStatus::Code(76));
    assert!(harness.tick_at(ROOT_CAUSE_TIMEOUT - millis(1)).is_empty());
    let actions = harness.tick_at(ROOT_CAUSE_TIMEOUT);
    let report = find_failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(0), &FailureReason::AbortedByPeer));
    assert_eq!(report.diagnostics.len(), 1, "the final report of the rank");
    assert_eq!(find_kill_messages(&actions).len(), 1);
    assert_eq!(harness.core.hosts[0].failures, 0, "the host of the rank is not blamed");
}

/// Rank 0 misses rank 1, whose host sent its last message at 2 s. The lease of the host is longer.
#[test]
fn a_host_that_peers_and_the_controller_miss_is_lost() {
    for (aborted_at, is_lost) in [(millis(7000), true), (millis(4000), false)] {
        let mut setup = create_setup(2, true);
        setup.host_lease = millis(30_000);
        setup.hosts[1].remote = true;
        let mut harness = CoreHarness::new_running_with_setup(setup, 1);
        harness.now = millis(2000);
        harness.send_from_agent(1, FromAgent::Heartbeat);
        harness.now = aborted_at;
        let diagnostic = Diagnostic::error(codes::collective::PEER_SILENT, "rank 1 is silent");
        let diagnostic = diagnostic.with_field("peer", 1);
        let (attempt, exit) = (harness.core.attempt, WorkerExit::Aborted);
        harness.send_from_agent(0, FromAgent::Fatal { attempt, rank: 0, exit, diagnostic, gpu: None });
        harness.report_worker_exit(0, ExitStatus::Code(76));
        let actions = harness.tick_at(aborted_at + ROOT_CAUSE_TIMEOUT);
        let expected = match is_lost {
            true => (None, FailureReason::HostLost { host: "n1".into(), silent_s: Some(5) }),
            false => (Some(0), FailureReason::AbortedByPeer),
        };
        assert_eq!(find_failure_reason(&actions), Some(expected));
        assert_eq!(actions.contains(&ControllerAction::KillAgent(1)), is_lost);
    }
}

#[test]
fn an_aborted_rank_is_a_failure_when_all_others_finish() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
    harness.report_worker_exit(0, ExitStatus::Code(76));
    harness.report_worker_exit(1, SUCCESS_STATUS);
    let actions = harness.report_workers_ended(0);
    assert!(find_failure(&actions).is_some());
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 1);
}

#[test]
fn a_worker_that_stops_without_a_request_is_a_failure() {
    let mut harness = CoreHarness::new_with_running_workers(1, 1, true);
    let actions = harness.report_worker_exit(0, ExitStatus::Code(75));
    assert_eq!(find_failure_reason(&actions), Some((Some(0), FailureReason::StoppedUnexpectedly)));
}

#[test]
fn a_dead_agent_is_a_failure_and_the_other_workers_are_killed() {
    let mut harness = CoreHarness::new_with_running_workers(2, 1, true);
    let actions =
        harness.feed_input(ControllerInput::AgentGone { host: 1, end: AgentEnd::Exited(KILLED_STATUS) });
    assert_eq!(find_kill_messages(&actions), [(0, 500)]);
    let report = find_failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (None, &FailureReason::AgentLost));
    assert_eq!((report.host.as_str(), report.pid), ("h1", 9));
    harness.report_worker_exit(0, ExitStatus::Code(76));
    let actions = harness.report_workers_ended(0);
    let aborted = WorkerEnd::Exited { status: ExitStatus::Code(76), builtin: true };
    let peers = &find_outcome(&actions).unwrap().peers;
    assert_eq!(
        peers.iter().map(|peer| (peer.rank, peer.end.clone())).collect::<Vec<_>>(),
        [(0, aborted), (1, WorkerEnd::LostWithAgent)]
    );
}

#[test]
fn silent_agents_are_killed() {
    let mut harness = CoreHarness::new(1, 1, true);
    assert!(harness.tick_at(HELLO_TIMEOUT).is_empty());
    let actions = harness.tick_at(HELLO_TIMEOUT + millis(1));
    assert!(actions.contains(&ControllerAction::KillAgent(0)));
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 3);

    let mut harness = CoreHarness::new_with_running_workers(1, 1, true);
    let actions = harness.tick_at(LOCAL_AGENT_LEASE + millis(1));
    assert!(actions.contains(&ControllerAction::KillAgent(0)));
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 1);
}

#[test]
fn the_limit_of_the_first_message_counts_from_the_turn_of_the_host() {
    let mut harness = CoreHarness::new(2, 1, true);
    harness.feed_input(ControllerInput::StartStep(0, AgentStartStep::Waiting));
    harness.feed_input(ControllerInput::StartStep(1, AgentStartStep::Started));
    harness.send_hello(1);
    // Agents that wait have no limit. A joined agent has its lease.
    for turn in 1..10 {
        harness.now = HELLO_TIMEOUT * turn;
        harness.send_from_agent(1, FromAgent::Heartbeat);
        assert!(harness.tick_at(harness.now).is_empty(), "{turn}");
    }
    let began = harness.now;
    let silent_after = |harness: &mut CoreHarness, from: Duration, limit: Duration| {
        harness.now = from + limit;
        harness.send_from_agent(1, FromAgent::Heartbeat);
        let before = harness.tick_at(from + limit);
        assert!(!before.contains(&ControllerAction::KillAgent(0)), "{before:?}");
    };
    harness.feed_input(ControllerInput::StartStep(0, AgentStartStep::Started));
    silent_after(&mut harness, began, HELLO_TIMEOUT);
    let copied = harness.now;
    let copy_limit = HELLO_TIMEOUT * 5;
    harness.feed_input(ControllerInput::StartStep(0, AgentStartStep::Copying(copy_limit)));
    silent_after(&mut harness, copied, copy_limit);
    let started = harness.now;
    harness.feed_input(ControllerInput::StartStep(0, AgentStartStep::Started));
    silent_after(&mut harness, started, HELLO_TIMEOUT);
    let actions = harness.tick_at(started + HELLO_TIMEOUT + millis(1));
    assert!(actions.contains(&ControllerAction::KillAgent(0)), "{actions:?}");
}

/// The messages of host 1 come through host 0. Both fall silent, host 0 a bit later.
#[test]
fn the_silence_of_a_host_behind_a_silent_host_does_not_count() {
    let mut harness = CoreHarness::new_with_running_workers(3, 1, true);
    harness.feed_input(ControllerInput::InnerHosts(vec![(1, Some(0))]));
    harness.now = millis(10);
    harness.send_from_agent(0, FromAgent::Heartbeat);
    harness.now = LOCAL_AGENT_LEASE - millis(100);
    harness.send_from_agent(2, FromAgent::Heartbeat);
    let mut actions = harness.tick_at(LOCAL_AGENT_LEASE + millis(5));
    assert!(!actions.contains(&ControllerAction::KillAgent(1)), "{actions:?}");
    actions = harness.tick_at(LOCAL_AGENT_LEASE + millis(11));
    assert!(actions.contains(&ControllerAction::KillAgent(0)), "{actions:?}");
    assert!(!actions.contains(&ControllerAction::KillAgent(1)), "{actions:?}");
    // Host 1 has another lease to find another way.
    assert_eq!(harness.core.hosts[1].last_heard, LOCAL_AGENT_LEASE + millis(11));
}

/// Host 1 falls silent, but the host that passes on its messages does not.
#[test]
fn a_host_behind_a_live_host_is_lost_after_its_lease() {
    let mut harness = CoreHarness::new_with_running_workers(2, 1, true);
    harness.feed_input(ControllerInput::InnerHosts(vec![(1, Some(0))]));
    harness.now = LOCAL_AGENT_LEASE;
    harness.send_from_agent(0, FromAgent::Heartbeat);
    let actions = harness.tick_at(LOCAL_AGENT_LEASE + millis(1));
    assert!(actions.contains(&ControllerAction::KillAgent(1)), "{actions:?}");
}

#[test]
fn an_agent_that_does_not_end_its_workers_is_killed() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, false);
    harness.report_worker_exit(0, ExitStatus::Code(1));
    let limit = millis(3000) + AGENT_END_TIMEOUT;
    harness.now = limit - millis(1);
    assert!(harness.send_from_agent(0, FromAgent::Heartbeat).is_empty());
    let actions = harness.tick_at(limit);
    assert!(actions.contains(&ControllerAction::KillAgent(0)));
    assert!(find_outcome(&actions).is_some());
}

#[test]
fn an_agent_of_another_version_ends_the_run_before_workers_start() {
    let mut harness = CoreHarness::new(1, 2, true);
    let hello = FromAgent::Hello {
        version: PROTOCOL_VERSION + 1,
        pid: 1,
        stream: 1,
        inventory: HostInventory::default(),
    };
    let actions = harness.feed_input(ControllerInput::Agent(0, hello));
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 3);
    assert!(!actions.iter().any(|action| matches!(action, ControllerAction::Prepare { .. })));
}

#[test]
fn an_unusable_spare_host_does_not_fail_the_run() {
    let with_spare = || CoreSetup { use_hosts: 2, min_hosts: 2, restarts: 1, ..create_setup(3, false) };
    let failed = |attempt| FromAgent::Failed {
        attempt,
        rank: None,
        diagnostic: Diagnostic::error(run::INTERNAL, "no memory"),
    };
    let mut harness = CoreHarness::new_running_with_setup(with_spare(), 1);
    let actions = harness.feed_input(ControllerInput::Agent(2, failed(0)));
    let notices = |actions: &[ControllerAction]| {
        actions
            .iter()
            .filter(|action| matches!(action, ControllerAction::Event(Event::Notice { .. })))
            .count()
    };
    assert!(notices(&actions) == 1 && actions.contains(&ControllerAction::KillAgent(2)), "{actions:?}");
    assert!(find_failure(&actions).is_none() && find_kill_messages(&actions).is_empty());
    harness.report_worker_exit(0, SUCCESS_STATUS);
    harness.report_worker_exit(1, SUCCESS_STATUS);
    harness.report_workers_ended(0);
    assert_eq!(find_outcome(&harness.report_workers_ended(1)).map(|o| o.exit_code), Some(0));

    // A spare host joins late, with another build of launch.
    let mut harness = CoreHarness::new_with_setup(with_spare(), 1);
    harness.send_hello(0);
    harness.send_hello(1);
    harness.report_plan_ready();
    harness.report_workers_started();
    let hello = FromAgent::Hello {
        version: PROTOCOL_VERSION + 1,
        pid: 9,
        stream: 42,
        inventory: HostInventory { host: "h2".into(), ..HostInventory::default() },
    };
    let actions = harness.feed_input(ControllerInput::Agent(2, hello));
    assert!(notices(&actions) == 1 && find_failure(&actions).is_none(), "{actions:?}");

    // The agent of a host with workers fails the attempt.
    let actions = harness.feed_input(ControllerInput::Agent(1, failed(0)));
    assert!(find_kill_messages(&actions).len() == 2, "{actions:?}");
}

#[test]
fn an_attempt_without_a_plan_or_rendezvous_ends_the_run() {
    let mut harness = CoreHarness::new(2, 1, false);
    harness.send_hello(0);
    harness.send_hello(1);
    let diagnostic = Diagnostic::error(run::PLAN_INVALID, "8 slots and 4 GPUs");
    let actions = harness.feed_input(ControllerInput::Rejected { attempt: 0, diagnostic });
    assert_eq!(
        find_failure_reason(&actions),
        Some((None, FailureReason::Rejected { code: run::PLAN_INVALID }))
    );
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 3);
    let mut harness = CoreHarness::new(1, 1, false);
    harness.send_hello(0);
    assert!(harness.tick_at(RENDEZVOUS_BIND_TIMEOUT).is_empty(), "planning may take long");
    let bind = create_rendezvous_request(0);
    let workers = vec![vec![PlannedWorker { log: "/run/0.log".into() }]];
    harness.feed_input(ControllerInput::Planned { attempt: 0, workers, bind });
    let timeout = FailureReason::Rejected { code: run::RENDEZVOUS_TIMEOUT };
    assert_eq!(
        find_failure_reason(&harness.tick_at(RENDEZVOUS_BIND_TIMEOUT + RENDEZVOUS_BIND_TIMEOUT)),
        Some((None, timeout))
    );
}

#[test]
fn a_worker_that_cannot_be_started_is_reported_with_its_code() {
    // The exit code is the one that docs/errors.md states for the code.
    for (code, exit_code) in [(run::WORKER_START_FAILED, 1), (codes::host::WORKER_PROGRAM_MISSING, 3)] {
        let mut harness = CoreHarness::new(1, 1, false);
        harness.send_hello(0);
        harness.report_plan_ready();
        let diagnostic = Diagnostic::error(code, "no such program in PATH");
        let message = FromAgent::Failed { attempt: 0, rank: Some(0), diagnostic };
        let actions = harness.feed_input(ControllerInput::Agent(0, message));
        assert_eq!(find_failure_reason(&actions), Some((Some(0), FailureReason::StartFailed { code })));
        assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, exit_code);
    }
}

#[test]
fn addresses_are_sent_when_all_workers_listen() {
    let mut harness = CoreHarness::new_with_running_workers(2, 2, true);
    let address = |rank: Rank| vec![std::net::SocketAddr::from(([192, 0, 2, 1], 4000 + rank as u16))];
    let listening = |rank, attempt| FromAgent::Listening { rank, attempt, addresses: address(rank) };
    assert!(harness.send_from_agent(3, listening(3, 1)).is_empty(), "another attempt");
    assert!(
        harness.feed_input(ControllerInput::Agent(0, listening(3, 0))).is_empty(),
        "a rank of another host"
    );
    for rank in [3, 1, 0] {
        assert!(harness.send_from_agent(rank, listening(rank, 0)).is_empty());
    }
    let members = (0..4).map(|r| WorkerAddresses { host_index: r / 2, addresses: address(r) }).collect();
    assert_eq!(
        harness.send_from_agent(2, listening(2, 0)),
        [ControllerAction::SendPeers { attempt: 0, members }]
    );
}

#[test]
fn reloaded_values_are_sent_to_active_hosts_with_the_attempt() {
    let mut harness = CoreHarness::new_with_running_workers(2, 1, true);
    let values = ReloadValues::from_job(&crate::testing::sample_job());
    let message = ToAgent::Reload { attempt: 0, values: values.clone() };
    let actions = harness.feed_input(ControllerInput::Reload(values));
    assert_eq!(actions, [ControllerAction::Send(0, message.clone()), ControllerAction::Send(1, message)]);
}
