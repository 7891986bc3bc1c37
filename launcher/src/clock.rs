//! [`RunningClock`]: a clock that does not advance while this process is stopped.
//!
//! Leases and deadlines that use this clock do not expire while the process is stopped by Ctrl-Z or
//! a debugger.
use std::time::{Duration, Instant, SystemTime};

/// The longest time by which [`RunningClock`] advances between two readings, because a longer gap
/// means that the process was stopped. The event loops that use the clock call it more often than
/// this.
const MAX_CLOCK_ADVANCE: Duration = Duration::from_secs(2);

/// A clock that measures the time since its start, without the time during which this process was
/// stopped.
#[derive(Debug)]
pub(crate) struct RunningClock {
    last: Instant,
    elapsed: Duration,
}

impl RunningClock {
    /// Creates a clock whose time begins at zero now.
    pub(crate) fn start() -> Self {
        RunningClock { last: Instant::now(), elapsed: Duration::ZERO }
    }

    /// Returns the time since the clock was started, without the time during which the process was
    /// stopped. The result never decreases.
    pub(crate) fn now(&mut self) -> Duration {
        self.advance_to(Instant::now())
    }

    /// Returns whether this process was probably stopped since the last reading of the clock,
    /// because more than [`MAX_CLOCK_ADVANCE`] has passed.
    pub(crate) fn has_paused(&self) -> bool {
        self.last.elapsed() > MAX_CLOCK_ADVANCE
    }

    /// Excludes the time since the clock's last reading from the time that the clock measures,
    /// because this process was probably stopped.
    pub(crate) fn skip_pause(&mut self) {
        self.last = Instant::now();
    }

    /// Advances the clock to the time `now` of the system's clock, by at most
    /// [`MAX_CLOCK_ADVANCE`], and returns the time since the start.
    fn advance_to(&mut self, now: Instant) -> Duration {
        self.elapsed += now.saturating_duration_since(self.last).min(MAX_CLOCK_ADVANCE);
        self.last = now;
        self.elapsed
    }
}

/// Reads the system clock and returns the time in milliseconds since 1970.
pub(crate) fn read_unix_time_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// Reads the system clock and returns the time in seconds since 1970.
pub(crate) fn read_unix_time() -> f64 {
    read_unix_time_ms() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_of_the_process_counts_as_one_step() {
        let mut clock = RunningClock::start();
        let start = clock.last;
        assert_eq!(clock.advance_to(start + Duration::from_secs(1)), Duration::from_secs(1));
        assert_eq!(clock.advance_to(start + Duration::from_secs(3601)), Duration::from_secs(3));
        assert_eq!(clock.advance_to(start + Duration::from_secs(3602)), Duration::from_secs(4));
        assert_eq!(clock.advance_to(start), Duration::from_secs(4));
    }
}
