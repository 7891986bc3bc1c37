//! What `launch check` asks an agent, and what the agent finds.
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

/// Most peers of one [`Probe::Reach`].
pub const MAX_PEERS: usize = 64;

/// A question about a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Probe {
    /// What is there? The agent also opens a port for its peers and puts a nonce file into each directory, until it ends.
    Look {
        /// Letters and digits: names the nonce files.
        nonce: String,
        /// Where the job will write, absolute; their nearest existing parents are looked at.
        dirs: Vec<PathBuf>,
        /// The built-in runtime will train on GPUs: are its libraries there? These absolute folders of the job come first.
        cuda: Option<Vec<PathBuf>>,
    },
    /// Can these be connected to, and which of these nonces lie in the directories of `Look`?
    Reach { peers: Vec<Peer>, nonces: Vec<String>, timeout_ms: u64 },
}

/// Where another node's agent listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    pub name: String,
    pub addresses: Vec<SocketAddr>,
    /// What it says to whoever connects.
    pub greeting: String,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Probed {
    Look(Box<NodeLook>),
    Reach {
        /// By name: the milliseconds it took, or why not.
        peers: Vec<(String, Result<f64, String>)>,
        /// For each directory of `Look`, those of the asked nonces that were seen.
        nonces: Vec<Vec<String>>,
    },
}

/// What is on a node. What could not be found out is `None` or empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeLook {
    pub hostname: String,
    /// As Rust names it: `x86_64`, `aarch64`.
    pub arch: String,
    pub kernel: String,
    /// Of the executable: version and content hash.
    pub version: String,
    pub executable: String,
    /// CPUs that the agent may use.
    pub cpus: u32,
    /// Bytes.
    pub memory: u64,
    pub memory_available: u64,
    /// Nanoseconds since 1970 by the node's clock, when it answered.
    pub unix_ns: i64,
    /// Where it can be written: the home and the cache directory.
    pub writable: Vec<(PathBuf, Result<(), String>)>,
    pub dirs: Vec<DirLook>,
    pub gpus: GpuLook,
    /// Soft limits: `nofile`, `nproc`, `memlock` (bytes); `None`: unlimited.
    pub limits: BTreeMap<String, Option<u64>>,
    /// Of /dev/shm: size and free, bytes.
    pub shm: Option<(u64, u64)>,
    /// Addresses of its interfaces that are up, without the loopback.
    pub interfaces: Vec<(String, std::net::IpAddr)>,
    /// The port its peers may connect to.
    pub port: Option<u16>,
    /// What it says there.
    pub greeting: String,
}

/// A directory where the job will write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DirLook {
    /// The one that exists: asked for, or its nearest parent.
    pub at: PathBuf,
    pub filesystem: String,
    /// Bytes.
    pub free: u64,
    pub writable: Result<(), String>,
}

/// A library that training on GPUs opens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LibraryLook {
    /// Short, lower case: `cublaslt`.
    pub name: String,
    /// Training on one GPU can't do without it.
    pub needed: bool,
    /// Its version and path, or why it can't be used.
    pub found: Result<(String, PathBuf), String>,
}

/// GPUs and what they need.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuLook {
    /// `/dev/nvidiaN` nodes.
    pub devices: u32,
    /// Why the management library can't be asked, where there are devices.
    pub trouble: Option<String>,
    /// Of the NVIDIA driver.
    pub driver: Option<String>,
    pub gpus: Vec<Gpu>,
    /// Where libnccl.so.2 is, and its version.
    pub nccl: Option<(String, String)>,
    /// What training on GPUs opens, when that was asked for.
    pub libraries: Vec<LibraryLook>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    pub name: String,
    /// Its address on the PCI bus.
    pub bus: String,
    /// Bytes.
    pub memory: u64,
    pub memory_free: u64,
    /// Processes that compute on it: pid and bytes.
    pub processes: Vec<(u32, u64)>,
    /// Errors of its memory that ECC couldn't correct, since the driver was loaded; `None`: it doesn't count them.
    pub ecc_errors: Option<u64>,
    /// Rows of its memory that were found bad: to be replaced at the next reset, couldn't be replaced.
    pub rows: (bool, bool),
    /// Why its clocks are held down now, other than by what it has to do.
    pub slowed: Vec<String>,
    /// It takes one process at a time, or none.
    pub exclusive: bool,
    /// It is cut into instances (MIG).
    pub instances: bool,
    /// Links to other GPUs that are up.
    pub nvlinks: u32,
    /// Why it can't reach another one's memory directly: that one's index, and why.
    pub unreachable: Vec<(u32, String)>,
}
