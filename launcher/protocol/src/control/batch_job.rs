//! [`BatchJobRecord`]: the Slurm or Kubernetes job that started a run, as stored in the run
//! directory and in checkpoints.
use serde::{Deserialize, Serialize};

/// The largest length of the id and of the label of a batch job, in bytes.
const MAX_TEXT_BYTES: usize = 512;

/// The batch job of Slurm or Kubernetes in which a run was started, and which the scheduler may
/// start again after a failure. Each start is a separate run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchJobRecord {
    /// Identifies the batch job and the command line that it runs. The runs of one command of one
    /// batch job, and no other runs, have the same id. The part after the last colon identifies the
    /// command line.
    pub id: String,
    /// The batch job as messages name it, such as `Slurm job 12`.
    pub label: String,
    /// The number of times that the scheduler had started the batch job again when the run began;
    /// `None` if the scheduler does not report the number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
}

impl BatchJobRecord {
    /// Returns whether the scheduler has, or may have, started the batch job before, so that
    /// earlier runs of its command can exist.
    pub fn may_have_earlier_runs(&self) -> bool {
        self.restarts != Some(0)
    }

    /// Returns whether `id` identifies the batch job of this record, but another command line than
    /// the one of this record.
    pub fn is_other_command_of_same_job(&self, id: &str) -> bool {
        match (id.rsplit_once(':'), self.id.rsplit_once(':')) {
            (Some((job, command)), Some((own_job, own_command))) => job == own_job && command != own_command,
            _ => false,
        }
    }

    /// Returns whether the id and the label of a record that was read from a file have 1 to
    /// [`MAX_TEXT_BYTES`] bytes each.
    pub fn has_valid_lengths(&self) -> bool {
        let is_valid = |text: &str| (1..=MAX_TEXT_BYTES).contains(&text.len());
        is_valid(&self.id) && is_valid(&self.label)
    }
}
