//! [`RateLimit`]: limits the lines of workers on a terminal. Lines above the limit are counted, not
//! shown.
use std::time::Duration;

/// Lines per second in the long run.
const RATE: f64 = 200.0;
/// Lines that may be shown at once.
const BURST: f64 = 2000.0;
/// Between two lines that report how many were omitted.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// A token bucket of lines.
#[derive(Debug)]
pub(super) struct RateLimit {
    tokens: f64,
    refilled_at: Duration,
    omitted: u64,
    reported_at: Duration,
}

/// What to do with a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineDecision {
    Show,
    /// Report how many lines were omitted before it, then show it.
    ShowAfterReport(u64),
    Omit,
    /// Omit it, and report how many lines were omitted so far.
    OmitAndReport(u64),
}

impl RateLimit {
    pub(super) fn new() -> Self {
        RateLimit { tokens: BURST, refilled_at: Duration::ZERO, omitted: 0, reported_at: Duration::ZERO }
    }

    /// Decides about a line that arrives at `now` (since any fixed start).
    pub(super) fn on_line(&mut self, now: Duration) -> LineDecision {
        let passed = now.saturating_sub(self.refilled_at).as_secs_f64();
        self.tokens = (self.tokens + passed * RATE).min(BURST);
        self.refilled_at = self.refilled_at.max(now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return match self.take_omitted() {
                0 => LineDecision::Show,
                n => LineDecision::ShowAfterReport(n),
            };
        }
        if self.omitted == 0 {
            self.reported_at = now;
        }
        self.omitted += 1;
        if now >= self.reported_at + REPORT_INTERVAL {
            self.reported_at = now;
            return LineDecision::OmitAndReport(self.take_omitted());
        }
        LineDecision::Omit
    }

    /// The number of lines that were omitted and not yet reported; resets it.
    pub(super) fn take_omitted(&mut self) -> u64 {
        std::mem::take(&mut self.omitted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_burst_is_shown_and_a_flood_is_counted() {
        let mut limit = RateLimit::new();
        let at = Duration::from_millis;
        assert!((0..2000).all(|_| limit.on_line(at(0)) == LineDecision::Show));
        assert!((0..500).all(|_| limit.on_line(at(0)) == LineDecision::Omit));
        assert_eq!(limit.on_line(at(5)), LineDecision::ShowAfterReport(500), "5 ms are one line");
        assert_eq!(limit.on_line(at(5)), LineDecision::Omit);
        assert_eq!(limit.on_line(at(60_000)), LineDecision::ShowAfterReport(1));
        assert!(
            (0..1999).all(|_| limit.on_line(at(60_000)) == LineDecision::Show),
            "unused lines accumulate"
        );
    }

    proptest! {
        /// Each line is shown or counted, and the rate is never exceeded.
        #[test]
        fn every_line_is_shown_or_counted(pauses in proptest::collection::vec(0u64..4, 1..6000)) {
            let mut limit = RateLimit::new();
            let (mut now, mut shown, mut reported) = (Duration::ZERO, 0u64, 0u64);
            for pause in &pauses {
                now += Duration::from_millis(*pause);
                match limit.on_line(now) {
                    LineDecision::Show => shown += 1,
                    LineDecision::ShowAfterReport(n) => { shown += 1; reported += n; }
                    LineDecision::OmitAndReport(n) => reported += n,
                    LineDecision::Omit => {}
                }
            }
            prop_assert_eq!(shown + reported + limit.take_omitted(), pauses.len() as u64);
            prop_assert!(shown as f64 <= BURST + now.as_secs_f64() * RATE + 1.0);
        }
    }
}
