//! Statistics of the differences between two arrays of numbers.
use half::{bf16, f16};
use serde::Serialize;

/// An element and its values on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ElementPair {
    /// Row-major index in the whole tensor.
    pub element: u64,
    /// The value in `a`.
    pub a: f32,
    /// The value in `b`.
    pub b: f32,
}

/// A rounding (to nearest, ties to even) that turns every element of one side into that of the
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum RoundingCast {
    /// `b` is `a` rounded to bfloat16.
    BIsBf16OfA,
    /// `b` is `a` rounded to float16.
    BIsF16OfA,
    /// `a` is `b` rounded to bfloat16.
    AIsBf16OfB,
    /// `a` is `b` rounded to float16.
    AIsF16OfB,
}

impl RoundingCast {
    const ALL: [RoundingCast; 4] = [
        RoundingCast::BIsBf16OfA,
        RoundingCast::BIsF16OfA,
        RoundingCast::AIsBf16OfB,
        RoundingCast::AIsF16OfB,
    ];

    fn explains(self, a: f32, b: f32) -> bool {
        let bf16 = |x: f32| bf16::from_f32(x).to_f32().to_bits();
        let f16 = |x: f32| f16::from_f32(x).to_f32().to_bits();
        match self {
            RoundingCast::BIsBf16OfA => bf16(a) == b.to_bits(),
            RoundingCast::BIsF16OfA => f16(a) == b.to_bits(),
            RoundingCast::AIsBf16OfB => bf16(b) == a.to_bits(),
            RoundingCast::AIsF16OfB => f16(b) == a.to_bits(),
        }
    }
}

/// How the elements of a tensor differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ElementDiff {
    /// Number of elements with different bits.
    pub differing: u64,
    /// Number of all elements.
    pub elements: u64,
    /// The first element with different bits.
    pub first: ElementPair,
    /// Largest `|a - b|` of finite values; `None` when no differing pair is finite.
    pub max_abs: Option<f64>,
    /// The element with the largest `|a - b|`.
    pub max_at: Option<ElementPair>,
    /// Mean of `|a - b|` over all elements that are finite on both sides.
    pub mean_abs: f64,
    /// Largest distance of finite values in units in the last place (ulp) of float32.
    pub max_ulp: u64,
    /// Number of elements with different bits where a side is NaN or infinite.
    pub not_finite: u64,
    /// The rounding that explains every difference, if there is one.
    pub cast: Option<RoundingCast>,
}

/// Statistics over a range of elements. Ranges that follow each other can be joined.
#[derive(Default)]
pub(super) struct DiffStats {
    elements: u64,
    differing: u64,
    first: Option<ElementPair>,
    max: Option<(f64, ElementPair)>,
    sum: f64,
    finite: u64,
    max_ulp: u64,
    not_finite: u64,
    /// For each of [`RoundingCast::ALL`], whether some element contradicts it.
    refuted: [bool; 4],
}

impl DiffStats {
    /// Compares two equally long slices that begin at element `start` of their tensors.
    pub(super) fn compare(start: u64, a: &[f32], b: &[f32]) -> DiffStats {
        let mut stats = DiffStats { elements: a.len() as u64, ..DiffStats::default() };
        if bytemuck::cast_slice::<f32, u8>(a) == bytemuck::cast_slice::<f32, u8>(b) {
            stats.finite = a.iter().filter(|x| x.is_finite()).count() as u64;
            stats.refute_casts(a, b);
            return stats;
        }
        for (i, (&x, &y)) in a.iter().zip(b).enumerate() {
            stats.add_pair(ElementPair { element: start + i as u64, a: x, b: y });
        }
        stats.refute_casts(a, b);
        stats
    }

    fn add_pair(&mut self, at: ElementPair) {
        let finite = at.a.is_finite() && at.b.is_finite();
        self.finite += u64::from(finite);
        if at.a.to_bits() == at.b.to_bits() {
            return;
        }
        self.differing += 1;
        self.first.get_or_insert(at);
        if !finite {
            self.not_finite += 1;
            return;
        }
        let abs = (f64::from(at.a) - f64::from(at.b)).abs();
        self.sum += abs;
        self.max_ulp = self.max_ulp.max(ulps(at.a, at.b));
        if self.max.is_none_or(|(max, _)| abs > max) {
            self.max = Some((abs, at));
        }
    }

    fn refute_casts(&mut self, a: &[f32], b: &[f32]) {
        for (refuted, cast) in self.refuted.iter_mut().zip(RoundingCast::ALL) {
            *refuted = !a.iter().zip(b).all(|(&x, &y)| cast.explains(x, y));
        }
    }

    /// Joins the statistics of the range that follows this one.
    pub(super) fn append(&mut self, next: DiffStats) {
        self.elements += next.elements;
        self.differing += next.differing;
        self.first = self.first.or(next.first);
        self.sum += next.sum;
        self.finite += next.finite;
        self.max_ulp = self.max_ulp.max(next.max_ulp);
        self.not_finite += next.not_finite;
        if let Some((abs, at)) = next.max
            && self.max.is_none_or(|(max, _)| abs > max)
        {
            self.max = Some((abs, at));
        }
        self.refuted.iter_mut().zip(next.refuted).for_each(|(mine, theirs)| *mine |= theirs);
    }

    /// The differences; `None` when all bits are equal.
    pub(super) fn finish(self) -> Option<ElementDiff> {
        let cast =
            self.refuted.iter().zip(RoundingCast::ALL).find(|(refuted, _)| !**refuted).map(|(_, cast)| cast);
        Some(ElementDiff {
            differing: self.differing,
            elements: self.elements,
            first: self.first?,
            max_abs: self.max.map(|(abs, _)| abs),
            max_at: self.max.map(|(_, at)| at),
            mean_abs: if self.finite == 0 { 0.0 } else { self.sum / self.finite as f64 },
            max_ulp: self.max_ulp,
            not_finite: self.not_finite,
            cast,
        })
    }
}

/// The distance of two float32 numbers in ulp: 1 for neighbours, 0 for +0 and -0.
fn ulps(a: f32, b: f32) -> u64 {
    let ordinal = |x: f32| {
        let magnitude = i64::from(x.to_bits() & 0x7fff_ffff);
        if x.is_sign_negative() { -magnitude } else { magnitude }
    };
    ordinal(a).abs_diff(ordinal(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ulps_count_the_steps_between_two_numbers() {
        assert_eq!(ulps(1.0, 1.0 + f32::EPSILON), 1);
        assert_eq!(ulps(0.0, -0.0), 0);
        assert_eq!(ulps(f32::from_bits(1), -f32::from_bits(1)), 2);
        assert_eq!(ulps(1.0, 2.0), 1 << 23);
    }

    #[test]
    fn a_rounding_that_explains_all_differences_is_found() {
        let a = [0.1f32, -3.3, 7.7e-6, 0.0];
        let to = |cast: fn(f32) -> f32| a.map(cast);
        let bf = to(|x| bf16::from_f32(x).to_f32());
        let hf = to(|x| f16::from_f32(x).to_f32());
        let cast = |a: &[f32], b: &[f32]| DiffStats::compare(0, a, b).finish().expect("different").cast;
        assert_eq!(cast(&a, &bf), Some(RoundingCast::BIsBf16OfA));
        assert_eq!(cast(&bf, &a), Some(RoundingCast::AIsBf16OfB));
        assert_eq!(cast(&a, &hf), Some(RoundingCast::BIsF16OfA));
        assert_eq!(cast(&hf, &a), Some(RoundingCast::AIsF16OfB));
        assert_eq!(cast(&a, &[0.2, -3.3, 7.7e-6, 0.0]), None);
    }

    #[test]
    fn nan_and_infinity_are_counted_separately() {
        let found =
            DiffStats::compare(10, &[1.0, f32::NAN, 2.0, f32::NAN], &[1.0, 1.0, f32::INFINITY, f32::NAN]);
        let found = found.finish().expect("different");
        assert_eq!((found.differing, found.not_finite, found.max_abs), (2, 2, None));
        assert_eq!(found.first.element, 11);
        assert!(DiffStats::compare(0, &[f32::NAN], &[f32::NAN]).finish().is_none(), "equal bits");
    }

    proptest! {
        #[test]
        fn joined_ranges_give_the_statistics_of_the_whole(
            pairs in proptest::collection::vec((-4i8..4, -4i8..4), 1..40),
            cut in 0usize..40,
        ) {
            let (a, b): (Vec<f32>, Vec<f32>) = pairs.iter().map(|(x, y)| (f32::from(*x) / 3.0, f32::from(*y) / 3.0)).unzip();
            let cut = cut.min(a.len());
            let mut joined = DiffStats::default();
            joined.append(DiffStats::compare(0, &a[..cut], &b[..cut]));
            joined.append(DiffStats::compare(cut as u64, &a[cut..], &b[cut..]));
            let (joined, whole) = (joined.finish(), DiffStats::compare(0, &a, &b).finish());
            prop_assert_eq!(joined.is_some(), whole.is_some());
            if let (Some(joined), Some(whole)) = (joined, whole) {
                prop_assert!((joined.mean_abs - whole.mean_abs).abs() < 1e-12);
                prop_assert_eq!(ElementDiff { mean_abs: 0.0, ..joined }, ElementDiff { mean_abs: 0.0, ..whole });
            }
        }
    }
}
