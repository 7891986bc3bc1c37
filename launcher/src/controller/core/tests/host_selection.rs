//! Tests of the selection of hosts after failures, and of lost hosts that return.
use super::*;
use crate::{cluster::ArrivalLimits, controller::core::setup::CoreSetup};

/// The quarantine of a lost host in these tests.
const QUARANTINE: Duration = millis(12_000);

/// Creates a run of four hosts with one rank each, of which an attempt uses two, whose workers copy
/// their states to memory. The workers of the first two hosts run.
fn start_run(copies: bool) -> CoreHarness {
    let arrival =
        ArrivalLimits { reconnects_while_running: true, quarantine: QUARANTINE, ..ArrivalLimits::default() };
    let mut setup = CoreSetup {
        has_memory_copies: copies,
        use_hosts: 2,
        min_hosts: 2,
        restarts: 100,
        arrival,
        ..create_setup(4, true)
    };
    setup.hosts.iter_mut().for_each(|host| host.remote = true);
    let harness = CoreHarness::new_running_with_setup(setup, 1);
    assert_eq!(harness.core.members, [0, 1]);
    harness
}

/// Lets the rank 0 report an optimizer step.
fn report_step(harness: &mut CoreHarness, step: u64) {
    let attempt = harness.core.attempt;
    let event = Event::Step {
        step,
        loss: 1.0,
        grad_norm: 1.0,
        lr: 1e-3,
        tokens: 1,
        tokens_per_s: 1.0,
        peak_rss: 1,
        exposed_comm_s: 0.0,
    };
    harness.send_from_agent(0, FromAgent::Event { attempt, rank: 0, event, is_restored: false });
}

/// Makes an agent end, and the workers of the other members. Returns the requested actions.
fn lose_host(harness: &mut CoreHarness, id: HostIndex) -> Vec<ControllerAction> {
    let members = harness.core.members.clone();
    let mut actions =
        harness.feed_input(ControllerInput::AgentGone { host: id, end: AgentEnd::ConnectionEnded(None) });
    for other in members.into_iter().filter(|other| *other != id) {
        actions.extend(harness.report_workers_ended(other));
    }
    actions
}

/// Keeps the agents of these hosts alive until `now`, and then passes a tick.
fn pass_time(harness: &mut CoreHarness, now: Duration, alive: &[HostIndex]) -> Vec<ControllerAction> {
    let mut actions = Vec::new();
    while harness.now < now {
        let next = (harness.now + millis(1000)).min(now);
        harness.now = next;
        for id in alive {
            actions.extend(harness.feed_input(ControllerInput::Agent(*id, FromAgent::Heartbeat)));
        }
        actions.extend(harness.tick_at(next));
    }
    actions
}

/// Returns the hosts whose agents the actions start.
fn list_started(actions: &[ControllerAction]) -> Vec<HostIndex> {
    let started = |action: &ControllerAction| match action {
        ControllerAction::StartAgent(id) => Some(*id),
        _ => None,
    };
    actions.iter().filter_map(started).collect()
}

/// Starts the workers of the planned attempt, whose hosts must be `members`.
fn start_attempt(harness: &mut CoreHarness, members: &[HostIndex]) {
    assert_eq!(harness.core.members, members);
    harness.report_plan_ready();
    harness.report_workers_started();
}

#[test]
fn a_host_with_copies_in_memory_stays_although_earlier_hosts_have_returned() {
    for copies in [true, false] {
        let mut harness = start_run(copies);
        report_step(&mut harness, 1);
        lose_host(&mut harness, 0);
        pass_time(&mut harness, millis(2000), &[1, 2, 3]);
        start_attempt(&mut harness, &[1, 2]);
        report_step(&mut harness, 2);
        lose_host(&mut harness, 2);
        pass_time(&mut harness, millis(6000), &[1, 3]);
        start_attempt(&mut harness, &[1, 3]);
        report_step(&mut harness, 3);
        lose_host(&mut harness, 1);
        // The next attempt begins as soon as one host may be used again.
        let actions = pass_time(&mut harness, QUARANTINE + millis(1), &[3]);
        assert_eq!(list_started(&actions), [0], "copies: {copies}");
        harness.send_hello(0);
        start_attempt(&mut harness, &[0, 3]);
        report_step(&mut harness, 4);
        // Both other hosts have returned when the host 0 fails again.
        let actions = pass_time(&mut harness, millis(20_000), &[0, 3]);
        // The host 2 was lost before the host 1.
        assert_eq!(list_started(&actions), [2, 1]);
        harness.send_hello(1);
        harness.send_hello(2);
        lose_host(&mut harness, 0);
        pass_time(&mut harness, millis(22_000), &[1, 2, 3]);
        start_attempt(&mut harness, if copies { &[1, 3] } else { &[1, 2] });
    }
}

#[test]
fn a_lost_host_is_reached_again_in_the_background_with_growing_pauses() {
    let mut harness = start_run(true);
    lose_host(&mut harness, 0);
    pass_time(&mut harness, millis(2000), &[1, 2, 3]);
    start_attempt(&mut harness, &[1, 2]);
    let mut starts = Vec::new();
    while harness.now < millis(120_000) {
        let now = harness.now + millis(500);
        if list_started(&pass_time(&mut harness, now, &[1, 2, 3])) == [0] {
            starts.push(harness.now.as_secs());
            let gone = ControllerInput::AgentGone { host: 0, end: AgentEnd::ConnectionEnded(None) };
            let actions = harness.feed_input(gone);
            assert_eq!(actions, [], "nothing is reported");
        }
    }
    assert_eq!(starts, [12, 36, 84]);
    // An attempt does not wait for a host that is being reached.
    pass_time(&mut harness, millis(180_000), &[1, 2, 3]);
    assert_eq!(harness.core.hosts[0].agent, AgentConnectionState::Starting);
    lose_host(&mut harness, 1);
    pass_time(&mut harness, millis(182_000), &[2, 3]);
    start_attempt(&mut harness, &[2, 3]);
    let actions = harness.send_hello(0);
    let is_notice = |a: &ControllerAction| matches!(a, ControllerAction::Event(Event::Notice { .. }));
    assert_eq!(actions.iter().filter(|action| is_notice(action)).count(), 1, "{actions:?}");
}

#[test]
fn with_copies_only_failures_without_progress_exclude_a_host() {
    for (copies, advances, excluded) in [(true, true, false), (true, false, true), (false, true, true)] {
        let mut harness = start_run(copies);
        for step in 1..=2 {
            if advances {
                report_step(&mut harness, step);
            }
            harness.report_worker_exit(0, KILLED_STATUS);
            harness.report_workers_ended(0);
            harness.report_workers_ended(1);
            // The longest pause before the second restart.
            let now = harness.now + millis(5000);
            pass_time(&mut harness, now, &[0, 1, 2, 3]);
            harness.report_plan_ready();
            harness.report_workers_started();
        }
        assert_eq!(harness.core.hosts[0].excluded, excluded, "copies: {copies}, advances: {advances}");
    }
}
