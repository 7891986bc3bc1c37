//! The micro tile of every matrix product: a few rows × a few vectors, held in registers over the whole depth.
//!
//! An element of the result is one chain `acc = a·b + acc` over the depth in rising order, begun at 0, then stored or
//! added to what was there. It depends on nothing else, so products may be cut into tiles in any way.
use super::simd::{LANES, Simd};

/// Operands of one micro tile: `c[i·ldc + j] (=|+=) Σ_p a[i·rs + p·ks] · b[p·ldb + j]`.
pub(crate) struct Tile {
    /// Depth.
    pub(crate) k: usize,
    pub(crate) a: *const f32,
    /// Stride between rows of `a`.
    pub(crate) rs: usize,
    /// Stride of `a` along the depth.
    pub(crate) ks: usize,
    pub(crate) b: *const f32,
    pub(crate) ldb: usize,
    pub(crate) c: *mut f32,
    pub(crate) ldc: usize,
    /// `+=` instead of `=`.
    pub(crate) add: bool,
}

/// Computes a tile of `MR` rows × `NV` vectors.
///
/// # Safety
/// All elements that the formula of [`Tile`] names for i < MR, j < 16·NV, p < k are readable, and `c` is writable.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(s: S, t: &Tile) {
    // A packed left operand gets its own loop: its addresses are then constants.
    // SAFETY: as the caller promises.
    unsafe {
        if t.rs == 1 && t.ks == MR {
            tile_with::<S, MR, NV>(s, t, 1, MR)
        } else if t.ks == 1 {
            tile_with::<S, MR, NV>(s, t, t.rs, 1)
        } else {
            tile_with::<S, MR, NV>(s, t, t.rs, t.ks)
        }
    }
}

#[inline(always)]
unsafe fn tile_with<S: Simd, const MR: usize, const NV: usize>(s: S, t: &Tile, rs: usize, ks: usize) {
    // The results are wanted when the depth is through; a hint needs no valid address.
    for i in 0..MR {
        for j in 0..NV {
            s.prefetch(t.c.wrapping_add(i * t.ldc + j * LANES));
        }
    }
    let mut acc = [[s.splat(0.0); NV]; MR];
    for p in 0..t.k {
        let mut b = [s.splat(0.0); NV];
        for (j, b) in b.iter_mut().enumerate() {
            // SAFETY: p < k, j < NV.
            *b = unsafe { s.load(t.b.add(p * t.ldb + j * LANES)) };
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: i < MR, p < k.
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
                let c = t.c.add(i * t.ldc + j * LANES);
                let v = if t.add { s.add(s.load(c), *acc) } else { *acc };
                s.store(c, v);
            }
        }
    }
}

/// A product of small matrices that lie in scratch: `rows` (a multiple of `MR`) × `nvecs` vectors; fields as in [`Tile`].
///
/// # Safety
/// As [`tile`], for i < rows, j < 16·nvecs.
#[inline(always)]
pub(crate) unsafe fn small_product<S: Simd>(s: S, rows: usize, nvecs: usize, t: Tile) {
    if nvecs == 0 {
        return;
    }
    // Even widths: 4 vectors are 2 + 2, not 3 + 1.
    let panels = nvecs.div_ceil(S::NV);
    let width = nvecs.div_ceil(panels);
    for i in (0..rows).step_by(S::MR) {
        let mut j = 0;
        while j < nvecs {
            let nv = width.min(nvecs - j);
            // SAFETY: as the caller promises.
            unsafe {
                let a = t.a.add(i * t.rs);
                let b = t.b.add(j * LANES);
                let c = t.c.add(i * t.ldc + j * LANES);
                s.micro(nv, &Tile { a, b, c, ..t });
            }
            j += nv;
        }
    }
}
