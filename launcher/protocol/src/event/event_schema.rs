//! [`EventSchema`]: the versions of the JSON form in which events of a run are printed.
use std::str::FromStr;

/// A version of the JSON form of events, which the option `--json-schema` selects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventSchema {
    /// The form that earlier releases printed, without the field `schema`.
    V1,
    /// The current form. A renamed field is printed twice: under its present name, and under its
    /// name in schema 1.
    #[default]
    V2,
}

impl EventSchema {
    /// Returns the number of this JSON schema of events, 1 or 2.
    pub fn version_number(self) -> u8 {
        match self {
            EventSchema::V1 => 1,
            EventSchema::V2 => 2,
        }
    }
}

/// The error for a value of `--json-schema` that is not 1 or 2. Contains the version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the schema of events is 1 or 2, not {0:?}")]
pub struct UnknownEventSchema(String);

impl FromStr for EventSchema {
    type Err = UnknownEventSchema;

    fn from_str(text: &str) -> Result<Self, UnknownEventSchema> {
        match text {
            "1" => Ok(EventSchema::V1),
            "2" => Ok(EventSchema::V2),
            other => Err(UnknownEventSchema(other.to_owned())),
        }
    }
}
