//! [`assign_cpus`]: assigns the CPUs of a host to the workers on this host, by the policy in
//! `run.cpu_bind` (cores, NUMA nodes or none).
use diagnostic::quantity::format_count;
use jobspec::CpuBind;
use protocol::{control::HostInventory, hardware::CpuCore};
use std::collections::BTreeMap;

/// The CPUs to which one worker is bound, and the number of threads that it should use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkerCpus {
    /// The numbers of the CPUs, in ascending order; empty if the worker is not bound.
    pub(super) cpus: Vec<u32>,
    /// The number of threads of the worker (`OMP_NUM_THREADS`), at least 1.
    pub(super) threads: u32,
}

/// The error that a host has too few CPUs to bind each of its workers to separate CPUs, as the job
/// requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot bind {} to {}", format_count(*workers, "worker"), format_count(*cpus, "CPU"))]
pub(super) struct TooFewCpus {
    pub(super) workers: usize,
    pub(super) cpus: usize,
}

/// Assigns CPUs of a host to each of its workers, by the policy `bind` (cores, NUMA nodes or none)
/// that the job requests. `gpu_nodes[i]` is the NUMA node of the GPU of worker `i`; `None` if
/// unknown or without a GPU. The number of workers is the length of `gpu_nodes`.
///
/// With [`CpuBind::Cores`], shares are equal and disjoint, so that no rank waits for a slower one
/// or uses another's cores. CPUs that cannot be divided equally stay free. With [`CpuBind::Numa`],
/// workers of one NUMA node share its CPUs. A limit on CPU time lowers the number of threads, but
/// does not change the binding.
pub(super) fn assign_cpus(
    inventory: &HostInventory,
    gpu_nodes: &[Option<u32>],
    bind: CpuBind,
) -> Result<Vec<WorkerCpus>, TooFewCpus> {
    let workers = gpu_nodes.len().max(1);
    let cores: Vec<&CpuCore> = inventory.topology.cores.iter().collect();
    let equal_threads = (inventory.usable_cpu_count().min(cores.len() as u32) / workers as u32).max(1);
    let unbound = vec![WorkerCpus { cpus: Vec::new(), threads: equal_threads }; gpu_nodes.len()];
    let slots = match bind {
        CpuBind::None => return Ok(unbound),
        CpuBind::Numa => bind_to_numa_nodes(&cores, gpu_nodes),
        CpuBind::Auto if gpu_nodes.iter().all(Option::is_some) => bind_to_numa_nodes(&cores, gpu_nodes),
        CpuBind::Auto | CpuBind::Cores => bind_to_cores(&cores, gpu_nodes),
    };
    let limit = (inventory.usable_cpu_count() / workers as u32).max(1);
    match slots {
        Some(slots) => {
            Ok(slots.into_iter().map(|s| WorkerCpus { threads: s.threads.min(limit), ..s }).collect())
        }
        // The scheduler balances better than a fixed split of too few CPUs.
        None if bind == CpuBind::Auto => {
            Ok(vec![WorkerCpus { cpus: Vec::new(), threads: 1 }; gpu_nodes.len()])
        }
        None => Err(TooFewCpus { workers, cpus: inventory.cpus.len() }),
    }
}

/// Binds each worker of a host to all CPU cores of the NUMA nodes that are assigned to it, such as
/// the node of its GPU. Workers on the same nodes share the cores. Returns `None` if a worker would
/// have no cores.
fn bind_to_numa_nodes(cores: &[&CpuCore], gpu_nodes: &[Option<u32>]) -> Option<Vec<WorkerCpus>> {
    let nodes = group_cores_by_node(cores);
    let assigned = assign_numa_nodes(&nodes, gpu_nodes);
    let slot = |worker: usize| {
        let cores: Vec<&CpuCore> =
            assigned[worker].iter().flat_map(|node| nodes[node].iter().copied()).collect();
        let sharing = assigned.iter().filter(|other| **other == assigned[worker]).count();
        let threads = (cores.len() / sharing).max(1) as u32;
        (!cores.is_empty()).then(|| WorkerCpus { cpus: collect_cpus(&cores), threads })
    };
    (0..gpu_nodes.len()).map(slot).collect()
}

/// Assigns to each worker separate cores, or separate CPUs if there are fewer cores than workers.
/// Returns `None` if there are fewer CPUs than workers.
///
/// The cores of a worker are on the NUMA node of its GPU. Without GPUs, the cores of a worker are
/// on one node if this makes the shares at most a quarter smaller.
fn bind_to_cores(cores: &[&CpuCore], gpu_nodes: &[Option<u32>]) -> Option<Vec<WorkerCpus>> {
    let split: Vec<CpuCore> = match cores.len() >= gpu_nodes.len() {
        true => cores.iter().map(|core| (*core).clone()).collect(),
        false => cores
            .iter()
            .flat_map(|core| {
                core.cpus.iter().map(|cpu| CpuCore { cpus: vec![*cpu], numa_node: core.numa_node })
            })
            .collect(),
    };
    let share = split.len() / gpu_nodes.len().max(1);
    if share == 0 {
        return None;
    }
    let units: Vec<&CpuCore> = split.iter().collect();
    let has_gpu = gpu_nodes.iter().any(Option::is_some);
    let within =
        divide_cores_within_nodes(&units, gpu_nodes).filter(|s| has_gpu || s[0].len() * 4 >= share * 3);
    let shares =
        within.unwrap_or_else(|| units.chunks(share).take(gpu_nodes.len()).map(<[_]>::to_vec).collect());
    let slot = |cores: Vec<&CpuCore>| WorkerCpus { cpus: collect_cpus(&cores), threads: cores.len() as u32 };
    Some(shares.into_iter().map(slot).collect())
}

/// Gives each worker of a host an equal number of separate CPU cores, from the NUMA nodes that are
/// assigned to this worker. Returns `None` if a share would be empty.
fn divide_cores_within_nodes<'c>(
    units: &[&'c CpuCore],
    gpu_nodes: &[Option<u32>],
) -> Option<Vec<Vec<&'c CpuCore>>> {
    let nodes = group_cores_by_node(units);
    let assigned = assign_numa_nodes(&nodes, gpu_nodes);
    let mut workers_by_nodes: BTreeMap<&[u32], usize> = BTreeMap::new();
    assigned.iter().for_each(|nodes| *workers_by_nodes.entry(nodes.as_slice()).or_default() += 1);
    let cores_of =
        |numbers: &[u32]| numbers.iter().flat_map(|n| nodes[n].iter().copied()).collect::<Vec<_>>();
    let share = workers_by_nodes.iter().map(|(nodes, workers)| cores_of(nodes).len() / workers).min()?;
    if share == 0 {
        return None;
    }
    let mut taken_by_nodes: BTreeMap<&[u32], usize> = BTreeMap::new();
    let mut shares = Vec::new();
    for nodes in &assigned {
        let taken = taken_by_nodes.entry(nodes.as_slice()).or_default();
        shares.push(cores_of(nodes)[*taken * share..][..share].to_vec());
        *taken += 1;
    }
    Some(shares)
}

/// Groups the CPU cores `cores` by the NUMA node to which they belong. Returns a map from the
/// number of a node to its cores.
fn group_cores_by_node<'c>(cores: &[&'c CpuCore]) -> BTreeMap<u32, Vec<&'c CpuCore>> {
    let mut nodes: BTreeMap<u32, Vec<&CpuCore>> = BTreeMap::new();
    cores.iter().for_each(|core| nodes.entry(core.numa_node).or_default().push(core));
    nodes
}

/// Chooses for each worker of a host the NUMA nodes whose CPUs it gets. Two workers have either the
/// same nodes or no node in common.
///
/// A worker gets the node of its GPU. Workers without a known GPU node get equal shares of the
/// nodes without a GPU, where each share consists of neighbouring nodes. If every node has a GPU,
/// each of these workers gets the node that has the fewest workers so far.
fn assign_numa_nodes(nodes: &BTreeMap<u32, Vec<&CpuCore>>, gpu_nodes: &[Option<u32>]) -> Vec<Vec<u32>> {
    let known = |gpu_node: &Option<u32>| gpu_node.filter(|node| nodes.contains_key(node));
    let mut workers: BTreeMap<u32, usize> = nodes.keys().map(|node| (*node, 0)).collect();
    gpu_nodes.iter().filter_map(known).for_each(|node| *workers.entry(node).or_default() += 1);
    let free: Vec<u32> = workers.iter().filter(|(_, count)| **count == 0).map(|(node, _)| *node).collect();
    let unknown = gpu_nodes.iter().filter(|gpu_node| known(gpu_node).is_none()).count();
    let mut spread = (0..unknown).map(|worker| match free.len() / unknown {
        0 if free.is_empty() => {
            let least = workers.iter_mut().min_by_key(|(_, count)| **count);
            least.map(|(node, count)| (*node, *count += 1).0).into_iter().collect()
        }
        0 => vec![free[worker * free.len() / unknown]],
        several => free[worker * several..][..several].to_vec(),
    });
    let assign =
        |gpu_node| known(gpu_node).map(|node| vec![node]).or_else(|| spread.next()).unwrap_or_default();
    gpu_nodes.iter().map(assign).collect()
}

/// Returns the numbers of the CPUs that the cores `cores` consist of, in ascending order.
fn collect_cpus(cores: &[&CpuCore]) -> Vec<u32> {
    let mut cpus: Vec<u32> = cores.iter().flat_map(|core| core.cpus.iter().copied()).collect();
    cpus.sort_unstable();
    cpus
}

#[cfg(test)]
#[path = "cpu_binding_tests.rs"]
mod tests;
