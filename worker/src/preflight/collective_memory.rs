//! Estimates how much memory collective operations need, in addition to the data that they
//! transfer.
use super::memory_estimator::MemoryEstimator;
use crate::{
    runtime::STAGING_BYTES,
    zero::{
        ShardingPolicy, micro_batch_sums::split_into_tree_ranges, owner_collectives, partition::Partition,
        two_level_reduction,
    },
};
use device::Dtype;
use jobspec::WorkersPerHost;

/// The estimated bytes of another rank's shared memory that become resident in this rank's process
/// when an all-gather reads them.
const PEER_CHUNK_BYTES: usize = 1 << 20;

impl MemoryEstimator<'_> {
    /// Computes the size in bytes of the buffers in which a rank exchanges parameters and gradients
    /// of experts with the other ranks that own a part of them.
    pub(super) fn count_moe_message_bytes(&self, policy: ShardingPolicy, rank: usize, dtype: Dtype) -> u64 {
        let schedule = self.build_micro_batch_schedule(policy);
        let (mut gathered, mut sent, mut received) = (0, 0, 0);
        for unit in self.units {
            let shard = Partition::new(unit, self.world).shard_range(rank);
            let lengths = (shard.len(), unit.to_trained_range(shard).len());
            let of_unit = owner_collectives::compute_exchange_buffer_lengths(unit, &schedule, rank, lengths);
            gathered = gathered.max(of_unit.0);
            (sent, received) = (sent.max(of_unit.1), received.max(of_unit.2));
        }
        let sent = match dtype {
            Dtype::F32 => 4 * sent.max(gathered),
            Dtype::Bf16 | Dtype::F16 => 4 * sent + dtype.size() * gathered,
        };
        (sent + 4 * received) as u64
    }

    /// Computes the length, in elements, of the buffer into which a rank copies its updated
    /// parameter shard before sending the shard to other ranks. Returns 0 if parameters are sharded
    /// or there is one rank.
    pub(super) fn count_sent_shard_elements(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        let is_sent = !policy.shard_parameters && self.world > 1;
        let largest = self.list_shard_lengths(rank).into_iter().max().unwrap_or(0) as u64;
        if is_sent { largest } else { 0 }
    }

    /// Computes for each rank how many sums of a gradient it sends at a time, when gradients are
    /// reduced among ranks.
    fn count_partial_sums_of_ranks(&self, policy: ShardingPolicy) -> Vec<usize> {
        let schedule = self.build_micro_batch_schedule(policy);
        let list_micro_batches = |r: usize| {
            (0..schedule.count_rounds())
                .filter_map(|round| schedule.find_micro_batch(r, round))
                .collect::<Vec<_>>()
        };
        let partial_sums = |r: usize| match list_micro_batches(r)[..] {
            [] => 0,
            [first, .., last] if !policy.shard_gradients && !policy.sums_in_arrival_order => {
                split_into_tree_ranges(first..last + 1).len()
            }
            _ => 1,
        };
        (0..self.world).map(partial_sums).collect()
    }

    /// Computes the length, in elements, of the buffers in which a rank receives gradients of other
    /// ranks over NCCL, and in which it prepares and sums them if gradients are reduced in two
    /// levels. Without `train.deterministic`, NCCL sums them in short buffers, which are not
    /// counted.
    pub(super) fn count_reduction_buffer_elements(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        if self.world == 1 || policy.sums_in_arrival_order {
            return 0;
        }
        let partial_sums = self.count_partial_sums_of_ranks(policy);
        let most = partial_sums.iter().copied().max().unwrap_or(0);
        let units = self.units.iter().filter(|unit| unit.owners.includes_all_ranks());
        let lengths = units.map(|unit| match self.ranks_per_host() {
            Some(n) => two_level_reduction::count_buffer_elements(n, most, unit.trained_len()),
            None => {
                let shard = Partition::new(unit, self.world).shard_range(rank);
                partial_sums.iter().sum::<usize>() * unit.to_trained_range(shard).len()
            }
        });
        lengths.max().unwrap_or(0) as u64
    }

    /// Returns the number of ranks of each host if the job file sets it and there are several hosts
    /// with several ranks. Gradients are then reduced in two levels.
    fn ranks_per_host(&self) -> Option<usize> {
        match self.job.cluster.workers_per_host {
            WorkersPerHost::Exactly(n) => {
                Some(n as usize).filter(|n| *n > 1 && *n < self.world && self.world.is_multiple_of(*n))
            }
            WorkersPerHost::Auto => None,
        }
    }

    /// Computes how many bytes of a rank's resident memory collectives occupy, in shared memory and
    /// in private buffers. These are the shared memory that the rank reads and writes, and the
    /// private buffer in which a reduction assembles pieces that are larger than a staging slot.
    pub(super) fn count_collective_resident_bytes(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        if self.world == 1 {
            return 0;
        }
        // This rank's two slots, and as many bytes of its peers' slots, which hold pieces for this
        // rank. An all-gather reads whole chunks of the peers' slots.
        let gathers = !(policy.shard_parameters && self.shares_params_in_memory());
        let chunks = if gathers { (self.world - 1) * PEER_CHUNK_BYTES } else { 0 };
        let shared = 2 * STAGING_BYTES + chunks.max(2 * STAGING_BYTES);
        let partial_sums = self.count_partial_sums_of_ranks(policy);
        let private = self.units.iter().filter(|u| u.owners.includes_all_ranks()).map(|u| {
            let partition = Partition::new(u, self.world);
            let counts: Vec<usize> =
                (0..self.world).map(|r| u.to_trained_range(partition.shard_range(r)).len()).collect();
            comm::shm::count_piece_buffer_elements(rank, &partial_sums, &counts, STAGING_BYTES)
        });
        (shared + 4 * private.max().unwrap_or(0)) as u64
    }
}
