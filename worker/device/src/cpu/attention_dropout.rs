//! [`HeadDropout`]: decides by random numbers which attention probabilities of one query head
//! dropout sets to 0 on the CPU.
//!
//! The factors of one query and one tile of keys are not stored. The forward and the backward pass
//! recompute them.
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::{ops::AttentionDropout, philox::compute_random_words_of_16_blocks};

/// Number of keys in a tile, the block of keys that attention on the CPU processes at a time.
pub(crate) const KEY_TILE: usize = 64;

/// Random generator of the dropout factors for the attention probabilities of one query head in one
/// sequence.
#[derive(Clone, Copy)]
pub(crate) struct HeadDropout {
    /// Key of the Philox generator.
    key: [u32; 2],
    /// Threshold for random words: a probability is dropped if its word is below the threshold.
    threshold: u32,
    /// Factor of probabilities that are kept.
    keep_scale: f32,
    /// Number of the sequence among all training samples, from which its random numbers are
    /// derived.
    sample: u64,
    /// Index of the query head.
    head: u64,
}

impl HeadDropout {
    /// Creates the random generator of dropout factors for query head `h` in sequence `seq` of the
    /// batch.
    pub(crate) fn new(d: &AttentionDropout, seq: usize, h: usize) -> Self {
        let (threshold, keep_scale) = (d.drop_threshold(), d.keep_scale());
        HeadDropout {
            key: d.key,
            threshold,
            keep_scale,
            sample: d.first_sequence + seq as u64,
            head: h as u64,
        }
    }

    /// Returns the factors, 0 or `1 / (1 − probability)`, by which dropout multiplies a query's
    /// probabilities for the tile of keys that begins at position `k0`.
    #[inline(always)]
    pub(crate) fn compute_factors(&self, query: usize, k0: usize) -> [f32; KEY_TILE] {
        let words = compute_random_words_of_16_blocks(
            self.key,
            (k0 / KEY_TILE * LANES) as u64,
            self.sample,
            self.head << 24 | query as u64,
        );
        let mut factors = [0.0; KEY_TILE];
        for (factors, words) in factors.as_chunks_mut::<LANES>().0.iter_mut().zip(&words) {
            for (factor, word) in factors.iter_mut().zip(words) {
                *factor = if *word < self.threshold { 0.0 } else { self.keep_scale };
            }
        }
        factors
    }
}

/// Multiplies a row of attention probabilities elementwise by dropout factors: `row *= factors`.
#[inline(always)]
pub(crate) fn multiply_row<S: Simd>(s: S, row: &mut [f32], factors: &[f32; KEY_TILE]) {
    for j in (0..row.len()).step_by(LANES) {
        store_lanes(s, row, j, s.mul(load_lanes(s, row, j), load_lanes(s, factors, j)));
    }
}

// Each of the four words of a Philox block belongs to one of a tile's four vectors of keys.
const _: () = assert!(KEY_TILE == 4 * LANES);
