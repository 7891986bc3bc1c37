//! `cluster`: the hosts and devices of a job.
use serde::{Deserialize, Serialize};
use std::{net::IpAddr, path::PathBuf};

/// `cluster`: the hosts and devices of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterSpec {
    /// The hosts, before `include` and `exclude` are applied.
    pub hosts: HostSelection,
    /// DeepSpeed's filter that keeps only these hosts and slots, verbatim. Cannot be combined with
    /// `exclude`.
    pub include: Vec<String>,
    /// DeepSpeed's filter that removes these hosts and slots, verbatim.
    pub exclude: Vec<String>,
    /// The settings of SSH connections.
    pub ssh: SshSpec,
    /// The number of hosts that run workers; `None` for all. The first available hosts are used,
    /// and the others are spare hosts.
    pub use_hosts: Option<u32>,
    /// The number of workers on each host.
    pub workers_per_host: WorkersPerHost,
    /// The devices of the workers.
    pub devices: DeviceSelection,
    /// The number of built-in workers that share a GPU.
    pub workers_per_gpu: u32,
    /// The backend that transfers GPU buffers between built-in workers.
    #[serde(rename = "collectives")]
    pub comm_backend: CommBackend,
    /// Directories that are searched first for the CUDA libraries.
    #[serde(rename = "cuda_libs")]
    pub cuda_library_paths: Vec<PathBuf>,
    /// The rendezvous port (`MASTER_PORT`).
    pub master_port: MasterPort,
    /// The process that serves the rendezvous store.
    pub store: StoreHost,
    /// The network interface of built-in workers.
    pub interface: InterfaceSelector,
}

/// `cluster.interface`: the network interface at which a built-in worker listens for workers on
/// other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InterfaceSelector {
    /// The address at which the host is reached by SSH, otherwise the first address that is not
    /// loopback.
    Auto,
    /// The interface with this name (`eth0`), or with an address in this network (`10.1.0.0/16`).
    Named(String),
}

impl ClusterSpec {
    /// Returns whether built-in workers compute on GPUs.
    pub fn trains_on_gpus(&self) -> bool {
        matches!(self.devices, DeviceSelection::Cuda | DeviceSelection::List(_))
    }
}

impl InterfaceSelector {
    /// Returns whether a worker may listen at `address` of `interface`.
    pub fn admits(&self, interface: &str, address: IpAddr) -> bool {
        match self {
            InterfaceSelector::Auto => true,
            InterfaceSelector::Named(wanted) => match wanted.split_once('/') {
                Some(network) => is_in_network(address, network),
                None => interface == wanted,
            },
        }
    }

    /// Returns whether `text` is the name of an interface, or a network: an address, a slash and a
    /// prefix length.
    pub fn is_valid_name(text: &str) -> bool {
        match text.split_once('/') {
            Some((address, bits)) => {
                let most = address.parse().map(|a: IpAddr| if a.is_ipv4() { 32 } else { 128 });
                most.is_ok_and(|most: u8| bits.parse::<u8>().is_ok_and(|bits| bits <= most))
            }
            // The kernel allows at most 15 bytes without spaces and colons.
            None => {
                (1..=15).contains(&text.len())
                    && !text.chars().any(|c| c.is_whitespace() || c.is_control() || c == ':')
            }
        }
    }
}

/// Returns whether `address` is in the network, which is given by an address and a prefix length.
fn is_in_network(address: IpAddr, (network, bits): (&str, &str)) -> bool {
    let (Ok(network), Ok(bits)) = (network.parse::<IpAddr>(), bits.parse::<u32>()) else { return false };
    match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(n)) if bits <= 32 => {
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            u32::from(a) & mask == u32::from(n) & mask
        }
        (IpAddr::V6(a), IpAddr::V6(n)) if bits <= 128 => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            u128::from(a) & mask == u128::from(n) & mask
        }
        _ => false,
    }
}

/// `cluster.hosts`: the hosts that the job may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostSelection {
    /// The nodes of the Slurm allocation that launch runs in; this machine outside of an
    /// allocation.
    Auto,
    /// This machine.
    Local,
    /// The nodes of the Slurm allocation that launch runs in.
    Slurm,
    /// These hosts, verbatim. [`crate::hosts::parse_hosts`] parses each text.
    List(Vec<String>),
    /// The hosts of this hostfile.
    File(PathBuf),
}

/// `cluster.ssh`: the settings of SSH connections. Absent values come from the SSH configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshSpec {
    /// The login name for hosts that are written without one; `None` for that of the SSH
    /// configuration, otherwise the current user.
    pub user: Option<String>,
    /// The port for hosts that are written without one; `None` for that of the SSH configuration,
    /// otherwise 22.
    pub port: Option<u16>,
    /// The file of the private key; `None` for the keys of the SSH configuration, of the SSH agent,
    /// and the default keys.
    pub key: Option<PathBuf>,
    /// The SSH configuration to read.
    pub config: SshConfig,
    /// The verification of host keys.
    pub known_hosts: KnownHosts,
    /// The jump host, as `[user@]host[:port]`; `None` for that of the SSH configuration.
    pub jump: Option<String>,
    /// The time limit of each step of connecting, milliseconds.
    pub connect_timeout_ms: u64,
    /// The number of SSH connections that are set up at the same time.
    #[serde(rename = "parallel")]
    pub fanout: u32,
}

/// `cluster.ssh.config`: the SSH configuration to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SshConfig {
    /// The configurations of the user and of the system.
    #[serde(rename = "Usual")]
    Default,
    /// No configuration.
    None,
    /// Only this file.
    File(PathBuf),
}

/// Which host keys an SSH connection accepts (`cluster.ssh.known_hosts`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KnownHosts {
    /// Only keys that known_hosts contains.
    Strict,
    /// Also the key of a host that known_hosts does not contain; the key is then added.
    AcceptNew,
}

/// `cluster.workers_per_host`: the number of workers on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkersPerHost {
    /// One worker per GPU that the job uses (`workers_per_gpu` per GPU in built-in training), or
    /// one worker on CPUs.
    Auto,
    /// This number of workers.
    Exactly(u32),
}

/// The devices of the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceSelection {
    /// The GPUs of the host, if any, for programs; the CPU for built-in training.
    Auto,
    /// The CPU; GPUs are hidden from the workers.
    Cpu,
    /// All GPUs of the host, at least one.
    Cuda,
    /// The GPUs with these numbers; not empty, without duplicates.
    List(Vec<u32>),
}

/// The backend that transfers GPU buffers between built-in workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommBackend {
    /// NCCL if each of several workers has its own GPU, otherwise the host.
    Auto,
    /// NCCL.
    Nccl,
    /// The memory and network of the host.
    Host,
}

/// The rendezvous port (`MASTER_PORT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MasterPort {
    /// Any free port.
    Auto,
    /// This port.
    Fixed(u16),
}

/// `cluster.store`: the process that serves the rendezvous store (torch's `TCPStore`) of a
/// program's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreHost {
    /// The agent of the first host, which binds the port before any rank starts.
    Agent,
    /// Rank 0, which binds a port that was free when the run started.
    Rank0,
}
