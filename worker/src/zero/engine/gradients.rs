//! Gradients of every unit: buffers for the backward pass, sums over sample slots, and reduction to
//! their owners.
use super::super::{
    ShardingPolicy, SlotSchedule,
    owner_groups::{exchange_partial_sums, gather_from_owners, runs_of_group},
    slot_sums::{SlotRun, SlotSums, merged_runs},
};
use super::{Engine, REDUCTIONS_IN_FLIGHT, lock};
use comm::{Comm, Result};
use device::{Buf, Dtype, View, with_alloc_label};

impl Engine {
    /// A buffer for the whole gradient of unit `u`, with unspecified content.
    pub fn take_gradient_buffer(&mut self, u: usize) -> Buf {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        let is_temporary =
            self.reduces_during_backward() || !unit.all_trained() || self.accumulates_in_place(u);
        with_alloc_label("gradients", || match is_temporary {
            true => lock(&self.gradient_pool).take(ops, unit.len()),
            false => lock(&self.shards[u].grads).take_buffer(ops),
        })
    }

    /// Moves the trained elements of a whole gradient into a buffer of the sums.
    fn trained_gradient(&self, u: usize, mut whole: Buf) -> Buf {
        let shard = &self.shards[u];
        if shard.unit.all_trained() {
            return whole;
        }
        let ops = self.ops.as_ref();
        shard.unit.pack_trained(ops, whole.view_mut());
        let mut packed = lock(&shard.grads).take_buffer(ops);
        ops.copy(packed.view_mut(), whole.view().slice(0..shard.unit.trained_len()));
        lock(&self.gradient_pool).give(whole);
        packed
    }

    /// Whether gradients of unit `u` are added to an existing sum.
    fn accumulates_in_place(&self, u: usize) -> bool {
        self.policy.sums_in_arrival_order && !lock(&self.shards[u].grads).is_empty()
    }

    /// Adds the whole gradient of one slot to this rank's sums of unit `u`.
    fn add_to_sums(&self, u: usize, slot: usize, mut gradient: Buf) {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        if !self.accumulates_in_place(u) {
            let owned = self.trained_gradient(u, gradient);
            return lock(&self.shards[u].grads).push_owned(ops, SlotRun::single_slot(slot), owned);
        }
        if !unit.all_trained() {
            unit.pack_trained(ops, gradient.view_mut());
        }
        let trained = gradient.view().slice(0..unit.trained_len());
        lock(&self.shards[u].grads).push(ops, SlotRun::single_slot(slot), trained);
        lock(&self.gradient_pool).give(gradient);
    }

    /// Whether gradients are reduced to their owners during the backward pass.
    fn reduces_during_backward(&self) -> bool {
        self.policy.shard_gradients && self.world > 1
    }

    /// Reduces the whole gradient of unit `u` for one slot. Every rank calls this for every unit
    /// and round, with `None` when it has no slot in the round. Frozen parameters are not reduced.
    pub fn reduce_gradient(&mut self, u: usize, round: usize, mut gradient: Option<Buf>) -> Result<()> {
        let shards = self.shards.clone();
        let unit = &shards[u].unit;
        if !unit.any_trained() {
            gradient.into_iter().for_each(|g| lock(&self.gradient_pool).give(g));
            return Ok(());
        }
        if !self.reduces_during_backward() {
            if let (Some(g), Some(slot)) = (gradient, self.slots.slot(self.rank, round)) {
                self.add_to_sums(u, slot, g);
            }
            return Ok(());
        }
        if let Some(g) = gradient.as_mut().filter(|_| !unit.all_trained()) {
            unit.pack_trained(self.ops.as_ref(), g.view_mut());
        }
        let (shards, slots, ops, pool) =
            (shards.clone(), self.slots, self.ops.clone(), self.gradient_pool.clone());
        self.pending_reductions.push_back(self.queue.submit(move |comm: &dyn Comm| {
            let s = &shards[u];
            let mut sums = lock(&s.grads);
            let whole = gradient.as_ref().map(|g| g.view().slice(0..s.trained_counts.iter().sum()));
            comm.reduce_scatter_ordered(whole.as_slice(), &s.trained_counts, &mut |from, _, piece| {
                if let Some(slot) = slots.slot(from, round) {
                    sums.push(ops.as_ref(), SlotRun::single_slot(slot), piece);
                }
            })?;
            if let Some(g) = gradient {
                lock(&pool).give_back_after(g, ops.record_event());
            }
            Ok(())
        }));
        while self.pending_reductions.len() > REDUCTIONS_IN_FLIGHT {
            self.pending_reductions.pop_front().expect("not empty").wait()?;
        }
        Ok(())
    }

    /// Empty sums for gradients of unit `u` over several slots. [`Engine::push_slot_gradient`] adds
    /// to them in the order of the slots, and [`Engine::reduce_runs`] reduces them.
    pub fn take_run_sums(&self, u: usize) -> SlotSums {
        let len = self.shards[u].unit.trained_len();
        let Some((pooled, last_use)) = lock(&self.run_sums_pool).pop() else { return SlotSums::new(len) };
        last_use.stream_wait(); // also before the memory is freed
        if pooled.len() == len { pooled } else { SlotSums::new(len) }
    }

    /// Adds the gradient of unit `u` for one slot, which `write` computes for the whole unit.
    /// Frozen parameters are left out; `write` is not called when the whole unit is frozen.
    pub fn push_slot_gradient(
        &self,
        u: usize,
        runs: &mut SlotSums,
        slot: usize,
        write: impl FnOnce(&mut Buf),
    ) {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        let mut gradient = runs.take_buffer(ops);
        if unit.all_trained() {
            write(&mut gradient);
        } else if unit.any_trained() {
            let mut whole = lock(&self.gradient_pool).take(ops, unit.len());
            write(&mut whole);
            unit.pack_trained(ops, whole.view_mut());
            ops.copy(gradient.view_mut(), whole.view().slice(0..unit.trained_len()));
            lock(&self.gradient_pool).give(whole);
        }
        runs.push_owned(ops, SlotRun::single_slot(slot), gradient);
    }

    /// Reduces the gradients of unit `u`, which only some ranks own, over the slots that this
    /// rank's group computed in this round. Every rank calls this for one of its units in every
    /// round, possibly with empty sums.
    pub fn reduce_runs(&mut self, u: usize, round: usize, runs: SlotSums) -> Result<()> {
        let (shards, slots, ops) = (self.shards.clone(), self.slots, self.ops.clone());
        let (pool, buffers) = (self.run_sums_pool.clone(), self.exchange.clone());
        self.pending_reductions.push_back(self.queue.submit(move |comm: &dyn Comm| {
            let s = &shards[u];
            let sent = runs_of_group(&slots, s.unit.owners, comm.rank(), round);
            assert!(
                runs.partials().map(|(run, _)| run).eq(sent),
                "the sums cover other slots than the schedule"
            );
            let mut sums = lock(&s.grads);
            let (ops, buffers) = (ops.as_ref(), &mut lock(&buffers));
            let mut sink = |run, piece: View| sums.push(ops, run, piece);
            exchange_partial_sums(
                comm,
                ops,
                buffers,
                (&s.unit, &s.partition),
                &slots,
                round,
                &runs,
                &mut sink,
            )?;
            let mut runs = runs;
            runs.clear();
            lock(&pool).push((runs, ops.record_event()));
            Ok(())
        }));
        while self.pending_reductions.len() > REDUCTIONS_IN_FLIGHT {
            self.pending_reductions.pop_front().expect("not empty").wait()?;
        }
        Ok(())
    }

    /// The summed gradient of the trained elements in this rank's shard of unit `u`, after the last
    /// round.
    pub fn finish_gradient(&mut self, u: usize) -> Result<Buf> {
        for t in self.pending_reductions.drain(..) {
            t.wait()?;
        }
        let owned = self.owned_trained_len(u);
        if !self.shards[u].unit.any_trained() {
            return Ok(self.zeros(0));
        }
        if self.policy.shard_gradients || self.world == 1 {
            let sum = lock(&self.shards[u].grads).finish(self.ops.as_ref());
            return Ok(sum.unwrap_or_else(|| self.zeros(owned)));
        }
        let (shards, ops, slots, policy) = (self.shards.clone(), self.ops.clone(), self.slots, self.policy);
        self.queue.run(move |comm: &dyn Comm| {
            let s = &shards[u];
            let mut whole = lock(&s.grads);
            let partials: Vec<View> = whole.partials().map(|(_, v)| v).collect();
            let mut sums = policy.new_gradient_sums(owned);
            comm.reduce_scatter_ordered(&partials, &s.trained_counts, &mut |from, index, piece| {
                sums.push(ops.as_ref(), partial_run(policy, slots, from, index), piece);
            })?;
            drop(partials);
            whole.clear();
            Ok(sums.finish(ops.as_ref()).unwrap_or_else(|| ops.zeroed(Dtype::F32, owned)))
        })
    }

    /// Returns the buffer of a finished gradient to the pool.
    pub fn recycle_gradient(&self, u: usize, gradient: Buf) {
        lock(&self.shards[u].grads).recycle(gradient);
    }

    /// Gathers the finished gradient of every rank's shard into the whole gradient.
    pub fn gather_gradient(&self, u: usize, owned: Buf) -> Result<Buf> {
        if self.world == 1 {
            return Ok(owned);
        }
        let whole = match self.policy.shard_gradients {
            // the partial sums of the whole gradient are empty now, so their memory is reused
            false => lock(&self.shards[u].grads).take_buffer(self.ops.as_ref()),
            true => self.zeros(self.shards[u].unit.trained_range(self.update_range(u)).len()),
        };
        self.gather_trained(u, owned, whole)
    }

    /// Gathers every rank's shard of a trained vector of unit `u` into `whole`.
    pub fn gather_trained(&self, u: usize, owned: Buf, mut whole: Buf) -> Result<Buf> {
        let (shards, ops, buffers) = (self.shards.clone(), self.ops.clone(), self.exchange.clone());
        self.queue.run(move |comm: &dyn Comm| {
            let (s, buffers) = (&shards[u], &mut lock(&buffers));
            gather_from_owners(
                comm,
                ops.as_ref(),
                buffers,
                s.unit.owners,
                &s.trained_counts,
                whole.view_mut(),
                owned.view(),
            )?;
            Ok(whole)
        })
    }

    /// An fp32 buffer of `len` zeros.
    fn zeros(&self, len: usize) -> Buf {
        self.ops.zeroed(Dtype::F32, len)
    }
}

/// The run of slots that the `index`-th partial sum of rank `from` covers.
fn partial_run(policy: ShardingPolicy, slots: SlotSchedule, from: usize, index: usize) -> SlotRun {
    let mine: Vec<usize> = (0..slots.rounds()).filter_map(|r| slots.slot(from, r)).collect();
    let range = mine.first().map_or(0..0, |&a| a..a + mine.len());
    if policy.sums_in_arrival_order {
        return SlotRun { start: range.start, len: range.len() };
    }
    merged_runs(range).get(index).copied().unwrap_or(SlotRun { start: 0, len: 0 })
}
