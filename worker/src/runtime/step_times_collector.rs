//! [`StepTimesCollector`]: sums on rank 0 how long the steps of all ranks took, and decides what
//! rank 0 reports about them.
use protocol::{
    control::FromWorker,
    event::{Event, StepTimesReport, StragglerReport},
    step_times::{RankTimes, StepTimes},
    straggler::{StragglerDetector, StragglerRules},
};
use std::time::{Duration, Instant};

/// The time between two messages in which rank 0 sends the step times of all ranks to the
/// controller of the run.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(2);
/// The time between two events with statistics of the step times of all ranks, which appear in the
/// run's event log.
const EVENT_INTERVAL: Duration = Duration::from_secs(60);

/// Sums how long the steps of all ranks took, and finds ranks that slow down the others.
pub(super) struct StepTimesCollector {
    detector: Option<StragglerDetector>,
    /// The times since the previous message, and the time of that message.
    message: (StepTimes, Instant),
    /// The times since the previous event, and the time of that event.
    event: (StepTimes, Instant),
}

impl StepTimesCollector {
    /// Creates a collector of step times at the time `now`. `rules` decide when a slow rank is
    /// reported; `None` for never. `hosts` has the number of each rank's host.
    pub(super) fn new(rules: Option<StragglerRules>, hosts: Vec<usize>, now: Instant) -> StepTimesCollector {
        StepTimesCollector {
            detector: rules.map(|rules| StragglerDetector::new(rules, hosts)),
            message: (StepTimes::default(), now),
            event: (StepTimes::default(), now),
        }
    }

    /// Adds all ranks' times for one step to the sums, and returns the messages that are due to be
    /// sent to the controller, such as straggler events.
    pub(super) fn add_step(&mut self, step: u64, ranks: &[RankTimes], now: Instant) -> Vec<FromWorker> {
        // The first step of an attempt has no previous one.
        if ranks.is_empty() || ranks.iter().any(|times| times.step_us == 0) {
            return Vec::new();
        }
        let changes = self.detector.as_mut().map(|detector| detector.add_step(step, ranks));
        let changes = changes.unwrap_or_default().into_iter();
        let to_event = |change| Event::Straggler(Box::new(StragglerReport::new(&change)));
        let mut messages: Vec<FromWorker> = changes.map(to_event).map(FromWorker::Event).collect();
        self.message.0.add_step(step, ranks);
        self.event.0.add_step(step, ranks);
        if now.duration_since(self.message.1) >= MESSAGE_INTERVAL {
            self.message.1 = now;
            messages.push(FromWorker::StepTimes(std::mem::take(&mut self.message.0)));
        }
        if now.duration_since(self.event.1) >= EVENT_INTERVAL {
            self.event.1 = now;
            let report = StepTimesReport::from_times(&std::mem::take(&mut self.event.0));
            messages.extend(report.map(|report| FromWorker::Event(Event::StepTimes(report))));
        }
        messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_reported_in_intervals_and_stragglers_at_once() {
        let rules = StragglerRules { share: 0.1, steps: 3 };
        let start = Instant::now();
        let mut collector = StepTimesCollector::new(Some(rules), vec![0; 3], start);
        let rank = |waiting_us| RankTimes { step_us: 500_000, waiting_us, ..RankTimes::default() };
        let ranks = [rank(300_000), rank(50_000), rank(300_000)];
        assert!(collector.add_step(1, &[RankTimes::default(); 3], start).is_empty(), "the first step");
        let (mut messages, mut stragglers, mut events) = (0, vec![], vec![]);
        for step in 2..=243u64 {
            let now = start + Duration::from_millis(500 * step);
            for message in collector.add_step(step, &ranks, now) {
                match message {
                    FromWorker::StepTimes(times) => {
                        messages += 1;
                        assert!((3..=4).contains(&times.steps) && times.ranks.len() == 3, "{times:?}");
                    }
                    FromWorker::Event(Event::Straggler(report)) => stragglers.push((step, report.rank)),
                    FromWorker::Event(Event::StepTimes(report)) => events.push((step, report)),
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!((messages, stragglers), (60, vec![(4, 1)]));
        assert_eq!(
            events.iter().map(|(step, r)| (*step, r.slowest_rank)).collect::<Vec<_>>(),
            [(120, 1), (240, 1)]
        );
    }
}
