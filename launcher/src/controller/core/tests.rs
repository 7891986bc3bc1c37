use super::{
    testing::{CoreHarness, failure, failure_reason, kills, ms, outcome, setup},
    *,
};
use contract::control::VERSION;
use diagnostic::codes::run;
use proptest::prelude::*;

const DONE: ExitStatus = ExitStatus::Code(0);
const KILLED: ExitStatus = ExitStatus::Signal(9, false);

fn exit_reason(code: u8) -> FailureReason {
    FailureReason::Exit { code, error: None }
}

fn killed_reason() -> FailureReason {
    FailureReason::Signal { name: "SIGKILL".into(), number: 9, core_dumped: false }
}

/// The reason of [`Rig::fatal`].
fn worker_error_reason() -> FailureReason {
    FailureReason::WorkerError { code: run::INTERNAL }
}

#[test]
fn a_successful_run_ends_with_exit_code_0() {
    for builtin in [true, false] {
        let mut rig = CoreHarness::running(2, 2, builtin);
        for rank in 0..4 {
            assert!(rig.exit(rank, DONE).is_empty());
        }
        assert!(rig.workers_ended(0).is_empty());
        let actions = rig.workers_ended(1);
        assert_eq!(outcome(&actions), Some(&Outcome { progress: !builtin, ..Outcome::default() }));
    }
}

#[test]
fn the_first_failure_is_the_root_cause_and_all_workers_are_killed() {
    let mut rig = CoreHarness::running(2, 2, false);
    let actions = rig.exit(2, ExitStatus::Code(3));
    assert_eq!(kills(&actions), [(0, 3000), (1, 3000)]);
    let report = failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(2), &exit_reason(3)));
    assert_eq!(report.tail, ["last of 2"]);
    for rank in [0, 1, 3] {
        assert!(
            rig.exit(rank, ExitStatus::Signal(11, false)).is_empty(),
            "a consequence is not a root cause"
        );
    }
    rig.workers_ended(0);
    let actions = rig.workers_ended(1);
    let outcome = outcome(&actions).unwrap();
    assert_eq!(outcome.exit_code, 1);
    assert_eq!(outcome.peers.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [0, 1, 3]);
    let status = ExitStatus::Signal(11, false);
    assert_eq!(outcome.peers[0].end, WorkerEnd::Exited { status, builtin: false });
}

#[test]
fn the_error_that_a_program_recorded_is_part_of_the_reason() {
    let mut rig = CoreHarness::running(1, 2, false);
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
    let actions = rig.agent(1, exited);
    assert_eq!(failure_reason(&actions), Some((Some(1), FailureReason::Exit { code: 1, error })));
}

#[test]
fn built_in_workers_have_a_short_grace_period() {
    let mut rig = CoreHarness::running(1, 2, true);
    let actions = rig.exit(1, KILLED);
    assert_eq!(kills(&actions), [(0, 500)]);
    assert_eq!(failure_reason(&actions), Some((Some(1), killed_reason())));
}

#[test]
fn the_final_report_of_a_worker_is_the_reason_and_decides_the_exit_code() {
    for (exit, code) in [
        (WorkerExit::Failed, 1),
        (WorkerExit::BadJob, 2),
        (WorkerExit::Cluster, 3),
        (WorkerExit::Checkpoint, 4),
    ] {
        let mut rig = CoreHarness::running(1, 2, true);
        let actions = rig.fatal(0, exit);
        assert_eq!(kills(&actions).len(), 1, "no need to wait for its exit");
        assert_eq!(failure(&actions), None, "its last lines have not arrived");
        let actions = rig.exit(0, ExitStatus::Code(exit.code()));
        let report = failure(&actions).expect("a failure");
        assert_eq!((report.rank, &report.reason), (Some(0), &worker_error_reason()));
        assert_eq!((report.tail[0].as_str(), report.diagnostics.len()), ("last of 0", 1));
        rig.exit(1, ExitStatus::Code(76));
        assert_eq!(outcome(&rig.workers_ended(0)).unwrap().exit_code, code);
    }
}

#[test]
fn the_wait_for_last_lines_has_a_limit() {
    let mut rig = CoreHarness::running(1, 2, true);
    rig.fatal(0, WorkerExit::Failed);
    assert_eq!(failure(&rig.at(TAIL_TIMEOUT - ms(1))), None);
    let actions = rig.at(TAIL_TIMEOUT);
    let report = failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(0), &worker_error_reason()));
    assert!(report.tail.is_empty());
    assert_eq!(failure(&rig.exit(0, ExitStatus::Code(1))), None, "reported once");
}

#[test]
fn an_aborted_rank_is_not_the_root_cause_when_another_failure_follows() {
    let mut rig = CoreHarness::running(1, 3, true);
    let actions = rig.exit(0, ExitStatus::Code(76));
    assert!(actions.is_empty());
    rig.now = ms(60);
    let actions = rig.exit(2, KILLED);
    assert_eq!(failure_reason(&actions), Some((Some(2), killed_reason())));
    assert!(rig.at(ms(500)).is_empty());
}

#[test]
fn an_aborted_rank_is_reported_when_no_other_failure_follows() {
    let mut rig = CoreHarness::running(1, 2, true);
    rig.fatal(0, WorkerExit::Aborted);
    rig.exit(0, ExitStatus::Code(76));
    assert!(rig.at(ROOT_CAUSE_TIMEOUT - ms(1)).is_empty());
    let actions = rig.at(ROOT_CAUSE_TIMEOUT);
    let report = failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (Some(0), &FailureReason::AbortedByPeer));
    assert_eq!(report.diagnostics.len(), 1, "the final report of the rank");
    assert_eq!(kills(&actions).len(), 1);
}

#[test]
fn an_aborted_rank_is_a_failure_when_all_others_finish() {
    let mut rig = CoreHarness::running(1, 2, true);
    rig.exit(0, ExitStatus::Code(76));
    rig.exit(1, DONE);
    let actions = rig.workers_ended(0);
    assert!(failure(&actions).is_some());
    assert_eq!(outcome(&actions).unwrap().exit_code, 1);
}

#[test]
fn interrupt_saves_and_stops_built_in_workers() {
    for (stop, code) in [(StopRequest::Interrupt, 130), (StopRequest::Terminate, 143)] {
        let mut rig = CoreHarness::running(1, 2, true);
        let actions = rig.feed(Input::Stop(stop));
        assert!(actions.contains(&Action::Send(0, ToAgent::Stop { attempt: 0, deadline_ms: None })));
        assert!(rig.at(ms(20_000)).is_empty() && rig.agent(0, FromAgent::Heartbeat).is_empty());
        assert!(rig.exit(0, ExitStatus::Code(75)).is_empty());
        assert!(rig.exit(1, ExitStatus::Code(75)).is_empty());
        let actions = rig.workers_ended(0);
        let outcome = outcome(&actions).unwrap();
        assert_eq!((outcome.exit_code, outcome.stopped, outcome.killed), (code, true, false));
    }
}

#[test]
fn interrupt_gives_programs_a_grace_period_and_accepts_any_exit() {
    let mut rig = CoreHarness::running(1, 3, false);
    let actions = rig.feed(Input::Stop(StopRequest::Interrupt));
    assert!(actions.contains(&Action::Send(0, ToAgent::Stop { attempt: 0, deadline_ms: Some(3000) })));
    for (rank, status) in [(0, DONE), (1, ExitStatus::Code(1)), (2, ExitStatus::Signal(15, false))] {
        assert!(rig.exit(rank, status).is_empty());
    }
    assert_eq!(outcome(&rig.workers_ended(0)).unwrap().exit_code, 130);
}

#[test]
fn a_second_signal_kills() {
    for builtin in [true, false] {
        let mut rig = CoreHarness::running(1, 2, builtin);
        rig.feed(Input::Stop(StopRequest::Interrupt));
        assert_eq!(kills(&rig.feed(Input::Stop(StopRequest::Terminate))), [(0, 0)]);
        rig.exit(0, KILLED);
        rig.exit(1, KILLED);
        let actions = rig.workers_ended(0);
        let outcome = outcome(&actions).unwrap();
        assert_eq!(
            (outcome.exit_code, outcome.killed),
            (130, true),
            "the first signal decides the exit code"
        );
        assert_eq!(failure(&actions), None);
    }
}

#[test]
fn the_time_limit_stops_the_job_and_is_not_a_second_signal() {
    for (then, is_time_limit) in
        [(None, true), (Some(StopRequest::TimeLimit), true), (Some(StopRequest::Terminate), false)]
    {
        let mut rig = CoreHarness::running(1, 2, true);
        let actions = rig.feed(Input::Stop(StopRequest::TimeLimit));
        assert!(actions.contains(&Action::Send(0, ToAgent::Stop { attempt: 0, deadline_ms: None })));
        if let Some(stop) = then {
            assert!(rig.feed(Input::Stop(stop)).is_empty(), "no second signal");
        }
        rig.exit(0, ExitStatus::Code(75));
        rig.exit(1, ExitStatus::Code(75));
        let actions = rig.workers_ended(0);
        let outcome = outcome(&actions).unwrap();
        assert_eq!(
            (outcome.exit_code, outcome.stopped, outcome.time_limit),
            (143, true, is_time_limit),
            "then {then:?}"
        );
        assert!(!outcome.progress, "no step was seen");
    }
    let mut rig = CoreHarness::running(1, 1, true);
    rig.feed(Input::Stop(StopRequest::TimeLimit));
    assert_eq!(kills(&rig.feed(Input::Stop(StopRequest::Interrupt))), [(0, 0)], "Ctrl-C is a second signal");
}

#[test]
fn a_signal_after_a_failure_kills_at_once_and_keeps_the_failure() {
    let mut rig = CoreHarness::running(1, 2, false);
    rig.exit(0, ExitStatus::Code(7));
    assert_eq!(kills(&rig.feed(Input::Stop(StopRequest::Interrupt))), [(0, 0)]);
    rig.exit(1, KILLED);
    let actions = rig.workers_ended(0);
    assert_eq!(outcome(&actions).unwrap().exit_code, 1);
}

#[test]
fn a_signal_before_the_workers_started_ends_at_once() {
    let mut rig = CoreHarness::new(2, 1, true);
    rig.hello(0);
    let actions = rig.feed(Input::Stop(StopRequest::Terminate));
    assert_eq!(outcome(&actions).unwrap().exit_code, 143);
}

#[test]
fn a_save_that_fails_while_stopping_is_a_failure() {
    let mut rig = CoreHarness::running(1, 2, true);
    rig.feed(Input::Stop(StopRequest::Interrupt));
    rig.fatal(1, WorkerExit::Failed);
    let actions = rig.exit(1, ExitStatus::Code(1));
    assert_eq!(failure_reason(&actions), Some((Some(1), worker_error_reason())));
    rig.exit(0, ExitStatus::Code(76));
    assert_eq!(outcome(&rig.workers_ended(0)).unwrap().exit_code, 1);
}

#[test]
fn workers_that_finished_before_a_stop_request_are_a_success() {
    let mut rig = CoreHarness::running(1, 1, true);
    rig.feed(Input::Stop(StopRequest::Interrupt));
    rig.exit(0, DONE);
    assert_eq!(outcome(&rig.workers_ended(0)).unwrap().exit_code, 0);
}

#[test]
fn a_stop_without_a_request_is_a_failure() {
    let mut rig = CoreHarness::running(1, 1, true);
    let actions = rig.exit(0, ExitStatus::Code(75));
    assert_eq!(failure_reason(&actions), Some((Some(0), FailureReason::StoppedUnexpectedly)));
}

#[test]
fn a_dead_agent_is_a_failure_and_the_other_workers_are_killed() {
    let mut rig = CoreHarness::running(2, 1, true);
    let actions = rig.feed(Input::AgentGone { host: 1, end: AgentEnd::Exited(KILLED) });
    assert_eq!(kills(&actions), [(0, 500)]);
    let report = failure(&actions).expect("a failure");
    assert_eq!((report.rank, &report.reason), (None, &FailureReason::AgentLost));
    assert_eq!((report.host.as_str(), report.pid), ("h1", 9));
    rig.exit(0, ExitStatus::Code(76));
    let actions = rig.workers_ended(0);
    let aborted = WorkerEnd::Exited { status: ExitStatus::Code(76), builtin: true };
    let peers = &outcome(&actions).unwrap().peers;
    assert_eq!(
        peers.iter().map(|peer| (peer.rank, peer.end.clone())).collect::<Vec<_>>(),
        [(0, aborted), (1, WorkerEnd::LostWithAgent)]
    );
}

#[test]
fn silent_agents_are_killed() {
    let mut rig = CoreHarness::new(1, 1, true);
    assert!(rig.at(HELLO_TIMEOUT).is_empty());
    let actions = rig.at(HELLO_TIMEOUT + ms(1));
    assert!(actions.contains(&Action::KillAgent(0)));
    assert_eq!(outcome(&actions).unwrap().exit_code, 3);

    let mut rig = CoreHarness::running(1, 1, true);
    let actions = rig.at(AGENT_LEASE + ms(1));
    assert!(actions.contains(&Action::KillAgent(0)));
    assert_eq!(outcome(&actions).unwrap().exit_code, 1);
}

#[test]
fn an_agent_that_does_not_end_its_workers_is_killed() {
    let mut rig = CoreHarness::running(1, 2, false);
    rig.exit(0, ExitStatus::Code(1));
    let limit = ms(3000) + AGENT_END_TIMEOUT;
    rig.now = limit - ms(1);
    assert!(rig.agent(0, FromAgent::Heartbeat).is_empty());
    let actions = rig.at(limit);
    assert!(actions.contains(&Action::KillAgent(0)));
    assert!(outcome(&actions).is_some());
}

#[test]
fn versions_are_checked_before_anything_starts() {
    let mut rig = CoreHarness::new(1, 2, true);
    let hello = FromAgent::Hello { version: VERSION + 1, pid: 1, inventory: HostInventory::default() };
    let actions = rig.feed(Input::Agent(0, hello));
    assert_eq!(outcome(&actions).unwrap().exit_code, 3);
    assert!(!actions.iter().any(|action| matches!(action, Action::Prepare { .. })));
}

#[test]
fn an_unusable_spare_host_does_not_fail_the_run() {
    let with_spare = || Setup { use_hosts: 2, min_hosts: 2, restarts: 1, ..setup(3, false) };
    let failed = |attempt| FromAgent::Failed {
        attempt,
        rank: None,
        diagnostic: Diagnostic::error(run::INTERNAL, "no memory"),
    };
    let mut rig = CoreHarness::run(with_spare(), 1);
    let actions = rig.feed(Input::Agent(2, failed(0)));
    let notices = |actions: &[Action]| {
        actions.iter().filter(|action| matches!(action, Action::Event(Event::Notice { .. }))).count()
    };
    assert!(notices(&actions) == 1 && actions.contains(&Action::KillAgent(2)), "{actions:?}");
    assert!(failure(&actions).is_none() && kills(&actions).is_empty());
    rig.exit(0, DONE);
    rig.exit(1, DONE);
    rig.workers_ended(0);
    assert_eq!(outcome(&rig.workers_ended(1)).map(|o| o.exit_code), Some(0));

    // A spare host that joins late, with another build.
    let mut rig = CoreHarness::with_setup(with_spare(), 1);
    rig.hello(0);
    rig.hello(1);
    rig.ready();
    rig.started();
    let hello = FromAgent::Hello {
        version: VERSION + 1,
        pid: 9,
        inventory: HostInventory { host: "h2".into(), ..HostInventory::default() },
    };
    let actions = rig.feed(Input::Agent(2, hello));
    assert!(notices(&actions) == 1 && failure(&actions).is_none(), "{actions:?}");

    // The agent of a host with workers fails the attempt.
    let actions = rig.feed(Input::Agent(1, failed(0)));
    assert!(kills(&actions).len() == 2, "{actions:?}");
}

#[test]
fn an_attempt_without_a_plan_or_rendezvous_ends_the_run() {
    let mut rig = CoreHarness::new(2, 1, false);
    rig.hello(0);
    rig.hello(1);
    let diagnostic = Diagnostic::error(run::PLAN_INVALID, "8 slots and 4 GPUs");
    let actions = rig.feed(Input::Rejected { attempt: 0, diagnostic });
    assert_eq!(failure_reason(&actions), Some((None, FailureReason::Rejected { code: run::PLAN_INVALID })));
    assert_eq!(outcome(&actions).unwrap().exit_code, 3);
    let mut rig = CoreHarness::new(1, 1, false);
    rig.hello(0);
    let timeout = FailureReason::Rejected { code: run::RENDEZVOUS_TIMEOUT };
    assert_eq!(failure_reason(&rig.at(PREPARE_TIMEOUT)), Some((None, timeout)));
}

#[test]
fn a_worker_that_cannot_be_started_is_reported_with_its_code() {
    let mut rig = CoreHarness::new(1, 1, false);
    rig.hello(0);
    rig.ready();
    let diagnostic = Diagnostic::error(run::WORKER_START_FAILED, "no such program in PATH");
    let message = FromAgent::Failed { attempt: 0, rank: Some(0), diagnostic };
    let actions = rig.feed(Input::Agent(0, message));
    let reason = FailureReason::StartFailed { code: run::WORKER_START_FAILED };
    assert_eq!(failure_reason(&actions), Some((Some(0), reason)));
    assert_eq!(outcome(&rig.workers_ended(0)).unwrap().exit_code, 1);
}

#[test]
fn workers_cannot_report_events_of_the_controller() {
    let mut rig = CoreHarness::running(1, 1, true);
    let done = Event::Done { exit_code: 0, step: None, seconds: 1.0 };
    assert!(rig.agent(0, FromAgent::Event { attempt: 0, rank: 0, event: done }).is_empty());
    let notice = Event::notice(None, "x");
    assert_eq!(
        rig.agent(0, FromAgent::Event { attempt: 0, rank: 0, event: notice.clone() }),
        [Action::Event(notice)]
    );
}

/// Something that may happen to a running job.
#[derive(Clone, Debug)]
enum Step {
    Tick(u16),
    Stop(bool),
    Exit(Rank, u8),
    Signal(Rank),
    Fatal(Rank, u8),
    AgentGone(HostIndex),
    WorkersEnded(HostIndex),
    Failed(Option<Rank>),
}

fn any_step() -> impl Strategy<Value = Step> {
    let rank = 0u32..4;
    prop_oneof![
        (0u16..400).prop_map(Step::Tick),
        any::<bool>().prop_map(Step::Stop),
        (rank.clone(), prop_oneof![Just(0u8), Just(1), Just(2), Just(75), Just(76), Just(101)])
            .prop_map(|(r, c)| Step::Exit(r, c)),
        rank.clone().prop_map(Step::Signal),
        (rank.clone(), prop_oneof![Just(1u8), Just(2), Just(75), Just(76)])
            .prop_map(|(r, c)| Step::Fatal(r, c)),
        (0usize..2).prop_map(Step::AgentGone),
        (0usize..2).prop_map(Step::WorkersEnded),
        proptest::option::of(rank).prop_map(Step::Failed),
    ]
}

fn apply(rig: &mut CoreHarness, step: Step) -> Vec<Action> {
    match step {
        Step::Tick(pause) => {
            let now = rig.now + ms(pause.into());
            rig.at(now)
        }
        Step::Stop(interrupt) => {
            rig.feed(Input::Stop(if interrupt { StopRequest::Interrupt } else { StopRequest::Terminate }))
        }
        Step::Exit(rank, code) => rig.exit(rank, ExitStatus::Code(code)),
        Step::Signal(rank) => rig.exit(rank, KILLED),
        Step::Fatal(rank, code) => {
            let exit = WorkerExit::from_code(code).unwrap_or(WorkerExit::Failed);
            rig.fatal(rank, exit)
        }
        Step::AgentGone(host) => rig.feed(Input::AgentGone { host, end: AgentEnd::NeverRan }),
        Step::WorkersEnded(host) => rig.workers_ended(host),
        Step::Failed(rank) => {
            let host = rank.unwrap_or(0) / rig.local;
            let diagnostic = Diagnostic::error(run::INTERNAL, "the log is not writable");
            rig.feed(Input::Agent(host as usize, FromAgent::Failed { attempt: 0, rank, diagnostic }))
        }
    }
}

proptest! {
    /// In any order of events there is at most one failure, all running workers are killed after
    /// it, and the run ends once.
    #[test]
    fn every_order_of_events_ends_once(builtin in any::<bool>(), steps in proptest::collection::vec(any_step(), 0..40)) {
        let mut rig = CoreHarness::running(2, 2, builtin);
        let mut all_actions = Vec::new();
        for step in steps {
            let was_inactive: Vec<bool> = rig.core.hosts.iter().map(|host| !host.active).collect();
            let had_cause = rig.core.cause.is_some();
            let actions = apply(&mut rig, step);
            if !had_cause && rig.core.cause.is_some() {
                for (host, was_inactive) in was_inactive.into_iter().enumerate() {
                    let was_sent = kills(&actions).iter().any(|(h, _)| *h == host);
                    prop_assert!(was_sent || was_inactive || !rig.core.hosts[host].active, "no kill for host {}", host);
                }
            }
            all_actions.extend(actions);
        }
        for rank in 0..4 {
            all_actions.extend(rig.exit(rank, DONE));
        }
        all_actions.extend(rig.workers_ended(0));
        all_actions.extend(rig.workers_ended(1));
        prop_assert_eq!(all_actions.iter().filter(|action| matches!(action, Action::End(_))).count(), 1);
        let failures = all_actions.iter().filter(|action| matches!(action, Action::Event(Event::Failure(_)))).count();
        let outcome = outcome(&all_actions).unwrap();
        prop_assert!(failures <= 1);
        prop_assert_eq!(failures == 1, !matches!(outcome.exit_code, 0 | 130 | 143));
        let at_end = all_actions.iter().position(|action| matches!(action, Action::End(_)));
        prop_assert_eq!(at_end, Some(all_actions.len() - 1), "nothing follows the end");
    }

    /// The run ends even if the agents never answer again.
    #[test]
    fn a_run_with_silent_agents_ends(builtin in any::<bool>(), steps in proptest::collection::vec(any_step(), 0..10)) {
        let mut rig = CoreHarness::running(2, 2, builtin);
        let mut ended = steps.into_iter().any(|step| outcome(&apply(&mut rig, step)).is_some());
        for _ in 0..200 {
            let now = rig.now + ms(1000);
            ended |= outcome(&rig.at(now)).is_some();
        }
        prop_assert!(ended);
    }
}

#[test]
fn addresses_are_sent_when_all_workers_listen() {
    let mut rig = CoreHarness::running(2, 2, true);
    let address = |rank: Rank| vec![std::net::SocketAddr::from(([192, 0, 2, 1], 4000 + rank as u16))];
    let listening = |rank, attempt| FromAgent::Listening { rank, attempt, addresses: address(rank) };
    assert!(rig.agent(3, listening(3, 1)).is_empty(), "another attempt");
    assert!(rig.feed(Input::Agent(0, listening(3, 0))).is_empty(), "a rank of another host");
    for rank in [3, 1, 0] {
        assert!(rig.agent(rank, listening(rank, 0)).is_empty());
    }
    let members = (0..4).map(|r| PeerAddress { host_index: r / 2, addresses: address(r) }).collect();
    assert_eq!(rig.agent(2, listening(2, 0)), [Action::SendPeers { attempt: 0, members }]);
}

#[test]
fn a_kill_request_needs_no_second_signal() {
    let mut rig = CoreHarness::running(1, 2, true);
    assert_eq!(kills(&rig.feed(Input::Kill)), [(0, 0)]);
    rig.exit(0, KILLED);
    rig.exit(1, KILLED);
    let actions = rig.workers_ended(0);
    let outcome = outcome(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.killed), (143, true));
}

#[test]
fn reloaded_values_are_sent_to_active_hosts_with_the_attempt() {
    let mut rig = CoreHarness::running(2, 1, true);
    let values = ReloadValues::from_job(&crate::testing::job());
    let message = ToAgent::Reload { attempt: 0, values: values.clone() };
    let actions = rig.feed(Input::Reload(values));
    assert_eq!(actions, [Action::Send(0, message.clone()), Action::Send(1, message)]);
}
