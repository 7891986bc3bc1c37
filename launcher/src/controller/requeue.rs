//! Whether a batch job is queued again when it has ended. Pure.
use super::core::Outcome;

/// A batch job that may be queued again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requeue {
    /// Its id.
    pub job: u64,
    /// How often it was started again.
    pub restarts: u32,
    /// How often it may be.
    pub most: u32,
}

/// What becomes of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Again {
    /// To be queued again.
    pub(super) job: Option<u64>,
    /// What a person is told.
    pub(super) message: String,
}

impl Requeue {
    /// `None`: it ended as jobs end, or somebody stopped it.
    pub(super) fn judge(&self, outcome: &Outcome) -> Option<Again> {
        let why = match outcome {
            Outcome { limit: true, .. } => "its time limit is near",
            Outcome { host_lost: true, .. } => "a host was lost",
            _ => return None,
        };
        let Requeue { job, restarts, most } = *self;
        let refused = if restarts >= most {
            Some(format!("it was {restarts} times already, `slurm.requeues` allows {most}"))
        } else if outcome.limit && !outcome.progress {
            Some("it did no step in this run; ask for more time, or train less before each step".to_owned())
        } else {
            None
        };
        Some(match refused {
            Some(refused) => {
                Again { job: None, message: format!("{why}, but job {job} isn't queued again: {refused}") }
            }
            None => {
                let count = restarts + 1;
                let message = format!(
                    "{why}: job {job} is put back into the queue, for the {count}. of at most {most} times"
                );
                Again { job: Some(job), message }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(restarts: u32, outcome: Outcome) -> Option<Option<u64>> {
        Requeue { job: 7, restarts, most: 2 }.judge(&outcome).map(|again| again.job)
    }

    #[test]
    fn what_is_queued_again() {
        let ended = |limit, host_lost, progress| Outcome { limit, host_lost, progress, ..Outcome::default() };
        assert_eq!(judged(0, ended(false, false, true)), None, "done, failed or stopped");
        assert_eq!(judged(0, ended(true, false, true)), Some(Some(7)));
        assert_eq!(
            judged(1, ended(false, true, false)),
            Some(Some(7)),
            "a node's loss is not the job's fault"
        );
        assert_eq!(judged(0, ended(true, false, false)), Some(None), "it would never get further");
        assert_eq!(judged(2, ended(true, false, true)), Some(None));
        assert_eq!(judged(2, ended(false, true, true)), Some(None));
    }
}
