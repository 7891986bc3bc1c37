//! Tests that a run ends exactly once, whatever the order of the events.
use super::*;
use proptest::prelude::*;

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

/// Passes the input that corresponds to an event to the controller's state machine, and returns the
/// requested actions.
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
        RandomEvent::Signal(rank) => harness.report_worker_exit(rank, KILLED_STATUS),
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
        let mut harness = CoreHarness::new_with_running_workers(2, 2, builtin);
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
            all_actions.extend(harness.report_worker_exit(rank, SUCCESS_STATUS));
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
        let mut harness = CoreHarness::new_with_running_workers(2, 2, builtin);
        let mut ended = steps.into_iter().any(|step| find_outcome(&apply_event(&mut harness, step)).is_some());
        for _ in 0..200 {
            let now = harness.now + millis(1000);
            ended |= find_outcome(&harness.tick_at(now)).is_some();
        }
        prop_assert!(ended);
    }
}
