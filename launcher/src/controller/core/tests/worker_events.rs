//! Tests of the events that workers report.
use super::*;

/// Builds the event of a step.
fn build_step(step: u64) -> Event {
    Event::Step {
        step,
        loss: 1.0,
        grad_norm: 1.0,
        lr: 1e-3,
        tokens: 1,
        tokens_per_s: 1.0,
        peak_rss: 1,
        exposed_comm_s: 0.0,
    }
}

/// Lets the rank 0 send an event, which a memory copy contained if `is_restored` is set. Returns
/// the requested actions.
fn send_event(harness: &mut CoreHarness, event: Event, is_restored: bool) -> Vec<ControllerAction> {
    let attempt = harness.core.attempt;
    harness.send_from_agent(0, FromAgent::Event { attempt, rank: 0, event, is_restored })
}

#[test]
fn workers_cannot_report_events_of_the_controller() {
    let mut harness = CoreHarness::new_with_running_workers(1, 1, true);
    let done = Event::Done { exit_code: 0, step: None, seconds: 1.0 };
    assert!(send_event(&mut harness, done, false).is_empty());
    let notice = Event::new_notice(None, "x");
    assert_eq!(send_event(&mut harness, notice.clone(), false), [ControllerAction::Event(notice)]);
}

#[test]
fn steps_that_a_memory_copy_contained_are_reported_unless_they_were_reported_before() {
    let mut harness = CoreHarness::new_with_running_workers(1, 1, true);
    let first = build_step(1);
    assert_eq!(send_event(&mut harness, first.clone(), false), [ControllerAction::Event(first.clone())]);
    assert_eq!(send_event(&mut harness, first, true), []);
    for step in [2, 3] {
        let lost = build_step(step);
        assert_eq!(send_event(&mut harness, lost.clone(), true), [ControllerAction::Event(lost)]);
    }
    assert_eq!(
        (harness.core.step, harness.core.attempt_step),
        (Some(3), Some(1)),
        "no progress of the attempt"
    );
    assert_eq!(send_event(&mut harness, Event::new_notice(None, "x"), true), []);
}
