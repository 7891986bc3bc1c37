//! What dropout drops of attention's probabilities: a tile of keys of one query at a time, made anew wherever it is needed.
use super::attention::KEYS;
use super::simd::{LANES, Simd, get, put};
use crate::{ops::AttentionDropout, philox::words_of_16};

/// What is dropped of one head of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct HeadDropout {
    key: [u32; 2],
    threshold: u32,
    keep: f32,
    sample: u64,
    head: u64,
}

impl HeadDropout {
    /// Of query head `h` of sequence `seq` of the batch.
    pub(crate) fn new(d: &AttentionDropout, seq: usize, h: usize) -> Self {
        let (threshold, keep) = (d.threshold(), d.keep());
        HeadDropout { key: d.key, threshold, keep, sample: d.first + seq as u64, head: h as u64 }
    }

    /// What a query's probabilities of the tile of keys from `k0` on are multiplied by.
    #[inline(always)]
    pub(crate) fn factors(&self, query: usize, k0: usize) -> [f32; KEYS] {
        let words =
            words_of_16(self.key, (k0 / KEYS * LANES) as u64, self.sample, self.head << 24 | query as u64);
        let mut factors = [0.0; KEYS];
        for (factors, words) in factors.as_chunks_mut::<LANES>().0.iter_mut().zip(&words) {
            for (factor, word) in factors.iter_mut().zip(words) {
                *factor = if *word < self.threshold { 0.0 } else { self.keep };
            }
        }
        factors
    }
}

/// `row *= factors`
#[inline(always)]
pub(crate) fn multiply<S: Simd>(s: S, row: &mut [f32], factors: &[f32; KEYS]) {
    for j in (0..row.len()).step_by(LANES) {
        put(s, row, j, s.mul(get(s, row, j), get(s, factors, j)));
    }
}

// A block of words is for four vectors of keys, of which a tile has four.
const _: () = assert!(KEYS == 4 * LANES);
