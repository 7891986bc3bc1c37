//! Who owns which elements of a unit's flat vector. Pure.
//!
//! Cuts lie only at multiples of [`NORM_BLOCK`] inside a tensor or at a tensor's end, so each block that is summed for the
//! gradient norm belongs to one rank and its sum has the same bits for every number of ranks. Parts may be unequal by up to
//! one block, or empty.
use crate::params::Unit;
use device::ops::NORM_BLOCK;
use std::ops::Range;

/// The cuts of one unit: rank r owns `cuts[r]..cuts[r+1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    cuts: Vec<usize>,
    counts: Vec<usize>,
}

impl Partition {
    /// Cuts `unit` into parts of nearly equal size for its owners among `world` ranks; the other ranks' are empty.
    pub fn new(unit: &Unit, world: usize) -> Self {
        let len = unit.len();
        let parts = unit.owners.below(world);
        assert!(parts > 0, "{} has no owner among {world} ranks", unit.name);
        let cut = |r: usize| match unit.owners.below(r) {
            part if part == parts => len,
            part => nearest_cut(unit, (len as u128 * part as u128 / parts as u128) as usize),
        };
        let cuts: Vec<usize> = (0..=world).map(cut).collect();
        let counts = cuts.windows(2).map(|w| w[1] - w[0]).collect();
        Partition { cuts, counts }
    }

    /// The part of `rank`.
    pub fn range(&self, rank: usize) -> Range<usize> {
        self.cuts[rank]..self.cuts[rank + 1]
    }

    /// Elements per rank.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// The largest part.
    pub fn largest(&self) -> usize {
        self.counts.iter().copied().max().unwrap_or(0)
    }
}

/// The allowed cut nearest to `at`; the lower one when two are equally near.
fn nearest_cut(unit: &Unit, at: usize) -> usize {
    let tensor = (0..unit.params.len()).map(|i| unit.range(i)).find(|r| r.contains(&at));
    let Some(r) = tensor else { return unit.len() };
    let below = r.start + (at - r.start) / NORM_BLOCK * NORM_BLOCK;
    let above = (below + NORM_BLOCK).min(r.end);
    if at - below <= above - at { below } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{Init, ParamSpec};
    use proptest::prelude::*;

    fn unit(sizes: &[usize]) -> Unit {
        let spec =
            |(i, &n): (usize, &usize)| ParamSpec { name: format!("p{i}"), shape: vec![n], init: Init::Zeros };
        Unit::new("u", sizes.iter().enumerate().map(spec).collect())
    }

    proptest! {
        #[test]
        fn parts_are_disjoint_cover_everything_and_never_cut_a_norm_block(
            sizes in prop::collection::vec(1usize..30_000, 1..8), world in 1usize..17
        ) {
            let u = unit(&sizes);
            let p = Partition::new(&u, world);
            let mut at = 0;
            for r in 0..world {
                let part = p.range(r);
                prop_assert_eq!(part.start, at);
                prop_assert_eq!(part.len(), p.counts()[r]);
                at = part.end;
                prop_assert!(part.len() <= u.len() / world + 1 + NORM_BLOCK);
                for s in u.segments(part) {
                    prop_assert_eq!(s.elements.start % NORM_BLOCK, 0);
                    let whole = u.range(s.param).len();
                    prop_assert!(s.elements.end % NORM_BLOCK == 0 || s.elements.end == whole);
                }
            }
            prop_assert_eq!(at, u.len());
        }
    }

    #[test]
    fn a_unit_of_some_ranks_is_cut_as_if_they_were_all() {
        use crate::params::Owners;
        let all = unit(&[9000, 50_000, 3]);
        for (stride, world) in [(1, 4), (2, 4), (2, 8), (3, 9), (4, 4)] {
            for first in 0..stride {
                let mut some = all.clone();
                some.owners = Owners { first, stride };
                let (parts, whole) = (Partition::new(&some, world), Partition::new(&all, world / stride));
                for r in 0..world {
                    match some.owners.has(r) {
                        true => assert_eq!(parts.range(r), whole.range(r / stride)),
                        false => assert!(parts.range(r).is_empty()),
                    }
                }
            }
        }
    }

    #[test]
    fn tiny_units_leave_some_ranks_with_nothing() {
        let p = Partition::new(&unit(&[100]), 4);
        assert_eq!(p.counts().iter().sum::<usize>(), 100);
        assert_eq!(p.counts().iter().filter(|&&c| c == 0).count(), 3);
    }
}
