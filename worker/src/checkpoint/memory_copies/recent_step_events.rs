//! The latest step events ([`RecentStepEvents`]): reports of completed training steps to the
//! controller, which each memory copy of the training state contains.
use crate::error::Result;
use diagnostic::{Diagnostic, codes};
use protocol::event::Event;
use serde_json::Value;
use std::collections::VecDeque;

/// Key of the step events (reports of completed steps) in the JSON with the progress of training
/// that each memory copy contains.
const STEP_EVENTS_KEY: &str = "step_events";
/// Maximum number of step events (reports of completed steps to the controller) that are stored in
/// one memory copy of the training state. The events of a few steps can be lost with their host.
/// Hundreds would slow down each copy.
const MAX_STEP_EVENTS: usize = 64;

/// The step events (reports of completed steps to the controller) of the latest steps of the run.
///
/// A memory copy of the training state contains them, because a step event can be lost with the
/// worker or host that sends it, while the copy of the step remains. The run that resumes from the
/// copy sends the events again. The controller drops those that it has received before.
#[derive(Clone, Debug, Default)]
pub struct RecentStepEvents {
    /// The events as JSON, oldest first.
    events: VecDeque<Value>,
}

impl RecentStepEvents {
    /// Adds the event that reports the latest completed step, and drops the oldest event if there
    /// are already [`MAX_STEP_EVENTS`] events.
    pub(in crate::checkpoint) fn record(&mut self, event: &Event) {
        if self.events.len() == MAX_STEP_EVENTS {
            self.events.pop_front();
        }
        // The encoding of an event as JSON does not fail.
        self.events.extend(serde_json::to_value(event));
    }

    /// Adds these step events to `cursor`, the JSON with the progress of training that a memory
    /// copy of the training state contains.
    pub(in crate::checkpoint) fn add_to_cursor(&self, cursor: &mut Value) {
        if !self.events.is_empty() {
            cursor[STEP_EVENTS_KEY] = self.events.iter().cloned().collect();
        }
    }

    /// Reads the step events from `cursor`, the JSON with the progress of training in a memory
    /// copy.
    ///
    /// # Errors
    /// Fails if the progress contains something else in place of the events.
    pub(in crate::checkpoint) fn from_cursor(cursor: &Value) -> Result<RecentStepEvents> {
        let Some(value) = cursor.get(STEP_EVENTS_KEY) else { return Ok(RecentStepEvents::default()) };
        let mut read = RecentStepEvents::default();
        for event in value.as_array().into_iter().flatten() {
            read.record(&decode_event(event)?);
        }
        Ok(read)
    }

    /// Decodes the stored step events (reports of completed steps) from JSON, and returns them with
    /// the oldest event first.
    ///
    /// # Errors
    /// Does not fail for events that [`RecentStepEvents::record`] added.
    pub(in crate::checkpoint) fn decode(&self) -> Result<Vec<Event>> {
        self.events.iter().map(decode_event).collect()
    }
}

/// Decodes the event that reports a completed training step from its JSON value.
fn decode_event(event: &Value) -> Result<Event> {
    serde_json::from_value(event.clone()).map_err(|e| {
        let message = "the events of the last steps in a memory copy are not valid";
        Diagnostic::error(codes::training::PEER_REPORT_INVALID, message).with_cause(&e).into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Builds the event of a step.
    fn build_step(step: u64) -> Event {
        Event::Step {
            step,
            loss: 1.0 / step as f64,
            grad_norm: 1.1,
            lr: 1e-3,
            tokens: step,
            tokens_per_s: 0.3,
            peak_rss: 1,
            exposed_comm_s: 0.1,
        }
    }

    #[test]
    fn a_copy_has_the_newest_events_bit_equal() {
        let mut recent = RecentStepEvents::default();
        let events: Vec<Event> = (1..100).map(build_step).collect();
        events.iter().for_each(|event| recent.record(event));
        let mut cursor = json!({ "at": 1 });
        recent.add_to_cursor(&mut cursor);
        let text = cursor.to_string();
        let read = RecentStepEvents::from_cursor(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(read.decode().unwrap(), events[events.len() - MAX_STEP_EVENTS..]);
    }

    #[test]
    fn a_copy_without_events_has_no_key_and_damaged_events_are_rejected() {
        let mut cursor = json!({});
        RecentStepEvents::default().add_to_cursor(&mut cursor);
        assert_eq!(cursor, json!({}));
        assert_eq!(RecentStepEvents::from_cursor(&cursor).unwrap().decode().unwrap(), []);
        assert!(RecentStepEvents::from_cursor(&json!({ STEP_EVENTS_KEY: [{ "event": "step" }] })).is_err());
    }
}
