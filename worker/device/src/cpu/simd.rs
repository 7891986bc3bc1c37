//! Operations on a vector of 16 `f32` lanes, which each instruction set implements ([`Simd`]).
//!
//! The vector is one zmm register with AVX-512, two ymm registers with AVX2, and an array
//! elsewhere.
//!
//! Kernels are written once over [`Simd`] and compiled for each instruction set
//! (`instruction_set.rs`), which is chosen at run time. Every instruction set has the same 16
//! lanes and rounds each operation once, so all give the same bits.
use super::sum_rule::SumRule;

/// Number of lanes (elements) of a vector ([`Simd::V`]) on every instruction set.
pub(crate) const LANES: usize = 16;

/// Number of elements of the largest block (tile) of a matmul's result that is computed in
/// registers at once, on any instruction set: rows × vectors × lanes.
pub(crate) const MAX_TILE_LEN: usize = 8 * MAX_TILE_ROW_LEN;

/// Number of elements in a row of the largest block (tile) of a matmul's result that is computed in
/// registers at once, on any instruction set.
pub(crate) const MAX_TILE_ROW_LEN: usize = 3 * LANES;

/// Addresses and strides of the operands and of the result tile for one call of the micro-kernel,
/// which computes the tile in registers. The micro-kernel computes `c[i·c_row_stride + j] (=|+=)
/// Σ_p a[i·a_row_stride + p·a_depth_stride] · b[p·b_row_stride + j]`.
#[derive(Clone, Copy)]
pub(crate) struct MicroTile {
    /// The order in which the terms of each sum are added.
    pub(crate) rule: SumRule,
    /// Number of terms before the first one that this tile adds. They count for the division of the
    /// sum into blocks ([`SumRule::Bf16Blocks`]). Must be even.
    pub(crate) depth_start: usize,
    /// Number of terms in the sum of each element.
    pub(crate) depth: usize,
    /// Address of the first element of the left operand.
    pub(crate) a: *const f32,
    /// Number of elements from one row of `a` to the next.
    pub(crate) a_row_stride: usize,
    /// Number of elements from one term of a row of `a` to the next.
    pub(crate) a_depth_stride: usize,
    /// Address of the first element of the right operand.
    pub(crate) b: *const f32,
    /// Number of elements from one row of `b` to the next.
    pub(crate) b_row_stride: usize,
    /// Address of the first element of the result.
    pub(crate) c: *mut f32,
    /// Number of elements from one row of `c` to the next.
    pub(crate) c_row_stride: usize,
    /// True if the sums are added to `c`, false if they overwrite `c`.
    pub(crate) accumulate: bool,
}

/// Operations on a vector of 16 `f32` lanes, which are implemented for each instruction set. A
/// value of an implementing type exists only on machines that have the instructions.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A vector of 16 `f32` lanes.
    type V: Copy;
    /// Number of rows of the result tile that the matmul micro-kernel computes in registers at a
    /// time.
    const TILE_ROWS: usize;
    /// Number of vectors in each row of the result tile that the matmul micro-kernel computes in
    /// registers at a time.
    const TILE_ROW_VECTORS: usize;
    /// Number of elements in each row of the result tile that the matmul micro-kernel computes in
    /// registers at a time.
    const TILE_COLUMNS: usize = Self::TILE_ROW_VECTORS * LANES;
    /// True if [`Simd::fma_flushed`] and [`Simd::add_flushed`] need a CPU mode that flushes
    /// subnormal numbers to zero, false if these functions flush the numbers themselves.
    const USES_FLUSH_MODE: bool;

    /// Returns a vector whose lanes are all `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Loads a vector from the 16 elements at `p`.
    ///
    /// # Safety
    ///
    /// The caller must ensure that 16 elements at `p` are readable.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Loads the first `n < 16` lanes from `p` and sets the others to 0.
    ///
    /// # Safety
    ///
    /// The caller must ensure that `n` elements at `p` are readable.
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V;
    /// Stores the 16 lanes of `v` at `p`.
    ///
    /// # Safety
    ///
    /// The caller must ensure that 16 elements at `p` are writable.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Stores the first `n < 16` lanes of `v` at `p`.
    ///
    /// # Safety
    ///
    /// The caller must ensure that `n` elements at `p` are writable.
    unsafe fn store_part(self, p: *mut f32, n: usize, v: Self::V);

    /// Computes `a + b` in each lane.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// Computes `a − b` in each lane.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// Computes `a · b` in each lane.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// Computes `a / b` in each lane.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// Computes `√a` in each lane.
    fn sqrt(self, a: Self::V) -> Self::V;
    /// Computes the larger of `a` and `b` in each lane, or `b` where `a` or `b` is NaN. The result
    /// is `if a > b { a } else { b }`.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Computes the smaller of `a` and `b` in each lane, or `b` where `a` or `b` is NaN. The result
    /// is `if a < b { a } else { b }`.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Computes `a·b + c` in each lane, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Computes `c − a·b` in each lane, rounded once.
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Computes `a·b + c` in each lane, rounded once, with subnormal inputs and results replaced by
    /// zero. If [`Simd::USES_FLUSH_MODE`] is set, a [`super::flush_denormals::FlushDenormals`] must
    /// exist on this thread.
    #[inline(always)]
    fn fma_flushed(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.fma(a, b, c)
    }
    /// Computes `a + b` in each lane, with subnormal inputs and results replaced by zero. The
    /// condition of [`Simd::fma_flushed`] applies.
    #[inline(always)]
    fn add_flushed(self, a: Self::V, b: Self::V) -> Self::V {
        self.add(a, b)
    }
    /// Computes `v · 2ⁿ` in each lane, with an integer `n` for each lane, rounded once. The lanes
    /// of `n` are integers in −150..=129.
    fn scale_pow2(self, v: Self::V, n: Self::V) -> Self::V;
    /// Returns the sum of the lanes in a fixed order: first lanes `i` and `i + 8` are added, then
    /// `i` and `i + 4`, then `i` and `i + 2`, and at last `i` and `i + 1`.
    fn sum(self, v: Self::V) -> f32;
    /// Returns the value of the largest lane, or an arbitrary lane's value if one is NaN.
    fn max_lane(self, v: Self::V) -> f32;

    /// Prefetches the cache line at `p`, which may be an invalid address.
    fn prefetch(self, p: *const f32);
    /// Computes a block of a matmul's result in registers, with [`Simd::TILE_ROWS`] rows and `nv`
    /// vectors of 16 elements per row.
    ///
    /// # Safety
    ///
    /// The caller must meet the requirements of [`super::micro_kernel::compute_tile`].
    unsafe fn run_micro_kernel(self, nv: usize, t: &MicroTile);
    /// Transposes 8 × 8 elements in memory: `dst[p·ldd + i] = src[i·lds + p]` for i and p in 0..8.
    /// The rows of `dst` are stored in rising order, each with all eight elements. If `ldd < 8`,
    /// each row therefore overwrites the end of the row before.
    ///
    /// # Safety
    ///
    /// The caller must ensure that these elements are readable in `src` and writable in `dst`.
    unsafe fn transpose8(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize);
}

/// Loads a vector from the 16 elements `x[i..]`. Lanes past the end of `x` are 0.
#[inline(always)]
pub(crate) fn load_lanes<S: Simd>(s: S, x: &[f32], i: usize) -> S::V {
    let rest = &x[i..];
    if rest.len() >= LANES {
        // SAFETY: the slice has 16 elements.
        unsafe { s.load(rest.as_ptr()) }
    } else {
        // SAFETY: the slice has that many elements.
        unsafe { s.load_part(rest.as_ptr(), rest.len()) }
    }
}

/// Stores the lanes of `v` to `x[i..]`. Lanes past the end of `x` are not stored.
#[inline(always)]
pub(crate) fn store_lanes<S: Simd>(s: S, x: &mut [f32], i: usize, v: S::V) {
    let rest = &mut x[i..];
    if rest.len() >= LANES {
        // SAFETY: the slice has 16 elements.
        unsafe { s.store(rest.as_mut_ptr(), v) }
    } else {
        // SAFETY: the slice has that many elements.
        unsafe { s.store_part(rest.as_mut_ptr(), rest.len(), v) }
    }
}

/// Loads a vector from an array of 16 elements.
#[inline(always)]
pub(crate) fn load_array<S: Simd>(s: S, x: &[f32; LANES]) -> S::V {
    // SAFETY: the slice has 16 elements.
    unsafe { s.load(x.as_ptr()) }
}

/// Stores the lanes of a vector to an array of 16 elements.
#[inline(always)]
pub(crate) fn store_array<S: Simd>(s: S, x: &mut [f32; LANES], v: S::V) {
    // SAFETY: the slice has 16 elements.
    unsafe { s.store(x.as_mut_ptr(), v) }
}

/// Computes eˣ in each lane with an error of at most 2 ulp, also for subnormal results. The result
/// is +∞ above 88.72 and 0 below −103.97. NaN stays NaN.
///
/// Uses eˣ = 2ⁿ·eʳ with n = round(x / ln 2), |r| ≤ ln 2 / 2, and the Taylor polynomial of eʳ.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Adding and subtracting 1.5·2²³ rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 as a sum. The first summand has 9 significant bits, so its product with an integer below
    // 2¹⁵ is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = (core::f64::consts::LN_2 - 355.0 / 512.0) as f32;
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.0), x));
    let shifted = s.fma(x, s.splat(core::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(shifted, s.splat(ROUND));
    let r = s.fnma(n, s.splat(LN2_HIGH), x);
    let r = s.fnma(n, s.splat(LN2_LOW), r);
    // Terms up to r⁷; the remainder is below 6e-9.
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    s.scale_pow2(p, n)
}

/// Computes tanh(x) in each lane with an error of at most 6 ulp, also near 0. NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    // Above 9.02 the nearest f32 is 1. `min` and `max` return their second argument for NaN.
    let x = s.min(s.splat(9.02), s.max(s.splat(-9.02), x));
    // Lambert's continued fraction of tanh(x/4), truncated after seven terms, as a quotient of
    // polynomials.
    let quarter = s.mul(x, s.splat(0.25));
    let y = s.mul(quarter, quarter);
    let polynomial = |coefficients: &[f32]| {
        let one = s.splat(1.0);
        coefficients.iter().fold(one, |p, &c| s.fma(p, y, s.splat(c)))
    };
    let numerator = s.mul(quarter, polynomial(&[378.0, 17325.0, 135_135.0]));
    let denominator =
        s.fma(s.fma(s.fma(s.splat(28.0), y, s.splat(3150.0)), y, s.splat(62370.0)), y, s.splat(135_135.0));
    // tanh(2u) = 2·tanh(u) / (1 + tanh²(u)), twice.
    let double = |t: S::V| s.div(s.add(t, t), s.fma(t, t, s.splat(1.0)));
    double(double(s.div(numerator, denominator)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::instruction_set::{InstructionSet, multiversion};

    multiversion! {
        fn exp_all = exp_each(x: &mut [f32])
    }

    /// Computes eˣ of each element, in place.
    #[inline(always)]
    fn exp_each<S: Simd>(s: S, x: &mut [f32]) {
        for i in (0..x.len()).step_by(LANES) {
            store_lanes(s, x, i, exp(s, load_lanes(s, x, i)));
        }
    }

    /// Returns the distance between `actual` and `expected`, in units in the last place of
    /// `expected`.
    fn compute_ulp_distance(actual: f32, expected: f64) -> f64 {
        let rounded = expected as f32;
        let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
        (f64::from(actual) - expected).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_ulps() {
        let range =
            |from: f32, to: f32, n: usize| (0..n).map(move |i| from + (to - from) * i as f32 / n as f32);
        let x: Vec<f32> = range(-104.0, 88.72, 300_000)
            .chain(range(-1.0, 1.0, 100_000))
            .chain([0.0, -0.0, 1e-30, 88.722])
            .collect();
        for instruction_set in InstructionSet::list_available() {
            let mut y = x.clone();
            exp_all(instruction_set, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let error = compute_ulp_distance(*y, f64::from(*x).exp());
                assert!(error <= 2.0, "{}: exp({x}) = {y}, off by {error} ulp", instruction_set.name());
            }
        }
    }

    multiversion! {
        fn tanh_all = tanh_each(x: &mut [f32])
    }

    /// Computes tanh(x) of each element, in place.
    #[inline(always)]
    fn tanh_each<S: Simd>(s: S, x: &mut [f32]) {
        for i in (0..x.len()).step_by(LANES) {
            store_lanes(s, x, i, tanh(s, load_lanes(s, x, i)));
        }
    }

    #[test]
    fn tanh_is_within_six_ulps() {
        let range =
            |from: f32, to: f32, n: usize| (0..n).map(move |i| from + (to - from) * i as f32 / n as f32);
        let x: Vec<f32> = range(-12.0, 12.0, 200_000)
            .chain(range(1e-4, 0.1, 50_000))
            .chain([0.0, -0.0, 1e-30, 1e30, f32::INFINITY, f32::NEG_INFINITY])
            .collect();
        for instruction_set in InstructionSet::list_available() {
            let mut y = x.clone();
            tanh_all(instruction_set, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let expected = f64::from(*x).tanh();
                let error = compute_ulp_distance(y.abs(), expected.abs());
                assert!(error <= 6.0, "{}: tanh({x}) = {y}, off by {error} ulp", instruction_set.name());
                assert!(y.abs() <= 1.0, "{}: tanh({x}) = {y}", instruction_set.name());
            }
            let mut broken = [f32::NAN, -f32::NAN];
            tanh_all(instruction_set, &mut broken);
            assert!(broken.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn exp_handles_overflow_underflow_and_nan() {
        let inf = f32::INFINITY;
        for instruction_set in InstructionSet::list_available() {
            let mut x = [-inf, -105.0, 89.0, 1e30, inf, f32::NAN, -f32::NAN];
            exp_all(instruction_set, &mut x);
            assert_eq!(x[..5], [0.0, 0.0, inf, inf, inf]);
            assert!(x[5].is_nan() && x[6].is_nan());
        }
    }
}
