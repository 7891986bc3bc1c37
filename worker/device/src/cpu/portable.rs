//! [`Portable`]: vectors of 16 lanes as arrays, for machines without a supported instruction set.
use super::micro_kernel;
use super::simd::{LANES, MicroTile, Simd};

/// Implementation of [`Simd`] with arrays, which the compiler vectorises for the target's baseline
/// instructions: SSE2 on x86-64, NEON on aarch64.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// True if every CPU of the target has a fused multiply-add, such as aarch64. On other targets
/// `f32::mul_add` would be a slow library call.
const HAS_FMA: bool = cfg!(target_arch = "aarch64");

/// Returns an array with `f(i)` in lane `i`.
#[inline(always)]
fn build_lanes(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    core::array::from_fn(f)
}

impl Simd for Portable {
    type V = [f32; LANES];
    const TILE_ROWS: usize = if HAS_FMA { 6 } else { 2 };
    const TILE_VECTORS: usize = 1;

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
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        build_lanes(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        build_lanes(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        build_lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        build_lanes(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn sqrt(self, a: Self::V) -> Self::V {
        build_lanes(|i| a[i].sqrt())
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        build_lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        build_lanes(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        build_lanes(|i| if HAS_FMA { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }
    #[inline(always)]
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        build_lanes(|i| if HAS_FMA { (-a[i]).mul_add(b[i], c[i]) } else { c[i] - a[i] * b[i] })
    }
    #[inline(always)]
    fn scale_pow2(self, v: Self::V, n: Self::V) -> Self::V {
        build_lanes(|i| {
            // Two factors, because 2⁻¹⁵⁰ and 2¹²⁹ are out of range of f32.
            let n = n[i] as i32;
            let high = n >> 1;
            let pow2 = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
            v[i] * pow2(high) * pow2(n - high)
        })
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

/// Combines all lanes by `f`, in the order of [`Simd::sum`], and returns the result.
#[inline(always)]
fn reduce_lanes(mut v: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            v[i] = f(v[i], v[i + w]);
        }
    }
    v[0]
}
