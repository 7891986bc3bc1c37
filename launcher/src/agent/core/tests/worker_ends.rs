//! Tests how the agent reports the ends of its workers.
use super::*;

#[test]
fn exits_are_reported_in_order_after_the_final_reports() {
    let mut agent = TestAgent::start(&[true, false]);
    agent.feed_input(AgentInput::Worker {
        rank: 0,
        message: FromWorker::Hello { version: PROTOCOL_VERSION, pid: 100 },
    });
    // Rank 0 ends first, but the rank's control connection has not been read to the end yet.
    assert!(
        select_controller_messages(&agent.feed_input(AgentInput::WorkerExited {
            rank: 0,
            status: ExitStatus::Code(1),
            oom: false,
            gpu: None
        }))
        .is_empty()
    );
    assert!(
        select_controller_messages(&agent.end_worker(1, ExitStatus::Code(2))).is_empty(),
        "rank 1 ended after rank 0"
    );
    let diagnostic = Diagnostic::error(run::INTERNAL, "the loss is NaN");
    let fatal = FromWorker::Fatal { exit: WorkerExit::Failed, diagnostic };
    assert!(matches!(
        select_controller_messages(&agent.feed_input(AgentInput::Worker { rank: 0, message: fatal }))[..],
        [FromAgent::Fatal { .. }]
    ));
    let commands = agent.feed_input(AgentInput::WorkerConnectionEnded { rank: 0, error: None });
    let sent = select_controller_messages(&commands);
    assert!(
        matches!(sent[..], [FromAgent::Exited { rank: 0, .. }, FromAgent::Exited { rank: 1, .. }]),
        "{sent:?}"
    );
}

#[test]
fn the_wait_for_a_final_report_is_limited() {
    let mut agent = TestAgent::start(&[true]);
    agent.feed_input(AgentInput::WorkerExited {
        rank: 0,
        status: ExitStatus::Code(1),
        oom: false,
        gpu: None,
    });
    assert!(select_controller_messages(&agent.advance_to(FINAL_OUTPUT_TIMEOUT - ms(1))).is_empty());
    let commands = agent.advance_to(FINAL_OUTPUT_TIMEOUT);
    assert!(matches!(select_controller_messages(&commands)[..], [FromAgent::Exited { rank: 0, .. }]));
    assert!(has_sweep(&commands));
}

/// Checks that the report of a SIGKILL is delayed under a scheduler that may kill the agent a
/// moment after the worker.
#[test]
fn the_report_of_a_sigkill_is_delayed_if_the_agent_may_be_killed_next() {
    for (report_delay, status, oom, delay) in [
        (ms(300), ExitStatus::Signal(9, false), false, ms(300)),
        (ms(300), ExitStatus::Signal(9, false), true, ms(0)),
        (ms(300), ExitStatus::Signal(11, false), false, ms(0)),
        (ms(300), ExitStatus::Code(9), false, ms(0)),
        (ms(0), ExitStatus::Signal(9, false), false, ms(0)),
    ] {
        let mut agent = TestAgent::start(&[false]);
        agent.core.kill_report_delay = report_delay;
        let mut commands = agent.feed_input(AgentInput::WorkerExited { rank: 0, status, oom, gpu: None });
        commands.extend(agent.feed_input(AgentInput::Drained {
            rank: 0,
            tail: Vec::new(),
            error: None,
            timeout: None,
        }));
        if delay > ms(0) {
            assert!(select_controller_messages(&commands).is_empty(), "{status:?}: {commands:?}");
            assert_eq!(agent.core.next_deadline(), delay);
            assert!(select_controller_messages(&agent.advance_to(delay - ms(1))).is_empty());
            commands = agent.advance_to(delay);
        }
        let reports = select_controller_messages(&commands);
        assert!(matches!(reports[..], [FromAgent::Exited { rank: 0, .. }]), "{status:?}: {reports:?}");
    }
}

#[test]
fn processes_that_cannot_be_killed_are_reported() {
    let mut agent = TestAgent::start(&[false]);
    agent.end_worker(0, ExitStatus::Code(0));
    let commands = agent.feed_input(AgentInput::Swept { left: vec![4242] });
    assert!(
        matches!(select_controller_messages(&commands)[..], [FromAgent::Failed { rank: None, diagnostic, .. }] if diagnostic.code() == run::PROCESS_UNKILLABLE)
    );
    assert_eq!(find_exit_code(&commands), Some(1));
}

#[test]
fn the_recorded_error_is_reported_only_for_failed_workers() {
    let mut agent = TestAgent::start(&[false, false]);
    for (rank, status, expected) in [(0, ExitStatus::Code(0), None), (1, ExitStatus::Code(1), Some("why"))] {
        let commands = agent.end_worker(rank, status);
        let error = select_controller_messages(&commands).into_iter().find_map(|m| match m {
            FromAgent::Exited { error, .. } => Some(error.as_deref()),
            _ => None,
        });
        assert_eq!(error, Some(expected));
    }
}

#[test]
fn a_stop_request_before_the_logs_are_open_ends_the_attempt_without_a_worker() {
    let mut core = create_core();
    let mut feed = |input| core.handle_input(ms(0), input);
    let terms = Some(Box::new(make_terms(ControllerLossAction::Stop)));
    feed(AgentInput::Controller(ToAgent::Hello { version: PROTOCOL_VERSION, terms }));
    feed(AgentInput::Controller(ToAgent::Start(Box::new(make_plan(&[true])))));
    let stop = ToAgent::Stop { attempt: 0, deadline_ms: None };
    assert!(has_sweep(&feed(AgentInput::Controller(stop))));
    assert!(feed(AgentInput::Prepared { attempt: 0 }).is_empty(), "too late");
}

#[test]
fn a_worker_that_is_being_started_during_a_stop_request_is_stopped_and_no_further_one_is_started() {
    for builtin in [true, false] {
        let mut core = create_core();
        let mut feed = |input| core.handle_input(ms(0), input);
        let terms = Some(Box::new(make_terms(ControllerLossAction::Stop)));
        feed(AgentInput::Controller(ToAgent::Hello { version: PROTOCOL_VERSION, terms }));
        feed(AgentInput::Controller(ToAgent::Start(Box::new(make_plan(&[builtin; 3])))));
        feed(AgentInput::Prepared { attempt: 0 });
        let stop = ToAgent::Stop { attempt: 0, deadline_ms: None };
        assert!(select_signals(&feed(AgentInput::Controller(stop))).is_empty(), "no worker runs yet");
        let mut actions = feed(AgentInput::Spawned { rank: 0, pid: 100 });
        assert!(!actions.iter().any(|action| matches!(action, AgentAction::Spawn(_))), "{actions:?}");
        let message = FromWorker::Hello { version: PROTOCOL_VERSION, pid: 100 };
        if builtin {
            actions.extend(feed(AgentInput::Worker { rank: 0, message }));
        }
        let stops = select_worker_messages(&actions).iter().filter(|m| **m == (0, &ToWorker::Stop)).count();
        let signals = select_signals(&actions);
        assert_eq!((stops, signals.len()), if builtin { (1, 0) } else { (0, 1) }, "{actions:?}");
        feed(AgentInput::WorkerConnectionEnded { rank: 0, error: None });
        feed(AgentInput::WorkerExited { rank: 0, status: ExitStatus::Code(75), oom: false, gpu: None });
        let ended = feed(AgentInput::Drained { rank: 0, tail: Vec::new(), error: None, timeout: None });
        assert!(has_sweep(&ended), "{ended:?}");
    }
}
