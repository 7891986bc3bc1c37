//! Checks that the results of a GPU's operations conform to those of the CPU backend.
//!
//! Every operation runs on both backends, with odd, tiny and large shapes, in every element type,
//! on buffers with any alignment, and with outputs that are filled with NaN beforehand. Tests run
//! the comparison on an emulated GPU, and `launch gpu-check` runs it on a real one.
mod cases;
mod comparison;
mod epilogue_cases;
mod error;
mod expert_cases;
mod fixed_cases;
mod fp8_cases;
mod random_cases;
mod realistic_cases;

pub use comparison::MaxErrors;
pub use error::ConformanceError;

use crate::{Cpu, Cuda, Dtype, ops::AttentionShape};
use comparison::{Backends, CaseResult, CaseRng};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of comparing one family of operations (such as norms) on the GPU with the CPU.
#[derive(Clone, Debug, PartialEq)]
pub struct OpFamilyReport {
    /// Name of the family, such as `classifier`.
    pub family: &'static str,
    /// Number of shapes that were compared.
    pub cases: usize,
    /// The largest errors of all cases that passed.
    pub max_errors: MaxErrors,
    /// The failure that ended the comparison of the family; `None` if every case passed.
    pub failure: Option<ConformanceError>,
}

/// Element type, buffer offset (in elements) and relative tolerance of each of the five runs in
/// which an op on the GPU is compared with the CPU.
///
/// The errors stem from rounding: operands are rounded once before an operation, and results once
/// after the operation. Values that the forward pass keeps for the backward pass are also rounded
/// once.
const RUN_SETTINGS: [(Dtype, usize, f64); 5] = [
    (Dtype::Bf16, 0, 2e-2),
    (Dtype::F32, 0, 1e-5),
    (Dtype::F32, 3, 1e-5),
    (Dtype::Bf16, 1, 2e-2),
    (Dtype::F16, 0, 3e-3),
];

/// Those of [`RUN_SETTINGS`] with 16-bit elements.
const RUN_SETTINGS_OF_16_BITS: [(Dtype, usize, f64); 3] = [RUN_SETTINGS[0], RUN_SETTINGS[3], RUN_SETTINGS[4]];

/// Number of op families (such as norms) that are compared with the CPU on random shapes, without
/// the families for boundary shapes and fp8 matmuls.
const RANDOM_ONLY_FAMILY_COUNT: usize = random_cases::RANDOM_CASE_FAMILIES.len();
/// The names of the families of operations (such as norms) that [`compare_family_with_cpu`]
/// compares.
pub const OP_FAMILY_NAMES: [&str; RANDOM_ONLY_FAMILY_COUNT + 2] = {
    let mut names = [""; RANDOM_ONLY_FAMILY_COUNT + 2];
    let mut i = 0;
    while i < RANDOM_ONLY_FAMILY_COUNT {
        names[i] = random_cases::RANDOM_CASE_FAMILIES[i].0;
        i += 1;
    }
    names[RANDOM_ONLY_FAMILY_COUNT] = "boundary shapes";
    names[RANDOM_ONLY_FAMILY_COUNT + 1] = "fp8 matmul";
    names
};
/// Name of the report about attention by cuDNN that [`compare_cudnn_attention_with_cpu`] returns.
pub const CUDNN_ATTENTION_FAMILY: &str = "attention by cuDNN";

/// Compares the GPU's results of all families of operations (such as norms) with the CPU's, for
/// `rounds` random shapes and for special shapes. `seed` determines shapes and values.
pub fn compare_ops_with_cpu(cuda: &Cuda, seed: u64, rounds: usize) -> Vec<OpFamilyReport> {
    (0..OP_FAMILY_NAMES.len())
        .filter_map(|family| compare_family_with_cpu(cuda, family, seed, rounds))
        .collect()
}

/// Compares one family of operations (such as norms) on the GPU with the CPU. `family` is its
/// position in [`OP_FAMILY_NAMES`]. Returns `None` if the GPU does not support the operations.
pub fn compare_family_with_cpu(
    cuda: &Cuda,
    family: usize,
    seed: u64,
    rounds: usize,
) -> Option<OpFamilyReport> {
    let backends = &Backends { cpu: Cpu::new(1), cuda, runs: &RUN_SETTINGS };
    let name = OP_FAMILY_NAMES[family];
    if let Some((_, compare)) = random_cases::RANDOM_CASE_FAMILIES.get(family) {
        let mut rng = CaseRng::new(seed ^ ((family as u64 + 1) << 32));
        return Some(run_family(cuda, name, (0..rounds).map(|_| compare(backends, &mut rng))));
    }
    if family == RANDOM_ONLY_FAMILY_COUNT {
        let backends_of_16_bits = &Backends { cpu: Cpu::new(1), cuda, runs: &RUN_SETTINGS_OF_16_BITS };
        let wide_heads = fixed_cases::compare_wide_head_cases(backends_of_16_bits);
        return Some(run_family(cuda, name, fixed_cases::compare_fixed_cases(backends).chain(wide_heads)));
    }
    let mut rng = CaseRng::new(seed ^ (99 << 32));
    let matmuls = (0..rounds).map(|_| random_cases::compare_random_fp8_matmuls(backends, &mut rng));
    let rounding = std::iter::once_with(|| fp8_cases::compare_operand_rounding(backends));
    cuda.properties().has_fp8().then(|| run_family(cuda, name, matmuls.chain(rounding)))
}

/// The names of the shapes, as large as in real models, on which
/// [`compare_realistic_shape_with_cpu`] compares operations on the GPU with the CPU.
pub const REALISTIC_SHAPE_NAMES: &[&str] = &realistic_cases::REALISTIC_CASE_NAMES;

/// Compares bf16 operations on the GPU with the CPU as the reference (on `threads` threads) for one
/// shape as large as in real models. `shape` is its position in [`REALISTIC_SHAPE_NAMES`]. Sizes
/// are divided by `divisor`. Returns `None` if the GPU does not support the operations.
pub fn compare_realistic_shape_with_cpu(
    cuda: &Cuda,
    shape: usize,
    divisor: usize,
    threads: usize,
) -> Option<OpFamilyReport> {
    let backends = Backends { cpu: Cpu::new(threads), cuda, runs: &RUN_SETTINGS[..1] };
    let compare = || realistic_cases::compare_realistic_case(&backends, shape, divisor);
    let mut is_supported = true;
    let results = std::iter::once_with(compare).filter_map(|result| {
        is_supported = result.is_some();
        result
    });
    let report = run_family(cuda, REALISTIC_SHAPE_NAMES[shape], results);
    is_supported.then_some(report)
}

/// Compares attention by cuDNN ([`Cuda::set_attention_backend`]) with attention on the CPU, on
/// `rounds` random shapes, on shapes of usual models, and with sliding windows.
pub fn compare_cudnn_attention_with_cpu(cuda: &Cuda, seed: u64, rounds: usize) -> OpFamilyReport {
    let types = [RUN_SETTINGS[0], (Dtype::Bf16, 8, RUN_SETTINGS[0].2)];
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
        cuda,
        CUDNN_ATTENTION_FAMILY,
        cases.map(|(i, (window, shape))| {
            cases::compare_windowed_attention(&backends, i as u64, window, shape)
        }),
    )
}

/// Compares one family of operations (such as norms) on the GPU with the CPU, and returns a report,
/// which ends at the first failure. A failure of the GPU or a panic of a case is the family's
/// failure.
fn run_family(cuda: &Cuda, family: &'static str, cases: impl Iterator<Item = CaseResult>) -> OpFamilyReport {
    let take_status = || cuda.take_failure().map_err(ConformanceError::from);
    run_cases(family, cases.map(|result| take_status().and(result)))
}

/// Takes the results of comparisons from the iterator `cases` until one is a failure or a panic,
/// and summarizes them in a report.
fn run_cases(family: &'static str, mut cases: impl Iterator<Item = CaseResult>) -> OpFamilyReport {
    let mut report = OpFamilyReport { family, cases: 0, max_errors: MaxErrors::default(), failure: None };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_ends_with_its_first_failure() {
        let failure = ConformanceError::SumsDiffer { case: "add".to_owned(), gpu: vec![1.0], cpu: vec![2.0] };
        let passed = MaxErrors { f32: 1e-6, ..MaxErrors::default() };
        let report = run_cases("ops", [Ok(passed), Err(failure.clone()), Ok(passed)].into_iter());
        assert_eq!((report.cases, report.max_errors.f32, report.failure), (2, 1e-6, Some(failure)));
    }

    #[test]
    fn a_panic_of_a_case_ends_its_family() {
        let report = run_cases("ops", [1].into_iter().map(|n: u32| panic!("bug {n}")));
        assert_eq!(report.failure.map(|error| error.code()), Some(diagnostic::codes::run::INTERNAL));
    }
}
