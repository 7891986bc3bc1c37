//! The requests of `launch check` to an agent, and the agent's answers.
use diagnostic::Diagnostic;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

/// The most peers of one [`ProbeRequest::Connect`].
pub const MAX_PEERS: usize = 64;

/// A request of `launch check` to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ProbeRequest {
    /// Inspect the hardware, limits and directories of the host. Until the agent ends, it also
    /// listens for its peers and keeps a nonce file in each directory.
    Inspect {
        /// The name of the nonce file: letters and digits.
        nonce: String,
        /// The absolute directories that the job writes to. If a directory does not exist, its
        /// nearest existing parent is inspected.
        dirs: Vec<PathBuf>,
        /// The absolute directories in which CUDA libraries are searched first; `None` if the job
        /// does not train on GPUs.
        cuda: Option<Vec<PathBuf>>,
    },
    /// Connect to the agents of other hosts, and report which nonce files are visible in the
    /// directories of [`ProbeRequest::Inspect`].
    Connect {
        /// The agents of the other hosts.
        peers: Vec<PeerListener>,
        /// The names of the nonce files of all hosts.
        nonces: Vec<String>,
        /// Time limit per connection, milliseconds.
        timeout_ms: u64,
    },
}

/// The addresses at which the agent of another host listens during `launch check`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerListener {
    /// The name of the host.
    pub name: String,
    /// The addresses to connect to, in this order.
    pub addresses: Vec<SocketAddr>,
    /// The text that the agent sends to a process that connects.
    pub greeting: String,
}

/// The answer of an agent to a [`ProbeRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ProbeAnswer {
    /// The inspection of the host.
    Inspect(Box<HostInspection>),
    /// The peers and nonce files that the host can reach.
    Connect {
        /// For each peer: the name, and the time to connect in milliseconds or why the connection
        /// failed.
        peers: Vec<(String, diagnostic::Result<f64>)>,
        /// For each directory of [`ProbeRequest::Inspect`]: the requested nonces that are visible
        /// there.
        nonces: Vec<Vec<String>>,
    },
}

/// The inspection of one host: hardware, system limits and directories. Unknown values are `None`
/// or empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostInspection {
    /// The hostname.
    pub hostname: String,
    /// The architecture of the CPU in Rust's notation: `x86_64`, `aarch64`.
    pub arch: String,
    /// The release of the kernel (`uname -r`).
    pub kernel: String,
    /// The version of the launch executable.
    pub version: String,
    /// The content hash of the launch executable.
    pub executable: String,
    /// The number of CPUs that the agent may use.
    pub cpus: u32,
    /// The memory that the agent may use, bytes.
    pub memory: u64,
    /// The available part of `memory`, bytes.
    pub memory_available: u64,
    /// The clock of the host at the time of the answer, nanoseconds since 1970.
    pub unix_time_ns: i64,
    /// The home directory and the cache directory; for each, the error if it is not writable.
    pub writable: Vec<(PathBuf, diagnostic::Result<()>)>,
    /// The directories of [`ProbeRequest::Inspect`], in the order of the request.
    pub dirs: Vec<DirectoryInspection>,
    /// The GPUs with their driver and libraries.
    pub gpus: GpuReport,
    /// Soft resource limits by name: `nofile`, `nproc`, `memlock` (bytes); `None` if unlimited.
    pub limits: BTreeMap<String, Option<u64>>,
    /// The size and the free space of /dev/shm, bytes.
    pub shm_size_and_free: Option<(u64, u64)>,
    /// The names and addresses of the network interfaces that are up, without the loopback.
    pub interfaces: Vec<(String, std::net::IpAddr)>,
    /// The port on which the agent listens for its peers; `None` if listening failed.
    pub port: Option<u16>,
    /// The text that the agent sends to a peer that connects to `port`.
    pub greeting: String,
}

/// The inspection of a directory that the job writes to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DirectoryInspection {
    /// The inspected directory: the requested one or its nearest existing parent.
    pub path: PathBuf,
    /// The type of the file system, e.g. `ext4`.
    pub filesystem: String,
    /// Free space, bytes.
    pub free: u64,
    /// The error if the directory is not writable.
    pub writable: diagnostic::Result<()>,
}

/// The result of opening one library that training on GPUs uses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LibraryReport {
    /// The short name of the library in lower case, e.g. `cublaslt`.
    pub name: String,
    /// Whether training on one GPU requires the library.
    pub required: bool,
    /// The version and path of the library, or why the library is not usable.
    pub result: diagnostic::Result<(String, PathBuf)>,
}

/// The GPUs of a host with their driver and libraries, as its agent reports them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReport {
    /// The number of device nodes `/dev/nvidiaN`.
    pub devices: u32,
    /// Why the management library (NVML) is not usable although device nodes exist.
    pub error: Option<Diagnostic>,
    /// The version of the NVIDIA driver.
    pub driver: Option<String>,
    /// The GPUs by index.
    pub gpus: Vec<GpuStatus>,
    /// Path and version of libnccl.so.2.
    pub nccl: Option<(String, String)>,
    /// The libraries that training on GPUs uses; empty unless they were requested.
    pub libraries: Vec<LibraryReport>,
}

/// The state of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The model, e.g. `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The address on the PCI bus.
    pub pci_address: String,
    /// The memory of the GPU, bytes.
    pub memory: u64,
    /// The free memory of the GPU, bytes.
    pub memory_free: u64,
    /// The process id and the memory, in bytes, of each process that computes on the GPU.
    pub processes: Vec<(u32, u64)>,
    /// The number of memory errors since the driver was loaded that ECC could not correct; `None`
    /// if the GPU does not count them.
    pub uncorrected_ecc_errors: Option<u64>,
    /// Whether row remapping is pending until the next reset, and whether it has failed.
    pub remapped_rows: (bool, bool),
    /// The reasons why the GPU's clocks are throttled, without idleness.
    pub throttle_reasons: Vec<String>,
    /// Whether the compute mode of the GPU admits at most one process.
    pub exclusive_compute: bool,
    /// Whether the GPU is partitioned into instances (MIG).
    pub mig_enabled: bool,
    /// The number of active NVLinks.
    pub nvlinks: u32,
    /// The indices of GPUs whose memory this GPU cannot access directly, each with the reason.
    pub no_peer_access: Vec<(u32, String)>,
}
