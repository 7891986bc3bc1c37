//! [`HangTimeout`]: `run.hang_timeout`, the time without progress of the workers after which launch
//! treats them as hung.
use crate::keys::{
    units::duration_range_type,
    value_type::{ValueType, in_variant},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The keyword `auto` of `run.hang_timeout` in job.yaml, which selects [`HangTimeout::Auto`].
const AUTO: &str = "auto";

/// `run.hang_timeout`: the time without progress after which an attempt (start of all workers)
/// fails.
///
/// Stored jobs contain milliseconds, null for [`HangTimeout::Off`], or `auto`. Jobs of earlier
/// versions contain only the first two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HangTimeout {
    /// The plan of an attempt decides: hangs are detected if workers have accelerators.
    #[default]
    Auto,
    /// Hangs are not detected.
    Off,
    /// The time in milliseconds.
    After(u64),
}

impl HangTimeout {
    /// Returns the parser and printer ([`ValueType`]) for `run.hang_timeout`: `auto`, `off`, or a
    /// duration of at least one second.
    pub(super) fn value_type() -> ValueType<HangTimeout> {
        let duration = duration_range_type(1000..=u64::MAX, "a duration of 1s or more")
            .documented_as("duration of 1s or more");
        in_variant!(duration, HangTimeout::After)
            .or_keywords(&[(AUTO, HangTimeout::Auto), ("off", HangTimeout::Off)])
    }
}

impl Serialize for HangTimeout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            HangTimeout::Auto => serializer.serialize_str(AUTO),
            HangTimeout::Off => serializer.serialize_none(),
            HangTimeout::After(ms) => serializer.serialize_u64(*ms),
        }
    }
}

impl<'de> Deserialize<'de> for HangTimeout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<HangTimeout, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum StoredValue {
            Milliseconds(u64),
            Word(String),
        }
        match Option::<StoredValue>::deserialize(deserializer)? {
            None => Ok(HangTimeout::Off),
            Some(StoredValue::Milliseconds(ms)) => Ok(HangTimeout::After(ms)),
            Some(StoredValue::Word(word)) if word == AUTO => Ok(HangTimeout::Auto),
            Some(StoredValue::Word(_)) => Err(serde::de::Error::custom("unknown word in run.hang_timeout")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_values_of_this_and_of_earlier_versions_are_read() {
        for (value, text) in
            [(HangTimeout::Auto, "\"auto\""), (HangTimeout::Off, "null"), (HangTimeout::After(3000), "3000")]
        {
            assert_eq!(serde_json::to_string(&value).ok().as_deref(), Some(text));
            assert_eq!(serde_json::from_str::<HangTimeout>(text).ok(), Some(value));
        }
        assert!(serde_json::from_str::<HangTimeout>("\"of\"").is_err());
    }
}
