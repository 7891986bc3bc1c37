//! Tests of the controller's state machine.
use super::{
    harness::{
        CoreHarness, create_setup, find_failure, find_failure_reason, find_kill_messages, find_outcome,
        millis,
    },
    *,
};
use crate::{
    leases::{AGENT_LEASE, HELLO_TIMEOUT},
    worker_end::WorkerEnd,
};
use diagnostic::codes::run;
use jobspec::{ReloadValues, ids::Rank};
use proptest::prelude::*;
use protocol::control::{HostInventory, PROTOCOL_VERSION, RendezvousRequest, WorkerAddresses};

/// The exit status of a process that succeeded.
const DONE: ExitStatus = ExitStatus::Code(0);
/// The exit status of a process that was killed by SIGKILL.
const KILLED: ExitStatus = ExitStatus::Signal(9, false);

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
        let mut harness = CoreHarness::with_running_workers(2, 2, builtin);
        for rank in 0..4 {
            assert!(harness.report_worker_exit(rank, DONE).is_empty());
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
    let mut harness = CoreHarness::with_running_workers(2, 2, false);
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
    let mut harness = CoreHarness::with_running_workers(1, 2, false);
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
    };
    let actions = harness.send_from_agent(1, exited);
    assert_eq!(find_failure_reason(&actions), Some((Some(1), FailureReason::Exit { code: 1, error })));
}

#[test]
fn built_in_workers_have_a_short_grace_period() {
    let mut harness = CoreHarness::with_running_workers(1, 2, true);
    let actions = harness.report_worker_exit(1, KILLED);
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
        let mut harness = CoreHarness::with_running_workers(1, 2, true);
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
    let mut harness = CoreHarness::with_running_workers(1, 2, true);
    harness.send_final_report(0, WorkerExit::Failed);
    assert_eq!(find_failure(&harness.tick_at(TAIL_TIMEOUT - millis(1))), None);
    let actions = harness.tick_at(TAIL_TIMEOUT);
    let report = find_failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(0), &build_worker_error_reason()));
    assert!(report.tail.is_empty());
    assert_eq!(find_failure(&harness.report_worker_exit(0, ExitStatus::Code(1))), None, "reported once");
}

#[test]
fn an_aborted_rank_is_not_the_root_cause_when_another_failure_follows() {
    let mut harness = CoreHarness::with_running_workers(1, 3, true);
    let actions = harness.report_worker_exit(0, ExitStatus::Code(76));
    assert!(actions.is_empty());
    harness.now = millis(60);
    let actions = harness.report_worker_exit(2, KILLED);
    assert_eq!(find_failure_reason(&actions), Some((Some(2), build_killed_reason())));
    assert!(harness.tick_at(millis(500)).is_empty());
}

#[test]
fn an_aborted_rank_is_reported_when_no_other_failure_follows() {
    let mut harness = CoreHarness::with_running_workers(1, 2, true);
    harness.send_final_report(0, WorkerExit::Aborted);
    harness.report_worker_exit(0, ExitStatus::Code(76));
    assert!(harness.tick_at(ROOT_CAUSE_TIMEOUT - millis(1)).is_empty());
    let actions = harness.tick_at(ROOT_CAUSE_TIMEOUT);
    let report = find_failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(0), &FailureReason::AbortedByPeer));
    assert_eq!(report.diagnostics.len(), 1, "the final report of the rank");
    assert_eq!(find_kill_messages(&actions).len(), 1);
}

#[test]
fn an_aborted_rank_is_a_failure_when_all_others_finish() {
    let mut harness = CoreHarness::with_running_workers(1, 2, true);
    harness.report_worker_exit(0, ExitStatus::Code(76));
    harness.report_worker_exit(1, DONE);
    let actions = harness.report_workers_ended(0);
    assert!(find_failure(&actions).is_some());
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 1);
}

#[test]
fn interrupt_saves_and_stops_built_in_workers() {
    for (stop, code) in [(StopRequest::Interrupt, 130), (StopRequest::Terminate, 143)] {
        let mut harness = CoreHarness::with_running_workers(1, 2, true);
        let actions = harness.feed_input(ControllerInput::Stop(stop));
        assert!(
            actions.contains(&ControllerAction::Send(0, ToAgent::Stop { attempt: 0, deadline_ms: None }))
        );
        assert!(
            harness.tick_at(millis(20_000)).is_empty()
                && harness.send_from_agent(0, FromAgent::Heartbeat).is_empty()
        );
        assert!(harness.report_worker_exit(0, ExitStatus::Code(75)).is_empty());
        assert!(harness.report_worker_exit(1, ExitStatus::Code(75)).is_empty());
        let actions = harness.report_workers_ended(0);
        let outcome = find_outcome(&actions).unwrap();
        assert_eq!((outcome.exit_code, outcome.stopped, outcome.killed), (code, true, false));
    }
}

#[test]
fn interrupt_gives_programs_a_grace_period_and_accepts_any_exit() {
    let mut harness = CoreHarness::with_running_workers(1, 3, false);
    let actions = harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt));
    assert!(
        actions.contains(&ControllerAction::Send(0, ToAgent::Stop { attempt: 0, deadline_ms: Some(3000) }))
    );
    for (rank, status) in [(0, DONE), (1, ExitStatus::Code(1)), (2, ExitStatus::Signal(15, false))] {
        assert!(harness.report_worker_exit(rank, status).is_empty());
    }
    assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, 130);
}

#[test]
fn a_second_signal_kills_the_workers() {
    for builtin in [true, false] {
        let mut harness = CoreHarness::with_running_workers(1, 2, builtin);
        harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt));
        assert_eq!(
            find_kill_messages(&harness.feed_input(ControllerInput::Stop(StopRequest::Terminate))),
            [(0, 0)]
        );
        harness.report_worker_exit(0, KILLED);
        harness.report_worker_exit(1, KILLED);
        let actions = harness.report_workers_ended(0);
        let outcome = find_outcome(&actions).unwrap();
        assert_eq!(
            (outcome.exit_code, outcome.killed),
            (130, true),
            "the first signal decides the exit code"
        );
        assert_eq!(find_failure(&actions), None);
    }
}

#[test]
fn the_time_limit_stops_the_job_and_is_not_a_second_signal() {
    for (then, is_time_limit) in
        [(None, true), (Some(StopRequest::TimeLimit), true), (Some(StopRequest::Terminate), false)]
    {
        let mut harness = CoreHarness::with_running_workers(1, 2, true);
        let actions = harness.feed_input(ControllerInput::Stop(StopRequest::TimeLimit));
        assert!(
            actions.contains(&ControllerAction::Send(0, ToAgent::Stop { attempt: 0, deadline_ms: None }))
        );
        if let Some(stop) = then {
            assert!(harness.feed_input(ControllerInput::Stop(stop)).is_empty(), "no second signal");
        }
        harness.report_worker_exit(0, ExitStatus::Code(75));
        harness.report_worker_exit(1, ExitStatus::Code(75));
        let actions = harness.report_workers_ended(0);
        let outcome = find_outcome(&actions).unwrap();
        assert_eq!(
            (outcome.exit_code, outcome.stopped, outcome.near_time_limit),
            (143, true, is_time_limit),
            "then {then:?}"
        );
        assert!(!outcome.made_progress, "no step was seen");
    }
    let mut harness = CoreHarness::with_running_workers(1, 1, true);
    harness.feed_input(ControllerInput::Stop(StopRequest::TimeLimit));
    assert_eq!(
        find_kill_messages(&harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt))),
        [(0, 0)],
        "Ctrl-C is a second signal"
    );
}

#[test]
fn the_first_notice_of_termination_stops_the_job_and_the_others_are_no_second_signal() {
    let mut harness = CoreHarness::with_running_workers(2, 1, true);
    let actions = harness.send_from_agent(1, FromAgent::Terminating);
    assert!(actions.contains(&ControllerAction::Send(0, ToAgent::Stop { attempt: 0, deadline_ms: None })));
    assert!(harness.send_from_agent(0, FromAgent::Terminating).is_empty());
    for rank in [0, 1] {
        harness.report_worker_exit(rank, ExitStatus::Code(75));
    }
    harness.report_workers_ended(0);
    let actions = harness.report_workers_ended(1);
    let outcome = find_outcome(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.stopped, outcome.ended_by_batch_system), (143, true, true));
}

#[test]
fn a_signal_of_the_user_decides_before_a_notice_of_termination() {
    let mut harness = CoreHarness::with_running_workers(1, 1, true);
    harness.feed_input(ControllerInput::Stop(StopRequest::Terminate));
    assert!(harness.send_from_agent(0, FromAgent::Terminating).is_empty());
    harness.report_worker_exit(0, ExitStatus::Code(75));
    let actions = harness.report_workers_ended(0);
    let outcome = find_outcome(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.ended_by_batch_system), (143, false));
}

#[test]
fn a_signal_after_a_failure_kills_at_once_and_keeps_the_failure() {
    let mut harness = CoreHarness::with_running_workers(1, 2, false);
    harness.report_worker_exit(0, ExitStatus::Code(7));
    assert_eq!(
        find_kill_messages(&harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt))),
        [(0, 0)]
    );
    harness.report_worker_exit(1, KILLED);
    let actions = harness.report_workers_ended(0);
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 1);
}

#[test]
fn a_signal_before_the_workers_started_ends_at_once() {
    let mut harness = CoreHarness::new(2, 1, true);
    harness.send_hello(0);
    let actions = harness.feed_input(ControllerInput::Stop(StopRequest::Terminate));
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 143);
}

#[test]
fn a_save_that_fails_while_stopping_is_a_failure() {
    let mut harness = CoreHarness::with_running_workers(1, 2, true);
    harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt));
    harness.send_final_report(1, WorkerExit::Failed);
    let actions = harness.report_worker_exit(1, ExitStatus::Code(1));
    assert_eq!(find_failure_reason(&actions), Some((Some(1), build_worker_error_reason())));
    harness.report_worker_exit(0, ExitStatus::Code(76));
    assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, 1);
}

#[test]
fn workers_that_finished_before_a_stop_request_are_a_success() {
    let mut harness = CoreHarness::with_running_workers(1, 1, true);
    harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt));
    harness.report_worker_exit(0, DONE);
    assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, 0);
}

#[test]
fn a_worker_that_stops_without_a_request_is_a_failure() {
    let mut harness = CoreHarness::with_running_workers(1, 1, true);
    let actions = harness.report_worker_exit(0, ExitStatus::Code(75));
    assert_eq!(find_failure_reason(&actions), Some((Some(0), FailureReason::StoppedUnexpectedly)));
}

#[test]
fn a_dead_agent_is_a_failure_and_the_other_workers_are_killed() {
    let mut harness = CoreHarness::with_running_workers(2, 1, true);
    let actions = harness.feed_input(ControllerInput::AgentGone { host: 1, end: AgentEnd::Exited(KILLED) });
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

    let mut harness = CoreHarness::with_running_workers(1, 1, true);
    let actions = harness.tick_at(AGENT_LEASE + millis(1));
    assert!(actions.contains(&ControllerAction::KillAgent(0)));
    assert_eq!(find_outcome(&actions).unwrap().exit_code, 1);
}

#[test]
fn an_agent_that_does_not_end_its_workers_is_killed() {
    let mut harness = CoreHarness::with_running_workers(1, 2, false);
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
    let mut harness = CoreHarness::with_running_setup(with_spare(), 1);
    let actions = harness.feed_input(ControllerInput::Agent(2, failed(0)));
    let notices = |actions: &[ControllerAction]| {
        actions
            .iter()
            .filter(|action| matches!(action, ControllerAction::Event(Event::Notice { .. })))
            .count()
    };
    assert!(notices(&actions) == 1 && actions.contains(&ControllerAction::KillAgent(2)), "{actions:?}");
    assert!(find_failure(&actions).is_none() && find_kill_messages(&actions).is_empty());
    harness.report_worker_exit(0, DONE);
    harness.report_worker_exit(1, DONE);
    harness.report_workers_ended(0);
    assert_eq!(find_outcome(&harness.report_workers_ended(1)).map(|o| o.exit_code), Some(0));

    // A spare host joins late, with another build of launch.
    let mut harness = CoreHarness::with_setup(with_spare(), 1);
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
    assert!(harness.tick_at(PREPARE_TIMEOUT).is_empty(), "planning may take long");
    let bind = RendezvousRequest {
        attempt: 0,
        address: std::net::Ipv4Addr::LOCALHOST.into(),
        port: 0,
        store: false,
        clients: 1,
        allowed: Vec::new(),
    };
    let workers = vec![vec![PlannedWorker { log: "/run/0.log".into() }]];
    harness.feed_input(ControllerInput::Planned { attempt: 0, workers, bind });
    let timeout = FailureReason::Rejected { code: run::RENDEZVOUS_TIMEOUT };
    assert_eq!(
        find_failure_reason(&harness.tick_at(PREPARE_TIMEOUT + PREPARE_TIMEOUT)),
        Some((None, timeout))
    );
}

#[test]
fn a_worker_that_cannot_be_started_is_reported_with_its_code() {
    let mut harness = CoreHarness::new(1, 1, false);
    harness.send_hello(0);
    harness.report_plan_ready();
    let diagnostic = Diagnostic::error(run::WORKER_START_FAILED, "no such program in PATH");
    let message = FromAgent::Failed { attempt: 0, rank: Some(0), diagnostic };
    let actions = harness.feed_input(ControllerInput::Agent(0, message));
    let reason = FailureReason::StartFailed { code: run::WORKER_START_FAILED };
    assert_eq!(find_failure_reason(&actions), Some((Some(0), reason)));
    assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, 1);
}

#[test]
fn workers_cannot_report_events_of_the_controller() {
    let mut harness = CoreHarness::with_running_workers(1, 1, true);
    let done = Event::Done { exit_code: 0, step: None, seconds: 1.0 };
    assert!(harness.send_from_agent(0, FromAgent::Event { attempt: 0, rank: 0, event: done }).is_empty());
    let notice = Event::new_notice(None, "x");
    assert_eq!(
        harness.send_from_agent(0, FromAgent::Event { attempt: 0, rank: 0, event: notice.clone() }),
        [ControllerAction::Event(notice)]
    );
}

/// An event that may happen to a running job, for tests with random orders.
#[derive(Clone, Debug)]
enum RandomEvent {
    Tick(u16),
    Stop(bool),
    Exit(Rank, u8),
    Signal(Rank),
    Fatal(Rank, u8),
    AgentGone(HostIndex),
    WorkersEnded(HostIndex),
    Failed(Option<Rank>),
}

/// Generates a random event for a job of two hosts with two ranks each.
fn any_event() -> impl Strategy<Value = RandomEvent> {
    let rank = 0u32..4;
    prop_oneof![
        (0u16..400).prop_map(RandomEvent::Tick),
        any::<bool>().prop_map(RandomEvent::Stop),
        (rank.clone(), prop_oneof![Just(0u8), Just(1), Just(2), Just(75), Just(76), Just(101)])
            .prop_map(|(r, c)| RandomEvent::Exit(r, c)),
        rank.clone().prop_map(RandomEvent::Signal),
        (rank.clone(), prop_oneof![Just(1u8), Just(2), Just(75), Just(76)])
            .prop_map(|(r, c)| RandomEvent::Fatal(r, c)),
        (0usize..2).prop_map(RandomEvent::AgentGone),
        (0usize..2).prop_map(RandomEvent::WorkersEnded),
        proptest::option::of(rank).prop_map(RandomEvent::Failed),
    ]
}

/// Gives the core the input that corresponds to an event, and returns the actions.
fn apply_event(harness: &mut CoreHarness, step: RandomEvent) -> Vec<ControllerAction> {
    match step {
        RandomEvent::Tick(pause) => {
            let now = harness.now + millis(pause.into());
            harness.tick_at(now)
        }
        RandomEvent::Stop(interrupt) => harness.feed_input(ControllerInput::Stop(if interrupt {
            StopRequest::Interrupt
        } else {
            StopRequest::Terminate
        })),
        RandomEvent::Exit(rank, code) => harness.report_worker_exit(rank, ExitStatus::Code(code)),
        RandomEvent::Signal(rank) => harness.report_worker_exit(rank, KILLED),
        RandomEvent::Fatal(rank, code) => {
            let exit = WorkerExit::from_exit_code(code).unwrap_or(WorkerExit::Failed);
            harness.send_final_report(rank, exit)
        }
        RandomEvent::AgentGone(host) => {
            harness.feed_input(ControllerInput::AgentGone { host, end: AgentEnd::NeverRan })
        }
        RandomEvent::WorkersEnded(host) => harness.report_workers_ended(host),
        RandomEvent::Failed(rank) => {
            let host = rank.unwrap_or(0) / harness.local;
            let diagnostic = Diagnostic::error(run::INTERNAL, "the log is not writable");
            harness.feed_input(ControllerInput::Agent(
                host as usize,
                FromAgent::Failed { attempt: 0, rank, diagnostic },
            ))
        }
    }
}

proptest! {
    /// In any order of events, the run reports at most one failure, the running workers are killed
    /// after a failure, and the run ends exactly once.
    #[test]
    fn every_order_of_events_ends_once(builtin in any::<bool>(), steps in proptest::collection::vec(any_event(), 0..40)) {
        let mut harness = CoreHarness::with_running_workers(2, 2, builtin);
        let mut all_actions = Vec::new();
        for step in steps {
            let was_inactive: Vec<bool> = harness.core.hosts.iter().map(|host| !host.active).collect();
            let had_cause = harness.core.cause.is_some();
            let actions = apply_event(&mut harness, step);
            if !had_cause && harness.core.cause.is_some() {
                for (host, was_inactive) in was_inactive.into_iter().enumerate() {
                    let was_sent = find_kill_messages(&actions).iter().any(|(h, _)| *h == host);
                    prop_assert!(was_sent || was_inactive || !harness.core.hosts[host].active, "no kill for host {}", host);
                }
            }
            all_actions.extend(actions);
        }
        for rank in 0..4 {
            all_actions.extend(harness.report_worker_exit(rank, DONE));
        }
        all_actions.extend(harness.report_workers_ended(0));
        all_actions.extend(harness.report_workers_ended(1));
        prop_assert_eq!(all_actions.iter().filter(|action| matches!(action, ControllerAction::End(_))).count(), 1);
        let failures = all_actions.iter().filter(|action| matches!(action, ControllerAction::Event(Event::Failure(_)))).count();
        let outcome = find_outcome(&all_actions).unwrap();
        prop_assert!(failures <= 1);
        prop_assert_eq!(failures == 1, !matches!(outcome.exit_code, 0 | 130 | 143));
        let at_end = all_actions.iter().position(|action| matches!(action, ControllerAction::End(_)));
        prop_assert_eq!(at_end, Some(all_actions.len() - 1), "nothing follows the end");
    }

    /// The run ends even if the agents never answer again.
    #[test]
    fn a_run_with_silent_agents_ends(builtin in any::<bool>(), steps in proptest::collection::vec(any_event(), 0..10)) {
        let mut harness = CoreHarness::with_running_workers(2, 2, builtin);
        let mut ended = steps.into_iter().any(|step| find_outcome(&apply_event(&mut harness, step)).is_some());
        for _ in 0..200 {
            let now = harness.now + millis(1000);
            ended |= find_outcome(&harness.tick_at(now)).is_some();
        }
        prop_assert!(ended);
    }
}

#[test]
fn addresses_are_sent_when_all_workers_listen() {
    let mut harness = CoreHarness::with_running_workers(2, 2, true);
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
fn a_kill_request_needs_no_second_signal() {
    let mut harness = CoreHarness::with_running_workers(1, 2, true);
    assert_eq!(find_kill_messages(&harness.feed_input(ControllerInput::Kill)), [(0, 0)]);
    harness.report_worker_exit(0, KILLED);
    harness.report_worker_exit(1, KILLED);
    let actions = harness.report_workers_ended(0);
    let outcome = find_outcome(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.killed), (143, true));
}

#[test]
fn reloaded_values_are_sent_to_active_hosts_with_the_attempt() {
    let mut harness = CoreHarness::with_running_workers(2, 1, true);
    let values = ReloadValues::from_job(&crate::testing::sample_job());
    let message = ToAgent::Reload { attempt: 0, values: values.clone() };
    let actions = harness.feed_input(ControllerInput::Reload(values));
    assert_eq!(actions, [ControllerAction::Send(0, message.clone()), ControllerAction::Send(1, message)]);
}
