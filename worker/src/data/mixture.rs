//! Determines which data source of a mixture supplies each sample of a run, and the number of the
//! sample within this source. The assignment is a pure function of the weights and the position, so
//! that no cursor per source has to be stored.
//!
//! The weights are converted to counts of positions in a cycle. Tijdeman's algorithm (R. Tijdeman,
//! "The chairman assignment problem", 1980) orders the cycle: after any number of positions, the
//! number of samples from each source differs from the source's share by less than one. The samples
//! of a source are used in the order of its [`EpochPermutation`], epoch after epoch.
use super::epoch_permutation::EpochPermutation;

/// Largest number of samples in the repeating order (cycle) in which the data sources take turns.
/// Shares that need a longer cycle are rounded.
const MAX_CYCLE: u64 = 1 << 16;

/// The repeating order in which the data sources of a mixture (several sources with weights) supply
/// the samples of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MixtureSchedule {
    /// Number of positions of each source in the cycle.
    cycle_counts: Vec<u64>,
    /// For each position of the cycle, the source, and the number of earlier positions of that
    /// source in the cycle.
    cycle: Vec<(u8, u32)>,
}

impl MixtureSchedule {
    /// Computes the order in which data sources with the weights `weights` take turns in supplying
    /// samples. The caller must pass 1 to 256 weights, all above 0.
    pub(crate) fn new(weights: &[f64]) -> Self {
        let cycle_counts = convert_weights_to_counts(weights);
        let length: u64 = cycle_counts.iter().sum();
        let mut served = vec![0u64; cycle_counts.len()];
        let cycle = (1..=length)
            .map(|position| {
                let source = select_source(&cycle_counts, &served, position, length);
                let before = served[source];
                served[source] += 1;
                (source as u8, before as u32)
            })
            .collect();
        MixtureSchedule { cycle_counts, cycle }
    }

    /// Returns for each data source how many samples it supplies in one cycle, after which the
    /// order of the sources repeats.
    pub(crate) fn samples_per_cycle(&self) -> &[u64] {
        &self.cycle_counts
    }

    /// Returns the data source of sample number `position` of the run, and the number of earlier
    /// samples from this source.
    pub(crate) fn locate_source(&self, position: u64) -> (usize, u64) {
        let length = self.cycle.len() as u64;
        let (source, before) = self.cycle[(position % length) as usize];
        let source = usize::from(source);
        (source, position / length * self.cycle_counts[source] + u64::from(before))
    }
}

/// Converts the weights of data sources to the numbers of samples that they contribute to one cycle
/// of the mixture. The counts are exact if the weights have at most four decimal places and the
/// cycle is not too long; otherwise they are rounded.
fn convert_weights_to_counts(weights: &[f64]) -> Vec<u64> {
    let sum: f64 = weights.iter().sum();
    for scale in [1.0, 10.0, 100.0, 1_000.0, 10_000.0] {
        let scaled: Vec<f64> = weights.iter().map(|w| w * scale).collect();
        let is_integer = |x: &f64| (x - x.round()).abs() < 1e-6 && *x >= 0.5;
        if scaled.iter().all(is_integer) {
            let counts: Vec<u64> = scaled.iter().map(|x| x.round() as u64).collect();
            let divisor = counts.iter().copied().fold(0, compute_gcd);
            let counts: Vec<u64> = counts.iter().map(|c| c / divisor).collect();
            if counts.iter().try_fold(0u64, |n, &c| n.checked_add(c)).is_some_and(|n| n <= MAX_CYCLE) {
                return counts;
            }
        }
    }
    // Every source keeps at least one position.
    weights.iter().map(|w| ((w / sum * MAX_CYCLE as f64).round() as u64).max(1)).collect()
}

/// Computes the greatest common divisor of two numbers.
fn compute_gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { compute_gcd(b, a % b) }
}

/// Selects which data source supplies the sample at `position` (from 1) of the mixture's cycle, by
/// Tijdeman's algorithm, which spreads the samples of each source evenly. Of the eligible sources,
/// takes the one with the earliest deadline, or the first of several. `served` is the number of
/// earlier positions that each source got.
fn select_source(counts: &[u64], served: &[u64], position: u64, length: u64) -> usize {
    let d = (2 * counts.len() as i64 - 2).max(1);
    let length = length as i64;
    // How far a source is behind its share, in units of 1 / (d * length).
    let deficit = |i: usize| d * (position as i64 * counts[i] as i64 - length * served[i] as i64);
    let is_eligible = |i: &usize| counts.len() == 1 || deficit(*i) >= length;
    let slack = |i: usize| (d - 1) * length - deficit(i);
    let earlier = |a: usize, b: usize| {
        let (left, right) =
            (i128::from(slack(a)) * i128::from(counts[b]), i128::from(slack(b)) * i128::from(counts[a]));
        if right < left { b } else { a }
    };
    // A source is always eligible, because the deficits add up to `length * d`.
    (0..counts.len()).filter(is_eligible).reduce(earlier).unwrap_or(0)
}

/// The order in which a run reads the samples of all data sources, over all epochs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleOrder {
    schedule: MixtureSchedule,
    /// For each source, the order of its samples.
    sources: Vec<EpochPermutation>,
}

impl SampleOrder {
    /// Creates the sample order of a run from two orders: that in which the data sources take
    /// turns, and that of the samples within each source.
    pub(crate) fn new(schedule: MixtureSchedule, sources: Vec<EpochPermutation>) -> Self {
        SampleOrder { schedule, sources }
    }

    /// Returns for each data source the number of samples in one epoch of the source.
    pub(crate) fn samples_per_epoch_by_source(&self) -> impl Iterator<Item = u64> {
        self.sources.iter().map(EpochPermutation::epoch_len)
    }

    /// Returns which sample the run reads at a position, as three numbers: the data source, the
    /// epoch of the source, and the sample in the source. The position is `step * global batch size
    /// + number of the micro-batch * micro-batch size + index in the micro-batch`.
    pub fn locate_sample(&self, position: u64) -> (usize, u64, u64) {
        let (source, index) = self.schedule.locate_source(position);
        let (epoch, sample) = self.sources[source].locate_sample(index);
        (source, epoch, sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn weights_are_converted_to_cycle_counts() {
        assert_eq!(convert_weights_to_counts(&[1.0]), [1]);
        assert_eq!(convert_weights_to_counts(&[0.3]), [1]);
        assert_eq!(convert_weights_to_counts(&[0.7, 0.2, 0.1]), [7, 2, 1]);
        assert_eq!(convert_weights_to_counts(&[3.0, 1.5]), [2, 1]);
        let thirds = convert_weights_to_counts(&[1.0 / 3.0, 2.0 / 3.0]);
        assert!((thirds[0] as f64 / thirds.iter().sum::<u64>() as f64 - 1.0 / 3.0).abs() < 1e-5);
        assert_eq!(convert_weights_to_counts(&[1e9, 1e-9]), [65536, 1]);
    }

    #[test]
    fn two_sources_take_turns_by_their_weights() {
        let schedule = MixtureSchedule::new(&[2.0, 1.0]);
        let sequence: Vec<_> = (0..6).map(|p| schedule.locate_source(p)).collect();
        assert_eq!(
            sequence.iter().filter(|(s, _)| *s == 0).map(|(_, n)| *n).collect::<Vec<_>>(),
            [0, 1, 2, 3]
        );
        assert_eq!(sequence.iter().filter(|(s, _)| *s == 1).map(|(_, n)| *n).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(MixtureSchedule::new(&[0.3]).locate_source(17), (0, 17));
    }

    proptest! {
        /// Checks that the samples of each source follow one another, and that at every position
        /// each source has had its share within one sample.
        #[test]
        fn shares_hold_at_every_position(
            weights in proptest::collection::vec(prop_oneof![1u32..5, 1u32..2000], 1..9),
        ) {
            let weights: Vec<f64> = weights.iter().map(|&w| f64::from(w) / 10.0).collect();
            let sum: f64 = weights.iter().sum();
            let schedule = MixtureSchedule::new(&weights);
            let mut served = vec![0u64; weights.len()];
            for position in 0..(2 * schedule.cycle.len() as u64).min(5000) {
                let (source, n) = schedule.locate_source(position);
                prop_assert_eq!(n, served[source]);
                served[source] += 1;
                for (served, weight) in served.iter().zip(&weights) {
                    let share = (position + 1) as f64 * weight / sum;
                    prop_assert!((*served as f64 - share).abs() < 1.0, "{} of {}", served, share);
                }
            }
        }
    }
}
