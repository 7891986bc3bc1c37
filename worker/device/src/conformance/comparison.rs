//! [`Backends`]: runs ops with equal inputs on the CPU and on the GPU, and compares the contents of
//! their buffers afterwards.
use super::error::ConformanceError;
use crate::ops::{Ops, VectorOps, WriteMode};
use crate::{Buf, Cpu, Cuda, Dtype, View, ViewMut, storage::Storage};

/// The largest relative differences between the results of a family of ops (such as norms) on GPU
/// and CPU, for each of `f32`, bf16 and f16. Errors are relative to the largest expected value of a
/// buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MaxErrors {
    /// Largest error of cases in `f32`.
    pub f32: f64,
    /// Largest error of cases in bf16.
    pub bf16: f64,
    /// Largest error of cases in f16.
    pub f16: f64,
}

impl std::ops::AddAssign for MaxErrors {
    fn add_assign(&mut self, o: MaxErrors) {
        self.f32 = self.f32.max(o.f32);
        self.bf16 = self.bf16.max(o.bf16);
        self.f16 = self.f16.max(o.f16);
    }
}

/// The result of comparing an op on the GPU with the CPU on one shape: the largest errors, or why
/// the comparison failed.
pub(super) type CaseResult = Result<MaxErrors, ConformanceError>;

/// The values with which one input or output buffer of an op is filled, on the CPU and on the GPU,
/// before the op runs.
pub(super) struct CaseBufferValues {
    values: Vec<f32>,
    /// True if the buffer has the element type under test. False if the buffer is always `f32`.
    varies_type: bool,
}

/// Describes a buffer whose elements have the type under test, such as activations or weights.
pub(super) fn make_buffer_of_tested_type(values: Vec<f32>) -> CaseBufferValues {
    CaseBufferValues { values, varies_type: true }
}

/// Wraps the initial values of a buffer, such as an optimizer state, that stays `f32` when an op is
/// compared in other element types.
pub(super) fn make_f32_buffer(values: Vec<f32>) -> CaseBufferValues {
    CaseBufferValues { values, varies_type: false }
}

/// Returns `len` NaNs, which fill an output buffer before an op runs, to detect elements that the
/// op does not write.
pub(super) fn make_nan_values(len: usize) -> Vec<f32> {
    vec![f32::NAN; len]
}

/// A buffer of a compared op whose elements begin `offset` elements after the start of the
/// allocation, to test unaligned addresses.
pub(super) struct OffsetBuf {
    pub(super) buf: Buf,
    offset: usize,
}

impl OffsetBuf {
    /// Wraps a buffer whose first element is at the start of its allocation (offset 0).
    pub(super) fn aligned(buf: Buf) -> Self {
        OffsetBuf { buf, offset: 0 }
    }
    pub(super) fn view(&self) -> View<'_> {
        self.buf.view().slice(self.offset..self.buf.len())
    }
    pub(super) fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.buf.len();
        self.buf.view_mut().slice(self.offset..len)
    }
}

/// The CPU backend and the GPU backend under test, and the element types, buffer offsets and
/// tolerances with which ops are compared.
pub(super) struct Backends<'a> {
    pub(super) cpu: Cpu,
    pub(super) cuda: &'a Cuda,
    /// Element type, offset in memory and tolerated error of each run, as in
    /// [`super::RUN_SETTINGS`].
    pub(super) runs: &'a [(Dtype, usize, f64)],
}

impl Backends<'_> {
    /// Calls `run` with the CPU backend and with the GPU backend, and then compares the contents of
    /// all buffers. The CPU computes in `f32` on values that were rounded to the GPU's element
    /// type. `case` names the case in errors.
    pub(super) fn compare<const N: usize>(
        &self,
        case: &str,
        buffers: [CaseBufferValues; N],
        run: impl Fn(&dyn Ops, [&mut OffsetBuf; N]),
    ) -> CaseResult {
        self.compare_with_min_tolerance(0.0, case, buffers, run)
    }

    /// Calls `run` with the CPU backend and with the GPU backend, and compares all buffers with a
    /// relative tolerance of at least `min_tolerance`.
    pub(super) fn compare_with_min_tolerance<const N: usize>(
        &self,
        min_tolerance: f64,
        case: &str,
        buffers: [CaseBufferValues; N],
        run: impl Fn(&dyn Ops, [&mut OffsetBuf; N]),
    ) -> CaseResult {
        let mut errors = MaxErrors::default();
        for (dtype, offset, tolerance) in self.runs.iter().map(|(d, s, t)| (*d, *s, t.max(min_tolerance))) {
            let buffers = buffers.each_ref().map(|buffer| match buffer.varies_type {
                true => (dtype, self.round_on_gpu(dtype, &buffer.values)),
                false => (Dtype::F32, buffer.values.clone()),
            });
            let mut cpu =
                buffers.each_ref().map(|(_, values)| OffsetBuf { buf: Buf::from_slice(values), offset: 0 });
            run(&self.cpu, cpu.each_mut());
            let mut gpu = buffers.map(|(dtype, values)| self.copy_to_gpu(dtype, &values, offset));
            run(self.cuda, gpu.each_mut());
            for (i, (expected, actual)) in cpu.iter().zip(&gpu).enumerate() {
                let error = compute_relative_error(
                    &self.copy_to_host_as_f32(actual.view()),
                    expected.view().host_slice(),
                );
                if error > tolerance || error.is_nan() {
                    return Err(ConformanceError::BufferDiffers {
                        case: case.to_owned(),
                        dtype,
                        offset,
                        buffer: i,
                        error,
                        tolerance,
                    });
                }
                match dtype {
                    Dtype::F32 => errors.f32 = errors.f32.max(error),
                    Dtype::Bf16 => errors.bf16 = errors.bf16.max(error),
                    Dtype::F16 => errors.f16 = errors.f16.max(error),
                }
            }
        }
        Ok(errors)
    }

    /// Copies `values` to GPU memory, converted to `dtype`, at an offset of `offset` elements from
    /// the start of a new allocation.
    pub(super) fn copy_to_gpu(&self, dtype: Dtype, values: &[f32], offset: usize) -> OffsetBuf {
        let padded: Vec<f32> = std::iter::repeat_n(7.0, offset).chain(values.iter().copied()).collect();
        let from = self.cuda.clone_to_device((&padded[..]).into());
        let mut buf = self.cuda.zeroed(dtype, padded.len());
        self.cuda.cast(buf.view_mut(), from.view());
        OffsetBuf { buf, offset }
    }

    /// Copies elements of any type from GPU memory to the host, converted to `f32`.
    pub(super) fn copy_to_host_as_f32(&self, from: View) -> Vec<f32> {
        let mut wide = self.cuda.zeroed(Dtype::F32, from.len());
        self.cuda.cast(wide.view_mut(), from);
        self.cuda.clone_to_host(wide.view()).host_slice().to_vec()
    }

    /// Rounds `values` to `dtype` on the GPU, and returns them as `f32`.
    pub(super) fn round_on_gpu(&self, dtype: Dtype, values: &[f32]) -> Vec<f32> {
        self.copy_to_host_as_f32(self.copy_to_gpu(dtype, values, 0).view())
    }
}

/// Returns the largest difference between elements of `actual` and `expected`, divided by the
/// largest magnitude in `expected` (at least 1e-3). The result is infinite if only one of two
/// values is NaN or if the lengths differ.
pub(super) fn compute_relative_error(actual: &[f32], expected: &[f32]) -> f64 {
    let magnitude = expected.iter().fold(1e-3f64, |m, w| m.max(f64::from(w.abs())));
    let pairs = actual.iter().zip(expected);
    let differences = pairs.map(|(g, w)| match (g.is_nan(), w.is_nan()) {
        (true, true) => 0.0,
        (false, false) => (f64::from(*g) - f64::from(*w)).abs() / magnitude,
        _ => f64::INFINITY,
    });
    if actual.len() == expected.len() { differences.fold(0.0, f64::max) } else { f64::INFINITY }
}

/// Deterministic random number generator (xorshift64*) that chooses shapes and input values for the
/// comparison of GPU and CPU.
pub(super) struct CaseRng(u64);

impl CaseRng {
    pub(super) fn new(seed: u64) -> Self {
        CaseRng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns the next random number, which has 48 bits.
    pub(super) fn draw_48_bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// Returns a random number in `0..n`.
    pub(super) fn draw_below(&mut self, n: usize) -> usize {
        (self.draw_48_bits() % n as u64) as usize
    }

    /// Returns a random number in `first..end`.
    pub(super) fn draw_in_range(&mut self, first: usize, end: usize) -> usize {
        first + self.draw_below(end - first)
    }

    /// Returns a vector of `len` random numbers, uniform in (−1, 1).
    pub(super) fn draw_vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (self.draw_48_bits() % (1 << 24)) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    /// Returns `len` initial values for an op's output: NaN if the op overwrites the output, and
    /// random numbers if it adds to the output.
    pub(super) fn draw_initial_output(&mut self, write: WriteMode, len: usize) -> Vec<f32> {
        match write {
            WriteMode::Overwrite => make_nan_values(len),
            WriteMode::Accumulate => self.draw_vector(len),
        }
    }

    /// Returns a random seed, and for each number n in `ends` a random dimension from 1 to n − 1.
    pub(super) fn draw_seed_and_dims<const N: usize>(&mut self, ends: [usize; N]) -> (u64, [usize; N]) {
        (self.draw_48_bits(), ends.map(|end| self.draw_in_range(1, end)))
    }

    /// Divides `b` sequences of `t` tokens randomly into documents, and returns for each token the
    /// position at which the token's document starts. Documents have a mean length of about `mean`.
    pub(super) fn draw_document_starts(&mut self, b: usize, t: usize, mean: usize) -> Vec<u32> {
        let mut starts = Vec::new();
        for _ in 0..b {
            let mut start = 0;
            for q in 0..t {
                if q > 0 && self.draw_below(mean) == 0 {
                    start = q;
                }
                starts.push(start as u32);
            }
        }
        starts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_and_one_sided_nans_are_detected() {
        assert_eq!(compute_relative_error(&[1.0, f32::NAN], &[1.0, f32::NAN]), 0.0);
        assert!((compute_relative_error(&[1.0, 2.5], &[1.0, 2.0]) - 0.25).abs() < 1e-9);
        for wrong in [&[f32::NAN, 1.0][..], &[1.0], &[1.0, f32::INFINITY]] {
            assert_eq!(compute_relative_error(wrong, &[1.0, 1.0]), f64::INFINITY, "{wrong:?}");
        }
        assert_eq!(compute_relative_error(&[1.0, 1.0], &[f32::NAN, 1.0]), f64::INFINITY);
    }
}
