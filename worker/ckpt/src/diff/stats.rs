//! [`ElementDiff`]: statistics of the differences between the elements of two tensors.
use half::{bf16, f16};
use serde::Serialize;

/// An element that is compared in two tensors: its index, and its value in both tensors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ElementPair {
    /// Row-major index of the element in the tensor.
    pub element: u64,
    /// The value in `a`.
    pub a: f32,
    /// The value in `b`.
    pub b: f32,
}

/// A rounding of the elements of tensor `a` or `b` to bfloat16 or float16 whose results are exactly
/// the elements of the other tensor. It rounds to nearest, ties to even.
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
    /// The roundings to bfloat16 or float16, of either tensor, that a comparison tests as
    /// explanations of the differences.
    const ALL: [RoundingCast; 4] = [
        RoundingCast::BIsBf16OfA,
        RoundingCast::BIsF16OfA,
        RoundingCast::AIsBf16OfB,
        RoundingCast::AIsF16OfB,
    ];

    /// Returns true if this rounding converts `a` to exactly `b`, or `b` to exactly `a`, depending
    /// on the direction of the rounding. The kind of conversion determines whether `a` or `b` is
    /// converted.
    fn explains_pair(self, a: f32, b: f32) -> bool {
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

/// Statistics of the differences between two tensors with the dtype F32, BF16 or F16.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ElementDiff {
    /// Number of elements with different bits.
    pub differing: u64,
    /// Number of elements of the tensor.
    pub elements: u64,
    /// The first element with different bits.
    pub first: ElementPair,
    /// Largest `|a - b|` of elements that are finite on both sides. `None` if no differing element
    /// is finite on both sides.
    pub max_abs: Option<f64>,
    /// The element with the largest `|a - b|`, or `None` if `max_abs` is `None`.
    pub max_at: Option<ElementPair>,
    /// Mean of `|a - b|` over all elements that are finite on both sides.
    pub mean_abs: f64,
    /// Largest distance between the value in `a` and the value in `b` of one element, in units in
    /// the last place (ulp) of float32. Counts only elements whose two values are finite.
    pub max_ulp: u64,
    /// Number of elements that have different bits in `a` and `b`, and are NaN or infinite in at
    /// least one of them.
    pub not_finite: u64,
    /// The cast that turns every element of one tensor into the element of the other. `None` if
    /// there is no such cast.
    pub cast: Option<RoundingCast>,
}

/// Statistics of the differences between two tensors in a range of their elements. Statistics of
/// consecutive ranges can be joined.
#[derive(Default)]
pub(super) struct DiffStats {
    elements: u64,
    differing: u64,
    first: Option<ElementPair>,
    max_pair: Option<(f64, ElementPair)>,
    sum: f64,
    finite: u64,
    max_ulp: u64,
    not_finite: u64,
    /// For each cast in [`RoundingCast::ALL`], whether some element contradicts the cast.
    refuted: [bool; 4],
}

impl DiffStats {
    /// Compares two slices of equal length, which begin at element `start` of their tensors, and
    /// returns the statistics.
    pub(super) fn from_slices(start: u64, a: &[f32], b: &[f32]) -> DiffStats {
        let mut stats = DiffStats { elements: a.len() as u64, ..DiffStats::default() };
        if bytemuck::cast_slice::<f32, u8>(a) == bytemuck::cast_slice::<f32, u8>(b) {
            stats.finite = a.iter().filter(|x| x.is_finite()).count() as u64;
            stats.refute_casts(a, b);
            return stats;
        }
        for (i, (&x, &y)) in a.iter().zip(b).enumerate() {
            stats.add_element_pair(ElementPair { element: start + i as u64, a: x, b: y });
        }
        stats.refute_casts(a, b);
        stats
    }

    /// Adds one element of both tensors to the statistics, such as the number of differing elements
    /// and the largest difference.
    fn add_element_pair(&mut self, at: ElementPair) {
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
        self.max_ulp = self.max_ulp.max(count_ulps(at.a, at.b));
        if self.max_pair.is_none_or(|(max, _)| abs > max) {
            self.max_pair = Some((abs, at));
        }
    }

    /// Records in `refuted`, for each rounding to a 16-bit dtype, whether it fails to explain a
    /// difference between the slices `a` and `b`.
    fn refute_casts(&mut self, a: &[f32], b: &[f32]) {
        for (refuted, cast) in self.refuted.iter_mut().zip(RoundingCast::ALL) {
            *refuted = !a.iter().zip(b).all(|(&x, &y)| cast.explains_pair(x, y));
        }
    }

    /// Merges the statistics `next` of the following range of elements into these statistics, so
    /// that they cover both ranges.
    pub(super) fn merge_following_range(&mut self, next: DiffStats) {
        self.elements += next.elements;
        self.differing += next.differing;
        self.first = self.first.or(next.first);
        self.sum += next.sum;
        self.finite += next.finite;
        self.max_ulp = self.max_ulp.max(next.max_ulp);
        self.not_finite += next.not_finite;
        if let Some((abs, at)) = next.max_pair
            && self.max_pair.is_none_or(|(max, _)| abs > max)
        {
            self.max_pair = Some((abs, at));
        }
        self.refuted.iter_mut().zip(next.refuted).for_each(|(mine, theirs)| *mine |= theirs);
    }

    /// Converts the statistics to the final result of comparing two tensors, an [`ElementDiff`].
    /// Returns `None` if all elements have equal bits.
    pub(super) fn into_element_diff(self) -> Option<ElementDiff> {
        let cast =
            self.refuted.iter().zip(RoundingCast::ALL).find(|(refuted, _)| !**refuted).map(|(_, cast)| cast);
        Some(ElementDiff {
            differing: self.differing,
            elements: self.elements,
            first: self.first?,
            max_abs: self.max_pair.map(|(abs, _)| abs),
            max_at: self.max_pair.map(|(_, at)| at),
            mean_abs: if self.finite == 0 { 0.0 } else { self.sum / self.finite as f64 },
            max_ulp: self.max_ulp,
            not_finite: self.not_finite,
            cast,
        })
    }
}

/// Returns the distance of two float32 numbers in ulp, that is how many representable numbers one
/// must step from `a` to reach `b`. The distance of +0 and -0 is 0.
fn count_ulps(a: f32, b: f32) -> u64 {
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
        assert_eq!(count_ulps(1.0, 1.0 + f32::EPSILON), 1);
        assert_eq!(count_ulps(0.0, -0.0), 0);
        assert_eq!(count_ulps(f32::from_bits(1), -f32::from_bits(1)), 2);
        assert_eq!(count_ulps(1.0, 2.0), 1 << 23);
    }

    #[test]
    fn a_rounding_that_explains_all_differences_is_found() {
        let a = [0.1f32, -3.3, 7.7e-6, 0.0];
        let to = |cast: fn(f32) -> f32| a.map(cast);
        let bf = to(|x| bf16::from_f32(x).to_f32());
        let hf = to(|x| f16::from_f32(x).to_f32());
        let cast = |a: &[f32], b: &[f32]| {
            DiffStats::from_slices(0, a, b).into_element_diff().expect("different").cast
        };
        assert_eq!(cast(&a, &bf), Some(RoundingCast::BIsBf16OfA));
        assert_eq!(cast(&bf, &a), Some(RoundingCast::AIsBf16OfB));
        assert_eq!(cast(&a, &hf), Some(RoundingCast::BIsF16OfA));
        assert_eq!(cast(&hf, &a), Some(RoundingCast::AIsF16OfB));
        assert_eq!(cast(&a, &[0.2, -3.3, 7.7e-6, 0.0]), None);
    }

    #[test]
    fn nan_and_infinity_are_counted_separately() {
        let found =
            DiffStats::from_slices(10, &[1.0, f32::NAN, 2.0, f32::NAN], &[1.0, 1.0, f32::INFINITY, f32::NAN]);
        let found = found.into_element_diff().expect("different");
        assert_eq!((found.differing, found.not_finite, found.max_abs), (2, 2, None));
        assert_eq!(found.first.element, 11);
        assert!(
            DiffStats::from_slices(0, &[f32::NAN], &[f32::NAN]).into_element_diff().is_none(),
            "equal bits"
        );
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
            joined.merge_following_range(DiffStats::from_slices(0, &a[..cut], &b[..cut]));
            joined.merge_following_range(DiffStats::from_slices(cut as u64, &a[cut..], &b[cut..]));
            let (joined, whole) = (joined.into_element_diff(), DiffStats::from_slices(0, &a, &b).into_element_diff());
            prop_assert_eq!(joined.is_some(), whole.is_some());
            if let (Some(joined), Some(whole)) = (joined, whole) {
                prop_assert!((joined.mean_abs - whole.mean_abs).abs() < 1e-12);
                prop_assert_eq!(ElementDiff { mean_abs: 0.0, ..joined }, ElementDiff { mean_abs: 0.0, ..whole });
            }
        }
    }
}
