//! Tests the agent's heartbeats and leases, and how the agent reacts to the loss of its controller.
use super::*;

#[test]
fn silence_longer_than_the_lease_is_reported_once() {
    let mut agent = TestAgent::start(&[true, false]);
    let heartbeat = || FromWorker::Progress { phase: WorkerPhase::Training, step: 1 };
    agent.now = ms(20_000);
    agent.feed_input(AgentInput::Worker { rank: 0, message: heartbeat() });
    assert!(select_controller_messages(&agent.advance_to(ms(20_000) + WORKER_LEASE)).is_empty());
    let commands = agent.advance_to(ms(20_001) + WORKER_LEASE);
    let sent_now = select_controller_messages(&commands);
    assert!(
        matches!(sent_now[..], [FromAgent::Failed { rank: Some(0), diagnostic, .. }] if diagnostic.code() == run::WORKER_SILENT)
    );
    assert!(select_controller_messages(&agent.advance_to(ms(30_000) + WORKER_LEASE)).is_empty());
}

#[test]
fn the_loss_of_the_controller_kills_all_workers() {
    let mut agent = TestAgent::start(&[true, false]);
    let commands = agent.feed_input(AgentInput::ControllerLost);
    assert_eq!(select_signals(&commands), [(0, ProcessGroupSignal::Kill), (1, ProcessGroupSignal::Kill)]);
    agent.end_worker(0, ExitStatus::Signal(9, false));
    assert!(has_sweep(&agent.end_worker(1, ExitStatus::Signal(9, false))));
    assert_eq!(find_exit_code(&agent.feed_input(AgentInput::Swept { left: vec![] })), Some(1));
}

#[test]
fn a_termination_is_reported_to_the_controller_or_stops_unattended_workers_once() {
    let mut agent = TestAgent::start_with_action(&[false], ControllerLossAction::Continue);
    let commands = agent.feed_input(AgentInput::Terminated);
    assert_eq!(select_controller_messages(&commands), [&FromAgent::Terminating]);
    assert!(select_signals(&commands).is_empty(), "the controller decides");

    assert!(select_signals(&agent.feed_input(AgentInput::ControllerLost)).is_empty());
    let commands = agent.feed_input(AgentInput::Terminated);
    assert_eq!(select_signals(&commands), [(0, ProcessGroupSignal::Terminate)]);
    assert!(agent.feed_input(AgentInput::Terminated).is_empty());
}

#[test]
fn the_lease_applies_only_to_a_controller_that_sends_heartbeats() {
    let mut agent = TestAgent::start(&[false]);
    assert!(select_signals(&agent.advance_to(Duration::from_secs(86_400))).is_empty());
    agent.receive_message(ToAgent::Heartbeat);
    assert!(select_signals(&agent.advance_to(Duration::from_secs(86_400) + CONTROLLER_LEASE)).is_empty());
    assert_eq!(
        select_signals(&agent.advance_to(Duration::from_secs(86_401) + CONTROLLER_LEASE)),
        [(0, ProcessGroupSignal::Kill)]
    );
}

#[test]
fn heartbeats_are_sent_every_second() {
    let mut agent = TestAgent::start(&[false]);
    let heartbeats = (1..=100u64).filter(|i| {
        agent.advance_to(ms(i * 100)).iter().any(|c| matches!(c, AgentAction::Send(FromAgent::Heartbeat)))
    });
    assert_eq!(heartbeats.count(), 10);
}
