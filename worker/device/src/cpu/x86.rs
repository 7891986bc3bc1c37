//! Implementations of [`Simd`] for x86-64: [`Avx512`] and [`Avx2`].
use super::micro_kernel;
use super::simd::{LANES, MicroTile, Simd};
use core::arch::x86_64::*;

/// Returns true if this machine has the instructions of [`Avx512`].
pub(crate) fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Returns true if this machine has the instructions of [`Avx2`].
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Implementation of [`Simd`] with AVX-512. A vector is one zmm register.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// Implementation of [`Simd`] with AVX2 and FMA. A vector is two ymm registers.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx512 {
    /// Creates a value of this type, whose methods execute AVX-512 instructions, without checking
    /// whether the machine has them.
    ///
    /// # Safety
    ///
    /// The caller must ensure that the machine has the instructions.
    #[inline(always)]
    pub(crate) unsafe fn assume_supported() -> Self {
        Avx512(())
    }
}

impl Avx2 {
    /// Creates a value of this type, whose methods execute AVX2 instructions, without checking
    /// whether the machine has them.
    ///
    /// # Safety
    ///
    /// The caller must ensure that the machine has the instructions.
    #[inline(always)]
    pub(crate) unsafe fn assume_supported() -> Self {
        Avx2(())
    }
}

/// Calls a CPU intrinsic such as `_mm512_add_ps`, which needs `unsafe`, in methods of [`Avx512`]
/// and [`Avx2`]. Values of these types exist only on machines that have the instruction. Callers of
/// the method must pass valid pointers.
macro_rules! intrinsic {
    ($e:expr) => {
        // SAFETY: `Avx512` and `Avx2` exist only on machines with these instructions, and the
        // caller guarantees that pointers are valid.
        unsafe { $e }
    };
}

/// Defines methods of [`Simd`] that apply one intrinsic to all lanes of their operands. A vector is
/// a register (`zmm`) or a pair of registers (`ymm_pair`).
macro_rules! lanewise {
    ($vector:ident: $($name:ident($($x:ident),+) = $intrinsic:ident;)+) => {$(
        #[inline(always)]
        fn $name(self, $($x: Self::V),+) -> Self::V {
            lanewise!(@$vector $intrinsic($($x),+))
        }
    )+};
    (@zmm $intrinsic:ident($($x:ident),+)) => {
        intrinsic!($intrinsic($($x),+))
    };
    (@ymm_pair $intrinsic:ident($($x:ident),+)) => {
        intrinsic!([$intrinsic($($x[0]),+), $intrinsic($($x[1]),+)])
    };
}

/// Returns the mask that selects the first `n` lanes, where `n` is below 16.
#[inline(always)]
fn mask_first_lanes(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

impl Simd for Avx512 {
    type V = __m512;
    const TILE_ROWS: usize = 8;
    const TILE_ROW_VECTORS: usize = 3;
    const USES_FLUSH_MODE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsic!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        intrinsic!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> __m512 {
        intrinsic!(_mm512_maskz_loadu_ps(mask_first_lanes(n), p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        intrinsic!(_mm512_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, v: __m512) {
        intrinsic!(_mm512_mask_storeu_ps(p, mask_first_lanes(n), v))
    }
    lanewise! {
        zmm:
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        div(a, b) = _mm512_div_ps;
        sqrt(a) = _mm512_sqrt_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
        fma(a, b, c) = _mm512_fmadd_ps;
        fnma(a, b, c) = _mm512_fnmadd_ps;
        scale_pow2(v, n) = _mm512_scalef_ps;
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        intrinsic!(sum_8_lanes(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))))
    }
    #[inline(always)]
    fn max_lane(self, v: __m512) -> f32 {
        intrinsic!(max_of_8_lanes(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v))))
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        intrinsic!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
    unsafe fn run_micro_kernel(self, nv: usize, t: &MicroTile) {
        intrinsic!(run_micro_kernel_avx512(self, nv, t))
    }
    #[inline(always)]
    unsafe fn transpose8(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        intrinsic!(transpose8(src, lds, dst, ldd))
    }
}

/// Computes a block of a matmul's result in AVX-512 registers: 8 rows × `nv` vectors of 16
/// elements.
///
/// # Safety
///
/// The caller must meet the requirements of [`Simd::run_micro_kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn run_micro_kernel_avx512(s: Avx512, nv: usize, t: &MicroTile) {
    // SAFETY: guaranteed by the caller of `run_micro_kernel`.
    unsafe {
        match nv {
            1 => micro_kernel::compute_tile::<_, 8, 1>(s, t),
            2 => micro_kernel::compute_tile::<_, 8, 2>(s, t),
            _ => micro_kernel::compute_tile::<_, 8, 3>(s, t),
        }
    }
}

/// Table from which AVX2's masked loads and stores get the mask of the first `n` lanes: eight set
/// entries, then eight clear ones. The eight consecutive masks from index `8 − n` on select the
/// first `n` lanes.
static LANE_MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// Returns the masks for two ymm registers (8 lanes each) that together select the first `n` of 16
/// lanes.
#[inline(always)]
fn mask_first_lanes_x2(n: usize) -> [__m256i; 2] {
    let (a, b) = (n.min(8), n.saturating_sub(8));
    let at = |k: usize| intrinsic!(_mm256_loadu_si256(LANE_MASKS.as_ptr().add(8 - k).cast()));
    [at(a), at(b)]
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    const TILE_ROWS: usize = 6;
    const TILE_ROW_VECTORS: usize = 1;
    const USES_FLUSH_MODE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        let v = intrinsic!(_mm256_set1_ps(x));
        [v, v]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        intrinsic!([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))])
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V {
        let [a, b] = mask_first_lanes_x2(n);
        // The second half may be outside the allocation; masked lanes are not accessed.
        intrinsic!([_mm256_maskload_ps(p, a), _mm256_maskload_ps(p.wrapping_add(8), b)])
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        intrinsic!({
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        })
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, v: Self::V) {
        let [a, b] = mask_first_lanes_x2(n);
        intrinsic!({
            _mm256_maskstore_ps(p, a, v[0]);
            _mm256_maskstore_ps(p.wrapping_add(8), b, v[1]);
        })
    }
    lanewise! {
        ymm_pair:
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        sqrt(a) = _mm256_sqrt_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
        fma(a, b, c) = _mm256_fmadd_ps;
        fnma(a, b, c) = _mm256_fnmadd_ps;
        scale_pow2(v, n) = scale_8_lanes_pow2;
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        intrinsic!(sum_8_lanes(_mm256_add_ps(v[0], v[1])))
    }
    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        intrinsic!(max_of_8_lanes(_mm256_max_ps(v[0], v[1])))
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        intrinsic!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
    unsafe fn run_micro_kernel(self, nv: usize, t: &MicroTile) {
        debug_assert_eq!(nv, 1);
        intrinsic!(run_micro_kernel_avx2(self, t))
    }
    #[inline(always)]
    unsafe fn transpose8(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        intrinsic!(transpose8(src, lds, dst, ldd))
    }
}

/// Computes a block of a matmul's result in AVX2 registers: 6 rows × one vector of 16 elements.
///
/// # Safety
///
/// The caller must meet the requirements of [`Simd::run_micro_kernel`].
#[target_feature(enable = "avx2,fma")]
unsafe fn run_micro_kernel_avx2(s: Avx2, t: &MicroTile) {
    // SAFETY: guaranteed by the caller of `run_micro_kernel`.
    unsafe { micro_kernel::compute_tile::<_, 6, 1>(s, t) }
}

/// Computes `v · 2ⁿ` in each of 8 lanes, for an integer `n` per lane. Multiplies by two powers of
/// two, because 2⁻¹⁵⁰ and 2¹²⁹ are out of range of `f32`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn scale_8_lanes_pow2(v: __m256, n: __m256) -> __m256 {
    let n = _mm256_cvtps_epi32(n);
    let high = _mm256_srai_epi32::<1>(n);
    let low = _mm256_sub_epi32(n, high);
    let bias = _mm256_set1_epi32(127);
    let high = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(high, bias)));
    let low = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(low, bias)));
    _mm256_mul_ps(_mm256_mul_ps(v, high), low)
}

/// Returns the sum of 8 lanes, added in a fixed order: lanes `i` and `i + 4`, then `i` and `i + 2`,
/// and at last `i` and `i + 1`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn sum_8_lanes(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// Returns the largest value of 8 lanes, or an arbitrary lane's value if one is NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn max_of_8_lanes(v: __m256) -> f32 {
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
}

/// Transposes a matrix of 8 × 8 `f32` elements from `src` to `dst` in AVX registers.
///
/// # Safety
///
/// The caller must meet the requirements of [`Simd::transpose8`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn transpose8(src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
    // SAFETY: the caller guarantees 8 rows of 8 elements in both matrices.
    let row = |i: usize| unsafe { _mm256_loadu_ps(src.add(i * lds)) };
    let r: [__m256; 8] = [row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)];
    let mut quads = [_mm256_setzero_ps(); 8];
    for h in 0..2 {
        let [a, b, c, d] = [r[4 * h], r[4 * h + 1], r[4 * h + 2], r[4 * h + 3]];
        let (ab_lo, ab_hi) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd_lo, cd_hi) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        quads[4 * h] = _mm256_shuffle_ps::<0x44>(ab_lo, cd_lo);
        quads[4 * h + 1] = _mm256_shuffle_ps::<0xEE>(ab_lo, cd_lo);
        quads[4 * h + 2] = _mm256_shuffle_ps::<0x44>(ab_hi, cd_hi);
        quads[4 * h + 3] = _mm256_shuffle_ps::<0xEE>(ab_hi, cd_hi);
    }
    for p in 0..4 {
        let low = _mm256_permute2f128_ps::<0x20>(quads[p], quads[p + 4]);
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(dst.add(p * ldd), low) };
    }
    for p in 0..4 {
        let high = _mm256_permute2f128_ps::<0x31>(quads[p], quads[p + 4]);
        // SAFETY: as above. Rows are stored in rising order, so if ldd < 8 the next row overwrites
        // the surplus of a row.
        unsafe { _mm256_storeu_ps(dst.add((p + 4) * ldd), high) };
    }
}

const _: () = assert!(LANES == 16);
