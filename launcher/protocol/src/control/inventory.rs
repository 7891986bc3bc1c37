//! [`HostInventory`]: the hardware of a host (CPUs, memory, network, accelerators), and those of
//! its environment variables that affect workers, such as `CUDA_VISIBLE_DEVICES`.
use crate::hardware::{Accelerator, CpuTopology};
use jobspec::env::{is_device_variable, is_interface_variable};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The hardware of one machine (CPUs, memory, network, accelerators), and those of its environment
/// variables that affect workers, such as `CUDA_VISIBLE_DEVICES`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostInventory {
    /// The hostname, which is displayed but never resolved to an address.
    pub host: String,
    /// The numbers of the CPUs on which an agent may run, in ascending order; empty if not known
    /// yet.
    pub cpus: Vec<u32>,
    /// The CPU time limit of the agent's control group, as a number of CPUs; `None` without a
    /// limit.
    pub quota: Option<f64>,
    /// The usable host memory, in bytes: the memory of the machine, or the limit of the control
    /// group if it is lower; 0 if unknown.
    pub memory: u64,
    /// The addresses of the network interfaces that are up, including the loopback; empty if not
    /// known yet.
    pub addresses: Vec<InterfaceAddress>,
    /// The address at which the controller reached the host, as sshd states it in `SSH_CONNECTION`;
    /// `None` without SSH.
    #[serde(default)]
    pub reached_address: Option<IpAddr>,
    /// The size of /dev/shm, in bytes; 0 if /dev/shm does not exist or the size is unknown.
    pub shm: u64,
    /// The physical cores of the CPUs in `cpus`.
    pub topology: CpuTopology,
    /// The accelerators of the host that the agent may use. Those of one kind are in the order in
    /// which their runtime numbers them.
    #[serde(rename = "gpus")]
    pub accelerators: Vec<Accelerator>,
    /// The number of accelerators that exist on the host, but that permissions or a control group
    /// deny to the agent.
    #[serde(default)]
    pub denied_accelerators: u32,
    /// Whether the host has a device that may compute for programs, and whose kind launch cannot
    /// select, such as a TPU.
    #[serde(default)]
    pub has_other_devices: bool,
    /// Environment variables that workers inherit. The report of an agent contains only the
    /// variables of [`jobspec::env::DEVICE_VARIABLES`] and [`jobspec::env::INTERFACE_VARIABLES`]
    /// that are set on its host. In the controller, the inventory also contains the variables of
    /// [`jobspec::env::USER_OVERRIDABLE_VARIABLES`] that the user has set.
    #[serde(rename = "visible_devices")]
    pub inherited_env: Vec<(String, String)>,
}

impl HostInventory {
    /// Creates an inventory that contains only the hostname, for a machine whose hardware is not
    /// known.
    pub fn unknown(host: &str) -> HostInventory {
        HostInventory { host: host.to_owned(), ..HostInventory::default() }
    }

    /// Returns whether nothing is known about the machine except its hostname, because no agent has
    /// reported its hardware yet.
    pub fn is_unknown(&self) -> bool {
        self.cpus.is_empty()
    }

    /// Returns the inventory with only those environment variables that select devices or network
    /// interfaces, because other variables of a host are not sent to the controller.
    pub fn without_unreported_env(mut self) -> HostInventory {
        self.inherited_env.retain(|(name, _)| is_device_variable(name) || is_interface_variable(name));
        self
    }

    /// Creates the inventory of a host from the `report` of its agent, which is validated, and from
    /// `user_env`, the controller's own variables. A topology that does not match the CPUs is
    /// replaced by one core per CPU. The variables in `user_env` replace those of the report. Only
    /// the variables that select devices and network interfaces are taken from the report.
    pub fn from_report(report: HostInventory, user_env: &[(String, String)]) -> HostInventory {
        let mut inventory = report.without_unreported_env();
        inventory.cpus.sort_unstable();
        inventory.cpus.dedup();
        if !inventory.topology.covers_exactly(&inventory.cpus) {
            inventory.topology = CpuTopology::with_one_core_per_cpu(&inventory.cpus);
        }
        let from_user = user_env.iter().filter(|(name, _)| !is_device_variable(name)).cloned();
        inventory.inherited_env.splice(..0, from_user);
        inventory
    }

    /// Returns how many threads can run on the host at the same time: the number of CPUs, or the
    /// limit on CPU time if it is lower. The limit is rounded down to whole CPUs, but to at least
    /// 1.
    pub fn usable_cpu_count(&self) -> u32 {
        let cpus = self.cpus.len() as u32;
        self.quota.map_or(cpus, |quota| cpus.min(quota.floor().max(1.0) as u32))
    }
}

/// An IP address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceAddress {
    /// The name of the interface, e.g. `eth0`.
    pub interface: String,
    /// The IP address.
    pub address: IpAddr,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::CpuCore;

    #[test]
    fn an_inventory_round_trips_and_visible_gpus_are_those_of_the_host() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let gpu = Accelerator { numa_node: Some(1), ..Accelerator::default() };
        let variables = vec![pair("OMP_NUM_THREADS", "3"), pair("CUDA_VISIBLE_DEVICES", "1")];
        let topology = CpuTopology { cores: vec![CpuCore { cpus: vec![0, 2], numa_node: 1 }] };
        let remote = HostInventory {
            host: "remote".into(),
            cpus: vec![0, 2],
            topology,
            accelerators: vec![gpu],
            inherited_env: variables,
            ..HostInventory::default()
        };
        let user_env = [pair("OMP_NUM_THREADS", "7"), pair("CUDA_VISIBLE_DEVICES", "0,1")];
        let received = HostInventory::from_report(remote.clone().without_unreported_env(), &user_env);
        let inherited_env = vec![pair("OMP_NUM_THREADS", "7"), pair("CUDA_VISIBLE_DEVICES", "1")];
        assert_eq!(received, HostInventory { inherited_env, ..remote.clone() });
        let odd = HostInventory {
            cpus: vec![2, 5, 2],
            inherited_env: vec![pair("LD_PRELOAD", "x")],
            ..remote.without_unreported_env()
        };
        let received = HostInventory::from_report(odd, &[]);
        assert_eq!(
            (received.topology, received.inherited_env),
            (CpuTopology::with_one_core_per_cpu(&[2, 5]), vec![])
        );
    }
}
