//! `cluster`: the hosts and devices of a job.
use serde::{Deserialize, Serialize};
use std::{net::IpAddr, path::PathBuf};

/// The hosts and devices of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterSpec {
    /// The hosts, before the filters.
    pub hosts: Hosts,
    /// DeepSpeed's filter: only these hosts and slots, verbatim. Cannot be combined with `exclude`.
    pub include: Vec<String>,
    /// DeepSpeed's filter: all but these hosts and slots, verbatim.
    pub exclude: Vec<String>,
    /// How hosts are reached by SSH.
    pub ssh: SshSpec,
    /// The number of hosts that run workers; `None` for all. The first available hosts are used,
    /// the others are spare hosts.
    pub use_hosts: Option<u32>,
    /// The number of workers on each host.
    pub workers_per_host: WorkersPerHost,
    /// The devices of the workers.
    pub devices: Devices,
    /// The number of built-in workers that share a GPU.
    pub workers_per_gpu: u32,
    /// What transfers GPU buffers between built-in workers.
    #[serde(rename = "collectives")]
    pub comm_backend: CommBackend,
    /// Directories that are searched first for the CUDA libraries.
    #[serde(rename = "cuda_libs")]
    pub cuda_library_paths: Vec<PathBuf>,
    /// The rendezvous port.
    pub master_port: MasterPort,
    /// Which process serves the rendezvous store.
    pub store: StoreHost,
    /// The network interface of built-in workers.
    pub interface: Interface,
}

/// The address at which a built-in worker listens for workers on other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Interface {
    /// The address at which the host is reached by SSH, else its first non-loopback address.
    Auto,
    /// The name of an interface (`eth0`), or the network of the address (`10.1.0.0/16`).
    Named(String),
}

impl ClusterSpec {
    /// Whether built-in workers compute on GPUs.
    pub fn trains_on_gpus(&self) -> bool {
        matches!(self.devices, Devices::Cuda | Devices::List(_))
    }
}

impl Interface {
    /// Whether an address of this interface may be used.
    pub fn admits(&self, interface: &str, address: IpAddr) -> bool {
        match self {
            Interface::Auto => true,
            Interface::Named(wanted) => match wanted.split_once('/') {
                Some(network) => is_in_network(address, network),
                None => interface == wanted,
            },
        }
    }

    /// Whether `text` is the name of an interface or a network: an address, a slash and a prefix
    /// length.
    pub fn is_valid(text: &str) -> bool {
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

/// Whether `address` is in the network, which is given by an address and a prefix length.
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

/// `cluster.hosts`: which hosts the job may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hosts {
    /// The nodes of the Slurm allocation that launch runs in, else this machine.
    Auto,
    /// This machine.
    Local,
    /// The nodes of the Slurm allocation that launch runs in.
    Slurm,
    /// Hosts, verbatim; [`crate::hosts::parse_hosts`] parses each text.
    List(Vec<String>),
    /// The hosts of a hostfile.
    File(PathBuf),
}

/// How hosts are reached by SSH. Values that are absent come from the SSH configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshSpec {
    /// The login name of hosts without one; `None` for that of the SSH configuration, else the
    /// current user.
    pub user: Option<String>,
    /// The port of hosts without one; `None` for that of the SSH configuration, else 22.
    pub port: Option<u16>,
    /// A private key; `None` for those of the SSH configuration, of the agent, and the default
    /// ones.
    pub key: Option<PathBuf>,
    /// The SSH configuration that is read.
    pub config: SshConfig,
    /// How host keys are verified.
    pub known_hosts: KnownHosts,
    /// The host, as `[user@]host[:port]`, through which the others are reached.
    pub jump: Option<String>,
    /// Time limit of each step of connecting, milliseconds.
    pub connect_timeout_ms: u64,
    /// The number of hosts that are connected to at the same time.
    #[serde(rename = "parallel")]
    pub fanout: u32,
}

/// Which SSH configuration is read.
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

/// The number of workers on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkersPerHost {
    /// One per GPU that the job uses (`workers_per_gpu` per GPU in built-in training); 1 on CPUs.
    Auto,
    /// This many.
    Exactly(u32),
}

/// The devices of the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Devices {
    /// For programs the GPUs of the host, if any; the CPU for built-in training.
    Auto,
    /// The CPU; GPUs are hidden from the workers.
    Cpu,
    /// All GPUs of the host, at least one.
    Cuda,
    /// The GPUs with these numbers; not empty, without duplicates.
    List(Vec<u32>),
}

/// What transfers GPU buffers between built-in workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommBackend {
    /// NCCL when each of several workers has its own GPU, else the host.
    Auto,
    /// NCCL.
    Nccl,
    /// The host's memory and network.
    Host,
}

/// The rendezvous port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MasterPort {
    /// Any free port.
    Auto,
    /// This port.
    Fixed(u16),
}

/// Which process serves the rendezvous store (torch's `TCPStore`) of a program's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreHost {
    /// launch, which binds the port before any rank starts.
    Agent,
    /// Rank 0, on a port that was free when the run started.
    Rank0,
}
