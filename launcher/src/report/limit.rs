//! How many lines of workers a person's terminal is given: more than anybody reads are counted, not shown.
use std::time::Duration;

/// Lines a second, in the long run.
const RATE: f64 = 200.0;
/// Lines at once.
const BURST: f64 = 2000.0;
/// Between two lines that say how many were left out.
const TELL: Duration = Duration::from_secs(1);

/// A bucket of lines that may be shown.
#[derive(Debug)]
pub(super) struct Limit {
    left: f64,
    at: Duration,
    left_out: u64,
    told: Duration,
}

/// What to do with a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Show,
    /// Show it, after saying that this many were left out before it.
    ShowAfter(u64),
    /// Leave it out.
    LeaveOut,
    /// Leave it out, and say that this many were left out by now.
    Tell(u64),
}

impl Limit {
    pub(super) fn new() -> Self {
        Limit { left: BURST, at: Duration::ZERO, left_out: 0, told: Duration::ZERO }
    }

    /// A line that comes at `now` (since any fixed start).
    pub(super) fn line(&mut self, now: Duration) -> Verdict {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.left = (self.left + passed * RATE).min(BURST);
        self.at = self.at.max(now);
        if self.left >= 1.0 {
            self.left -= 1.0;
            return match self.take() {
                0 => Verdict::Show,
                n => Verdict::ShowAfter(n),
            };
        }
        if self.left_out == 0 {
            self.told = now;
        }
        self.left_out += 1;
        if now >= self.told + TELL {
            self.told = now;
            return Verdict::Tell(self.take());
        }
        Verdict::LeaveOut
    }

    /// How many were left out and not told.
    pub(super) fn take(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_burst_passes_and_a_flood_is_counted() {
        let mut limit = Limit::new();
        let at = Duration::from_millis;
        assert!((0..2000).all(|_| limit.line(at(0)) == Verdict::Show));
        assert!((0..500).all(|_| limit.line(at(0)) == Verdict::LeaveOut));
        assert_eq!(limit.line(at(5)), Verdict::ShowAfter(500), "5 ms are one line");
        assert_eq!(limit.line(at(5)), Verdict::LeaveOut);
        assert_eq!(limit.line(at(60_000)), Verdict::ShowAfter(1));
        assert!((0..1999).all(|_| limit.line(at(60_000)) == Verdict::Show), "quiet time is saved up");
    }

    proptest! {
        /// Each line is shown or counted in what is said, and no second has more than its share.
        #[test]
        fn counts_are_right(pauses in proptest::collection::vec(0u64..4, 1..6000)) {
            let mut limit = Limit::new();
            let (mut now, mut shown, mut told) = (Duration::ZERO, 0u64, 0u64);
            for pause in &pauses {
                now += Duration::from_millis(*pause);
                match limit.line(now) {
                    Verdict::Show => shown += 1,
                    Verdict::ShowAfter(n) => { shown += 1; told += n; }
                    Verdict::Tell(n) => told += n,
                    Verdict::LeaveOut => {}
                }
            }
            prop_assert_eq!(shown + told + limit.take(), pauses.len() as u64);
            prop_assert!(shown as f64 <= BURST + now.as_secs_f64() * RATE + 1.0);
        }
    }
}
