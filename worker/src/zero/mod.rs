//! ZeRO: who owns which part of every unit, and how the parts come together when they are needed.
//!
//! Knows units of parameters, never a model family.
pub mod engine;
pub mod fold;
pub mod groups;
pub mod live;
pub mod partition;
pub mod pool;
pub mod queue;

use contract::job::{Numerics, TrainSpec};
use fold::FoldStack;

/// What a ZeRO stage means, as three independent choices, and how gradients are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Stage, for messages and checkpoints.
    pub stage: u8,
    /// Each rank keeps optimizer states of its own part only.
    pub shard_optimizer: bool,
    /// Gradients are reduced to their owner during each backward; else kept whole until the last micro-batch.
    pub shard_gradients: bool,
    /// Parameters are gathered before use and released after.
    pub shard_parameters: bool,
    /// Gradients of several slots are added up as they come, not by the fixed tree.
    pub in_order: bool,
}

impl Policy {
    /// The policy of stage 0, 1, 2 or 3.
    pub fn of_stage(stage: u8) -> Self {
        Policy {
            stage,
            shard_optimizer: stage >= 1,
            shard_gradients: stage >= 2,
            shard_parameters: stage >= 3,
            in_order: false,
        }
    }

    /// What a job asks for.
    pub fn of(train: &TrainSpec) -> Self {
        let in_order = train.numerics == Numerics::Fast;
        Policy {
            in_order,
            ..Policy::of_stage(train.zero.stage).with_experts(train.experts.parallel as usize)
        }
    }

    /// Where gradients of `len` elements are summed over slots.
    fn sums(&self, len: usize) -> FoldStack {
        if self.in_order { FoldStack::in_order(len) } else { FoldStack::new(len) }
    }

    /// The same when experts are spread over groups of `parallel` ranks: a rank then has gradients of its experts for slots of
    /// its whole group in each round, so gradients are reduced at once in every stage.
    pub fn with_experts(self, parallel: usize) -> Self {
        Policy { shard_gradients: self.shard_gradients || parallel > 1, ..self }
    }

    /// Does a rank keep the parameters that are updated of its own part alone? `f32` masters of 16-bit ones belong to the
    /// optimizer's states.
    pub fn keeps_own(&self, masters: bool) -> bool {
        if masters { self.shard_optimizer } else { self.shard_parameters }
    }
}

/// Which logical slots of a global batch a rank computes, and when (docs/numerics.md).
///
/// The sum over slots is one fixed tree, so the assignment changes no bit; it only decides what must be kept. With
/// sharded gradients slots are dealt out round by round, so that each round's pieces can be folded at their owner at once;
/// else each rank takes a contiguous run and folds it by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Logical slots per global batch.
    pub slots: usize,
    /// Ranks.
    pub world: usize,
    /// Dealt out round by round.
    pub interleaved: bool,
}

impl Slots {
    /// Forward/backward rounds per optimizer step (the same on every rank).
    pub fn rounds(&self) -> usize {
        self.slots.div_ceil(self.world)
    }

    /// The slot that `rank` computes in `round`; `None`: it only takes part in collectives.
    pub fn slot(&self, rank: usize, round: usize) -> Option<usize> {
        if self.interleaved {
            let s = round * self.world + rank;
            (s < self.slots).then_some(s)
        } else {
            let (a, b) = (self.slots * rank / self.world, self.slots * (rank + 1) / self.world);
            (a + round < b).then_some(a + round)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_computed_once_and_in_order() {
        for slots in 1..=20 {
            for world in 1..=16 {
                for interleaved in [false, true] {
                    let s = Slots { slots, world, interleaved };
                    let mut seen = vec![0; slots];
                    let mut in_rank_order = Vec::new();
                    for rank in 0..world {
                        let mine: Vec<_> = (0..s.rounds()).filter_map(|r| s.slot(rank, r)).collect();
                        assert!(mine.is_sorted());
                        mine.iter().for_each(|&i| seen[i] += 1);
                        in_rank_order.extend(mine);
                    }
                    assert_eq!(seen, vec![1; slots], "{s:?}");
                    assert!(interleaved || in_rank_order.is_sorted(), "{s:?}");
                }
            }
        }
    }
}
