//! Gradient handling of [`ZeroEngine`]: buffers for the backward pass, sums over micro-batches, and
//! reduction to the ranks that own the parameters.
use super::super::{
    MicroBatchSchedule, ShardingPolicy,
    micro_batch_sums::{MicroBatchRange, MicroBatchSums, split_into_tree_ranges},
    owner_collectives::{ExchangeBuffers, list_group_tree_ranges},
    reduced_gradient::ReducedGradient,
    two_level_reduction::{HostGroups, ReducedPieces},
};
use super::{REDUCTIONS_IN_FLIGHT, ZeroEngine, lock_ignoring_poison};
use comm::{Comm, Result};
use device::{Buf, Dtype, Ops, View};
use std::sync::Mutex;

impl ZeroEngine {
    /// Takes a buffer for the whole gradient of parameter unit `u` (tensors that are gathered
    /// together), with unspecified content.
    pub fn take_gradient_buffer(&mut self, u: usize) -> Buf {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        let is_temporary =
            self.reduces_each_gradient() || !unit.is_all_trained() || self.adds_next_gradient_in_place(u);
        match is_temporary {
            true => lock_ignoring_poison(&self.gradient_pool).take(ops, unit.len()),
            false => lock_ignoring_poison(&self.shards[u].grads).take_buffer(ops),
        }
    }

    /// Returns the gradient `whole` of parameter unit `u` (tensors that are gathered together)
    /// without the elements of frozen parameters. If some elements are frozen, packs the trained
    /// ones into another buffer and gives `whole` back to the pool.
    fn extract_trained_gradient(&self, u: usize, mut whole: Buf) -> Buf {
        let shard = &self.shards[u];
        if shard.unit.is_all_trained() {
            return whole;
        }
        let ops = self.ops.as_ref();
        shard.unit.pack_trained(ops, whole.view_mut());
        let mut packed = lock_ignoring_poison(&shard.grads).take_buffer(ops);
        ops.copy(packed.view_mut(), whole.view().slice(0..shard.unit.trained_len()));
        lock_ignoring_poison(&self.gradient_pool).give_back(whole);
        packed
    }

    /// Returns whether the backward pass adds the next gradient of parameter unit `u` (tensors that
    /// are gathered together) to the existing sum, without a separate buffer.
    fn adds_next_gradient_in_place(&self, u: usize) -> bool {
        self.policy.sums_in_arrival_order && !lock_ignoring_poison(&self.shards[u].grads).is_empty()
    }

    /// Adds one micro-batch's gradient of parameter unit `u` (tensors that are gathered together)
    /// to the gradient sums that this rank keeps during a step.
    fn add_gradient_to_sums(&self, u: usize, micro_batch: usize, mut gradient: Buf) {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        if !self.adds_next_gradient_in_place(u) {
            let owned = self.extract_trained_gradient(u, gradient);
            return lock_ignoring_poison(&self.shards[u].grads).push_owned(
                ops,
                MicroBatchRange::from_micro_batch(micro_batch),
                owned,
            );
        }
        if !unit.is_all_trained() {
            unit.pack_trained(ops, gradient.view_mut());
        }
        let trained = gradient.view().slice(0..unit.trained_len());
        lock_ignoring_poison(&self.shards[u].grads).push_copy(
            ops,
            MicroBatchRange::from_micro_batch(micro_batch),
            trained,
        );
        lock_ignoring_poison(&self.gradient_pool).give_back(gradient);
    }

    /// Returns whether the gradient of each micro-batch is reduced among ranks, and not only the
    /// sums that each rank has after the last micro-batch of the step.
    fn reduces_each_gradient(&self) -> bool {
        self.policy.shard_gradients && self.world > 1
    }

    /// Returns whether only the sums that each rank has after the last micro-batch of a step are
    /// reduced among ranks.
    fn reduces_sums_only(&self) -> bool {
        !self.policy.shard_gradients && self.world > 1
    }

    /// Starts to reduce one micro-batch's gradient of parameter unit `u` (tensors that are gathered
    /// together) to the ranks that own the parameters. Frozen parameters are not reduced.
    ///
    /// Collective: every rank must call it for every unit and round. `gradient` is `None` if the
    /// rank has no micro-batch in the round.
    pub fn reduce_gradient(&mut self, u: usize, round: usize, mut gradient: Option<Buf>) -> Result<()> {
        let shards = self.shards.clone();
        let unit = &shards[u].unit;
        if !unit.has_any_trained() {
            gradient.into_iter().for_each(|g| lock_ignoring_poison(&self.gradient_pool).give_back(g));
            return Ok(());
        }
        if !self.reduces_each_gradient() {
            if let (Some(g), Some(micro_batch)) = (gradient, self.schedule.find_micro_batch(self.rank, round))
            {
                self.add_gradient_to_sums(u, micro_batch, g);
            }
            if self.reduces_sums_only() && round + 1 == self.schedule.count_rounds() {
                self.start_whole_gradient_reduction(u);
            }
            return Ok(());
        }
        if let Some(g) = gradient.as_mut().filter(|_| !unit.is_all_trained()) {
            unit.pack_trained(self.ops.as_ref(), g.view_mut());
        }
        let (shards, schedule, ops, pool) =
            (shards.clone(), self.schedule, self.ops.clone(), self.gradient_pool.clone());
        let (policy, groups, buffers) = (self.policy, self.host_groups, self.exchange.clone());
        self.submit_reduction(move |comm: &dyn Comm| {
            let s = &shards[u];
            let mut sums = lock_ignoring_poison(&s.grads);
            let whole = gradient.as_ref().map(|g| g.view().slice(0..s.trained_counts.iter().sum()));
            let ranges_of = |r| schedule.find_micro_batch(r, round).map(MicroBatchRange::from_micro_batch);
            let ranges: Vec<Vec<MicroBatchRange>> =
                (0..schedule.world).map(|r| ranges_of(r).into_iter().collect()).collect();
            if let Some(whole) = whole
                && can_sum_in_transport(comm, policy, &ranges)
            {
                let mut piece = sums.take_buffer(ops.as_ref());
                comm.reduce_scatter(piece.view_mut(), whole, &s.trained_counts)?;
                let range = MicroBatchRange { start: round * schedule.world, len: schedule.world };
                sums.push_owned(ops.as_ref(), range, piece);
                gradient.into_iter().for_each(|g| {
                    lock_ignoring_poison(&pool).give_back_after(g, ops.record_event());
                });
                return Ok(());
            }
            let sink = &mut |range, piece: View| sums.push_copy(ops.as_ref(), range, piece);
            let pieces = ReducedPieces { ranges: &ranges, counts: &s.trained_counts };
            reduce_pieces(comm, ops.as_ref(), (groups, &buffers), whole.as_slice(), pieces, sink)?;
            if let Some(g) = gradient {
                lock_ignoring_poison(&pool).give_back_after(g, ops.record_event());
            }
            Ok(())
        })
    }

    /// Queues a gradient reduction among ranks, and waits for older ones if more than
    /// [`REDUCTIONS_IN_FLIGHT`] reductions are queued or running.
    fn submit_reduction(
        &mut self,
        reduce: impl FnOnce(&dyn Comm) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.pending_reductions.push_back(self.queue.submit(reduce));
        while self.pending_reductions.len() > REDUCTIONS_IN_FLIGHT {
            self.pending_reductions.pop_front().expect("not empty").wait()?;
        }
        Ok(())
    }

    /// Returns an empty [`MicroBatchSums`], which will sum the gradients of parameter unit `u`
    /// (tensors that are gathered together) over several micro-batches.
    /// [`ZeroEngine::push_micro_batch_gradient`] adds gradients in the order of the micro-batches,
    /// and [`ZeroEngine::reduce_partial_sums`] reduces the sums.
    pub fn begin_partial_sums(&self, u: usize) -> MicroBatchSums {
        let len = self.shards[u].unit.trained_len();
        let Some((pooled, last_use)) = lock_ignoring_poison(&self.micro_batch_sums_pool).pop() else {
            return MicroBatchSums::new(len);
        };
        last_use.make_stream_wait(); // also before the memory is freed
        if pooled.len() == len { pooled } else { MicroBatchSums::new(len) }
    }

    /// Computes one micro-batch's gradient of parameter unit `u` (tensors that are gathered
    /// together) with the function `write`, and adds it to `partial_sums`.
    ///
    /// Frozen parameters are left out. `write` is not called if the whole unit is frozen.
    pub fn push_micro_batch_gradient(
        &self,
        u: usize,
        partial_sums: &mut MicroBatchSums,
        micro_batch: usize,
        write: impl FnOnce(&mut Buf),
    ) {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        let mut gradient = partial_sums.take_buffer(ops);
        if unit.is_all_trained() {
            write(&mut gradient);
        } else if unit.has_any_trained() {
            let mut whole = lock_ignoring_poison(&self.gradient_pool).take(ops, unit.len());
            write(&mut whole);
            unit.pack_trained(ops, whole.view_mut());
            ops.copy(gradient.view_mut(), whole.view().slice(0..unit.trained_len()));
            lock_ignoring_poison(&self.gradient_pool).give_back(whole);
        }
        partial_sums.push_owned(ops, MicroBatchRange::from_micro_batch(micro_batch), gradient);
    }

    /// Starts to send `partial_sums`, this rank's gradient sums of parameter unit `u`, to the ranks
    /// that own the unit's parameters, which add them up. The sums cover the micro-batches that
    /// this rank's group computed in `round`.
    ///
    /// Collective: every rank must call it for one of its units in every round. The sums are empty
    /// if the rank's group computed no micro-batch in the round.
    pub fn reduce_partial_sums(
        &mut self,
        u: usize,
        round: usize,
        mut partial_sums: MicroBatchSums,
    ) -> Result<()> {
        let (shards, schedule, ops) = (self.shards.clone(), self.schedule, self.ops.clone());
        let (pool, buffers) = (self.micro_batch_sums_pool.clone(), self.exchange.clone());
        self.submit_reduction(move |comm: &dyn Comm| {
            let s = &shards[u];
            let sent = list_group_tree_ranges(&schedule, s.unit.owners, comm.rank(), round);
            assert!(
                partial_sums.partial_sums().map(|(range, _)| range).eq(sent),
                "the sums cover other micro-batches than the schedule"
            );
            let mut sums = lock_ignoring_poison(&s.grads);
            let (ops, mut buffers) = (ops.as_ref(), lock_ignoring_poison(&buffers));
            let unit = (&s.unit, &s.partition);
            buffers.exchange_partial_sums(
                comm,
                ops,
                unit,
                &schedule,
                round,
                &partial_sums,
                &mut |range, piece| {
                    sums.push_copy(ops, range, piece);
                },
            )?;
            partial_sums.clear();
            lock_ignoring_poison(&pool).push((partial_sums, ops.record_event()));
            Ok(())
        })
    }

    /// Starts to reduce the gradient of parameter unit `u` (tensors that are gathered together)
    /// after the last micro-batch of a step, from the sums that each rank keeps of the whole
    /// gradient. Without ZeRO, the reduced gradient is then gathered on every rank.
    ///
    /// The reduction runs while the gradient of the next unit is computed. Collective: every rank
    /// must call it.
    fn start_whole_gradient_reduction(&mut self, u: usize) {
        let (shards, ops, buffers) = (self.shards.clone(), self.ops.clone(), self.exchange.clone());
        let (schedule, policy, groups) = (self.schedule, self.policy, self.host_groups);
        let reduction = self.queue.submit(move |comm: &dyn Comm| {
            let (s, ops) = (&shards[u], ops.as_ref());
            let mut sums = lock_ignoring_poison(&s.grads);
            let mut reduced = lock_ignoring_poison(&s.reduced_grads);
            let counts = &s.trained_counts;
            let owned = reduce_partial_sums_of_ranks(
                comm,
                ops,
                (policy, schedule),
                (groups, &buffers),
                (&sums, counts),
                &mut reduced,
            )?;
            sums.clear();
            if policy.shard_optimizer {
                return Ok(ReducedGradient { owned, whole: None });
            }
            // the memory of the sums is free now
            let mut whole = sums.take_buffer(ops);
            let mut buffers = lock_ignoring_poison(&buffers);
            buffers.gather_from_owners(comm, ops, s.unit.owners, counts, whole.view_mut(), owned.view())?;
            Ok(ReducedGradient { owned, whole: Some(whole) })
        });
        self.whole_gradient_reductions.insert(u, reduction);
    }

    /// Waits for the reduction of the gradient of parameter unit `u` (tensors that are gathered
    /// together). If the optimizer states are not sharded and there are several ranks, the whole
    /// gradient is part of the result.
    ///
    /// Collective: every rank must call it after the last round.
    pub fn finish_gradient(&mut self, u: usize) -> Result<ReducedGradient> {
        for t in self.pending_reductions.drain(..) {
            t.wait()?;
        }
        if !self.shards[u].unit.has_any_trained() {
            return Ok(ReducedGradient { owned: self.allocate_zeros(0), whole: None });
        }
        if self.reduces_sums_only() {
            let reduction = self.whole_gradient_reductions.remove(&u);
            return reduction.expect("reduce_gradient was called in the last round").wait();
        }
        let sum = lock_ignoring_poison(&self.shards[u].grads).finish_sum(self.ops.as_ref());
        let owned = sum.unwrap_or_else(|| self.allocate_zeros(self.owned_trained_len(u)));
        Ok(ReducedGradient { owned, whole: None })
    }

    /// Takes back the buffers of a gradient of parameter unit `u` (tensors that are gathered
    /// together) that is no longer needed, to reuse their memory.
    pub fn recycle_gradient(&self, u: usize, gradient: ReducedGradient) {
        let ReducedGradient { owned, whole } = gradient;
        let shard = &self.shards[u];
        let of_shard = if self.reduces_sums_only() { &shard.reduced_grads } else { &shard.grads };
        lock_ignoring_poison(of_shard).recycle_buffer(owned);
        whole.into_iter().for_each(|whole| lock_ignoring_poison(&shard.grads).recycle_buffer(whole));
    }

    /// Gathers the whole gradient of parameter unit `u` (tensors that are gathered together) from
    /// the ranks that own its parts, unless `gradient` contains it already or there is only one
    /// rank. Collective: every rank must call it.
    pub fn gather_gradient(&self, u: usize, mut gradient: ReducedGradient) -> Result<ReducedGradient> {
        if gradient.whole.is_none() && self.world > 1 {
            let whole =
                self.allocate_zeros(self.shards[u].unit.to_trained_range(self.optimizer_range(u)).len());
            gradient.whole =
                Some(self.gather_trained_vector(u, std::mem::take(&mut gradient.owned), whole)?);
        }
        Ok(gradient)
    }

    /// Gathers a vector with one element per trained element of parameter unit `u`, such as a
    /// gradient, from the ranks that own its parts. `owned` is this rank's shard of the vector.
    /// `whole` must have the length of the whole vector on ranks that own a part of the unit, and
    /// be empty on others. Collective: every rank must call it.
    pub fn gather_trained_vector(&self, u: usize, owned: Buf, mut whole: Buf) -> Result<Buf> {
        let (shards, ops, buffers) = (self.shards.clone(), self.ops.clone(), self.exchange.clone());
        self.queue.run_and_wait(move |comm: &dyn Comm| {
            let (s, mut buffers, to) = (&shards[u], lock_ignoring_poison(&buffers), whole.view_mut());
            buffers.gather_from_owners(comm, &*ops, s.unit.owners, &s.trained_counts, to, owned.view())?;
            Ok(whole)
        })
    }

    /// Allocates an fp32 buffer of `len` zeros.
    fn allocate_zeros(&self, len: usize) -> Buf {
        self.ops.zeroed(Dtype::F32, len)
    }
}

/// Returns whether the communication library, such as NCCL, may sum the gradients of the ranks in a
/// reduce-scatter, in which the order of addition is not fixed. `ranges` are the micro-batches of
/// the partial sums of each rank. The result is equal on all ranks.
fn can_sum_in_transport(comm: &dyn Comm, policy: ShardingPolicy, ranges: &[Vec<MicroBatchRange>]) -> bool {
    let has_one_sum = ranges.iter().all(|of_rank| of_rank.len() == 1);
    policy.sums_in_arrival_order && comm.has_native_reduce_scatter() && has_one_sum
}

/// Sends `partials`, this rank's partial sums of a gradient, to the ranks that own its parts, in
/// two levels if `groups` is given. Passes the partial sums of this rank's part to `sink`, in the
/// order of the micro-batches.
///
/// Collective: every rank must call it.
fn reduce_pieces(
    comm: &dyn Comm,
    ops: &dyn Ops,
    (groups, buffers): (Option<HostGroups>, &Mutex<ExchangeBuffers>),
    partials: &[View],
    pieces: ReducedPieces,
    sink: &mut dyn FnMut(MicroBatchRange, View),
) -> Result<()> {
    if let Some(groups) = groups {
        let mut buffers = lock_ignoring_poison(buffers);
        return groups.reduce(comm, ops, &mut buffers, partials, pieces, sink);
    }
    let partial_counts: Vec<usize> = pieces.ranges.iter().map(Vec::len).collect();
    let sink = &mut |from: usize, index: usize, piece: View| sink(pieces.ranges[from][index], piece);
    comm.reduce_scatter_ordered(partials, &partial_counts, pieces.counts, sink)
}

/// Reduces the partial sums `sums`, which each rank has of a whole gradient, to the owners of its
/// elements. Returns the sum of this rank's shard, in a buffer of `reduced`. `counts` are the
/// lengths of all ranks' shards.
///
/// Collective: every rank must call it.
fn reduce_partial_sums_of_ranks(
    comm: &dyn Comm,
    ops: &dyn Ops,
    (policy, schedule): (ShardingPolicy, MicroBatchSchedule),
    levels: (Option<HostGroups>, &Mutex<ExchangeBuffers>),
    (sums, counts): (&MicroBatchSums, &[usize]),
    reduced: &mut MicroBatchSums,
) -> Result<Buf> {
    let partials: Vec<View> = sums.partial_sums().map(|(_, v)| v).collect();
    let ranges: Vec<Vec<MicroBatchRange>> =
        (0..schedule.world).map(|rank| list_partial_sum_ranges(policy, schedule, rank)).collect();
    if let [partial] = partials[..]
        && can_sum_in_transport(comm, policy, &ranges)
    {
        let mut sum = reduced.take_buffer(ops);
        comm.reduce_scatter(sum.view_mut(), partial, counts)?;
        return Ok(sum);
    }
    let sink = &mut |range, piece: View| reduced.push_copy(ops, range, piece);
    reduce_pieces(comm, ops, levels, &partials, ReducedPieces { ranges: &ranges, counts }, sink)?;
    Ok(reduced.finish_sum(ops).unwrap_or_else(|| ops.zeroed(Dtype::F32, counts[comm.rank()])))
}

/// Returns the micro-batch ranges for which the rank `rank` keeps one gradient sum each until the
/// end of a step.
fn list_partial_sum_ranges(
    policy: ShardingPolicy,
    schedule: MicroBatchSchedule,
    rank: usize,
) -> Vec<MicroBatchRange> {
    let mine: Vec<usize> =
        (0..schedule.count_rounds()).filter_map(|r| schedule.find_micro_batch(rank, r)).collect();
    let range = mine.first().map_or(0..0, |&a| a..a + mine.len());
    if policy.sums_in_arrival_order && !range.is_empty() {
        return vec![MicroBatchRange { start: range.start, len: range.len() }];
    }
    split_into_tree_ranges(range)
}
