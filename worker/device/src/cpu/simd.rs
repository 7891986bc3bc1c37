//! One vector of 16 lanes, whatever the machine: a zmm register, two ymm registers, or what the compiler makes of an array.
//!
//! Kernels are written once over [`Simd`] and compiled for each instruction set; [`Level`] is chosen at run time. The
//! lane structure is the same everywhere, so AVX2 and AVX-512 machines give the same bits; the portable version differs
//! from them only where it has no fused multiply-add.
use super::kernel::{self, Tile};

/// Lanes of [`Simd::V`].
pub(crate) const LANES: usize = 16;

/// Largest micro tile of any instruction set: rows × vectors.
pub(crate) const MAX_TILE: usize = 8 * 3 * LANES;

/// Operations on vectors of 16 `f32`. A value of an implementing type proves that the machine has the instructions.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    type V: Copy;
    /// Rows of the matmul micro tile.
    const MR: usize;
    /// Vectors across the matmul micro tile.
    const NV: usize;
    /// Columns of the matmul micro tile.
    const NR: usize = Self::NV * LANES;

    fn splat(self, x: f32) -> Self::V;
    /// # Safety
    /// 16 elements at `p` can be read.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// The first `n < 16` lanes from `p`, the others 0.
    /// # Safety
    /// `n` elements at `p` can be read.
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V;
    /// # Safety
    /// 16 elements at `p` can be written.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// # Safety
    /// `n < 16` elements at `p` can be written.
    unsafe fn store_part(self, p: *mut f32, n: usize, v: Self::V);

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    /// `a > b ? a : b` in each lane: `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b` in each lane: `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a·b + c`, rounded once where the machine can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `c − a·b`, rounded once where the machine can.
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `v · 2ⁿ`, rounded once; `n` holds whole numbers in −150..=129.
    fn scale_pow2(self, v: Self::V, n: Self::V) -> Self::V;
    /// Sum of the lanes: i + (i+8), then + (i+4), (i+2), (i+1).
    fn sum(self, v: Self::V) -> f32;
    /// Largest lane (any of them when one is NaN).
    fn largest(self, v: Self::V) -> f32;

    /// Asks for the cache line at `p` to come nearer.
    fn prefetch(self, p: *const f32);
    /// Runs the micro tile of `MR` rows and `nv ≤ NV` vectors.
    /// # Safety
    /// As [`kernel::tile`].
    unsafe fn micro(self, nv: usize, t: &Tile);
    /// `dst[p·ldd + i] = src[i·lds + p]` for i, p in 0..8.
    /// # Safety
    /// All those places are readable and writable.
    unsafe fn transpose8(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize);
}

/// 16 elements from `x[i..]`; lanes past the end are 0.
#[inline(always)]
pub(crate) fn get<S: Simd>(s: S, x: &[f32], i: usize) -> S::V {
    let rest = &x[i..];
    if rest.len() >= LANES {
        // SAFETY: 16 elements are there.
        unsafe { s.load(rest.as_ptr()) }
    } else {
        // SAFETY: that many elements are there.
        unsafe { s.load_part(rest.as_ptr(), rest.len()) }
    }
}

/// Writes the lanes of `v` that lie inside to `x[i..]`.
#[inline(always)]
pub(crate) fn put<S: Simd>(s: S, x: &mut [f32], i: usize, v: S::V) {
    let rest = &mut x[i..];
    if rest.len() >= LANES {
        // SAFETY: 16 elements are there.
        unsafe { s.store(rest.as_mut_ptr(), v) }
    } else {
        // SAFETY: that many elements are there.
        unsafe { s.store_part(rest.as_mut_ptr(), rest.len(), v) }
    }
}

/// A whole vector.
#[inline(always)]
pub(crate) fn load<S: Simd>(s: S, x: &[f32; LANES]) -> S::V {
    // SAFETY: 16 elements are there.
    unsafe { s.load(x.as_ptr()) }
}

/// A whole vector.
#[inline(always)]
pub(crate) fn store<S: Simd>(s: S, x: &mut [f32; LANES], v: S::V) {
    // SAFETY: 16 elements are there.
    unsafe { s.store(x.as_mut_ptr(), v) }
}

/// eˣ within 2 ulp, subnormals included; +∞ above 88.72, 0 below −103.97, NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Adding and subtracting 1.5·2²³ rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has 9 significant bits, so its product with a whole number below 2¹⁵ is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = (core::f64::consts::LN_2 - 355.0 / 512.0) as f32;
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.0), x));
    let shifted = s.fma(x, s.splat(core::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(shifted, s.splat(ROUND));
    let r = s.fnma(n, s.splat(LN2_HIGH), x);
    let r = s.fnma(n, s.splat(LN2_LOW), r);
    // Taylor to r⁷: with |r| ≤ ln 2 / 2 the rest is below 6e-9.
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    s.scale_pow2(p, n)
}

/// tanh(x) within 6 ulp, small ones included; NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    // From 9.02 on the nearest f32 is 1. min and max keep the second where one is NaN.
    let x = s.min(s.splat(9.02), s.max(s.splat(-9.02), x));
    // Lambert's continued fraction of tanh(x/4), cut after seven terms, as a quotient of polynomials.
    let quarter = s.mul(x, s.splat(0.25));
    let y = s.mul(quarter, quarter);
    let polynomial = |coefficients: &[f32]| {
        let one = s.splat(1.0);
        coefficients.iter().fold(one, |p, &c| s.fma(p, y, s.splat(c)))
    };
    let above = s.mul(quarter, polynomial(&[378.0, 17325.0, 135_135.0]));
    let below =
        s.fma(s.fma(s.fma(s.splat(28.0), y, s.splat(3150.0)), y, s.splat(62370.0)), y, s.splat(135_135.0));
    // tanh(2u) = 2·tanh(u) / (1 + tanh²(u)), twice.
    let double = |t: S::V| s.div(s.add(t, t), s.fma(t, t, s.splat(1.0)));
    double(double(s.div(above, below)))
}

/// Arrays that the compiler vectorises for the target's baseline (SSE2 on x86-64, NEON on aarch64).
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// aarch64 always has a fused multiply-add; without one `f32::mul_add` would be a slow library call.
const FUSED: bool = cfg!(target_arch = "aarch64");

#[inline(always)]
fn lanes(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    core::array::from_fn(f)
}

impl Simd for Portable {
    type V = [f32; LANES];
    const MR: usize = if FUSED { 6 } else { 2 };
    const NV: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V {
        // SAFETY: the caller vouches for n elements.
        lanes(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize, v: Self::V) {
        for (i, x) in v.iter().take(n).enumerate() {
            // SAFETY: the caller vouches for n elements.
            unsafe { *p.add(i) = *x }
        }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn sqrt(self, a: Self::V) -> Self::V {
        lanes(|i| a[i].sqrt())
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes(|i| if FUSED { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }
    #[inline(always)]
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes(|i| if FUSED { (-a[i]).mul_add(b[i], c[i]) } else { c[i] - a[i] * b[i] })
    }
    #[inline(always)]
    fn scale_pow2(self, v: Self::V, n: Self::V) -> Self::V {
        lanes(|i| {
            // Two factors, since 2⁻¹⁵⁰ and 2¹²⁹ themselves are no f32.
            let n = n[i] as i32;
            let high = n >> 1;
            let pow2 = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
            v[i] * pow2(high) * pow2(n - high)
        })
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        fold(v, |a, b| a + b)
    }
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        fold(v, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn prefetch(self, _: *const f32) {}
    unsafe fn micro(self, nv: usize, t: &Tile) {
        debug_assert_eq!(nv, 1);
        // SAFETY: as the caller promises.
        unsafe { kernel::tile::<Self, { Self::MR }, 1>(self, t) }
    }
    #[inline(always)]
    unsafe fn transpose8(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        for p in 0..8 {
            for i in 0..8 {
                // SAFETY: as the caller promises.
                unsafe { *dst.add(p * ldd + i) = *src.add(i * lds + p) }
            }
        }
    }
}

#[inline(always)]
fn fold(mut v: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            v[i] = f(v[i], v[i + w]);
        }
    }
    v[0]
}

/// The instruction set chosen for this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Level {
    /// The best that this machine has.
    pub(crate) fn detect() -> Self {
        Self::available()[0]
    }

    /// All that this machine has, best first.
    pub(crate) fn available() -> Vec<Self> {
        let mut levels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if super::x86::has_avx512() {
                levels.push(Level::Avx512);
            }
            if super::x86::has_avx2() {
                levels.push(Level::Avx2);
            }
        }
        levels.push(Level::Portable);
        levels
    }

    /// For the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            Level::Portable if cfg!(target_arch = "aarch64") => "neon",
            Level::Portable => "baseline",
        }
    }
}

/// `multiversion!(fn name = body(arg: Type, …) -> Out)` makes `name(level, arg, …)`, which runs the generic
/// `#[inline(always)] fn body<S: Simd>(s: S, arg: Type, …)` compiled for the instruction set of `level`.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)?) => {
        $(#[$doc])*
        $vis fn $name(level: $crate::cpu::simd::Level, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $out)? {
                // SAFETY: this function is compiled with, and only reached on machines with, the features.
                $body(unsafe { $crate::cpu::x86::Avx512::assume() }, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $out)? {
                // SAFETY: this function is compiled with, and only reached on machines with, the features.
                $body(unsafe { $crate::cpu::x86::Avx2::assume() }, $($arg),*)
            }
            match level {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a Level is made only where the machine has the instructions.
                $crate::cpu::simd::Level::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a Level is made only where the machine has the instructions.
                $crate::cpu::simd::Level::Avx2 => unsafe { avx2($($arg),*) },
                $crate::cpu::simd::Level::Portable => $body($crate::cpu::simd::Portable, $($arg),*),
            }
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    multiversion! {
        fn exp_all = exp_each(x: &mut [f32])
    }

    #[inline(always)]
    fn exp_each<S: Simd>(s: S, x: &mut [f32]) {
        for i in (0..x.len()).step_by(LANES) {
            put(s, x, i, exp(s, get(s, x, i)));
        }
    }

    /// Distance in units of the last place of `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let rounded = want as f32;
        let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
        (f64::from(got) - want).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_ulps() {
        let range =
            |from: f32, to: f32, n: usize| (0..n).map(move |i| from + (to - from) * i as f32 / n as f32);
        let x: Vec<f32> = range(-104.0, 88.72, 300_000)
            .chain(range(-1.0, 1.0, 100_000))
            .chain([0.0, -0.0, 1e-30, 88.722])
            .collect();
        for level in Level::available() {
            let mut y = x.clone();
            exp_all(level, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let error = ulps(*y, f64::from(*x).exp());
                assert!(error <= 2.0, "{}: exp({x}) = {y}, off by {error} ulp", level.name());
            }
        }
    }

    multiversion! {
        fn tanh_all = tanh_each(x: &mut [f32])
    }

    #[inline(always)]
    fn tanh_each<S: Simd>(s: S, x: &mut [f32]) {
        for i in (0..x.len()).step_by(LANES) {
            put(s, x, i, tanh(s, get(s, x, i)));
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
        for level in Level::available() {
            let mut y = x.clone();
            tanh_all(level, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let want = f64::from(*x).tanh();
                let error = ulps(y.abs(), want.abs());
                assert!(error <= 6.0, "{}: tanh({x}) = {y}, off by {error} ulp", level.name());
                assert!(y.abs() <= 1.0, "{}: tanh({x}) = {y}", level.name());
            }
            let mut broken = [f32::NAN, -f32::NAN];
            tanh_all(level, &mut broken);
            assert!(broken.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn exp_at_the_ends() {
        let inf = f32::INFINITY;
        for level in Level::available() {
            let mut x = [-inf, -105.0, 89.0, 1e30, inf, f32::NAN, -f32::NAN];
            exp_all(level, &mut x);
            assert_eq!(x[..5], [0.0, 0.0, inf, inf, inf]);
            assert!(x[5].is_nan() && x[6].is_nan());
        }
    }
}
