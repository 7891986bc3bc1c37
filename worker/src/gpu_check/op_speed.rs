//! Measures the speed of single operations on a GPU, for `launch gpu-check`.
use super::message::{PartOutput, ResultRow};
use device::{
    Buf, Cuda, Dtype, Storage,
    cuda::CudaError,
    ops::{
        AdamWHyperparams, AttentionOps, AttentionShape, EpilogueOps, MatmulOps, OptimizerOps, RmsNormOps,
        VectorOps, WriteMode,
    },
    storage::DeviceError,
};
use serde_json::json;
use std::time::{Duration, Instant};

/// How long each operation is repeated while its speed is measured.
const TIMED_DURATION: Duration = Duration::from_millis(300);
/// An operation whose speed is measured, with its amount of work (bytes or floating-point
/// operations).
struct TimedOp<'a> {
    name: String,
    /// The number of floating-point operations or bytes of one call.
    amount: f64,
    /// The unit of the rate that is printed, which is `amount` per second divided by 10¹².
    unit: &'static str,
    run: Box<dyn FnMut() + 'a>,
}

/// A group of GPU operations, such as matmuls, whose speed one process of `launch gpu-check`
/// measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimedOpGroup {
    /// A copy within the GPU's memory and a large matmul: the highest rates that other operations
    /// can reach.
    Ceilings,
    /// Matmuls of usual shapes.
    Matmul,
    /// Attention by the built-in kernels and by cuDNN.
    Attention,
    /// Operations that the memory bandwidth limits.
    Memory,
}

impl TimedOpGroup {
    /// The three parts of `launch gpu-check` that time single operations, each with the group of
    /// operations that the part times.
    pub(super) const MODEL_OPERATION_GROUPS: [(&str, TimedOpGroup); 3] = [
        ("matmul", TimedOpGroup::Matmul),
        ("attention", TimedOpGroup::Attention),
        ("memory", TimedOpGroup::Memory),
    ];
}

/// Measures the speed of a group of operations on the GPU, and reports a row of the result table
/// for each operation. `cudnn` is the GPU opened with cuDNN, if cuDNN is available.
pub(super) fn measure_op_speed(
    output: &PartOutput,
    group: TimedOpGroup,
    cuda: &Cuda,
    cudnn: Option<&Cuda>,
) -> diagnostic::Result<()> {
    match group {
        TimedOpGroup::Ceilings => {
            measure_and_report_op(output, cuda, prepare_timed_copy(cuda)?)?;
            measure_and_report_op(output, cuda, prepare_timed_matmul(cuda, 8192, 8192, 8192)?)?;
        }
        TimedOpGroup::Matmul => {
            for (m, n, k) in [(4096, 4096, 4096), (8192, 2304, 768), (8192, 768, 3072), (8192, 50_304, 768)] {
                measure_and_report_op(output, cuda, prepare_timed_matmul(cuda, m, n, k)?)?;
            }
            for has_epilogues in [false, true] {
                for op in prepare_timed_epilogues(cuda, has_epilogues)? {
                    measure_and_report_op(output, cuda, op)?;
                }
            }
        }
        TimedOpGroup::Attention => {
            for shape in ATTENTION_SHAPES {
                let cudnn = cudnn.filter(|_| shape[4] <= MAX_CUDNN_HEAD_DIM);
                for (cuda, backend) in [(Some(cuda), ""), (cudnn, " by cuDNN")] {
                    let Some(cuda) = cuda else { continue };
                    for op in prepare_timed_attention(cuda, shape, backend)? {
                        measure_and_report_op(output, cuda, op)?;
                    }
                }
            }
        }
        TimedOpGroup::Memory => {
            for op in prepare_memory_bound_ops(cuda)? {
                measure_and_report_op(output, cuda, op)?;
            }
        }
    }
    Ok(())
}

/// Measures the speed of one operation on the GPU, and reports it as a row of the result table.
fn measure_and_report_op(output: &PartOutput, cuda: &Cuda, mut op: TimedOp) -> Result<(), DeviceError> {
    for _ in 0..3 {
        (op.run)();
    }
    cuda.synchronize()?;
    let (mut runs, mut chunk, began) = (0u32, 4, Instant::now());
    while began.elapsed() < TIMED_DURATION {
        (0..chunk).for_each(|_| (op.run)());
        cuda.synchronize()?;
        runs += chunk;
        chunk = (chunk * 2).min(256);
    }
    let seconds = began.elapsed().as_secs_f64() / f64::from(runs);
    let rate = op.amount / seconds / 1e12;
    let values = format!("{:.1} µs, {rate:.2} {}", seconds * 1e6, op.unit);
    let data = json!({"seconds": seconds, "rate": rate, "unit": op.unit});
    output.send_row(ResultRow::measured(op.name, values, data));
    Ok(())
}

/// Prepares the measurement of a copy within the GPU's memory: allocates the buffers, and returns
/// the operation with its number of bytes.
fn prepare_timed_copy(cuda: &Cuda) -> Result<TimedOp<'_>, CudaError> {
    const COPIED_ELEMENTS: usize = 256 << 20;
    let [mut to, from] = allocate_zeroed_buffers(cuda, Dtype::F32, [COPIED_ELEMENTS, COPIED_ELEMENTS])?;
    Ok(TimedOp {
        name: format!("copy, f32, {COPIED_ELEMENTS} elements"),
        amount: (8 * COPIED_ELEMENTS) as f64,
        unit: "TB/s",
        run: Box::new(move || cuda.copy(to.view_mut(), from.view())),
    })
}

/// Prepares the timing of a bf16 matmul of an `[m, k]` matrix with the transpose of an `[n, k]`
/// matrix: allocates the buffers in GPU memory, and returns the operation.
fn prepare_timed_matmul<'a>(cuda: &'a Cuda, m: usize, n: usize, k: usize) -> Result<TimedOp<'a>, CudaError> {
    let [mut y, x, w] = allocate_zeroed_buffers(cuda, Dtype::Bf16, [m * n, m * k, n * k])?;
    Ok(TimedOp {
        name: format!("matmul, bf16, {m} × {n} × {k}"),
        amount: 2.0 * (m * n * k) as f64,
        unit: "TFLOP/s",
        run: Box::new(move || {
            cuda.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, WriteMode::Overwrite)
        }),
    })
}

/// The rows, inputs and outputs of the MLP matmul with which epilogues are timed, those of GPT-2.
const EPILOGUE_SIZES: [usize; 3] = [8192, 768, 3072];

/// Creates the timed operation `run`: a matmul of [`EPILOGUE_SIZES`] and the operation `what`,
/// which is computed in the epilogue of the matmul or by separate kernels.
fn create_epilogue_op<'a>(
    cuda: &'a Cuda,
    what: &str,
    has_epilogues: bool,
    mut run: impl FnMut() + 'a,
) -> TimedOp<'a> {
    let [m, inp, out] = EPILOGUE_SIZES;
    let kind = if has_epilogues { "epilogue" } else { "separate kernels" };
    TimedOp {
        name: format!("matmul with {what}, {kind}, bf16, {m} × {inp} × {out}"),
        amount: 2.0 * (m * inp * out) as f64,
        unit: "TFLOP/s",
        run: Box::new(move || {
            cuda.set_matmul_epilogues_enabled(has_epilogues);
            run();
        }),
    }
}

/// Prepares the timing of the bf16 matmuls of GPT-2's MLP with GELU and with the gradient of the
/// bias: allocates the buffers, and returns the forward pass, the gradient of GELU's input, and the
/// gradient of weight and bias as operations.
fn prepare_timed_epilogues(cuda: &Cuda, has_epilogues: bool) -> Result<[TimedOp<'_>; 3], CudaError> {
    let sizes @ [m, inp, out] = EPILOGUE_SIZES;
    let [mut y, mut pre, x, w, bias] =
        allocate_zeroed_buffers(cuda, Dtype::Bf16, [m * out, m * out, m * inp, inp * out, out])?;
    let forward = move || {
        let (x, w, bias) = (x.view(), w.view(), bias.view());
        cuda.conv1d_gelu_forward(y.view_mut(), pre.view_mut(), x, w, bias, sizes);
    };
    let [mut dpre, mut act, dy, w, pre] =
        allocate_zeroed_buffers(cuda, Dtype::Bf16, [m * out, m * out, m * inp, inp * out, m * out])?;
    let gelu_backward = move || {
        let (dy, w, pre) = (dy.view(), w.view(), pre.view());
        cuda.conv1d_gelu_backward_input(dpre.view_mut(), act.view_mut(), dy, w, pre, [m, out, inp]);
    };
    let [dy, x] = allocate_zeroed_buffers(cuda, Dtype::Bf16, [m * out, m * inp])?;
    let [mut dw, mut dbias] = allocate_zeroed_buffers(cuda, Dtype::F32, [inp * out, out])?;
    let weight_backward = move || {
        let (dw, dbias) = (dw.view_mut(), dbias.view_mut());
        cuda.conv1d_backward_weight_and_bias(dw, dbias, dy.view(), x.view(), sizes);
    };
    Ok([
        create_epilogue_op(cuda, "bias and GELU", has_epilogues, forward),
        create_epilogue_op(cuda, "gradient of GELU", has_epilogues, gelu_backward),
        create_epilogue_op(cuda, "gradient of the bias", has_epilogues, weight_backward),
    ])
}

/// The sizes with which attention is timed, those of GPT-2, Llama-3.1-8B and Gemma-2-2B: number of
/// sequences, tokens per sequence, query heads, key heads, head size.
const ATTENTION_SHAPES: [[usize; 5]; 3] =
    [[8, 1024, 12, 12, 64], [2, 2048, 32, 8, 128], [2, 2048, 8, 4, 256]];
/// Largest head size with which cuDNN computes attention.
const MAX_CUDNN_HEAD_DIM: usize = 128;

/// Prepares the timing of bf16 attention: allocates the buffers, and returns the forward and the
/// backward pass as two operations.
fn prepare_timed_attention<'a>(
    cuda: &'a Cuda,
    sizes: [usize; 5],
    backend: &str,
) -> Result<[TimedOp<'a>; 2], CudaError> {
    let [b, t, heads, kv_heads, head_dim] = sizes;
    let shape = AttentionShape::new(b, t, heads, kv_heads, head_dim);
    let [out_len, qkv_len] = [heads, heads + 2 * kv_heads].map(|heads| b * t * heads * head_dim);
    let [mut o, qkv] = allocate_zeroed_buffers(cuda, Dtype::Bf16, [out_len, qkv_len])?;
    let [mut lse] = allocate_zeroed_buffers(cuda, Dtype::F32, [b * heads * t])?;
    let [o2, d_o, qkv2, mut dqkv] =
        allocate_zeroed_buffers(cuda, Dtype::Bf16, [out_len, out_len, qkv_len, qkv_len])?;
    let [lse2] = allocate_zeroed_buffers(cuda, Dtype::F32, [b * heads * t])?;
    let starts = vec![0; b * t];
    let starts2 = starts.clone();
    // Causal attention computes half of the scores.
    let flops = 2.0 * (b * heads * t * t * head_dim) as f64;
    let text =
        format!("{backend}, bf16, {b} × {t} tokens, {heads} query and {kv_heads} key heads of {head_dim}");
    Ok([
        TimedOp {
            name: format!("attention forward{text}"),
            amount: flops,
            unit: "TFLOP/s",
            run: Box::new(move || {
                cuda.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &starts, shape)
            }),
        },
        TimedOp {
            name: format!("attention backward{text}"),
            amount: 2.5 * flops,
            unit: "TFLOP/s",
            run: Box::new(move || {
                let (lse, qkv) = (lse2.view(), qkv2.view());
                cuda.attention_backward(dqkv.view_mut(), d_o.view(), o2.view(), lse, qkv, &starts2, shape);
            }),
        },
    ])
}

/// Prepares the measurements of operations that the memory bandwidth limits: an addition, RMSNorm
/// and AdamW.
fn prepare_memory_bound_ops(cuda: &Cuda) -> Result<[TimedOp<'_>; 3], CudaError> {
    const ADDED_ELEMENTS: usize = 64 << 20;
    let (m, d) = (8192, 4096);
    let [mut y, x] = allocate_zeroed_buffers(cuda, Dtype::Bf16, [ADDED_ELEMENTS, ADDED_ELEMENTS])?;
    let [mut normed, rows, w] = allocate_zeroed_buffers(cuda, Dtype::Bf16, [m * d, m * d, d])?;
    let [mut rstd] = allocate_zeroed_buffers(cuda, Dtype::F32, [m])?;
    let [mut rounded] = allocate_zeroed_buffers(cuda, Dtype::Bf16, [ADDED_ELEMENTS])?;
    let [mut p, g, mut avg, mut avg_sq] = allocate_zeroed_buffers(
        cuda,
        Dtype::F32,
        [ADDED_ELEMENTS, ADDED_ELEMENTS, ADDED_ELEMENTS, ADDED_ELEMENTS],
    )?;
    let h = AdamWHyperparams {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        grad_scale: 1.0,
    };
    Ok([
        TimedOp {
            name: format!("add, bf16, {ADDED_ELEMENTS} elements"),
            amount: (6 * ADDED_ELEMENTS) as f64,
            unit: "TB/s",
            run: Box::new(move || cuda.add(y.view_mut(), x.view())),
        },
        TimedOp {
            name: format!("RMSNorm, bf16, {m} × {d}"),
            amount: (4 * m * d) as f64,
            unit: "TB/s",
            run: Box::new(move || {
                cuda.rmsnorm_forward(normed.view_mut(), rstd.view_mut(), rows.view(), w.view(), m, d, 1e-5);
            }),
        },
        TimedOp {
            name: format!("AdamW, f32 with a bf16 copy, {ADDED_ELEMENTS} elements"),
            amount: (30 * ADDED_ELEMENTS) as f64,
            unit: "TB/s",
            run: Box::new(move || {
                let (rounded, g) = (Some(rounded.view_mut()), g.view());
                cuda.adamw(p.view_mut(), rounded, g, avg.view_mut(), avg_sq.view_mut(), &h);
            }),
        },
    ])
}

/// Allocates zeroed buffers of the lengths `lens` (in elements) in GPU memory.
fn allocate_zeroed_buffers<const N: usize>(
    cuda: &Cuda,
    dtype: Dtype,
    lens: [usize; N],
) -> Result<[Buf; N], CudaError> {
    let mut buffers = Vec::with_capacity(N);
    for len in lens {
        buffers.push(cuda.try_zeroed("the timed operation", dtype, len)?);
    }
    Ok(buffers.try_into().unwrap_or_else(|_| unreachable!("one buffer per length")))
}
