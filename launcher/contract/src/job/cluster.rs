//! `cluster:` — where the job runs.
use serde::{Deserialize, Serialize};

/// Where the job runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterSpec {
    pub hosts: Hosts,
    pub workers_per_host: Count,
    pub devices: Devices,
    pub master_port: MasterPort,
    pub store: StoreHost,
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

/// Who hosts the rendezvous store (torch's `TCPStore`) of a program's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreHost {
    /// launch: its port is bound before any rank starts.
    Agent,
    /// Rank 0, on a port that was free when the run started.
    Rank0,
}
