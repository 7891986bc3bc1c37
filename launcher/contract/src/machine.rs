//! The cores and GPUs of a machine, which an agent discovers and the controller plans with.
use serde::{Deserialize, Serialize};

/// The cores that may be used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Sorted by NUMA node, then by first CPU.
    pub cores: Vec<Core>,
}

/// A physical core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Core {
    /// The hardware threads that may be used, ascending; never empty.
    pub cpus: Vec<u32>,
    /// The number of its NUMA node.
    pub numa_node: u32,
}

impl Topology {
    /// A topology in which each CPU is a core and all are on NUMA node 0. Assumed where the real
    /// one is unknown.
    pub fn flat(cpus: &[u32]) -> Topology {
        Topology { cores: cpus.iter().map(|cpu| Core { cpus: vec![*cpu], numa_node: 0 }).collect() }
    }

    /// Whether the cores consist of exactly these CPUs, each once. Checked because a peer may send
    /// anything.
    pub fn covers(&self, cpus: &[u32]) -> bool {
        let mut core_cpus: Vec<u32> = self.cores.iter().flat_map(|core| core.cpus.iter().copied()).collect();
        core_cpus.sort_unstable();
        core_cpus == cpus && self.cores.iter().all(|core| !core.cpus.is_empty() && core.cpus.is_sorted())
    }
}

/// A GPU of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The vendor whose driver lists it.
    pub vendor: GpuVendor,
    /// The address on the PCI bus, e.g. `0000:17:00.0`, if known.
    pub bus: Option<String>,
    /// The identifier `GPU-…`, if known.
    pub uuid: Option<String>,
    /// The NUMA node that it is attached to, if known.
    pub numa_node: Option<u32>,
}

/// The vendor of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuVendor {
    /// NVIDIA, whose GPUs run CUDA.
    Nvidia,
    /// AMD, whose GPUs run ROCm.
    Amd,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topology_covers_exactly_the_cpus_of_its_cores() {
        let core = |cpus: &[u32]| Core { cpus: cpus.to_vec(), numa_node: 0 };
        let covers = |cores: Vec<Core>| Topology { cores }.covers(&[0, 1, 4]);
        assert!(covers(vec![core(&[0, 4]), core(&[1])]) && Topology::flat(&[0, 1, 4]).covers(&[0, 1, 4]));
        for wrong in
            [vec![], vec![core(&[0, 1])], vec![core(&[0, 1, 4]), core(&[])], vec![core(&[4, 0]), core(&[1])]]
        {
            assert!(!covers(wrong));
        }
        assert!(!covers(vec![core(&[0, 1, 4]), core(&[0])]), "a CPU twice");
    }
}
