//! Map from ranks to hosts ([`RankHostMap`]), which determines which other hosts store a copy of a
//! rank's training state in memory.
use std::{collections::BTreeSet, ops::Range};

/// Map from ranks to hosts, which determines which other hosts store a copy of a rank's training
/// state in memory. Hosts have the order of their ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankHostMap {
    hosts: Vec<Range<usize>>,
}

impl RankHostMap {
    /// Creates the map from ranks to hosts from the local rank of each rank. A local rank of 0
    /// marks the first rank of a host.
    pub(super) fn from_local_ranks(local_ranks: impl Iterator<Item = u64>) -> RankHostMap {
        let mut hosts: Vec<Range<usize>> = Vec::new();
        for (rank, local_rank) in local_ranks.enumerate() {
            match hosts.last_mut() {
                Some(host) if local_rank > 0 => host.end = rank + 1,
                _ => hosts.push(rank..rank + 1),
            }
        }
        RankHostMap { hosts }
    }

    /// Returns the lowest rank of each host, ordered by host.
    pub(super) fn list_host_leaders(&self) -> impl Iterator<Item = usize> {
        self.hosts.iter().map(|ranks| ranks.start)
    }

    /// Returns whether `rank` is the lowest rank of its host.
    pub(super) fn is_leader(&self, rank: usize) -> bool {
        self.list_host_leaders().any(|leader| leader == rank)
    }

    /// Returns the index of the host on which `rank` runs.
    pub(super) fn host_of(&self, rank: usize) -> usize {
        self.hosts.partition_point(|ranks| ranks.end <= rank)
    }

    /// Lists all ranks that run on the hosts with the indices `hosts`.
    pub(super) fn list_ranks_on_hosts(&self, hosts: &[usize]) -> Vec<usize> {
        hosts.iter().filter_map(|host| self.hosts.get(*host)).flat_map(|ranks| ranks.clone()).collect()
    }

    /// Lists the ranks on other hosts that store a copy of the training state of `rank` in memory,
    /// one rank per host.
    pub(super) fn list_keepers(&self, rank: usize, copies: usize) -> Vec<usize> {
        let host = self.host_of(rank);
        let Some(ranks) = self.hosts.get(host) else { return Vec::new() };
        let local_rank = rank - ranks.start;
        let others = copies.min(self.hosts.len() - 1);
        let keeper = |distance: usize| {
            let ranks = &self.hosts[(host + distance) % self.hosts.len()];
            ranks.start + local_rank % ranks.len()
        };
        (1..=others).map(keeper).collect()
    }

    /// Lists the ranks whose training state the host with the index `host` stores in memory: the
    /// host's ranks, and ranks of other hosts as their backup.
    pub(super) fn list_kept_ranks(&self, host: usize, copies: usize) -> BTreeSet<usize> {
        let local = self.hosts.get(host).cloned().unwrap_or_default();
        let world = self.hosts.last().map_or(0, |ranks| ranks.end);
        let is_kept = |rank: &usize| {
            local.contains(rank)
                || self.list_keepers(*rank, copies).iter().any(|keeper| local.contains(keeper))
        };
        (0..world).filter(is_kept).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_kept_by_counterparts_on_the_next_hosts() {
        let map = RankHostMap::from_local_ranks([0, 1, 0, 1, 0, 1].into_iter());
        assert_eq!(map.hosts, [0..2, 2..4, 4..6]);
        assert_eq!(map.list_host_leaders().collect::<Vec<_>>(), [0, 2, 4]);
        assert_eq!([0, 1, 5].map(|rank| map.host_of(rank)), [0, 0, 2]);
        assert_eq!([0, 3, 5].map(|rank| map.list_keepers(rank, 1)), [vec![2], vec![5], vec![1]]);
        assert_eq!(map.list_keepers(4, 2), [0, 2]);
        assert_eq!(map.list_keepers(4, 8), [0, 2], "each host keeps one copy at most");
        assert_eq!(map.list_kept_ranks(0, 1), BTreeSet::from([0, 1, 4, 5]));
    }

    #[test]
    fn hosts_with_fewer_workers_keep_several_copies() {
        let map = RankHostMap::from_local_ranks([0, 1, 2, 0].into_iter());
        let keepers: Vec<Vec<usize>> = (0..4).map(|rank| map.list_keepers(rank, 1)).collect();
        assert_eq!(keepers, [vec![3], vec![3], vec![3], vec![0]]);
        assert_eq!(map.list_kept_ranks(1, 1), (0..4).collect());
    }

    #[test]
    fn one_host_has_no_other_host_for_copies() {
        let map = RankHostMap::from_local_ranks([0, 1].into_iter());
        assert!(map.list_keepers(1, 1).is_empty());
        assert_eq!(map.list_kept_ranks(0, 1), BTreeSet::from([0, 1]));
    }
}
