//! `cluster`: the hosts and devices of a job.
use serde::{Deserialize, Serialize};
use std::{net::IpAddr, path::PathBuf};

/// `cluster`: the hosts and devices of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterSpec {
    /// The hosts that the job may use, before `include` and `exclude` are applied.
    pub hosts: HostSelection,
    /// DeepSpeed's filters that keep only the hosts and slots that they name, as written in the
    /// job. Cannot be combined with `exclude`.
    pub include: Vec<String>,
    /// DeepSpeed's filters that remove the hosts and slots that they name, as written in the job.
    /// Cannot be combined with `include`.
    pub exclude: Vec<String>,
    /// The settings of the SSH connections to the hosts.
    pub ssh: SshSpec,
    /// The number of hosts that run workers; `None` for all. The first available hosts are used,
    /// and the others are spare hosts.
    pub use_hosts: Option<u32>,
    /// The number of workers on each host.
    pub workers_per_host: WorkersPerHost,
    /// The devices on which the workers compute.
    pub devices: DeviceSelection,
    /// The number of built-in workers that share a GPU.
    pub workers_per_gpu: u32,
    /// The backend that transfers GPU buffers between built-in workers.
    #[serde(rename = "collectives")]
    pub comm_backend: CommBackend,
    /// Directories that are searched first for the CUDA libraries.
    #[serde(rename = "cuda_libs")]
    pub cuda_library_paths: Vec<PathBuf>,
    /// The choice of the rendezvous port (`MASTER_PORT`).
    pub master_port: MasterPort,
    /// The process that serves the rendezvous store of programs.
    pub store: StoreHost,
    /// The network interface on which built-in workers listen for workers on other hosts.
    pub interface: InterfaceSelector,
}

/// `cluster.interface`: the network interface on which a built-in worker listens for workers on
/// other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InterfaceSelector {
    /// The address at which the host is reached by SSH. Without such an address, the first address
    /// that is not loopback.
    Auto,
    /// The interface with this name (`eth0`), or the interface with an address in this network
    /// (`10.1.0.0/16`).
    Named(String),
}

impl ClusterSpec {
    /// Returns whether built-in workers compute on GPUs. They do so if `devices` is `cuda` or a
    /// list.
    pub fn trains_on_gpus(&self) -> bool {
        matches!(self.devices, DeviceSelection::Cuda | DeviceSelection::List(_))
    }
}

impl InterfaceSelector {
    /// Returns whether this selection allows a worker to listen at `address` of the interface
    /// `interface`. [`InterfaceSelector::Auto`] allows every address.
    pub fn admits(&self, interface: &str, address: IpAddr) -> bool {
        match self {
            InterfaceSelector::Auto => true,
            InterfaceSelector::Named(wanted) => match wanted.split_once('/') {
                Some(network) => is_in_network(address, network),
                None => interface == wanted,
            },
        }
    }

    /// Returns whether `text` is a possible name of an interface, or a network such as
    /// `10.1.0.0/16`.
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

/// Returns whether `address` belongs to a network, which is given by an address and a prefix length
/// in bits.
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
    /// The nodes of the Slurm allocation that launch runs in. Outside of an allocation, this
    /// machine.
    Auto,
    /// Only the machine on which launch was started.
    Local,
    /// The nodes of the Slurm allocation that launch runs in.
    Slurm,
    /// The hosts that these texts name. [`crate::hosts::parse_hosts`] parses each text.
    List(Vec<String>),
    /// The hosts of the hostfile at this path.
    File(PathBuf),
}

/// `cluster.ssh`: the settings of SSH connections. Values that are absent come from the SSH
/// configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshSpec {
    /// The login name for hosts that are written without one. If this value is `None`, the login
    /// name of the SSH configuration is used, otherwise the current user.
    pub user: Option<String>,
    /// The port for hosts that are written without one. If this value is `None`, the port of the
    /// SSH configuration is used, otherwise 22.
    pub port: Option<u16>,
    /// The file of the private key. If this value is `None`, the keys of the SSH configuration, of
    /// the SSH agent and the default keys are used.
    pub key: Option<PathBuf>,
    /// The SSH configuration that is read.
    pub config: SshConfig,
    /// Which host keys are accepted.
    pub known_hosts: KnownHosts,
    /// The jump host, as `[user@]host[:port]`. If this value is `None`, the jump host of the SSH
    /// configuration is used, if any.
    pub jump: Option<String>,
    /// The time limit for each step of connecting, in milliseconds.
    pub connect_timeout_ms: u64,
    /// The number of SSH connections that are set up at the same time.
    #[serde(rename = "parallel")]
    pub fanout: u32,
}

/// `cluster.ssh.config`: the SSH configuration that is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SshConfig {
    /// The configuration files of the user and of the system.
    #[serde(rename = "Usual")]
    Default,
    /// No configuration file.
    None,
    /// Only the configuration file at this path.
    File(PathBuf),
}

/// `cluster.ssh.known_hosts`: which host keys an SSH connection accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KnownHosts {
    /// Only keys that known_hosts contains.
    Strict,
    /// Keys that known_hosts contains, and the key of a host without an entry in known_hosts. The
    /// new key is then added to known_hosts.
    AcceptNew,
}

/// `cluster.workers_per_host`: the number of workers on each host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkersPerHost {
    /// One worker per GPU that the job uses (`workers_per_gpu` per GPU in built-in training), or
    /// one worker on CPUs.
    Auto,
    /// This number of workers on each host.
    Exactly(u32),
}

/// `cluster.devices`: the devices on which the workers compute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceSelection {
    /// For programs: the GPUs of the host, if there are any. For built-in training: the CPU.
    Auto,
    /// The CPU. Workers cannot see the host's GPUs.
    Cpu,
    /// All GPUs of the host. A host without a GPU is an error.
    Cuda,
    /// The GPUs with these numbers. The list is not empty and has no duplicates.
    List(Vec<u32>),
}

/// `cluster.comm_backend`: the backend that transfers GPU buffers between built-in workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommBackend {
    /// [`CommBackend::Nccl`] if there are several workers and each has its own GPU. Otherwise
    /// [`CommBackend::Host`].
    Auto,
    /// NVIDIA's library NCCL.
    Nccl,
    /// Host memory between workers on one host, and TCP between hosts.
    Host,
}

/// `cluster.master_port`: the choice of the rendezvous port (`MASTER_PORT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MasterPort {
    /// Any port that is free on the host of rank 0.
    Auto,
    /// The port with this number.
    Fixed(u16),
}

/// `cluster.store`: the process that serves the rendezvous store (torch's `TCPStore`) of a
/// program's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreHost {
    /// The agent of the first host, which binds the port before any rank starts.
    Agent,
    /// Rank 0 of the program, which binds a port that was free when the run started.
    Rank0,
}
