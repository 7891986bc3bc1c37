//! [`BatchJob`]: a batch job of a scheduler in which launch runs, and [`SubmitRequest`], a request
//! to submit one.
use jobspec::JobSpec;
use std::{path::Path, time::Duration};

/// The batch job (such as a Slurm job) in which launch runs, with its id, its requeue counts, and
/// the function that requeues it.
#[derive(Clone, Debug)]
pub(crate) struct BatchJob {
    /// The batch job as messages name it, with the name of the scheduler.
    pub(crate) label: String,
    /// The id that the scheduler has given the batch job.
    pub(crate) id: String,
    /// How often the scheduler has requeued the batch job so far.
    pub(crate) restarts: u32,
    /// How often the batch job may be requeued.
    pub(crate) max_requeues: u32,
    /// The key of job.yaml that sets `max_requeues`.
    pub(crate) limit_key: &'static str,
    /// Puts the batch job with this id back into the queue. The scheduler may end this process.
    pub(crate) requeue: fn(&str) -> diagnostic::Result<()>,
}

/// What a scheduler reports about the end of the batch job in which launch runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchJobEnd {
    /// The batch job as messages name it, with the name of the scheduler.
    pub(crate) label: String,
    pub(crate) reason: BatchJobEndReason,
}

/// The reason for which a scheduler ends the batch job in which launch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchJobEndReason {
    /// The scheduler gives the hosts of the job to another job.
    Preemption {
        /// The time until the scheduler ends the remaining processes of the job.
        time_left: Duration,
    },
    /// The job has reached its time limit, or will reach it in less than two minutes.
    TimeLimit,
    /// A user or an administrator cancelled the job.
    Cancelled,
    /// The scheduler does not end the job: a user has sent SIGTERM to the processes of the job.
    Signal,
    /// The scheduler states no reason that launch knows.
    Unknown,
}

impl BatchJobEndReason {
    /// Returns the short name of this reason, such as `time-limit`, for the field `reason` of
    /// launch's notice `batch-job-end`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            BatchJobEndReason::Preemption { .. } => "preemption",
            BatchJobEndReason::TimeLimit => "time-limit",
            BatchJobEndReason::Cancelled => "cancelled",
            BatchJobEndReason::Signal => "signal",
            BatchJobEndReason::Unknown => "unknown",
        }
    }
}

/// A request to submit a job of launch to a scheduler, such as Slurm, as a batch job (`launch
/// sbatch`).
pub(crate) struct SubmitRequest<'a> {
    pub(crate) job: JobSpec,
    /// The path of the job file.
    pub(crate) job_file: &'a Path,
    /// The overrides from the command line (`--set path=value`).
    pub(crate) set: &'a [String],
    /// Options that are passed to the scheduler's own command.
    pub(crate) options: &'a [String],
    /// Whether the batch script is returned instead of submitted.
    pub(crate) print: bool,
}

/// The result of submitting a job to a scheduler: the id of the queued job or, with `--print`, the
/// batch script.
#[derive(Debug)]
pub(crate) enum Submission {
    /// The text of the batch script, which was not submitted.
    Script(String),
    /// The id of the queued batch job, and the path of the file with the job's output.
    Queued { id: String, output: String },
}
