//! [`WorkerProgress`]: decides whether a worker makes progress, from its reports, its output and
//! its CPU time. This module does no I/O.
use protocol::event::WorkerPhase;
use std::time::Duration;

/// The least change of a worker's CPU time between two measurements that counts as progress, in
/// clock ticks (10 ms on Linux). A process that waits in a poll loop uses less CPU time.
const MIN_PROGRESS_TICKS: u64 = 2;

/// A number that changes whenever a worker enters or completes a collective, and whether the worker
/// is waiting in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CollectiveActivity {
    /// A number that changes whenever the worker enters or completes a collective.
    pub(crate) count: u64,
    /// Whether the worker has entered a collective that is known to be incomplete.
    pub(crate) is_waiting: bool,
}

/// The record of one worker's progress: when it last made progress, the values last measured, and
/// whether a stall was reported.
#[derive(Debug)]
pub(super) struct WorkerProgress {
    /// The time at which the worker last made progress.
    last_at: Duration,
    /// The last phase and step that the built-in runtime reported; `None` before the first report.
    reported: Option<(WorkerPhase, u64)>,
    /// The worker's CPU time at the last measurement, in clock ticks.
    ticks: u64,
    /// The counter of the worker's collectives; `None` before the first measurement.
    collectives: Option<u64>,
    /// Whether the worker was stopped by a signal when a stall was last reported. `None` if no
    /// stall was reported since the last progress.
    stall_reported: Option<bool>,
}

impl WorkerProgress {
    /// Creates the record of the progress of a worker that starts at the time `now`. The start
    /// counts as progress.
    pub(super) fn new(now: Duration) -> Self {
        WorkerProgress { last_at: now, reported: None, ticks: 0, collectives: None, stall_reported: None }
    }

    /// Records the phase and step that a built-in worker has reported, and returns whether either
    /// of them has changed since the previous report.
    pub(super) fn record_runtime_report(&mut self, phase: WorkerPhase, step: u64) -> bool {
        self.reported.replace((phase, step)) != Some((phase, step))
    }

    /// Records the total CPU time, in clock ticks, that all processes of the worker have used so
    /// far, to detect whether the worker makes progress. Returns whether the change since the last
    /// call counts as progress.
    ///
    /// CPU time does not count for a program with `run.progress_pattern`, or for the built-in
    /// runtime during training. The pattern and the steps are better signs of progress.
    pub(super) fn record_cpu_time(&mut self, ticks: u64, builtin: bool, has_pattern: bool) -> bool {
        // The ticks of an ended process are missing from the sum, so a decrease is progress, too.
        let used = ticks.abs_diff(self.ticks) >= MIN_PROGRESS_TICKS;
        self.ticks = ticks;
        let training = matches!(self.reported, Some((WorkerPhase::Training, _)));
        used && if builtin { !training } else { !has_pattern }
    }

    /// Records the number `count`, which changes whenever the worker enters or completes a
    /// collective, to detect whether the worker makes progress. Returns whether the value has
    /// changed, which counts as progress. CPU time does not count for such a program, because a
    /// rank that waits in a collective may use CPU time.
    pub(super) fn record_collectives(&mut self, count: u64) -> bool {
        self.collectives.replace(count) != Some(count)
    }

    /// Records that the worker made progress at the time `now`, and returns whether a stall was
    /// reported since the previous progress.
    pub(super) fn record_progress(&mut self, now: Duration) -> bool {
        self.last_at = now;
        self.stall_reported.take().is_some()
    }

    /// Returns the duration of the worker's present stall if it is long enough and was not reported
    /// yet, and marks the stall as reported. A stall is a time without progress of at least
    /// `timeout`.
    ///
    /// If a stall must be reported now, records the report and returns the duration of the stall in
    /// milliseconds and `stopped`. Returns `None` if there is no stall, or if a stall with the same
    /// `stopped` was already reported.
    pub(super) fn take_stall_report(
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
        assert!(p.record_cpu_time(50, false, false));
        assert!(!p.record_cpu_time(51, false, false), "a poll loop is not progress");
        assert!(p.record_cpu_time(20, false, false), "a child process ended");
        assert!(!p.record_cpu_time(90, false, true), "the pattern is the better sign");
    }

    #[test]
    fn the_runtime_progresses_by_steps_while_it_trains_and_by_cpu_time_otherwise() {
        let mut p = WorkerProgress::new(s(0));
        assert!(p.record_cpu_time(50, true, false), "for example while it reads data");
        assert!(p.record_runtime_report(WorkerPhase::Training, 1));
        assert!(!p.record_runtime_report(WorkerPhase::Training, 1));
        assert!(!p.record_cpu_time(500, true, false), "spinning in a collective is not progress");
        assert!(
            p.record_runtime_report(WorkerPhase::Training, 2)
                && p.record_runtime_report(WorkerPhase::Saving, 2)
        );
    }

    #[test]
    fn a_changed_counter_of_collectives_is_progress() {
        let mut p = WorkerProgress::new(s(0));
        assert!(p.record_collectives(3), "the process groups were initialized");
        assert!(!p.record_collectives(3));
        assert!(p.record_collectives(4));
    }

    #[test]
    fn a_stall_and_its_end_are_each_reported_once() {
        let mut p = WorkerProgress::new(s(10));
        assert_eq!(p.take_stall_report(s(14), s(5), false), None);
        assert_eq!(p.take_stall_report(s(15), s(5), false), Some((5000, false)));
        assert_eq!(p.take_stall_report(s(16), s(5), false), None);
        assert_eq!(
            p.take_stall_report(s(17), s(5), true),
            Some((7000, true)),
            "a stop is reported separately"
        );
        assert!(p.record_progress(s(18)) && !p.record_progress(s(19)));
        assert_eq!(p.take_stall_report(s(23), s(5), false), None);
        assert_eq!(p.take_stall_report(s(24), s(5), false), Some((5000, false)));
    }
}
