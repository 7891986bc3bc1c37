//! Sums of squares, for the gradient norm and for Muon.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd};
use crate::ops::NORM_BLOCK_LEN;
use crate::ops::expect_len;

/// Implements [`crate::Ops::sum_squares_by_block`].
pub(crate) fn sum_squares_by_block(cpu: &Cpu, out: &mut [f64], x: &[f32]) {
    expect_len("sum_squares_by_block", "out", out.len(), x.len().div_ceil(NORM_BLOCK_LEN));
    let blocks = out.len();
    let out = DisjointSlices::new(out);
    cpu.run_over_rows(blocks, NORM_BLOCK_LEN, |range| {
        // SAFETY: each task writes different blocks.
        let out = unsafe { out.slice_mut(range.clone()) };
        for (out, block) in out.iter_mut().zip(x.chunks(NORM_BLOCK_LEN).skip(range.start)) {
            *out = sum_block(cpu.instruction_set, block);
        }
    });
}

/// Implements [`crate::Ops::sum_squares`]: adds the squares in the order of the elements, on the
/// calling thread.
pub(crate) fn sum_squares(x: &[f32]) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum()
}

multiversion! {
    fn sum_block = sum_block_simd(x: &[f32]) -> f64
}

/// Returns the sum of squares of a block. Element i is added to lane i mod 16, and the lanes are
/// added in the order of [`Simd::sum`]. Squares are exact, because the square of an `f32` is
/// representable in `f64`.
#[inline(always)]
fn sum_block_simd<S: Simd>(_: S, x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f64::from(x) * f64::from(x);
    }
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            lanes[i] += lanes[i + w];
        }
    }
    lanes[0]
}
