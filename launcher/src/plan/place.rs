//! Which CPUs each worker of a node gets.
use crate::discover::Facts;
use contract::{job::Bind, machine::Core};
use std::collections::BTreeMap;

/// One worker's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// Ascending; empty: not bound.
    pub(super) cpus: Vec<u32>,
    pub(super) threads: u32,
}

/// A place for each of the workers; `near[i]` is the NUMA node of worker i's GPU.
///
/// Shares are equal and disjoint, so that no rank waits for a slower one and none takes another's cores; what doesn't
/// divide stays free. A time limit doesn't say which CPUs: the binding stays, the threads are fewer. An error says why
/// the binding that was asked for can't be had.
pub(super) fn slots(facts: &Facts, near: &[Option<u32>], bind: Bind) -> Result<Vec<Slot>, String> {
    let workers = near.len().max(1);
    let cores: Vec<&Core> = facts.topology.cores.iter().collect();
    let threads_of_all = (facts.cores().min(cores.len() as u32) / workers as u32).max(1);
    let unbound = vec![Slot { cpus: Vec::new(), threads: threads_of_all }; near.len()];
    let slots = match bind {
        Bind::None => return Ok(unbound),
        Bind::Numa => by_node(&cores, near),
        Bind::Auto if near.iter().all(Option::is_some) => by_node(&cores, near),
        Bind::Auto | Bind::Cores => by_core(&cores, near),
    };
    let limit = (facts.cores() / workers as u32).max(1);
    match slots {
        Some(slots) => Ok(slots.into_iter().map(|s| Slot { threads: s.threads.min(limit), ..s }).collect()),
        // The system shares better than a fixed split of too few.
        None if bind == Bind::Auto => Ok(vec![Slot { cpus: Vec::new(), threads: 1 }; near.len()]),
        None => Err(format!("{workers} workers can't be bound: only {} CPUs may be used", facts.cpus.len())),
    }
}

/// All cores of a node for each of its workers, which share them.
fn by_node(cores: &[&Core], near: &[Option<u32>]) -> Option<Vec<Slot>> {
    let nodes = nodes(cores);
    let places = places(&nodes, near);
    let slot = |worker: usize| {
        let cores: Vec<&Core> = places[worker].iter().flat_map(|node| nodes[node].iter().copied()).collect();
        let sharing = places.iter().filter(|place| **place == places[worker]).count();
        let threads = (cores.len() / sharing).max(1) as u32;
        (!cores.is_empty()).then(|| Slot { cpus: cpus(&cores), threads })
    };
    (0..near.len()).map(slot).collect()
}

/// Cores of its own for each worker, all on its GPU's node, or on one node where that doesn't cost more than a quarter of
/// them; single CPUs where there are fewer cores than workers.
fn by_core(cores: &[&Core], near: &[Option<u32>]) -> Option<Vec<Slot>> {
    let split: Vec<Core> = match cores.len() >= near.len() {
        true => cores.iter().map(|core| (*core).clone()).collect(),
        false => cores
            .iter()
            .flat_map(|core| core.cpus.iter().map(|cpu| Core { cpus: vec![*cpu], node: core.node }))
            .collect(),
    };
    let share = split.len() / near.len().max(1);
    if share == 0 {
        return None;
    }
    let units: Vec<&Core> = split.iter().collect();
    let has_gpu = near.iter().any(Option::is_some);
    let inside = inside_nodes(&units, near).filter(|s| has_gpu || s[0].len() * 4 >= share * 3);
    let shares = inside.unwrap_or_else(|| units.chunks(share).take(near.len()).map(<[_]>::to_vec).collect());
    let slot = |mine: Vec<&Core>| Slot { cpus: cpus(&mine), threads: mine.len() as u32 };
    Some(shares.into_iter().map(slot).collect())
}

/// Equal shares, none of which crosses the nodes of its worker.
fn inside_nodes<'c>(units: &[&'c Core], near: &[Option<u32>]) -> Option<Vec<Vec<&'c Core>>> {
    let nodes = nodes(units);
    let places = places(&nodes, near);
    let mut waiting: BTreeMap<&[u32], usize> = BTreeMap::new();
    places.iter().for_each(|place| *waiting.entry(place.as_slice()).or_default() += 1);
    let of_place = |place: &[u32]| place.iter().flat_map(|n| nodes[n].iter().copied()).collect::<Vec<_>>();
    let share = waiting.iter().map(|(place, workers)| of_place(place).len() / workers).min()?;
    if share == 0 {
        return None;
    }
    let mut given: BTreeMap<&[u32], usize> = BTreeMap::new();
    let mut shares = Vec::new();
    for place in &places {
        let taken = given.entry(place.as_slice()).or_default();
        shares.push(of_place(place)[*taken * share..][..share].to_vec());
        *taken += 1;
    }
    Some(shares)
}

fn nodes<'c>(cores: &[&'c Core]) -> BTreeMap<u32, Vec<&'c Core>> {
    let mut nodes: BTreeMap<u32, Vec<&Core>> = BTreeMap::new();
    cores.iter().for_each(|core| nodes.entry(core.node).or_default().push(core));
    nodes
}

/// The nodes of each worker, equal to another's or disjoint from it: its GPU's; where that isn't known, those that no GPU
/// has claimed, in equal parts, neighbours together, or else the one with the fewest workers.
fn places(nodes: &BTreeMap<u32, Vec<&Core>>, near: &[Option<u32>]) -> Vec<Vec<u32>> {
    let known = |near: &Option<u32>| near.filter(|node| nodes.contains_key(node));
    let mut waiting: BTreeMap<u32, usize> = nodes.keys().map(|node| (*node, 0)).collect();
    near.iter().filter_map(known).for_each(|node| *waiting.entry(node).or_default() += 1);
    let free: Vec<u32> =
        waiting.iter().filter(|(_, workers)| **workers == 0).map(|(node, _)| *node).collect();
    let unknown = near.iter().filter(|near| known(near).is_none()).count();
    let mut spread = (0..unknown).map(|worker| match free.len() / unknown {
        0 if free.is_empty() => {
            let least = waiting.iter_mut().min_by_key(|(_, workers)| **workers);
            least.map(|(node, workers)| (*node, *workers += 1).0).into_iter().collect()
        }
        0 => vec![free[worker * free.len() / unknown]],
        many => free[worker * many..][..many].to_vec(),
    });
    let place = |near| known(near).map(|node| vec![node]).or_else(|| spread.next()).unwrap_or_default();
    near.iter().map(place).collect()
}

fn cpus(cores: &[&Core]) -> Vec<u32> {
    let mut cpus: Vec<u32> = cores.iter().flat_map(|core| core.cpus.iter().copied()).collect();
    cpus.sort_unstable();
    cpus
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
