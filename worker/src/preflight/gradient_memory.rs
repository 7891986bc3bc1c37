//! Estimates the peak memory of gradients: of their sums, and of the buffers in which they are
//! computed and reduced.
use super::memory_estimator::MemoryEstimator;
use crate::{
    param_groups::find_first_backward_layer,
    params::ParamUnit,
    zero::{
        ShardingPolicy,
        buffer_pool::BufferPoolEstimate,
        engine::REDUCTIONS_IN_FLIGHT,
        micro_batch_sums::{MicroBatchRange, count_peak_gradient_buffers},
        owner_collectives,
    },
};
use std::collections::VecDeque;

impl MemoryEstimator<'_> {
    /// Computes the largest number of gradient elements that a rank has in memory at one time.
    /// Buffers are reused by the same rules as in the engine's buffer pools.
    pub(super) fn count_gradient_elements(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        let gradients = match policy.shard_gradients && self.world > 1 {
            true => self.count_sharded_gradient_elements(policy, rank),
            false => self.count_full_gradient_elements(policy, rank),
        };
        gradients as u64
    }

    /// Computes the largest number of gradient elements in memory if a rank keeps complete
    /// gradients until the last micro-batch.
    fn count_full_gradient_elements(&self, policy: ShardingPolicy, rank: usize) -> usize {
        let s = self.build_micro_batch_schedule(policy);
        let full: usize = self.list_units_of_rank(rank).map(ParamUnit::trained_len).sum();
        let shards: usize = self.list_trained_shard_lengths(rank).iter().sum();
        let own_micro_batches =
            (0..s.count_rounds()).filter(|&r| s.find_micro_batch(rank, r).is_some()).count();
        // The reduced shard of every unit is kept until the update.
        let finished = if self.world == 1 { 0 } else { shards };
        if policy.sums_in_arrival_order && own_micro_batches > 1 {
            return full + finished + self.count_written_gradient_elements(policy, rank, 0, |_| true);
        }
        // The backward pass of a partly frozen unit writes a complete gradient, which is then
        // packed.
        let mixed = self.count_written_gradient_elements(policy, rank, 0, |u| !u.is_all_trained());
        full * count_peak_gradient_buffers(
            (0..own_micro_batches).map(MicroBatchRange::from_micro_batch),
            true,
        ) + finished
            + mixed
    }

    /// Computes the largest number of gradient elements in memory if gradients are reduced to their
    /// owners in each backward pass.
    ///
    /// The elements are one partial sum of the shard for each level of the summation tree, and the
    /// gradients in flight.
    fn count_sharded_gradient_elements(&self, policy: ShardingPolicy, rank: usize) -> usize {
        let schedule = self.build_micro_batch_schedule(policy);
        let shards = self.units.iter().zip(self.list_trained_shard_lengths(rank));
        let sums = shards.map(|(u, shard)| match policy.sums_in_arrival_order {
            true => shard,
            false => shard * owner_collectives::count_peak_owner_buffers(&schedule, u.owners),
        });
        sums.sum::<usize>()
            + self.count_written_gradient_elements(policy, rank, REDUCTIONS_IN_FLIGHT, |_| true)
    }

    /// Computes the largest number of elements in whole-gradient buffers at one time, including
    /// earlier gradients that are still being reduced. Counts the gradients of units that
    /// `has_buffer` accepts. While a gradient is written, up to `in_flight` earlier gradients are
    /// still being reduced and keep their buffers.
    fn count_written_gradient_elements(
        &self,
        policy: ShardingPolicy,
        rank: usize,
        in_flight: usize,
        has_buffer: impl Fn(&ParamUnit) -> bool,
    ) -> usize {
        let mut buffers = GradientBufferSimulation { in_flight, ..GradientBufferSimulation::default() };
        let (head, layers) = self.find_head_and_layer_units(rank);
        let is_trained = |u: usize| self.units[u].has_any_trained();
        let schedule = self.build_micro_batch_schedule(policy);
        // In the second round the last gradient of the first round is still being reduced.
        for _ in 0..schedule.count_rounds().min(2) {
            let take = |b: &mut GradientBufferSimulation, u: usize| {
                has_buffer(&self.units[u]).then(|| b.pool.take(self.units[u].len()))
            };
            let of_head = take(&mut buffers, head);
            // The backward pass of the head also writes the gradient of a tied embedding.
            let tied = self.model.has_tied_embeddings() && is_trained(0);
            let mut of_embedding = if tied { take(&mut buffers, 0) } else { None };
            buffers.finish_gradient_write(of_head, is_trained(head));
            for &u in
                layers[find_first_backward_layer(self.units)..].iter().rev().flat_map(|l| l.iter().rev())
            {
                let unit = &self.units[u];
                if unit.owners.includes_all_ranks() {
                    // Frozen experts have no gradient.
                    let has_gradient = is_trained(u) || !unit.holds_experts();
                    let gradient = if has_gradient { take(&mut buffers, u) } else { None };
                    buffers.finish_gradient_write(gradient, is_trained(u));
                    continue;
                }
                let mixed =
                    if unit.is_all_trained() || !is_trained(u) { None } else { take(&mut buffers, u) };
                buffers.finish_gradient_write(mixed, false);
                buffers.start_stack_reduction(
                    unit.trained_len()
                        * owner_collectives::count_peak_group_buffers(&schedule, unit.owners, rank),
                );
            }
            if is_trained(0) {
                let gradient = of_embedding.take().or_else(|| take(&mut buffers, 0));
                buffers.finish_gradient_write(gradient, true);
            }
        }
        buffers.pool.allocated + buffers.stacks
    }
}

/// Simulates which gradient buffers exist while a backward pass writes gradients and reduces them,
/// for the memory estimate.
#[derive(Default)]
struct GradientBufferSimulation {
    pool: BufferPoolEstimate,
    /// The number of gradients that may be reduced while the next one is written.
    in_flight: usize,
    /// The gradients that are being reduced, oldest first. Each item is the number of elements of a
    /// pool buffer, or `None` for a gradient in a stack (see `stacks`).
    reducing: VecDeque<Option<usize>>,
    /// The number of elements of all stacks. A stack contains the gradients of one expert unit for
    /// several micro-batches.
    stacks: usize,
    /// The number of allocated stacks that are not in use.
    free_stacks: usize,
}

impl GradientBufferSimulation {
    /// Simulates the moment at which a gradient is completely written: either its reduction among
    /// ranks starts, or its buffer is freed. Does nothing if there is no gradient.
    fn finish_gradient_write(&mut self, gradient: Option<usize>, is_reduced: bool) {
        let Some(len) = gradient else { return };
        match is_reduced {
            true => self.start_reduction(Some(len)),
            false => self.pool.give_back(len),
        }
    }

    /// Simulates that a rank starts to reduce the gradients of its experts of one layer, `len`
    /// elements that are summed over several micro-batches.
    fn start_stack_reduction(&mut self, len: usize) {
        match self.free_stacks.checked_sub(1) {
            Some(left) => self.free_stacks = left,
            None => self.stacks += len,
        }
        self.start_reduction(None);
    }

    /// Simulates that the gradient in the buffer `buffer` begins to be reduced to the ranks that
    /// own the parameters. If more than `in_flight` gradients are then being reduced, frees the
    /// oldest ones.
    fn start_reduction(&mut self, buffer: Option<usize>) {
        self.reducing.push_back(buffer);
        while self.reducing.len() > self.in_flight {
            match self.reducing.pop_front().flatten() {
                Some(len) => self.pool.give_back(len),
                None => self.free_stacks += 1,
            }
        }
    }
}
