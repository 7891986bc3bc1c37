//! [`ControllerEvents`]: keeps the events of a run's controllers until the journal (the file of all
//! events of the run) contains them.
use super::{
    core::UnstoredEvent,
    report_id::{CONTROLLER_REPORT_STREAM, ReportId},
};
use protocol::event::Event;
use std::collections::VecDeque;

/// The largest total size of the events in one memo (the state of the run that agents keep for a
/// later controller), in bytes of JSON.
const MAX_MEMO_EVENT_BYTES: usize = 16 << 10;

/// The events of the run's controllers that the journal file may not contain yet, and the number of
/// the newest controller event.
#[derive(Debug, Default)]
pub(crate) struct ControllerEvents {
    /// The number of the newest event.
    newest: u64,
    /// The events that the journal has not stored, oldest first, with their sizes in bytes.
    unstored: VecDeque<(UnstoredEvent, usize)>,
}

impl ControllerEvents {
    /// Continues the numbering of controller events after a takeover, so that the next event of
    /// this controller gets the number `newest` + 1. `unstored` are the events of earlier
    /// controllers that the journal lacks, oldest first.
    pub(crate) fn continue_numbering_after(
        &mut self,
        newest: u64,
        unstored: impl Iterator<Item = UnstoredEvent>,
    ) {
        self.newest = newest;
        unstored.for_each(|event| self.push_unstored_event(event));
    }

    /// Returns the sequence number of the newest event that a controller of the run has reported; 0
    /// if there is no such event.
    pub(crate) fn newest_event_number(&self) -> u64 {
        self.newest
    }

    /// Assigns the next number to an event of this controller, and keeps the event until the
    /// journal (the file of the run's events) contains it. Returns the id that identifies the event
    /// in the journal.
    pub(crate) fn add(&mut self, event: &Event, time: f64) -> ReportId {
        self.newest += 1;
        let number = self.newest;
        self.push_unstored_event(UnstoredEvent { number, time, event: event.clone() });
        (CONTROLLER_REPORT_STREAM, number)
    }

    /// Keeps an event of a controller until the journal (the file of the run's events) contains it.
    fn push_unstored_event(&mut self, event: UnstoredEvent) {
        let bytes = serde_json::to_vec(&event.event).map_or(0, |json| json.len());
        self.unstored.push_back((event, bytes));
    }

    /// Removes the events that the journal (the file of the run's events) contains. `reports`
    /// contains the newest stored report of each stream.
    pub(crate) fn forget_stored_events(&mut self, reports: &[ReportId]) {
        let stored =
            reports.iter().filter(|(stream, _)| *stream == CONTROLLER_REPORT_STREAM).map(|(_, seq)| *seq);
        let Some(newest) = stored.max() else { return };
        while self.unstored.front().is_some_and(|(event, _)| event.number <= newest) {
            self.unstored.pop_front();
        }
    }

    /// Returns the events of controllers that the journal (the run's file of events) may lack, so
    /// that agents can keep them for a later controller. Leaves out events that would make the memo
    /// too large.
    pub(crate) fn collect_unstored(&self) -> Vec<UnstoredEvent> {
        let mut free = MAX_MEMO_EVENT_BYTES;
        let fits = |(_, bytes): &&(UnstoredEvent, usize)| {
            let fits = *bytes <= free;
            free -= if fits { *bytes } else { 0 };
            fits
        };
        self.unstored.iter().filter(fits).map(|(event, _)| event.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memo_contains_the_events_that_are_not_stored_up_to_a_limit() {
        let mut events = ControllerEvents::default();
        let earlier = UnstoredEvent { number: 4, time: 1.0, event: Event::new_notice(None, "0") };
        events.continue_numbering_after(4, [earlier].into_iter());
        let add = |events: &mut ControllerEvents, text: &str| events.add(&Event::new_notice(None, text), 1.5);
        assert_eq!(add(&mut events, "a"), (CONTROLLER_REPORT_STREAM, 5));
        add(&mut events, &"x".repeat(MAX_MEMO_EVENT_BYTES));
        add(&mut events, "b");
        let numbers = |events: &ControllerEvents| -> Vec<u64> {
            events.collect_unstored().iter().map(|event| event.number).collect()
        };
        assert_eq!(numbers(&events), [4, 5, 7], "the long event is in the journal only");
        events.forget_stored_events(&[(9, 100), (CONTROLLER_REPORT_STREAM, 5)]);
        assert_eq!(numbers(&events), [7]);
        events.forget_stored_events(&[(CONTROLLER_REPORT_STREAM, 7)]);
        assert!(events.unstored.is_empty());
    }
}
