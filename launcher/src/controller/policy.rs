//! Restart policy: whether a failed job is started again, and after which pause. Pure.
use contract::exit;
use std::{fmt, time::Duration};

/// The pause before the first restart, and before one that follows progress.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause. Each restart in a row without progress doubles the pause.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The largest random change of a pause, as a fraction of it, so that many jobs do not restart at
/// the same moment.
pub(crate) const JITTER: f64 = 0.2;

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttemptEnd {
    /// What `launch` would exit with.
    pub(crate) exit_code: u8,
    /// The last optimizer step, where steps are known (the built-in runtime).
    pub(crate) step: Option<u64>,
    /// Whether it completed a checkpoint.
    pub(crate) saved: bool,
}

/// The failures of a run so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// `run.restarts`.
    pub(crate) budget: u32,
    /// Restarts so far.
    pub(crate) used: u32,
    /// Whether workers run the built-in runtime, whose steps are known.
    pub(crate) builtin: bool,
    pub(crate) last: Option<AttemptEnd>,
    /// Restarts in a row that brought no progress.
    pub(crate) no_progress: u32,
}

/// Why a job is not started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRestart {
    /// The job file is wrong, and a restart would fail in the same way.
    JobInvalid,
    /// The checkpoint is unusable, and a restart would fail in the same way.
    CheckpointUnusable,
    /// Two attempts in a row ended at this step without a new checkpoint; `None`: before their
    /// first step.
    NoProgress { step: Option<u64> },
    /// All restarts that `run.restarts` allows were used.
    BudgetUsed { budget: u32 },
}

impl fmt::Display for NoRestart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoRestart::JobInvalid => f.write_str("the job is not valid, and a restart would fail again"),
            NoRestart::CheckpointUnusable => {
                f.write_str("the checkpoint is not usable, and a restart would fail again")
            }
            NoRestart::NoProgress { step: Some(step) } => {
                write!(f, "two attempts in a row ended at step {step} without a new checkpoint")
            }
            NoRestart::NoProgress { step: None } => {
                f.write_str("two attempts in a row ended before their first step")
            }
            NoRestart::BudgetUsed { budget: 1 } => {
                f.write_str("the only restart that `run.restarts` allows has been used")
            }
            NoRestart::BudgetUsed { budget } => {
                write!(f, "all {budget} restarts that `run.restarts` allows have been used")
            }
        }
    }
}

/// What to do after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RestartDecision {
    /// Start again after this pause.
    Restart(Duration),
    /// End the run; `None`: restarts were not requested.
    Stop(Option<NoRestart>),
}

impl History {
    /// Decides what follows a failure, and takes a restart from the budget. `chance` is uniform in
    /// 0..1.
    pub(crate) fn decide(&mut self, end: AttemptEnd, chance: f64) -> RestartDecision {
        if self.budget == 0 {
            return RestartDecision::Stop(None);
        }
        let no_progress = self.is_without_progress(end);
        let reason = match end.exit_code {
            exit::USAGE => Some(NoRestart::JobInvalid),
            exit::CHECKPOINT => Some(NoRestart::CheckpointUnusable),
            _ if self.builtin && no_progress => Some(NoRestart::NoProgress { step: end.step }),
            _ if self.used >= self.budget => Some(NoRestart::BudgetUsed { budget: self.budget }),
            _ => None,
        };
        if reason.is_some() {
            return RestartDecision::Stop(reason);
        }
        self.used += 1;
        self.no_progress = if no_progress || !self.builtin { self.no_progress + 1 } else { 0 };
        self.last = Some(end);
        RestartDecision::Restart(self.restart_delay(chance))
    }

    /// Whether this attempt ended at the step of the last one, and neither saved a checkpoint.
    fn is_without_progress(&self, end: AttemptEnd) -> bool {
        self.last.is_some_and(|last| last.step == end.step && !last.saved && !end.saved)
    }

    fn restart_delay(&self, chance: f64) -> Duration {
        // The progress of programs is unknown: every restart in a row counts.
        let doublings = self.no_progress.saturating_sub(u32::from(!self.builtin)).min(16);
        let pause = FIRST_PAUSE.saturating_mul(1 << doublings).min(LONGEST_PAUSE);
        pause.mul_f64(1.0 + JITTER * (2.0 * chance.clamp(0.0, 1.0) - 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn end(exit_code: u8, step: Option<u64>, saved: bool) -> AttemptEnd {
        AttemptEnd { exit_code, step, saved }
    }

    fn restart(seconds: u64) -> RestartDecision {
        RestartDecision::Restart(Duration::from_secs(seconds))
    }

    fn stop(why: NoRestart) -> RestartDecision {
        RestartDecision::Stop(Some(why))
    }

    #[test]
    fn restarts_follow_progress_and_budget() {
        type Case = (&'static str, u32, bool, Vec<(AttemptEnd, RestartDecision)>);
        let same_step = NoRestart::NoProgress { step: Some(7) };
        let cases: Vec<Case> = vec![
            ("not requested", 0, true, vec![(end(1, Some(1), false), RestartDecision::Stop(None))]),
            (
                "the budget is the job's",
                2,
                true,
                vec![
                    (end(1, Some(7), false), restart(1)),
                    (end(1, Some(9), false), restart(1)),
                    (end(1, Some(12), true), stop(NoRestart::BudgetUsed { budget: 2 })),
                ],
            ),
            ("an invalid job", 9, true, vec![(end(2, None, false), stop(NoRestart::JobInvalid))]),
            (
                "an unusable checkpoint",
                9,
                true,
                vec![(end(4, None, false), stop(NoRestart::CheckpointUnusable))],
            ),
            (
                "the same step twice",
                9,
                true,
                vec![(end(1, Some(7), false), restart(1)), (end(1, Some(7), false), stop(same_step))],
            ),
            (
                "a new checkpoint is progress",
                9,
                true,
                vec![
                    (end(1, Some(7), false), restart(1)),
                    (end(1, Some(7), true), restart(1)),
                    (end(1, Some(7), false), restart(1)),
                    (end(1, Some(7), false), stop(same_step)),
                ],
            ),
            (
                "before the first step twice",
                9,
                true,
                vec![
                    (end(3, None, false), restart(1)),
                    (end(3, None, false), stop(NoRestart::NoProgress { step: None })),
                ],
            ),
            (
                "the steps of programs are unknown, and their pauses double",
                9,
                false,
                [1, 2, 4, 8, 16, 32, 60, 60, 60].map(|s| (end(1, None, false), restart(s))).to_vec(),
            ),
        ];
        for (what, budget, builtin, attempts) in cases {
            let mut history = History { budget, builtin, ..History::default() };
            for (i, (end, decision)) in attempts.into_iter().enumerate() {
                assert_eq!(history.decide(end, 0.5), decision, "{what}: attempt {i}");
            }
        }
    }

    #[test]
    fn chance_changes_a_pause_by_up_to_a_fifth() {
        for (chance, ms) in [(0.0, 800), (0.5, 1000), (1.0, 1200)] {
            let mut history = History { budget: 1, ..History::default() };
            assert_eq!(
                history.decide(end(1, None, false), chance),
                RestartDecision::Restart(Duration::from_millis(ms))
            );
        }
    }

    #[test]
    fn each_reason_against_a_restart_has_a_message() {
        let reasons = [
            NoRestart::JobInvalid,
            NoRestart::CheckpointUnusable,
            NoRestart::NoProgress { step: Some(7) },
            NoRestart::NoProgress { step: None },
            NoRestart::BudgetUsed { budget: 1 },
            NoRestart::BudgetUsed { budget: 3 },
        ];
        insta::assert_snapshot!(reasons.map(|reason| reason.to_string()).join("\n"));
    }
}
