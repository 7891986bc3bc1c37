//! In which order the samples of one source are visited: a pure function of (seed, source, number of samples, position), so a cursor is one
//! number and any number of workers, stopped and resumed anywhere, visits the same samples.
use crate::rng::{Purpose, RandomStream};

/// Most samples an order can hold.
const MAX_SAMPLES: u64 = 1 << 48;

/// Rounds of the Feistel network. Four give a pseudo-random permutation on large domains; more help tiny ones.
const ROUNDS: u64 = 8;

/// Order of `n` samples over endlessly many epochs.
///
/// Shuffled, each epoch is a keyed Feistel permutation of `0..4^k ≥ n` restricted to `0..n` by cycle walking (what falls outside is permuted
/// again; fewer than four times on average).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Permutation {
    n: u64,
    /// Bits of half an index; the network permutes `2 * half_bits` bits.
    half_bits: u32,
    /// Absent: samples in their own order.
    stream: Option<RandomStream>,
}

impl Permutation {
    /// The order of `n` samples, 1 to 2⁴⁸ (anything else is a panic: a data set has at least one sample).
    ///
    /// `name` is that of the source, so that sources of equal sizes are not in step.
    pub(crate) fn new(seed: u64, name: &str, n: u64, shuffle: bool) -> Self {
        assert!((1..=MAX_SAMPLES).contains(&n), "{n} samples can't be put in order");
        let bits = 64 - (n - 1).leading_zeros();
        let stream = shuffle.then(|| RandomStream::new(seed, Purpose::DataOrder, name));
        Permutation { n, half_bits: bits.div_ceil(2), stream }
    }

    /// Number of samples in an epoch.
    pub(crate) fn epoch_len(&self) -> u64 {
        self.n
    }

    /// The epoch and the sample at a place of the whole run, this source's samples counted alone.
    pub(crate) fn sample(&self, global_index: u64) -> (u64, u64) {
        let (epoch, at) = (global_index / self.n, global_index % self.n);
        let Some(stream) = &self.stream else { return (epoch, at) };
        let mut index = self.permute(stream, epoch, at);
        while index >= self.n {
            index = self.permute(stream, epoch, index);
        }
        (epoch, index)
    }

    /// The Feistel network: a bijection of `0..2^(2 * half_bits)`.
    fn permute(&self, stream: &RandomStream, epoch: u64, index: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for round in 0..ROUNDS {
            let word = u64::from(stream.words(right, round, epoch)[0]);
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

    fn epoch(order: &Permutation, e: u64) -> Vec<u64> {
        let n = order.epoch_len();
        (0..n)
            .map(|i| {
                let (epoch, sample) = order.sample(e * n + i);
                assert_eq!(epoch, e);
                sample
            })
            .collect()
    }

    #[test]
    fn every_small_epoch_is_a_permutation() {
        for n in 1..=130 {
            let order = Permutation::new(9, "", n, true);
            for e in 0..3 {
                let seen: HashSet<u64> = epoch(&order, e).into_iter().collect();
                assert_eq!(seen.len() as u64, n);
                assert!(seen.iter().all(|&s| s < n));
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_unshuffled_is_identity() {
        let order = Permutation::new(9, "", 1000, true);
        assert_ne!(epoch(&order, 0), epoch(&order, 1));
        assert_ne!(epoch(&order, 0), epoch(&Permutation::new(10, "", 1000, true), 0));
        assert_eq!(epoch(&order, 5), epoch(&order, 5));
        let plain = Permutation::new(9, "", 1000, false);
        assert_eq!(epoch(&plain, 3), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn tiny_epochs_reach_every_permutation() {
        let order = Permutation::new(1, "", 3, true);
        let seen: HashSet<Vec<u64>> = (0..200).map(|e| epoch(&order, e)).collect();
        assert_eq!(seen.len(), 6);
    }

    /// Where a sample lands, and which follows which, shows no pattern: a chi-square over 16 × 16 regions stays near its mean.
    #[test]
    fn shuffle_spreads_evenly() {
        let n = 1 << 14;
        let order = epoch(&Permutation::new(5, "", n, true), 0);
        let region = |s: u64| (s * 16 / n) as usize;
        let (mut by_place, mut by_follower) = ([[0f64; 16]; 16], [[0f64; 16]; 16]);
        for (i, &s) in order.iter().enumerate() {
            by_place[region(i as u64)][region(s)] += 1.0;
            by_follower[region(s)][region(order[(i + 1) % n as usize])] += 1.0;
        }
        for table in [by_place, by_follower] {
            let chi2: f64 = table.iter().flatten().map(|c| (c - 64.0f64).powi(2) / 64.0).sum();
            // 225 to 255 degrees of freedom: mean 225, deviation about 21
            assert!((120.0..340.0).contains(&chi2), "{chi2}");
        }
    }

    proptest! {
        /// On domains too large to list: inside the range and without a collision.
        #[test]
        fn large_orders_are_injective(n in 1u64..=MAX_SAMPLES, seed: u64, start: u64) {
            let order = Permutation::new(seed, "", n, true);
            let start = start % n;
            let places: Vec<u64> = (0..64).map(|i| (start + i) % n).collect::<HashSet<_>>().into_iter().collect();
            let samples: HashSet<u64> = places.iter().map(|&p| order.sample(p).1).collect();
            prop_assert_eq!(samples.len(), places.len());
            prop_assert!(samples.iter().all(|&s| s < n));
        }
    }

    /// A run's order is a promise: a resumed run must go on in the order of the version that began it.
    #[test]
    fn order_is_pinned() {
        assert_eq!(epoch(&Permutation::new(1234, "", 10, true), 0), PINNED_SMALL);
        let large = Permutation::new(1234, "", 1_000_000_007, true);
        assert_eq!([0, 1, 2, 5_000_000_000].map(|i| large.sample(i)), PINNED_LARGE);
    }
    const PINNED_SMALL: [u64; 10] = [1, 9, 5, 7, 6, 3, 2, 4, 0, 8];
    const PINNED_LARGE: [(u64, u64); 4] =
        [(0, 602_122_595), (0, 929_023_327), (0, 305_412_091), (4, 859_251_739)];

    #[test]
    fn extremes() {
        assert_eq!(Permutation::new(0, "", 1, true).sample(17), (17, 0));
        let order = Permutation::new(3, "", MAX_SAMPLES, true);
        assert!(order.sample(MAX_SAMPLES - 1).1 < MAX_SAMPLES);
        assert_eq!(order.sample(MAX_SAMPLES).0, 1);
    }
}
