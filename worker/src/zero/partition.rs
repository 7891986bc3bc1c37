//! [`Partition`]: which rank owns which elements of a parameter unit (tensors that are gathered
//! together).
//!
//! Shards end only at multiples of [`NORM_BLOCK_LEN`] inside a tensor or at the end of a tensor.
//! Each block that is summed for the gradient norm therefore belongs to one rank, and its sum has
//! the same bits for every number of ranks. Shards may differ by up to one block, and may be empty.
use crate::params::ParamUnit;
use device::ops::NORM_BLOCK_LEN;
use std::ops::Range;

/// The division of one parameter unit (tensors that are gathered together) into shards: the
/// positions at which each owner rank's shard begins and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    cuts: Vec<usize>,
    counts: Vec<usize>,
}

impl Partition {
    /// Divides the parameter unit `unit` (tensors that are gathered together) into shards of nearly
    /// equal size, one for each rank that may own a part. The shards of other ranks are empty.
    pub fn new(unit: &ParamUnit, world: usize) -> Self {
        let len = unit.len();
        let parts = unit.owners.count_owners_below(world);
        assert!(parts > 0, "{} has no owner among {world} ranks", unit.name);
        let cut = |r: usize| match unit.owners.count_owners_below(r) {
            part if part == parts => len,
            part => find_nearest_cut(unit, (len as u128 * part as u128 / parts as u128) as usize),
        };
        let cuts: Vec<usize> = (0..=world).map(cut).collect();
        let counts = cuts.windows(2).map(|w| w[1] - w[0]).collect();
        Partition { cuts, counts }
    }

    /// Returns the range of elements that `rank` owns in the parameter unit's concatenated tensors.
    pub fn shard_range(&self, rank: usize) -> Range<usize> {
        self.cuts[rank]..self.cuts[rank + 1]
    }

    /// Returns the number of elements of each rank's shard of the parameter unit (tensors that are
    /// gathered together).
    pub fn shard_lengths(&self) -> &[usize] {
        &self.counts
    }
}

/// Returns the position nearest to element number `at` of a parameter unit (tensors that are
/// gathered together) at which one shard may end and the next begin.
fn find_nearest_cut(unit: &ParamUnit, at: usize) -> usize {
    let tensor = (0..unit.params.len()).map(|i| unit.tensor_range(i)).find(|r| r.contains(&at));
    let Some(r) = tensor else { return unit.len() };
    let below = r.start + (at - r.start) / NORM_BLOCK_LEN * NORM_BLOCK_LEN;
    let above = (below + NORM_BLOCK_LEN).min(r.end);
    if at - below <= above - at { below } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{ParamInit, ParamSpec};
    use proptest::prelude::*;

    /// Creates a parameter unit of vectors with the lengths `sizes`.
    fn make_unit(sizes: &[usize]) -> ParamUnit {
        let spec = |(i, &n): (usize, &usize)| ParamSpec {
            name: format!("p{i}"),
            shape: vec![n],
            init: ParamInit::Zeros,
        };
        ParamUnit::new("u", sizes.iter().enumerate().map(spec).collect())
    }

    proptest! {
        #[test]
        fn shards_are_disjoint_cover_the_unit_and_never_split_a_norm_block(
            sizes in prop::collection::vec(1usize..30_000, 1..8), world in 1usize..17
        ) {
            let u = make_unit(&sizes);
            let p = Partition::new(&u, world);
            let mut at = 0;
            for r in 0..world {
                let part = p.shard_range(r);
                prop_assert_eq!(part.start, at);
                prop_assert_eq!(part.len(), p.shard_lengths()[r]);
                at = part.end;
                prop_assert!(part.len() <= u.len() / world + 1 + NORM_BLOCK_LEN);
                for s in u.list_segments(part) {
                    prop_assert_eq!(s.elements.start % NORM_BLOCK_LEN, 0);
                    let whole = u.tensor_range(s.param).len();
                    prop_assert!(s.elements.end % NORM_BLOCK_LEN == 0 || s.elements.end == whole);
                }
            }
            prop_assert_eq!(at, u.len());
        }
    }

    #[test]
    fn a_unit_that_some_ranks_own_is_divided_as_if_they_were_the_world() {
        use crate::params::OwnerRanks;
        let every_rank = make_unit(&[9000, 50_000, 3]);
        for (stride, world) in [(1, 4), (2, 4), (2, 8), (3, 9), (4, 4)] {
            for first in 0..stride {
                let mut some = every_rank.clone();
                some.owners = OwnerRanks { first, stride };
                let (parts, whole) =
                    (Partition::new(&some, world), Partition::new(&every_rank, world / stride));
                for r in 0..world {
                    match some.owners.contains(r) {
                        true => assert_eq!(parts.shard_range(r), whole.shard_range(r / stride)),
                        false => assert!(parts.shard_range(r).is_empty()),
                    }
                }
            }
        }
    }

    #[test]
    fn units_smaller_than_a_block_leave_some_shards_empty() {
        let p = Partition::new(&make_unit(&[100]), 4);
        assert_eq!(p.shard_lengths().iter().sum::<usize>(), 100);
        assert_eq!(p.shard_lengths().iter().filter(|&&c| c == 0).count(), 3);
    }
}
