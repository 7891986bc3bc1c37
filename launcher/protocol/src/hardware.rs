//! The CPU cores and accelerators of a host. The agent discovers them, and the controller plans
//! with them.
use jobspec::AcceleratorKind;
use serde::{Deserialize, Serialize};

/// The CPU cores of a host that a job may use, each with its hardware threads and its NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTopology {
    /// The cores, sorted by NUMA node and then by their first CPU.
    pub cores: Vec<CpuCore>,
}

/// A physical CPU core, with its hardware threads and its NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuCore {
    /// The kernel's numbers of those hardware threads of the core that may be used. They are
    /// ascending, and there is at least one.
    pub cpus: Vec<u32>,
    /// The number of the core's NUMA node.
    pub numa_node: u32,
}

impl CpuTopology {
    /// Creates a topology in which each CPU (hardware thread) is a separate core of NUMA node 0,
    /// for a host whose topology is unknown or not valid.
    pub fn with_one_core_per_cpu(cpus: &[u32]) -> CpuTopology {
        CpuTopology { cores: cpus.iter().map(|cpu| CpuCore { cpus: vec![*cpu], numa_node: 0 }).collect() }
    }

    /// Returns whether every CPU (hardware thread) in `cpus` belongs to exactly one core of this
    /// topology, and whether the cores contain no other CPUs. The caller must pass `cpus` in
    /// ascending order without duplicates. The controller calls this function because the inventory
    /// that an agent reports is untrusted input.
    pub fn covers_exactly(&self, cpus: &[u32]) -> bool {
        let mut core_cpus: Vec<u32> = self.cores.iter().flat_map(|core| core.cpus.iter().copied()).collect();
        core_cpus.sort_unstable();
        core_cpus == cpus && self.cores.iter().all(|core| !core.cpus.is_empty() && core.cpus.is_sorted())
    }
}

/// An accelerator of a host, that is, a GPU or another device that computes for workers. Its
/// properties come from files below `/proc`, `/sys` and `/dev`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accelerator {
    /// The kind of the accelerator, which decides the environment variable that selects it.
    #[serde(rename = "vendor")]
    pub kind: AcceleratorKind,
    /// The address on the PCI bus, e.g. `0000:17:00.0`; `None` if unknown.
    pub bus: Option<String>,
    /// The UUID, which begins with `GPU-` or `MIG-`; `None` if unknown.
    pub uuid: Option<String>,
    /// The number of the NUMA node that the accelerator is attached to; `None` if unknown.
    pub numa_node: Option<u32>,
    /// The number of the accelerator in the environment variable of its kind, if the runtime does
    /// not number the visible accelerators from 0; `None` for the position in the inventory.
    #[serde(default)]
    pub number: Option<u32>,
}

/// Returns the kinds (such as `cuda`) of the accelerators, each once and in ascending order.
pub fn list_accelerator_kinds(accelerators: &[Accelerator]) -> Vec<AcceleratorKind> {
    let mut kinds: Vec<AcceleratorKind> = accelerators.iter().map(|a| a.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

impl Accelerator {
    /// Creates an accelerator of the kind `kind`, with default values for all other properties.
    pub fn new(kind: AcceleratorKind) -> Accelerator {
        Accelerator { kind, ..Accelerator::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topology_covers_exactly_the_cpus_of_its_cores() {
        let core = |cpus: &[u32]| CpuCore { cpus: cpus.to_vec(), numa_node: 0 };
        let covers = |cores: Vec<CpuCore>| CpuTopology { cores }.covers_exactly(&[0, 1, 4]);
        assert!(
            covers(vec![core(&[0, 4]), core(&[1])])
                && CpuTopology::with_one_core_per_cpu(&[0, 1, 4]).covers_exactly(&[0, 1, 4])
        );
        for wrong in
            [vec![], vec![core(&[0, 1])], vec![core(&[0, 1, 4]), core(&[])], vec![core(&[4, 0]), core(&[1])]]
        {
            assert!(!covers(wrong));
        }
        assert!(!covers(vec![core(&[0, 1, 4]), core(&[0])]), "a CPU twice");
    }
}
