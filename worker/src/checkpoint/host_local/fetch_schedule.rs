//! Schedule by which ranks send each other blocks of checkpoint files, in several all-to-all
//! exchanges of limited size ([`FetchSchedule`]). Every rank computes the same schedule.
use ckpt::BlockRange;
use diagnostic::{Diagnostic, codes};
use std::{collections::VecDeque, ops::Range};

/// Maximum number of checkpoint blocks (1 MiB each) that any rank sends or receives in one
/// all-to-all exchange.
pub(super) const MAX_BLOCKS_PER_ROUND: u64 = 8;

/// Consecutive blocks (1 MiB each) of a checkpoint file that rank `from` sends to rank `to` in one
/// all-to-all exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlockTransfer {
    pub(super) to: usize,
    pub(super) from: usize,
    pub(super) run: BlockRange,
}

/// Schedule of all-to-all exchanges in which ranks send blocks of checkpoint files to ranks of
/// other hosts that lack these files.
pub(super) struct FetchSchedule<'h> {
    missing: Vec<VecDeque<BlockRange>>,
    holders: &'h [Vec<usize>],
}

impl<'h> FetchSchedule<'h> {
    /// Creates the schedule of exchanges by which each rank gets the blocks of checkpoint files
    /// that its host does not have. `missing` lists the blocks that each rank needs, `holders` the
    /// ranks that have each file, and `blocks` the number of blocks of each file.
    ///
    /// # Errors
    ///
    /// Fails if a rank requests a block that does not exist or that no rank has.
    pub(super) fn new(
        missing: Vec<Vec<BlockRange>>,
        holders: &'h [Vec<usize>],
        blocks: &[u64],
    ) -> diagnostic::Result<Self> {
        for (rank, run) in missing.iter().enumerate().flat_map(|(rank, m)| m.iter().map(move |r| (rank, r))) {
            let Range { start, end } = run.blocks;
            let has_holder = holders.get(run.file).is_some_and(|h| !h.is_empty());
            if !has_holder || start >= end || blocks.get(run.file).is_none_or(|n| end > *n) {
                let message = format!(
                    "rank {rank} requests blocks {start} to {end} of file {}, which do not exist",
                    run.file
                );
                return Err(
                    Diagnostic::error(codes::training::PEER_REPORT_INVALID, message).with_field("rank", rank)
                );
            }
        }
        Ok(FetchSchedule { missing: missing.into_iter().map(VecDeque::from).collect(), holders })
    }

    /// Plans the next all-to-all exchange of checkpoint blocks between ranks, and returns the
    /// sender, the receiver and the blocks of each transfer. Returns no transfers if all blocks
    /// were sent.
    pub(super) fn plan_next_round(&mut self) -> Vec<BlockTransfer> {
        let mut sends = vec![0u64; self.missing.len()];
        let mut round = Vec::new();
        for (to, queue) in self.missing.iter_mut().enumerate() {
            let mut capacity = MAX_BLOCKS_PER_ROUND;
            while capacity > 0 {
                let Some(run) = queue.front_mut() else { break };
                let Some(from) = select_sender(&self.holders[run.file], to, &sends) else { break };
                let count =
                    capacity.min(MAX_BLOCKS_PER_ROUND - sends[from]).min(run.blocks.end - run.blocks.start);
                let blocks = run.blocks.start..run.blocks.start + count;
                run.blocks.start += count;
                capacity -= count;
                sends[from] += count;
                round.push(BlockTransfer { to, from, run: BlockRange { file: run.file, blocks } });
                if run.blocks.is_empty() {
                    queue.pop_front();
                }
            }
        }
        round
    }
}

/// Selects the rank that sends blocks of a file to rank `to` in one exchange, among the ranks whose
/// host has the file. `holders` are the ranks that have the file. `sends` is the number of blocks
/// that each rank already sends in this round.
///
/// Returns the holder that sends the fewest blocks, or `None` if every holder already sends
/// [`MAX_BLOCKS_PER_ROUND`]. Ties are broken by the receiver's rank, so that different receivers
/// prefer different senders.
fn select_sender(holders: &[usize], to: usize, sends: &[u64]) -> Option<usize> {
    let rotated = (0..holders.len()).map(|i| holders[(i + to) % holders.len()]);
    rotated.filter(|h| sends.get(*h).is_some_and(|n| *n < MAX_BLOCKS_PER_ROUND)).min_by_key(|h| sends[*h])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_block_arrives_once_in_order_from_a_holder_within_the_bounds(
            requests in proptest::collection::vec(proptest::collection::vec((0usize..3, 0u64..40, 1u64..30), 0..4), 4),
            holder_bits in proptest::collection::vec(1u8..16, 3),
        ) {
            let holders: Vec<Vec<usize>> =
                holder_bits.iter().map(|bits| (0..4).filter(|r| bits >> r & 1 == 1).collect()).collect();
            let run = |&(file, start, n): &(usize, u64, u64)| BlockRange { file, blocks: start..start + n };
            let missing: Vec<Vec<BlockRange>> = requests.iter().map(|r| r.iter().map(run).collect()).collect();
            let expand = |runs: &[BlockRange]| -> Vec<(usize, u64)> {
                runs.iter().flat_map(|r| r.blocks.clone().map(|b| (r.file, b))).collect()
            };
            let mut schedule = FetchSchedule::new(missing.clone(), &holders, &[70, 70, 70]).unwrap();
            let mut received: Vec<Vec<BlockRange>> = vec![Vec::new(); 4];
            loop {
                let round = schedule.plan_next_round();
                if round.is_empty() { break }
                for rank in 0..4 {
                    let sum = |mine: &dyn Fn(&BlockTransfer) -> bool| -> u64 {
                        round.iter().filter(|t| mine(t)).map(|t| t.run.blocks.end - t.run.blocks.start).sum()
                    };
                    prop_assert!(sum(&|t| t.to == rank) <= MAX_BLOCKS_PER_ROUND);
                    prop_assert!(sum(&|t| t.from == rank) <= MAX_BLOCKS_PER_ROUND);
                }
                for t in round {
                    prop_assert!(holders[t.run.file].contains(&t.from));
                    received[t.to].push(t.run);
                }
            }
            for (received, missing) in received.iter().zip(&missing) {
                prop_assert_eq!(expand(received), expand(missing));
            }
        }
    }

    #[test]
    fn requests_for_blocks_that_do_not_exist_are_rejected() {
        let request = |file, blocks| vec![vec![BlockRange { file, blocks }]];
        for wrong in [request(1, 0..1), request(0, 0..4), request(0, 2..2), request(9, 0..1)] {
            let error = FetchSchedule::new(wrong, &[vec![0], vec![]], &[3, 3]).err().unwrap();
            assert_eq!(error.code(), codes::training::PEER_REPORT_INVALID);
        }
    }
}
