//! The inputs and outputs of ops on the CPU ([`InputElements`] and [`OutputElements`]), whose
//! elements are `f32` or 16-bit numbers.
//!
//! Ops compute in `f32` and round each result once, to nearest, ties to even. A task converts the
//! range that it needs. For `f32` elements, this is the slice itself. For 16-bit elements, it is a
//! copy in scratch memory, which stays in the cache.
//!
//! Conversions consist of integer and `f32` arithmetic that compilers vectorise, and give the same
//! bits on every machine. Instructions that multiply 16-bit numbers are not used; a rule defines
//! the bits of products of bf16 numbers ([`super::sum_rule`]).
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::instruction_set::{InstructionSet, multiversion};
use super::scratch::ScratchBuf;
use super::simd::{LANES, Simd, load_array, load_lanes};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::WriteMode;
use std::ops::{Deref, DerefMut, Range};

/// A 16-bit floating-point format: bf16 or IEEE half precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HalfFormat {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

/// Converts a bf16 number to `f32`. The conversion is exact.
#[inline(always)]
pub(crate) fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Rounds an `f32` to the nearest bf16 number, ties to even. Returns its bits. NaN stays NaN.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could carry the mantissa of a NaN into infinity.
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

/// Converts an IEEE half-precision number to `f32`. The conversion is exact.
#[inline(always)]
fn f16_to_f32(x: u16) -> f32 {
    let sign = u32::from(x & 0x8000) << 16;
    let magnitude = u32::from(x & 0x7fff);
    // The bits, read as an f32, are the number divided by 2¹¹². This also holds for subnormals.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = magnitude << 13 | 0x7f80_0000;
    let finite = scaled.to_bits();
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

/// Rounds an `f32` to the nearest IEEE half-precision number, ties to even. Returns its bits. NaN
/// stays NaN.
#[inline(always)]
fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Adding 0.5 moves the 10 bits of a subnormal to the end of the mantissa and rounds them.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    // 65520 and more round to infinity.
    let large = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    (sign | if magnitude >= 0x477f_f000 { large } else { finite }) as u16
}

/// The type of the elements of matrices that kernels read: `f32` or a 16-bit type.
pub(crate) trait Element: Copy {
    /// Converts the element to `f32`. The conversion is exact.
    fn to_f32(self) -> f32;

    /// Loads 16 elements of `x`, starting at index `i`, and converts them to a vector of `f32`
    /// lanes. Lanes past the end of `x` are 0.
    #[inline(always)]
    fn load_lanes<S: Simd>(s: S, x: &[Self], i: usize) -> S::V {
        let rest = &x[i..];
        let mut wide = [0.0; LANES];
        wide.iter_mut().zip(rest).for_each(|(to, x)| *to = x.to_f32());
        load_array(s, &wide)
    }

    /// Transposes 8 × 8 elements with [`Simd::transpose8`], and converts them to `f32`.
    ///
    /// # Safety
    ///
    /// The caller must meet the requirements of [`Simd::transpose8`].
    #[inline(always)]
    unsafe fn transpose8<S: Simd>(s: S, src: *const Self, lds: usize, dst: *mut f32, ldd: usize) {
        let mut block = [0.0f32; 64];
        for (i, row) in block.chunks_exact_mut(8).enumerate() {
            // SAFETY: the caller guarantees that row i has 8 elements.
            let from = unsafe { std::slice::from_raw_parts(src.add(i * lds), 8) };
            row.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
        }
        // SAFETY: the block has 8 rows of 8; the caller guarantees the destination.
        unsafe { s.transpose8(block.as_ptr(), 8, dst, ldd) }
    }
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn load_lanes<S: Simd>(s: S, x: &[Self], i: usize) -> S::V {
        load_lanes(s, x, i)
    }

    #[inline(always)]
    unsafe fn transpose8<S: Simd>(s: S, src: *const Self, lds: usize, dst: *mut f32, ldd: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { s.transpose8(src, lds, dst, ldd) }
    }
}

/// A bfloat16 element, stored as its bits.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

impl Element for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16_to_f32(self.0)
    }
}

/// An IEEE half-precision element, stored as its bits.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(crate) struct F16(u16);

impl Element for F16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16_to_f32(self.0)
    }
}

/// Evaluates `body` with the variable `x` set to the slice of `f32`, bf16 or f16 elements in an
/// [`InputElements`]: `with_elements!(input, x => body)`.
macro_rules! with_elements {
    ($in:expr, $x:ident => $body:expr) => {
        match $in {
            $crate::cpu::elements::InputElements::F32($x) => $body,
            $crate::cpu::elements::InputElements::Half($crate::cpu::elements::HalfFormat::Bf16, x) => {
                let $x: &[$crate::cpu::elements::Bf16] = bytemuck::cast_slice(x);
                $body
            }
            $crate::cpu::elements::InputElements::Half($crate::cpu::elements::HalfFormat::F16, x) => {
                let $x: &[$crate::cpu::elements::F16] = bytemuck::cast_slice(x);
                $body
            }
        }
    };
}
pub(crate) use with_elements;

multiversion! {
    /// Converts the 16-bit numbers of `from` to `f32` with the given instruction set, and writes
    /// them to `to`.
    fn widen_to_f32 = widen_slice(format: HalfFormat, to: &mut [f32], from: &[u16])
}
multiversion! {
    /// Rounds the numbers of `from` to the nearest 16-bit numbers with the given instruction set,
    /// and writes their bits to `to`.
    pub(crate) fn round_to_half = round_slice(format: HalfFormat, to: &mut [u16], from: &[f32])
}

/// Converts the 16-bit numbers of `from` to `f32` and writes them to `to`. The conversion is exact.
#[inline(always)]
pub(crate) fn widen_slice<S: Simd>(_: S, format: HalfFormat, to: &mut [f32], from: &[u16]) {
    match format {
        HalfFormat::Bf16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = bf16_to_f32(*x)),
        HalfFormat::F16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = f16_to_f32(*x)),
    }
}

/// Rounds the numbers of `from` to the nearest 16-bit numbers, ties to even, and writes their bits
/// to `to`.
#[inline(always)]
pub(crate) fn round_slice<S: Simd>(_: S, format: HalfFormat, to: &mut [u16], from: &[f32]) {
    match format {
        HalfFormat::Bf16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = f32_to_bf16(*x)),
        HalfFormat::F16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = f32_to_f16(*x)),
    }
}

/// The elements of an op's input on the CPU, as a slice of `f32` or 16-bit numbers.
#[derive(Clone, Copy)]
pub(crate) enum InputElements<'a> {
    /// `f32` elements.
    F32(&'a [f32]),
    /// 16-bit elements: their format and their bits.
    Half(HalfFormat, &'a [u16]),
}

impl<'a> From<View<'a>> for InputElements<'a> {
    fn from(v: View<'a>) -> Self {
        match v.dtype() {
            Dtype::F32 => InputElements::F32(v.host_slice()),
            Dtype::Bf16 => InputElements::Half(HalfFormat::Bf16, v.half_bits()),
            Dtype::F16 => InputElements::Half(HalfFormat::F16, v.half_bits()),
        }
    }
}

impl<'a> InputElements<'a> {
    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            InputElements::F32(x) => x.len(),
            InputElements::Half(_, x) => x.len(),
        }
    }

    /// Returns the part of the input with the indices `r`.
    #[inline(always)]
    pub(crate) fn slice(self, r: Range<usize>) -> InputElements<'a> {
        match self {
            InputElements::F32(x) => InputElements::F32(&x[r]),
            InputElements::Half(format, x) => InputElements::Half(format, &x[r]),
        }
    }

    /// Returns the input elements with the indices `r` as `f32`, without a copy if the input is
    /// `f32`, and otherwise as a converted copy in scratch memory.
    pub(crate) fn to_f32(self, cpu: &'a Cpu, r: Range<usize>) -> F32Input<'a> {
        match self.slice(r) {
            InputElements::F32(x) => F32Input::Borrowed(x),
            InputElements::Half(format, x) => {
                let mut wide = cpu.scratch.borrow_buf(x.len());
                widen_to_f32(cpu.instruction_set, format, &mut wide[..x.len()], x);
                F32Input::Converted(wide, x.len())
            }
        }
    }

    /// Returns the rows `rows` of `width` elements each as `f32`, without a copy if the input is
    /// `f32`, and otherwise as a converted copy in scratch memory.
    pub(crate) fn rows_to_f32(self, cpu: &'a Cpu, rows: &Range<usize>, width: usize) -> F32Input<'a> {
        self.to_f32(cpu, rows.start * width..rows.end * width)
    }

    /// Returns all elements of the input as `f32`, without a copy if the input is `f32`, and
    /// otherwise as a converted copy in scratch memory.
    pub(crate) fn all_to_f32(self, cpu: &'a Cpu) -> F32Input<'a> {
        self.to_f32(cpu, 0..self.len())
    }

    /// Copies all elements of the input to `to`, converted to `f32`. `to` must have the same
    /// length.
    pub(crate) fn copy_to_f32(self, cpu: &Cpu, to: &mut [f32]) {
        match self {
            InputElements::F32(x) => to.copy_from_slice(x),
            InputElements::Half(format, x) => widen_to_f32(cpu.instruction_set, format, to, x),
        }
    }

    /// Returns the element with index `i`, converted to `f32`.
    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> f32 {
        match self {
            InputElements::F32(x) => x[i],
            InputElements::Half(HalfFormat::Bf16, x) => bf16_to_f32(x[i]),
            InputElements::Half(HalfFormat::F16, x) => f16_to_f32(x[i]),
        }
    }
}

/// Elements of an op's input as `f32`: a borrowed slice, or a converted copy in scratch memory.
pub(crate) enum F32Input<'a> {
    Borrowed(&'a [f32]),
    Converted(ScratchBuf<'a>, usize),
}

impl Deref for F32Input<'_> {
    type Target = [f32];
    #[inline(always)]
    fn deref(&self) -> &[f32] {
        match self {
            F32Input::Borrowed(x) => x,
            F32Input::Converted(x, len) => &x[..*len],
        }
    }
}

/// Whether a task uses the existing contents of an op's output, such as to add to them, or only
/// overwrites them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PriorContents {
    /// The task overwrites the elements without reading them.
    Ignored,
    /// The task reads the previous elements, such as to add to them.
    Read,
}

impl From<WriteMode> for PriorContents {
    fn from(write: WriteMode) -> Self {
        match write {
            WriteMode::Overwrite => PriorContents::Ignored,
            WriteMode::Accumulate => PriorContents::Read,
        }
    }
}

/// The elements of an op's output on the CPU, `f32` or 16-bit numbers, of which parallel tasks
/// write different ranges.
pub(crate) struct OutputElements<'a> {
    cpu: &'a Cpu,
    pub(super) elements: OutputSlices<'a>,
}

/// The memory of an op's output, as `f32` or 16-bit elements, of which parallel tasks write
/// disjoint ranges.
pub(crate) enum OutputSlices<'a> {
    F32(DisjointSlices<'a, f32>, usize),
    Half(HalfFormat, DisjointSlices<'a, u16>, usize),
}

impl<'a> OutputElements<'a> {
    /// Wraps `v` as the output of an op on the CPU, of which parallel tasks can write different
    /// ranges.
    pub(crate) fn new(cpu: &'a Cpu, v: ViewMut<'a>) -> Self {
        let len = v.len();
        let elements = match v.dtype() {
            Dtype::F32 => OutputSlices::F32(DisjointSlices::new(v.host_slice_mut()), len),
            Dtype::Bf16 => OutputSlices::Half(HalfFormat::Bf16, DisjointSlices::new(v.half_bits()), len),
            Dtype::F16 => OutputSlices::Half(HalfFormat::F16, DisjointSlices::new(v.half_bits()), len),
        };
        OutputElements { cpu, elements }
    }

    /// Returns true if the elements are `f32`.
    pub(crate) fn is_f32(&self) -> bool {
        matches!(self.elements, OutputSlices::F32(..))
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match &self.elements {
            OutputSlices::F32(_, len) | OutputSlices::Half(_, _, len) => *len,
        }
    }

    /// Returns the output elements with the indices `r` as `f32`, for one task to write. If they
    /// are 16-bit, returns an `f32` copy in scratch memory. Dropping the copy rounds its elements
    /// and stores them in the output. The copy has arbitrary content unless `prior` is
    /// [`PriorContents::Read`].
    ///
    /// # Safety
    ///
    /// While the returned value is in use, no overlapping range of the output may be in use.
    pub(crate) unsafe fn slice_as_f32(&self, r: Range<usize>, prior: PriorContents) -> F32Output<'a> {
        match &self.elements {
            // SAFETY: guaranteed by the caller.
            OutputSlices::F32(x, _) => F32Output::Borrowed(unsafe { x.slice_mut(r) }),
            OutputSlices::Half(format, x, _) => {
                // SAFETY: guaranteed by the caller.
                let to = unsafe { x.slice_mut(r) };
                let mut wide = self.cpu.scratch.borrow_buf(to.len());
                if prior == PriorContents::Read {
                    widen_to_f32(self.cpu.instruction_set, *format, &mut wide[..to.len()], to);
                }
                F32Output::Converted { instruction_set: self.cpu.instruction_set, format: *format, wide, to }
            }
        }
    }

    /// Runs `work` on the output elements with the indices `r`, converted to `f32`, and rounds the
    /// results to the type of the output. `work` may use all threads. If the elements are 16-bit,
    /// `work` gets an `f32` copy, which is then rounded to the output. The copy has arbitrary
    /// content unless `prior` is [`PriorContents::Read`].
    ///
    /// # Safety
    ///
    /// During the call, no overlapping range of the output may be in use.
    pub(crate) unsafe fn update_as_f32(
        &self,
        r: Range<usize>,
        prior: PriorContents,
        work: impl FnOnce(&mut [f32]),
    ) {
        let cpu = self.cpu;
        match &self.elements {
            // SAFETY: guaranteed by the caller.
            OutputSlices::F32(x, _) => work(unsafe { x.slice_mut(r) }),
            OutputSlices::Half(format, x, _) => {
                let mut wide = cpu.scratch.borrow_buf(r.len());
                let wide = &mut wide[..r.len()];
                // SAFETY: as above.
                let to = unsafe { x.slice_mut(r) };
                if prior == PriorContents::Read {
                    widen_in_parallel(cpu, wide, InputElements::Half(*format, to));
                }
                work(wide);
                let (to, from, format) = (DisjointSlices::new(to), &*wide, *format);
                cpu.run_over_rows(from.len(), 1, |r| {
                    // SAFETY: each task writes a different range.
                    round_to_half(cpu.instruction_set, format, unsafe { to.slice_mut(r.clone()) }, &from[r]);
                });
            }
        }
    }
}

/// Elements of an op's output that a task writes as `f32`: the `f32` output itself, or a temporary
/// `f32` copy of a 16-bit output. Dropping a copy rounds its elements to 16 bits and writes them to
/// the output.
pub(crate) enum F32Output<'a> {
    Borrowed(&'a mut [f32]),
    Converted { instruction_set: InstructionSet, format: HalfFormat, wide: ScratchBuf<'a>, to: &'a mut [u16] },
}

impl Deref for F32Output<'_> {
    type Target = [f32];
    #[inline(always)]
    fn deref(&self) -> &[f32] {
        match self {
            F32Output::Borrowed(x) => x,
            F32Output::Converted { wide, to, .. } => &wide[..to.len()],
        }
    }
}

impl DerefMut for F32Output<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            F32Output::Borrowed(x) => x,
            F32Output::Converted { wide, to, .. } => &mut wide[..to.len()],
        }
    }
}

impl F32Output<'_> {
    /// Rounds the `f32` values that a task has written to a 16-bit output immediately, instead of
    /// when this object is dropped. The task then continues with the rounded values.
    pub(crate) fn round_now(&mut self) {
        if let F32Output::Converted { instruction_set, format, wide, to } = self {
            round_to_half(*instruction_set, *format, to, &wide[..to.len()]);
            widen_to_f32(*instruction_set, *format, &mut wide[..to.len()], to);
        }
    }
}

impl Drop for F32Output<'_> {
    fn drop(&mut self) {
        if let F32Output::Converted { instruction_set, format, wide, to } = self {
            round_to_half(*instruction_set, *format, to, &wide[..to.len()]);
        }
    }
}

/// Converts `from` to `f32` on all threads, and writes the numbers to `to`.
fn widen_in_parallel(cpu: &Cpu, to: &mut [f32], from: InputElements) {
    let parts = DisjointSlices::new(to);
    cpu.run_over_rows(from.len(), 1, |r| {
        // SAFETY: each task writes a different range.
        from.slice(r.clone()).copy_to_f32(cpu, unsafe { parts.slice_mut(r) });
    });
}

impl Cpu {
    /// Wraps the buffer `v`, with elements of any type, as the output of an op whose parallel tasks
    /// run on this CPU backend.
    pub(super) fn as_output<'a>(&'a self, v: ViewMut<'a>) -> OutputElements<'a> {
        OutputElements::new(self, v)
    }

    /// Returns the elements of `x` as `f32`, without a copy if `x` is `f32`, and otherwise as a
    /// converted copy in scratch memory.
    pub(super) fn to_f32<'a>(&'a self, x: View<'a>) -> F32Input<'a> {
        InputElements::from(x).all_to_f32(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bits of the 16-bit number that is nearest to `x`, ties to even. The candidates
    /// are `numbers`, all numbers in rising order with their bits.
    fn find_nearest_half_bits(x: f32, numbers: &[(f64, u16)]) -> u16 {
        let x = f64::from(x);
        let i = numbers.partition_point(|(v, _)| *v < x);
        let above = numbers.get(i);
        let below = i.checked_sub(1).and_then(|i| numbers.get(i));
        match (below, above) {
            (Some(b), Some(a)) => match (x - b.0).total_cmp(&(a.0 - x)) {
                std::cmp::Ordering::Less => b.1,
                std::cmp::Ordering::Greater => a.1,
                std::cmp::Ordering::Equal if b.1 & 1 == 0 => b.1,
                std::cmp::Ordering::Equal => a.1,
            },
            (Some(b), None) => b.1,
            (None, Some(a)) => a.1,
            (None, None) => unreachable!("`numbers` is not empty"),
        }
    }

    /// Returns the value of a 16-bit number by the definition of its format. The format has
    /// `exponent` bits of exponent and `mantissa` bits of mantissa. Infinity counts as the number
    /// after the largest.
    fn decode_by_definition(x: u16, exponent: u32, mantissa: u32) -> f64 {
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

    /// Asserts that conversions between `f32` and a 16-bit format match the definition of the
    /// format, for every 16-bit number and for many `f32` numbers.
    fn assert_conversions_match_definition(
        format: HalfFormat,
        exponent: u32,
        mantissa: u32,
        to: fn(f32) -> u16,
        widened: fn(u16) -> f32,
    ) {
        let inf = ((1u16 << exponent) - 1) << mantissa;
        // positive numbers up to infinity, which counts as the number after the largest
        let numbers: Vec<(f64, u16)> =
            (0..=inf).map(|x| (decode_by_definition(x, exponent, mantissa), x)).collect();
        for x in 0..=u16::MAX {
            let wide = widened(x);
            match x & 0x7fff {
                m if m > inf => assert!(wide.is_nan() && widened(to(wide)).is_nan(), "{format:?} {x:#x}"),
                m if m == inf => assert_eq!(wide.is_infinite(), to(wide) == x),
                _ => {
                    assert_eq!(
                        f64::from(wide),
                        decode_by_definition(x, exponent, mantissa),
                        "{format:?} {x:#x}"
                    );
                    assert_eq!(to(wide), x, "{format:?} {x:#x} is rounded to itself");
                }
            }
        }
        let mut bits = 0x1234_5678u32;
        for i in 0..200_000u32 {
            bits = bits.wrapping_mul(0x9E37_79B1).wrapping_add(i) ^ (bits >> 15);
            // random numbers, midpoints of neighbouring 16-bit numbers, and the midpoints'
            // neighbours
            let half = numbers[(bits as usize) % (numbers.len() - 1)];
            let next = numbers[(bits as usize) % (numbers.len() - 1) + 1];
            let middle = ((half.0 + next.0) / 2.0) as f32;
            let near = [f32::from_bits(middle.to_bits() + 1), f32::from_bits(middle.to_bits().max(1) - 1)];
            let some = f32::from_bits(bits & 0x7fff_ffff);
            for x in [middle, near[0], near[1], some].into_iter().filter(|x| x.is_finite()) {
                let beyond = f64::from(x) > numbers[numbers.len() - 1].0;
                let expected = if beyond { inf } else { find_nearest_half_bits(x, &numbers) };
                assert_eq!(to(x), expected, "{format:?} {x:e} ({:#x})", x.to_bits());
                assert_eq!(to(-x), expected | 0x8000, "{format:?} {:e}", -x);
            }
        }
    }

    #[test]
    fn bf16_rounds_to_the_nearest_even() {
        assert_conversions_match_definition(HalfFormat::Bf16, 8, 7, f32_to_bf16, bf16_to_f32);
    }

    #[test]
    fn f16_rounds_to_the_nearest_even() {
        assert_conversions_match_definition(HalfFormat::F16, 5, 10, f32_to_f16, f16_to_f32);
    }

    #[test]
    fn all_instruction_sets_round_to_the_same_bits() {
        let x: Vec<f32> = (0..40_001u32).map(|i| f32::from_bits(i.wrapping_mul(0x9E37_79B1))).collect();
        for format in [HalfFormat::Bf16, HalfFormat::F16] {
            let scalar = |x: &f32| if format == HalfFormat::Bf16 { f32_to_bf16(*x) } else { f32_to_f16(*x) };
            let expected: Vec<u16> = x.iter().map(scalar).collect();
            for instruction_set in InstructionSet::list_available() {
                let (mut rounded, mut wide) = (vec![0u16; x.len()], vec![0f32; x.len()]);
                round_to_half(instruction_set, format, &mut rounded, &x);
                assert!(rounded == expected, "{format:?} {}", instruction_set.name());
                widen_to_f32(instruction_set, format, &mut wide, &rounded);
                let widened = InputElements::Half(format, &rounded);
                assert!((0..x.len()).all(|i| wide[i].to_bits() == widened.get(i).to_bits()), "{format:?}");
            }
        }
    }
}
