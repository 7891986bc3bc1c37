//! Which source of a mixture each sample of a run comes from: a pure function of the weights and the sample's place, so that no cursor per source
//! has to be kept.
//!
//! Weights become counts in a cycle of places. The cycle is dealt out by Tijdeman's rule (R. Tijdeman, "The chairman assignment problem", 1980): after any number of
//! places each source has had its share of them within one sample. The samples of a source are visited in its own [`Permutation`], epoch after epoch.
use super::order::Permutation;

/// Longest cycle; shares that need a longer one are rounded to it.
const LONGEST: u64 = 1 << 16;

/// The cycle of a mixture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mix {
    /// Places of the cycle that each source has.
    counts: Vec<u64>,
    /// For each place of the cycle its source, and how many places of that source come before it.
    places: Vec<(u8, u32)>,
}

impl Mix {
    /// 1 to 256 sources with weights above 0.
    pub(crate) fn new(weights: &[f64]) -> Self {
        let counts = counts(weights);
        let length: u64 = counts.iter().sum();
        let mut had = vec![0u64; counts.len()];
        let places = (1..=length)
            .map(|place| {
                let source = next(&counts, &had, place, length);
                let before = had[source];
                had[source] += 1;
                (source as u8, before as u32)
            })
            .collect();
        Mix { counts, places }
    }

    /// Places of the cycle that each source has.
    pub(crate) fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The source at a place of the run, and how many places of that source come before it.
    pub(crate) fn at(&self, place: u64) -> (usize, u64) {
        let length = self.places.len() as u64;
        let (source, before) = self.places[(place % length) as usize];
        let source = usize::from(source);
        (source, place / length * self.counts[source] + u64::from(before))
    }
}

/// Weights as whole numbers of places: exactly, when their ratios have no more than a few digits, else rounded.
fn counts(weights: &[f64]) -> Vec<u64> {
    let sum: f64 = weights.iter().sum();
    for scale in [1.0, 10.0, 100.0, 1_000.0, 10_000.0] {
        let scaled: Vec<f64> = weights.iter().map(|w| w * scale).collect();
        let whole = |x: &f64| (x - x.round()).abs() < 1e-6 && *x >= 0.5;
        if scaled.iter().all(whole) {
            let counts: Vec<u64> = scaled.iter().map(|x| x.round() as u64).collect();
            let divisor = counts.iter().copied().fold(0, gcd);
            let counts: Vec<u64> = counts.iter().map(|c| c / divisor).collect();
            if counts.iter().try_fold(0u64, |n, &c| n.checked_add(c)).is_some_and(|n| n <= LONGEST) {
                return counts;
            }
        }
    }
    // no source is rounded away
    weights.iter().map(|w| ((w / sum * LONGEST as f64).round() as u64).max(1)).collect()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Tijdeman's rule: of the sources that may be served at this place (1-based), the one that must be soonest; the first of several.
fn next(counts: &[u64], had: &[u64], place: u64, length: u64) -> usize {
    let d = (2 * counts.len() as i64 - 2).max(1);
    let length = length as i64;
    // how far a source is behind its share, times d * length
    let behind = |i: usize| d * (place as i64 * counts[i] as i64 - length * had[i] as i64);
    let may = |i: &usize| counts.len() == 1 || behind(*i) >= length;
    let wait = |i: usize| (d - 1) * length - behind(i);
    let sooner = |a: usize, b: usize| {
        let (left, right) =
            (i128::from(wait(a)) * i128::from(counts[b]), i128::from(wait(b)) * i128::from(counts[a]));
        if right < left { b } else { a }
    };
    // one always may: all are behind by `length * d` in sum
    (0..counts.len()).filter(may).reduce(sooner).unwrap_or(0)
}

/// In which order a run visits the samples of all sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    mix: Mix,
    sources: Vec<Permutation>,
}

impl Order {
    pub(crate) fn new(mix: Mix, sources: Vec<Permutation>) -> Self {
        Order { mix, sources }
    }

    /// Samples of each source in an epoch of its own.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = u64> {
        self.sources.iter().map(Permutation::epoch_len)
    }

    /// The source, its epoch and its sample at a place of the whole run: `step * global batch + slot * micro batch + place in the slot`.
    pub fn sample(&self, global_index: u64) -> (usize, u64, u64) {
        let (source, at) = self.mix.at(global_index);
        let (epoch, sample) = self.sources[source].sample(at);
        (source, epoch, sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn weights_become_counts() {
        assert_eq!(counts(&[1.0]), [1]);
        assert_eq!(counts(&[0.3]), [1]);
        assert_eq!(counts(&[0.7, 0.2, 0.1]), [7, 2, 1]);
        assert_eq!(counts(&[3.0, 1.5]), [2, 1]);
        let thirds = counts(&[1.0 / 3.0, 2.0 / 3.0]);
        assert!((thirds[0] as f64 / thirds.iter().sum::<u64>() as f64 - 1.0 / 3.0).abs() < 1e-5);
        assert_eq!(counts(&[1e9, 1e-9]), [65536, 1]);
    }

    #[test]
    fn by_hand() {
        let mix = Mix::new(&[2.0, 1.0]);
        let at: Vec<_> = (0..6).map(|p| mix.at(p)).collect();
        assert_eq!(at.iter().filter(|(s, _)| *s == 0).map(|(_, n)| *n).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(at.iter().filter(|(s, _)| *s == 1).map(|(_, n)| *n).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(Mix::new(&[0.3]).at(17), (0, 17));
    }

    proptest! {
        /// Each source's samples come one after another, and after any number of places it has had its share within one.
        #[test]
        fn shares_hold_at_every_place(
            weights in proptest::collection::vec(prop_oneof![1u32..5, 1u32..2000], 1..9),
        ) {
            let weights: Vec<f64> = weights.iter().map(|&w| f64::from(w) / 10.0).collect();
            let sum: f64 = weights.iter().sum();
            let mix = Mix::new(&weights);
            let mut had = vec![0u64; weights.len()];
            for place in 0..(2 * mix.places.len() as u64).min(5000) {
                let (source, n) = mix.at(place);
                prop_assert_eq!(n, had[source]);
                had[source] += 1;
                for (had, weight) in had.iter().zip(&weights) {
                    let share = (place + 1) as f64 * weight / sum;
                    prop_assert!((*had as f64 - share).abs() < 1.0, "{} of {}", had, share);
                }
            }
        }
    }
}
