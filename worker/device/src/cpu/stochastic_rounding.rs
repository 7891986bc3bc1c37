//! Stochastic rounding from `f32` to bf16.
use super::instruction_set::multiversion;
use super::simd::Simd;
use crate::ops::StochasticRounding;
use crate::philox::compute_random_words_of_16_blocks;

/// Number of elements that are rounded with the random numbers of one call of the Philox generator:
/// 16 blocks of four 32-bit words.
const ELEMENTS_PER_DRAW: usize = 64;

multiversion! {
    /// Rounds the numbers of `from` to bf16 stochastically with the given instruction set, and
    /// writes their bits to `to`.
    pub(super) fn round_range = round_vectors(to: &mut [u16], from: &[f32], rounding: StochasticRounding)
}

/// Rounds the numbers of `from` to bf16 stochastically and writes their bits to `to`.
#[inline(always)]
fn round_vectors<S: Simd>(_: S, mut to: &mut [u16], mut from: &[f32], rounding: StochasticRounding) {
    let mut element = rounding.first_element;
    while !to.is_empty() {
        let skip = (element % ELEMENTS_PER_DRAW as u64) as usize;
        let words =
            compute_random_words_of_16_blocks(rounding.key, (element - skip as u64) / 4, 0, rounding.step);
        let element_words: [u32; ELEMENTS_PER_DRAW] = std::array::from_fn(|i| words[i % 4][i / 4]);
        let n = to.len().min(ELEMENTS_PER_DRAW - skip);
        let (current, remaining) = std::mem::take(&mut to).split_at_mut(n);
        for ((to, x), word) in current.iter_mut().zip(from).zip(&element_words[skip..]) {
            *to = round_element(*x, word >> 16);
        }
        (to, from, element) = (remaining, &from[n..], element + n as u64);
    }
}

/// Rounds `x` to bf16 stochastically: away from zero if adding the 16-bit number `random` to the
/// lower 16 bits of `x` carries, otherwise towards zero. The carry never reaches the sign.
#[inline(always)]
fn round_element(x: f32, random: u32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let sum = bits.wrapping_add(random) >> 16;
    // A finite number must not become infinite.
    let overflows = u32::from(magnitude < 0x7f80_0000 && sum & 0x7fff == 0x7f80);
    // The mantissa of a NaN could carry into the sign.
    let nan = (bits >> 16) | 0x40;
    (if magnitude > 0x7f80_0000 { nan } else { sum - overflows }) as u16
}
