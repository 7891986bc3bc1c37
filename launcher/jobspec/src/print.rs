//! Prints a [`JobSpec`] as a job.yaml with every key, for `--dry-run`. A job that is loaded from
//! this text equals the printed job.
use crate::{key_table::KEYS, keys::job_values::JobValues, spec::job::JobSpec};

impl JobSpec {
    /// Formats the job as the text of a job.yaml with all keys that have an effect in this job,
    /// defaults included. For example, `momentum` is left out with AdamW.
    pub fn to_yaml(&self) -> String {
        self.list_used_values().to_yaml()
    }

    /// Returns the YAML values of the keys that have an effect in this job, without, for example,
    /// `momentum` if the optimizer is AdamW.
    pub(crate) fn list_used_values(&self) -> JobValues {
        self.list_values().without_unused_keys(&KEYS)
    }
}
