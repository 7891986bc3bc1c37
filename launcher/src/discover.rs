//! [`Inventory`]: the CPUs, GPUs, memory and network interfaces of a machine, as the operating
//! system reports them.
mod cgroup;
mod cpu_list;
mod gpus;
mod host_name;
pub mod local;
pub(crate) mod topology;

pub(crate) use cgroup::read_oom_kill_count;
pub(crate) use host_name::read_host_name;

use jobspec::env::VISIBLE_DEVICES;
use protocol::{
    control::{HostInventory, InterfaceAddress},
    hardware::{CpuTopology, GpuDevice},
};

/// The hardware and environment of one machine, as discovered by an agent or by the controller.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// The hostname of the machine.
    pub host: String,
    /// The numbers of the CPUs that an agent may run on, in ascending order; empty if not known
    /// yet.
    pub cpus: Vec<u32>,
    /// The CPU time limit of the agent's control group, as a number of CPUs; `None` without a
    /// limit.
    pub quota: Option<f64>,
    /// The usable host memory, in bytes: the memory of the machine, or the limit of the control
    /// group if it is lower; 0 if unknown.
    pub memory: u64,
    /// The addresses of the network interfaces; empty if not known yet.
    pub addresses: Vec<InterfaceAddress>,
    /// The size of /dev/shm, in bytes; 0 if /dev/shm does not exist or the size is unknown.
    pub shm: u64,
    /// The physical cores of the CPUs in `cpus`.
    pub topology: CpuTopology,
    /// The GPUs of the machine, ordered by their device number.
    pub gpus: Vec<GpuDevice>,
    /// The variables of [`jobspec::env::USER_OVERRIDABLE`] that the user has set, and the
    /// variables of [`VISIBLE_DEVICES`] that are set on this machine. Each has its value.
    pub inherited_env: Vec<(String, String)>,
}

impl Inventory {
    /// Creates the inventory of a machine of which only the name is known.
    pub fn unknown(host: &str) -> Inventory {
        Inventory { host: host.to_owned(), ..Inventory::default() }
    }

    /// Returns whether the inventory contains only the name, because no agent has reported it yet.
    pub fn is_unknown(&self) -> bool {
        self.cpus.is_empty()
    }

    /// Converts the report of an agent to an inventory. A topology that does not match the CPUs is
    /// replaced by one core per CPU. `inherited_env` of the result gets the variables in
    /// `user_env`, which are from the controller's environment. Only the variables of
    /// [`VISIBLE_DEVICES`] are taken from the report instead.
    pub fn from_agent(reported: HostInventory, user_env: &[(String, String)]) -> Inventory {
        let HostInventory {
            host,
            mut cpus,
            quota,
            memory,
            addresses,
            shm,
            mut topology,
            gpus,
            visible_devices,
        } = reported;
        cpus.sort_unstable();
        cpus.dedup();
        if !topology.covers_exactly(&cpus) {
            topology = CpuTopology::with_one_core_per_cpu(&cpus);
        }
        // The host's variables of visible GPUs apply, not those of the controller.
        let from_user = user_env.iter().filter(|(name, _)| !is_device_variable(name)).cloned();
        let of_host = visible_devices.into_iter().filter(|(name, _)| is_device_variable(name));
        let inherited_env = from_user.chain(of_host).collect();
        Inventory { host, cpus, quota, memory, addresses, shm, topology, gpus, inherited_env }
    }

    /// Converts the inventory to the form in which an agent reports it to the controller.
    pub fn into_host_inventory(self) -> HostInventory {
        let Inventory {
            host,
            cpus,
            quota,
            memory,
            addresses,
            shm,
            topology,
            gpus,
            inherited_env: mut visible_devices,
        } = self;
        visible_devices.retain(|(name, _)| is_device_variable(name));
        HostInventory { host, cpus, quota, memory, addresses, shm, topology, gpus, visible_devices }
    }

    /// Returns how many threads can run at the same time: the number of CPUs, or the limit on CPU
    /// time if it is lower. The limit is rounded down to whole CPUs, but to at least 1.
    pub fn usable_cpus(&self) -> u32 {
        let cpus = self.cpus.len() as u32;
        self.quota.map_or(cpus, |quota| cpus.min(quota.floor().max(1.0) as u32))
    }
}

/// Returns whether the environment variable `name` restricts which GPUs a process sees.
/// `run.pass_env` never passes such variables, because the user or the plan sets them.
pub(crate) fn is_device_variable(name: &str) -> bool {
    VISIBLE_DEVICES.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::hardware::{CpuCore, GpuVendor};

    #[test]
    fn an_inventory_round_trips_and_visible_gpus_are_those_of_the_host() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let gpu = GpuDevice { vendor: GpuVendor::Nvidia, bus: None, uuid: None, numa_node: Some(1) };
        let variables = vec![pair("OMP_NUM_THREADS", "3"), pair("CUDA_VISIBLE_DEVICES", "1")];
        let topology = CpuTopology { cores: vec![CpuCore { cpus: vec![0, 2], numa_node: 1 }] };
        let remote = Inventory {
            host: "remote".into(),
            cpus: vec![0, 2],
            topology,
            gpus: vec![gpu],
            inherited_env: variables,
            ..Inventory::default()
        };
        let user_env = [pair("OMP_NUM_THREADS", "7"), pair("CUDA_VISIBLE_DEVICES", "0,1")];
        let received = Inventory::from_agent(remote.clone().into_host_inventory(), &user_env);
        let inherited_env = vec![pair("OMP_NUM_THREADS", "7"), pair("CUDA_VISIBLE_DEVICES", "1")];
        assert_eq!(received, Inventory { inherited_env, ..remote.clone() });
        let odd = HostInventory {
            cpus: vec![2, 5, 2],
            visible_devices: vec![pair("LD_PRELOAD", "x")],
            ..remote.into_host_inventory()
        };
        let received = Inventory::from_agent(odd, &[]);
        assert_eq!(
            (received.topology, received.inherited_env),
            (CpuTopology::with_one_core_per_cpu(&[2, 5]), vec![])
        );
    }
}
