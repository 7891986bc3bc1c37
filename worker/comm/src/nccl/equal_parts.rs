//! [`EqualPartsPlan`]: plans which elements ranks exchange so that their parts of a vector become
//! equally long, as NCCL's all-gather and reduce-scatter require.
//!
//! The gathered vector is divided into equal parts, one per rank, and a remainder that is shorter
//! than [`PART_ALIGNMENT`] elements per rank. A rank first receives those elements of its equal
//! part, and of the remainder, that other ranks own. Shards of parameter units are cut at the
//! allowed boundary that is nearest to an equal division, so these are few: at most half a block of
//! the gradient norm at each end of a part. After a reduce-scatter, the sums of these elements move
//! in the opposite direction. Of the remainder, each owner receives the summands of all ranks.
use crate::call::compute_part_offsets;
use std::ops::Range;

/// The length in elements of each rank's equal part of a vector is a multiple of this number, in
/// collectives through NCCL. Addresses of parts are then as aligned as that of the vector, which
/// NCCL's fast copies need.
const PART_ALIGNMENT: usize = 64;

/// Plan that turns a vector's parts of different lengths, one per rank, into equally long parts by
/// sending elements between ranks. The few elements at the end that cannot be divided equally are
/// the remainder.
pub struct EqualPartsPlan {
    /// The elements that each rank has before the all-gather.
    owned: Vec<Range<usize>>,
    /// Number of elements in each equal part.
    part_len: usize,
}

impl EqualPartsPlan {
    /// Plans equal parts of a vector in which rank r at first has `counts[r]` consecutive elements,
    /// in rank order.
    pub fn new(counts: &[usize]) -> Self {
        let owned =
            compute_part_offsets(counts).into_iter().zip(counts).map(|(start, len)| start..start + len);
        let part_len = counts.iter().sum::<usize>() / counts.len() / PART_ALIGNMENT * PART_ALIGNMENT;
        EqualPartsPlan { owned: owned.collect(), part_len }
    }

    /// Returns the number of elements in each equal part, which is 0 for a short vector.
    pub fn part_len(&self) -> usize {
        self.part_len
    }

    /// Returns the range of the vector's elements that `rank` has, before any elements are moved to
    /// make the parts equal.
    pub(super) fn owned_range(&self, rank: usize) -> Range<usize> {
        self.owned[rank].clone()
    }

    /// Returns the index range of the last elements of the vector, which remain after the division
    /// into equal parts.
    pub(super) fn remainder(&self) -> Range<usize> {
        self.owned.len() * self.part_len..self.owned.last().map_or(0, |owned| owned.end)
    }

    /// Returns the range of the vector's elements that form the equal part of `rank`.
    pub(super) fn equal_part(&self, rank: usize) -> Range<usize> {
        rank * self.part_len..(rank + 1) * self.part_len
    }

    /// Returns how many elements all ranks together send to each other to get from parts of
    /// different lengths to equal parts.
    pub fn count_moved_elements(&self) -> usize {
        let world = self.owned.len();
        let pairs = (0..world).flat_map(|from| (0..world).map(move |to| (from, to)));
        pairs.flat_map(|(from, to)| self.list_moves(from, to)).map(|elements| elements.len()).sum()
    }

    /// Lists the ranges of elements that rank `from` sends to rank `to` to make the parts equal,
    /// before the all-gather. Sender and receiver list them in the same order.
    pub(super) fn list_moves(&self, from: usize, to: usize) -> Vec<Range<usize>> {
        if from == to {
            return Vec::new();
        }
        let needed = [self.equal_part(to), self.remainder()];
        let common = needed.iter().map(|needed| intersect_ranges(&self.owned[from], needed));
        common.filter(|elements| !elements.is_empty()).collect()
    }
}

/// Returns the range of indices that two ranges have in common, which may be empty.
pub(super) fn intersect_ranges(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end).max(a.start.max(b.start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_rank_has_its_part_and_the_remainder_after_the_moves(
            counts in prop::collection::vec(prop_oneof![Just(0usize), 1usize..500], 1..9)
        ) {
            let (parts, world, total) = (EqualPartsPlan::new(&counts), counts.len(), counts.iter().sum());
            prop_assert!(total - world * parts.part_len() < world * (PART_ALIGNMENT + 1));
            for rank in 0..world {
                // how often this rank gets each element: by owning it or by a move
                let mut copies = vec![0; total];
                let moves = (0..world).flat_map(|from| parts.list_moves(from, rank));
                for range in moves.chain([parts.owned_range(rank)]) {
                    copies[range].iter_mut().for_each(|n| *n += 1);
                }
                let is_needed = |i: usize| parts.equal_part(rank).contains(&i) || i >= world * parts.part_len();
                for (i, n) in copies.into_iter().enumerate() {
                    prop_assert!(n == 1 || (n == 0 && !is_needed(i)), "element {i} of rank {rank}: {n}");
                }
            }
        }
    }

    #[test]
    fn only_elements_at_the_boundaries_move() {
        let parts = EqualPartsPlan::new(&[4096, 4096 + 64, 4096 - 64]);
        assert_eq!(parts.part_len(), 4096);
        let moves: Vec<_> = (0..9).flat_map(|i| parts.list_moves(i / 3, i % 3)).collect();
        assert_eq!(moves, vec![8192..8256; 1]);
        assert_eq!(parts.list_moves(1, 2), moves);
    }
}
