//! `cluster:` — where the job runs.
use serde::{Deserialize, Serialize};

/// Where the job runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterSpec {
    pub hosts: Hosts,
    pub workers_per_host: Count,
    pub devices: Devices,
    pub master_port: MasterPort,
}

/// Which hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hosts {
    /// This machine.
    Local,
}

/// A number, or as many as there are devices (on CPU: 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Count {
    Auto,
    Exactly(u32),
}

/// Which devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Devices {
    /// GPUs when a backend for them is built in and they are found, else CPU.
    Auto,
    Cpu,
}

/// The rendezvous port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MasterPort {
    Auto,
    Fixed(u16),
}
