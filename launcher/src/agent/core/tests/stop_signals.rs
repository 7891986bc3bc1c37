//! Tests that programs get `run.stop_signal` first, then SIGTERM, then SIGKILL.
use super::*;
use jobspec::StopSignal;

/// Returns a plan of programs that are asked to stop by SIGUSR1, and get SIGTERM 5 s later and
/// SIGKILL 1 s after that.
fn make_plan_with_stop_signal(workers: usize) -> HostPlan {
    let mut plan = make_plan(&vec![false; workers]);
    plan.job.run.stop_signal = StopSignal::Usr1;
    plan.job.run.stop_timeout_ms = 5000;
    plan.job.run.grace_period_ms = 1000;
    plan
}

/// Starts the workers of such a plan on an agent that ends without its controller.
fn start_programs(workers: usize) -> TestAgent {
    TestAgent::start_plan(make_plan_with_stop_signal(workers), ControllerLossAction::Stop)
}

/// Returns the signals by which programs are asked to stop, each with the rank of the program.
fn select_stop_signals(actions: &[AgentAction]) -> Vec<(Rank, StopSignal)> {
    let select = |action: &AgentAction| match action {
        AgentAction::RequestStop(rank, signal) => Some((*rank, *signal)),
        _ => None,
    };
    actions.iter().filter_map(select).collect()
}

/// Returns the message of the controller that requests the workers to stop within 8 s.
fn make_stop() -> ToAgent {
    ToAgent::Stop { attempt: 0, deadline_ms: Some(8000) }
}

#[test]
fn programs_get_the_stop_signal_then_sigterm_then_sigkill() {
    let mut agent = start_programs(3);
    agent.now = ms(1000);
    let actions = agent.receive_message(make_stop());
    let expected: Vec<_> = (0..3).map(|rank| (rank, StopSignal::Usr1)).collect();
    assert_eq!((select_stop_signals(&actions), select_signals(&actions)), (expected, vec![]));
    // Rank 0 saves and exits.
    agent.now = ms(3000);
    assert!(select_signals(&agent.end_worker(0, ExitStatus::Code(0))).is_empty());
    assert!(select_signals(&agent.advance_to(ms(5999))).is_empty());
    let deadline = agent.core.next_deadline();
    assert_eq!(deadline, ms(6000), "the driver wakes the state machine for SIGTERM");
    let term = ProcessGroupSignal::Terminate;
    assert_eq!(select_signals(&agent.advance_to(deadline)), [(1, term), (2, term)]);
    assert!(select_signals(&agent.advance_to(ms(6500))).is_empty(), "SIGTERM is sent once");
    agent.end_worker(1, ExitStatus::Signal(15, false));
    assert!(select_signals(&agent.advance_to(ms(8999))).is_empty());
    assert_eq!(select_signals(&agent.advance_to(ms(9000))), [(2, ProcessGroupSignal::Kill)]);
    assert!(has_sweep(&agent.end_worker(2, ExitStatus::Signal(9, false))));
}

#[test]
fn programs_without_a_handler_get_sigterm_at_once_and_one_warning() {
    let mut agent = start_programs(3);
    agent.receive_message(make_stop());
    let count_warnings = |actions: &[AgentAction]| {
        let messages = select_controller_messages(actions).into_iter();
        messages.filter(|message| matches!(message, FromAgent::Event { .. })).count()
    };
    for (rank, warnings) in [(1, 1), (2, 0)] {
        let actions = agent.feed_input(AgentInput::StopSignalUnhandled { rank });
        assert_eq!(select_signals(&actions), [(rank, ProcessGroupSignal::Terminate)]);
        assert_eq!(count_warnings(&actions), warnings, "rank {rank}");
        assert!(agent.feed_input(AgentInput::StopSignalUnhandled { rank }).is_empty());
    }
    assert_eq!(select_signals(&agent.advance_to(ms(5000))), [(0, ProcessGroupSignal::Terminate)]);
}

#[test]
fn a_repeated_request_changes_neither_the_signals_nor_their_times() {
    let mut agent = start_programs(1);
    agent.receive_message(make_stop());
    agent.now = ms(4000);
    // A later controller repeats the request of its predecessor.
    let repeated = agent.receive_message(make_stop());
    assert!(select_stop_signals(&repeated).is_empty() && select_signals(&repeated).is_empty());
    assert_eq!(select_signals(&agent.advance_to(ms(5000))), [(0, ProcessGroupSignal::Terminate)]);
    assert_eq!(select_signals(&agent.advance_to(ms(8000))), [(0, ProcessGroupSignal::Kill)]);
}

#[test]
fn a_failure_or_a_second_request_does_not_wait_for_the_stop_signal() {
    let kill = |grace_ms| {
        let reason = "rank 9 failed".to_owned();
        ToAgent::Kill { attempt: 0, stacks: false, reason, grace_ms, leave_ms: None }
    };
    for (grace_ms, signal) in [(3000, ProcessGroupSignal::Terminate), (0, ProcessGroupSignal::Kill)] {
        // Without a stop request, too, only SIGTERM and SIGKILL follow a failure.
        for stops in [true, false] {
            let mut agent = start_programs(1);
            if stops {
                agent.receive_message(make_stop());
            }
            let actions = agent.receive_message(kill(grace_ms));
            assert_eq!(select_signals(&actions), [(0, signal)], "{grace_ms} {stops}");
            assert!(select_stop_signals(&actions).is_empty());
        }
    }
    let mut agent = start_programs(1);
    agent.receive_message(make_stop());
    agent.receive_message(kill(3000));
    assert_eq!(select_signals(&agent.advance_to(ms(3000))), [(0, ProcessGroupSignal::Kill)]);
}

#[test]
fn a_program_that_starts_during_a_stop_request_is_asked_to_stop() {
    for (at, has_stop_signal) in [(4000, true), (6000, false)] {
        let mut core = create_core();
        core.handle_input(ms(0), AgentInput::Controller(make_hello(PROTOCOL_VERSION)));
        let start = ToAgent::Start(Box::new(make_plan_with_stop_signal(1)));
        core.handle_input(ms(0), AgentInput::Controller(start));
        core.handle_input(ms(0), AgentInput::Prepared { attempt: 0 });
        core.handle_input(ms(0), AgentInput::Controller(make_stop()));
        let actions = core.handle_input(ms(at), AgentInput::Spawned { rank: 0, pid: 5 });
        let signals = (select_stop_signals(&actions).len(), select_signals(&actions).len());
        assert_eq!(signals, if has_stop_signal { (1, 0) } else { (0, 1) }, "{at}");
    }
}

#[test]
fn without_a_controller_programs_get_the_stop_signal_too() {
    let plan = make_plan_with_stop_signal(1);
    let mut agent = TestAgent::start_plan(plan, ControllerLossAction::Continue);
    agent.feed_input(AgentInput::ControllerLost);
    let actions = agent.feed_input(AgentInput::Terminated);
    assert_eq!(select_stop_signals(&actions), [(0, StopSignal::Usr1)]);
    assert_eq!(select_signals(&agent.advance_to(ms(5000))), [(0, ProcessGroupSignal::Terminate)]);
    assert_eq!(select_signals(&agent.advance_to(ms(6000))), [(0, ProcessGroupSignal::Kill)]);
}

#[test]
fn the_next_attempt_begins_without_a_pending_sigterm() {
    let mut agent = start_programs(1);
    agent.receive_message(make_stop());
    assert!(has_sweep(&agent.end_worker(0, ExitStatus::Code(0))));
    agent.feed_input(AgentInput::Swept { left: vec![] });
    let mut plan = make_plan_with_stop_signal(1);
    plan.attempt = 1;
    agent.receive_message(ToAgent::Start(Box::new(plan)));
    assert!(select_signals(&agent.advance_to(ms(60_000))).is_empty());
}
