//! [`StepClock`]: measures how long each optimizer step of this rank takes, and for how much of
//! this time the rank waits for collectives.
use crate::{train::step::RankStepReport, zero::collective_queue::CollectiveQueue};
use protocol::step_times::RankTimes;
use std::time::Duration;

/// How long this rank's newest optimizer step took, and for how much of that time it waited for
/// collectives, until the rank reports both to the other ranks.
#[derive(Debug, Default)]
pub(super) struct StepClock {
    times: RankTimes,
    /// The seconds in which computation waited for collectives in this step.
    exposed: f64,
}

impl StepClock {
    /// Records how long an optimizer step of this rank took, and how long computation waited for
    /// collectives in it.
    pub(super) fn record_step(&mut self, queue: &CollectiveQueue, took: Duration) {
        self.exposed = queue.take_exposed_seconds();
        let micros = |seconds: f64| (seconds * 1e6) as u64;
        self.times = RankTimes {
            step_us: (took.as_micros() as u64).max(1),
            waiting_us: micros(self.exposed),
            collective_us: micros(queue.take_collective_seconds()),
            ..RankTimes::default()
        };
    }

    /// Adds the duration of the last completed step, and the time for which computation has waited
    /// for collectives, to `report`, which this rank sends to all ranks.
    pub(super) fn add_times_to_report(
        &mut self,
        queue: &CollectiveQueue,
        report: RankStepReport,
    ) -> RankStepReport {
        let exposed_comm = self.exposed + queue.take_exposed_seconds();
        // The collectives of saves and evaluations belong to no step.
        queue.take_collective_seconds();
        RankStepReport { exposed_comm, times: self.times, ..report }
    }
}
