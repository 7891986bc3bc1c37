//! [`BatchJobRecord`]: the Slurm or Kubernetes job that started a run, as stored in the run
//! directory and in checkpoints.
use serde::{Deserialize, Serialize};

/// The largest length of the id and of the label of a batch job, in bytes.
const MAX_TEXT_BYTES: usize = 512;

/// The batch job that started a run: a job of Slurm or Kubernetes, whose command the scheduler may
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
    /// Returns whether the scheduler has started the batch job before, so that earlier runs of its
    /// command may exist; `true` if unknown.
    pub fn may_have_earlier_runs(&self) -> bool {
        self.restarts != Some(0)
    }

    /// Returns whether `id` identifies a run of this batch job that another command line started.
    pub fn is_other_command_of_same_job(&self, id: &str) -> bool {
        match (id.rsplit_once(':'), self.id.rsplit_once(':')) {
            (Some((job, command)), Some((own_job, own_command))) => job == own_job && command != own_command,
            _ => false,
        }
    }

    /// Returns whether the id and the label are not empty and at most [`MAX_TEXT_BYTES`] bytes
    /// long, as a check of records that were read from files.
    pub fn has_valid_lengths(&self) -> bool {
        let is_valid = |text: &str| (1..=MAX_TEXT_BYTES).contains(&text.len());
        is_valid(&self.id) && is_valid(&self.label)
    }
}
