//! Events about step times: [`StragglerReport`] (a rank slows down the others) and
//! [`StepTimesReport`] (statistics over all ranks).
use crate::{
    step_times::{RankTimes, StepTimes},
    straggler::{StragglerChange, StragglerKind},
};
use jobspec::ids::Rank;
use serde::{Deserialize, Serialize};

/// Whether a rank began or ceased to slow down the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StragglerState {
    /// The rank is slow.
    Slow,
    /// The rank is no longer slow.
    Recovered,
}

/// The event that a rank began or ceased to slow down the other ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StragglerReport {
    /// Whether the rank is slow.
    pub state: StragglerState,
    /// The slow rank. For a slow network, the first rank of the host.
    pub rank: Rank,
    /// The name of the host of the rank; empty until the controller has added it.
    pub host: String,
    /// What is slow.
    pub kind: StragglerKind,
    /// The number of optimizer steps that are done; `None` for programs, whose steps are unknown.
    pub step: Option<u64>,
    /// The share of the step time that the rank costs.
    pub share: f64,
    /// The mean duration of a step in seconds; `None` for programs, whose steps are unknown.
    pub step_s: Option<f64>,
    /// The likely reason; `None` if it is unknown.
    #[serde(default)]
    pub reason: Option<StragglerReason>,
    /// The report in one line of text for the user.
    pub message: String,
}

/// The likely reason why a rank is slow. The JSON form is an object tagged by `kind`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum StragglerReason {
    /// The quota of a cgroup limits the CPU time of the rank.
    CpuQuota {
        /// The share of the time for which the kernel stopped the rank, from 0 to 1.
        share: f64,
    },
    /// The threads of the rank wait for a CPU, because other processes use it.
    CpuContention {
        /// The time for which threads waited, as a share of the time. Several threads that wait at
        /// the same time count several times.
        share: f64,
    },
    /// The rank reads pages of files and swap from the disk.
    PageFaults {
        /// The number of pages per second.
        per_second: f64,
    },
    /// The clocks of a GPU of the host are reduced.
    GpuClocks {
        /// The number of the GPU on its host.
        gpu: u32,
        /// Why the clocks are reduced, in NVIDIA's words.
        reason: String,
    },
    /// A GPU of the host has had memory errors that could not be corrected.
    GpuMemoryErrors {
        /// The number of the GPU on its host.
        gpu: u32,
        /// The number of errors since the driver was loaded.
        errors: u64,
    },
    /// Data of the rank is long on its way to or from other hosts.
    SlowLink,
    /// A signal has stopped the process of the rank.
    Stopped,
    /// A reason that this version of launch does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

/// The event with the smallest, median and largest step time, work time and waiting time among all
/// ranks in the newest steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimesReport {
    /// The number of optimizer steps that are done.
    pub step: u64,
    /// The number of steps since the previous event of this kind.
    pub steps: u64,
    /// The mean duration of a step, in seconds.
    pub step_s: f64,
    /// The mean time per step in which the ranks themselves worked, in seconds.
    pub work_s: TimeStatistics,
    /// The mean time per step for which the computation of the ranks waited for collectives, in
    /// seconds.
    pub waiting_s: TimeStatistics,
    /// The mean time per step for which collectives of the ranks ran, in seconds.
    pub collective_s: TimeStatistics,
    /// The rank whose work took longest.
    pub slowest_rank: Rank,
}

/// The minimum, median and maximum over all ranks of one duration, such as the step time, in
/// seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeStatistics {
    /// The smallest time.
    pub min: f64,
    /// The median.
    pub median: f64,
    /// The largest time.
    pub max: f64,
}

impl StragglerReport {
    /// Creates the event that a rank began or ceased to slow down the others, from `change`, the
    /// result of the straggler detector. The controller adds host, reason and message.
    pub fn new(change: &StragglerChange) -> StragglerReport {
        StragglerReport {
            state: if change.is_slow { StragglerState::Slow } else { StragglerState::Recovered },
            rank: change.rank,
            host: String::new(),
            kind: change.kind,
            step: Some(change.step),
            share: change.share,
            step_s: Some(change.step_s),
            reason: None,
            message: String::new(),
        }
    }
}

impl StepTimesReport {
    /// Computes the smallest, median and largest times per step among all ranks from `times`, the
    /// summed times of each rank. Returns `None` for times without steps or ranks.
    pub fn from_times(times: &StepTimes) -> Option<StepTimesReport> {
        let steps = Some(times.steps).filter(|steps| *steps > 0)?;
        let range = |time: fn(&RankTimes) -> u64| {
            let mut sums: Vec<u64> = times.ranks.iter().map(time).collect();
            sums.sort_unstable();
            let seconds = |us: u64| us as f64 / 1e6 / steps as f64;
            let (first, last) = (sums.first()?, sums.last()?);
            let median = sums.get((sums.len() - 1) / 2)?;
            Some(TimeStatistics { min: seconds(*first), median: seconds(*median), max: seconds(*last) })
        };
        let slowest = (0..).zip(&times.ranks).max_by_key(|(_, times)| times.work_us())?.0;
        Some(StepTimesReport {
            step: times.step,
            steps,
            step_s: times.mean_step_us() as f64 / 1e6,
            work_s: range(RankTimes::work_us)?,
            waiting_s: range(|times| times.waiting_us)?,
            collective_s: range(|times| times.collective_us)?,
            slowest_rank: slowest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_become_statistics_per_step() {
        let rank = |waiting_us| RankTimes { step_us: 500_000, waiting_us, ..RankTimes::default() };
        let mut times = StepTimes::default();
        assert_eq!(StepTimesReport::from_times(&times), None);
        times.add_step(8, &[rank(100_000), rank(300_000), rank(200_000)]);
        times.add_step(9, &[rank(100_000), rank(300_000), rank(200_000)]);
        let report = StepTimesReport::from_times(&times).expect("a report");
        assert_eq!((report.step, report.steps, report.step_s, report.slowest_rank), (9, 2, 0.5, 0));
        assert_eq!(report.work_s, TimeStatistics { min: 0.2, median: 0.3, max: 0.4 });
        assert_eq!(report.waiting_s, TimeStatistics { min: 0.1, median: 0.2, max: 0.3 });
        times.add_step(10, &[]);
        assert_eq!(StepTimesReport::from_times(&times), None);
    }
}
