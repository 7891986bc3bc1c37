//! Which CPUs each worker of a node gets.
use crate::discover::Facts;

/// One worker's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// Empty: not bound.
    pub(super) cpus: Vec<u32>,
    pub(super) threads: u32,
}

/// An equal, contiguous share of the CPUs for each of `workers`; what doesn't divide stays free, so that no rank waits
/// for a slower one. With more workers than CPUs none is bound: the system shares better than a fixed split.
pub(super) fn cpu_slots(facts: &Facts, workers: u32) -> Vec<Slot> {
    let share = facts.cpus.len() / workers as usize;
    if share == 0 {
        return vec![Slot { cpus: Vec::new(), threads: 1 }; workers as usize];
    }
    // A time limit doesn't say which CPUs: the binding stays, the threads are fewer.
    let threads = (facts.cores() / workers).clamp(1, share as u32);
    facts.cpus.chunks(share).take(workers as usize).map(|c| Slot { cpus: c.to_vec(), threads }).collect()
}
