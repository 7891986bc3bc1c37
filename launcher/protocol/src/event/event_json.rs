//! Converts events of a run to JSON and back, in the present format (schema 2) and in the format of
//! earlier releases (schema 1).
use super::{
    event_schema::EventSchema,
    run_event::{Event, FailureReport},
};
use diagnostic::Code;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The events whose names in JSON have changed since earlier releases, as pairs of the earlier name
/// (in schema 1) and the present one (in schema 2).
const RENAMED_EVENTS: [(&str, &str); 2] = [("placed", "placement"), ("gathered", "gather")];
/// The fields of events whose names in JSON have changed since earlier releases, as pairs of the
/// earlier name (in schema 1) and the present one (in schema 2).
const RENAMED_FIELDS: [(&str, &str); 3] =
    [("epoch", "attempt"), ("left", "restarts_left"), ("cause", "message")];

/// An event of a run with the time at which it was recorded. The journal stores events in this
/// form.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedEvent {
    /// The event.
    pub event: Event,
    /// The time of the event, in seconds since 1970.
    pub time: f64,
}

impl Event {
    /// Formats the event as a JSON object on one line, without a line break and without its time.
    pub fn to_json(&self, schema: EventSchema) -> serde_json::Result<String> {
        format_event_line(self, schema, None)
    }

    /// Formats the event as a JSON object on one line, with its time in the field `time` (in
    /// seconds since 1970).
    pub fn to_json_with_time(&self, schema: EventSchema, time: f64) -> serde_json::Result<String> {
        format_event_line(self, schema, Some(time))
    }

    /// Parses an event from its JSON object in the present form (schema 2) or in that of earlier
    /// releases (schema 1).
    pub fn from_json(line: &str) -> serde_json::Result<Event> {
        let mut object: Map<String, Value> = serde_json::from_str(line)?;
        upgrade_to_schema_2(&mut object);
        serde_json::from_value(Value::Object(object))
    }
}

impl TimedEvent {
    /// Parses one line of a run's journal (`events.jsonl`), in JSON schema 1 or 2, into the event
    /// and its time.
    pub fn from_json(line: &str) -> serde_json::Result<TimedEvent> {
        #[derive(Deserialize)]
        struct EventTime {
            time: f64,
        }
        let EventTime { time } = serde_json::from_str(line)?;
        Ok(TimedEvent { event: Event::from_json(line)?, time })
    }

    /// Formats the event and its time as a JSON object on one line, without a line break.
    pub fn to_json(&self, schema: EventSchema) -> serde_json::Result<String> {
        self.event.to_json_with_time(schema, self.time)
    }
}

/// Formats an event as a JSON object on one line, in the form (1 or 2) that `schema` selects,
/// without a line break. The object has the field `time` if `time` is given.
fn format_event_line(event: &Event, schema: EventSchema, time: Option<f64>) -> serde_json::Result<String> {
    match schema {
        EventSchema::V1 => serde_json::to_string(&EventLineV1 { event: EventV1::from(event), time }),
        EventSchema::V2 => serde_json::to_string(&EventLineV2 {
            schema: 2,
            event,
            extra: DerivedFields::from_event(event),
            time,
        }),
    }
}

/// Renames an event and its fields in a JSON object from their names in earlier releases (schema 1)
/// to the present names (schema 2). An object that already has the names of schema 2 stays
/// unchanged.
fn upgrade_to_schema_2(object: &mut Map<String, Value>) {
    if let Some(Value::String(name)) = object.get_mut("event")
        && let Some((_, new)) = RENAMED_EVENTS.iter().find(|(old, _)| old == name)
    {
        *name = (*new).to_owned();
    }
    for (old, new) in RENAMED_FIELDS {
        if let Some(value) = object.remove(old) {
            object.entry(new).or_insert(value);
        }
    }
}

/// The JSON object of an event in schema 2, the present form: the event, its time and the number of
/// the schema.
#[derive(Serialize)]
struct EventLineV2<'a> {
    schema: u8,
    #[serde(flatten)]
    event: &'a Event,
    #[serde(flatten)]
    extra: DerivedFields<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<f64>,
}

/// The JSON fields that the JSON object of an event has in addition to those of [`Event`], such as
/// the diagnostic code of a failure.
#[derive(Default, Serialize)]
#[serde(default)]
struct DerivedFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<Code>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    left: Option<u32>,
}

impl<'a> DerivedFields<'a> {
    /// Computes the JSON fields that the JSON object of `event` has in addition to those of
    /// [`Event`], such as the diagnostic code of a failure.
    fn from_event(event: &'a Event) -> Self {
        let of_failure = |failure: &'a FailureReport| DerivedFields {
            code: Some(failure.reason.code()),
            cause: Some(&failure.message),
            ..DerivedFields::default()
        };
        match event {
            Event::Failure(failure) => of_failure(failure),
            Event::Restart { attempt, restarts_left, failure, .. } => {
                DerivedFields { epoch: Some(*attempt), left: Some(*restarts_left), ..of_failure(failure) }
            }
            Event::Placement { attempt, .. } => {
                DerivedFields { epoch: Some(*attempt), ..DerivedFields::default() }
            }
            _ => DerivedFields::default(),
        }
    }
}

/// The JSON object of an event in schema 1, the form of earlier releases: the event and its time.
#[derive(Serialize)]
struct EventLineV1<'a> {
    #[serde(flatten)]
    event: EventV1<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<f64>,
}

/// The JSON form of an event in schema 1, the format of earlier releases.
#[derive(Serialize)]
#[serde(untagged)]
enum EventV1<'a> {
    Renamed(RenamedEventV1<'a>),
    Unchanged(&'a Event),
}

/// The events that have another name or other fields in JSON schema 1, the format of earlier
/// releases, than in schema 2.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum RenamedEventV1<'a> {
    Gathered {
        step: u64,
        path: &'a PathBuf,
        bytes: u64,
    },
    Notice {
        rank: Option<u32>,
        message: &'a str,
    },
    Failure(FailureReportV1<'a>),
    Restart {
        epoch: u32,
        left: u32,
        pause_s: f64,
        #[serde(flatten)]
        failure: FailureReportV1<'a>,
    },
    Placed {
        epoch: u32,
        world: u32,
        hosts: &'a [String],
    },
}

/// The root cause of a failed run or attempt (start of all workers) in JSON schema 1, the form of
/// earlier releases.
#[derive(Serialize)]
struct FailureReportV1<'a> {
    rank: Option<u32>,
    host: &'a str,
    pid: u32,
    cause: &'a str,
    log: &'a Option<PathBuf>,
    tail: &'a [String],
}

impl<'a> From<&'a FailureReport> for FailureReportV1<'a> {
    fn from(failure: &'a FailureReport) -> Self {
        let FailureReport { rank, host, pid, message, log, tail, .. } = failure;
        FailureReportV1 { rank: *rank, host, pid: *pid, cause: message, log, tail }
    }
}

impl<'a> From<&'a Event> for EventV1<'a> {
    fn from(event: &'a Event) -> Self {
        EventV1::Renamed(match event {
            Event::Gather { step, path, bytes } => {
                RenamedEventV1::Gathered { step: *step, path, bytes: *bytes }
            }
            Event::Notice { rank, message, .. } => RenamedEventV1::Notice { rank: *rank, message },
            Event::Failure(failure) => RenamedEventV1::Failure((&**failure).into()),
            Event::Restart { attempt, restarts_left, pause_s, failure } => RenamedEventV1::Restart {
                epoch: *attempt,
                left: *restarts_left,
                pause_s: *pause_s,
                failure: (&**failure).into(),
            },
            Event::Placement { attempt, world, hosts, .. } => {
                RenamedEventV1::Placed { epoch: *attempt, world: *world, hosts }
            }
            unchanged => return EventV1::Unchanged(unchanged),
        })
    }
}
