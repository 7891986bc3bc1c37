//! Facts: what the machines are, found out and not assumed.
mod cgroup;
mod gpus;
pub(crate) mod hosts;
pub mod local;
pub mod slurm;
pub(crate) mod topology;

pub(crate) use cgroup::oom_kills;

use contract::{
    control::{Address, HostInventory},
    env::VISIBLE_DEVICES,
    machine::{Gpu, Topology},
};

/// What is known of one machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    pub host: String,
    /// The CPUs an agent may run on, ascending; empty: not known yet.
    pub cpus: Vec<u32>,
    /// CPUs' worth of time that the control group grants, when it limits it.
    pub quota: Option<f64>,
    /// Memory that may be used, bytes: the machine's or the control group's limit; 0: unknown.
    pub memory: u64,
    /// Numeric addresses of its interfaces; empty: not known yet.
    pub addresses: Vec<Address>,
    /// Size of /dev/shm, bytes; 0: none or unknown.
    pub shm: u64,
    /// The cores that those CPUs make.
    pub topology: Topology,
    /// By number.
    pub gpus: Vec<Gpu>,
    /// What the user's environment has of [`contract::env::USERS_CHOICE`], and the machine's own of [`VISIBLE_DEVICES`].
    pub chosen: Vec<(String, String)>,
}

impl Facts {
    /// A machine of which only the name is known.
    pub fn promised(host: &str) -> Facts {
        Facts { host: host.to_owned(), ..Facts::default() }
    }

    /// Nobody has looked at the machine yet.
    pub fn is_promised(&self) -> bool {
        self.cpus.is_empty()
    }

    /// What an agent found, with the choices of the user's environment (which is that of the controller).
    pub fn of_agent(found: HostInventory, chosen: &[(String, String)]) -> Facts {
        let HostInventory { host, mut cpus, quota, memory, addresses, shm, mut topology, gpus, visible } = found;
        cpus.sort_unstable();
        cpus.dedup();
        if !topology.is_of(&cpus) {
            topology = Topology::flat(&cpus);
        }
        // Which GPUs are visible is each host's own.
        let users = chosen.iter().filter(|(name, _)| !is_device_variable(name)).cloned();
        let chosen = users.chain(visible.into_iter().filter(|(name, _)| is_device_variable(name))).collect();
        Facts { host, cpus, quota, memory, addresses, shm, topology, gpus, chosen }
    }

    /// As an agent tells them.
    pub fn found(self) -> HostInventory {
        let Facts { host, cpus, quota, memory, addresses, shm, topology, gpus, mut chosen } = self;
        chosen.retain(|(name, _)| is_device_variable(name));
        HostInventory { host, cpus, quota, memory, addresses, shm, topology, gpus, visible: chosen }
    }

    /// Threads that can run at once: CPUs, or fewer when time is limited.
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
    use contract::machine::{Core, Maker};

    #[test]
    fn facts_travel_and_each_host_says_which_gpus_are_visible() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let gpu = Gpu { maker: Maker::Nvidia, bus: None, uuid: None, node: Some(1) };
        let own = vec![pair("OMP_NUM_THREADS", "3"), pair("CUDA_VISIBLE_DEVICES", "1")];
        let topology = Topology { cores: vec![Core { cpus: vec![0, 2], node: 1 }] };
        let there = Facts {
            host: "there".into(),
            cpus: vec![0, 2],
            topology,
            gpus: vec![gpu],
            chosen: own.clone(),
            ..Facts::default()
        };
        let here = [pair("OMP_NUM_THREADS", "7"), pair("CUDA_VISIBLE_DEVICES", "0,1")];
        let found = Facts::of_agent(there.clone().found(), &here);
        let chosen = vec![pair("OMP_NUM_THREADS", "7"), pair("CUDA_VISIBLE_DEVICES", "1")];
        assert_eq!(found, Facts { chosen, ..there.clone() });
        let odd = HostInventory { cpus: vec![2, 5, 2], visible: vec![pair("LD_PRELOAD", "x")], ..there.found() };
        let found = Facts::of_agent(odd, &[]);
        assert_eq!((found.topology, found.chosen), (Topology::flat(&[2, 5]), vec![]));
    }
}
