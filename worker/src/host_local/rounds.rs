//! Who sends which block to whom, and when: the same on every rank, with a named bound for every rank's memory. Pure.
use ckpt::Run;
use std::{collections::VecDeque, ops::Range};

/// The most blocks (1 MiB each) that a rank sends in a round, and that it receives.
pub(super) const ROUND_BLOCKS: u64 = 8;

/// Consecutive blocks that one rank sends to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) to: usize,
    pub(super) from: usize,
    pub(super) run: Run,
}

/// What is still to be sent.
pub(super) struct Rounds<'h> {
    lacking: Vec<VecDeque<Run>>,
    holders: &'h [Vec<usize>],
}

impl<'h> Rounds<'h> {
    /// `lacking`: by rank, the blocks that it needs; `holders`: by file, the ranks that have it. `Err` says which request is
    /// for no block of a file of `blocks`.
    pub(super) fn new(
        lacking: Vec<Vec<Run>>,
        holders: &'h [Vec<usize>],
        blocks: &[u64],
    ) -> Result<Self, String> {
        for run in lacking.iter().flatten() {
            let Range { start, end } = run.blocks;
            let held = holders.get(run.file).is_some_and(|h| !h.is_empty());
            if !held || start >= end || blocks.get(run.file).is_none_or(|n| end > *n) {
                return Err(format!("a rank asks for blocks {start}..{end} of file {}", run.file));
            }
        }
        Ok(Rounds { lacking: lacking.into_iter().map(VecDeque::from).collect(), holders })
    }

    /// The next round by receiver, each receiver's blocks in the order in which it asked. Empty when nothing is left.
    pub(super) fn next(&mut self) -> Vec<Transfer> {
        let mut sends = vec![0u64; self.lacking.len()];
        let mut round = Vec::new();
        for (to, queue) in self.lacking.iter_mut().enumerate() {
            let mut room = ROUND_BLOCKS;
            while room > 0 {
                let Some(run) = queue.front_mut() else { break };
                let Some(from) = sender(&self.holders[run.file], to, &sends) else { break };
                let count = room.min(ROUND_BLOCKS - sends[from]).min(run.blocks.end - run.blocks.start);
                let blocks = run.blocks.start..run.blocks.start + count;
                run.blocks.start += count;
                room -= count;
                sends[from] += count;
                round.push(Transfer { to, from, run: Run { file: run.file, blocks } });
                if run.blocks.is_empty() {
                    queue.pop_front();
                }
            }
        }
        round
    }
}

/// The holder that sends least in this round, if any has room; receivers begin at different ones.
fn sender(holders: &[usize], to: usize, sends: &[u64]) -> Option<usize> {
    let turned = (0..holders.len()).map(|i| holders[(i + to) % holders.len()]);
    turned.filter(|h| sends.get(*h).is_some_and(|n| *n < ROUND_BLOCKS)).min_by_key(|h| sends[*h])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_block_arrives_once_in_order_from_a_holder_within_the_bounds(
            asks in proptest::collection::vec(proptest::collection::vec((0usize..3, 0u64..40, 1u64..30), 0..4), 4),
            held in proptest::collection::vec(1u8..16, 3),
        ) {
            let holders: Vec<Vec<usize>> =
                held.iter().map(|bits| (0..4).filter(|r| bits >> r & 1 == 1).collect()).collect();
            let run = |&(file, start, n): &(usize, u64, u64)| Run { file, blocks: start..start + n };
            let lacking: Vec<Vec<Run>> = asks.iter().map(|a| a.iter().map(run).collect()).collect();
            let expand = |runs: &[Run]| -> Vec<(usize, u64)> {
                runs.iter().flat_map(|r| r.blocks.clone().map(|b| (r.file, b))).collect()
            };
            let mut rounds = Rounds::new(lacking.clone(), &holders, &[70, 70, 70]).unwrap();
            let mut got: Vec<Vec<Run>> = vec![Vec::new(); 4];
            loop {
                let round = rounds.next();
                if round.is_empty() { break }
                for rank in 0..4 {
                    let sum = |mine: &dyn Fn(&Transfer) -> bool| -> u64 {
                        round.iter().filter(|t| mine(t)).map(|t| t.run.blocks.end - t.run.blocks.start).sum()
                    };
                    prop_assert!(sum(&|t| t.to == rank) <= ROUND_BLOCKS);
                    prop_assert!(sum(&|t| t.from == rank) <= ROUND_BLOCKS);
                }
                for t in round {
                    prop_assert!(holders[t.run.file].contains(&t.from));
                    got[t.to].push(t.run);
                }
            }
            for (got, asked) in got.iter().zip(&lacking) {
                prop_assert_eq!(expand(got), expand(asked));
            }
        }
    }

    #[test]
    fn requests_for_what_is_not_there_are_refused() {
        let ask = |file, blocks| vec![vec![Run { file, blocks }]];
        for wrong in [ask(1, 0..1), ask(0, 0..4), ask(0, 2..2), ask(9, 0..1)] {
            assert!(Rounds::new(wrong, &[vec![0], vec![]], &[3, 3]).is_err());
        }
    }
}
