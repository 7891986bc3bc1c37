//! [`EpochPermutation`]: the shuffled order of one data source's samples, different in every epoch.
//!
//! The order is a pure function of the seed, the source's name, the number of samples and the
//! position. One number is therefore the whole cursor, and a run uses the same samples for any
//! number of workers and after any number of resumes.
use crate::rng::{Purpose, RandomStream};

/// Largest number of samples that a data source may have.
const MAX_SAMPLES: u64 = 1 << 48;

/// Number of rounds of the Feistel network (a keyed permutation) by which the samples of a data
/// source are shuffled. Four rounds give a pseudo-random permutation of large domains; tiny domains
/// need more.
const FEISTEL_ROUNDS: u64 = 8;

/// The order in which a run reads the samples of one data source, each sample once per epoch,
/// shuffled or in file order.
///
/// If shuffled, each epoch is a keyed Feistel permutation of `0..4^k`, the smallest such domain
/// with at least `n` elements. Cycle walking restricts the permutation to `0..n`: a result outside
/// is permuted again, fewer than four times on average. Otherwise every epoch has the samples in
/// order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EpochPermutation {
    /// Number of samples in an epoch.
    samples: u64,
    /// Number of bits in each half of a sample's index. The Feistel network permutes all `2 *
    /// half_bits` bits.
    half_bits: u32,
    /// The random stream that keys the Feistel network; `None` if the samples keep their order.
    stream: Option<RandomStream>,
}

impl EpochPermutation {
    /// Creates the order in which a run reads the samples of a data source (`samples` in number),
    /// shuffled differently in each epoch if `shuffle` is set. `name` is the name of the data
    /// source, so that sources of equal sizes have different orders. Panics if `samples` is 0 or
    /// above 2^48.
    pub(crate) fn new(seed: u64, name: &str, samples: u64, shuffle: bool) -> Self {
        assert!(
            (1..=MAX_SAMPLES).contains(&samples),
            "cannot order {samples} samples; expected 1 to {MAX_SAMPLES}"
        );
        let bits = 64 - (samples - 1).leading_zeros();
        let stream = shuffle.then(|| RandomStream::new(seed, Purpose::DataOrder, name));
        EpochPermutation { samples, half_bits: bits.div_ceil(2), stream }
    }

    /// Returns the number of samples in one epoch of the data source.
    pub(crate) fn epoch_len(&self) -> u64 {
        self.samples
    }

    /// Returns the epoch and the sample number (within this data source) of the sample that the run
    /// reads at the position `index` in this source's order. The index counts the samples of this
    /// source since the beginning of the run.
    pub(crate) fn locate_sample(&self, index: u64) -> (u64, u64) {
        let (epoch, position) = (index / self.samples, index % self.samples);
        let Some(stream) = &self.stream else { return (epoch, position) };
        let mut sample = self.permute_index(stream, epoch, position);
        while sample >= self.samples {
            sample = self.permute_index(stream, epoch, sample);
        }
        (epoch, sample)
    }

    /// Maps `index` to a number below `2^(2 * half_bits)` with a Feistel network keyed by the
    /// epoch, which permutes all numbers below this limit.
    fn permute_index(&self, stream: &RandomStream, epoch: u64, index: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for round in 0..FEISTEL_ROUNDS {
            let word = u64::from(stream.compute_random_words(right, round, epoch)[0]);
            (left, right) = (right, left ^ (word & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    /// Returns the samples of epoch `e` in the order in which they are read.
    fn list_epoch_samples(order: &EpochPermutation, e: u64) -> Vec<u64> {
        let n = order.epoch_len();
        (0..n)
            .map(|i| {
                let (epoch, sample) = order.locate_sample(e * n + i);
                assert_eq!(epoch, e);
                sample
            })
            .collect()
    }

    #[test]
    fn every_small_epoch_is_a_permutation() {
        for n in 1..=130 {
            let order = EpochPermutation::new(9, "", n, true);
            for e in 0..3 {
                let seen: HashSet<u64> = list_epoch_samples(&order, e).into_iter().collect();
                assert_eq!(seen.len() as u64, n);
                assert!(seen.iter().all(|&s| s < n));
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_unshuffled_order_is_the_identity() {
        let order = EpochPermutation::new(9, "", 1000, true);
        assert_ne!(list_epoch_samples(&order, 0), list_epoch_samples(&order, 1));
        assert_ne!(
            list_epoch_samples(&order, 0),
            list_epoch_samples(&EpochPermutation::new(10, "", 1000, true), 0)
        );
        assert_eq!(list_epoch_samples(&order, 5), list_epoch_samples(&order, 5));
        let plain = EpochPermutation::new(9, "", 1000, false);
        assert_eq!(list_epoch_samples(&plain, 3), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn tiny_epochs_reach_every_permutation() {
        let order = EpochPermutation::new(1, "", 3, true);
        let seen: HashSet<Vec<u64>> = (0..200).map(|e| list_epoch_samples(&order, e)).collect();
        assert_eq!(seen.len(), 6);
    }

    /// Checks that shuffled orders show no pattern: the chi-square statistic of positions and
    /// successors stays near its mean.
    #[test]
    fn shuffling_spreads_samples_evenly() {
        let n = 1 << 14;
        let order = list_epoch_samples(&EpochPermutation::new(5, "", n, true), 0);
        let region = |s: u64| (s * 16 / n) as usize;
        let (mut by_position, mut by_follower) = ([[0f64; 16]; 16], [[0f64; 16]; 16]);
        for (i, &s) in order.iter().enumerate() {
            by_position[region(i as u64)][region(s)] += 1.0;
            by_follower[region(s)][region(order[(i + 1) % n as usize])] += 1.0;
        }
        for table in [by_position, by_follower] {
            let chi2: f64 = table.iter().flatten().map(|c| (c - 64.0f64).powi(2) / 64.0).sum();
            // The mean is about 225 to 255, the degrees of freedom; the standard deviation is about
            // 21.
            assert!((120.0..340.0).contains(&chi2), "{chi2}");
        }
    }

    proptest! {
        /// Checks that shuffled orders of many samples contain only valid sample numbers, without
        /// repetition.
        #[test]
        fn large_orders_are_injective(n in 1u64..=MAX_SAMPLES, seed: u64, start: u64) {
            let order = EpochPermutation::new(seed, "", n, true);
            let start = start % n;
            let positions: Vec<u64> = (0..64).map(|i| (start + i) % n).collect::<HashSet<_>>().into_iter().collect();
            let samples: HashSet<u64> = positions.iter().map(|&p| order.locate_sample(p).1).collect();
            prop_assert_eq!(samples.len(), positions.len());
            prop_assert!(samples.iter().all(|&s| s < n));
        }
    }

    /// Checks that shuffled orders equal recorded ones, because a resumed run must continue in the
    /// order of the version that began it.
    #[test]
    fn the_order_equals_recorded_values() {
        assert_eq!(list_epoch_samples(&EpochPermutation::new(1234, "", 10, true), 0), RECORDED_SMALL_ORDER);
        let large = EpochPermutation::new(1234, "", 1_000_000_007, true);
        assert_eq!([0, 1, 2, 5_000_000_000].map(|i| large.locate_sample(i)), RECORDED_LARGE_ORDER);
    }
    const RECORDED_SMALL_ORDER: [u64; 10] = [1, 9, 5, 7, 6, 3, 2, 4, 0, 8];
    const RECORDED_LARGE_ORDER: [(u64, u64); 4] =
        [(0, 602_122_595), (0, 929_023_327), (0, 305_412_091), (4, 859_251_739)];

    #[test]
    fn the_smallest_and_largest_data_sets_have_an_order() {
        assert_eq!(EpochPermutation::new(0, "", 1, true).locate_sample(17), (17, 0));
        let order = EpochPermutation::new(3, "", MAX_SAMPLES, true);
        assert!(order.locate_sample(MAX_SAMPLES - 1).1 < MAX_SAMPLES);
        assert_eq!(order.locate_sample(MAX_SAMPLES).0, 1);
    }
}
