//! [`RunStatus`]: the newest measurements of a run, which its controller writes to a file.
use crate::{control::HostUsage, event::StragglerReport, step_times::StepTimes};
use serde::{Deserialize, Serialize};

/// The name of the status file in a run directory.
pub const STATUS_FILE: &str = "status.json";
/// The version of the format of the status file.
pub const STATUS_VERSION: u32 = 1;

/// The newest measurements of a run. The journal does not contain them, because their number would
/// grow with the number of ranks and steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunStatus {
    /// The version of the file.
    pub version: u32,
    /// The time at which the file was written, in seconds since 1970.
    pub time: f64,
    /// The attempt of the measurements.
    pub attempt: u32,
    /// The times of the ranks in the newest steps; without steps if they are unknown.
    pub step_times: StepTimes,
    /// The newest usage of each host.
    pub hosts: Vec<HostStatus>,
    /// The ranks that slow down the others at present.
    pub stragglers: Vec<StragglerReport>,
}

/// The newest usage of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostStatus {
    /// The name of the host, as the job states it.
    pub host: String,
    /// The time of the measurement, in seconds since 1970.
    pub time: f64,
    /// The usage.
    pub usage: HostUsage,
}
