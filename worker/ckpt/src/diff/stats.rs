//! Two ranges of numbers, compared.
use half::{bf16, f16};
use serde::Serialize;

/// An element and its two values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct At {
    /// Row-major index in the whole tensor.
    pub element: u64,
    pub a: f32,
    pub b: f32,
}

/// A rounding (to nearest, ties to even) that makes one side of the other, in every element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Cast {
    /// `b` is `a` rounded to bfloat16.
    BIsBf16OfA,
    /// `b` is `a` rounded to float16.
    BIsF16OfA,
    /// `a` is `b` rounded to bfloat16.
    AIsBf16OfB,
    /// `a` is `b` rounded to float16.
    AIsF16OfB,
}

impl Cast {
    const ALL: [Cast; 4] = [Cast::BIsBf16OfA, Cast::BIsF16OfA, Cast::AIsBf16OfB, Cast::AIsF16OfB];

    fn holds(self, a: f32, b: f32) -> bool {
        let bf16 = |x: f32| bf16::from_f32(x).to_f32().to_bits();
        let f16 = |x: f32| f16::from_f32(x).to_f32().to_bits();
        match self {
            Cast::BIsBf16OfA => bf16(a) == b.to_bits(),
            Cast::BIsF16OfA => f16(a) == b.to_bits(),
            Cast::AIsBf16OfB => bf16(b) == a.to_bits(),
            Cast::AIsF16OfB => f16(b) == a.to_bits(),
        }
    }
}

/// How the elements of a tensor differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Values {
    /// Elements with other bits.
    pub differing: u64,
    pub elements: u64,
    pub first: At,
    /// Largest `|a - b|`, and where; of finite values only. `None`: no differing pair is finite.
    pub max_abs: Option<f64>,
    pub max_at: Option<At>,
    /// Mean of `|a - b|` over all elements whose values are finite on both sides.
    pub mean_abs: f64,
    /// Largest distance in float32 numbers, of finite values only.
    pub max_ulp: u64,
    /// Elements where one side or both are NaN or infinite and the bits differ.
    pub not_finite: u64,
    /// A rounding that explains all of it.
    pub cast: Option<Cast>,
}

/// Collected over a range, or over neighbouring ranges.
#[derive(Default)]
pub(super) struct Stats {
    elements: u64,
    differing: u64,
    first: Option<At>,
    max: Option<(f64, At)>,
    sum: f64,
    finite: u64,
    max_ulp: u64,
    not_finite: u64,
    /// Of [`Cast::ALL`]: refuted by some element.
    refuted: [bool; 4],
}

impl Stats {
    /// Of two equally long ranges that begin at element `start`.
    pub(super) fn of(start: u64, a: &[f32], b: &[f32]) -> Stats {
        let mut stats = Stats { elements: a.len() as u64, ..Stats::default() };
        if bytemuck::cast_slice::<f32, u8>(a) == bytemuck::cast_slice::<f32, u8>(b) {
            stats.finite = a.iter().filter(|x| x.is_finite()).count() as u64;
            stats.refute(a, b);
            return stats;
        }
        for (i, (&x, &y)) in a.iter().zip(b).enumerate() {
            stats.pair(At { element: start + i as u64, a: x, b: y });
        }
        stats.refute(a, b);
        stats
    }

    fn pair(&mut self, at: At) {
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

    fn refute(&mut self, a: &[f32], b: &[f32]) {
        for (refuted, cast) in self.refuted.iter_mut().zip(Cast::ALL) {
            *refuted = !a.iter().zip(b).all(|(&x, &y)| cast.holds(x, y));
        }
    }

    /// Takes in what follows.
    pub(super) fn append(&mut self, next: Stats) {
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

    /// `None`: all bits are equal.
    pub(super) fn finish(self) -> Option<Values> {
        let cast = self.refuted.iter().zip(Cast::ALL).find(|(refuted, _)| !**refuted).map(|(_, cast)| cast);
        Some(Values {
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

/// How many float32 numbers lie between, plus one; 0 for +0 and -0.
fn ulps(a: f32, b: f32) -> u64 {
    let place = |x: f32| {
        let magnitude = i64::from(x.to_bits() & 0x7fff_ffff);
        if x.is_sign_negative() { -magnitude } else { magnitude }
    };
    place(a).abs_diff(place(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn distances_in_ulps() {
        assert_eq!(ulps(1.0, 1.0 + f32::EPSILON), 1);
        assert_eq!(ulps(0.0, -0.0), 0);
        assert_eq!(ulps(f32::from_bits(1), -f32::from_bits(1)), 2);
        assert_eq!(ulps(1.0, 2.0), 1 << 23);
    }

    #[test]
    fn casts_are_recognised() {
        let a = [0.1f32, -3.3, 7.7e-6, 0.0];
        let to = |cast: fn(f32) -> f32| a.map(cast);
        let bf = to(|x| bf16::from_f32(x).to_f32());
        let hf = to(|x| f16::from_f32(x).to_f32());
        let cast = |a: &[f32], b: &[f32]| Stats::of(0, a, b).finish().expect("different").cast;
        assert_eq!(cast(&a, &bf), Some(Cast::BIsBf16OfA));
        assert_eq!(cast(&bf, &a), Some(Cast::AIsBf16OfB));
        assert_eq!(cast(&a, &hf), Some(Cast::BIsF16OfA));
        assert_eq!(cast(&hf, &a), Some(Cast::AIsF16OfB));
        assert_eq!(cast(&a, &[0.2, -3.3, 7.7e-6, 0.0]), None);
    }

    #[test]
    fn what_is_not_finite_is_counted_apart() {
        let found = Stats::of(10, &[1.0, f32::NAN, 2.0, f32::NAN], &[1.0, 1.0, f32::INFINITY, f32::NAN]);
        let found = found.finish().expect("different");
        assert_eq!((found.differing, found.not_finite, found.max_abs), (2, 2, None));
        assert_eq!(found.first.element, 11);
        assert!(Stats::of(0, &[f32::NAN], &[f32::NAN]).finish().is_none(), "the same bits");
    }

    proptest! {
        #[test]
        fn cut_anywhere_the_answer_is_the_same(
            pairs in proptest::collection::vec((-4i8..4, -4i8..4), 1..40),
            cut in 0usize..40,
        ) {
            let (a, b): (Vec<f32>, Vec<f32>) = pairs.iter().map(|(x, y)| (f32::from(*x) / 3.0, f32::from(*y) / 3.0)).unzip();
            let cut = cut.min(a.len());
            let mut joined = Stats::default();
            joined.append(Stats::of(0, &a[..cut], &b[..cut]));
            joined.append(Stats::of(cut as u64, &a[cut..], &b[cut..]));
            let (joined, whole) = (joined.finish(), Stats::of(0, &a, &b).finish());
            prop_assert_eq!(joined.is_some(), whole.is_some());
            if let (Some(joined), Some(whole)) = (joined, whole) {
                prop_assert!((joined.mean_abs - whole.mean_abs).abs() < 1e-12);
                prop_assert_eq!(Values { mean_abs: 0.0, ..joined }, Values { mean_abs: 0.0, ..whole });
            }
        }
    }
}
