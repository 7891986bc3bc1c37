//! Defines [`PeerExchange`], which collects the network addresses of all workers of a built-in
//! training (a job without a user program).
use super::core::host_state::HostIndex;
use jobspec::ids::Rank;
use protocol::control::{MAX_ADDRESSES, WorkerAddresses};
use std::{collections::BTreeMap, net::SocketAddr};

/// The network addresses that workers of a built-in training have reported in the current attempt
/// (one start of all workers).
#[derive(Debug)]
pub(crate) struct PeerExchange {
    attempt: u32,
    world: usize,
    peers: BTreeMap<Rank, WorkerAddresses>,
}

impl PeerExchange {
    /// Creates an empty collection for the network addresses of the `world` workers of attempt
    /// number `attempt`.
    pub(crate) fn new(attempt: u32, world: usize) -> Self {
        PeerExchange { attempt, world, peers: BTreeMap::new() }
    }

    /// Stores the network addresses that a worker on `host` has reported. Once every worker of the
    /// attempt has reported, returns the addresses of all workers in rank order; before that,
    /// `None`. Ignores reports of another attempt, repeated reports, ranks outside of the job, and
    /// reports without addresses or with more than [`MAX_ADDRESSES`].
    pub(crate) fn add_worker_addresses(
        &mut self,
        host: HostIndex,
        rank: Rank,
        attempt: u32,
        addresses: Vec<SocketAddr>,
    ) -> Option<Vec<WorkerAddresses>> {
        let is_valid = (1..=MAX_ADDRESSES).contains(&addresses.len()) && (rank as usize) < self.world;
        if attempt != self.attempt || !is_valid || self.peers.contains_key(&rank) {
            return None;
        }
        self.peers.insert(rank, WorkerAddresses { host_index: u32::try_from(host).ok()?, addresses });
        (self.peers.len() == self.world).then(|| self.peers.values().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a list with the single address 10.0.0.1 at `port`.
    fn build_addresses(port: u16) -> Vec<SocketAddr> {
        vec![([10, 0, 0, 1], port).into()]
    }

    #[test]
    fn all_addresses_are_returned_once_in_rank_order() {
        let mut exchange = PeerExchange::new(2, 3);
        assert_eq!(exchange.add_worker_addresses(1, 2, 2, build_addresses(12)), None);
        assert_eq!(exchange.add_worker_addresses(0, 0, 2, build_addresses(10)), None);
        assert_eq!(exchange.add_worker_addresses(0, 1, 1, build_addresses(9)), None, "another attempt");
        assert_eq!(exchange.add_worker_addresses(0, 0, 2, build_addresses(99)), None, "a second report");
        assert_eq!(exchange.add_worker_addresses(0, 3, 2, build_addresses(13)), None, "no such rank");
        assert_eq!(exchange.add_worker_addresses(0, 1, 2, Vec::new()), None, "no address");
        let peers = exchange.add_worker_addresses(0, 1, 2, build_addresses(11)).expect("the last report");
        let expected = [(0, 10), (0, 11), (1, 12)]
            .map(|(host_index, port)| WorkerAddresses { host_index, addresses: build_addresses(port) });
        assert_eq!(peers, expected);
        assert_eq!(exchange.add_worker_addresses(0, 1, 2, build_addresses(11)), None);
    }
}
