//! Eight-bit floating-point numbers: their conversion, and the scale of a matrix that is kept in them. Bits and rounding are those
//! of torch's `float8_e4m3fn` and `float8_e5m2` (tests/golden/fp8), but for what is too large for E4M3: NaN here, 448 there.
//! `kernels/fp8.cu` computes the same.

/// Which eight bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8 {
    /// 4 bits of exponent, 3 of mantissa; at most 448, no infinity. Of weights and activations.
    E4M3,
    /// 5 bits of exponent, 2 of mantissa; at most 57344. Of gradients.
    E5M2,
}

/// Smallest scale: every number times it, and the product of two such scales, is a normal `f32`.
const LEAST_SCALE: i32 = -60;

impl Fp8 {
    /// Bits of the mantissa, bias of the exponent, code of what is too large for the type.
    const fn layout(self) -> (u32, u32, u32) {
        match self {
            Fp8::E4M3 => (3, 7, 0x7f),
            Fp8::E5M2 => (2, 15, 0x7c),
        }
    }

    /// The largest number.
    pub fn max(self) -> f32 {
        match self {
            Fp8::E4M3 => 448.0,
            Fp8::E5M2 => 57344.0,
        }
    }

    /// The nearest number's code, ties to even. What rounds to more than the largest number becomes infinite, NaN where the type has
    /// no infinity.
    #[inline(always)]
    pub fn encode(self, x: f32) -> u8 {
        let (mantissa, bias, infinite) = self.layout();
        let bits = x.to_bits();
        let (sign, magnitude) = ((bits >> 24) & 0x80, bits & 0x7fff_ffff);
        let cut = 23 - mantissa;
        // Beside this number an f32 has the subnormals' spacing: adding it rounds to a multiple of that.
        let beside = f32::from_bits((127 + 24 - bias - mantissa) << 23);
        let subnormal = (f32::from_bits(magnitude) + beside).to_bits().wrapping_sub(beside.to_bits());
        let half = (1 << (cut - 1)) - 1 + ((magnitude >> cut) & 1);
        let normal = magnitude.wrapping_sub((127 - bias) << 23).wrapping_add(half) >> cut;
        let finite = if magnitude < (128 - bias) << 23 { subnormal } else { normal.min(infinite) };
        (sign | if magnitude > 0x7f80_0000 { 0x7f } else { finite }) as u8
    }

    /// The number with this code, exactly.
    #[inline(always)]
    pub fn decode(self, code: u8) -> f32 {
        let (mantissa, bias, infinite) = self.layout();
        let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
        // Read as an f32 the number is 2^(127 − bias) times too small, exactly, subnormals included.
        let finite = f32::from_bits(magnitude << (23 - mantissa)) * f32::from_bits((254 - bias) << 23);
        let special = if magnitude == 0x7c { f32::INFINITY } else { f32::NAN };
        f32::from_bits(sign | if magnitude >= infinite { special } else { finite }.to_bits())
    }

    /// The scale of a matrix whose finite elements are at most `amax` in magnitude: the smallest power of two s, 2⁻⁶⁰ at least, with
    /// `amax / s` at most the largest number; 1 for zeros.
    pub fn scale(self, amax: f32) -> f32 {
        if amax == 0.0 {
            return 1.0;
        }
        let bits = amax.to_bits();
        let largest = self.max().to_bits();
        let above = i32::from(bits & 0x7f_ffff > largest & 0x7f_ffff);
        let exponent = (bits >> 23) as i32 - (largest >> 23) as i32 + above;
        f32::from_bits((exponent.max(LEAST_SCALE) + 127) as u32 * (1 << 23))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Fp8; 2] = [Fp8::E4M3, Fp8::E5M2];

    /// The number with this code, by the definition of the type.
    fn defined(kind: Fp8, code: u8) -> f64 {
        let (mantissa, bias) = if kind == Fp8::E4M3 { (3, 7) } else { (2, 15) };
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, m) = (i32::from(code & 0x7f) >> mantissa, i32::from(code) & ((1 << mantissa) - 1));
        match (kind, exponent, m) {
            (Fp8::E4M3, 15, 7) => f64::NAN,
            (Fp8::E5M2, 31, 0) => sign * f64::INFINITY,
            (Fp8::E5M2, 31, _) => f64::NAN,
            (_, 0, _) => sign * f64::from(m) * 2f64.powi(1 - bias - mantissa),
            _ => sign * f64::from((1 << mantissa) + m) * 2f64.powi(exponent - bias - mantissa),
        }
    }

    #[test]
    fn every_code_there_and_back() {
        for kind in KINDS {
            for code in 0..=255u8 {
                let (x, want) = (kind.decode(code), defined(kind, code));
                assert!(f64::from(x) == want || (x.is_nan() && want.is_nan()), "{kind:?} {code:#x}: {x}");
                let back = if x.is_nan() { code & 0x80 | 0x7f } else { code };
                assert_eq!(kind.encode(x), back, "{kind:?} {code:#x}");
            }
            let largest = (0..=255).map(|c| kind.decode(c)).filter(|x| x.is_finite()).fold(0.0, f32::max);
            assert_eq!(largest, kind.max());
        }
    }

    /// Every bfloat16 beside a search through all numbers: the nearest, of two the one with an even code.
    #[test]
    fn every_bf16_rounds_to_the_nearest_even() {
        for kind in KINDS {
            let infinite = if kind == Fp8::E4M3 { 0x7f } else { 0x7c };
            // Where the next number would be begins what is too large.
            let next = if kind == Fp8::E4M3 { 480.0 } else { 65536.0 };
            let numbers: Vec<f64> = (0..infinite).map(|c| defined(kind, c)).chain([next]).collect();
            for bits in 0..=u16::MAX {
                let x = f32::from_bits(u32::from(bits) << 16);
                let size = f64::from(x.abs()).min(next);
                let apart = |c: usize| (numbers[c] - size).abs();
                let nearest = (0..numbers.len())
                    .min_by(|&a, &b| apart(a).total_cmp(&apart(b)).then((a % 2).cmp(&(b % 2))))
                    .expect("numbers");
                let want = if x.is_nan() { 0x7f } else { nearest as u8 };
                let sign = ((bits >> 8) & 0x80) as u8;
                assert_eq!(kind.encode(x), sign | want, "{kind:?} {bits:#x}");
            }
        }
    }

    #[test]
    fn the_scale_is_the_smallest_power_of_two_that_fits() {
        for kind in KINDS {
            assert_eq!(kind.scale(0.0), 1.0);
            assert_eq!(kind.scale(kind.max()), 1.0);
            assert_eq!(kind.scale(kind.max() * (1.0 + f32::EPSILON)), 2.0);
            let (mut above, mut s) = (0, 1u32);
            for _ in 0..100_000 {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let amax = f32::from_bits(s & 0x7fff_ffff);
                if !amax.is_finite() || amax == 0.0 {
                    continue;
                }
                let scale = kind.scale(amax);
                assert_eq!(scale.to_bits() & 0x7f_ffff, 0, "a power of two");
                assert!(amax / scale <= kind.max(), "{kind:?} {amax:e}");
                assert!(scale == 2f32.powi(-60) || amax / (scale / 2.0) > kind.max(), "{kind:?} {amax:e}");
                // By construction nothing saturates.
                assert!(kind.decode(kind.encode(amax / scale)).is_finite());
                above += u32::from(scale > 2f32.powi(-60));
            }
            assert!(above > 10_000);
        }
    }
}
