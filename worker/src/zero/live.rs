//! Which gathered parameters stay between two uses of a pass, where there is memory for them. Pure.
use std::collections::{BTreeMap, HashMap};

/// One use of a unit's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Which unit.
    pub unit: usize,
    /// They are here since the use before.
    pub here: bool,
    /// They stay until the next use.
    pub stays: bool,
}

/// The fetches of a pass that uses units in `order`. At most `limit` elements stay at a time, those that are used again
/// soonest; `len` of a unit.
pub fn plan(order: impl IntoIterator<Item = usize>, len: impl Fn(usize) -> usize, limit: u64) -> Vec<Fetch> {
    let fetch = |unit| Fetch { unit, here: false, stays: false };
    let mut fetches: Vec<Fetch> = order.into_iter().map(fetch).collect();
    if limit == 0 {
        return fetches;
    }
    let mut next_use = vec![None; fetches.len()];
    let mut later = HashMap::new();
    for (at, f) in fetches.iter().enumerate().rev() {
        next_use[at] = later.insert(f.unit, at);
    }
    // What stays, by its next use: the use before.
    let mut staying: BTreeMap<usize, usize> = BTreeMap::new();
    let mut held = 0;
    for (at, next) in next_use.into_iter().enumerate() {
        if staying.remove(&at).is_some() {
            held -= len(fetches[at].unit) as u64;
        }
        let Some(next) = next else { continue };
        staying.insert(next, at);
        (fetches[at].stays, fetches[next].here) = (true, true);
        held += len(fetches[at].unit) as u64;
        while held > limit {
            let Some((next, before)) = staying.pop_last() else { break };
            (fetches[before].stays, fetches[next].here) = (false, false);
            held -= len(fetches[before].unit) as u64;
        }
    }
    fetches
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units that are here at their use, of a pass forward and backward over units of 10 elements.
    fn here(limit: u64) -> Vec<usize> {
        let order = [0, 1, 2, 3, 4, 3, 2, 1, 0];
        plan(order, |_| 10, limit).iter().filter(|f| f.here).map(|f| f.unit).collect()
    }

    #[test]
    fn what_is_used_again_soonest_stays() {
        assert_eq!(here(0), [0; 0]);
        assert_eq!(here(9), [0; 0]);
        assert_eq!(here(10), [3]);
        assert_eq!(here(29), [3, 2]);
        assert_eq!(here(1000), [3, 2, 1, 0]);
    }

    proptest::proptest! {
        #[test]
        fn the_limit_holds_and_every_stay_has_an_end(
            order in proptest::collection::vec(0usize..6, 0..40),
            lens in proptest::collection::vec(0usize..9, 6),
            limit in 0u64..30,
        ) {
            let fetches = plan(order.iter().copied(), |u| lens[u], limit);
            assert!(fetches.iter().map(|f| f.unit).eq(order.iter().copied()));
            let mut stay: HashMap<usize, usize> = HashMap::new();
            for f in fetches {
                assert_eq!(f.here, stay.remove(&f.unit).is_some());
                if f.stays {
                    stay.insert(f.unit, lens[f.unit]);
                }
                assert!(stay.values().sum::<usize>() as u64 <= limit);
            }
            assert!(stay.is_empty());
        }
    }
}
