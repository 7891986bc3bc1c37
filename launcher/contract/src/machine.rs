//! What a machine is made of: cores, and GPUs. Found by an agent, planned with by its controller.
use serde::{Deserialize, Serialize};

/// The cores that may be used, by NUMA node and then by their first CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    pub cores: Vec<Core>,
}

/// A physical core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Core {
    /// Its hardware threads that may be used, ascending; never empty.
    pub cpus: Vec<u32>,
    /// Its NUMA node's number.
    pub node: u32,
}

impl Topology {
    /// Each CPU a core of its own, all on one node: what is assumed where nothing can be read.
    pub fn flat(cpus: &[u32]) -> Topology {
        Topology { cores: cpus.iter().map(|cpu| Core { cpus: vec![*cpu], node: 0 }).collect() }
    }

    /// Whether these are the CPUs of the cores, each once: what was sent may say anything.
    pub fn is_of(&self, cpus: &[u32]) -> bool {
        let mut own: Vec<u32> = self.cores.iter().flat_map(|core| core.cpus.iter().copied()).collect();
        own.sort_unstable();
        own == cpus && self.cores.iter().all(|core| !core.cpus.is_empty() && core.cpus.is_sorted())
    }
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    pub maker: Maker,
    /// Its address on the PCI bus, `0000:17:00.0`, where that is known.
    pub bus: Option<String>,
    /// `GPU-…`, where that is known.
    pub uuid: Option<String>,
    /// The NUMA node it is attached to, where that is known.
    pub node: Option<u32>,
}

/// Whose driver lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Maker {
    Nvidia,
    Amd,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_that_are_not_of_the_machine() {
        let core = |cpus: &[u32]| Core { cpus: cpus.to_vec(), node: 0 };
        let of = |cores: Vec<Core>| Topology { cores }.is_of(&[0, 1, 4]);
        assert!(of(vec![core(&[0, 4]), core(&[1])]) && Topology::flat(&[0, 1, 4]).is_of(&[0, 1, 4]));
        for wrong in
            [vec![], vec![core(&[0, 1])], vec![core(&[0, 1, 4]), core(&[])], vec![core(&[4, 0]), core(&[1])]]
        {
            assert!(!of(wrong));
        }
        assert!(!of(vec![core(&[0, 1, 4]), core(&[0])]), "a CPU twice");
    }
}
