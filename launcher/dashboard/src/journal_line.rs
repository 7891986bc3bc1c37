//! [`JournalLine`]: a line of a run's journal (`events.jsonl`), parsed with limits on the size of
//! its values.
use protocol::event::{Event, TimedEvent};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The longest text in an event that the dashboard keeps, in bytes. The rest of a longer text is
/// replaced by an ellipsis.
const MAX_TEXT_BYTES: usize = 4096;
/// The largest number of items that the dashboard keeps of a JSON list or object in an event of a
/// run.
const MAX_COLLECTION_ENTRIES: usize = 256;
/// The largest number of JSON values (texts, numbers, lists and objects) that the dashboard keeps
/// of one event of a run.
const MAX_EVENT_VALUES: usize = 4096;
/// The number of bytes at the start of a journal line in which the dashboard searches for the kind
/// of the event.
const EVENT_KIND_SEARCH_BYTES: usize = 64;
/// The text by which a journal line is recognized as a `step` event without parsing its JSON.
const STEP_EVENT_PATTERN: &[u8] = br#""event":"step""#;

/// The values of a `step` event (the report about one optimizer step), such as the loss and the
/// learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub(crate) struct StepValues {
    pub(crate) time: f64,
    pub(crate) step: u64,
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) lr: f64,
    pub(crate) tokens: u64,
    pub(crate) tokens_per_s: f64,
    pub(crate) peak_rss: u64,
    #[serde(default)]
    pub(crate) exposed_comm_s: f64,
}

/// A parsed line of a run's journal (`events.jsonl`): a `step` event, another known event, or an
/// event that this version of launch does not know.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum JournalLine {
    /// A `step` event.
    Step(StepValues),
    /// Any other event that this version knows.
    Event {
        time: f64,
        event: Box<Event>,
        /// The limited JSON object of the event.
        json: Value,
    },
    /// An event of another version of launch, as its limited JSON object.
    Unknown { time: f64, json: Value },
}

impl JournalLine {
    /// Parses a line of a run's journal (`events.jsonl`). Returns `None` if the line is damaged:
    /// not a JSON object with the fields `event` and `time`.
    pub(crate) fn parse(line: &[u8]) -> Option<JournalLine> {
        let prefix = &line[..line.len().min(EVENT_KIND_SEARCH_BYTES)];
        if prefix.windows(STEP_EVENT_PATTERN.len()).any(|part| part == STEP_EVENT_PATTERN)
            && let Ok(numbers) = serde_json::from_slice::<StepValues>(line)
        {
            return Some(JournalLine::Step(numbers));
        }
        let text = std::str::from_utf8(line).ok()?;
        let object: Map<String, Value> = serde_json::from_str(text).ok()?;
        let time = object.get("time")?.as_f64()?;
        object.get("event")?.as_str()?;
        let json = truncate_json_value(Value::Object(object), &mut MAX_EVENT_VALUES.clone());
        match TimedEvent::from_json(text) {
            Ok(timed) => Some(JournalLine::Event { time, event: Box::new(timed.event), json }),
            Err(_) => Some(JournalLine::Unknown { time, json }),
        }
    }
}

/// Shortens long texts, lists and objects in a JSON value from an untrusted file, and replaces
/// values beyond a total number (`values_left`) by `null`.
pub(crate) fn truncate_json_value(value: Value, values_left: &mut usize) -> Value {
    *values_left = values_left.saturating_sub(1);
    if *values_left == 0 {
        return Value::Null;
    }
    match value {
        Value::String(text) => Value::String(truncate_text(text, MAX_TEXT_BYTES)),
        Value::Array(items) => {
            let items = items.into_iter().take(MAX_COLLECTION_ENTRIES);
            Value::Array(items.map(|item| truncate_json_value(item, values_left)).collect())
        }
        Value::Object(fields) => {
            let fields = fields.into_iter().take(MAX_COLLECTION_ENTRIES);
            let limit =
                |(name, v)| (truncate_text(name, MAX_TEXT_BYTES), truncate_json_value(v, values_left));
            Value::Object(fields.map(limit).collect())
        }
        other => other,
    }
}

/// Shortens a text that is longer than `limit` bytes to at most `limit` bytes, and appends an
/// ellipsis.
pub(crate) fn truncate_text(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        text.truncate(text.floor_char_boundary(limit));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_lines_are_recognized() {
        for line in [
            "",
            "{",
            "[]",
            "null",
            r#"{"event":"step"}"#,
            r#"{"event":7,"time":1}"#,
            r#"{"event":"done","time":"x"}"#,
            r#"{"schema":2,"event":"step","step":1,"loss":1e999,"time":1.0}"#,
            "\u{0}\u{0}\u{0}",
        ] {
            assert_eq!(JournalLine::parse(line.as_bytes()), None, "{line}");
        }
        assert_eq!(JournalLine::parse(b"{\"event\":\"\xff\",\"time\":1}"), None);
        let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let line = format!(r#"{{"event":"x","time":1,"a":{nested}}}"#);
        assert_eq!(JournalLine::parse(line.as_bytes()), None);
    }

    #[test]
    fn events_of_other_versions_are_kept_within_limits() {
        let long = "é".repeat(5000);
        let list = vec!["0"; 10_000].join(",");
        let line = format!(r#"{{"event":"new","time":2.5,"text":"{long}","list":[{list}]}}"#);
        let Some(JournalLine::Unknown { time, json }) = JournalLine::parse(line.as_bytes()) else {
            panic!("an unknown event")
        };
        assert_eq!((time, json["list"].as_array().map(Vec::len)), (2.5, Some(MAX_COLLECTION_ENTRIES)));
        assert!(json["text"].as_str().is_some_and(|t| t.len() <= MAX_TEXT_BYTES + 3 && t.ends_with('…')));
    }

    #[test]
    fn steps_and_events_of_both_schemas_are_parsed() {
        let step = r#"{"schema":2,"event":"step","step":3,"loss":2.5,"grad_norm":1.0,"lr":0.1,"tokens":6,"tokens_per_s":2.0,"peak_rss":9,"time":4.0}"#;
        let Some(JournalLine::Step(numbers)) = JournalLine::parse(step.as_bytes()) else { panic!("a step") };
        assert_eq!((numbers.step, numbers.loss, numbers.time), (3, 2.5, 4.0));
        let placed = r#"{"event":"placed","epoch":2,"world":4,"hosts":["a","b"],"time":1.0}"#;
        let Some(JournalLine::Event { event, .. }) = JournalLine::parse(placed.as_bytes()) else {
            panic!("an event")
        };
        assert!(matches!(*event, Event::Placement { attempt: 2, .. }));
    }
}
