//! Fused multiply-adds in `f64` arithmetic, for instruction sets that have none ([`fma_lanes`] and
//! [`fma_flushed_lanes`]). The results have the bits that the instruction would give.
//!
//! The product of two `f32` is exact in `f64`. The sum of the product and the addend is rounded to
//! `f64` and then to `f32`. The second rounding gives another result than a single rounding only if
//! the sum in `f64` is half-way between two `f32`, or if the result is subnormal. In these rare
//! cases, the sum is computed again and rounded to odd, which keeps the information that the second
//! rounding needs (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
use super::simd::LANES;

/// The smallest positive normal `f32`, 2⁻¹²⁶.
const MIN_NORMAL: f64 = f32::MIN_POSITIVE as f64;

/// The smallest positive number that rounds to 2⁻¹²⁶ with 24 significant bits and an unlimited
/// exponent: 2⁻¹²⁶ − 2⁻¹⁵¹. Results below are subnormal *after rounding*, which is the condition
/// under which x86 flushes a result to zero.
const MIN_ROUNDED_TO_NORMAL: f64 = MIN_NORMAL * (1.0 - 1.0 / (1u64 << 25) as f64);

/// Computes `a·b + c` in each lane, rounded once.
#[inline(always)]
pub(crate) fn fma_lanes(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
    let (sums, is_certain) = add_products(&a, &b, &c);
    match is_certain {
        true => sums.map(|sum| sum as f32),
        false => core::array::from_fn(|i| add_product_rounded_to_odd(a[i], b[i], c[i]) as f32),
    }
}

/// Computes `a·b + c` in each lane, rounded once, with subnormal inputs and results flushed to zero
/// as x86 does with the flags DAZ and FTZ.
#[inline(always)]
pub(crate) fn fma_flushed_lanes(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
    let [a, b, c] = [a, b, c].map(flush_lanes);
    let (sums, is_certain) = add_products(&a, &b, &c);
    match is_certain {
        true => sums.map(|sum| sum as f32),
        false => core::array::from_fn(|i| fma_flushed(a[i], b[i], c[i])),
    }
}

/// Computes `a + b` in each lane, with subnormal inputs and results flushed to zero. (A sum in the
/// range of subnormal numbers is exact, so that it does not matter whether it is compared before or
/// after its rounding.)
#[inline(always)]
pub(crate) fn add_flushed_lanes(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
    let (a, b) = (flush_lanes(a), flush_lanes(b));
    flush_lanes(core::array::from_fn(|i| a[i] + b[i]))
}

/// Computes `a·b + c` of numbers that are not subnormal, rounded once, and flushes a subnormal
/// result to zero.
pub(crate) fn fma_flushed(a: f32, b: f32, c: f32) -> f32 {
    let sum = add_product_rounded_to_odd(a, b, c);
    if sum.abs() < MIN_ROUNDED_TO_NORMAL { 0.0f32.copysign(sum as f32) } else { sum as f32 }
}

/// Replaces subnormal numbers by zeros of the same sign.
#[inline(always)]
pub(crate) fn flush_lanes(x: [f32; LANES]) -> [f32; LANES] {
    x.map(|x| f32::from_bits(x.to_bits() & if x.abs() < f32::MIN_POSITIVE { 1 << 31 } else { u32::MAX }))
}

/// Computes `a·b + c` in each lane in `f64`. Also returns true if rounding every sum to `f32` gives
/// the same bits as rounding the exact sums, and no result is subnormal.
#[inline(always)]
fn add_products(a: &[f32; LANES], b: &[f32; LANES], c: &[f32; LANES]) -> ([f64; LANES], bool) {
    let mut sums = [0.0f64; LANES];
    let mut uncertain = 0u32;
    for i in 0..LANES {
        let sum = f64::from(a[i]) * f64::from(b[i]) + f64::from(c[i]);
        // An `f32` has 29 bits of mantissa less than an `f64`.
        let is_halfway = sum.to_bits() as u32 & 0x1fff_ffff == 0x1000_0000;
        let is_subnormal = sum != 0.0 && sum.abs() < MIN_NORMAL;
        uncertain |= u32::from(is_halfway) | u32::from(is_subnormal);
        sums[i] = sum;
    }
    (sums, uncertain == 0)
}

/// Computes `a·b + c` in `f64`, rounded to odd: an inexact result becomes the adjacent number with
/// an odd last bit.
fn add_product_rounded_to_odd(a: f32, b: f32, c: f32) -> f64 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    // The exact error of the sum (Knuth's two-sum). It is NaN if the sum is not finite.
    let c_part = sum - product;
    let error = (product - (sum - c_part)) + (c - c_part);
    let bits = sum.to_bits();
    if bits & 1 == 1 || error == 0.0 || error.is_nan() {
        return sum;
    }
    let is_away_from_zero = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if is_away_from_zero { bits + 1 } else { bits - 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::flush_denormals::FlushDenormals;
    use crate::cpu::instruction_set::{InstructionSet, multiversion};
    use crate::cpu::simd::{Simd, load_array, store_array};

    multiversion! {
        /// Computes `a·b + c`, `c − a·b`, and with flushing `a·b + c` and `a + c`.
        fn compute = compute_lanes(inputs: &[[f32; LANES]; 3], results: &mut [[f32; LANES]; 4])
    }

    #[inline(always)]
    fn compute_lanes<S: Simd>(s: S, inputs: &[[f32; LANES]; 3], results: &mut [[f32; LANES]; 4]) {
        let [a, b, c] = inputs.each_ref().map(|x| load_array(s, x));
        store_array(s, &mut results[0], s.fma(a, b, c));
        store_array(s, &mut results[1], s.fnma(a, b, c));
    }

    multiversion! {
        /// Computes `a·b + c` and `a + c` with flushing.
        fn compute_flushed = compute_flushed_lanes(inputs: &[[f32; LANES]; 3], results: &mut [[f32; LANES]; 4])
    }

    #[inline(always)]
    fn compute_flushed_lanes<S: Simd>(s: S, inputs: &[[f32; LANES]; 3], results: &mut [[f32; LANES]; 4]) {
        let _mode = S::USES_FLUSH_MODE.then(FlushDenormals::enable);
        let [a, b, c] = inputs.each_ref().map(|x| load_array(s, x));
        store_array(s, &mut results[2], s.fma_flushed(a, b, c));
        store_array(s, &mut results[3], s.add_flushed(a, c));
    }

    /// Returns the next number of a random sequence of 32 bits (xorshift).
    fn draw(state: &mut u64) -> u32 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// Draws three numbers whose sum `a·b + c` tests a special case of rounding.
    fn draw_operands(state: &mut u64) -> [f32; 3] {
        let bits = draw(state);
        let [a, b, c] = [(); 3].map(|()| f32::from_bits(draw(state)));
        let with_exponent =
            |x: f32, exponent: u32| f32::from_bits(x.to_bits() & 0x807f_ffff | exponent << 23);
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(1), f32::MIN_POSITIVE];
        match bits % 8 {
            // any numbers, which are often of very different sizes
            0 => [a, b, c],
            1 => [a, b, special[bits as usize / 8 % special.len()]],
            2 => [a, special[bits as usize / 8 % special.len()], c],
            // a product of few bits, so that many sums are half-way between two f32
            3 | 4 => {
                let short = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
                let exponent = 100 + (bits >> 8) % 50;
                let product_exponent = exponent + 15 + (bits >> 16) % 20;
                [
                    with_exponent(short(a), 127),
                    with_exponent(short(b), exponent),
                    with_exponent(c, product_exponent.min(254)),
                ]
            }
            // results near the smallest normal number
            5 | 6 => [
                with_exponent(a, 60 + (bits >> 8) % 8),
                with_exponent(b, 60 + (bits >> 16) % 8),
                with_exponent(c, (bits >> 24) % 4),
            ],
            // results near the largest number
            _ => [
                with_exponent(a, 190),
                with_exponent(b, 188 + (bits >> 8) % 4),
                with_exponent(c, 251 + (bits >> 16) % 4),
            ],
        }
    }

    /// Returns the results of all operations for the operands of one number per lane.
    fn run(instruction_set: InstructionSet, inputs: &[[f32; LANES]; 3]) -> [[f32; LANES]; 4] {
        let mut results = [[0.0; LANES]; 4];
        compute(instruction_set, inputs, &mut results);
        compute_flushed(instruction_set, inputs, &mut results);
        results
    }

    /// Asserts that all instruction sets compute the same bits. The bits of NaN may differ.
    fn assert_same_results(inputs: &[[f32; LANES]; 3]) {
        let want = run(InstructionSet::Portable, inputs);
        for instruction_set in InstructionSet::list_available() {
            let got = run(instruction_set, inputs);
            for (operation, (got, want)) in got.iter().zip(&want).enumerate() {
                for lane in 0..LANES {
                    let (got, want) = (got[lane], want[lane]);
                    let is_equal = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    let operands = inputs.map(|x| x[lane]);
                    assert!(
                        is_equal,
                        "{}, operation {operation} of {operands:?}: {got:e}, not {want:e}",
                        instruction_set.name()
                    );
                }
            }
        }
    }

    #[test]
    fn all_instruction_sets_compute_the_same_bits() {
        let mut state = 0x1234_5678_9abc_def1;
        for _ in 0..200_000 {
            let operands: [[f32; 3]; LANES] = core::array::from_fn(|_| draw_operands(&mut state));
            let inputs = core::array::from_fn(|i| operands.map(|operands| operands[i]));
            assert_same_results(&inputs);
        }
    }

    /// Compares results just below the smallest normal number. x86 flushes those whose rounding
    /// with an unlimited exponent is below it.
    #[test]
    fn results_that_are_rounded_up_to_the_smallest_normal_number_are_flushed_as_on_x86() {
        // (1 − 2⁻²⁴)·2⁻¹²⁶ + c, for multiples c of 2⁻¹⁴⁹, and products with several more bits.
        for shift in 20..40 {
            let small = f32::from_bits((127 - shift) << 23);
            for c in [0.0, f32::from_bits(1), -f32::from_bits(1), f32::MIN_POSITIVE, -f32::MIN_POSITIVE] {
                let half = f32::from_bits((127 - 63) << 23);
                for (a, b) in [(1.0 - small, half), (1.0 + small, -half), (small, half)] {
                    let inputs = [[a * half; LANES], [b; LANES], [c; LANES]];
                    assert_same_results(&inputs);
                    assert_same_results(&inputs.map(|x| x.map(|x| -x)));
                }
            }
        }
        let below = fma_flushed(1.0 - f32::EPSILON / 2.0, f32::MIN_POSITIVE, 0.0);
        assert_eq!(below.to_bits(), 0, "2⁻¹²⁶ − 2⁻¹⁵⁰ is flushed, although it is half-way to 2⁻¹²⁶");
        let exact = fma_lanes([1.0 - f32::EPSILON / 2.0; LANES], [f32::MIN_POSITIVE; LANES], [0.0; LANES]);
        assert_eq!(exact[0], f32::MIN_POSITIVE);
    }
}
