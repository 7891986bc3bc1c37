//! The JSON form of events: schema 2, and schema 1 with the names of earlier releases.
use super::{Event, FailureReport};
use diagnostic::Code;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::{path::PathBuf, str::FromStr};

/// Events that schema 2 renamed: the name in schema 1, and the name in schema 2.
const RENAMED_EVENTS: [(&str, &str); 2] = [("placed", "placement"), ("gathered", "gather")];
const RENAMED_FIELDS: [(&str, &str); 3] =
    [("epoch", "attempt"), ("left", "restarts_left"), ("cause", "message")];

/// Version of the JSON form of events (`--json-schema`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventSchema {
    /// The form of earlier releases, without `schema`.
    V1,
    /// The current form. Deprecated field names are printed next to the new ones.
    #[default]
    V2,
}

impl EventSchema {
    /// The number that `schema` has in each object.
    pub fn number(self) -> u8 {
        match self {
            EventSchema::V1 => 1,
            EventSchema::V2 => 2,
        }
    }
}

/// The error of a version that the JSON form of events does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the schema of events is 1 or 2, not {0:?}")]
pub struct UnknownSchema(String);

impl FromStr for EventSchema {
    type Err = UnknownSchema;

    fn from_str(text: &str) -> Result<Self, UnknownSchema> {
        match text {
            "1" => Ok(EventSchema::V1),
            "2" => Ok(EventSchema::V2),
            other => Err(UnknownSchema(other.to_owned())),
        }
    }
}

/// An event with its time, as the journal stores it.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedEvent {
    /// What happened.
    pub event: Event,
    /// When it happened, in seconds since 1970.
    pub time: f64,
}

impl Event {
    /// Formats the event as a JSON object on one line, without a line break.
    pub fn to_json(&self, schema: EventSchema) -> serde_json::Result<String> {
        to_line(self, schema, None)
    }

    /// Formats the event as a JSON object that also has the field `time`, in seconds since 1970.
    pub fn to_json_at(&self, schema: EventSchema, time: f64) -> serde_json::Result<String> {
        to_line(self, schema, Some(time))
    }

    /// Reads an event of either schema.
    pub fn from_json(line: &str) -> serde_json::Result<Event> {
        let mut object: Map<String, Value> = serde_json::from_str(line)?;
        upgrade(&mut object);
        serde_json::from_value(Value::Object(object))
    }
}

impl TimedEvent {
    /// Reads a line of a journal of either schema.
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
        self.event.to_json_at(schema, self.time)
    }
}

fn to_line(event: &Event, schema: EventSchema, time: Option<f64>) -> serde_json::Result<String> {
    match schema {
        EventSchema::V1 => serde_json::to_string(&LineV1 { event: EventV1::from(event), time }),
        EventSchema::V2 => {
            serde_json::to_string(&LineV2 { schema: 2, event, extra: ExtraFields::of_event(event), time })
        }
    }
}

/// Renames the event and its fields from schema 1 to schema 2.
fn upgrade(object: &mut Map<String, Value>) {
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

#[derive(Serialize)]
struct LineV2<'a> {
    schema: u8,
    #[serde(flatten)]
    event: &'a Event,
    #[serde(flatten)]
    extra: ExtraFields<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<f64>,
}

/// Fields of the JSON object that are derived from the event: the code of a failure, and values
/// under deprecated names.
#[derive(Default, Serialize)]
#[serde(default)]
struct ExtraFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<Code>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    left: Option<u32>,
}

impl<'a> ExtraFields<'a> {
    fn of_event(event: &'a Event) -> Self {
        let of_failure = |failure: &'a FailureReport| ExtraFields {
            code: Some(failure.reason.code()),
            cause: Some(&failure.message),
            ..ExtraFields::default()
        };
        match event {
            Event::Failure(failure) => of_failure(failure),
            Event::Restart { attempt, restarts_left, failure, .. } => {
                ExtraFields { epoch: Some(*attempt), left: Some(*restarts_left), ..of_failure(failure) }
            }
            Event::Placement { attempt, .. } => {
                ExtraFields { epoch: Some(*attempt), ..ExtraFields::default() }
            }
            _ => ExtraFields::default(),
        }
    }
}

#[derive(Serialize)]
struct LineV1<'a> {
    #[serde(flatten)]
    event: EventV1<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<f64>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EventV1<'a> {
    Renamed(RenamedEventV1<'a>),
    Unchanged(&'a Event),
}

/// The events that schema 2 changed, in the form of schema 1.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum RenamedEventV1<'a> {
    Gathered {
        step: u64,
        path: &'a PathBuf,
        bytes: u64,
    },
    Failure(FailureV1<'a>),
    Restart {
        epoch: u32,
        left: u32,
        pause_s: f64,
        #[serde(flatten)]
        failure: FailureV1<'a>,
    },
    Placed {
        epoch: u32,
        world: u32,
        hosts: &'a [String],
    },
}

#[derive(Serialize)]
struct FailureV1<'a> {
    rank: Option<u32>,
    host: &'a str,
    pid: u32,
    cause: &'a str,
    log: &'a Option<PathBuf>,
    tail: &'a [String],
}

impl<'a> From<&'a FailureReport> for FailureV1<'a> {
    fn from(failure: &'a FailureReport) -> Self {
        let FailureReport { rank, host, pid, message, log, tail, .. } = failure;
        FailureV1 { rank: *rank, host, pid: *pid, cause: message, log, tail }
    }
}

impl<'a> From<&'a Event> for EventV1<'a> {
    fn from(event: &'a Event) -> Self {
        EventV1::Renamed(match event {
            Event::Gather { step, path, bytes } => {
                RenamedEventV1::Gathered { step: *step, path, bytes: *bytes }
            }
            Event::Failure(failure) => RenamedEventV1::Failure((&**failure).into()),
            Event::Restart { attempt, restarts_left, pause_s, failure } => RenamedEventV1::Restart {
                epoch: *attempt,
                left: *restarts_left,
                pause_s: *pause_s,
                failure: (&**failure).into(),
            },
            Event::Placement { attempt, world, hosts } => {
                RenamedEventV1::Placed { epoch: *attempt, world: *world, hosts }
            }
            unchanged => return EventV1::Unchanged(unchanged),
        })
    }
}

/// Diagnostics in the form that `--json` prints everywhere.
pub(super) mod diagnostics {
    use super::{Map, Value, json};
    use diagnostic::{Code, Diagnostic};
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub(in crate::event) fn serialize<S: Serializer>(
        diagnostics: &[Diagnostic],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        diagnostics.iter().map(Diagnostic::to_json).collect::<Vec<_>>().serialize(serializer)
    }

    pub(in crate::event) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Diagnostic>, D::Error> {
        let objects = Vec::<Map<String, Value>>::deserialize(deserializer)?;
        let diagnostic = |object| serde_json::from_value(stored_form(object)).map_err(D::Error::custom);
        objects.into_iter().map(diagnostic).collect()
    }

    /// Adds the fields that [`Diagnostic::to_json`] omits. The source line of a location is not
    /// restored.
    fn stored_form(mut object: Map<String, Value>) -> Value {
        let code = object.get("code").and_then(Value::as_str).and_then(Code::from_name);
        if let Some(code) = code {
            object.insert("category".into(), json!(code.category()));
        }
        if let Some(location) = object.get_mut("location") {
            let line = location.get("line").and_then(Value::as_u64).unwrap_or(0);
            *location = match (line, &location["file"], &location["column"]) {
                (0, file, _) => json!({ "File": { "file": file } }),
                (_, file, column) => {
                    json!({ "Line": { "file": file, "line": line, "column": column, "width": 1, "text": "" } })
                }
            };
        }
        object.entry("fields").or_insert_with(|| json!({}));
        for list in ["help", "causes"] {
            object.entry(list).or_insert_with(|| json!([]));
        }
        let details = match object.remove("details") {
            Some(Value::Array(details)) => details,
            _ => Vec::new(),
        };
        let stored = details.into_iter().filter_map(|detail| match detail {
            Value::Object(detail) => Some(stored_form(detail)),
            _ => None,
        });
        object.insert("details".into(), stored.collect());
        Value::Object(object)
    }
}
