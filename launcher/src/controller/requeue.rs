//! Decides whether a Slurm batch job is requeued after its run has ended. Calls no Slurm command.
use super::core::Outcome;
use crate::report::count;

/// A batch job that may be requeued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requeue {
    /// The id of the batch job.
    pub job: u64,
    /// How often it was requeued so far.
    pub restarts: u32,
    /// How often it may be requeued (`slurm.requeues`).
    pub most: u32,
}

/// Whether to requeue the batch job, and what to report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequeueDecision {
    /// The batch job to requeue; `None` if it is not requeued.
    pub(super) job: Option<u64>,
    /// A notice for the user.
    pub(super) message: String,
}

impl Requeue {
    /// Decides by the outcome of the run. `None` if the run completed, failed, or was stopped by a
    /// user.
    pub(super) fn decide(&self, outcome: &Outcome) -> Option<RequeueDecision> {
        let why = match outcome {
            Outcome { time_limit: true, .. } => "the time limit is near",
            Outcome { host_lost: true, .. } => "a host was lost",
            _ => return None,
        };
        let Requeue { job, restarts, most } = *self;
        let objection = if restarts >= most {
            let times = count(u64::from(restarts), "time", "times");
            Some(format!("it was requeued {times} already, and `slurm.requeues` is {most}"))
        } else if outcome.time_limit && !outcome.progress {
            Some(
                "this run completed no step; request a longer time limit, or reduce the work of a step"
                    .to_owned(),
            )
        } else {
            None
        };
        Some(match objection {
            Some(objection) => RequeueDecision {
                job: None,
                message: format!("{why}, but Slurm job {job} is not requeued: {objection}"),
            },
            None => RequeueDecision {
                job: Some(job),
                message: format!(
                    "{why}: requeuing Slurm job {job} (requeue {} of at most {most})",
                    restarts + 1
                ),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requeued(restarts: u32, outcome: Outcome) -> Option<Option<u64>> {
        Requeue { job: 7, restarts, most: 2 }.decide(&outcome).map(|decision| decision.job)
    }

    #[test]
    fn jobs_are_requeued_at_the_time_limit_and_after_the_loss_of_a_host() {
        let ended = |time_limit, host_lost, progress| Outcome {
            time_limit,
            host_lost,
            progress,
            ..Outcome::default()
        };
        assert_eq!(requeued(0, ended(false, false, true)), None, "completed, failed or stopped");
        assert_eq!(requeued(0, ended(true, false, true)), Some(Some(7)));
        assert_eq!(
            requeued(1, ended(false, true, false)),
            Some(Some(7)),
            "the job is not at fault for the loss of a host"
        );
        assert_eq!(requeued(0, ended(true, false, false)), Some(None), "it would never get further");
        assert_eq!(requeued(2, ended(true, false, true)), Some(None));
        assert_eq!(requeued(2, ended(false, true, true)), Some(None));
    }
}
