//! `cluster:` — where the job runs.
use serde::{Deserialize, Serialize};
use std::{net::IpAddr, path::PathBuf};

/// Where the job runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterSpec {
    pub hosts: Hosts,
    /// DeepSpeed's filters, as written: only these hosts and slots. Not beside `exclude`.
    pub include: Vec<String>,
    /// All but these.
    pub exclude: Vec<String>,
    pub ssh: SshSpec,
    /// How many of the hosts run workers, the first ones that can be had; the others are spares. `None`: all.
    pub use_hosts: Option<u32>,
    pub workers_per_host: Count,
    pub devices: Devices,
    /// Built-in workers that share a GPU.
    pub workers_per_gpu: u32,
    /// How buffers in GPU memory travel between built-in workers.
    pub collectives: Collectives,
    /// Folders in which CUDA's libraries are looked for first.
    pub cuda_libs: Vec<PathBuf>,
    pub master_port: MasterPort,
    pub store: StoreHost,
    pub interface: Interface,
}

/// Which of a host's addresses the built-in workers use between hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Interface {
    /// The address that the host is reached at by ssh, else the first that is no loopback address.
    Auto,
    /// An interface (`eth0`), or the network that the address is in (`10.1.0.0/16`).
    Named(String),
}

impl ClusterSpec {
    /// Do built-in workers compute on GPUs?
    pub fn trains_on_gpus(&self) -> bool {
        matches!(self.devices, Devices::Cuda | Devices::List(_))
    }
}

impl Interface {
    /// May an address of this interface be used?
    pub fn admits(&self, interface: &str, address: IpAddr) -> bool {
        match self {
            Interface::Auto => true,
            Interface::Named(wanted) => match wanted.split_once('/') {
                Some(network) => is_in(address, network),
                None => interface == wanted,
            },
        }
    }

    /// Is `text` the name of an interface, or a network? A network is an address, a slash and a prefix length.
    pub fn is_sound(text: &str) -> bool {
        match text.split_once('/') {
            Some((address, bits)) => {
                let most = address.parse().map(|a: IpAddr| if a.is_ipv4() { 32 } else { 128 });
                most.is_ok_and(|most: u8| bits.parse::<u8>().is_ok_and(|bits| bits <= most))
            }
            // as the kernel has it: at most 15 bytes, no spaces, no colon
            None => {
                (1..=15).contains(&text.len())
                    && !text.chars().any(|c| c.is_whitespace() || c.is_control() || c == ':')
            }
        }
    }
}

/// Is `address` in the network (address, prefix length)?
fn is_in(address: IpAddr, (network, bits): (&str, &str)) -> bool {
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

/// Which hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hosts {
    /// The nodes of the Slurm allocation that launch runs in, or else this machine.
    Auto,
    /// This machine.
    Local,
    /// The nodes of the Slurm allocation that launch runs in.
    Slurm,
    /// These, as written: each is what [`crate::hosts::parse_hosts`] reads.
    List(Vec<String>),
    /// Those of this hostfile.
    File(PathBuf),
}

/// How other hosts are reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshSpec {
    /// Where neither the host nor the SSH configuration says; `None`: this user.
    pub user: Option<String>,
    pub port: Option<u16>,
    /// A private key; `None`: the SSH configuration's, the agent's, and the usual ones.
    pub key: Option<PathBuf>,
    pub config: SshConfig,
    pub known_hosts: KnownHosts,
    /// `[user@]host[:port]` through which the hosts are reached.
    pub jump: Option<String>,
    /// For each step of getting connected, milliseconds.
    pub connect_timeout_ms: u64,
    /// Hosts that are being connected to at once.
    pub parallel: u32,
}

/// Which SSH configuration is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SshConfig {
    /// The user's and the system's.
    Usual,
    None,
    /// This file alone.
    File(PathBuf),
}

/// What a host must show to be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KnownHosts {
    /// A key that known_hosts has.
    Strict,
    /// That, or any key where known_hosts has none, which is then written there.
    AcceptNew,
}

/// A number, or as many as there are devices (on CPU: 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Count {
    Auto,
    Exactly(u32),
}

/// Which devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Devices {
    /// GPUs for programs where they are found, else CPU.
    Auto,
    /// GPUs are hidden from the workers.
    Cpu,
    /// Every GPU that is found; at least one.
    Cuda,
    /// These GPUs, by number, each once; at least one.
    List(Vec<u32>),
}

/// What moves buffers in GPU memory between built-in workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Collectives {
    /// NCCL where each of several workers has a GPU of its own, else by way of the host.
    Auto,
    Nccl,
    /// By way of the host's memory and network.
    Host,
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
