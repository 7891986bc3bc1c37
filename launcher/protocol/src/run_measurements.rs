//! [`RunMeasurements`]: the newest measurements of a run, which its controller writes to the run's
//! status file.
use crate::{control::HostUsage, event::StragglerReport, step_times::StepTimes};
use serde::{Deserialize, Serialize};

/// The name of the file in a run directory that contains the run's newest measurements.
pub const STATUS_FILE: &str = "status.json";
/// The version of the format of the file with a run's newest measurements.
pub const STATUS_VERSION: u32 = 1;

/// The newest measurements of a run, as its status file contains them: step times of the ranks,
/// usage of the hosts, and slow ranks. The journal does not contain them, because their number
/// would grow with the number of ranks and steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunMeasurements {
    /// The version of the file.
    pub version: u32,
    /// The time at which the file was written, in seconds since 1970.
    pub time: f64,
    /// The attempt of the measurements.
    pub attempt: u32,
    /// The times of the ranks in the newest steps; without steps if they are unknown.
    pub step_times: StepTimes,
    /// The newest usage of each host.
    pub hosts: Vec<HostUsageSample>,
    /// The ranks that slow down the others at present.
    pub stragglers: Vec<StragglerReport>,
}

/// The newest measurement of how much of a host's CPUs, memory, disks, network and GPUs is in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostUsageSample {
    /// The name of the host, as the job states it.
    pub host: String,
    /// The time of the measurement, in seconds since 1970.
    pub time: f64,
    /// The usage.
    pub usage: HostUsage,
}
