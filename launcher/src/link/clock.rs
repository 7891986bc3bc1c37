//! Time as this process lived it: while it is stopped (Ctrl-Z, a debugger) no deadline of others comes nearer.
use std::time::{Duration, Instant};

/// More than this between two looks was not lived. Whoever uses the clock looks at it more often.
const LONGEST_STEP: Duration = Duration::from_secs(2);

/// Time since it was made, without the gaps.
#[derive(Debug)]
pub(crate) struct Clock {
    last: Instant,
    lived: Duration,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Clock { last: Instant::now(), lived: Duration::ZERO }
    }

    pub(crate) fn now(&mut self) -> Duration {
        self.advance(Instant::now())
    }

    fn advance(&mut self, now: Instant) -> Duration {
        self.lived += now.saturating_duration_since(self.last).min(LONGEST_STEP);
        self.last = now;
        self.lived
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_as_one_step() {
        let mut clock = Clock::start();
        let start = clock.last;
        assert_eq!(clock.advance(start + Duration::from_secs(1)), Duration::from_secs(1));
        assert_eq!(clock.advance(start + Duration::from_secs(3601)), Duration::from_secs(3));
        assert_eq!(clock.advance(start + Duration::from_secs(3602)), Duration::from_secs(4));
        assert_eq!(clock.advance(start), Duration::from_secs(4));
    }
}
