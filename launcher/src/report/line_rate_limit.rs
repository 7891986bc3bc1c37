//! [`LineRateLimit`]: limits how many lines of workers are shown per second. Lines above the limit
//! are counted instead of shown.
use std::time::Duration;

/// The largest average number of output lines of workers per second that are shown over a long
/// time.
const LINES_PER_SECOND: f64 = 200.0;
/// The largest number of output lines of workers that may be shown at once.
const BURST_LINES: f64 = 2000.0;
/// The shortest time between two messages with the number of omitted output lines, as long as every
/// new line is omitted, too.
const OMISSION_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Limits how many output lines of workers are shown per second (a token bucket), and counts the
/// omitted lines.
#[derive(Debug)]
pub(super) struct LineRateLimit {
    tokens: f64,
    refilled_at: Duration,
    omitted: u64,
    reported_at: Duration,
}

/// What to do with an output line of a worker: show or omit it, and whether to report first how
/// many lines were omitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineDecision {
    Show,
    /// Report this number of omitted lines, then show the line.
    ShowAfterReport(u64),
    Omit,
    /// Omit the line, and report this number of omitted lines, including the line.
    OmitAndReport(u64),
}

impl LineRateLimit {
    /// Creates a limit on the rate of output lines, which first lets [`BURST_LINES`] lines through
    /// without a pause.
    pub(super) fn new() -> Self {
        LineRateLimit {
            tokens: BURST_LINES,
            refilled_at: Duration::ZERO,
            omitted: 0,
            reported_at: Duration::ZERO,
        }
    }

    /// Decides whether an output line that arrives at `now` is shown or omitted, and counts the
    /// omitted lines. `now` is the time since any fixed start.
    pub(super) fn decide_line(&mut self, now: Duration) -> LineDecision {
        let passed = now.saturating_sub(self.refilled_at).as_secs_f64();
        self.tokens = (self.tokens + passed * LINES_PER_SECOND).min(BURST_LINES);
        self.refilled_at = self.refilled_at.max(now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return match self.take_omitted_count() {
                0 => LineDecision::Show,
                n => LineDecision::ShowAfterReport(n),
            };
        }
        if self.omitted == 0 {
            self.reported_at = now;
        }
        self.omitted += 1;
        if now >= self.reported_at + OMISSION_REPORT_INTERVAL {
            self.reported_at = now;
            return LineDecision::OmitAndReport(self.take_omitted_count());
        }
        LineDecision::Omit
    }

    /// Returns the number of output lines that were omitted and not yet reported, and resets the
    /// number to 0.
    pub(super) fn take_omitted_count(&mut self) -> u64 {
        std::mem::take(&mut self.omitted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_burst_is_shown_and_a_flood_is_counted() {
        let mut limit = LineRateLimit::new();
        let at = Duration::from_millis;
        assert!((0..2000).all(|_| limit.decide_line(at(0)) == LineDecision::Show));
        assert!((0..500).all(|_| limit.decide_line(at(0)) == LineDecision::Omit));
        assert_eq!(limit.decide_line(at(5)), LineDecision::ShowAfterReport(500), "5 ms are one line");
        assert_eq!(limit.decide_line(at(5)), LineDecision::Omit);
        assert_eq!(limit.decide_line(at(60_000)), LineDecision::ShowAfterReport(1));
        assert!(
            (0..1999).all(|_| limit.decide_line(at(60_000)) == LineDecision::Show),
            "unused lines accumulate"
        );
    }

    proptest! {
        /// Checks that each line is either shown or counted as omitted, and that the rate limit is
        /// never exceeded.
        #[test]
        fn every_line_is_shown_or_counted(pauses in proptest::collection::vec(0u64..4, 1..6000)) {
            let mut limit = LineRateLimit::new();
            let (mut now, mut shown, mut reported) = (Duration::ZERO, 0u64, 0u64);
            for pause in &pauses {
                now += Duration::from_millis(*pause);
                match limit.decide_line(now) {
                    LineDecision::Show => shown += 1,
                    LineDecision::ShowAfterReport(n) => { shown += 1; reported += n; }
                    LineDecision::OmitAndReport(n) => reported += n,
                    LineDecision::Omit => {}
                }
            }
            prop_assert_eq!(shown + reported + limit.take_omitted_count(), pauses.len() as u64);
            prop_assert!(shown as f64 <= BURST_LINES + now.as_secs_f64() * LINES_PER_SECOND + 1.0);
        }
    }
}
