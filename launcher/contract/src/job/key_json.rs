//! [`JobSpec::to_key_json`]: the job as JSON under the present key names.
//!
//! Checkpoint manifests contain a serialized [`JobSpec`], so its fields keep the names that the
//! first checkpoints used. This module replaces these names by the present ones, for programs that
//! read `launch plan --json`.
use super::JobSpec;
use serde_json::Value;

/// A field of the job whose name in manifests differs from the present name of its key.
struct RenamedField {
    /// A JSON pointer to the object of the serialized job that contains the field.
    parent: &'static str,
    stored: &'static str,
    present: &'static str,
    /// The renamed values of the field, as pairs of the stored and the present JSON text.
    values: &'static [(&'static str, &'static str)],
}

/// Creates the entry of a field whose name was changed, but whose values were not.
const fn rename_field(parent: &'static str, stored: &'static str, present: &'static str) -> RenamedField {
    RenamedField { parent, stored, present, values: &[] }
}

/// All fields of the job whose names in manifests differ from the present names of their keys.
const RENAMED_FIELDS: &[RenamedField] = &[
    rename_field("/cluster", "collectives", "comm_backend"),
    rename_field("/cluster", "cuda_libs", "cuda_library_paths"),
    RenamedField {
        parent: "/cluster/ssh",
        stored: "config",
        present: "config",
        values: &[("\"Usual\"", "\"Default\"")],
    },
    rename_field("/cluster/ssh", "parallel", "fanout"),
    rename_field("/run", "bind", "cpu_bind"),
    rename_field("/run", "grace_ms", "grace_period_ms"),
    rename_field("/run", "progress", "progress_pattern"),
    rename_field("/train/experts", "parallel", "expert_parallel_size"),
    RenamedField {
        parent: "/train",
        stored: "numerics",
        present: "deterministic",
        values: &[("\"Reproducible\"", "true"), ("\"Fast\"", "false")],
    },
    rename_field("/slurm", "notice_ms", "signal_time_ms"),
];

impl JobSpec {
    /// Returns the job as JSON under the present key names. The result cannot be deserialized to a
    /// [`JobSpec`], because the serialized form has other names.
    pub fn to_key_json(&self) -> Value {
        let mut job = serde_json::to_value(self).unwrap_or(Value::Null);
        for name in RENAMED_FIELDS {
            let Some(Value::Object(parent)) = job.pointer_mut(name.parent) else { continue };
            let Some(value) = parent.remove(name.stored) else { continue };
            let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap_or(Value::Null);
            let renamed = name.values.iter().find(|(stored, _)| parse(stored) == value);
            parent.insert(name.present.to_owned(), renamed.map_or(value, |(_, present)| parse(present)));
        }
        job
    }
}
