//! Does a worker get on? Pure: what it says and what it uses of the CPU go in.
use contract::event::Phase;
use std::time::Duration;

/// CPU time between two looks that counts as work, clock ticks (of 10 ms on Linux): a process that waits in a poll
/// loop uses a little.
const WORK_TICKS: u64 = 2;

/// One worker's progress.
#[derive(Debug)]
pub(super) struct Progress {
    /// The last sign of it.
    at: Duration,
    said: Option<(Phase, u64)>,
    ticks: u64,
    /// Told to be still, and whether stopped.
    told: Option<bool>,
}

impl Progress {
    pub(super) fn new(now: Duration) -> Self {
        Progress { at: now, said: None, ticks: 0, told: None }
    }

    /// What the built-in runtime does; `true`: that is progress.
    pub(super) fn of_runtime(&mut self, phase: Phase, step: u64) -> bool {
        self.said.replace((phase, step)) != Some((phase, step))
    }

    /// CPU time of all its processes so far; `true`: using it is progress. It isn't where something better is known: a
    /// program's marker, the runtime's steps while it trains.
    pub(super) fn of_cpu(&mut self, ticks: u64, builtin: bool, by_marker: bool) -> bool {
        // Processes that end take their ticks with them: any change is work.
        let used = ticks.abs_diff(self.ticks) >= WORK_TICKS;
        self.ticks = ticks;
        let training = matches!(self.said, Some((Phase::Training, _)));
        used && if builtin { !training } else { !by_marker }
    }

    /// Progress; `true`: it had been told to be still.
    pub(super) fn moved(&mut self, now: Duration) -> bool {
        self.at = now;
        self.told.take().is_some()
    }

    /// No progress at this look: how long, milliseconds, when that is to be told now.
    pub(super) fn still(&mut self, now: Duration, timeout: Duration, stopped: bool) -> Option<(u64, bool)> {
        let lasted = now.saturating_sub(self.at);
        if lasted < timeout || self.told == Some(stopped) {
            return None;
        }
        self.told = Some(stopped);
        Some((lasted.as_millis() as u64, stopped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn programs_move_by_cpu_time_or_by_their_marker() {
        let mut p = Progress::new(s(0));
        assert!(p.of_cpu(50, false, false));
        assert!(!p.of_cpu(51, false, false), "a poll loop isn't work");
        assert!(p.of_cpu(20, false, false), "a child ended: something happened");
        assert!(!p.of_cpu(90, false, true), "a marker says more than the CPU");
    }

    #[test]
    fn the_runtime_moves_by_steps_while_it_trains_and_by_cpu_time_else() {
        let mut p = Progress::new(s(0));
        assert!(p.of_cpu(50, true, false), "it reads data, say");
        assert!(p.of_runtime(Phase::Training, 1));
        assert!(!p.of_runtime(Phase::Training, 1));
        assert!(!p.of_cpu(500, true, false), "spinning in a collective is no step");
        assert!(p.of_runtime(Phase::Training, 2) && p.of_runtime(Phase::Saving, 2));
    }

    #[test]
    fn stillness_is_told_once_and_so_is_its_end() {
        let mut p = Progress::new(s(10));
        assert_eq!(p.still(s(14), s(5), false), None);
        assert_eq!(p.still(s(15), s(5), false), Some((5000, false)));
        assert_eq!(p.still(s(16), s(5), false), None);
        assert_eq!(p.still(s(17), s(5), true), Some((7000, true)), "that it is stopped is news");
        assert!(p.moved(s(18)) && !p.moved(s(19)));
        assert_eq!(p.still(s(23), s(5), false), None);
        assert_eq!(p.still(s(24), s(5), false), Some((5000, false)));
    }
}
