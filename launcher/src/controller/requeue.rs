//! [`decide_requeue`]: decides whether a batch job is requeued after its run has ended.
use super::core::RunOutcome;
use crate::cluster::BatchJob;
use diagnostic::quantity::format_count;

/// Whether a Slurm or Kubernetes job is to be queued again, and the notice to the user that
/// explains the decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequeueDecision {
    /// Whether the batch job is requeued.
    pub(super) requeue: bool,
    /// A notice for the user with the decision and its reason.
    pub(super) message: String,
}

/// Decides, from the result of a run, whether Slurm or Kubernetes must queue the run's batch job
/// again. Returns `None`, without a notice for the user, unless a host was lost, the time limit of
/// the batch job was near, or the batch system preempts the job (`is_preempted`). Decides against a
/// requeue if `max_requeues` is reached, or if the run completed no step before the time limit. A
/// preempted job is always requeued.
pub(super) fn decide_requeue(
    job: &BatchJob,
    outcome: &RunOutcome,
    is_preempted: bool,
) -> Option<RequeueDecision> {
    if is_preempted {
        // The reason was reported already.
        return Some(RequeueDecision { requeue: true, message: format!("requeuing {}", job.label) });
    }
    let why = match outcome {
        RunOutcome { near_time_limit: true, .. } => "the time limit is near",
        RunOutcome { host_lost: true, .. } => "a host was lost",
        _ => return None,
    };
    let BatchJob { label, restarts, max_requeues: most, limit_key, .. } = job;
    let objection = if restarts >= most {
        let times = format_count(*restarts, "time");
        Some(format!("the job was requeued {times} already, and `{limit_key}` is {most}"))
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
            requeue: false,
            message: format!("{why}, but {label} is not requeued: {objection}"),
        },
        None => RequeueDecision {
            requeue: true,
            message: format!("{why}: requeuing {label} (requeue {} of at most {most})", restarts + 1),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decides whether a batch job that was requeued `restarts` times, and may be requeued twice,
    /// is requeued. Returns `None` if there is no decision.
    fn decide_requeue_after(restarts: u32, outcome: RunOutcome) -> Option<bool> {
        decide_requeue(&create_batch_job(restarts), &outcome, false).map(|decision| decision.requeue)
    }

    fn create_batch_job(restarts: u32) -> BatchJob {
        BatchJob {
            label: "job 7".into(),
            id: "7".into(),
            restarts,
            max_requeues: 2,
            limit_key: "batch.requeues",
            requeue: |_| Ok(()),
        }
    }

    #[test]
    fn preempted_jobs_are_requeued_without_a_limit() {
        let outcome = RunOutcome { ended_by_batch_system: true, ..RunOutcome::default() };
        let decide = |restarts, is_preempted| {
            decide_requeue(&create_batch_job(restarts), &outcome, is_preempted)
                .map(|decision| decision.requeue)
        };
        assert_eq!(decide(9, true), Some(true));
        assert_eq!(decide(0, false), None, "a user has signalled the processes of the job");
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
        assert_eq!(decide_requeue_after(0, ended(true, false, true)), Some(true));
        assert_eq!(
            decide_requeue_after(1, ended(false, true, false)),
            Some(true),
            "the job is not at fault for the loss of a host"
        );
        assert_eq!(
            decide_requeue_after(0, ended(true, false, false)),
            Some(false),
            "the job would never get further"
        );
        assert_eq!(decide_requeue_after(2, ended(true, false, true)), Some(false));
        assert_eq!(decide_requeue_after(2, ended(false, true, true)), Some(false));
    }
}
