//! Conversion between `f32` and 8-bit floating-point numbers, and the scale of a matrix in fp8
//! ([`Fp8Format`]).
//!
//! Bits and rounding are those of torch's `float8_e4m3fn` and `float8_e5m2` (tests/golden/fp8),
//! with one exception: values too large for E4M3 become NaN here, and 448 in torch.
//! `kernels/fp8.cu` implements the same conversions for GPUs. The formats are defined in
//! Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

/// An 8-bit floating-point format: E4M3 or E5M2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Format {
    /// 4 bits of exponent and 3 of mantissa, for weights and activations. The largest number is
    /// 448; there is no infinity.
    E4M3,
    /// 5 bits of exponent and 2 of mantissa, for gradients. The largest finite number is 57344.
    E5M2,
}

/// Exponent of the smallest power of two that is used as the scale of a matrix in fp8. With this
/// scale, every fp8 number times the scale, and the product of two scales, is a normal `f32`.
const SMALLEST_SCALE_EXPONENT: i32 = -60;

impl Fp8Format {
    /// Returns the number of mantissa bits, the exponent bias, and the 8-bit code for values beyond
    /// the largest number (infinity in E5M2, NaN in E4M3).
    const fn bit_layout(self) -> (u32, u32, u32) {
        match self {
            Fp8Format::E4M3 => (3, 7, 0x7f),
            Fp8Format::E5M2 => (2, 15, 0x7c),
        }
    }

    /// Returns the largest finite number of the format.
    pub fn largest_finite(self) -> f32 {
        match self {
            Fp8Format::E4M3 => 448.0,
            Fp8Format::E5M2 => 57344.0,
        }
    }

    /// Returns the 8-bit code of the fp8 number that is nearest to `x`, ties to even. Values that
    /// round to more than [`Fp8Format::largest_finite`] become infinity in E5M2 and NaN in E4M3.
    #[inline(always)]
    pub fn encode(self, x: f32) -> u8 {
        let (mantissa, bias, infinite) = self.bit_layout();
        let bits = x.to_bits();
        let (sign, magnitude) = ((bits >> 24) & 0x80, bits & 0x7fff_ffff);
        let dropped_bits = 23 - mantissa;
        // The spacing of f32 at this number is that of the format's subnormals, so adding it rounds
        // to a subnormal.
        let rounder = f32::from_bits((127 + 24 - bias - mantissa) << 23);
        let subnormal = (f32::from_bits(magnitude) + rounder).to_bits().wrapping_sub(rounder.to_bits());
        let half = (1 << (dropped_bits - 1)) - 1 + ((magnitude >> dropped_bits) & 1);
        let normal = magnitude.wrapping_sub((127 - bias) << 23).wrapping_add(half) >> dropped_bits;
        let finite = if magnitude < (128 - bias) << 23 { subnormal } else { normal.min(infinite) };
        (sign | if magnitude > 0x7f80_0000 { 0x7f } else { finite }) as u8
    }

    /// Returns the number that an 8-bit fp8 code represents. The conversion is exact.
    #[inline(always)]
    pub fn decode(self, code: u8) -> f32 {
        let (mantissa, bias, infinite) = self.bit_layout();
        let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
        // The code's bits, read as an f32, are the number divided by 2^(127 − bias). This also
        // holds for subnormals.
        let finite = f32::from_bits(magnitude << (23 - mantissa)) * f32::from_bits((254 - bias) << 23);
        let special = if magnitude == 0x7c { f32::INFINITY } else { f32::NAN };
        f32::from_bits(sign | if magnitude >= infinite { special } else { finite }.to_bits())
    }

    /// Returns the scale `s` by which a matrix must be divided before it is rounded to fp8; `amax`
    /// is the largest magnitude of the matrix's finite elements. The scale is the smallest power of
    /// two, at least 2⁻⁶⁰, for which `amax / s` is at most [`Fp8Format::largest_finite`]. The scale
    /// of a zero matrix is 1.
    pub fn compute_scale(self, amax: f32) -> f32 {
        if amax == 0.0 {
            return 1.0;
        }
        let bits = amax.to_bits();
        let largest = self.largest_finite().to_bits();
        let above = i32::from(bits & 0x7f_ffff > largest & 0x7f_ffff);
        let exponent = (bits >> 23) as i32 - (largest >> 23) as i32 + above;
        f32::from_bits((exponent.max(SMALLEST_SCALE_EXPONENT) + 127) as u32 * (1 << 23))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [Fp8Format; 2] = [Fp8Format::E4M3, Fp8Format::E5M2];

    /// Returns the number that the fp8 `code` represents, computed in `f64` from the definition of
    /// the format.
    fn decode_by_definition(format: Fp8Format, code: u8) -> f64 {
        let (mantissa, bias) = if format == Fp8Format::E4M3 { (3, 7) } else { (2, 15) };
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, m) = (i32::from(code & 0x7f) >> mantissa, i32::from(code) & ((1 << mantissa) - 1));
        match (format, exponent, m) {
            (Fp8Format::E4M3, 15, 7) => f64::NAN,
            (Fp8Format::E5M2, 31, 0) => sign * f64::INFINITY,
            (Fp8Format::E5M2, 31, _) => f64::NAN,
            (_, 0, _) => sign * f64::from(m) * 2f64.powi(1 - bias - mantissa),
            _ => sign * f64::from((1 << mantissa) + m) * 2f64.powi(exponent - bias - mantissa),
        }
    }

    #[test]
    fn decoding_and_encoding_keep_every_code() {
        for format in FORMATS {
            for code in 0..=255u8 {
                let (x, expected) = (format.decode(code), decode_by_definition(format, code));
                assert!(
                    f64::from(x) == expected || (x.is_nan() && expected.is_nan()),
                    "{format:?} {code:#x}: {x}"
                );
                let encoded = if x.is_nan() { code & 0x80 | 0x7f } else { code };
                assert_eq!(format.encode(x), encoded, "{format:?} {code:#x}");
            }
            let largest = (0..=255).map(|c| format.decode(c)).filter(|x| x.is_finite()).fold(0.0, f32::max);
            assert_eq!(largest, format.largest_finite());
        }
    }

    /// Checks for every bfloat16 number that the conversion to fp8 returns the nearest fp8 number,
    /// and the even one of two that are equally near.
    #[test]
    fn every_bf16_rounds_to_the_nearest_even() {
        for format in FORMATS {
            let infinite = if format == Fp8Format::E4M3 { 0x7f } else { 0x7c };
            // The number that would follow the largest one. Values that are nearer to it are too
            // large.
            let next_number = if format == Fp8Format::E4M3 { 480.0 } else { 65536.0 };
            let numbers: Vec<f64> =
                (0..infinite).map(|c| decode_by_definition(format, c)).chain([next_number]).collect();
            for bits in 0..=u16::MAX {
                let x = f32::from_bits(u32::from(bits) << 16);
                let magnitude = f64::from(x.abs()).min(next_number);
                let distance = |c: usize| (numbers[c] - magnitude).abs();
                let nearest = (0..numbers.len())
                    .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))))
                    .expect("the format has numbers");
                let expected = if x.is_nan() { 0x7f } else { nearest as u8 };
                let sign = ((bits >> 8) & 0x80) as u8;
                assert_eq!(format.encode(x), sign | expected, "{format:?} {bits:#x}");
            }
        }
    }

    #[test]
    fn the_scale_is_the_smallest_power_of_two_that_fits() {
        for format in FORMATS {
            assert_eq!(format.compute_scale(0.0), 1.0);
            assert_eq!(format.compute_scale(format.largest_finite()), 1.0);
            assert_eq!(format.compute_scale(format.largest_finite() * (1.0 + f32::EPSILON)), 2.0);
            let (mut above, mut s) = (0, 1u32);
            for _ in 0..100_000 {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let amax = f32::from_bits(s & 0x7fff_ffff);
                if !amax.is_finite() || amax == 0.0 {
                    continue;
                }
                let scale = format.compute_scale(amax);
                assert_eq!(scale.to_bits() & 0x7f_ffff, 0, "the scale is a power of two");
                assert!(amax / scale <= format.largest_finite(), "{format:?} {amax:e}");
                assert!(
                    scale == 2f32.powi(-60) || amax / (scale / 2.0) > format.largest_finite(),
                    "{format:?} {amax:e}"
                );
                // The scale prevents saturation.
                assert!(format.decode(format.encode(amax / scale)).is_finite());
                above += u32::from(scale > 2f32.powi(-60));
            }
            assert!(above > 10_000);
        }
    }
}
