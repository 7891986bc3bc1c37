//! Conformance of a GPU's operations with the CPU backend.
//!
//! Every operation runs on both backends, with odd, tiny and large shapes, in every element type,
//! on buffers with any alignment, and with outputs that are filled with NaN beforehand. Tests run
//! the comparison on an emulated GPU, and `launch gpu-check` runs it on a real one.
mod cases;
mod error;
mod fp8_cases;

pub use error::ConformanceError;

use crate::{
    Buf, Cpu, Cuda, Dtype, Ops, View, ViewMut,
    ops::{AttentionDropout, AttentionShape},
    storage::Storage,
};
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
    type Case<'a> = Box<dyn Fn(&mut CaseRng) -> CaseResult + 'a>;
    let backends = &backends;
    let random: [(&str, Case); 9] = [
        (
            "matmul",
            Box::new(|rng| {
                cases::compare_matmuls(
                    backends,
                    rng.draw_number(),
                    rng.draw_in_range(1, 40),
                    rng.draw_in_range(1, 40),
                    rng.draw_in_range(1, 40),
                )
            }),
        ),
        (
            "norms, bias",
            Box::new(|rng| {
                cases::compare_norms(
                    backends,
                    rng.draw_number(),
                    rng.draw_in_range(1, 150),
                    rng.draw_in_range(1, 90),
                )
            }),
        ),
        (
            "norms of heads, RoPE",
            Box::new(|rng| {
                cases::compare_head_norm_and_rope(
                    backends,
                    rng.draw_number(),
                    rng.draw_in_range(1, 40),
                    rng.draw_in_range(1, 5),
                    rng.draw_in_range(1, 40),
                    rng.draw_in_range(1, 3),
                )
            }),
        ),
        (
            "activations",
            Box::new(|rng| {
                cases::compare_activations(
                    backends,
                    rng.draw_number(),
                    rng.draw_in_range(1, 20),
                    rng.draw_in_range(1, 300),
                )
            }),
        ),
        ("attention", Box::new(|rng| compare_random_attention(backends, rng))),
        (
            "classifier",
            Box::new(|rng| {
                let cap = (rng.draw_below(2) == 0).then_some(3.0);
                cases::compare_classifier(
                    backends,
                    rng.draw_number(),
                    rng.draw_in_range(1, 40),
                    rng.draw_in_range(1, 40),
                    rng.draw_in_range(1, 200),
                    cap,
                )
            }),
        ),
        ("experts", Box::new(|rng| compare_random_expert_ops(backends, rng))),
        (
            "embedding",
            Box::new(|rng| {
                cases::compare_embedding(
                    backends,
                    rng.draw_number(),
                    rng.draw_in_range(1, 120),
                    rng.draw_in_range(1, 70),
                    rng.draw_in_range(1, 50),
                )
            }),
        ),
        (
            "vectors, optimizers",
            Box::new(|rng| {
                cases::compare_vectors_and_optimizers(backends, rng.draw_number(), rng.draw_in_range(1, 9000))
            }),
        ),
    ];
    let mut reports: Vec<FamilyReport> = random
        .iter()
        .enumerate()
        .map(|(i, (family, case))| {
            let mut rng = CaseRng::new(seed ^ ((i as u64 + 1) << 32));
            run_family(family, (0..rounds).map(|_| case(&mut rng)))
        })
        .collect();
    reports.push(run_family(
        "boundary shapes",
        list_boundary_cases(backends)
            .into_iter()
            .chain(list_tiled_attention_cases(backends))
            .chain(list_vectorised_cases(backends))
            .map(|case| case()),
    ));
    if cuda.properties().has_fp8() {
        let mut rng = CaseRng::new(seed ^ (99 << 32));
        let matmul_results = (0..rounds)
            .map(|_| {
                fp8_cases::compare_matmuls(
                    backends,
                    rng.draw_number(),
                    rng.draw_in_range(1, 70),
                    16 * rng.draw_in_range(1, 4),
                    rng.draw_in_range(1, 50),
                )
            })
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

/// Compares attention on the GPU with attention on the CPU for one random shape. Some shapes also
/// use softcap or dropout.
fn compare_random_attention(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let kv_heads = rng.draw_in_range(1, 3);
    let shape = AttentionShape::new(
        rng.draw_in_range(1, 3),
        rng.draw_in_range(1, 80),
        kv_heads * rng.draw_in_range(1, 3),
        kv_heads,
        rng.draw_in_range(1, 40),
    );
    let softcap = shape.t.is_multiple_of(2).then_some(2.0);
    let dropout = if shape.t.is_multiple_of(3) { derive_dropout(rng.draw_number()) } else { None };
    cases::compare_document_attention(
        backends,
        rng.draw_number(),
        AttentionShape { softcap, dropout, ..shape },
    )
}

/// Creates the attention dropout of a case with a probability of 0.3. Its key and first sequence
/// (below 2⁴²) are taken from the bits of `first`.
fn derive_dropout(first: u64) -> Option<AttentionDropout> {
    Some(AttentionDropout { key: [first as u32, 5], probability: 0.3, first_sequence: first >> 22 })
}

/// Compares the router, the row ops of experts and grouped matmuls of random shapes on the GPU with
/// the CPU.
fn compare_random_expert_ops(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let count = rng.draw_in_range(1, 70);
    let mut errors = cases::compare_expert_ops(
        backends,
        rng.draw_number(),
        rng.draw_in_range(1, 30),
        count,
        rng.draw_in_range(1, 5).min(count),
        rng.draw_in_range(1, 50),
    )?;
    let sizes: Vec<usize> = (0..rng.draw_in_range(1, 5)).map(|_| rng.draw_below(9)).collect();
    errors += cases::compare_grouped_matmul(
        backends,
        rng.draw_number(),
        &sizes,
        rng.draw_in_range(1, 30),
        rng.draw_in_range(1, 30),
    )?;
    Ok(errors)
}

/// Returns conformance cases at the limits of kernels: rows longer than a thread block, the widest
/// heads, documents that cross tiles, and more blocks than one launch has.
fn list_boundary_cases<'a>(backends: &'a Backends) -> Vec<Box<dyn Fn() -> CaseResult + 'a>> {
    // The tiles of the backward kernel take 137 KiB of shared memory for heads of 256 elements.
    // Only data-centre GPUs have that much; others have 99 KiB.
    let widest = if backends.cuda.properties().shared_memory_per_block < 144 << 10 { 176 } else { 256 };
    vec![
        Box::new(move || cases::compare_norms(backends, 1, 2, 1000)),
        Box::new(move || cases::compare_norms(backends, 2, 129, 33)),
        Box::new(move || {
            cases::compare_document_attention(backends, 3, AttentionShape::new(1, 33, 2, 1, widest))
        }),
        Box::new(|| {
            cases::compare_document_attention(
                backends,
                4,
                AttentionShape { scale: 0.7, ..AttentionShape::new(2, 100, 2, 2, 8) },
            )
        }),
        Box::new(move || {
            cases::compare_document_attention(backends, 12, AttentionShape::new(1, 70, 2, 1, 128))
        }),
        Box::new(move || {
            cases::compare_document_attention(backends, 13, AttentionShape::new(1, 130, 2, 2, 96))
        }),
        Box::new(move || {
            let dropout = derive_dropout(u64::MAX);
            cases::compare_document_attention(
                backends,
                15,
                AttentionShape { dropout, ..AttentionShape::new(2, 130, 4, 2, 40) },
            )
        }),
        Box::new(move || {
            let dropout = derive_dropout(1 << 60);
            cases::compare_document_attention(
                backends,
                16,
                AttentionShape { dropout, ..AttentionShape::new(1, 100, 2, 1, widest) },
            )
        }),
        Box::new(move || {
            cases::compare_document_attention(backends, 14, AttentionShape::new(1, 40, 2, 1, 64))
        }),
        Box::new(move || cases::compare_classifier(backends, 5, 130, 3, 700, None)),
        Box::new(move || cases::compare_expert_ops(backends, 6, 3, 1024, 9, 4)),
        Box::new(move || cases::compare_grouped_matmul(backends, 7, &[3, 0, 17, 1], 9, 14)),
        Box::new(move || cases::compare_grouped_matmul(backends, 8, &[0, 0], 4, 4)),
        Box::new(move || cases::compare_embedding(backends, 9, 300, 3, 2)),
        Box::new(move || cases::compare_vectors_and_optimizers(backends, 10, 40_000)),
        Box::new(move || cases::compare_activations(backends, 11, 1, 700)),
    ]
}

/// Returns conformance cases with rows whose length is a multiple of eight, for which kernels load
/// eight elements at once.
///
/// The lengths cover one warp, each thread of a block, several vectors per thread, and rows that do
/// not fit into registers. Further cases have heads of such lengths, and sums over more rows than a
/// block has.
fn list_vectorised_cases<'a>(backends: &'a Backends) -> Vec<Box<dyn Fn() -> CaseResult + 'a>> {
    vec![
        Box::new(move || cases::compare_norms(backends, 40, 3, 8)),
        Box::new(move || cases::compare_norms(backends, 41, 131, 64)),
        Box::new(move || cases::compare_norms(backends, 42, 5, 1016)),
        Box::new(move || cases::compare_norms(backends, 43, 2, 2056)),
        Box::new(move || cases::compare_norms(backends, 44, 2, 8192)),
        Box::new(move || cases::compare_norms(backends, 45, 1, 8200)),
        Box::new(move || cases::compare_head_norm_and_rope(backends, 46, 21, 3, 64, 2)),
        Box::new(move || cases::compare_head_norm_and_rope(backends, 47, 3, 40, 8, 1)),
        Box::new(move || cases::compare_head_norm_and_rope(backends, 48, 2, 1, 264, 3)),
        Box::new(move || cases::compare_activations(backends, 49, 3, 2056)),
        Box::new(move || cases::compare_activations(backends, 50, 17, 8)),
        Box::new(move || cases::compare_classifier(backends, 51, 5, 8, 2088, None)),
        Box::new(move || cases::compare_classifier(backends, 52, 3, 8, 2051, Some(2.0))),
    ]
}

/// Returns conformance cases of attention over several tiles that are entirely, partly or not
/// visible.
///
/// The heads have every size for which a kernel exists and sizes between them. The cases cover
/// groups of 1 to 8 heads, softcap and dropout. With windows of 95 and 79, the mask must hide
/// exactly one position of a chunk.
fn list_tiled_attention_cases<'a>(backends: &'a Backends) -> Vec<Box<dyn Fn() -> CaseResult + 'a>> {
    let no_window = usize::MAX;
    let shape = AttentionShape::new;
    let (softcap, dropout) = (Some(3.0), derive_dropout(1 << 30));
    vec![
        Box::new(move || cases::compare_windowed_attention(backends, 20, no_window, shape(1, 256, 2, 1, 64))),
        Box::new(move || {
            cases::compare_windowed_attention(backends, 21, no_window, shape(1, 290, 1, 1, 128))
        }),
        Box::new(move || cases::compare_windowed_attention(backends, 22, 95, shape(1, 300, 3, 1, 40))),
        Box::new(move || cases::compare_windowed_attention(backends, 23, 79, shape(2, 210, 2, 1, 72))),
        Box::new(move || cases::compare_windowed_attention(backends, 24, 1, shape(1, 150, 8, 1, 16))),
        Box::new(move || cases::compare_document_attention(backends, 25, shape(1, 257, 4, 2, 96))),
        Box::new(move || cases::compare_document_attention(backends, 26, shape(2, 129, 8, 1, 64))),
        Box::new(move || cases::compare_ragged_attention(backends, 27, shape(1, 270, 2, 2, 63))),
        Box::new(move || cases::compare_ragged_attention(backends, 28, shape(1, 200, 2, 1, 127))),
        Box::new(move || {
            cases::compare_windowed_attention(
                backends,
                29,
                no_window,
                AttentionShape { softcap, ..shape(1, 260, 1, 1, 128) },
            )
        }),
        Box::new(move || {
            cases::compare_windowed_attention(
                backends,
                30,
                150,
                AttentionShape { softcap, dropout, ..shape(1, 260, 2, 1, 64) },
            )
        }),
        Box::new(move || {
            cases::compare_ragged_attention(
                backends,
                31,
                AttentionShape { softcap, dropout, ..shape(1, 230, 2, 1, 120) },
            )
        }),
    ]
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
