//! Computes a small tile of a matmul's result, a few rows × a few vectors, in registers (the
//! micro-kernel).
//!
//! Each element of the result is one chain `acc = a·b + acc` over the depth in rising order, which
//! starts from zero. The chain is then stored, or added to the previous element. The value depends
//! on nothing else, so a matmul may be divided into tiles in any way.
use super::simd::{LANES, MicroTile, Simd};

/// Computes a tile of a matmul's result in registers: `MR` rows × `NV` vectors.
///
/// # Safety
///
/// The caller must ensure that all elements in the formula of [`MicroTile`] for i < MR, j < 16·NV
/// and p < depth are readable, and that those of `c` are writable.
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

/// Computes a tile of a matmul's result in registers, with the strides of `a` as arguments: `rs`
/// between rows and `ks` along the summed dimension. Callers pass constants where they can, for
/// which the compiler specialises the code.
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
    let mut acc = [[s.splat(0.0); NV]; MR];
    for p in 0..t.depth {
        let mut b = [s.splat(0.0); NV];
        for (j, b) in b.iter_mut().enumerate() {
            // SAFETY: p < depth, j < NV.
            *b = unsafe { s.load(t.b.add(p * t.b_row_stride + j * LANES)) };
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: i < MR, p < depth.
            let a = s.splat(unsafe { *t.a.add(i * rs + p * ks) });
            for (acc, b) in acc.iter_mut().zip(b) {
                *acc = s.fma(a, b, *acc);
            }
        }
    }
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
