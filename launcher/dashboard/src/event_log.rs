//! [`EventLog`]: the newest events of a run, with consecutive numbers, for the page of the
//! dashboard.
use serde::Serialize;
use serde_json::Value;
use std::collections::VecDeque;

/// The largest number of events of a run that the dashboard keeps in memory.
const MAX_EVENTS: usize = 1000;
/// The largest total size of the events of a run that the dashboard keeps in memory, in bytes of
/// JSON.
const MAX_BYTES: usize = 4 << 20;

/// An event of a run as JSON, with its number in the order in which the events were added.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct NumberedEvent {
    /// The number of the event among those of the log, from 1.
    number: u64,
    /// The JSON object of the event.
    pub(crate) event: Value,
    #[serde(skip)]
    bytes: usize,
}

/// The newest events of a run that the dashboard keeps in memory. `step` events are not among them.
#[derive(Clone, Debug, Default)]
pub(crate) struct EventLog {
    events: VecDeque<NumberedEvent>,
    count: u64,
    bytes: usize,
}

impl EventLog {
    /// Adds an event of the run, given as JSON, to the log, and removes the oldest events if there
    /// are too many.
    pub(crate) fn add(&mut self, event: Value) {
        self.count += 1;
        let bytes = event.to_string().len();
        self.bytes += bytes;
        self.events.push_back(NumberedEvent { number: self.count, event, bytes });
        while self.events.len() > MAX_EVENTS || (self.bytes > MAX_BYTES && self.events.len() > 1) {
            self.bytes -= self.events.pop_front().map_or(0, |event| event.bytes);
        }
    }

    /// Returns those events in the log whose number is above `number`, oldest first.
    pub(crate) fn list_after(&self, number: u64) -> Vec<&NumberedEvent> {
        self.events.iter().filter(|event| event.number > number).collect()
    }

    /// Returns the number of events that were ever added to the log, including those that it no
    /// longer keeps.
    pub(crate) fn added_count(&self) -> u64 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_events_are_kept_within_limits() {
        let mut log = EventLog::default();
        (0..3000).for_each(|n| log.add(Value::from(n)));
        assert_eq!((log.events.len(), log.added_count(), log.list_after(2998).len()), (MAX_EVENTS, 3000, 2));
        (0..100).for_each(|_| log.add(Value::from("x".repeat(100_000))));
        assert!(log.bytes <= MAX_BYTES && log.events.len() < 100, "{}", log.bytes);
        log.add(Value::from("x".repeat(2 * MAX_BYTES)));
        assert_eq!(log.events.len(), 1);
    }
}
