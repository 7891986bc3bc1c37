//! Reads the CPU cores and NUMA nodes of this machine from /sys.
use super::cpu_list::parse_cpu_list;
use protocol::hardware::{CpuCore, CpuTopology};
use std::{collections::BTreeMap, fs, path::Path};

/// The largest number of CPUs of a machine whose cores and NUMA nodes are read. Further CPUs are
/// ignored.
const MAX_CPUS: usize = 16_384;

/// Groups the CPUs that this process may use (`allowed`) by physical core and NUMA node, from the
/// files in `/sys` below the directory `root`. A CPU whose files cannot be read becomes a core of
/// NUMA node 0.
pub(super) fn read_topology(root: &Path, allowed: &[u32]) -> CpuTopology {
    let nodes = read_numa_node_by_cpu(root);
    let mut cores: BTreeMap<(u32, u32), Vec<u32>> = BTreeMap::new();
    for &cpu in allowed.iter().take(MAX_CPUS) {
        let siblings = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = fs::read_to_string(root.join(siblings)).ok();
        let siblings = siblings.and_then(|text| parse_cpu_list(text.trim()));
        // The first hardware thread identifies the core, even where it is not allowed.
        let core = siblings.filter(|threads| threads.contains(&cpu)).map_or(cpu, |threads| threads[0]);
        cores.entry((nodes.get(&cpu).copied().unwrap_or(0), core)).or_default().push(cpu);
    }
    CpuTopology {
        cores: cores.into_iter().map(|((node, _), cpus)| CpuCore { cpus, numa_node: node }).collect(),
    }
}

/// Returns the only NUMA node of the CPUs `cpus`, or `None` if the CPUs belong to several nodes or
/// the machine has a single node.
pub(crate) fn find_common_numa_node(cpus: &[u32]) -> Option<u32> {
    find_common_numa_node_in_root(Path::new("/"), cpus)
}

/// Returns the NUMA node to which all CPUs `cpus` belong, on the machine whose /sys is below the
/// root directory `root`.
fn find_common_numa_node_in_root(root: &Path, cpus: &[u32]) -> Option<u32> {
    let nodes = read_numa_node_by_cpu(root);
    let several = nodes.values().any(|node| Some(node) != nodes.values().next());
    let first = *nodes.get(cpus.first()?)?;
    (several && cpus.iter().all(|cpu| nodes.get(cpu) == Some(&first))).then_some(first)
}

/// Reads, for each CPU of the machine whose root directory is `root`, the number of its NUMA node.
fn read_numa_node_by_cpu(root: &Path) -> BTreeMap<u32, u32> {
    let mut nodes = BTreeMap::new();
    let Ok(entries) = fs::read_dir(root.join("sys/devices/system/node")) else { return nodes };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|n| n.strip_prefix("node")?.parse::<u32>().ok());
        let list = fs::read_to_string(entry.path().join("cpulist")).ok();
        let (Some(number), Some(cpus)) = (number, list.and_then(|l| parse_cpu_list(l.trim()))) else {
            continue;
        };
        nodes.extend(cpus.into_iter().map(|cpu| (cpu, number)));
    }
    nodes
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Writes files below `root` that look like /sys of a machine with `nodes` NUMA nodes. Each
    /// node has `cores` cores of `threads` hardware threads. CPUs are numbered as Linux numbers
    /// them: the first threads of all cores come first.
    pub(crate) fn write_machine(root: &Path, nodes: u32, cores: u32, threads: u32) {
        let total = nodes * cores;
        let write = |path: String, text: String| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
            fs::write(path, text).expect("file");
        };
        for node in 0..nodes {
            let of_thread =
                |t: u32| format!("{}-{}", t * total + node * cores, t * total + node * cores + cores - 1);
            let list: Vec<String> = (0..threads).map(of_thread).collect();
            write(format!("sys/devices/system/node/node{node}/cpulist"), format!("{}\n", list.join(",")));
        }
        for core in 0..total {
            let siblings: Vec<String> = (0..threads).map(|t| (t * total + core).to_string()).collect();
            for cpu in &siblings {
                let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
                write(path, siblings.join(","));
            }
        }
    }

    #[test]
    fn hardware_threads_are_grouped_by_core_and_node() {
        let root = tempfile::tempdir().expect("directory");
        write_machine(root.path(), 2, 4, 2);
        let allowed: Vec<u32> = (0..16).collect();
        let cores = read_topology(root.path(), &allowed).cores;
        assert_eq!(cores.len(), 8);
        assert_eq!(cores[0], CpuCore { cpus: vec![0, 8], numa_node: 0 });
        assert_eq!(cores[7], CpuCore { cpus: vec![7, 15], numa_node: 1 });
        // A container that may use one thread of some cores and both threads of another.
        let cores = read_topology(root.path(), &[2, 3, 4, 9, 12]).cores;
        let expected = [(vec![9], 0), (vec![2], 0), (vec![3], 0), (vec![4, 12], 1)];
        assert_eq!(cores, expected.map(|(cpus, numa_node)| CpuCore { cpus, numa_node }));
    }

    #[test]
    fn an_unreadable_topology_is_flat() {
        let root = tempfile::tempdir().expect("directory");
        assert_eq!(read_topology(root.path(), &[1, 5]), CpuTopology::with_one_core_per_cpu(&[1, 5]));
        write_machine(root.path(), 1, 2, 1);
        fs::write(
            root.path().join("sys/devices/system/cpu/cpu1/topology/thread_siblings_list"),
            "0-99999999",
        )
        .expect("file");
        fs::write(root.path().join("sys/devices/system/node/node0/cpulist"), "x").expect("file");
        assert_eq!(read_topology(root.path(), &[0, 1]), CpuTopology::with_one_core_per_cpu(&[0, 1]));
    }

    #[test]
    fn the_numa_node_of_a_binding_is_found() {
        let root = tempfile::tempdir().expect("directory");
        write_machine(root.path(), 2, 2, 1);
        let node = |cpus: &[u32]| find_common_numa_node_in_root(root.path(), cpus);
        assert_eq!(
            [node(&[0, 1]), node(&[3]), node(&[1, 2]), node(&[]), node(&[9])],
            [Some(0), Some(1), None, None, None]
        );
        let one = tempfile::tempdir().expect("directory");
        write_machine(one.path(), 1, 4, 1);
        assert_eq!(find_common_numa_node_in_root(one.path(), &[0]), None, "a single node is no choice");
    }
}
