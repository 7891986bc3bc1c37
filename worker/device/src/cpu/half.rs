//! 16-bit elements: every op computes in `f32` on widened values and rounds its result once, to the nearest, ties to even.
//!
//! [`In`] and [`Out`] are an op's arguments of any element type. A task takes the part it needs: of `f32` the slice
//! itself, of 16-bit elements a widened copy in scratch, which stays in the cache.
//!
//! Conversions are integer and `f32` arithmetic that compilers vectorise; they give the same bits on every machine.
//! Instructions that multiply 16-bit numbers are not used: they sum in an order of their own.
use super::pool::Borrowed;
use super::simd::{LANES, Level, Simd, get, load, multiversion};
use super::{Cpu, Parts};
use crate::mem::{Dtype, View, ViewMut};
use std::ops::{Deref, DerefMut, Range};

/// Which 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Bf16,
    F16,
}

#[inline(always)]
fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // NaN stays NaN: rounding could carry its mantissa into infinity.
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

#[inline(always)]
fn f16_to_f32(x: u16) -> f32 {
    let sign = u32::from(x & 0x8000) << 16;
    let magnitude = u32::from(x & 0x7fff);
    // Read as an f32 the number is 2¹¹² times too small, exactly, subnormals included.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = magnitude << 13 | 0x7f80_0000;
    let finite = scaled.to_bits();
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

#[inline(always)]
fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Adding 0.5 leaves a subnormal's 10 bits at the end of the mantissa, rounded as additions round.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    // 65520 and more round to infinity.
    let large = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    (sign | if magnitude >= 0x477f_f000 { large } else { finite }) as u16
}

/// An element type that matrices are packed from.
pub(crate) trait Element: Copy {
    fn wide(self) -> f32;

    /// 16 elements from `i` on, widened; lanes past the end are 0.
    #[inline(always)]
    fn lanes<S: Simd>(s: S, x: &[Self], i: usize) -> S::V {
        let rest = &x[i..];
        let mut wide = [0.0; LANES];
        wide.iter_mut().zip(rest).for_each(|(to, x)| *to = x.wide());
        load(s, &wide)
    }

    /// As [`Simd::transpose8`], widened.
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn transpose8<S: Simd>(s: S, src: *const Self, lds: usize, dst: *mut f32, ldd: usize) {
        let mut block = [0.0f32; 64];
        for (i, row) in block.chunks_exact_mut(8).enumerate() {
            // SAFETY: row i of 8 elements is there, as the caller promises.
            let from = unsafe { std::slice::from_raw_parts(src.add(i * lds), 8) };
            row.iter_mut().zip(from).for_each(|(to, x)| *to = x.wide());
        }
        // SAFETY: the block holds 8 rows of 8; the destination as the caller promises.
        unsafe { s.transpose8(block.as_ptr(), 8, dst, ldd) }
    }
}

impl Element for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }

    #[inline(always)]
    fn lanes<S: Simd>(s: S, x: &[Self], i: usize) -> S::V {
        get(s, x, i)
    }

    #[inline(always)]
    unsafe fn transpose8<S: Simd>(s: S, src: *const Self, lds: usize, dst: *mut f32, ldd: usize) {
        // SAFETY: as the caller promises.
        unsafe { s.transpose8(src, lds, dst, ldd) }
    }
}

/// A bfloat16.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

impl Element for Bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        bf16_to_f32(self.0)
    }
}

/// An IEEE half.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(crate) struct F16(u16);

impl Element for F16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f16_to_f32(self.0)
    }
}

/// `$body` with `$x` as the slice of elements that `$in` is, of their own type.
macro_rules! with_elements {
    ($in:expr, $x:ident => $body:expr) => {
        match $in {
            $crate::cpu::half::In::F32($x) => $body,
            $crate::cpu::half::In::Half($crate::cpu::half::Kind::Bf16, x) => {
                let $x: &[$crate::cpu::half::Bf16] = bytemuck::cast_slice(x);
                $body
            }
            $crate::cpu::half::In::Half($crate::cpu::half::Kind::F16, x) => {
                let $x: &[$crate::cpu::half::F16] = bytemuck::cast_slice(x);
                $body
            }
        }
    };
}
pub(crate) use with_elements;

/// `to = from`, exactly.
#[inline(always)]
pub(crate) fn widen_into(kind: Kind, to: &mut [f32], from: &[u16]) {
    match kind {
        Kind::Bf16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = bf16_to_f32(*x)),
        Kind::F16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = f16_to_f32(*x)),
    }
}

/// `to = from`, each element rounded to the nearest, ties to even.
#[inline(always)]
fn round_into(kind: Kind, to: &mut [u16], from: &[f32]) {
    match kind {
        Kind::Bf16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = f32_to_bf16(*x)),
        Kind::F16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = f32_to_f16(*x)),
    }
}

multiversion! {
    fn widen = widen_slice(kind: Kind, to: &mut [f32], from: &[u16])
}
multiversion! {
    fn round = round_slice(kind: Kind, to: &mut [u16], from: &[f32])
}

#[inline(always)]
fn widen_slice<S: Simd>(_: S, kind: Kind, to: &mut [f32], from: &[u16]) {
    widen_into(kind, to, from);
}

#[inline(always)]
fn round_slice<S: Simd>(_: S, kind: Kind, to: &mut [u16], from: &[f32]) {
    round_into(kind, to, from);
}

/// Elements that an op reads.
#[derive(Clone, Copy)]
pub(crate) enum In<'a> {
    F32(&'a [f32]),
    Half(Kind, &'a [u16]),
}

impl<'a> From<View<'a>> for In<'a> {
    fn from(v: View<'a>) -> Self {
        match v.dtype() {
            Dtype::F32 => In::F32(v.host()),
            Dtype::Bf16 => In::Half(Kind::Bf16, v.halves()),
            Dtype::F16 => In::Half(Kind::F16, v.halves()),
        }
    }
}

impl<'a> In<'a> {
    pub(crate) fn len(&self) -> usize {
        match self {
            In::F32(x) => x.len(),
            In::Half(_, x) => x.len(),
        }
    }

    #[inline(always)]
    pub(crate) fn slice(self, r: Range<usize>) -> In<'a> {
        match self {
            In::F32(x) => In::F32(&x[r]),
            In::Half(kind, x) => In::Half(kind, &x[r]),
        }
    }

    /// Some elements as `f32`.
    pub(crate) fn part<'c>(self, cpu: &'c Cpu, r: Range<usize>) -> Read<'c>
    where
        'a: 'c,
    {
        match self.slice(r) {
            In::F32(x) => Read::There(x),
            In::Half(kind, x) => {
                let mut wide = cpu.scratch.take(x.len());
                widen(cpu.level, kind, &mut wide[..x.len()], x);
                Read::Widened(wide, x.len())
            }
        }
    }

    /// All elements as `f32`.
    pub(crate) fn all<'c>(self, cpu: &'c Cpu) -> Read<'c>
    where
        'a: 'c,
    {
        self.part(cpu, 0..self.len())
    }

    /// Copies them to `to`, which is as long.
    pub(crate) fn copy_to(self, cpu: &Cpu, to: &mut [f32]) {
        match self {
            In::F32(x) => to.copy_from_slice(x),
            In::Half(kind, x) => widen(cpu.level, kind, to, x),
        }
    }

    /// Element `i`.
    #[inline(always)]
    pub(crate) fn at(&self, i: usize) -> f32 {
        match self {
            In::F32(x) => x[i],
            In::Half(Kind::Bf16, x) => bf16_to_f32(x[i]),
            In::Half(Kind::F16, x) => f16_to_f32(x[i]),
        }
    }
}

/// Elements as `f32`: where they lie, or a widened copy.
pub(crate) enum Read<'a> {
    There(&'a [f32]),
    Widened(Borrowed<'a>, usize),
}

impl Deref for Read<'_> {
    type Target = [f32];
    #[inline(always)]
    fn deref(&self) -> &[f32] {
        match self {
            Read::There(x) => x,
            Read::Widened(x, len) => &x[..*len],
        }
    }
}

/// What a task does with the elements that it writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Old {
    /// They are overwritten: what they were is not read.
    Lost,
    /// They are read, too.
    Read,
}

/// Elements that an op writes, shared by its tasks: each takes parts of its own.
pub(crate) struct Out<'a> {
    cpu: &'a Cpu,
    to: To<'a>,
}

enum To<'a> {
    F32(Parts<'a, f32>, usize),
    Half(Kind, Parts<'a, u16>, usize),
}

impl<'a> Out<'a> {
    pub(crate) fn new(cpu: &'a Cpu, v: ViewMut<'a>) -> Self {
        let len = v.len();
        let to = match v.dtype() {
            Dtype::F32 => To::F32(Parts::new(v.host()), len),
            Dtype::Bf16 => To::Half(Kind::Bf16, Parts::new(v.halves()), len),
            Dtype::F16 => To::Half(Kind::F16, Parts::new(v.halves()), len),
        };
        Out { cpu, to }
    }

    pub(crate) fn is_f32(&self) -> bool {
        matches!(self.to, To::F32(..))
    }

    pub(crate) fn len(&self) -> usize {
        match &self.to {
            To::F32(_, len) | To::Half(_, _, len) => *len,
        }
    }

    /// Some elements as `f32`; 16-bit ones are rounded when the part is dropped.
    ///
    /// # Safety
    /// No other part of these elements exists at the same time.
    pub(crate) unsafe fn part(&self, r: Range<usize>, old: Old) -> Written<'_> {
        match &self.to {
            // SAFETY: as the caller promises.
            To::F32(x, _) => Written::There(unsafe { x.part(r) }),
            To::Half(kind, x, _) => {
                // SAFETY: as the caller promises.
                let to = unsafe { x.part(r) };
                let mut wide = self.cpu.scratch.take(to.len());
                if old == Old::Read {
                    widen(self.cpu.level, *kind, &mut wide[..to.len()], to);
                }
                Written::Wide { level: self.cpu.level, kind: *kind, wide, to }
            }
        }
    }

    /// Runs `work` on some elements as `f32`, with all threads for it; 16-bit ones are rounded afterwards.
    ///
    /// # Safety
    /// No other part of these elements exists at the same time.
    pub(crate) unsafe fn through(&self, r: Range<usize>, old: Old, work: impl FnOnce(&mut [f32])) {
        let cpu = self.cpu;
        match &self.to {
            // SAFETY: as the caller promises.
            To::F32(x, _) => work(unsafe { x.part(r) }),
            To::Half(kind, x, _) => {
                let mut wide = cpu.scratch.take(r.len());
                let wide = &mut wide[..r.len()];
                // SAFETY: as above.
                let to = unsafe { x.part(r) };
                if old == Old::Read {
                    spread(cpu, wide, In::Half(*kind, to));
                }
                work(wide);
                let (to, from, kind) = (Parts::new(to), &*wide, *kind);
                cpu.by_elements(from.len(), |r| {
                    // SAFETY: tasks have ranges of their own.
                    round(cpu.level, kind, unsafe { to.part(r.clone()) }, &from[r]);
                });
            }
        }
    }
}

/// Elements being written, as `f32`.
pub(crate) enum Written<'a> {
    There(&'a mut [f32]),
    Wide { level: Level, kind: Kind, wide: Borrowed<'a>, to: &'a mut [u16] },
}

impl Deref for Written<'_> {
    type Target = [f32];
    #[inline(always)]
    fn deref(&self) -> &[f32] {
        match self {
            Written::There(x) => x,
            Written::Wide { wide, to, .. } => &wide[..to.len()],
        }
    }
}

impl DerefMut for Written<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Written::There(x) => x,
            Written::Wide { wide, to, .. } => &mut wide[..to.len()],
        }
    }
}

impl Written<'_> {
    /// What is written becomes what later reads will see: 16-bit elements are rounded now.
    pub(crate) fn settle(&mut self) {
        if let Written::Wide { level, kind, wide, to } = self {
            round(*level, *kind, to, &wide[..to.len()]);
            widen(*level, *kind, &mut wide[..to.len()], to);
        }
    }
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        if let Written::Wide { level, kind, wide, to } = self {
            round(*level, *kind, to, &wide[..to.len()]);
        }
    }
}

/// `to = from`, widened by all threads.
fn spread(cpu: &Cpu, to: &mut [f32], from: In) {
    let parts = Parts::new(to);
    cpu.by_elements(from.len(), |r| {
        // SAFETY: tasks have ranges of their own.
        from.slice(r.clone()).copy_to(cpu, unsafe { parts.part(r) });
    });
}

/// `to = from`, each element rounded once where `to` is narrower.
pub(crate) fn cast(cpu: &Cpu, to: ViewMut, from: In) {
    super::expect_len("cast", "from", from.len(), to.len());
    let to = Out::new(cpu, to);
    cpu.by_elements(from.len(), |r| {
        let from = from.part(cpu, r.clone());
        // SAFETY: tasks have ranges of their own.
        unsafe { to.part(r, Old::Lost) }.copy_from_slice(&from);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The two 16-bit numbers around `x`, and which of them is nearer: by comparing in f64, without any bit trick.
    fn nearest(x: f32, all: &[(f64, u16)]) -> u16 {
        let x = f64::from(x);
        let i = all.partition_point(|(v, _)| *v < x);
        let above = all.get(i);
        let below = i.checked_sub(1).and_then(|i| all.get(i));
        match (below, above) {
            (Some(b), Some(a)) => match (x - b.0).total_cmp(&(a.0 - x)) {
                std::cmp::Ordering::Less => b.1,
                std::cmp::Ordering::Greater => a.1,
                std::cmp::Ordering::Equal if b.1 & 1 == 0 => b.1,
                std::cmp::Ordering::Equal => a.1,
            },
            (Some(b), None) => b.1,
            (None, Some(a)) => a.1,
            (None, None) => unreachable!("there are numbers"),
        }
    }

    /// Value of a finite 16-bit number by its definition; infinity is one step beyond the largest.
    fn value(x: u16, exponent: u32, mantissa: u32) -> f64 {
        let m = f64::from(x & ((1 << mantissa) - 1));
        let e = i32::from((x & 0x7fff) >> mantissa);
        let bias = (1 << (exponent - 1)) - 1;
        let unit = f64::from(1u32 << mantissa);
        let v = if e == 0 {
            m / unit * f64::powi(2.0, 1 - bias)
        } else {
            (1.0 + m / unit) * f64::powi(2.0, e - bias)
        };
        if x & 0x8000 != 0 { -v } else { v }
    }

    fn check(kind: Kind, exponent: u32, mantissa: u32, to: fn(f32) -> u16, back: fn(u16) -> f32) {
        let inf = ((1u16 << exponent) - 1) << mantissa;
        // positive numbers up to infinity, which stands for the step beyond the largest
        let all: Vec<(f64, u16)> = (0..=inf).map(|x| (value(x, exponent, mantissa), x)).collect();
        for x in 0..=u16::MAX {
            let wide = back(x);
            match x & 0x7fff {
                m if m > inf => assert!(wide.is_nan() && back(to(wide)).is_nan(), "{kind:?} {x:#x}"),
                m if m == inf => assert_eq!(wide.is_infinite(), to(wide) == x),
                _ => {
                    assert_eq!(f64::from(wide), value(x, exponent, mantissa), "{kind:?} {x:#x}");
                    assert_eq!(to(wide), x, "{kind:?} {x:#x} comes back");
                }
            }
        }
        let mut bits = 0x1234_5678u32;
        for i in 0..200_000u32 {
            bits = bits.wrapping_mul(0x9E37_79B1).wrapping_add(i) ^ (bits >> 15);
            // random f32s, halfway points and their neighbours
            let half = all[(bits as usize) % (all.len() - 1)];
            let next = all[(bits as usize) % (all.len() - 1) + 1];
            let middle = ((half.0 + next.0) / 2.0) as f32;
            let near = [f32::from_bits(middle.to_bits() + 1), f32::from_bits(middle.to_bits().max(1) - 1)];
            let some = f32::from_bits(bits & 0x7fff_ffff);
            for x in [middle, near[0], near[1], some].into_iter().filter(|x| x.is_finite()) {
                let beyond = f64::from(x) > all[all.len() - 1].0;
                let want = if beyond { inf } else { nearest(x, &all) };
                assert_eq!(to(x), want, "{kind:?} {x:e} ({:#x})", x.to_bits());
                assert_eq!(to(-x), want | 0x8000, "{kind:?} {:e}", -x);
            }
        }
    }

    #[test]
    fn bf16_rounds_to_the_nearest_even() {
        check(Kind::Bf16, 8, 7, f32_to_bf16, bf16_to_f32);
    }

    #[test]
    fn f16_rounds_to_the_nearest_even() {
        check(Kind::F16, 5, 10, f32_to_f16, f16_to_f32);
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let x: Vec<f32> = (0..40_001u32).map(|i| f32::from_bits(i.wrapping_mul(0x9E37_79B1))).collect();
        for kind in [Kind::Bf16, Kind::F16] {
            let scalar = |x: &f32| if kind == Kind::Bf16 { f32_to_bf16(*x) } else { f32_to_f16(*x) };
            let want: Vec<u16> = x.iter().map(scalar).collect();
            for level in Level::available() {
                let (mut got, mut wide) = (vec![0u16; x.len()], vec![0f32; x.len()]);
                round(level, kind, &mut got, &x);
                assert!(got == want, "{kind:?} {}", level.name());
                widen(level, kind, &mut wide, &got);
                let back = In::Half(kind, &got);
                assert!((0..x.len()).all(|i| wide[i].to_bits() == back.at(i).to_bits()), "{kind:?}");
            }
        }
    }
}
