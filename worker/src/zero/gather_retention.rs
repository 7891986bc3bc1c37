//! [`plan_fetches`]: decides which gathered parameters stay in memory between two uses, within
//! `train.zero.max_live_parameters`.
use std::collections::{BTreeMap, HashMap};

/// One use of a parameter unit (tensors that are gathered together) in a forward or backward pass,
/// with the decision whether its gathered parameters stay in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedFetch {
    /// The index of the unit.
    pub unit: usize,
    /// Whether the parameters were retained after the previous use, so that this use needs no
    /// gather.
    pub is_retained: bool,
    /// Whether the parameters are retained after this use, until the next use.
    pub is_kept: bool,
}

/// Decides for each use of a parameter unit (tensors that are gathered together) in a pass whether
/// the gathered parameters stay in memory until the unit's next use. The pass uses units in the
/// order `order`.
///
/// At most `limit` elements are retained at a time. Units whose next use is soonest have
/// precedence. `len` returns the number of elements of a unit.
pub fn plan_fetches(
    order: impl IntoIterator<Item = usize>,
    len: impl Fn(usize) -> usize,
    limit: u64,
) -> Vec<PlannedFetch> {
    let fetch = |unit| PlannedFetch { unit, is_retained: false, is_kept: false };
    let mut fetches: Vec<PlannedFetch> = order.into_iter().map(fetch).collect();
    if limit == 0 {
        return fetches;
    }
    let mut next_use = vec![None; fetches.len()];
    let mut later = HashMap::new();
    for (at, f) in fetches.iter().enumerate().rev() {
        next_use[at] = later.insert(f.unit, at);
    }
    // Maps the next use of each retained unit to its previous use.
    let mut staying: BTreeMap<usize, usize> = BTreeMap::new();
    let mut held = 0;
    for (at, next) in next_use.into_iter().enumerate() {
        if staying.remove(&at).is_some() {
            held -= len(fetches[at].unit) as u64;
        }
        let Some(next) = next else { continue };
        staying.insert(next, at);
        (fetches[at].is_kept, fetches[next].is_retained) = (true, true);
        held += len(fetches[at].unit) as u64;
        while held > limit {
            let Some((next, before)) = staying.pop_last() else { break };
            (fetches[before].is_kept, fetches[next].is_retained) = (false, false);
            held -= len(fetches[before].unit) as u64;
        }
    }
    fetches
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the units whose parameters are still in memory when a forward and backward pass uses
    /// them, with units of 10 elements and the limit `limit`.
    fn retained_units(limit: u64) -> Vec<usize> {
        let order = [0, 1, 2, 3, 4, 3, 2, 1, 0];
        plan_fetches(order, |_| 10, limit).iter().filter(|f| f.is_retained).map(|f| f.unit).collect()
    }

    #[test]
    fn units_that_are_used_again_soonest_are_retained() {
        assert_eq!(retained_units(0), [0; 0]);
        assert_eq!(retained_units(9), [0; 0]);
        assert_eq!(retained_units(10), [3]);
        assert_eq!(retained_units(29), [3, 2]);
        assert_eq!(retained_units(1000), [3, 2, 1, 0]);
    }

    proptest::proptest! {
        #[test]
        fn the_limit_is_kept_and_retained_parameters_are_used(
            order in proptest::collection::vec(0usize..6, 0..40),
            lens in proptest::collection::vec(0usize..9, 6),
            limit in 0u64..30,
        ) {
            let fetches = plan_fetches(order.iter().copied(), |u| lens[u], limit);
            assert!(fetches.iter().map(|f| f.unit).eq(order.iter().copied()));
            let mut stay: HashMap<usize, usize> = HashMap::new();
            for f in fetches {
                assert_eq!(f.is_retained, stay.remove(&f.unit).is_some());
                if f.is_kept {
                    stay.insert(f.unit, lens[f.unit]);
                }
                assert!(stay.values().sum::<usize>() as u64 <= limit);
            }
            assert!(stay.is_empty());
        }
    }
}
