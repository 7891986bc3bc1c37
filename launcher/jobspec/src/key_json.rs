//! [`JobSpec::to_key_json`]: converts a job to JSON in which no key has a deprecated name.
//!
//! Checkpoint manifests contain a serialized [`JobSpec`], so its fields keep the names that the
//! first checkpoints used, which are the names in [`DEPRECATED_NAMES`]. This module replaces these
//! names by the present ones, for programs that read `launch plan --json`.
use crate::{
    key_table::{DEPRECATED_NAMES, DeprecatedName},
    spec::job::JobSpec,
};
use serde_json::{Map, Value};

/// The endings that distinguish a field's name in the JSON of a job from its key in job.yaml: none,
/// or `_ms` for milliseconds.
const FIELD_SUFFIXES: [&str; 2] = ["", "_ms"];

impl JobSpec {
    /// Converts the job to JSON in which every field is named after its key in job.yaml, without
    /// deprecated names. The result cannot be deserialized to a [`JobSpec`].
    pub fn to_key_json(&self) -> Value {
        let mut job = serde_json::to_value(self).unwrap_or(Value::Null);
        for name in DEPRECATED_NAMES.iter() {
            let section = format!("/{}", name.section.replace('.', "/"));
            if let Some(Value::Object(fields)) = job.pointer_mut(&section) {
                rename_field(fields, name);
            }
        }
        job
    }
}

/// Renames the JSON field of one job.yaml key from its deprecated name to its present name.
/// Replaces the field's value if the value was renamed, too.
fn rename_field(fields: &mut Map<String, Value>, name: &DeprecatedName) {
    for suffix in FIELD_SUFFIXES {
        let Some(value) = fields.remove(&format!("{}{suffix}", name.old)) else { continue };
        let renamed = name.values.iter().find(|(old, _)| serialize_keyword(old) == value);
        let value = renamed.map_or(value, |(_, new)| serialize_keyword(new));
        fields.insert(format!("{}{suffix}", name.new), value);
    }
}

/// Converts a keyword of job.yaml to its form in the JSON of a job: `true` and `false` to booleans,
/// other keywords to capitalized text.
fn serialize_keyword(value: &str) -> Value {
    match value {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        _ => Value::String(value[..1].to_uppercase() + &value[1..]),
    }
}
