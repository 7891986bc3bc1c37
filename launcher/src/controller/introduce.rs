//! Who of the built-in workers listens where. Pure: the workers are introduced to each other once all have said it.
use super::core::HostIndex;
use contract::{
    control::{MAX_ADDRESSES, PeerAddress},
    ids::Rank,
};
use std::{collections::BTreeMap, net::SocketAddr};

/// What the workers of one epoch have said so far.
#[derive(Debug)]
pub(crate) struct Introductions {
    epoch: u32,
    world: usize,
    heard: BTreeMap<Rank, PeerAddress>,
}

impl Introductions {
    pub(crate) fn new(epoch: u32, world: usize) -> Self {
        Introductions { epoch, world, heard: BTreeMap::new() }
    }

    /// A worker listens; all of them by rank when it was the last. What another epoch's worker says, what is said twice
    /// and what makes no sense changes nothing.
    pub(crate) fn hear(
        &mut self,
        node: HostIndex,
        rank: Rank,
        epoch: u32,
        addresses: Vec<SocketAddr>,
    ) -> Option<Vec<PeerAddress>> {
        let sound = (1..=MAX_ADDRESSES).contains(&addresses.len()) && (rank as usize) < self.world;
        if epoch != self.epoch || !sound || self.heard.contains_key(&rank) {
            return None;
        }
        self.heard.insert(rank, PeerAddress { node: u32::try_from(node).ok()?, addresses });
        (self.heard.len() == self.world).then(|| self.heard.values().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Vec<SocketAddr> {
        vec![([10, 0, 0, 1], port).into()]
    }

    #[test]
    fn all_are_introduced_once_in_rank_order() {
        let mut i = Introductions::new(2, 3);
        assert_eq!(i.hear(1, 2, 2, at(12)), None);
        assert_eq!(i.hear(0, 0, 2, at(10)), None);
        assert_eq!(i.hear(0, 1, 1, at(9)), None, "of an epoch that is over");
        assert_eq!(i.hear(0, 0, 2, at(99)), None, "said twice");
        assert_eq!(i.hear(0, 3, 2, at(13)), None, "no such rank");
        assert_eq!(i.hear(0, 1, 2, Vec::new()), None, "nowhere");
        let all = i.hear(0, 1, 2, at(11)).expect("all have said it");
        let want = [(0, 10), (0, 11), (1, 12)].map(|(node, port)| PeerAddress { node, addresses: at(port) });
        assert_eq!(all, want);
        assert_eq!(i.hear(0, 1, 2, at(11)), None);
    }
}
