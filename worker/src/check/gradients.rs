//! Gradients at their peak: sums, and what is written and travels.
use super::memory::Memory;
use crate::{
    params::Unit,
    trained::first_backward,
    zero::{
        Policy,
        engine::REDUCTIONS_IN_FLIGHT,
        fold::{Run, buffers},
        groups,
        pool::PoolPlan,
    },
};
use std::collections::VecDeque;

impl Memory<'_> {
    /// Elements of gradients at their peak, by the decisions that the engine's pools take.
    pub(super) fn gradients(&self, policy: Policy, rank: usize) -> u64 {
        let gradients = match policy.shard_gradients && self.world > 1 {
            true => self.sharded_gradients(policy, rank),
            false => self.whole_gradients(policy, rank),
        };
        gradients as u64
    }

    /// Elements of gradients that a rank keeps whole until the last slot.
    fn whole_gradients(&self, policy: Policy, rank: usize) -> usize {
        let s = self.slots(policy);
        let whole: usize = self.mine(rank).map(Unit::trained_len).sum();
        let own: usize = self.own_trained(rank).iter().sum();
        let mine = (0..s.rounds()).filter(|&r| s.slot(rank, r).is_some()).count();
        // The finished part of every unit waits for the update.
        let finished = if self.world == 1 { 0 } else { own };
        if policy.in_order && mine > 1 {
            return whole + finished + self.written_gradients(policy, rank, 0, |_| true);
        }
        // What a backward writes of a unit that is frozen in part, before its trained tensors are put together.
        let mixed = self.written_gradients(policy, rank, 0, |u| !u.all_trained());
        whole * buffers((0..mine).map(Run::slot), true) + finished + mixed
    }

    /// Elements of gradients that travel to their owners during each backward: of the owned part one partial sum for each level of
    /// the tree, and the gradients that are written and travel.
    fn sharded_gradients(&self, policy: Policy, rank: usize) -> usize {
        let slots = self.slots(policy);
        let own = self.units.iter().zip(self.own_trained(rank));
        let sums = own.map(|(u, own)| match policy.in_order {
            true => own,
            false => own * groups::buffers_of_owner(&slots, u.owners),
        });
        sums.sum::<usize>() + self.written_gradients(policy, rank, REDUCTIONS_IN_FLIGHT, |_| true)
    }

    /// Elements of the buffers for gradients that backwards write beside the sums, of the units that have some: while
    /// `in_flight` of them travel, the next one is written.
    fn written_gradients(
        &self,
        policy: Policy,
        rank: usize,
        in_flight: usize,
        has: impl Fn(&Unit) -> bool,
    ) -> usize {
        let mut written = Written { in_flight, ..Written::default() };
        let (head, layers) = self.layers(rank);
        let trains = |u: usize| self.units[u].any_trained();
        let slots = self.slots(policy);
        // The second round finds the last gradient of the first one on its way.
        for _ in 0..slots.rounds().min(2) {
            let take =
                |w: &mut Written, u: usize| has(&self.units[u]).then(|| w.pool.take(self.units[u].len()));
            let of_head = take(&mut written, head);
            // The head begins the gradient of an embedding that is tied to it.
            let tied = self.model.tied() && trains(0);
            let mut of_embedding = if tied { take(&mut written, 0) } else { None };
            written.leave(of_head, trains(head));
            for &u in layers[first_backward(self.units)..].iter().rev().flat_map(|l| l.iter().rev()) {
                let unit = &self.units[u];
                if unit.owners.all() {
                    // Experts that are frozen get no gradient.
                    let asked = trains(u) || !unit.holds_experts();
                    let gradient = if asked { take(&mut written, u) } else { None };
                    written.leave(gradient, trains(u));
                    continue;
                }
                let mixed = if unit.all_trained() || !trains(u) { None } else { take(&mut written, u) };
                written.leave(mixed, false);
                written.leave_stack(unit.trained_len() * groups::buffers_of_group(&slots, unit.owners, rank));
            }
            if trains(0) {
                let gradient = of_embedding.take().or_else(|| take(&mut written, 0));
                written.leave(gradient, true);
            }
        }
        written.pool.allocated + written.stacks
    }
}

/// Gradients that are written in the buffers of a pool, and leave.
#[derive(Default)]
struct Written {
    pool: PoolPlan,
    /// How many may travel when the next one is written.
    in_flight: usize,
    /// Oldest first: the elements of its buffer, or none of a stack of several slots' gradients.
    travelling: VecDeque<Option<usize>>,
    /// Elements of all such stacks, and how many of them are free.
    stacks: usize,
    free_stacks: usize,
}

impl Written {
    /// A gradient is done, if there is one. What isn't reduced is given back at once.
    fn leave(&mut self, gradient: Option<usize>, reduced: bool) {
        let Some(len) = gradient else { return };
        match reduced {
            true => self.travel(Some(len)),
            false => self.pool.give(len),
        }
    }

    /// A stack of `len` elements is filled and leaves.
    fn leave_stack(&mut self, len: usize) {
        match self.free_stacks.checked_sub(1) {
            Some(left) => self.free_stacks = left,
            None => self.stacks += len,
        }
        self.travel(None);
    }

    fn travel(&mut self, what: Option<usize>) {
        self.travelling.push_back(what);
        while self.travelling.len() > self.in_flight {
            match self.travelling.pop_front().flatten() {
                Some(len) => self.pool.give(len),
                None => self.free_stacks += 1,
            }
        }
    }
}
