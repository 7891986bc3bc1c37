//! Determines which training states can be restored from the memory of hosts, namely those with a
//! copy of every rank's shard. Every rank computes the same selection from the reports of all
//! hosts.
use ckpt::{Hash, memory_store::MemoryCopyId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What one host reports to the others about a memory copy that it has: the step and number of the
/// copy, the rank, and a hash.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ReportedCopy {
    pub(super) id: MemoryCopyId,
    pub(super) rank: u32,
    /// The hash of the copy's description.
    pub(super) hash: Hash,
}

/// Message to all other hosts in which one host lists the memory copies of training states that it
/// stores.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct HostCopies {
    pub(super) copies: Vec<ReportedCopy>,
    /// The ranks of copies that are incomplete or damaged.
    pub(super) incomplete: Vec<u32>,
}

/// A training state that can be restored because hosts have memory copies of all ranks' shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) struct CompleteState {
    pub(in crate::checkpoint) id: MemoryCopyId,
    /// For each rank, the indices of the hosts that have its copy.
    pub(super) holders: Vec<Vec<usize>>,
    /// For each rank, the hash of the description of its copy.
    hashes: Vec<Hash>,
}

impl CompleteState {
    /// Returns the hash of the memory copy of rank `rank`, as hosts have reported it, or `None` if
    /// the training state has no such rank.
    pub(super) fn find_copy_hash(&self, rank: u32) -> Option<Hash> {
        self.hashes.get(rank as usize).copied()
    }

    /// Lists the ranks whose memory copies the host with the index `host` must describe to all
    /// ranks, because no host with a lower index has these copies.
    pub(super) fn list_ranks_described_by(&self, host: usize) -> Vec<u32> {
        (0..self.id.world).filter(|rank| self.holders[*rank as usize].first() == Some(&host)).collect()
    }
}

/// The step of a training state that cannot be restored from the memory of hosts, with the reason,
/// such as a missing copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) struct UnusableState {
    pub(in crate::checkpoint) step: u64,
    pub(in crate::checkpoint) reason: String,
}

/// The training states in the memory of hosts, divided into those that can be restored and those
/// that cannot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::checkpoint) struct StateSelection {
    /// The complete states, newest first.
    pub(in crate::checkpoint) complete: Vec<CompleteState>,
    /// The other states, newest first.
    pub(in crate::checkpoint) unusable: Vec<UnusableState>,
}

/// Determines which training states can be restored from memory, given the list of memory copies
/// that each host reports.
///
/// If hosts have different copies of a rank, those of the first host count.
pub(super) fn select_states(hosts: &[HostCopies]) -> StateSelection {
    let mut states: BTreeMap<MemoryCopyId, BTreeMap<u32, (Hash, Vec<usize>)>> = BTreeMap::new();
    for (host, report) in hosts.iter().enumerate() {
        for copy in report.copies.iter().filter(|copy| copy.rank < copy.id.world) {
            let ranks = states.entry(copy.id).or_default();
            let (hash, holders) = ranks.entry(copy.rank).or_insert((copy.hash, Vec::new()));
            if *hash == copy.hash && holders.last() != Some(&host) {
                holders.push(host);
            }
        }
    }
    let incomplete: BTreeSet<u32> =
        hosts.iter().flat_map(|report| report.incomplete.iter().copied()).collect();
    let mut selection = StateSelection::default();
    for (id, ranks) in states.into_iter().rev() {
        match (0..id.world).find(|rank| !ranks.contains_key(rank)) {
            None => {
                let (hashes, holders) = ranks.into_values().unzip();
                selection.complete.push(CompleteState { id, holders, hashes });
            }
            Some(rank) => {
                let step = id.step;
                let reason = match incomplete.contains(&rank) {
                    true => format!("the copy of rank {rank} is incomplete"),
                    false => format!("no host has the copy of rank {rank}"),
                };
                selection.unusable.push(UnusableState { step, reason });
            }
        }
    }
    selection
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The identity of the copies of a step, in a job of two ranks.
    fn make_id(step: u64, attempt: u32) -> MemoryCopyId {
        MemoryCopyId { step, sequence: step, attempt, world: 2 }
    }

    /// Builds the report of a host with the copies `(rank, step, attempt)`. The hash of a copy
    /// depends only on these numbers.
    fn make_host(copies: &[(u32, u64, u32)], incomplete: &[u32]) -> HostCopies {
        let report = |&(rank, step, attempt): &(u32, u64, u32)| ReportedCopy {
            id: make_id(step, attempt),
            rank,
            hash: Hash::digest(format!("{rank} {step} {attempt}").as_bytes()),
        };
        HostCopies { copies: copies.iter().map(report).collect(), incomplete: incomplete.to_vec() }
    }

    /// Lists step, attempt and holders of the complete states, and step and reason of the others.
    #[track_caller]
    fn assert_selected(
        hosts: &[HostCopies],
        complete: &[(u64, u32, [&[usize]; 2])],
        unusable: &[(u64, &str)],
    ) {
        let selected = select_states(hosts);
        let found: Vec<_> =
            selected.complete.iter().map(|s| (s.id.step, s.id.attempt, s.holders.clone())).collect();
        let expected: Vec<_> = complete
            .iter()
            .map(|(step, attempt, holders)| (*step, *attempt, holders.iter().map(|h| h.to_vec()).collect()))
            .collect::<Vec<(u64, u32, Vec<Vec<usize>>)>>();
        assert_eq!(found, expected);
        let found: Vec<_> = selected.unusable.iter().map(|s| (s.step, s.reason.as_str())).collect();
        assert_eq!(found, unusable);
    }

    #[test]
    fn the_newest_state_of_all_ranks_comes_first() {
        let hosts = [make_host(&[(0, 7, 0), (0, 8, 0), (1, 7, 0), (1, 8, 0)], &[])];
        assert_selected(&hosts, &[(8, 0, [&[0], &[0]]), (7, 0, [&[0], &[0]])], &[]);
    }

    #[test]
    fn ranks_at_different_steps_have_the_older_step_in_common() {
        let hosts = [make_host(&[(0, 7, 0), (0, 8, 0), (1, 7, 0)], &[1])];
        assert_selected(&hosts, &[(7, 0, [&[0], &[0]])], &[(8, "the copy of rank 1 is incomplete")]);
        let hosts = [make_host(&[(0, 8, 0), (1, 7, 0)], &[])];
        let missing = [(8, "no host has the copy of rank 1"), (7, "no host has the copy of rank 0")];
        assert_selected(&hosts, &[], &missing);
    }

    #[test]
    fn copies_of_another_host_replace_those_of_a_lost_host() {
        let [a, b] = [make_host(&[(0, 8, 0), (1, 8, 0)], &[]), make_host(&[(1, 8, 0), (0, 8, 0)], &[])];
        assert_selected(&[a.clone(), b.clone()], &[(8, 0, [&[0, 1], &[0, 1]])], &[]);
        assert_selected(&[b], &[(8, 0, [&[0], &[0]])], &[]);
        let empty = HostCopies::default();
        assert_selected(&[empty.clone(), a], &[(8, 0, [&[1], &[1]])], &[]);
        assert_selected(&[empty], &[], &[]);
        let state = select_states(&[make_host(&[(0, 8, 0)], &[]), make_host(&[(0, 8, 0), (1, 8, 0)], &[])]);
        assert_eq!([0, 1].map(|host| state.complete[0].list_ranks_described_by(host)), [vec![0], vec![1]]);
    }

    #[test]
    fn copies_of_different_attempts_are_not_mixed() {
        let hosts = [make_host(&[(0, 8, 0), (1, 8, 1)], &[])];
        assert!(select_states(&hosts).complete.is_empty());
        assert_eq!(select_states(&hosts).unusable.len(), 2);
    }

    #[test]
    fn a_host_whose_copy_differs_does_not_count() {
        let good = make_host(&[(0, 8, 0), (1, 8, 0)], &[]);
        let mut other = good.clone();
        other.copies[1].hash = Hash::digest(b"other");
        assert_selected(&[good, other], &[(8, 0, [&[0, 1], &[0]])], &[]);
        let outside = ReportedCopy { id: make_id(9, 0), rank: 2, hash: Hash::digest(b"") };
        assert_selected(&[HostCopies { copies: vec![outside], incomplete: vec![] }], &[], &[]);
    }
}
