//! Decides whether a Slurm batch job is requeued after its run has ended. Calls no Slurm command.
use super::core::RunOutcome;
use crate::report::format_count;

/// A Slurm batch job that may be requeued after its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequeueableJob {
    /// The Slurm id of the batch job.
    pub job: u64,
    /// How often Slurm has requeued the job so far.
    pub restarts: u32,
    /// How often the job may be requeued (`slurm.requeues`).
    pub max_requeues: u32,
}

/// The decision whether to requeue the batch job, and a notice about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequeueDecision {
    /// The id of the batch job to requeue; `None` if the batch job is not requeued.
    pub(super) job: Option<u64>,
    /// A notice for the user with the decision and its reason.
    pub(super) message: String,
}

impl RequeueableJob {
    /// Decides by the outcome of the run whether the batch job is requeued. Returns `None`, without
    /// a notice for the user, unless a host was lost or the time limit of the batch job was near.
    /// Decides against a requeue if `max_requeues` is reached, or if the run completed no step
    /// before the time limit.
    pub(super) fn decide_requeue(&self, outcome: &RunOutcome) -> Option<RequeueDecision> {
        let why = match outcome {
            RunOutcome { near_time_limit: true, .. } => "the time limit is near",
            RunOutcome { host_lost: true, .. } => "a host was lost",
            _ => return None,
        };
        let RequeueableJob { job, restarts, max_requeues: most } = *self;
        let objection = if restarts >= most {
            let times = format_count(u64::from(restarts), "time", "times");
            Some(format!("the job was requeued {times} already, and `slurm.requeues` is {most}"))
        } else if outcome.near_time_limit && !outcome.made_progress {
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

    /// Decides whether batch job 7, which was requeued `restarts` times and may be requeued twice,
    /// is requeued. Returns `None` if there is no decision, `Some(None)` if the job is not
    /// requeued, and otherwise the id of the job.
    fn decide_requeue_after(restarts: u32, outcome: RunOutcome) -> Option<Option<u64>> {
        RequeueableJob { job: 7, restarts, max_requeues: 2 }
            .decide_requeue(&outcome)
            .map(|decision| decision.job)
    }

    #[test]
    fn jobs_are_requeued_at_the_time_limit_and_after_the_loss_of_a_host() {
        let ended = |time_limit, host_lost, progress| RunOutcome {
            near_time_limit: time_limit,
            host_lost,
            made_progress: progress,
            ..RunOutcome::default()
        };
        assert_eq!(decide_requeue_after(0, ended(false, false, true)), None, "completed, failed or stopped");
        assert_eq!(decide_requeue_after(0, ended(true, false, true)), Some(Some(7)));
        assert_eq!(
            decide_requeue_after(1, ended(false, true, false)),
            Some(Some(7)),
            "the job is not at fault for the loss of a host"
        );
        assert_eq!(
            decide_requeue_after(0, ended(true, false, false)),
            Some(None),
            "the job would never get further"
        );
        assert_eq!(decide_requeue_after(2, ended(true, false, true)), Some(None));
        assert_eq!(decide_requeue_after(2, ended(false, true, true)), Some(None));
    }
}
