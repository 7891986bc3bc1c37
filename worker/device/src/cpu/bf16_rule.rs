//! The rule by which the CPU backend multiplies bf16 matrices, and its scalar implementation.
//!
//! The rule is the arithmetic of the AMX instruction `TDPBF16PS`, so that every CPU gives the bits
//! of CPUs with AMX. The depth is divided into blocks of [`BF16_BLOCK`] terms. A block that is not
//! complete is filled with zeros. Each element of the result is updated block by block:
//!
//! 1. The products of the block's even terms are summed by fused multiply-adds in rising order,
//!    starting from +0. This is the even chain. The odd terms are the odd chain.
//! 2. The two chains are added, and their sum is added to the element.
//!
//! Every operation rounds to nearest, ties to even. Subnormal inputs count as zeros, and a result
//! that is subnormal after rounding becomes a zero with the same sign. Payloads and signs of NaN
//! are not specified.
use super::simd::fused_multiply_add;

/// Number of terms that a block of the depth has. The terms of a block are summed before they are
/// added to the result.
pub(crate) const BF16_BLOCK: usize = 32;

/// Replaces a subnormal number by a zero with the same sign.
#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// Computes `a·b + c`, rounded once, and replaces subnormal inputs and results by zeros.
#[inline(always)]
pub(crate) fn fma_flushed(a: f32, b: f32, c: f32) -> f32 {
    let (a, b, c) = (flush(a), flush(b), flush(c));
    let result = fused_multiply_add(a, b, c);
    // A result of the smallest normal magnitude may have been rounded up from a number that is
    // subnormal if it is rounded with an unlimited exponent.
    if result.abs() > f32::MIN_POSITIVE || result == 0.0 || result.is_nan() {
        result
    } else {
        flush_small_sum(a, b, c)
    }
}

/// Computes `a·b + c`, rounded to the precision of `f32` with an unlimited exponent, and replaces
/// the result by zero if its magnitude is below [`f32::MIN_POSITIVE`].
#[cold]
fn flush_small_sum(a: f32, b: f32, c: f32) -> f32 {
    let (a, b, c) = (f64::from(a), f64::from(b), f64::from(c));
    // The product is exact, and the sum of this small magnitude is rounded to odd.
    let sum = super::simd::add_round_to_odd(a * b, c);
    let scale = f64::from_bits((1023 + 64) << 52);
    let scaled = (sum * scale) as f32;
    if f64::from(scaled.abs()) < f64::from(f32::MIN_POSITIVE) * scale {
        0.0f32.copysign(scaled)
    } else {
        f32::MIN_POSITIVE.copysign(scaled)
    }
}

/// Adds two numbers, and replaces subnormal inputs and results by zeros.
#[inline(always)]
pub(crate) fn add_flushed(a: f32, b: f32) -> f32 {
    // A subnormal sum of two f32 is exact, so it is subnormal before and after rounding.
    flush(flush(a) + flush(b))
}

/// Adds the products of the terms of one block to `c` by the rule of this module. `a` and `b` have
/// the same length, at most [`BF16_BLOCK`].
#[inline(always)]
pub(crate) fn add_block(c: f32, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32, terms: usize) -> f32 {
    let chain = |first: usize| {
        let sum = (first..terms).step_by(2).fold(0.0, |sum, p| fma_flushed(a(p), b(p), sum));
        // Products of zeros that fill the block turn −0 into +0, and change nothing else.
        if terms < BF16_BLOCK - 1 + first { sum + 0.0 } else { sum }
    };
    add_flushed(c, add_flushed(chain(0), chain(1)))
}

/// Operands of one tile of a bf16 matmul: packed panels of a few rows of the left operand and a few
/// columns of the right operand, widened to `f32`.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Panels {
    /// Address of the panel of the left operand: `rows` elements for each term.
    pub(crate) a: *const f32,
    /// Address of the panel of the right operand: `b_stride` elements for each term.
    pub(crate) b: *const f32,
    /// Number of elements from one term of the right panel to the next.
    pub(crate) b_stride: usize,
    /// Number of terms of the sums.
    pub(crate) depth: usize,
}

/// Adds the matmul of two panels to the tile `c` of `rows` rows of `columns` elements.
///
/// # Safety
///
/// The caller must ensure that the panels have `rows` and at least `columns` elements for each
/// term.
pub(crate) unsafe fn multiply_panels(panels: Bf16Panels, rows: usize, columns: usize, c: &mut [f32]) {
    for p0 in (0..panels.depth).step_by(BF16_BLOCK) {
        let terms = BF16_BLOCK.min(panels.depth - p0);
        for (i, row) in c.chunks_exact_mut(columns).take(rows).enumerate() {
            for (j, c) in row.iter_mut().enumerate() {
                // SAFETY: guaranteed by the caller.
                let a = |p: usize| unsafe { *panels.a.add((p0 + p) * rows + i) };
                // SAFETY: guaranteed by the caller.
                let b = |p: usize| unsafe { *panels.b.add((p0 + p) * panels.b_stride + j) };
                *c = add_block(*c, a, b, terms);
            }
        }
    }
}
