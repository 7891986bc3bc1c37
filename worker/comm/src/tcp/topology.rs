//! Which rank lives where, and who fetches what for its host. Pure.
//!
//! Each rank has a *counterpart* on every other host: the rank whose place on its host is the same, modulo that host's
//! number of ranks. What every rank needs crosses the network once per pair of hosts, to the counterpart, and is shared from
//! there. All ranks of a host thus use the network at the same time, however unequal the hosts are.

/// The hosts of a group and this rank's place.
#[derive(Clone, Debug)]
pub(crate) struct Topology {
    pub(crate) rank: usize,
    /// Index of this rank's host in `members`.
    pub(crate) host: usize,
    /// Place among the ranks of its host, by rank.
    place: Vec<usize>,
    /// Host index by rank.
    host_of: Vec<usize>,
    /// Ranks of each host, ascending.
    members: Vec<Vec<usize>>,
}

impl Topology {
    /// `hosts[r]` names rank r's host: any number, equal for the same host.
    pub(crate) fn new(rank: usize, hosts: &[usize]) -> Result<Self, String> {
        let world = hosts.len();
        if !(1..=crate::MAX_WORLD).contains(&world) {
            return Err(format!("a group has 1 to {} ranks, not {world}", crate::MAX_WORLD));
        }
        if rank >= world {
            return Err(format!("rank {rank} in a group of {world} ranks"));
        }
        let mut names: Vec<usize> = Vec::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        let (mut place, mut host_of) = (Vec::with_capacity(world), Vec::with_capacity(world));
        for (r, name) in hosts.iter().enumerate() {
            let host = names.iter().position(|n| n == name).unwrap_or_else(|| {
                names.push(*name);
                members.push(Vec::new());
                names.len() - 1
            });
            place.push(members[host].len());
            host_of.push(host);
            members[host].push(r);
        }
        Ok(Topology { rank, host: host_of[rank], place, host_of, members })
    }

    pub(crate) fn world(&self) -> usize {
        self.host_of.len()
    }

    /// Ranks of this host, ascending.
    pub(crate) fn here(&self) -> &[usize] {
        &self.members[self.host]
    }

    /// This rank's place among them.
    pub(crate) fn my_place(&self) -> usize {
        self.place[self.rank]
    }

    pub(crate) fn is_here(&self, rank: usize) -> bool {
        self.host_of[rank] == self.host
    }

    /// Ranks on other hosts, beginning after this one: not all send to the same rank first.
    pub(crate) fn remote(&self) -> impl Iterator<Item = usize> + '_ {
        let (me, world) = (self.rank, self.world());
        (1..world).map(move |i| (me + i) % world).filter(|r| !self.is_here(*r))
    }

    /// Who on `host` receives what every rank gets from `rank`.
    fn receiver(&self, rank: usize, host: usize) -> usize {
        if self.host_of[rank] == host {
            return rank;
        }
        let there = &self.members[host];
        there[self.place[rank] % there.len()]
    }

    /// Does `from` send to `to` what everybody gets from it? Both are on different hosts.
    pub(crate) fn sends_to(&self, from: usize, to: usize) -> bool {
        self.receiver(from, self.host_of[to]) == to
    }

    /// The place on this host that has rank's part first.
    pub(crate) fn first_here(&self, rank: usize) -> usize {
        self.place[self.receiver(rank, self.host)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_reaches_each_host_once_and_every_rank_is_heard() {
        for hosts in [
            vec![0],
            vec![0, 0, 0, 1],
            vec![5, 9, 5, 9, 9],
            vec![0, 1, 2, 3],
            vec![2, 2, 2, 2, 0, 0, 0, 0],
            vec![0, 1, 1, 1, 1, 1, 0],
        ] {
            let world = hosts.len();
            let all: Vec<Topology> = (0..world).map(|r| Topology::new(r, &hosts).unwrap()).collect();
            for from in 0..world {
                for at in &all {
                    let received: Vec<usize> = at
                        .here()
                        .iter()
                        .copied()
                        .filter(|&to| to == from || (!at.is_here(from) && at.sends_to(from, to)))
                        .collect();
                    assert_eq!(received.len(), 1, "rank {from} on the host of {:?}: {hosts:?}", at.here());
                    assert_eq!(at.here()[at.first_here(from)], received[0]);
                }
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(Topology::new(0, &[]).is_err());
        assert!(Topology::new(2, &[0, 0]).is_err());
        assert!(Topology::new(0, &vec![0; crate::MAX_WORLD + 1]).is_err());
    }
}
