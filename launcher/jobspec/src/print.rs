//! Prints a [`JobSpec`] as a job.yaml with every key, for `--dry-run`. A job that is loaded from
//! this text equals the printed job.
use crate::{key_table::KEYS, keys::job_values::JobValues, spec::job::JobSpec};

impl JobSpec {
    /// Formats the whole job as the text of a job.yaml. Leaves out keys that have no effect in this
    /// job, such as `momentum` with AdamW.
    pub fn to_yaml(&self) -> String {
        self.list_used_values().to_yaml()
    }

    /// Returns the values, in YAML, of those keys that have an effect in this job.
    pub(crate) fn list_used_values(&self) -> JobValues {
        self.list_values().without_unused_keys(&KEYS)
    }
}
