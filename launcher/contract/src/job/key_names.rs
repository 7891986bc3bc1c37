//! The job as JSON under the present key names.
//!
//! [`JobSpec`] serializes with the names that it had when the first checkpoints were written,
//! because manifests contain it. This module renames them for programs that read `launch plan
//! --json`.
use super::JobSpec;
use serde_json::Value;

/// A field whose stored name is not its present name.
struct StoredName {
    /// JSON pointer to the object that contains the field.
    parent: &'static str,
    stored: &'static str,
    present: &'static str,
    /// Stored and present values, where values were renamed, too; JSON.
    values: &'static [(&'static str, &'static str)],
}

const fn field(parent: &'static str, stored: &'static str, present: &'static str) -> StoredName {
    StoredName { parent, stored, present, values: &[] }
}

const STORED_NAMES: &[StoredName] = &[
    field("/cluster", "collectives", "comm_backend"),
    field("/cluster", "cuda_libs", "cuda_library_paths"),
    StoredName {
        parent: "/cluster/ssh",
        stored: "config",
        present: "config",
        values: &[("\"Usual\"", "\"Default\"")],
    },
    field("/cluster/ssh", "parallel", "fanout"),
    field("/run", "bind", "cpu_bind"),
    field("/run", "grace_ms", "grace_period_ms"),
    field("/run", "progress", "progress_pattern"),
    field("/train/experts", "parallel", "expert_parallel_size"),
    StoredName {
        parent: "/train",
        stored: "numerics",
        present: "deterministic",
        values: &[("\"Reproducible\"", "true"), ("\"Fast\"", "false")],
    },
    field("/slurm", "notice_ms", "signal_time_ms"),
];

impl JobSpec {
    /// The job as JSON whose names are the present key names, for programs. Unlike the stored form
    /// it cannot be read back.
    pub fn to_key_json(&self) -> Value {
        let mut job = serde_json::to_value(self).unwrap_or(Value::Null);
        for name in STORED_NAMES {
            let Some(Value::Object(parent)) = job.pointer_mut(name.parent) else { continue };
            let Some(value) = parent.remove(name.stored) else { continue };
            let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap_or(Value::Null);
            let renamed = name.values.iter().find(|(stored, _)| parse(stored) == value);
            parent.insert(name.present.to_owned(), renamed.map_or(value, |(_, present)| parse(present)));
        }
        job
    }
}
