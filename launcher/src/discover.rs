//! [`Inventory`]: the CPUs, GPUs, memory and network interfaces of a machine, read from the system.
mod cgroup;
mod gpus;
pub(crate) mod hosts;
pub mod local;
pub mod slurm;
pub(crate) mod topology;

pub(crate) use cgroup::oom_kills;

use contract::{
    control::{HostInventory, InterfaceAddress},
    env::VISIBLE_DEVICES,
    machine::{Gpu, Topology},
};

/// What was discovered about one machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// The host name.
    pub host: String,
    /// The CPUs that an agent may run on, ascending; empty: not known yet.
    pub cpus: Vec<u32>,
    /// The limit on CPU time of the control group, in CPUs; `None`: no limit.
    pub quota: Option<f64>,
    /// Usable memory in bytes: the machine's, or the limit of the control group; 0: unknown.
    pub memory: u64,
    /// The addresses of the network interfaces; empty: not known yet.
    pub addresses: Vec<InterfaceAddress>,
    /// The size of /dev/shm in bytes; 0: none or unknown.
    pub shm: u64,
    /// The cores of these CPUs.
    pub topology: Topology,
    /// The GPUs, by number.
    pub gpus: Vec<Gpu>,
    /// The variables of [`contract::env::USERS_CHOICE`] that the user has set, and those of
    /// [`VISIBLE_DEVICES`] that are set on this machine.
    pub inherited_env: Vec<(String, String)>,
}

impl Inventory {
    /// The inventory of a machine of which only the name is known.
    pub fn unknown(host: &str) -> Inventory {
        Inventory { host: host.to_owned(), ..Inventory::default() }
    }

    /// Whether no agent has reported about the machine yet.
    pub fn is_unknown(&self) -> bool {
        self.cpus.is_empty()
    }

    /// The inventory that an agent reports. `user_env` has the variables that the user has set in
    /// the controller's environment.
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
        if !topology.covers(&cpus) {
            topology = Topology::flat(&cpus);
        }
        // The visible GPUs are those of the host, not of the controller.
        let from_user = user_env.iter().filter(|(name, _)| !is_device_variable(name)).cloned();
        let of_host = visible_devices.into_iter().filter(|(name, _)| is_device_variable(name));
        let inherited_env = from_user.chain(of_host).collect();
        Inventory { host, cpus, quota, memory, addresses, shm, topology, gpus, inherited_env }
    }

    /// The inventory in the form in which an agent reports it.
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

    /// The number of threads that can run at once: CPUs, or fewer with a limit on CPU time.
    pub fn cores(&self) -> u32 {
        let cpus = self.cpus.len() as u32;
        self.quota.map_or(cpus, |quota| cpus.min(quota.floor().max(1.0) as u32))
    }
}

fn is_device_variable(name: &str) -> bool {
    VISIBLE_DEVICES.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::machine::{Core, GpuVendor};

    #[test]
    fn an_inventory_round_trips_and_visible_gpus_are_those_of_the_host() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let gpu = Gpu { vendor: GpuVendor::Nvidia, bus: None, uuid: None, numa_node: Some(1) };
        let variables = vec![pair("OMP_NUM_THREADS", "3"), pair("CUDA_VISIBLE_DEVICES", "1")];
        let topology = Topology { cores: vec![Core { cpus: vec![0, 2], numa_node: 1 }] };
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
        assert_eq!((received.topology, received.inherited_env), (Topology::flat(&[2, 5]), vec![]));
    }
}
