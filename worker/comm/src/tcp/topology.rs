//! [`Topology`]: which ranks run on which host, and which rank of each host receives data from
//! other hosts and shares it with its host.
//!
//! Each rank has a *counterpart* on every other host: the rank whose local rank is the same, modulo
//! the number of ranks of that host. Data that every rank needs is sent once to each other host, to
//! the counterpart there, which shares it with its host. So all ranks of a host use the network at
//! the same time, even if the hosts have different numbers of ranks.
use crate::GroupError;

/// The host of every rank in a group, together with the rank and the host of this process.
#[derive(Clone, Debug)]
pub(crate) struct Topology {
    pub(crate) rank: usize,
    /// Index of this rank's host in `host_ranks`.
    host: usize,
    /// For each rank of the group: its local rank, which is the position among the ranks of its
    /// host.
    local_rank_of: Vec<usize>,
    /// For each rank of the group: the index of its host in `host_ranks`.
    pub(crate) host_by_rank: Vec<usize>,
    /// For each host: its ranks, in ascending order.
    host_ranks: Vec<Vec<usize>>,
}

impl Topology {
    /// Creates the topology of a group for the rank `rank` from `hosts`, the host of every rank.
    /// `hosts[r]` is a number that identifies the host of rank r. Fails if the number of ranks or
    /// the rank is out of range.
    pub(crate) fn new(rank: usize, hosts: &[usize]) -> Result<Self, GroupError> {
        let world = hosts.len();
        if !(1..=crate::MAX_WORLD_SIZE).contains(&world) {
            return Err(GroupError::WorldSize { world, limit: crate::MAX_WORLD_SIZE });
        }
        if rank >= world {
            return Err(GroupError::RankOutOfRange { rank, world });
        }
        let mut ids: Vec<usize> = Vec::new();
        let mut host_ranks: Vec<Vec<usize>> = Vec::new();
        let (mut local_rank_of, mut host_by_rank) = (Vec::with_capacity(world), Vec::with_capacity(world));
        for (r, id) in hosts.iter().enumerate() {
            let host = ids.iter().position(|known| known == id).unwrap_or_else(|| {
                ids.push(*id);
                host_ranks.push(Vec::new());
                ids.len() - 1
            });
            local_rank_of.push(host_ranks[host].len());
            host_by_rank.push(host);
            host_ranks[host].push(r);
        }
        Ok(Topology { rank, host: host_by_rank[rank], local_rank_of, host_by_rank, host_ranks })
    }

    /// Returns the number of ranks in the group.
    pub(crate) fn world_size(&self) -> usize {
        self.host_by_rank.len()
    }

    /// Returns the ranks of this host, in ascending order.
    pub(crate) fn local_ranks(&self) -> &[usize] {
        &self.host_ranks[self.host]
    }

    /// Returns the local rank of this rank: its position among the ranks of its host.
    pub(crate) fn local_rank(&self) -> usize {
        self.local_rank_of[self.rank]
    }

    /// Returns whether `rank` is on this host.
    pub(crate) fn is_local(&self, rank: usize) -> bool {
        self.host_by_rank[rank] == self.host
    }

    /// Returns all ranks on other hosts, starting with the first one after this rank and wrapping
    /// around at the last rank. With this order, ranks do not all send to the same rank first.
    pub(crate) fn remote_ranks(&self) -> impl Iterator<Item = usize> + '_ {
        let (me, world) = (self.rank, self.world_size());
        (1..world).map(move |i| (me + i) % world).filter(|r| !self.is_local(*r))
    }

    /// Returns the one rank on `host` that receives data from `rank` on behalf of all ranks of
    /// `host`, so that the data crosses the network only once.
    fn find_receiver_on_host(&self, rank: usize, host: usize) -> usize {
        if self.host_by_rank[rank] == host {
            return rank;
        }
        let ranks = &self.host_ranks[host];
        ranks[self.local_rank_of[rank] % ranks.len()]
    }

    /// Returns true if rank `to` receives, on behalf of its host, the data that rank `from` sends
    /// to all ranks. Only one rank of each host receives such data. Rank `to` then shares the data
    /// with its host.
    pub(crate) fn sends_replica_to(&self, from: usize, to: usize) -> bool {
        self.find_receiver_on_host(from, self.host_by_rank[to]) == to
    }

    /// Returns the local rank (position on this host) of the one rank that receives data for this
    /// host from `rank`. This is `rank` itself if it is on this host.
    pub(crate) fn find_local_receiver(&self, rank: usize) -> usize {
        self.local_rank_of[self.find_receiver_on_host(rank, self.host)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_exactly_one_receiver_on_each_host() {
        for hosts in [
            vec![0],
            vec![0, 0, 0, 1],
            vec![5, 9, 5, 9, 9],
            vec![0, 1, 2, 3],
            vec![2, 2, 2, 2, 0, 0, 0, 0],
            vec![0, 1, 1, 1, 1, 1, 0],
        ] {
            let world = hosts.len();
            let topologies: Vec<Topology> = (0..world).map(|r| Topology::new(r, &hosts).unwrap()).collect();
            for from in 0..world {
                for topology in &topologies {
                    let receivers: Vec<usize> = topology
                        .local_ranks()
                        .iter()
                        .copied()
                        .filter(|&to| {
                            to == from || (!topology.is_local(from) && topology.sends_replica_to(from, to))
                        })
                        .collect();
                    let local_ranks = topology.local_ranks();
                    assert_eq!(receivers.len(), 1, "rank {from} on the host of {local_ranks:?}: {hosts:?}");
                    assert_eq!(local_ranks[topology.find_local_receiver(from)], receivers[0]);
                }
            }
        }
    }

    #[test]
    fn invalid_groups_are_rejected() {
        assert!(matches!(Topology::new(0, &[]), Err(GroupError::WorldSize { world: 0, .. })));
        assert!(matches!(Topology::new(2, &[0, 0]), Err(GroupError::RankOutOfRange { .. })));
        let too_many = vec![0; crate::MAX_WORLD_SIZE + 1];
        assert!(matches!(Topology::new(0, &too_many), Err(GroupError::WorldSize { .. })));
    }
}
