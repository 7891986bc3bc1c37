//! Discovers the CPUs, accelerators, memory and network interfaces of this machine, as the
//! operating system reports them.
mod accelerators;
mod cgroup;
mod cpu_list;
mod interface_addresses;
pub mod local_host;
mod network_interfaces;
mod rdma;
mod reachable_addresses;
pub(crate) mod topology;

pub(crate) use cgroup::{read_memory_usage, read_oom_kill_count, read_throttled_us};
pub(crate) use interface_addresses::list_interface_addresses;
pub(crate) use network_interfaces::inspect_interface;
pub(crate) use rdma::inspect_rdma;
pub(crate) use reachable_addresses::{find_reachable_addresses, sort_and_limit_addresses};
