//! Gradients of every unit: a buffer for a backward, sums over slots, reduction to their owners.
use super::super::{
    Policy, Slots,
    fold::{FoldStack, Run, maximal_runs},
    groups::{gather, runs_of, trade_runs},
};
use super::{Engine, REDUCTIONS_IN_FLIGHT, lock};
use comm::{Comm, Result};
use device::{Buf, Dtype, View, needed_for};

impl Engine {
    /// A buffer for the whole gradient of unit `u`, content unspecified.
    pub fn gradient(&mut self, u: usize) -> Buf {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        let elsewhere = self.reduces_at_once() || !unit.all_trained() || self.adds(u);
        needed_for("gradients", || match elsewhere {
            true => lock(&self.whole_grads).take(ops, unit.len()),
            false => lock(&self.shards[u].grads).take(ops),
        })
    }

    /// The trained part of a whole gradient that [`Engine::gradient`] gave, in a buffer of the sums.
    fn trained_gradient(&self, u: usize, mut whole: Buf) -> Buf {
        let shard = &self.shards[u];
        if shard.unit.all_trained() {
            return whole;
        }
        let ops = self.ops.as_ref();
        shard.unit.pack_trained(ops, whole.view_mut());
        let mut packed = lock(&shard.grads).take(ops);
        ops.copy(packed.view_mut(), whole.view().slice(0..shard.unit.trained_len()));
        lock(&self.whole_grads).give(whole);
        packed
    }

    /// Is there a sum of unit `u` already, to which a gradient that lies elsewhere is added?
    fn adds(&self, u: usize) -> bool {
        self.policy.in_order && !lock(&self.shards[u].grads).is_empty()
    }

    /// Adds one slot's whole gradient of unit `u` to the sums that this rank keeps.
    fn keep(&self, u: usize, slot: usize, mut gradient: Buf) {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        if !self.adds(u) {
            let own = self.trained_gradient(u, gradient);
            return lock(&self.shards[u].grads).push_owned(ops, Run::slot(slot), own);
        }
        if !unit.all_trained() {
            unit.pack_trained(ops, gradient.view_mut());
        }
        let trained = gradient.view().slice(0..unit.trained_len());
        lock(&self.shards[u].grads).push(ops, Run::slot(slot), trained);
        lock(&self.whole_grads).give(gradient);
    }

    fn reduces_at_once(&self) -> bool {
        self.policy.shard_gradients && self.world > 1
    }

    /// Takes one slot's whole gradient of unit `u`; every rank calls this for every unit and round, with `None` where it has
    /// no slot in this round. What is frozen is not reduced.
    pub fn reduce(&mut self, u: usize, round: usize, mut gradient: Option<Buf>) -> Result<()> {
        let shards = self.shards.clone();
        let unit = &shards[u].unit;
        if !unit.any_trained() {
            gradient.into_iter().for_each(|g| lock(&self.whole_grads).give(g));
            return Ok(());
        }
        if !self.reduces_at_once() {
            if let (Some(g), Some(slot)) = (gradient, self.slots.slot(self.rank, round)) {
                self.keep(u, slot, g);
            }
            return Ok(());
        }
        if let Some(g) = gradient.as_mut().filter(|_| !unit.all_trained()) {
            unit.pack_trained(self.ops.as_ref(), g.view_mut());
        }
        let (shards, slots, ops, pool) =
            (shards.clone(), self.slots, self.ops.clone(), self.whole_grads.clone());
        self.reducing.push_back(self.queue.submit(move |comm: &dyn Comm| {
            let s = &shards[u];
            let mut fold = lock(&s.grads);
            let whole = gradient.as_ref().map(|g| g.view().slice(0..s.trained.iter().sum()));
            comm.reduce_scatter_fold(whole.as_slice(), &s.trained, &mut |from, _, piece| {
                if let Some(slot) = slots.slot(from, round) {
                    fold.push(ops.as_ref(), Run::slot(slot), piece);
                }
            })?;
            if let Some(g) = gradient {
                lock(&pool).give_behind(g, ops.mark());
            }
            Ok(())
        }));
        while self.reducing.len() > REDUCTIONS_IN_FLIGHT {
            self.reducing.pop_front().expect("not empty").wait()?;
        }
        Ok(())
    }

    /// For gradients of unit `u` by several slots, which [`Engine::push_run`] adds in the order of the slots and
    /// [`Engine::reduce_runs`] takes.
    pub fn runs(&self, u: usize) -> FoldStack {
        let len = self.shards[u].unit.trained_len();
        let Some((pooled, mark)) = lock(&self.run_grads).pop() else { return FoldStack::new(len) };
        mark.follow(); // also where it is given back to the card
        if pooled.len() == len { pooled } else { FoldStack::new(len) }
    }

    /// Adds the gradient of unit `u` by one slot, which `write` writes whole. What is frozen is left out, and where all is,
    /// nothing is written.
    pub fn push_run(&self, u: usize, runs: &mut FoldStack, slot: usize, write: impl FnOnce(&mut Buf)) {
        let (unit, ops) = (&self.shards[u].unit, self.ops.as_ref());
        let mut kept = runs.take(ops);
        if unit.all_trained() {
            write(&mut kept);
        } else if unit.any_trained() {
            let mut whole = lock(&self.whole_grads).take(ops, unit.len());
            write(&mut whole);
            unit.pack_trained(ops, whole.view_mut());
            ops.copy(kept.view_mut(), whole.view().slice(0..unit.trained_len()));
            lock(&self.whole_grads).give(whole);
        }
        runs.push_owned(ops, Run::slot(slot), kept);
    }

    /// Takes the gradients of unit `u`, whose owners are not all ranks, by the slots that this rank's group of neighbours
    /// computed in this round, folded as far as they go. Every rank calls this for a unit of its own in every round, also with
    /// nothing.
    pub fn reduce_runs(&mut self, u: usize, round: usize, runs: FoldStack) -> Result<()> {
        let (shards, slots, ops) = (self.shards.clone(), self.slots, self.ops.clone());
        let (pool, messages) = (self.run_grads.clone(), self.messages.clone());
        self.reducing.push_back(self.queue.submit(move |comm: &dyn Comm| {
            let s = &shards[u];
            let sent = runs_of(&slots, s.unit.owners, comm.rank(), round);
            assert!(runs.partials().map(|(run, _)| run).eq(sent), "gradients of other slots than were dealt");
            let mut fold = lock(&s.grads);
            let (ops, messages) = (ops.as_ref(), &mut lock(&messages));
            let mut sink = |run, piece: View| fold.push(ops, run, piece);
            trade_runs(comm, ops, messages, (&s.unit, &s.part), &slots, round, &runs, &mut sink)?;
            let mut runs = runs;
            runs.clear();
            lock(&pool).push((runs, ops.mark()));
            Ok(())
        }));
        while self.reducing.len() > REDUCTIONS_IN_FLIGHT {
            self.reducing.pop_front().expect("not empty").wait()?;
        }
        Ok(())
    }

    /// The summed gradient of the trained tensors in this rank's own part of unit `u`, after the last round.
    pub fn finish(&mut self, u: usize) -> Result<Buf> {
        for t in self.reducing.drain(..) {
            t.wait()?;
        }
        let own = self.own_trained(u);
        if !self.shards[u].unit.any_trained() {
            return Ok(self.zeros(0));
        }
        if self.policy.shard_gradients || self.world == 1 {
            let sum = lock(&self.shards[u].grads).finish(self.ops.as_ref());
            return Ok(sum.unwrap_or_else(|| self.zeros(own)));
        }
        let (shards, ops, slots, policy) = (self.shards.clone(), self.ops.clone(), self.slots, self.policy);
        self.queue.run(move |comm: &dyn Comm| {
            let s = &shards[u];
            let mut whole = lock(&s.grads);
            let partials: Vec<View> = whole.partials().map(|(_, v)| v).collect();
            let mut fold = policy.sums(own);
            comm.reduce_scatter_fold(&partials, &s.trained, &mut |from, index, piece| {
                fold.push(ops.as_ref(), partial_run(policy, slots, from, index), piece);
            })?;
            drop(partials);
            whole.clear();
            Ok(fold.finish(ops.as_ref()).unwrap_or_else(|| ops.zeroed(Dtype::F32, own)))
        })
    }

    /// Gives a finished gradient's memory back.
    pub fn recycle(&self, u: usize, gradient: Buf) {
        lock(&self.shards[u].grads).recycle(gradient);
    }

    /// A finished gradient of the own part, to every rank's whole gradient.
    pub fn gather_gradient(&self, u: usize, own: Buf) -> Result<Buf> {
        if self.world == 1 {
            return Ok(own);
        }
        let whole = match self.policy.shard_gradients {
            // The stack that kept partial sums of the whole gradient is empty now: its memory serves again.
            false => lock(&self.shards[u].grads).take(self.ops.as_ref()),
            true => self.zeros(self.shards[u].unit.trained_range(self.updated(u)).len()),
        };
        self.gather_whole(u, own, whole)
    }

    /// Every rank's own part of a trained vector of unit `u`, put together in `whole`.
    pub fn gather_whole(&self, u: usize, own: Buf, mut whole: Buf) -> Result<Buf> {
        let (shards, ops, messages) = (self.shards.clone(), self.ops.clone(), self.messages.clone());
        self.queue.run(move |comm: &dyn Comm| {
            let (s, messages) = (&shards[u], &mut lock(&messages));
            gather(comm, ops.as_ref(), messages, s.unit.owners, &s.trained, whole.view_mut(), own.view())?;
            Ok(whole)
        })
    }

    fn zeros(&self, len: usize) -> Buf {
        self.ops.zeroed(Dtype::F32, len)
    }
}

/// The run of slots behind the `index`-th partial that rank `from` kept.
fn partial_run(policy: Policy, slots: Slots, from: usize, index: usize) -> Run {
    let mine: Vec<usize> = (0..slots.rounds()).filter_map(|r| slots.slot(from, r)).collect();
    let range = mine.first().map_or(0..0, |&a| a..a + mine.len());
    if policy.in_order {
        return Run { start: range.start, len: range.len() };
    }
    maximal_runs(range).get(index).copied().unwrap_or(Run { start: 0, len: 0 })
}
