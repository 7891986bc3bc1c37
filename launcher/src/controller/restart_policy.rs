//! The restart policy: decides whether a failed job is restarted, and after which pause. No I/O and
//! no clock.
use protocol::exit;
use serde::{Deserialize, Serialize};
use std::{fmt, time::Duration};

/// The pause before the first restart of a job, and before a restart after an attempt that made
/// progress in training.
pub(crate) const FIRST_RESTART_PAUSE: Duration = Duration::from_secs(1);
/// The number of restarts in a row without training progress after which a job with in-memory
/// checkpoints (`checkpoint.memory`) is not restarted again.
const MAX_RESTARTS_WITHOUT_PROGRESS: u32 = 2;
/// The longest pause before a restart of a job. Each restart in a row without progress doubles the
/// pause.
pub(crate) const LONGEST_RESTART_PAUSE: Duration = Duration::from_secs(60);
/// The largest fraction of a pause by which random jitter shortens or lengthens the pause. The
/// jitter prevents many jobs from restarting at the same moment.
pub(crate) const MAX_JITTER: f64 = 0.2;

/// The end of an attempt (one start of all workers): its exit code, its last optimizer step, and
/// whether it completed a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttemptEnd {
    /// The exit code that `launch` would have if the run ended after this attempt.
    pub(crate) exit_code: u8,
    /// The last optimizer step; `None` for programs, whose steps are unknown, and before the first
    /// step.
    pub(crate) step: Option<u64>,
    /// Whether the attempt completed a checkpoint.
    pub(crate) saved: bool,
}

/// How often a run was restarted so far, after which failures, and how many restarts the job
/// allows.
#[derive(Clone, Debug, Default)]
pub(crate) struct RestartHistory {
    /// The number of restarts that `run.restarts` allows.
    pub(crate) budget: u32,
    /// The number of restarts of the run so far.
    pub(crate) used: u32,
    /// Whether workers run the built-in runtime, whose steps are known.
    pub(crate) builtin: bool,
    /// Whether workers resume from copies in memory, so that a restart after progress needs no
    /// pause.
    pub(crate) has_memory_copies: bool,
    /// The end of the previous failed attempt; `None` before the first restart.
    pub(crate) last: Option<AttemptEnd>,
    /// The number of successive restarts that brought no progress.
    pub(crate) no_progress: u32,
    /// The last step of all failed attempts; `None` before the first step of the run.
    pub(crate) furthest_step: Option<u64>,
    /// The number of successive attempts that neither passed `furthest_step` nor completed a
    /// checkpoint.
    pub(crate) without_advance: u32,
}

/// The reason why a job is not restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NoRestartReason {
    /// The job file is wrong, and a restart would fail in the same way.
    JobInvalid,
    /// The checkpoint is unusable, and a restart would fail in the same way.
    CheckpointUnusable,
    /// This number of attempts in a row ended at this step without a new checkpoint. `None` means
    /// that they ended before their first step.
    NoProgress { attempts: u32, step: Option<u64> },
    /// All restarts that `run.restarts` allows were used.
    BudgetUsed { budget: u32 },
}

impl fmt::Display for NoRestartReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoRestartReason::JobInvalid => {
                f.write_str("the job is not valid, and a restart would fail again")
            }
            NoRestartReason::CheckpointUnusable => {
                f.write_str("the checkpoint is not usable, and a restart would fail again")
            }
            NoRestartReason::NoProgress { attempts, step } => {
                match attempts {
                    2 => f.write_str("two")?,
                    attempts => write!(f, "{attempts}")?,
                }
                match step {
                    Some(step) => {
                        write!(f, " attempts in a row ended at step {step} without a new checkpoint")
                    }
                    None => f.write_str(" attempts in a row ended before their first step"),
                }
            }
            NoRestartReason::BudgetUsed { budget: 1 } => {
                f.write_str("the only restart that `run.restarts` allows has been used")
            }
            NoRestartReason::BudgetUsed { budget } => {
                write!(f, "all {budget} restarts that `run.restarts` allows have been used")
            }
        }
    }
}

/// Whether the job is restarted after a failed attempt (one start of all workers), and after which
/// pause, or why the run ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RestartDecision {
    /// Restart the job after a pause of this length.
    Restart(Duration),
    /// End the run. `None` means that no restarts were requested.
    Stop(Option<NoRestartReason>),
}

impl RestartHistory {
    /// Decides whether the job is restarted after a failure, and counts the restart. `chance` is a
    /// uniform random number from 0 to 1 that determines the jitter of the pause.
    pub(crate) fn decide_restart(&mut self, end: AttemptEnd, chance: f64) -> RestartDecision {
        if self.budget == 0 {
            return RestartDecision::Stop(None);
        }
        let no_progress = self.is_without_progress(end);
        let reason = match end.exit_code {
            exit::USAGE => Some(NoRestartReason::JobInvalid),
            exit::CHECKPOINT => Some(NoRestartReason::CheckpointUnusable),
            _ if self.builtin && no_progress && self.no_progress >= self.max_restarts_without_progress() => {
                Some(NoRestartReason::NoProgress { attempts: self.no_progress + 2, step: end.step })
            }
            _ if self.used >= self.budget => Some(NoRestartReason::BudgetUsed { budget: self.budget }),
            _ => None,
        };
        if reason.is_some() {
            return RestartDecision::Stop(reason);
        }
        self.used += 1;
        let advances = end.saved || end.step > self.furthest_step;
        self.without_advance = if advances { 0 } else { self.without_advance + 1 };
        self.furthest_step = self.furthest_step.max(end.step);
        self.no_progress = if no_progress || !self.builtin { self.no_progress + 1 } else { 0 };
        self.last = Some(end);
        RestartDecision::Restart(self.compute_restart_delay(chance))
    }

    /// Returns the number of restarts in a row without progress after which the run is no longer
    /// restarted.
    ///
    /// Copies in memory make failures likely that are independent of the training: a job that
    /// restarts within a second may lose another worker before its next step.
    fn max_restarts_without_progress(&self) -> u32 {
        if self.has_memory_copies { MAX_RESTARTS_WITHOUT_PROGRESS } else { 0 }
    }

    /// Returns whether two failed attempts in a row ended at the same training step and saved no
    /// checkpoint. Returns `false` if no attempt failed before.
    fn is_without_progress(&self, end: AttemptEnd) -> bool {
        self.last.is_some_and(|last| last.step == end.step && !last.saved && !end.saved)
    }

    /// Returns the pause before the next restart. The pause is [`FIRST_RESTART_PAUSE`], doubled for
    /// each restart in a row without progress, but at most [`LONGEST_RESTART_PAUSE`]. The jitter
    /// then shortens or lengthens it by up to the fraction [`MAX_JITTER`]. `chance` is a random
    /// number from 0 to 1 that selects the jitter.
    ///
    /// With copies in memory, a restart has no pause if one of the last three attempts passed all
    /// steps of the earlier ones or completed a checkpoint, and the last three did not all end at
    /// the same step.
    fn compute_restart_delay(&self, chance: f64) -> Duration {
        if self.has_memory_copies && self.no_progress <= 1 && self.without_advance <= 2 {
            return Duration::ZERO;
        }
        // The progress of programs is unknown, so every restart in a row counts.
        let doublings = self.no_progress.saturating_sub(u32::from(!self.builtin)).min(16);
        let pause = FIRST_RESTART_PAUSE.saturating_mul(1 << doublings).min(LONGEST_RESTART_PAUSE);
        pause.mul_f64(1.0 + MAX_JITTER * (2.0 * chance.clamp(0.0, 1.0) - 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds the end of a failed attempt with these values.
    const fn build_attempt_end(exit_code: u8, step: Option<u64>, saved: bool) -> AttemptEnd {
        AttemptEnd { exit_code, step, saved }
    }

    /// Builds the decision to restart after this pause, in seconds.
    fn build_restart(seconds: u64) -> RestartDecision {
        RestartDecision::Restart(Duration::from_secs(seconds))
    }

    /// Builds the decision to end the run for this reason.
    fn build_stop(why: NoRestartReason) -> RestartDecision {
        RestartDecision::Stop(Some(why))
    }

    /// Checks the decision after each end of an attempt, for a run with `budget` restarts.
    #[track_caller]
    fn assert_decisions(
        description: &str,
        budget: u32,
        builtin: bool,
        attempts: &[(AttemptEnd, RestartDecision)],
    ) {
        let mut history = RestartHistory { budget, builtin, ..RestartHistory::default() };
        for (i, (end, decision)) in attempts.iter().enumerate() {
            assert_eq!(history.decide_restart(*end, 0.5), *decision, "{description}: attempt {i}");
        }
    }

    #[test]
    fn a_used_budget_and_permanent_errors_end_the_run() {
        let not_requested = [(build_attempt_end(1, Some(1), false), RestartDecision::Stop(None))];
        assert_decisions("not requested", 0, true, &not_requested);
        let used = [
            (build_attempt_end(1, Some(7), false), build_restart(1)),
            (build_attempt_end(1, Some(9), false), build_restart(1)),
            (build_attempt_end(1, Some(12), true), build_stop(NoRestartReason::BudgetUsed { budget: 2 })),
        ];
        assert_decisions("the budget is the job's", 2, true, &used);
        let invalid = [(build_attempt_end(2, None, false), build_stop(NoRestartReason::JobInvalid))];
        assert_decisions("an invalid job", 9, true, &invalid);
        let unusable = [(build_attempt_end(4, None, false), build_stop(NoRestartReason::CheckpointUnusable))];
        assert_decisions("an unusable checkpoint", 9, true, &unusable);
    }

    #[test]
    fn attempts_without_progress_end_the_run() {
        let no_progress = |step| build_stop(NoRestartReason::NoProgress { attempts: 2, step });
        let same_step = [
            (build_attempt_end(1, Some(7), false), build_restart(1)),
            (build_attempt_end(1, Some(7), false), no_progress(Some(7))),
        ];
        assert_decisions("the same step twice", 9, true, &same_step);
        let saved = [
            (build_attempt_end(1, Some(7), false), build_restart(1)),
            (build_attempt_end(1, Some(7), true), build_restart(1)),
            (build_attempt_end(1, Some(7), false), build_restart(1)),
            (build_attempt_end(1, Some(7), false), no_progress(Some(7))),
        ];
        assert_decisions("a new checkpoint is progress", 9, true, &saved);
        let before_the_first_step = [
            (build_attempt_end(3, None, false), build_restart(1)),
            (build_attempt_end(3, None, false), no_progress(None)),
        ];
        assert_decisions("before the first step twice", 9, true, &before_the_first_step);
    }

    #[test]
    fn pauses_of_programs_double_because_their_steps_are_unknown() {
        let pauses = [1, 2, 4, 8, 16, 32, 60, 60, 60];
        let attempts = pauses.map(|s| (build_attempt_end(1, None, false), build_restart(s)));
        assert_decisions("programs", 9, false, &attempts);
    }

    #[test]
    fn chance_changes_a_pause_by_up_to_a_fifth() {
        for (chance, ms) in [(0.0, 800), (0.5, 1000), (1.0, 1200)] {
            let mut history = RestartHistory { budget: 1, ..RestartHistory::default() };
            assert_eq!(
                history.decide_restart(build_attempt_end(1, None, false), chance),
                RestartDecision::Restart(Duration::from_millis(ms))
            );
        }
    }

    #[test]
    fn a_restart_from_memory_has_no_pause_as_long_as_the_run_makes_progress() {
        let mut history =
            RestartHistory { budget: 9, builtin: true, has_memory_copies: true, ..RestartHistory::default() };
        for step in [7, 8, 20] {
            let end = build_attempt_end(1, Some(step), false);
            assert_eq!(history.decide_restart(end, 0.5), build_restart(0), "step {step}");
        }
        let saved = build_attempt_end(1, Some(20), true);
        assert_eq!(history.decide_restart(saved, 0.5), build_restart(0));
        let again = build_attempt_end(1, Some(20), false);
        assert_eq!(history.decide_restart(again, 0.5), build_restart(0), "the last attempt saved");
        assert_eq!(history.decide_restart(again, 0.5), build_restart(0), "another worker may be lost early");
        assert_eq!(history.decide_restart(again, 0.5), build_restart(4));
        let stop = build_stop(NoRestartReason::NoProgress { attempts: 4, step: Some(20) });
        assert_eq!(history.decide_restart(again, 0.5), stop);
    }

    #[test]
    fn steps_that_were_reached_before_are_no_reason_to_restart_from_memory_without_a_pause() {
        for steps in [[Some(20), None, Some(20), None, Some(20)], [22, 21, 22, 21, 22].map(Some)] {
            let mut history = RestartHistory {
                budget: 9,
                builtin: true,
                has_memory_copies: true,
                ..RestartHistory::default()
            };
            let decisions = steps.map(|step| history.decide_restart(build_attempt_end(1, step, false), 0.5));
            assert_eq!(decisions, [0, 0, 0, 1, 1].map(build_restart), "{steps:?}");
        }
    }

    #[test]
    fn each_reason_against_a_restart_has_a_message() {
        let reasons = [
            NoRestartReason::JobInvalid,
            NoRestartReason::CheckpointUnusable,
            NoRestartReason::NoProgress { attempts: 2, step: Some(7) },
            NoRestartReason::NoProgress { attempts: 2, step: None },
            NoRestartReason::BudgetUsed { budget: 1 },
            NoRestartReason::BudgetUsed { budget: 3 },
        ];
        insta::assert_snapshot!(reasons.map(|reason| reason.to_string()).join("\n"));
    }
}
