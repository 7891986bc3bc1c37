//! Compares ops on the GPU with the CPU on shapes of real models, and on tensors of more than 2³¹
//! bytes.
use super::comparison::{
    Backends, CaseResult, CaseRng, MaxErrors, OffsetBuf, compute_relative_error, make_nan_values,
};
use super::error::ConformanceError;
use super::fixed_cases::FixedCase;
use super::fp8_cases;
use crate::ops::{AdamWHyperparams, AttentionShape, ClassifierShape, Ops, VectorOps, WriteMode};
use crate::storage::Storage;
use crate::{Buf, Cuda, Dtype};

/// The names of the shapes, as large as in real models, on which ops on the GPU are compared with
/// the CPU. The number of a case is its position.
pub(super) const REALISTIC_CASE_NAMES: [&str; 15] = [
    "matmul 4096 × 2048 × 2048",
    "matmul epilogues 4096 × 768 × 3072",
    "norms 4096 × 4096",
    "norms of heads, RoPE 2048 × 32 × 128",
    "activations 2048 × 8192",
    "attention 2048, 12 heads of 64",
    "attention 2048, 16 / 4 heads of 128",
    "attention 2048, window of 512",
    "attention 2048, 8 / 4 heads of 256",
    "classifier of 128256 tokens",
    "experts, 2048 × 64",
    "embedding of 128256 tokens",
    "vectors of 2²⁴ + 5",
    "fp8 matmul 2048 × 2048 × 2048",
    "tensors over 2³¹ bytes",
];

/// Compares operations on the GPU with the CPU for one shape of real models, number `number` in
/// [`REALISTIC_CASE_NAMES`]. Sizes are divided by `divisor`, which is above 1 for slow GPUs.
/// Returns `None` if the GPU does not support the operations.
pub(super) fn compare_realistic_case(
    backends: &Backends,
    number: usize,
    divisor: usize,
) -> Option<CaseResult> {
    // multiples of 16, which fp8 and the kernels for aligned rows require
    let size = |n: usize| (n / divisor).next_multiple_of(16);
    let attention = |heads, kv_heads, head_dim| AttentionShape::new(1, size(2048), heads, kv_heads, head_dim);
    let case = match number {
        0 => {
            let [m, n, k] = [4096, 2048, 2048].map(size);
            return Some(super::cases::compare_matmuls(backends, 1, m, n, k));
        }
        1 => {
            let sizes = [4096, 768, 3072].map(size);
            return Some(super::epilogue_cases::compare_epilogues(backends, 1, sizes));
        }
        2 => FixedCase::Norms { m: size(4096), d: size(4096) },
        3 => FixedCase::HeadNormAndRope([size(2048), 32, 128, 1]),
        4 => FixedCase::Activations { m: size(2048), f: size(8192) },
        5 => FixedCase::Documents(attention(12, 12, 64)),
        6 => FixedCase::Documents(attention(16, 4, 128)),
        7 => FixedCase::Window(size(512), attention(4, 4, 64)),
        8 => FixedCase::Documents(attention(8, 4, 256)),
        9 => {
            let (m, d, v) = (size(256), size(512), size(128_256));
            FixedCase::Classifier(ClassifierShape { m, d, v, softcap: None })
        }
        10 => FixedCase::Experts([size(2048), 64, 8, size(1024)]),
        11 => FixedCase::Embedding([size(4096), size(512), size(128_256)]),
        12 => FixedCase::Vectors(size(1 << 24) + 5),
        13 => {
            let n = size(2048);
            let has_fp8 = backends.cuda.properties().has_fp8();
            return has_fp8.then(|| fp8_cases::compare_matmuls(backends, 1, n, n, n));
        }
        _ => return Some(compare_large_tensors(backends, divisor)),
    };
    Some(case.compare(backends, number as u64))
}

/// Number of last rows of a tensor of more than 2³¹ bytes in which the results of GPU and CPU are
/// compared.
const TAIL_ROWS: usize = 8;

/// Describes one tensor in a comparison of ops on more than 2³¹ bytes: element type, row length,
/// one or many rows, and input or output.
struct LargeTensor {
    dtype: Dtype,
    /// The number of elements of a row.
    row: usize,
    /// Whether the tensor has this one row only, and no large number of rows.
    is_small: bool,
    /// Whether an op overwrites the tensor, which is filled with NaN before.
    is_output: bool,
}

/// Compares operations on tensors of more than 2³¹ bytes on GPU and CPU, to find kernels whose
/// 32-bit offsets overflow. Kernels that compute with 32-bit offsets read or write other rows.
fn compare_large_tensors(backends: &Backends, divisor: usize) -> CaseResult {
    let rows = |n: usize| (n / divisor).max(TAIL_ROWS);
    let tensor = |dtype, row| LargeTensor { dtype, row, is_small: false, is_output: false };
    let output = |dtype, row| LargeTensor { is_output: true, ..tensor(dtype, row) };
    let small = |dtype, row| LargeTensor { is_small: true, ..tensor(dtype, row) };
    let (bf16, f32) = (Dtype::Bf16, Dtype::F32);
    let mut errors = MaxErrors::default();
    let (n, k) = (32_064, 64);
    let tensors = [output(bf16, n), output(bf16, k), tensor(bf16, k), small(bf16, n * k), tensor(bf16, n)];
    errors +=
        compare_last_rows(backends, "large matmul", rows(70_000), tensors, |ops, [y, dx, x, w, dy], m| {
            ops.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, WriteMode::Overwrite);
            ops.matmul_backward_input(dx.view_mut(), dy.view(), w.view(), m, n, k, WriteMode::Overwrite);
        })?;
    let small_output = LargeTensor { is_output: true, ..small(f32, n * k) };
    let tensors = [small_output, tensor(bf16, k), tensor(bf16, n)];
    errors += compare_last_rows(
        backends,
        "large matmul, weights",
        rows(70_000),
        tensors,
        |ops, [dw, x, dy], m| {
            ops.matmul_backward_weight(dw.view_mut(), dy.view(), x.view(), m, n, k, WriteMode::Overwrite);
        },
    )?;
    let row = 1 << 16;
    let tensors = [tensor(bf16, row), tensor(bf16, row)];
    errors += compare_last_rows(backends, "large addition", rows(34_000), tensors, |ops, [y, x], _| {
        ops.add(y.view_mut(), x.view());
    })?;
    let d = 8192;
    let tensors = [output(bf16, d), output(f32, 1), tensor(bf16, d), small(bf16, d)];
    errors +=
        compare_last_rows(backends, "large RMSNorm", rows(140_000), tensors, |ops, [y, rstd, x, w], m| {
            ops.rmsnorm_forward(y.view_mut(), rstd.view_mut(), x.view(), w.view(), m, d, 1e-5);
        })?;
    let hyper = AdamWHyperparams {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 2,
        grad_scale: 1.0,
    };
    let tensors = [tensor(f32, row), tensor(f32, row), tensor(f32, row), output(f32, row)];
    errors +=
        compare_last_rows(backends, "large AdamW", rows(8_400), tensors, |ops, [p, g, avg, avg_sq], _| {
            ops.fill_with_zeros(avg_sq.view_mut());
            ops.adamw(p.view_mut(), None, g.view(), avg.view_mut(), avg_sq.view_mut(), &hyper);
        })?;
    Ok(errors)
}

/// Runs an operation on tensors of `rows` rows on the GPU and on only the last rows on the CPU, and
/// compares these last rows of the results. All other rows of inputs are zero. `run` gets the
/// number of rows.
fn compare_last_rows<const N: usize>(
    backends: &Backends,
    case: &str,
    rows: usize,
    tensors: [LargeTensor; N],
    run: impl Fn(&dyn Ops, [&mut OffsetBuf; N], usize),
) -> CaseResult {
    let mut rng = CaseRng::new(rows as u64);
    let tails = tensors.each_ref().map(|tensor| {
        let len = tensor.row * if tensor.is_small { 1 } else { TAIL_ROWS };
        let values = if tensor.is_output { make_nan_values(len) } else { rng.draw_vector(len) };
        backends.round_on_gpu(tensor.dtype, &values)
    });
    let mut cpu = tails.each_ref().map(|tail| OffsetBuf::aligned(Buf::from_slice(tail)));
    run(&backends.cpu, cpu.each_mut(), TAIL_ROWS);
    let mut gpu = Vec::with_capacity(N);
    for (tensor, tail) in tensors.iter().zip(&tails) {
        gpu.push(OffsetBuf::aligned(alloc_tensor_with_tail(backends.cuda, tensor, rows, tail)?));
    }
    let mut gpu: [OffsetBuf; N] = gpu.try_into().unwrap_or_else(|_| unreachable!("one buffer per tensor"));
    run(backends.cuda, gpu.each_mut(), rows);
    backends.cuda.synchronize()?;
    let mut errors = MaxErrors::default();
    for (i, (expected, actual)) in cpu.iter().zip(&gpu).enumerate() {
        let (tail, len) = (tails[i].len(), actual.view().len());
        let values = backends.copy_to_host_as_f32(actual.view().slice(len - tail..len));
        let error = compute_relative_error(&values, expected.view().host_slice());
        let dtype = tensors[i].dtype;
        let (errors, tolerance) = match dtype {
            Dtype::F32 => (&mut errors.f32, 1e-5),
            Dtype::Bf16 => (&mut errors.bf16, 2e-2),
            Dtype::F16 => (&mut errors.f16, 3e-3),
        };
        if error > tolerance || error.is_nan() {
            let case = format!("{case}, last rows of {rows}");
            return Err(ConformanceError::BufferDiffers {
                case,
                dtype,
                offset: 0,
                buffer: i,
                error,
                tolerance,
            });
        }
        *errors = errors.max(error);
    }
    Ok(errors)
}

/// Allocates a GPU tensor of `rows` rows that is zero except for the values `tail` at its end.
fn alloc_tensor_with_tail(
    cuda: &Cuda,
    tensor: &LargeTensor,
    rows: usize,
    tail: &[f32],
) -> Result<Buf, crate::storage::DeviceError> {
    let len = tensor.row * if tensor.is_small { 1 } else { rows };
    let mut buf = cuda.try_zeroed("a tensor of more than 2³¹ bytes", tensor.dtype, len)?;
    let values = cuda.clone_to_device(tail.into());
    cuda.cast(buf.view_mut().slice(len - tail.len()..len), values.view());
    Ok(buf)
}
