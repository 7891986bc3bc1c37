//! Tests that an agent ends cleanly, whatever the order of the events.
use super::*;
use proptest::prelude::*;

/// A random event, for the test that every order of events ends cleanly.
#[derive(Clone, Debug)]
enum RandomEvent {
    Tick(u16),
    Stop(Option<u64>),
    Save,
    Kill(u64),
    Heartbeat,
    ControllerLost,
    Hello(Rank),
    Fatal(Rank),
    ConnectionEnds(Rank),
    Ends(Rank, u8),
    StopSignalUnhandled(Rank),
}

fn random_event_strategy() -> impl Strategy<Value = RandomEvent> {
    prop_oneof![
        (0u16..5000).prop_map(RandomEvent::Tick),
        proptest::option::of(0u64..3000).prop_map(RandomEvent::Stop),
        Just(RandomEvent::Save),
        (0u64..3000).prop_map(RandomEvent::Kill),
        Just(RandomEvent::Heartbeat),
        Just(RandomEvent::ControllerLost),
        (0u32..4).prop_map(RandomEvent::Hello),
        (0u32..4).prop_map(RandomEvent::Fatal),
        (0u32..4).prop_map(RandomEvent::ConnectionEnds),
        (0u32..4, 0u8..3).prop_map(|(r, c)| RandomEvent::Ends(r, c)),
        (0u32..4).prop_map(RandomEvent::StopSignalUnhandled),
    ]
}

proptest! {
    /// Checks that in every order of events the end of each process is reported once, and that one
    /// sweep follows the last exit.
    #[test]
    fn every_order_of_events_ends_cleanly(builtin in proptest::collection::vec(any::<bool>(), 1..4), has_stop_signal in any::<bool>(), events in proptest::collection::vec(random_event_strategy(), 0..40)) {
        let mut plan = make_plan(&builtin);
        if has_stop_signal {
            (plan.job.run.stop_signal, plan.job.run.stop_timeout_ms) = (jobspec::StopSignal::Usr1, 1000);
        }
        let mut agent = TestAgent::start_plan(plan, ControllerLossAction::Stop);
        let mut actions = Vec::new();
        for event in events {
            actions.extend(match event {
                RandomEvent::Tick(step) => { let now = agent.now + ms(step.into()); agent.advance_to(now) }
                RandomEvent::Stop(deadline_ms) => agent.receive_message(ToAgent::Stop { attempt: 0, deadline_ms }),
                RandomEvent::Save => agent.receive_message(ToAgent::Save { attempt: 0, signal: 10 }),
                RandomEvent::Kill(grace_ms) => agent.receive_message(ToAgent::Kill { attempt: 0, stacks: false, reason: "r".into(), grace_ms, leave_ms: None }),
                RandomEvent::Heartbeat => agent.receive_message(ToAgent::Heartbeat),
                RandomEvent::ControllerLost => agent.feed_input(AgentInput::ControllerLost),
                RandomEvent::Hello(rank) => agent.feed_input(AgentInput::Worker { rank, message: FromWorker::Hello { version: PROTOCOL_VERSION, pid: 100 + rank } }),
                RandomEvent::Fatal(rank) => agent.feed_input(AgentInput::Worker { rank, message: FromWorker::Fatal { exit: WorkerExit::Failed, diagnostic: Diagnostic::error(run::INTERNAL, "m") } }),
                RandomEvent::ConnectionEnds(rank) => agent.feed_input(AgentInput::WorkerConnectionEnded { rank, error: None }),
                RandomEvent::Ends(rank, code) => agent.feed_input(AgentInput::WorkerExited { rank, status: ExitStatus::Code(code), oom: false, gpu: None }),
                RandomEvent::StopSignalUnhandled(rank) => agent.feed_input(AgentInput::StopSignalUnhandled { rank }),
            });
        }
        for rank in 0..builtin.len() as u32 {
            actions.extend(agent.end_worker(rank, ExitStatus::Code(0)));
        }
        prop_assert_eq!(actions.iter().filter(|c| matches!(c, AgentAction::Sweep { .. })).count(), 1);
        actions.extend(agent.feed_input(AgentInput::Swept { left: vec![] }));
        for rank in 0..builtin.len() as u32 {
            let reports = select_controller_messages(&actions).iter().filter(|m| matches!(m, FromAgent::Exited { rank: r, .. } if *r == rank)).count();
            prop_assert_eq!(reports, 1, "rank {}", rank);
        }
        prop_assert_eq!(select_controller_messages(&actions).iter().filter(|m| ***m == FromAgent::WorkersEnded { attempt: 0 }).count(), 1);
        actions.extend(agent.feed_input(AgentInput::ControllerLost));
        prop_assert!(find_exit_code(&actions).is_some());
        // A worker that has ended is not signalled, because its pid may belong to another process.
        let mut ended = std::collections::BTreeSet::new();
        for command in &actions {
            match command {
                AgentAction::DrainOutput(rank) => _ = ended.insert(*rank),
                AgentAction::Signal(rank, _) | AgentAction::RequestStop(rank, _) => prop_assert!(!ended.contains(rank)),
                _ => {}
            }
        }
    }
}
