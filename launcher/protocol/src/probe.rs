//! The requests of `launch check` to the agent of a host, and the agent's answers.
use crate::{
    hardware::Accelerator,
    network_probe::{MeasureRequest, Measurement, NetworkInspection, NetworkRequest},
};
use diagnostic::Diagnostic;
use jobspec::PortSelection;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

/// The largest number of other hosts to which `launch check` makes one agent connect with a single
/// request.
pub const MAX_PEERS: usize = 64;

/// A request of `launch check` to the agent of a host, for example to inspect the host or to
/// connect to other hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ProbeRequest {
    /// Inspects the hardware, limits and directories of the host. Afterwards, the agent listens for
    /// its peers and keeps a nonce file in each directory, until it ends.
    Inspect {
        /// The name of the nonce file, which consists of letters and digits.
        nonce: String,
        /// The absolute directories that the job writes to. If a directory does not exist, its
        /// nearest existing parent is inspected.
        dirs: Vec<PathBuf>,
        /// The absolute directories in which CUDA libraries are searched first; `None` if the job
        /// does not train on GPUs.
        cuda: Option<Vec<PathBuf>>,
        /// The ports of which the agent takes one to listen for its peers.
        ports: PortSelection,
    },
    /// Connects to the agents of other hosts. Also looks for nonce files of other hosts in the
    /// directories of [`ProbeRequest::Inspect`], which shows whether hosts share them.
    Connect {
        /// The agents of the other hosts, at most [`MAX_PEERS`].
        peers: Vec<PeerListener>,
        /// The names of the nonce files of all hosts.
        nonces: Vec<String>,
        /// The time limit for each connection, in milliseconds.
        timeout_ms: u64,
    },
    /// Inspects the network of the host. Afterwards, the agent accepts the measurements of other
    /// agents until it ends.
    Network(NetworkRequest),
    /// Measures the connection to the agent of another host, after [`ProbeRequest::Network`].
    Measure(MeasureRequest),
}

/// The addresses at which the agent of one host listens, so that agents of other hosts can test
/// their connections to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerListener {
    /// The name of the host.
    pub name: String,
    /// The addresses to connect to, in the order in which they are tried.
    pub addresses: Vec<SocketAddr>,
    /// The text that the agent sends to a process that connects.
    pub greeting: String,
}

/// The answer of an agent to a request of `launch check`, for example what it found on its host or
/// which hosts it reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ProbeAnswer {
    /// The answer to [`ProbeRequest::Inspect`].
    Inspect(Box<HostInspection>),
    /// The answer to [`ProbeRequest::Connect`]: the reachable peers and the visible nonce files.
    Connect {
        /// The name of each peer, and the time to connect to it in milliseconds or the error.
        peers: Vec<(String, diagnostic::Result<f64>)>,
        /// For each directory of [`ProbeRequest::Inspect`]: the requested nonces that are visible
        /// there.
        nonces: Vec<Vec<String>>,
    },
    /// The answer to [`ProbeRequest::Network`].
    Network(Box<NetworkInspection>),
    /// The answer to [`ProbeRequest::Measure`].
    Measure(Box<Measurement>),
}

/// What `launch check` found about one host: hardware, system limits and directories. Unknown
/// values are `None` or empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostInspection {
    /// The hostname.
    pub hostname: String,
    /// The CPU architecture in Rust's notation, e.g. `x86_64` or `aarch64`.
    pub arch: String,
    /// The release of the kernel (`uname -r`).
    pub kernel: String,
    /// The version of the launch executable.
    pub version: String,
    /// The content hash of the launch executable, which shows whether hosts run the same build.
    pub executable: String,
    /// The number of CPUs that the agent may use.
    pub cpus: u32,
    /// The host memory that the agent may use, in bytes.
    pub memory: u64,
    /// The host memory that programs can allocate without swapping (`MemAvailable` of
    /// /proc/meminfo), in bytes.
    pub memory_available: u64,
    /// The clock of the host at the time of the answer, in nanoseconds since 1970.
    pub unix_time_ns: i64,
    /// The home directory and the cache directory. Each has an error if the directory is not
    /// writable.
    pub writable: Vec<(PathBuf, diagnostic::Result<()>)>,
    /// The directories of [`ProbeRequest::Inspect`], in the order of the request.
    pub dirs: Vec<DirectoryInspection>,
    /// The GPUs of NVIDIA, with their driver and libraries.
    pub gpus: GpuReport,
    /// The accelerators of all kinds that workers can use.
    pub accelerators: Vec<Accelerator>,
    /// The number of accelerators that permissions or a control group deny to the agent.
    pub denied_accelerators: u32,
    /// The soft resource limits `nofile`, `nproc` and `memlock` (in bytes), by name. `None` stands
    /// for no limit.
    pub limits: BTreeMap<String, Option<u64>>,
    /// The size and the free space of /dev/shm, in bytes.
    pub shm_size_and_free: Option<(u64, u64)>,
    /// The names and addresses of the network interfaces that are up, without the loopback.
    pub interfaces: Vec<(String, std::net::IpAddr)>,
    /// The port on which the agent listens for its peers; `None` if listening failed.
    pub port: Option<u16>,
    /// The text that the agent sends to a peer that connects to `port`.
    pub greeting: String,
}

/// What `launch check` found about a directory that the job writes to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DirectoryInspection {
    /// The inspected directory: the requested directory, or its nearest existing parent.
    pub path: PathBuf,
    /// The type of the file system, e.g. `ext4`.
    pub filesystem: String,
    /// The free space of the file system, in bytes.
    pub free: u64,
    /// An error if the directory is not writable.
    pub writable: diagnostic::Result<()>,
}

/// The result of opening one library, such as cuBLAS, that the built-in training on GPUs uses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LibraryReport {
    /// The name of the library as its vendor writes it, e.g. `cuBLASLt`; `driver` for the library
    /// of the GPU driver.
    pub name: String,
    /// Whether training on a single GPU requires the library.
    pub required: bool,
    /// The version and path of the library, or why the library is not usable.
    pub result: diagnostic::Result<(String, PathBuf)>,
}

/// The NVIDIA GPUs of a host with their driver and libraries, as `launch check` found them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReport {
    /// The number of device nodes `/dev/nvidiaN` on the host.
    pub devices: u32,
    /// The error because of which NVIDIA's management library (NVML) is not usable; `None` if it is
    /// usable or there are no device nodes.
    pub error: Option<Diagnostic>,
    /// The version of the NVIDIA driver; `None` if unknown.
    pub driver: Option<String>,
    /// The state of each GPU, ordered by index.
    pub gpus: Vec<GpuStatus>,
    /// The path and the version of libnccl.so.2; `None` if the library was not found.
    pub nccl: Option<(String, String)>,
    /// The libraries that training on GPUs uses; empty if the request did not ask for them.
    pub libraries: Vec<LibraryReport>,
}

/// The state of one GPU, as NVIDIA's management library (NVML) reports it to `launch check`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The name of the GPU's model, e.g. `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The address of the GPU on the PCI bus.
    pub pci_address: String,
    /// The memory of the GPU, in bytes.
    pub memory: u64,
    /// The free memory of the GPU, in bytes.
    pub memory_free: u64,
    /// The process id and the memory, in bytes, of each process that computes on the GPU.
    pub processes: Vec<(u32, u64)>,
    /// The number of memory errors that ECC could not correct since the driver was loaded; `None`
    /// if the GPU does not count them.
    pub uncorrected_ecc_errors: Option<u64>,
    /// The state of row remapping, which replaces faulty memory: whether a remapping is pending
    /// until the next reset, and whether a remapping has failed.
    pub remapped_rows: (bool, bool),
    /// The reasons why the clocks of the GPU are throttled. Idleness is not listed.
    pub throttle_reasons: Vec<String>,
    /// Whether the compute mode of the GPU allows at most one process.
    pub exclusive_compute: bool,
    /// Whether the GPU is partitioned into instances (MIG).
    pub mig_enabled: bool,
    /// The number of active NVLink connections of the GPU.
    pub nvlinks: u32,
    /// The indices of GPUs whose memory this GPU cannot access directly, each with the reason.
    pub no_peer_access: Vec<(u32, String)>,
}
