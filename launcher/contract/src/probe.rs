//! The requests of `launch check` to an agent, and its reports.
use diagnostic::Diagnostic;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

/// Most peers of one [`Probe::Connect`].
pub const MAX_PEERS: usize = 64;

/// A request to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Probe {
    /// Report what is on the host. Until the agent ends, it also listens for its peers and keeps a
    /// nonce file in each directory.
    Inspect {
        /// Letters and digits that name the nonce file.
        nonce: String,
        /// Absolute directories that the job writes to. If a directory does not exist, its nearest
        /// existing parent is inspected.
        dirs: Vec<PathBuf>,
        /// For built-in training on GPUs: the absolute directories in which CUDA libraries are
        /// searched first.
        cuda: Option<Vec<PathBuf>>,
    },
    /// Connect to other agents, and report which nonce files are visible in the directories of
    /// `Inspect`.
    Connect {
        /// The agents of the other hosts.
        peers: Vec<PeerListener>,
        /// The nonces of all hosts.
        nonces: Vec<String>,
        /// Time limit per connection, milliseconds.
        timeout_ms: u64,
    },
}

/// Where the agent of another host listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerListener {
    /// The name of the host.
    pub name: String,
    /// Its addresses, to be tried in this order.
    pub addresses: Vec<SocketAddr>,
    /// The text that it sends to a process that connects.
    pub greeting: String,
}

/// The answer to a [`Probe`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ProbeAnswer {
    /// The inspection of the host.
    Inspect(Box<HostInspection>),
    /// Which hosts and nonces are visible.
    Connect {
        /// For each peer: its name, and the time to connect in milliseconds or why the connection
        /// failed.
        peers: Vec<(String, diagnostic::Result<f64>)>,
        /// For each directory of `Inspect`: the requested nonces that are visible in it.
        nonces: Vec<Vec<String>>,
    },
}

/// The inspection of one host: hardware, system limits and directories. Unknown values are `None`
/// or empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostInspection {
    /// The hostname.
    pub hostname: String,
    /// The architecture in Rust's notation: `x86_64`, `aarch64`.
    pub arch: String,
    /// The release of the kernel.
    pub kernel: String,
    /// The version of the launch executable.
    pub version: String,
    /// The content hash of the launch executable.
    pub executable: String,
    /// The number of CPUs that the agent may use.
    pub cpus: u32,
    /// The memory that may be used, bytes.
    pub memory: u64,
    /// The part of `memory` that is available, bytes.
    pub memory_available: u64,
    /// The clock of the host at the time of the answer, nanoseconds since 1970.
    pub unix_time_ns: i64,
    /// The home and the cache directory, each with whether it is writable or why not.
    pub writable: Vec<(PathBuf, diagnostic::Result<()>)>,
    /// The directories of [`Probe::Inspect`], in its order.
    pub dirs: Vec<DirectoryReport>,
    /// The GPUs.
    pub gpus: GpuReport,
    /// Soft resource limits: `nofile`, `nproc`, `memlock` (bytes); `None` for unlimited.
    pub limits: BTreeMap<String, Option<u64>>,
    /// Size and free space of /dev/shm, bytes.
    pub shm_size_and_free: Option<(u64, u64)>,
    /// Names and addresses of the interfaces that are up, without the loopback.
    pub interfaces: Vec<(String, std::net::IpAddr)>,
    /// The port on which the agent listens for its peers.
    pub port: Option<u16>,
    /// The text that the agent sends to a peer that connects to `port`.
    pub greeting: String,
}

/// A directory that the job writes to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DirectoryReport {
    /// The inspected directory: the requested one or its nearest existing parent.
    pub path: PathBuf,
    /// The type of the file system, e.g. `ext4`.
    pub filesystem: String,
    /// Free space, bytes.
    pub free: u64,
    /// Whether the directory is writable, or why not.
    pub writable: diagnostic::Result<()>,
}

/// The result of opening one library that training on GPUs uses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LibraryReport {
    /// Its short name in lower case, e.g. `cublaslt`.
    pub name: String,
    /// Whether training on one GPU requires it.
    pub required: bool,
    /// Its version and path, or why it is not usable.
    pub result: diagnostic::Result<(String, PathBuf)>,
}

/// The GPUs of a host with their driver and libraries, as its agent reports them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReport {
    /// The number of device nodes `/dev/nvidiaN`.
    pub devices: u32,
    /// Why the management library (NVML) is not usable although there are devices.
    pub error: Option<Diagnostic>,
    /// The version of the NVIDIA driver.
    pub driver: Option<String>,
    /// The GPUs by index.
    pub gpus: Vec<GpuStatus>,
    /// Path and version of libnccl.so.2.
    pub nccl: Option<(String, String)>,
    /// The libraries that training on GPUs opens, if requested.
    pub libraries: Vec<LibraryReport>,
}

/// The state of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The model, e.g. `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The address on the PCI bus.
    pub pci_address: String,
    /// Its memory, bytes.
    pub memory: u64,
    /// Its free memory, bytes.
    pub memory_free: u64,
    /// Process id and memory, in bytes, of each process that computes on it.
    pub processes: Vec<(u32, u64)>,
    /// Memory errors that ECC could not correct since the driver was loaded; `None` when not
    /// counted.
    pub uncorrected_ecc_errors: Option<u64>,
    /// Whether row remapping is pending until the next reset, and whether it has failed.
    pub remapped_rows: (bool, bool),
    /// Why the GPU's clocks are throttled, other than because it is idle.
    pub throttle_reasons: Vec<String>,
    /// Whether its compute mode admits at most one process.
    pub exclusive_compute: bool,
    /// Whether it is partitioned into instances (MIG).
    pub mig_enabled: bool,
    /// The number of active NVLinks.
    pub nvlinks: u32,
    /// The indices of GPUs whose memory this GPU cannot access directly, each with the reason.
    pub no_peer_access: Vec<(u32, String)>,
}
