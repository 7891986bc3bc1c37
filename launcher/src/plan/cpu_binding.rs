//! [`assign_cpus`]: which CPUs each worker of a host is bound to.
use crate::{discover::Inventory, report::count};
use contract::{job::CpuBind, machine::Core};
use std::collections::BTreeMap;

/// The CPUs of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CpuSlot {
    /// CPU numbers in ascending order; empty: the worker is not bound.
    pub(super) cpus: Vec<u32>,
    /// Number of threads for `OMP_NUM_THREADS`.
    pub(super) threads: u32,
}

/// The host has fewer CPUs than workers that must be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot bind {} to {}", count(*workers as u64, "worker", "workers"), count(*cpus as u64, "CPU", "CPUs"))]
pub(super) struct TooFewCpus {
    pub(super) workers: usize,
    pub(super) cpus: usize,
}

/// The CPUs of each worker; `gpu_nodes[i]` is the NUMA node of worker i's GPU.
///
/// Shares are equal and disjoint, so that no rank waits for a slower one or uses another's cores;
/// CPUs that cannot be divided equally stay free. A limit on CPU time lowers the number of threads
/// and leaves the binding unchanged.
pub(super) fn assign_cpus(
    inventory: &Inventory,
    gpu_nodes: &[Option<u32>],
    bind: CpuBind,
) -> Result<Vec<CpuSlot>, TooFewCpus> {
    let workers = gpu_nodes.len().max(1);
    let cores: Vec<&Core> = inventory.topology.cores.iter().collect();
    let equal_threads = (inventory.cores().min(cores.len() as u32) / workers as u32).max(1);
    let unbound = vec![CpuSlot { cpus: Vec::new(), threads: equal_threads }; gpu_nodes.len()];
    let slots = match bind {
        CpuBind::None => return Ok(unbound),
        CpuBind::Numa => bind_to_numa_nodes(&cores, gpu_nodes),
        CpuBind::Auto if gpu_nodes.iter().all(Option::is_some) => bind_to_numa_nodes(&cores, gpu_nodes),
        CpuBind::Auto | CpuBind::Cores => bind_to_cores(&cores, gpu_nodes),
    };
    let limit = (inventory.cores() / workers as u32).max(1);
    match slots {
        Some(slots) => {
            Ok(slots.into_iter().map(|s| CpuSlot { threads: s.threads.min(limit), ..s }).collect())
        }
        // The scheduler balances better than a fixed split of too few CPUs.
        None if bind == CpuBind::Auto => Ok(vec![CpuSlot { cpus: Vec::new(), threads: 1 }; gpu_nodes.len()]),
        None => Err(TooFewCpus { workers, cpus: inventory.cpus.len() }),
    }
}

/// Binds each worker to all cores of a NUMA node, which its workers share.
fn bind_to_numa_nodes(cores: &[&Core], gpu_nodes: &[Option<u32>]) -> Option<Vec<CpuSlot>> {
    let nodes = cores_by_node(cores);
    let assigned = assign_nodes(&nodes, gpu_nodes);
    let slot = |worker: usize| {
        let cores: Vec<&Core> =
            assigned[worker].iter().flat_map(|node| nodes[node].iter().copied()).collect();
        let sharing = assigned.iter().filter(|other| **other == assigned[worker]).count();
        let threads = (cores.len() / sharing).max(1) as u32;
        (!cores.is_empty()).then(|| CpuSlot { cpus: cpus_of_cores(&cores), threads })
    };
    (0..gpu_nodes.len()).map(slot).collect()
}

/// Binds each worker to separate cores: on the NUMA node of its GPU, or on one node where that
/// costs at most a quarter of them; to single CPUs where there are fewer cores than workers.
fn bind_to_cores(cores: &[&Core], gpu_nodes: &[Option<u32>]) -> Option<Vec<CpuSlot>> {
    let split: Vec<Core> = match cores.len() >= gpu_nodes.len() {
        true => cores.iter().map(|core| (*core).clone()).collect(),
        false => cores
            .iter()
            .flat_map(|core| core.cpus.iter().map(|cpu| Core { cpus: vec![*cpu], numa_node: core.numa_node }))
            .collect(),
    };
    let share = split.len() / gpu_nodes.len().max(1);
    if share == 0 {
        return None;
    }
    let units: Vec<&Core> = split.iter().collect();
    let has_gpu = gpu_nodes.iter().any(Option::is_some);
    let within = shares_within_nodes(&units, gpu_nodes).filter(|s| has_gpu || s[0].len() * 4 >= share * 3);
    let shares =
        within.unwrap_or_else(|| units.chunks(share).take(gpu_nodes.len()).map(<[_]>::to_vec).collect());
    let slot = |cores: Vec<&Core>| CpuSlot { cpus: cpus_of_cores(&cores), threads: cores.len() as u32 };
    Some(shares.into_iter().map(slot).collect())
}

/// Equal shares of cores, each within the NUMA nodes of its worker.
fn shares_within_nodes<'c>(units: &[&'c Core], gpu_nodes: &[Option<u32>]) -> Option<Vec<Vec<&'c Core>>> {
    let nodes = cores_by_node(units);
    let assigned = assign_nodes(&nodes, gpu_nodes);
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

fn cores_by_node<'c>(cores: &[&'c Core]) -> BTreeMap<u32, Vec<&'c Core>> {
    let mut nodes: BTreeMap<u32, Vec<&Core>> = BTreeMap::new();
    cores.iter().for_each(|core| nodes.entry(core.numa_node).or_default().push(core));
    nodes
}

/// The NUMA nodes of each worker; two workers have equal or disjoint nodes. A worker gets the node
/// of its GPU. Workers without a known node get equal parts of the nodes that no GPU is on,
/// neighbours together, or else the node with the fewest workers.
fn assign_nodes(nodes: &BTreeMap<u32, Vec<&Core>>, gpu_nodes: &[Option<u32>]) -> Vec<Vec<u32>> {
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

fn cpus_of_cores(cores: &[&Core]) -> Vec<u32> {
    let mut cpus: Vec<u32> = cores.iter().flat_map(|core| core.cpus.iter().copied()).collect();
    cpus.sort_unstable();
    cpus
}

#[cfg(test)]
#[path = "cpu_binding_tests.rs"]
mod tests;
