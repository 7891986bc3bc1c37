//! May a failed job be started again, and when? Pure: the whole history goes in.
use contract::exit;
use std::time::Duration;

/// Before the first restart, and after one that brought progress.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause. Each restart in a row without progress doubles it.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Pauses are this part longer or shorter by chance, so that many jobs don't start at the same moment.
pub(crate) const JITTER: f64 = 0.2;

/// How a start of the job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// What `launch` would exit with.
    pub(crate) exit_code: u8,
    /// The last step seen, where steps are known (the built-in runtime).
    pub(crate) step: Option<u64>,
    /// A checkpoint was completed.
    pub(crate) saved: bool,
}

/// What came before.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// `run.restarts`.
    pub(crate) budget: u32,
    pub(crate) used: u32,
    /// Steps are known.
    pub(crate) builtin: bool,
    pub(crate) last: Option<Ended>,
    /// Restarts in a row that brought no progress.
    pub(crate) fruitless: u32,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Start again after this.
    Restart(Duration),
    /// Not again; why not, unless nobody asked for restarts.
    Stop(Option<String>),
}

impl History {
    /// Judges a failure and, when it is a restart, takes it from the budget. `chance`: from 0 to 1, evenly.
    pub(crate) fn judge(&mut self, ended: Ended, chance: f64) -> Verdict {
        let fruitless = self.fruitless(ended);
        let refused = match ended.exit_code {
            _ if self.budget == 0 => return Verdict::Stop(None),
            exit::USAGE => Some("the job itself is wrong, and would be again".to_owned()),
            exit::CHECKPOINT => Some("the checkpoint can't be used, and couldn't be again".to_owned()),
            _ if self.builtin && fruitless => Some(no_progress(ended.step)),
            _ if self.used >= self.budget => Some(format!("all {} restarts are used up", self.budget)),
            _ => None,
        };
        if let Some(why) = refused {
            return Verdict::Stop(Some(why));
        }
        self.used += 1;
        self.fruitless = if fruitless || !self.builtin { self.fruitless + 1 } else { 0 };
        self.last = Some(ended);
        Verdict::Restart(self.pause(chance))
    }

    /// Did this start end where the last one did, with nothing saved by either?
    fn fruitless(&self, ended: Ended) -> bool {
        self.last.is_some_and(|last| last.step == ended.step && !last.saved && !ended.saved)
    }

    fn pause(&self, chance: f64) -> Duration {
        // Programs' progress isn't known: every restart in a row counts.
        let doublings = self.fruitless.saturating_sub(u32::from(!self.builtin)).min(16);
        let pause = FIRST_PAUSE.saturating_mul(1 << doublings).min(LONGEST_PAUSE);
        pause.mul_f64(1.0 + JITTER * (2.0 * chance.clamp(0.0, 1.0) - 1.0))
    }
}

fn no_progress(step: Option<u64>) -> String {
    match step {
        Some(step) => format!("two starts in a row ended at step {step} without a new checkpoint"),
        None => "two starts in a row ended before their first step".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ended(exit_code: u8, step: Option<u64>, saved: bool) -> Ended {
        Ended { exit_code, step, saved }
    }

    fn restart(seconds: u64) -> Verdict {
        Verdict::Restart(Duration::from_secs(seconds))
    }

    fn stop(why: &str) -> Verdict {
        Verdict::Stop(Some(why.to_owned()))
    }

    #[test]
    fn what_is_decided() {
        type Case = (&'static str, u32, bool, Vec<(Ended, Verdict)>);
        let same = "two starts in a row ended at step 7 without a new checkpoint";
        let cases: Vec<Case> = vec![
            ("nobody asked", 0, true, vec![(ended(1, Some(1), false), Verdict::Stop(None))]),
            (
                "the budget is the job's",
                2,
                true,
                vec![
                    (ended(1, Some(7), false), restart(1)),
                    (ended(1, Some(9), false), restart(1)),
                    (ended(1, Some(12), true), stop("all 2 restarts are used up")),
                ],
            ),
            (
                "a wrong job stays wrong",
                9,
                true,
                vec![(ended(2, None, false), stop("the job itself is wrong, and would be again"))],
            ),
            (
                "so does a checkpoint",
                9,
                true,
                vec![(ended(4, None, false), stop("the checkpoint can't be used, and couldn't be again"))],
            ),
            (
                "the same step twice",
                9,
                true,
                vec![(ended(1, Some(7), false), restart(1)), (ended(1, Some(7), false), stop(same))],
            ),
            (
                "a new checkpoint is progress",
                9,
                true,
                vec![
                    (ended(1, Some(7), false), restart(1)),
                    (ended(1, Some(7), true), restart(1)),
                    (ended(1, Some(7), false), restart(1)),
                    (ended(1, Some(7), false), stop(same)),
                ],
            ),
            (
                "before the first step twice",
                9,
                true,
                vec![
                    (ended(3, None, false), restart(1)),
                    (ended(3, None, false), stop("two starts in a row ended before their first step")),
                ],
            ),
            (
                "programs' steps aren't known, but they wait longer and longer",
                9,
                false,
                [1, 2, 4, 8, 16, 32, 60, 60, 60].map(|s| (ended(1, None, false), restart(s))).to_vec(),
            ),
        ];
        for (what, budget, builtin, starts) in cases {
            let mut history = History { budget, builtin, ..History::default() };
            for (i, (ended, verdict)) in starts.into_iter().enumerate() {
                assert_eq!(history.judge(ended, 0.5), verdict, "{what}: start {i}");
            }
        }
    }

    #[test]
    fn chance_moves_a_pause_by_a_fifth() {
        for (chance, ms) in [(0.0, 800), (0.5, 1000), (1.0, 1200), (f64::NAN, 1000)] {
            let mut history = History { budget: 1, ..History::default() };
            let chance = if chance.is_nan() { 0.5 } else { chance };
            assert_eq!(
                history.judge(ended(1, None, false), chance),
                Verdict::Restart(Duration::from_millis(ms))
            );
        }
    }
}
