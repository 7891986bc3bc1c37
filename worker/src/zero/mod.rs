//! ZeRO: divides parameters, gradients and optimizer states among ranks, and gathers and reduces
//! them when they are needed.
//!
//! This module works on parameter units and does not know model families.
pub mod buffer_pool;
pub mod collective_queue;
pub mod engine;
pub mod gather_retention;
pub mod micro_batch_sums;
pub mod owner_collectives;
pub mod param_dtypes;
pub mod partition;
pub mod reduced_gradient;
pub mod two_level_reduction;
pub mod unit_shard;

use jobspec::TrainSpec;
use micro_batch_sums::MicroBatchSums;

/// Which of optimizer states, gradients and parameters are divided among ranks (ZeRO), and in which
/// order gradients are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardingPolicy {
    /// The ZeRO stage, for messages and checkpoints.
    pub stage: u8,
    /// Whether each rank keeps only the optimizer states of the shards that it owns.
    pub shard_optimizer: bool,
    /// Whether gradients are reduced to their owners during each backward pass. Otherwise whole
    /// gradients are kept until the last micro-batch.
    pub shard_gradients: bool,
    /// Whether each rank keeps only its shards of the parameters. Whole parameters are then
    /// gathered before their use and released afterwards.
    pub shard_parameters: bool,
    /// Whether gradients of several micro-batches are added in the order in which they are
    /// computed, not by the fixed tree.
    pub sums_in_arrival_order: bool,
}

impl ShardingPolicy {
    /// Returns which of optimizer states, gradients and parameters are divided among ranks in ZeRO
    /// stage `stage` (0 to 3).
    pub fn for_stage(stage: u8) -> Self {
        ShardingPolicy {
            stage,
            shard_optimizer: stage >= 1,
            shard_gradients: stage >= 2,
            shard_parameters: stage >= 3,
            sums_in_arrival_order: false,
        }
    }

    /// Returns the policy that the job's ZeRO stage, expert-parallel size and `train.deterministic`
    /// require.
    pub fn for_job(train: &TrainSpec) -> Self {
        let sums_in_arrival_order = !train.deterministic;
        ShardingPolicy {
            sums_in_arrival_order,
            ..ShardingPolicy::for_stage(train.zero.stage)
                .with_expert_parallelism(train.experts.expert_parallel_size as usize)
        }
    }

    /// Creates an accumulator that sums gradients of `len` elements over micro-batches, in a fixed
    /// order or in the order in which they arrive.
    fn new_gradient_sum(&self, len: usize) -> MicroBatchSums {
        if self.sums_in_arrival_order {
            MicroBatchSums::new_with_arrival_order(len)
        } else {
            MicroBatchSums::new(len)
        }
    }

    /// Returns this policy changed for expert parallelism: if `parallel`, the size of an
    /// expert-parallel group, is above 1, gradients are always sharded.
    ///
    /// In each round, a rank then computes gradients of its experts for the micro-batches of its
    /// whole group. Gradients are therefore reduced during the backward pass at every stage.
    pub fn with_expert_parallelism(self, parallel: usize) -> Self {
        ShardingPolicy { shard_gradients: self.shard_gradients || parallel > 1, ..self }
    }

    /// Returns whether a rank stores only its shard of the parameters that the optimizer updates,
    /// instead of all of these parameters. If `masters` is set, the updated parameters are the fp32
    /// master weights, which are sharded like optimizer states.
    pub fn shards_updated_params(&self, masters: bool) -> bool {
        if masters { self.shard_optimizer } else { self.shard_parameters }
    }
}

/// The assignment of a step's micro-batches to ranks and to rounds, in each of which a rank runs
/// one forward and backward pass.
///
/// The sum over micro-batches is one fixed tree, so the assignment does not affect any bit. The
/// assignment decides which partial sums must be kept. With sharded gradients, consecutive
/// micro-batches go to different ranks, so that the owner of a shard can sum the gradients of a
/// round immediately after the round. Otherwise each rank computes a contiguous range of
/// micro-batches and sums their gradients locally.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatchSchedule {
    /// Number of micro-batches in a global batch.
    pub micro_batches: usize,
    /// Number of ranks.
    pub world: usize,
    /// Whether consecutive micro-batches go to different ranks.
    pub interleaved: bool,
}

impl MicroBatchSchedule {
    /// Returns the number of rounds (one forward and backward pass of every rank) in a step, which
    /// is the number of micro-batches per rank, rounded up. The number is equal on every rank.
    pub fn count_rounds(&self) -> usize {
        self.micro_batches.div_ceil(self.world)
    }

    /// Returns the number of the micro-batch that the rank `rank` computes in round number `round`,
    /// or `None` if no micro-batch is left for this rank.
    pub fn find_micro_batch(&self, rank: usize, round: usize) -> Option<usize> {
        if self.interleaved {
            let s = round * self.world + rank;
            (s < self.micro_batches).then_some(s)
        } else {
            let (a, b) =
                (self.micro_batches * rank / self.world, self.micro_batches * (rank + 1) / self.world);
            (a + round < b).then_some(a + round)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_micro_batch_is_computed_once_and_in_order() {
        for micro_batches in 1..=20 {
            for world in 1..=16 {
                for interleaved in [false, true] {
                    let s = MicroBatchSchedule { micro_batches, world, interleaved };
                    let mut seen = vec![0; micro_batches];
                    let mut in_rank_order = Vec::new();
                    for rank in 0..world {
                        let mine: Vec<_> =
                            (0..s.count_rounds()).filter_map(|r| s.find_micro_batch(rank, r)).collect();
                        assert!(mine.is_sorted());
                        mine.iter().for_each(|&i| seen[i] += 1);
                        in_rank_order.extend(mine);
                    }
                    assert_eq!(seen, vec![1; micro_batches], "{s:?}");
                    assert!(interleaved || in_rank_order.is_sorted(), "{s:?}");
                }
            }
        }
    }
}
