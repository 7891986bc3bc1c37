//! Stochastic rounding to bf16.
use super::simd::{Simd, multiversion};
use super::{Cpu, Parts, expect_len};
use crate::ops::StochasticRounding;
use crate::philox::words_of_16;

/// Elements of 16 blocks of random words.
const DRAWN: usize = 64;

pub(crate) fn round_stochastically(cpu: &Cpu, y: &mut [u16], x: &[f32], draw: StochasticRounding) {
    expect_len("round_stochastically", "x", x.len(), y.len());
    let y = Parts::new(y);
    cpu.by_elements(x.len(), |r| {
        let draw = StochasticRounding { first: draw.first + r.start as u64, ..draw };
        // SAFETY: tasks have ranges of their own.
        round_range(cpu.level, unsafe { y.part(r.clone()) }, &x[r], draw);
    });
}

multiversion! {
    fn round_range = round_vectors(to: &mut [u16], from: &[f32], draw: StochasticRounding)
}

#[inline(always)]
fn round_vectors<S: Simd>(_: S, mut to: &mut [u16], mut from: &[f32], draw: StochasticRounding) {
    let mut element = draw.first;
    while !to.is_empty() {
        let skip = (element % DRAWN as u64) as usize;
        let words = words_of_16(draw.key, (element - skip as u64) / 4, 0, draw.step);
        let drawn: [u32; DRAWN] = std::array::from_fn(|i| words[i % 4][i / 4]);
        let n = to.len().min(DRAWN - skip);
        let (now, later) = std::mem::take(&mut to).split_at_mut(n);
        for ((to, x), word) in now.iter_mut().zip(from).zip(&drawn[skip..]) {
            *to = rounded(*x, word >> 16);
        }
        (to, from, element) = (later, &from[n..], element + n as u64);
    }
}

/// `x` rounded away from zero when its lower 16 bits and `random`, 16 bits too, carry; the sign is not among what they carry into.
#[inline(always)]
fn rounded(x: f32, random: u32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let sum = bits.wrapping_add(random) >> 16;
    // Beyond the largest number lies infinity, which nothing finite becomes.
    let overflown = u32::from(magnitude < 0x7f80_0000 && sum & 0x7fff == 0x7f80);
    // NaN stays NaN: its mantissa could carry into the sign.
    let nan = (bits >> 16) | 0x40;
    (if magnitude > 0x7f80_0000 { nan } else { sum - overflown }) as u16
}
