//! What collectives need beside what they move.
use super::memory::Memory;
use crate::{
    life::STAGING,
    zero::{Policy, fold::maximal_runs, groups, partition::Partition},
};
use device::Dtype;

/// Of each peer's two slots the chunks that a gather reads, bytes.
const PEER_CHUNKS: usize = 1 << 20;

impl Memory<'_> {
    /// Messages that are put together for the owners of a unit of experts, and what arrives.
    pub(super) fn messages(&self, policy: Policy, rank: usize, dtype: Dtype) -> u64 {
        let slots = self.slots(policy);
        let (mut gathered, mut sent, mut received) = (0, 0, 0);
        for unit in self.units {
            let own = Partition::new(unit, self.world).range(rank);
            let own = (own.len(), unit.trained_range(own).len());
            let of = groups::messages(unit, &slots, rank, own);
            (gathered, sent, received) = (gathered.max(of.0), sent.max(of.1), received.max(of.2));
        }
        let sent = match dtype {
            Dtype::F32 => 4 * sent.max(gathered),
            Dtype::Bf16 | Dtype::F16 => 4 * sent + dtype.size() * gathered,
        };
        (sent + 4 * received) as u64
    }

    /// Where several ranks keep all parameters: the copy of an updated part that travels.
    pub(super) fn published(&self, policy: Policy, rank: usize) -> u64 {
        let travels = !policy.shard_parameters && self.world > 1;
        let largest = self.own_lengths(rank).into_iter().max().unwrap_or(0) as u64;
        if travels { largest } else { 0 }
    }

    /// Shared memory that collectives touch, and the private memory in which a fold puts together what exceeds it.
    pub(super) fn staging(&self, policy: Policy, rank: usize) -> u64 {
        if self.world == 1 {
            return 0;
        }
        // This rank's two slots, and of its peers' as much, where pieces for this rank lie; a gather reads all of a chunk.
        let gathers = !(policy.shard_parameters && self.reads_in_common());
        let chunks = if gathers { (self.world - 1) * PEER_CHUNKS } else { 0 };
        let shared = 2 * STAGING + chunks.max(2 * STAGING);
        let slots = self.slots(policy);
        let of = |r: usize| (0..slots.rounds()).filter_map(|round| slots.slot(r, round)).collect::<Vec<_>>();
        let partials = |r: usize| match of(r)[..] {
            [] => 0,
            [first, .., last] if !policy.shard_gradients && !policy.in_order => {
                maximal_runs(first..last + 1).len()
            }
            _ => 1,
        };
        let numbers: Vec<usize> = (0..self.world).map(partials).collect();
        let private = self.units.iter().filter(|u| u.owners.all()).map(|u| {
            let part = Partition::new(u, self.world);
            let counts: Vec<usize> = (0..self.world).map(|r| u.trained_range(part.range(r)).len()).collect();
            comm::shm::assembled(rank, &numbers, &counts, STAGING)
        });
        (shared + 4 * private.max().unwrap_or(0)) as u64
    }
}
