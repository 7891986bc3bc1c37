//! Computes a small tile of a matmul's result, a few rows × a few vectors, in registers (the
//! micro-kernel).
//!
//! A [`SumRule`] defines the order in which the terms of each element are added. The value depends
//! on nothing else, so a matmul may be divided into tiles in any way.
use super::flush_denormals::FlushDenormals;
use super::simd::{LANES, MAX_TILE_ROW_LEN, MicroTile, Simd, load_array, store_array};
use super::sum_rule::{BF16_BLOCK_LEN, SumRule};
use std::ops::Range;

/// Switches this thread's vector instructions to flush subnormal numbers to zero for bf16 matmuls,
/// if the instruction set relies on a CPU mode for this. The returned value, if any, must exist
/// while the micro-kernel runs.
#[inline(always)]
pub(crate) fn prepare_thread<S: Simd>(_: S, rule: SumRule) -> Option<FlushDenormals> {
    (rule == SumRule::Bf16Blocks && S::USES_FLUSH_MODE).then(FlushDenormals::enable)
}

/// Computes a tile of a matmul's result in registers: `MR` rows × `NV` vectors.
///
/// # Safety
///
/// The caller must ensure that all elements in the formula of [`MicroTile`] for i < MR, j < 16·NV
/// and p < depth are readable, and that those of `c` are writable. For [`SumRule::Bf16Blocks`], the
/// value of [`prepare_thread`] must exist.
#[inline(always)]
pub(crate) unsafe fn compute_tile<S: Simd, const MR: usize, const NV: usize>(s: S, t: &MicroTile) {
    // With constant strides the compiler generates constant address offsets.
    // SAFETY: guaranteed by the caller.
    unsafe {
        if t.a_row_stride == 1 && t.a_depth_stride == MR {
            compute_tile_with_strides::<S, MR, NV>(s, t, 1, MR)
        } else if t.a_depth_stride == 1 {
            compute_tile_with_strides::<S, MR, NV>(s, t, t.a_row_stride, 1)
        } else {
            compute_tile_with_strides::<S, MR, NV>(s, t, t.a_row_stride, t.a_depth_stride)
        }
    }
}

/// Computes a tile of a matmul's result in registers from a left operand with the row stride `rs`
/// and the stride `ks` along the summed dimension. Callers pass constants where they can, for which
/// the compiler specialises the code.
///
/// # Safety
///
/// The caller must meet the requirements of [`compute_tile`].
#[inline(always)]
unsafe fn compute_tile_with_strides<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    t: &MicroTile,
    rs: usize,
    ks: usize,
) {
    // The result is needed at the end. A prefetched address need not be valid.
    for i in 0..MR {
        for j in 0..NV {
            s.prefetch(t.c.wrapping_add(i * t.c_row_stride + j * LANES));
        }
    }
    if t.rule == SumRule::Bf16Blocks {
        // SAFETY: guaranteed by the caller.
        return unsafe { add_bf16_blocks::<S, MR, NV>(s, t, rs, ks) };
    }
    // SAFETY: the caller guarantees these terms.
    let acc = unsafe { run_chains::<S, false, MR, NV>(s, t, rs, ks, 0..t.depth) };
    for (i, acc) in acc.iter().enumerate() {
        for (j, acc) in acc.iter().enumerate() {
            // SAFETY: i < MR, j < NV.
            unsafe {
                let c = t.c.add(i * t.c_row_stride + j * LANES);
                let v = if t.accumulate { s.add(s.load(c), *acc) } else { *acc };
                s.store(c, v);
            }
        }
    }
}

/// Sums the products with the indices `terms` along the summed dimension for each element of a
/// tile, as one sequence of fused multiply-adds that starts at zero. If `FLUSH` is set, subnormal
/// numbers count as zero.
///
/// # Safety
///
/// The caller must meet the requirements of [`compute_tile`], and all of `terms` must be below the
/// depth of the tile.
#[inline(always)]
unsafe fn run_chains<S: Simd, const FLUSH: bool, const MR: usize, const NV: usize>(
    s: S,
    t: &MicroTile,
    rs: usize,
    ks: usize,
    terms: impl Iterator<Item = usize>,
) -> [[S::V; NV]; MR] {
    let mut acc = [[s.splat(0.0); NV]; MR];
    for p in terms {
        let mut b = [s.splat(0.0); NV];
        for (j, b) in b.iter_mut().enumerate() {
            // SAFETY: p < depth, j < NV.
            *b = unsafe { s.load(t.b.add(p * t.b_row_stride + j * LANES)) };
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: i < MR, p < depth.
            let a = s.splat(unsafe { *t.a.add(i * rs + p * ks) });
            for (acc, b) in acc.iter_mut().zip(b) {
                *acc = if FLUSH { s.fma_flushed(a, b, *acc) } else { s.fma(a, b, *acc) };
            }
        }
    }
    acc
}

/// Zeros that replace the old result as the initial sums of a tile if a matmul overwrites the
/// result instead of adding to it.
static ZEROS: [f32; MAX_TILE_ROW_LEN] = [0.0; MAX_TILE_ROW_LEN];

/// Computes a tile of the product of bf16 matrices in the order of additions that
/// [`SumRule::Bf16Blocks`] prescribes.
///
/// The chains of the odd terms of a block run after those of the even terms, so that a tile may
/// have as many accumulators as with one chain. The even chains and the sums of the blocks before
/// are kept in memory, in the L1 cache. Sums are written to the result after the last block.
///
/// # Safety
///
/// The caller must meet the requirements of [`compute_tile`].
#[inline(always)]
unsafe fn add_bf16_blocks<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    t: &MicroTile,
    rs: usize,
    ks: usize,
) {
    debug_assert!(t.depth_start.is_multiple_of(2));
    let mut sums = [[[0.0f32; LANES]; NV]; MR];
    let sums = sums.as_mut_ptr().cast::<f32>();
    let mut from = match t.accumulate {
        true => (t.c.cast_const(), t.c_row_stride),
        false => (ZEROS.as_ptr(), 0),
    };
    let mut p = 0;
    while p < t.depth {
        let first = (t.depth_start + p) % BF16_BLOCK_LEN;
        let end = t.depth.min(p + BF16_BLOCK_LEN - first);
        let to = if end == t.depth { (t.c, t.c_row_stride) } else { (sums, NV * LANES) };
        // SAFETY: the terms are below the depth; the caller guarantees the tile of `c`, and `sums`
        // has MR × NV vectors.
        unsafe {
            if end - p == BF16_BLOCK_LEN {
                // With a constant number of terms the compiler generates shorter code.
                let terms = p..p + BF16_BLOCK_LEN;
                add_block::<S, MR, NV>(s, t, (rs, ks), terms, [false; 2], from, to);
            } else {
                let count = first + (end - p);
                let is_padded = [count < BF16_BLOCK_LEN - 1, count < BF16_BLOCK_LEN];
                add_block::<S, MR, NV>(s, t, (rs, ks), p..end, is_padded, from, to);
            }
        }
        from = (sums.cast_const(), NV * LANES);
        p = end;
    }
}

/// Adds the products of one block of terms to a tile's sums at `from`, in the order that
/// [`SumRule::Bf16Blocks`] prescribes, and stores the new sums at `to`. Both addresses come with
/// the number of elements between rows. If the block has fewer terms than a whole one, `is_padded`
/// adds a missing term, 0·0, to the chain of the even and to that of the odd terms. (Further ones
/// would change nothing.)
///
/// # Safety
///
/// The caller must meet the requirements of [`run_chains`], and MR rows of NV vectors must be
/// readable at `from` and writable at `to`.
#[inline(always)]
unsafe fn add_block<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    t: &MicroTile,
    (rs, ks): (usize, usize),
    terms: Range<usize>,
    is_padded: [bool; 2],
    from: (*const f32, usize),
    to: (*mut f32, usize),
) {
    let zero = s.splat(0.0);
    let mut even_chains = [[[0.0f32; LANES]; NV]; MR];
    // SAFETY: guaranteed by the caller.
    let even = unsafe { run_chains::<S, true, MR, NV>(s, t, rs, ks, (terms.start..terms.end).step_by(2)) };
    for i in 0..MR {
        for j in 0..NV {
            let chain = if is_padded[0] { s.add_flushed(even[i][j], zero) } else { even[i][j] };
            store_array(s, &mut even_chains[i][j], chain);
        }
    }
    // SAFETY: guaranteed by the caller.
    let odd = unsafe { run_chains::<S, true, MR, NV>(s, t, rs, ks, (terms.start + 1..terms.end).step_by(2)) };
    for i in 0..MR {
        for j in 0..NV {
            let chain = if is_padded[1] { s.add_flushed(odd[i][j], zero) } else { odd[i][j] };
            let block_sum = s.add_flushed(load_array(s, &even_chains[i][j]), chain);
            // SAFETY: guaranteed by the caller.
            unsafe {
                let previous = s.load(from.0.add(i * from.1 + j * LANES));
                s.store(to.0.add(i * to.1 + j * LANES), s.add_flushed(previous, block_sum));
            }
        }
    }
}

/// Multiplies two small matrices in scratch memory with the micro-kernel, the function that
/// computes a small tile in registers. The result has `rows` rows, which must be a multiple of
/// [`Simd::TILE_ROWS`], and `nvecs` vectors per row. `t` describes the operands.
///
/// # Safety
///
/// The caller must meet the requirements of [`compute_tile`], for i < rows and j < 16·nvecs.
#[inline(always)]
pub(crate) unsafe fn multiply_small_matrices<S: Simd>(s: S, rows: usize, nvecs: usize, t: MicroTile) {
    if nvecs == 0 {
        return;
    }
    // Panels of even width: 4 vectors are 2 + 2, not 3 + 1.
    let panels = nvecs.div_ceil(S::TILE_ROW_VECTORS);
    let width = nvecs.div_ceil(panels);
    for i in (0..rows).step_by(S::TILE_ROWS) {
        let mut j = 0;
        while j < nvecs {
            let nv = width.min(nvecs - j);
            // SAFETY: guaranteed by the caller.
            unsafe {
                let a = t.a.add(i * t.a_row_stride);
                let b = t.b.add(j * LANES);
                let c = t.c.add(i * t.c_row_stride + j * LANES);
                s.run_micro_kernel(nv, &MicroTile { a, b, c, ..t });
            }
            j += nv;
        }
    }
}
