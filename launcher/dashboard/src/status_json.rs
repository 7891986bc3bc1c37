//! [`RunMeasurementsJson`]: the newest measurements of a run (step times, usage of hosts, slow
//! ranks), in the JSON form that the page receives.
use protocol::{
    event::StragglerReport,
    run_measurements::{HostUsageSample, RunMeasurements},
    step_times::RankTimes,
};
use serde::Serialize;

/// The largest number of ranks whose step times are sent to the page.
const MAX_RANKS: usize = 16 << 10;

/// The newest measurements of a run (step times, usage of hosts, slow ranks), in the JSON form that
/// the page of the dashboard receives. The times of the ranks are lists by rank, which are shorter
/// than a list of objects.
#[derive(Debug, Serialize)]
pub(crate) struct RunMeasurementsJson<'a> {
    time: f64,
    attempt: u32,
    /// The number of optimizer steps that were done.
    step: u64,
    /// The mean duration of a step, in seconds.
    step_s: f64,
    /// The mean time per step in which each rank worked, in milliseconds.
    work_ms: Vec<f64>,
    /// The mean time per step for which each rank waited for collectives, in milliseconds.
    waiting_ms: Vec<f64>,
    /// The mean time per step for which collectives of each rank ran, in milliseconds.
    collective_ms: Vec<f64>,
    hosts: &'a [HostUsageSample],
    stragglers: &'a [StragglerReport],
}

impl RunMeasurementsJson<'_> {
    /// Converts the measurements in a run's status file to the JSON form that the page receives.
    pub(crate) fn new(status: &RunMeasurements) -> RunMeasurementsJson<'_> {
        let times = &status.step_times;
        let steps = times.steps.max(1) as f64;
        let list = |time: fn(&RankTimes) -> u64| {
            let ranks = times.ranks.iter().take(MAX_RANKS);
            ranks.map(|rank| (time(rank) as f64 / 10.0 / steps).round() / 100.0).collect()
        };
        RunMeasurementsJson {
            time: status.time,
            attempt: status.attempt,
            step: times.step,
            step_s: times.mean_step_us() as f64 / 1e6,
            work_ms: list(RankTimes::work_us),
            waiting_ms: list(|rank| rank.waiting_us),
            collective_ms: list(|rank| rank.collective_us),
            hosts: &status.hosts,
            stragglers: &status.stragglers,
        }
    }
}
