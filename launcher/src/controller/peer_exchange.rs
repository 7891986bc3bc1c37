//! [`PeerExchange`]: collects the addresses of the built-in workers of an attempt. Pure.
use super::core::HostIndex;
use contract::{
    control::{MAX_ADDRESSES, PeerAddress},
    ids::Rank,
};
use std::{collections::BTreeMap, net::SocketAddr};

/// The addresses that the workers of one attempt have reported.
#[derive(Debug)]
pub(crate) struct PeerExchange {
    attempt: u32,
    world: usize,
    peers: BTreeMap<Rank, PeerAddress>,
}

impl PeerExchange {
    pub(crate) fn new(attempt: u32, world: usize) -> Self {
        PeerExchange { attempt, world, peers: BTreeMap::new() }
    }

    /// Adds the addresses of a worker. Returns those of all workers, by rank, when it was the last
    /// one. Reports of another attempt, second reports and invalid ones have no effect.
    pub(crate) fn add(
        &mut self,
        host: HostIndex,
        rank: Rank,
        attempt: u32,
        addresses: Vec<SocketAddr>,
    ) -> Option<Vec<PeerAddress>> {
        let is_valid = (1..=MAX_ADDRESSES).contains(&addresses.len()) && (rank as usize) < self.world;
        if attempt != self.attempt || !is_valid || self.peers.contains_key(&rank) {
            return None;
        }
        self.peers.insert(rank, PeerAddress { host_index: u32::try_from(host).ok()?, addresses });
        (self.peers.len() == self.world).then(|| self.peers.values().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Vec<SocketAddr> {
        vec![([10, 0, 0, 1], port).into()]
    }

    #[test]
    fn all_addresses_are_returned_once_in_rank_order() {
        let mut exchange = PeerExchange::new(2, 3);
        assert_eq!(exchange.add(1, 2, 2, at(12)), None);
        assert_eq!(exchange.add(0, 0, 2, at(10)), None);
        assert_eq!(exchange.add(0, 1, 1, at(9)), None, "another attempt");
        assert_eq!(exchange.add(0, 0, 2, at(99)), None, "a second report");
        assert_eq!(exchange.add(0, 3, 2, at(13)), None, "no such rank");
        assert_eq!(exchange.add(0, 1, 2, Vec::new()), None, "no address");
        let peers = exchange.add(0, 1, 2, at(11)).expect("the last report");
        let expected = [(0, 10), (0, 11), (1, 12)]
            .map(|(host_index, port)| PeerAddress { host_index, addresses: at(port) });
        assert_eq!(peers, expected);
        assert_eq!(exchange.add(0, 1, 2, at(11)), None);
    }
}
