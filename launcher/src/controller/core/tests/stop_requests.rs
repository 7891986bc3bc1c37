//! Tests signals, time limits and other requests to end a run.
use super::*;

#[test]
fn interrupt_saves_and_stops_built_in_workers() {
    for (stop, code) in [(StopRequest::Interrupt, 130), (StopRequest::Terminate, 143)] {
        let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
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
    let mut harness = CoreHarness::new_with_running_workers(1, 3, false);
    let actions = harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt));
    assert!(
        actions.contains(&ControllerAction::Send(0, ToAgent::Stop { attempt: 0, deadline_ms: Some(3000) }))
    );
    for (rank, status) in [(0, SUCCESS_STATUS), (1, ExitStatus::Code(1)), (2, ExitStatus::Signal(15, false))]
    {
        assert!(harness.report_worker_exit(rank, status).is_empty());
    }
    assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, 130);
}

#[test]
fn programs_with_a_stop_signal_have_more_time_before_they_are_killed() {
    for stop in
        [StopRequest::Interrupt, StopRequest::Terminate, StopRequest::TimeLimit, StopRequest::BatchSystem]
    {
        let mut harness = CoreHarness::new_with_running_workers(1, 1, false);
        harness.core.setup.stop_signal = jobspec::StopSignal::Usr1;
        harness.core.setup.sigterm_delay = millis(20_000);
        let actions = harness.feed_input(ControllerInput::Stop(stop));
        let order = ToAgent::Stop { attempt: 0, deadline_ms: Some(23_000) };
        assert!(actions.contains(&ControllerAction::Send(0, order)), "{stop:?}");
        // The agent itself is killed only if it does not kill the program.
        let limit = millis(23_000) + AGENT_END_TIMEOUT;
        harness.now = limit - millis(1);
        assert!(harness.send_from_agent(0, FromAgent::Heartbeat).is_empty(), "{stop:?}");
        let actions = harness.tick_at(limit);
        assert!(actions.contains(&ControllerAction::KillAgent(0)), "{stop:?}: {actions:?}");
    }
}

#[test]
fn a_second_signal_kills_the_workers() {
    for builtin in [true, false] {
        let mut harness = CoreHarness::new_with_running_workers(1, 2, builtin);
        harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt));
        assert_eq!(
            find_kill_messages(&harness.feed_input(ControllerInput::Stop(StopRequest::Terminate))),
            [(0, 0)]
        );
        harness.report_worker_exit(0, KILLED_STATUS);
        harness.report_worker_exit(1, KILLED_STATUS);
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
        let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
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
    let mut harness = CoreHarness::new_with_running_workers(1, 1, true);
    harness.feed_input(ControllerInput::Stop(StopRequest::TimeLimit));
    assert_eq!(
        find_kill_messages(&harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt))),
        [(0, 0)],
        "Ctrl-C is a second signal"
    );
}

#[test]
fn the_first_notice_of_termination_stops_the_job_and_the_others_are_no_second_signal() {
    let mut harness = CoreHarness::new_with_running_workers(2, 1, true);
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
    assert!(outcome.end_announced);
}

#[test]
fn a_signal_of_the_user_decides_before_a_notice_of_termination() {
    let mut harness = CoreHarness::new_with_running_workers(1, 1, true);
    harness.feed_input(ControllerInput::Stop(StopRequest::Terminate));
    assert!(harness.send_from_agent(0, FromAgent::Terminating).is_empty());
    harness.report_worker_exit(0, ExitStatus::Code(75));
    let actions = harness.report_workers_ended(0);
    let outcome = find_outcome(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.ended_by_batch_system), (143, false));
    assert!(outcome.end_announced, "the batch system can state why it ends the job");
}

#[test]
fn a_signal_after_a_failure_kills_at_once_and_keeps_the_failure() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, false);
    harness.report_worker_exit(0, ExitStatus::Code(7));
    assert_eq!(
        find_kill_messages(&harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt))),
        [(0, 0)]
    );
    harness.report_worker_exit(1, KILLED_STATUS);
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
    let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
    harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt));
    harness.send_final_report(1, WorkerExit::Failed);
    let actions = harness.report_worker_exit(1, ExitStatus::Code(1));
    assert_eq!(find_failure_reason(&actions), Some((Some(1), build_worker_error_reason())));
    harness.report_worker_exit(0, ExitStatus::Code(76));
    assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, 1);
}

#[test]
fn workers_that_finished_before_a_stop_request_are_a_success() {
    let mut harness = CoreHarness::new_with_running_workers(1, 1, true);
    harness.feed_input(ControllerInput::Stop(StopRequest::Interrupt));
    harness.report_worker_exit(0, SUCCESS_STATUS);
    assert_eq!(find_outcome(&harness.report_workers_ended(0)).unwrap().exit_code, 0);
}

#[test]
fn a_kill_request_needs_no_second_signal() {
    let mut harness = CoreHarness::new_with_running_workers(1, 2, true);
    assert_eq!(find_kill_messages(&harness.feed_input(ControllerInput::Kill)), [(0, 0)]);
    harness.report_worker_exit(0, KILLED_STATUS);
    harness.report_worker_exit(1, KILLED_STATUS);
    let actions = harness.report_workers_ended(0);
    let outcome = find_outcome(&actions).unwrap();
    assert_eq!((outcome.exit_code, outcome.killed), (143, true));
}
