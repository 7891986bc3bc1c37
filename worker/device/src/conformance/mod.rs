//! Conformance of a GPU's operations with the CPU backend.
//!
//! Every operation runs on both backends, with odd, tiny and large shapes, in every element type,
//! on buffers with any alignment, and with outputs that are filled with NaN beforehand. Tests run
//! the comparison on an emulated GPU, and `launch gpu-check` runs it on a real one.
mod cases;
mod error;
mod expert_cases;
mod fixed_cases;
mod fp8_cases;
mod random_cases;

pub use error::ConformanceError;

use crate::{Buf, Cpu, Cuda, Dtype, Ops, View, ViewMut, ops::AttentionShape, storage::Storage};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Result of comparing one family of operations on the GPU with the CPU.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyReport {
    /// Name of the family, such as `classifier`.
    pub family: &'static str,
    /// Number of shapes that were compared.
    pub cases: usize,
    /// The largest errors of all cases that passed.
    pub max_errors: MaxErrors,
    /// The failure that ended the comparison of the family; `None` if every case passed.
    pub failure: Option<ConformanceError>,
}

/// The largest errors of a family for each element type, relative to the largest expected value of
/// the buffer.
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

/// Result of one conformance case: its largest errors, or its failure.
type CaseResult = Result<MaxErrors, ConformanceError>;

/// The runs of each conformance case: element type, offset of the buffers in their memory (in
/// elements), and tolerated relative error.
///
/// The errors stem from rounding: operands are rounded once before an operation, and results once
/// after the operation. Values that the forward pass keeps for the backward pass are also rounded
/// once.
const RUN_TOLERANCES: [(Dtype, usize, f64); 5] = [
    (Dtype::Bf16, 0, 2e-2),
    (Dtype::F32, 0, 1e-5),
    (Dtype::F32, 3, 1e-5),
    (Dtype::Bf16, 1, 2e-2),
    (Dtype::F16, 0, 3e-3),
];

/// Compares every family of operations on the GPU with the CPU. Each family runs on `rounds` random
/// shapes. Further shapes select the kernels' special cases. `seed` determines shapes and values.
pub fn compare_ops_with_cpu(cuda: &Cuda, seed: u64, rounds: usize) -> Vec<FamilyReport> {
    let backends = Backends { cpu: Cpu::new(1), cuda, runs: &RUN_TOLERANCES };
    let backends = &backends;
    let mut reports: Vec<FamilyReport> = random_cases::FAMILIES
        .iter()
        .enumerate()
        .map(|(i, (family, compare))| {
            let mut rng = CaseRng::new(seed ^ ((i as u64 + 1) << 32));
            run_family(family, (0..rounds).map(|_| compare(backends, &mut rng)))
        })
        .collect();
    reports.push(run_family(
        "boundary shapes",
        fixed_cases::list_boundary_cases(backends)
            .into_iter()
            .chain(fixed_cases::list_tiled_attention_cases(backends))
            .chain(fixed_cases::list_vectorised_cases(backends))
            .map(|compare| compare()),
    ));
    if cuda.properties().has_fp8() {
        let mut rng = CaseRng::new(seed ^ (99 << 32));
        let matmul_results = (0..rounds)
            .map(|_| random_cases::compare_random_fp8_matmuls(backends, &mut rng))
            .collect::<Vec<_>>();
        reports.push(run_family(
            "fp8 matmul",
            matmul_results.into_iter().chain([fp8_cases::compare_operand_rounding(backends)]),
        ));
    }
    reports
}

/// Compares attention that cuDNN computes ([`Cuda::set_attention_backend`]) with the CPU, on
/// `rounds` random shapes, on shapes of usual models, and with sliding windows.
pub fn compare_cudnn_attention_with_cpu(cuda: &Cuda, seed: u64, rounds: usize) -> FamilyReport {
    let types = [RUN_TOLERANCES[0], (Dtype::Bf16, 8, RUN_TOLERANCES[0].2)];
    let backends = Backends { cpu: Cpu::new(1), cuda, runs: &types };
    let mut rng = CaseRng::new(seed ^ (77 << 32));
    let mut shapes: Vec<(usize, AttentionShape)> = (0..rounds)
        .map(|_| {
            let (kv_heads, t) = (rng.draw_in_range(1, 4), rng.draw_in_range(2, 200));
            let shape = AttentionShape::new(
                rng.draw_in_range(1, 4),
                t,
                kv_heads * rng.draw_in_range(1, 4),
                kv_heads,
                8 * rng.draw_in_range(1, 17),
            );
            (if rng.draw_below(2) == 0 { usize::MAX } else { rng.draw_in_range(1, t) }, shape)
        })
        .collect();
    let shape = AttentionShape::new;
    shapes.extend([
        (usize::MAX, shape(2, 256, 4, 4, 64)),
        (usize::MAX, shape(1, 300, 7, 1, 64)),
        (usize::MAX, shape(1, 130, 4, 1, 128)),
        (100, AttentionShape { scale: 0.3, ..shape(1, 260, 2, 1, 128) }),
    ]);
    let cases = shapes.into_iter().enumerate();
    run_family(
        "attention by cuDNN",
        cases.map(|(i, (window, shape))| {
            cases::compare_windowed_attention(&backends, i as u64, window, shape)
        }),
    )
}

/// Runs the cases of a family until one fails, and returns the report. A panic of a case is the
/// family's failure.
fn run_family(family: &'static str, cases: impl Iterator<Item = CaseResult>) -> FamilyReport {
    let mut report = FamilyReport { family, cases: 0, max_errors: MaxErrors::default(), failure: None };
    let mut cases = cases;
    loop {
        match catch_unwind(AssertUnwindSafe(|| cases.next())) {
            Ok(None) => return report,
            Ok(Some(Ok(errors))) => report.max_errors += errors,
            Ok(Some(Err(error))) => report.failure = Some(error),
            Err(panic) => report.failure = Some(ConformanceError::from_panic(panic.as_ref())),
        }
        report.cases += 1;
        if report.failure.is_some() {
            return report;
        }
    }
}

/// The initial values of a buffer that a case passes to its operations.
struct CaseBuffer {
    values: Vec<f32>,
    /// True if the buffer has the element type of the run. False if the buffer is always `f32`.
    varies_type: bool,
}

/// Creates the values of a buffer that has the element type of the run, such as activations or
/// weights.
fn make_typed_buffer(values: Vec<f32>) -> CaseBuffer {
    CaseBuffer { values, varies_type: true }
}

/// Creates the values of a buffer that is always `f32`, such as statistics, weight gradients or
/// optimizer states.
fn make_f32_buffer(values: Vec<f32>) -> CaseBuffer {
    CaseBuffer { values, varies_type: false }
}

/// Returns `len` NaN as the content of an output, so that elements that an operation does not write
/// are detected.
fn make_nan_values(len: usize) -> Vec<f32> {
    vec![f32::NAN; len]
}

/// A GPU buffer whose elements begin `offset` elements after the start of the allocation.
struct OffsetBuf {
    buf: Buf,
    offset: usize,
}

impl OffsetBuf {
    fn view(&self) -> View<'_> {
        self.buf.view().slice(self.offset..self.buf.len())
    }
    fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.buf.len();
        self.buf.view_mut().slice(self.offset..len)
    }
}

/// The CPU and GPU backends that are compared, and the runs of each case.
struct Backends<'a> {
    cpu: Cpu,
    cuda: &'a Cuda,
    /// Element type, offset in memory and tolerated error of each run, as in [`RUN_TOLERANCES`].
    runs: &'a [(Dtype, usize, f64)],
}

impl Backends<'_> {
    /// Runs operations on both backends and compares all buffers afterwards. The CPU computes in
    /// `f32` on values that were rounded to the GPU's element type. `case` names the case in
    /// errors.
    fn compare(
        &self,
        case: &str,
        buffers: &[CaseBuffer],
        run: impl Fn(&dyn Ops, &mut [OffsetBuf]),
    ) -> CaseResult {
        self.compare_with_min_tolerance(0.0, case, buffers, run)
    }

    /// Compares the backends with [`Backends::compare`], but tolerates relative errors up to at
    /// least `min_tolerance`.
    fn compare_with_min_tolerance(
        &self,
        min_tolerance: f64,
        case: &str,
        buffers: &[CaseBuffer],
        run: impl Fn(&dyn Ops, &mut [OffsetBuf]),
    ) -> CaseResult {
        let mut errors = MaxErrors::default();
        for (dtype, offset, tolerance) in self.runs.iter().map(|(d, s, t)| (*d, *s, t.max(min_tolerance))) {
            let rounded: Vec<Vec<f32>> = buffers
                .iter()
                .map(|g| if g.varies_type { self.round_on_gpu(dtype, &g.values) } else { g.values.clone() })
                .collect();
            let mut cpu: Vec<OffsetBuf> =
                rounded.iter().map(|v| OffsetBuf { buf: Buf::from_slice(v), offset: 0 }).collect();
            run(&self.cpu, &mut cpu);
            let mut gpu: Vec<OffsetBuf> = rounded
                .iter()
                .zip(buffers)
                .map(|(v, g)| self.copy_to_gpu(if g.varies_type { dtype } else { Dtype::F32 }, v, offset))
                .collect();
            run(self.cuda, &mut gpu);
            for (i, (expected, actual)) in cpu.iter().zip(&gpu).enumerate() {
                let error =
                    compute_relative_error(&self.copy_to_host_as_f32(actual.view()), expected.view().host());
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

    /// Copies values to GPU memory, converted to `dtype`, `offset` elements after the start of an
    /// allocation.
    fn copy_to_gpu(&self, dtype: Dtype, values: &[f32], offset: usize) -> OffsetBuf {
        let padded: Vec<f32> = std::iter::repeat_n(7.0, offset).chain(values.iter().copied()).collect();
        let from = self.cuda.clone_to_device((&padded[..]).into());
        let mut buf = self.cuda.zeroed(dtype, padded.len());
        self.cuda.cast(buf.view_mut(), from.view());
        OffsetBuf { buf, offset }
    }

    /// Copies a GPU buffer to the host as `f32`.
    fn copy_to_host_as_f32(&self, from: View) -> Vec<f32> {
        let mut wide = self.cuda.zeroed(Dtype::F32, from.len());
        self.cuda.cast(wide.view_mut(), from);
        self.cuda.clone_to_host(wide.view()).host().to_vec()
    }

    /// Returns `values` as `f32` after the GPU has rounded them to `dtype`.
    fn round_on_gpu(&self, dtype: Dtype, values: &[f32]) -> Vec<f32> {
        self.copy_to_host_as_f32(self.copy_to_gpu(dtype, values, 0).view())
    }
}

/// Returns the largest difference between two elements, relative to the largest expected value or
/// to 1e-3 if that is larger. The result is infinite if only one of two values is NaN or if the
/// lengths differ.
fn compute_relative_error(actual: &[f32], expected: &[f32]) -> f64 {
    let magnitude = expected.iter().fold(1e-3f64, |m, w| m.max(f64::from(w.abs())));
    let pairs = actual.iter().zip(expected);
    let differences = pairs.map(|(g, w)| match (g.is_nan(), w.is_nan()) {
        (true, true) => 0.0,
        (false, false) => (f64::from(*g) - f64::from(*w)).abs() / magnitude,
        _ => f64::INFINITY,
    });
    if actual.len() == expected.len() { differences.fold(0.0, f64::max) } else { f64::INFINITY }
}

/// Deterministic random number generator (xorshift64*) for the values and shapes of conformance
/// cases.
struct CaseRng(u64);

impl CaseRng {
    fn new(seed: u64) -> Self {
        CaseRng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns the next random number, which has 48 bits.
    fn draw_number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// Returns a random number in `0..n`.
    fn draw_below(&mut self, n: usize) -> usize {
        (self.draw_number() % n as u64) as usize
    }

    /// Returns a random number in `first..end`.
    fn draw_in_range(&mut self, first: usize, end: usize) -> usize {
        first + self.draw_below(end - first)
    }

    /// Returns a vector of `len` random numbers, uniform in (−1, 1).
    fn draw_vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (self.draw_number() % (1 << 24)) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    /// Returns the position at which the document of each token starts, for `b` sequences of `t`
    /// tokens and documents with a mean length of about `mean`.
    fn draw_document_starts(&mut self, b: usize, t: usize, mean: usize) -> Vec<u32> {
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
    use crate::storage::DeviceError;
    use diagnostic::{Diagnostic, codes::device as codes};

    #[test]
    fn differences_and_one_sided_nans_are_detected() {
        assert_eq!(compute_relative_error(&[1.0, f32::NAN], &[1.0, f32::NAN]), 0.0);
        assert!((compute_relative_error(&[1.0, 2.5], &[1.0, 2.0]) - 0.25).abs() < 1e-9);
        for wrong in [&[f32::NAN, 1.0][..], &[1.0], &[1.0, f32::INFINITY]] {
            assert_eq!(compute_relative_error(wrong, &[1.0, 1.0]), f64::INFINITY, "{wrong:?}");
        }
        assert_eq!(compute_relative_error(&[1.0, 1.0], &[f32::NAN, 1.0]), f64::INFINITY);
    }

    #[test]
    fn a_family_ends_with_its_first_failure() {
        let failure = ConformanceError::SumsDiffer { case: "add".to_owned(), gpu: vec![1.0], cpu: vec![2.0] };
        let passed = MaxErrors { f32: 1e-6, ..MaxErrors::default() };
        let report = run_family("ops", [Ok(passed), Err(failure.clone()), Ok(passed)].into_iter());
        assert_eq!((report.cases, report.max_errors.f32, report.failure), (2, 1e-6, Some(failure)));
    }

    #[test]
    fn a_panic_of_an_operation_ends_its_family() {
        let lost = DeviceError(Diagnostic::error(codes::CUDA_CALL_FAILED, "GPU 1 is lost"));
        let payload = lost.clone();
        let cases = [1].into_iter().map(|_| std::panic::panic_any(payload.clone()));
        let report = run_family("ops", cases);
        assert_eq!(report.failure, Some(ConformanceError::OpFailed(lost)));
        let report = run_family("ops", [1].into_iter().map(|n: u32| panic!("bug {n}")));
        assert_eq!(report.failure.map(|error| error.code()), Some(diagnostic::codes::run::INTERNAL));
    }
}
