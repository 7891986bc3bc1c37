//! Implements vectors of 16 lanes with arrays, for machines without a supported instruction set
//! ([`Portable`]).
use super::micro_kernel;
use super::simd::{LANES, MicroTile, Simd};
use super::software_fma::{add_flushed_lanes, flush_lanes, fma_flushed, fma_flushed_lanes, fma_lanes};

/// Implementation of [`Simd`] with arrays, which the compiler vectorizes for the target's baseline
/// instructions (SSE2 on x86-64, NEON on aarch64).
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// True if every CPU of the compilation target has a fused multiply-add, as on aarch64. On other
/// targets `f32::mul_add` would be a slow library call, and vectors of `f64` are used instead
/// ([`super::software_fma`]).
const HAS_FMA: bool = cfg!(target_arch = "aarch64");

/// Returns a vector of 16 lanes whose lane with the index `i` is `f(i)`.
#[inline(always)]
fn build_lanes(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    core::array::from_fn(f)
}

/// Defines methods of [`Simd`] that each compute an expression in every lane of their operands.
macro_rules! lanewise {
    ($($name:ident($($x:ident),+) = $lane:expr;)+) => {$(
        #[inline(always)]
        fn $name(self, $($x: Self::V),+) -> Self::V {
            build_lanes(|i| {
                $(let $x = $x[i];)+
                $lane
            })
        }
    )+};
}

impl Simd for Portable {
    type V = [f32; LANES];
    const TILE_ROWS: usize = if HAS_FMA { 6 } else { 2 };
    const TILE_ROW_VECTORS: usize = 1;
    const USES_FLUSH_MODE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: the caller guarantees 16 elements.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V {
        // SAFETY: the caller guarantees n elements.
        build_lanes(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller guarantees 16 elements.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, v: Self::V) {
        for (i, x) in v.iter().take(n).enumerate() {
            // SAFETY: the caller guarantees n elements.
            unsafe { *p.add(i) = *x }
        }
    }
    lanewise! {
        add(a, b) = a + b;
        sub(a, b) = a - b;
        mul(a, b) = a * b;
        div(a, b) = a / b;
        sqrt(a) = a.sqrt();
        max(a, b) = if a > b { a } else { b };
        min(a, b) = if a < b { a } else { b };
        scale_pow2(v, n) = {
            // Two factors, because 2⁻¹⁵⁰ and 2¹²⁹ are out of range of f32.
            let n = n as i32;
            let high = n >> 1;
            let pow2 = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
            v * pow2(high) * pow2(n - high)
        };
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        if HAS_FMA { build_lanes(|i| a[i].mul_add(b[i], c[i])) } else { fma_lanes(a, b, c) }
    }
    #[inline(always)]
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.fma(a.map(|x| -x), b, c)
    }
    #[inline(always)]
    fn fma_flushed(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        if HAS_FMA { fma_flushed_with_instruction(a, b, c) } else { fma_flushed_lanes(a, b, c) }
    }
    #[inline(always)]
    fn add_flushed(self, a: Self::V, b: Self::V) -> Self::V {
        add_flushed_lanes(a, b)
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        reduce_lanes(v, |a, b| a + b)
    }
    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        reduce_lanes(v, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn prefetch(self, _: *const f32) {}
    unsafe fn run_micro_kernel(self, nv: usize, t: &MicroTile) {
        debug_assert_eq!(nv, 1);
        // SAFETY: guaranteed by the caller.
        unsafe { micro_kernel::compute_tile::<Self, { Self::TILE_ROWS }, 1>(self, t) }
    }
    #[inline(always)]
    unsafe fn transpose8(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        for p in 0..8 {
            for i in 0..8 {
                // SAFETY: guaranteed by the caller.
                unsafe { *dst.add(p * ldd + i) = *src.add(i * lds + p) }
            }
        }
    }
}

/// Computes `a·b + c` in each lane with fused multiply-adds, rounded once, with subnormal inputs
/// and results replaced by zero.
///
/// A result of ±2⁻¹²⁶ may have been rounded up from a number that x86 flushes to zero, so it is
/// computed again in software.
#[inline(always)]
fn fma_flushed_with_instruction(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
    let [a, b, c] = [a, b, c].map(flush_lanes);
    let results = build_lanes(|i| a[i].mul_add(b[i], c[i]));
    match results.iter().any(|x| *x != 0.0 && x.abs() <= f32::MIN_POSITIVE) {
        true => build_lanes(|i| fma_flushed(a[i], b[i], c[i])),
        false => results,
    }
}

/// Combines all lanes of `v` to one number with `f`, in a fixed order: lanes `i` and `i + 8`, then
/// `i` and `i + 4`, then `i` and `i + 2`, and at last `i` and `i + 1`.
#[inline(always)]
fn reduce_lanes(mut v: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            v[i] = f(v[i], v[i + w]);
        }
    }
    v[0]
}
