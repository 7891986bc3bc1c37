//! The messages between `launch check --network` and agents about network interfaces, RDMA devices,
//! and the speed of connections between hosts.
use crate::control::JobSecretKey;
use diagnostic::Diagnostic;
use jobspec::{InterfaceSelector, PortSelection};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

/// The largest number of TCP ports per host over which `launch check --network` measures the
/// connections between hosts. Of a larger range, evenly spaced ports are used.
pub const MAX_MEASURED_PORTS: usize = 4;
/// The longest duration of a transfer that `launch check --network` measures, in one direction, in
/// milliseconds. A longer time in a request is reduced to this value.
pub const MAX_TRANSFER_MS: u64 = 10_000;
/// The largest number of parallel TCP connections over which one measurement of `launch check
/// --network` transfers data.
pub const MAX_STREAMS: u32 = 4;

/// The request by which `launch check --network` makes an agent inspect its host's network and
/// listen for measurements by other agents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkRequest {
    /// The secret with which the agents prove to each other that they belong to the job.
    pub key: JobSecretKey,
    /// `cluster.interface`, which selects the address at which the agent listens.
    pub interface: InterfaceSelector,
    /// Whether the address at which the controller reached the host is preferred, as for workers.
    pub prefers_reached_address: bool,
    /// The ports of which the agent takes up to [`MAX_MEASURED_PORTS`] to listen.
    pub ports: PortSelection,
}

/// What an agent reports to `launch check --network` about the network of its host, including where
/// it accepts measurements by other agents.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NetworkInspection {
    /// The interface that workers use for other hosts; `None` if no interface is suitable.
    pub interface: Option<NetworkInterface>,
    /// The addresses at which the agent accepts measurements, one for each port.
    pub listeners: Vec<SocketAddr>,
    /// The error because of which the agent does not listen.
    pub error: Option<Diagnostic>,
    /// The InfiniBand, RoCE and EFA devices of the host.
    pub rdma: RdmaReport,
}

/// The interface and the address through which the workers of a host reach other hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkInterface {
    /// The name of the interface, e.g. `eth0`.
    pub name: String,
    /// The address of the interface that was selected.
    pub address: IpAddr,
    /// The largest packet in bytes (MTU); `None` if unknown.
    pub mtu: Option<u32>,
    /// The speed of the link in Mb/s; `None` if unknown, as for most virtual interfaces.
    pub speed_mbps: Option<u32>,
    /// `full` or `half`; `None` if unknown.
    pub duplex: Option<String>,
    /// The driver of the device; `None` for virtual interfaces.
    pub driver: Option<String>,
    /// The counters of errors since the interface was created that are not 0, by name.
    pub error_counters: BTreeMap<String, u64>,
}

/// The InfiniBand, RoCE and EFA devices of a host, as `launch check --network` found them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RdmaReport {
    /// The devices, ordered by name.
    pub devices: Vec<RdmaDevice>,
    /// The number of device nodes `/dev/infiniband/uverbsN`.
    pub verbs_nodes: u32,
    /// The first device node that the agent cannot open, with the error.
    pub denied_node: Option<String>,
    /// The limit of locked memory in bytes; `None` for no limit.
    pub locked_memory: Option<u64>,
}

/// A device for remote direct memory access, as the kernel lists it in `/sys/class/infiniband`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RdmaDevice {
    /// The name, e.g. `mlx5_0`.
    pub name: String,
    /// The driver, e.g. `mlx5_core` or `efa`; `None` if unknown.
    pub driver: Option<String>,
    /// The ports, ordered by number.
    pub ports: Vec<RdmaPort>,
}

/// A port of an RDMA device (InfiniBand, RoCE or EFA) with its state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RdmaPort {
    /// The number of the port, from 1.
    pub number: u32,
    /// The logical state, e.g. `ACTIVE` or `INIT`.
    pub state: String,
    /// The physical state, e.g. `LinkUp` or `Polling`.
    pub physical_state: String,
    /// The rate as the kernel states it, e.g. `200 Gb/sec (4X HDR)`.
    pub rate: String,
    /// `InfiniBand`, or `Ethernet` for RoCE; EFA reports `Unspecified`.
    pub link_layer: String,
    /// The number of addresses (GIDs) of each type, e.g. `RoCE v2`.
    pub gid_types: BTreeMap<String, u32>,
    /// The error counters that are not 0, by name.
    pub error_counters: BTreeMap<String, u64>,
}

/// A request of `launch check --network` that an agent measure the connection to the agent of
/// another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasureRequest {
    /// The addresses at which the other agent listens. At most [`MAX_MEASURED_PORTS`] are used.
    pub addresses: Vec<SocketAddr>,
    /// The time limit for each connection, in milliseconds.
    pub timeout_ms: u64,
    /// How long data are sent in each direction, in milliseconds; 0 to test only whether the
    /// other host is reachable.
    pub transfer_ms: u64,
    /// The number of connections that transfer data at the same time.
    pub streams: u32,
}

/// What an agent measured about the connection to the agent of another host: reachability,
/// round-trip time, and transfers in both directions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// For each requested address, the error of connecting to it, or the time in milliseconds.
    pub connections: Vec<diagnostic::Result<f64>>,
    /// The shortest round trip of a small message, in milliseconds; `None` without a connection.
    pub round_trip_ms: Option<f64>,
    /// The transfer to the other host; `None` if it was not requested or not possible.
    pub sent: Option<Transfer>,
    /// The transfer from the other host; `None` if it was not requested or not possible.
    pub received: Option<Transfer>,
}

/// The bytes, duration and retransmitted TCP segments of one measured transfer in one direction
/// between two hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// The number of bytes that the receiver got.
    pub bytes: u64,
    /// The time from the first to the last byte at the receiver, in seconds.
    pub seconds: f64,
    /// The number of TCP segments that were sent again; `None` if unknown.
    pub retransmits: Option<u64>,
    /// The approximate number of TCP segments; `None` if unknown.
    pub segments: Option<u64>,
    /// If no data arrived: whether data in small segments arrive. `None` if this was not tested.
    pub small_segments_arrive: Option<bool>,
}

impl Transfer {
    /// Returns the rate of the transfer in bytes per second; 0 if no data arrived.
    pub fn bytes_per_second(&self) -> f64 {
        if self.bytes > 0 && self.seconds > 0.0 { self.bytes as f64 / self.seconds } else { 0.0 }
    }
}
