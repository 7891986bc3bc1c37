//! [`HostUsage`]: how much of the CPUs, memory, disks, network and GPUs of a host is in use. The
//! agent measures it every few seconds.
use jobspec::ids::Rank;
use serde::{Deserialize, Serialize};

/// How much CPU, memory, disk and network a host and the workers of the job on it use, and the load
/// of its GPUs. Amounts of work, such as bytes read, are those of the interval since the previous
/// measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostUsage {
    /// The duration of the interval, in milliseconds.
    pub interval_ms: u64,
    /// The number of CPUs of the host.
    pub cpus: u32,
    /// The share of the time for which the CPUs of the host were busy, from 0 to 1.
    pub cpu_share: f64,
    /// The memory of the host, in bytes.
    pub memory_total: u64,
    /// The memory of the host that is in use and cannot be freed at once, in bytes.
    pub memory_used: u64,
    /// The smallest limit of the cgroups of the agent, in bytes; `None` if there is no limit.
    pub cgroup_memory_limit: Option<u64>,
    /// The memory that the cgroup with this limit uses, in bytes.
    pub cgroup_memory_used: Option<u64>,
    /// The bytes that were read from the disks of the host.
    pub disk_read: u64,
    /// The bytes that were written to the disks of the host.
    pub disk_written: u64,
    /// The bytes that the network interfaces of the host have received, except for loopback.
    pub network_received: u64,
    /// The bytes that the network interfaces of the host have sent, except for loopback.
    pub network_sent: u64,
    /// The number of TCP segments that the host has sent again.
    pub retransmitted_segments: u64,
    /// The GPUs of the host.
    pub gpus: Vec<GpuUsage>,
    /// The workers on the host that are running.
    pub workers: Vec<WorkerUsage>,
}

/// The load, the memory and the faults of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuUsage {
    /// The number of the GPU on its host.
    pub gpu: u32,
    /// The share of the time for which the GPU was busy, from 0 to 1; `None` if unknown.
    pub busy_share: Option<f64>,
    /// The memory in use, in bytes; `None` if unknown.
    pub memory_used: Option<u64>,
    /// The memory of the GPU, in bytes; `None` if unknown.
    pub memory_total: Option<u64>,
    /// The faults because of which the clocks are reduced; empty if there is none.
    pub clock_reasons: Vec<String>,
    /// The number of memory errors that were not corrected since the driver was loaded; `None` if
    /// unknown.
    pub memory_errors: Option<u64>,
}

/// The CPU time and memory that the processes of a worker use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerUsage {
    /// The rank of the worker.
    pub rank: Rank,
    /// The resident memory, in bytes.
    pub rss: u64,
    /// The CPU time of all threads, in microseconds.
    pub cpu_us: u64,
    /// The time for which threads were ready to run and waited for a CPU, in microseconds. Threads
    /// that a quota stops are included.
    pub run_delay_us: u64,
    /// The time for which the quota of a cgroup stopped the worker, in microseconds.
    pub throttled_us: u64,
    /// The number of pages that were read from a disk because the worker accessed them.
    pub major_faults: u64,
    /// Whether a signal has stopped the process of the worker.
    pub is_stopped: bool,
}
