//! [`WorkerProgress`]: decides whether a worker makes progress, from its reports, its output and
//! its CPU time. This module does no I/O.
use contract::event::Phase;
use std::time::Duration;

/// The CPU time between two measurements that counts as progress, in clock ticks (10 ms on Linux).
/// A process that waits in a poll loop uses a little, too.
const WORK_TICKS: u64 = 2;

/// When one worker last made progress, and whether a stall was reported since then.
#[derive(Debug)]
pub(super) struct WorkerProgress {
    /// When the worker last made progress.
    last_at: Duration,
    /// The last phase and step that the built-in runtime reported.
    reported: Option<(Phase, u64)>,
    /// The CPU time at the last measurement.
    ticks: u64,
    /// `None` unless a stall was reported since the last progress; then whether the process was
    /// stopped at that time.
    stall_reported: Option<bool>,
}

impl WorkerProgress {
    /// The state of a worker that starts at `now`.
    pub(super) fn new(now: Duration) -> Self {
        WorkerProgress { last_at: now, reported: None, ticks: 0, stall_reported: None }
    }

    /// Records a report of the built-in runtime. Returns whether it is progress.
    pub(super) fn runtime_has_progressed(&mut self, phase: Phase, step: u64) -> bool {
        self.reported.replace((phase, step)) != Some((phase, step))
    }

    /// Records the CPU time of all processes of the worker so far. Returns whether it is progress.
    ///
    /// CPU time does not count where a better sign exists: `run.progress_pattern` for a program,
    /// steps for the built-in runtime while it trains.
    pub(super) fn cpu_has_progressed(&mut self, ticks: u64, builtin: bool, has_pattern: bool) -> bool {
        // The ticks of processes that end are subtracted, so a decrease is progress, too.
        let used = ticks.abs_diff(self.ticks) >= WORK_TICKS;
        self.ticks = ticks;
        let training = matches!(self.reported, Some((Phase::Training, _)));
        used && if builtin { !training } else { !has_pattern }
    }

    /// Records progress. Returns whether a stall had been reported.
    pub(super) fn record_progress(&mut self, now: Duration) -> bool {
        self.last_at = now;
        self.stall_reported.take().is_some()
    }

    /// Checks for a stall after a measurement without progress. If a stall is to be reported now,
    /// returns its duration in milliseconds, and `stopped`.
    pub(super) fn check_stall(
        &mut self,
        now: Duration,
        timeout: Duration,
        stopped: bool,
    ) -> Option<(u64, bool)> {
        let stalled = now.saturating_sub(self.last_at);
        if stalled < timeout || self.stall_reported == Some(stopped) {
            return None;
        }
        self.stall_reported = Some(stopped);
        Some((stalled.as_millis() as u64, stopped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn programs_progress_by_cpu_time_unless_they_have_a_pattern() {
        let mut p = WorkerProgress::new(s(0));
        assert!(p.cpu_has_progressed(50, false, false));
        assert!(!p.cpu_has_progressed(51, false, false), "a poll loop is not progress");
        assert!(p.cpu_has_progressed(20, false, false), "a child process ended");
        assert!(!p.cpu_has_progressed(90, false, true), "the pattern is the better sign");
    }

    #[test]
    fn the_runtime_progresses_by_steps_while_it_trains_and_by_cpu_time_otherwise() {
        let mut p = WorkerProgress::new(s(0));
        assert!(p.cpu_has_progressed(50, true, false), "for example while it reads data");
        assert!(p.runtime_has_progressed(Phase::Training, 1));
        assert!(!p.runtime_has_progressed(Phase::Training, 1));
        assert!(!p.cpu_has_progressed(500, true, false), "spinning in a collective is not progress");
        assert!(p.runtime_has_progressed(Phase::Training, 2) && p.runtime_has_progressed(Phase::Saving, 2));
    }

    #[test]
    fn a_stall_and_its_end_are_each_reported_once() {
        let mut p = WorkerProgress::new(s(10));
        assert_eq!(p.check_stall(s(14), s(5), false), None);
        assert_eq!(p.check_stall(s(15), s(5), false), Some((5000, false)));
        assert_eq!(p.check_stall(s(16), s(5), false), None);
        assert_eq!(p.check_stall(s(17), s(5), true), Some((7000, true)), "a stop is reported separately");
        assert!(p.record_progress(s(18)) && !p.record_progress(s(19)));
        assert_eq!(p.check_stall(s(23), s(5), false), None);
        assert_eq!(p.check_stall(s(24), s(5), false), Some((5000, false)));
    }
}
