//! Test functions that run an op and its backward pass on the GPU and on the CPU for one shape, and
//! compare the results. The cases of experts and fp8 have separate modules.
use super::comparison::{
    Backends, CaseResult, CaseRng, MaxErrors, make_buffer_of_tested_type, make_f32_buffer, make_nan_values,
};
use super::error::ConformanceError;
use crate::Dtype;
use crate::ops::{
    AdamWHyperparams, AttentionDropout, AttentionShape, ClassifierGrads, ClassifierShape, HeadLayout,
    IGNORE_LABEL, LayerNormParams, LionHyperparams, NORM_BLOCK_LEN, Ops, RopeShape, SampleDropout,
    SgdHyperparams, StochasticRounding, WriteMode,
};
use std::cell::RefCell;

/// Compares matmuls of linear and Conv1D layers on the GPU with the CPU as the reference, with and
/// without bias: `m` rows, `n` outputs, `k` inputs.
pub(super) fn compare_matmuls(backends: &Backends, seed: u64, m: usize, n: usize, k: usize) -> CaseResult {
    let mut errors = MaxErrors::default();
    let mut rng = CaseRng::new(seed);
    for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
        let buffers = [
            make_buffer_of_tested_type(rng.draw_initial_output(write, m * n)),
            make_buffer_of_tested_type(rng.draw_initial_output(write, m * k)),
            make_f32_buffer(rng.draw_initial_output(write, n * k)),
            make_buffer_of_tested_type(rng.draw_vector(m * k)),
            make_buffer_of_tested_type(rng.draw_vector(n * k)),
            make_buffer_of_tested_type(rng.draw_vector(m * n)),
        ];
        errors += backends.compare(
            &format!("matmul {m} {n} {k} {write:?}"),
            buffers,
            |ops, [y, dx, dw, x, w, dy]| {
                ops.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, write);
                ops.matmul_backward_input(dx.view_mut(), dy.view(), w.view(), m, n, k, write);
                ops.matmul_backward_weight(dw.view_mut(), dy.view(), x.view(), m, n, k, write);
            },
        )?;
    }
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(m * n)),
        make_buffer_of_tested_type(make_nan_values(m * n)),
        make_buffer_of_tested_type(make_nan_values(m * k)),
        make_buffer_of_tested_type(rng.draw_vector(m * k)),
        make_buffer_of_tested_type(rng.draw_vector(n * k)),
        make_buffer_of_tested_type(rng.draw_vector(n)),
        make_f32_buffer(rng.draw_vector(m * n)),
    ];
    errors += backends.compare(
        &format!("matmul with bias {m} {n} {k}"),
        buffers,
        |ops, [y, conv1d, dx, x, w, bias, dy]| {
            ops.matmul_bias_forward(y.view_mut(), x.view(), w.view(), Some(bias.view()), m, n, k);
            ops.conv1d_bias_forward(conv1d.view_mut(), x.view(), w.view(), bias.view(), m, k, n);
            // a gradient that is rounded before the matmuls that read it
            let mut rounded_dy = ops.zeroed(w.buf.dtype(), m * n);
            let dy = ops.convert_to_matmul_dtype(dy.view(), &mut rounded_dy);
            ops.matmul_backward_input(dx.view_mut(), dy, w.view(), m, n, k, WriteMode::Overwrite);
        },
    )?;
    Ok(errors)
}

/// Compares RMSNorm, LayerNorm and the addition of a bias on the GPU with the CPU as the reference,
/// on `m` rows of `d` elements.
pub(super) fn compare_norms(backends: &Backends, seed: u64, m: usize, d: usize) -> CaseResult {
    let mut errors = MaxErrors::default();
    let mut rng = CaseRng::new(seed);
    for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
        errors += compare_rms_norm(backends, &mut rng, write, m, d)?;
        errors += compare_layer_norm(backends, &mut rng, write, m, d)?;
    }
    let buffers = [
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
        make_buffer_of_tested_type(rng.draw_vector(d)),
        make_f32_buffer(rng.draw_vector(d)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
    ];
    errors += backends.compare(&format!("bias {m} {d}"), buffers, |ops, [y, bias, dbias, dy]| {
        ops.bias_forward(y.view_mut(), bias.view(), m, d);
        ops.bias_backward(dbias.view_mut(), dy.view(), m, d);
    })?;
    Ok(errors)
}

/// Compares RMSNorm and its backward pass on the GPU with the CPU as the reference, on `m` rows of
/// `d` elements.
fn compare_rms_norm(
    backends: &Backends,
    rng: &mut CaseRng,
    write: WriteMode,
    m: usize,
    d: usize,
) -> CaseResult {
    let dx = rng.draw_initial_output(write, m * d);
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(m * d)),
        make_f32_buffer(make_nan_values(m)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
        make_buffer_of_tested_type(rng.draw_vector(d)),
        make_buffer_of_tested_type(dx),
        make_f32_buffer(rng.draw_vector(d)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
    ];
    backends.compare(&format!("rmsnorm {m} {d}"), buffers, |ops, [y, rstd, x, delta, w, dx, dw, dy]| {
        ops.rmsnorm_forward(y.view_mut(), rstd.view_mut(), x.view(), w.view(), m, d, 1e-5);
        let (out, stat) = (y.view_mut(), rstd.view_mut());
        ops.add_rmsnorm_forward(out, stat, x.view_mut(), delta.view(), w.view(), m, d, 1e-5);
        let grads = (dx.view_mut(), dw.view_mut());
        ops.rmsnorm_backward(grads.0, grads.1, dy.view(), x.view(), w.view(), rstd.view(), m, d, write);
    })
}

/// Compares LayerNorm and its backward pass on the GPU with the CPU as the reference, on `m` rows
/// of `d` elements.
fn compare_layer_norm(
    backends: &Backends,
    rng: &mut CaseRng,
    write: WriteMode,
    m: usize,
    d: usize,
) -> CaseResult {
    let dx = rng.draw_initial_output(write, m * d);
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(m * d)),
        make_f32_buffer(make_nan_values(2 * m)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
        make_buffer_of_tested_type(rng.draw_vector(d)),
        make_buffer_of_tested_type(rng.draw_vector(d)),
        make_buffer_of_tested_type(dx),
        make_f32_buffer(rng.draw_vector(d)),
        make_f32_buffer(rng.draw_vector(d)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
    ];
    backends.compare(
        &format!("layernorm {m} {d}"),
        buffers,
        |ops, [y, stats, x, delta, w, bias, dx, dw, db, dy]| {
            // A row of few elements may have nearly no variance. The norm then amplifies the
            // rounding of x by up to 1/√eps.
            let eps = if d < 8 { 1e-1 } else { 1e-2 };
            let norm = LayerNormParams { w: w.view(), b: bias.view(), eps };
            ops.layernorm_forward(y.view_mut(), stats.view_mut(), x.view(), norm, m);
            ops.add_layernorm_forward(y.view_mut(), stats.view_mut(), x.view_mut(), delta.view(), norm, m);
            let (dx, dw, db) = (dx.view_mut(), dw.view_mut(), db.view_mut());
            ops.layernorm_backward(dx, dw, db, dy.view(), x.view(), w.view(), stats.view(), m, write);
        },
    )
}

/// Compares two ops on the GPU with the CPU as the reference: RMSNorm of each attention head, and
/// rotary position embedding.
pub(super) fn compare_head_norm_and_rope(
    backends: &Backends,
    seed: u64,
    rows: usize,
    heads: usize,
    head_dim: usize,
    b: usize,
) -> CaseResult {
    let mut errors = MaxErrors::default();
    let mut rng = CaseRng::new(seed);
    let (first, t) = (head_dim, rows);
    let stride = heads * head_dim + 2 * head_dim;
    let h = HeadLayout { rows, first_column: first, heads, head_dim, stride };
    let buffers = [
        make_buffer_of_tested_type(rng.draw_vector(rows * stride)),
        make_buffer_of_tested_type(make_nan_values(rows * heads * head_dim)),
        make_f32_buffer(make_nan_values(rows * heads)),
        make_buffer_of_tested_type(rng.draw_vector(head_dim)),
        make_buffer_of_tested_type(rng.draw_vector(rows * stride)),
        make_f32_buffer(rng.draw_vector(head_dim)),
    ];
    errors +=
        backends.compare(&format!("norm of heads {h:?}"), buffers, |ops, [x, raw, rstd, w, dx, dw]| {
            ops.rmsnorm_heads_forward(x.view_mut(), raw.view_mut(), rstd.view_mut(), w.view(), h, 1e-3);
            ops.rmsnorm_heads_backward(dx.view_mut(), dw.view_mut(), raw.view(), rstd.view(), w.view(), h);
        })?;
    let half = head_dim; // the heads are twice as wide
    let stride = heads * 2 * half + if half.is_multiple_of(8) { 8 } else { 5 };
    let shape = RopeShape { b, t, heads, head_dim: 2 * half, stride };
    let angles: Vec<f32> = rng.draw_vector(t * half);
    let buffers = [
        make_buffer_of_tested_type(rng.draw_vector(b * t * stride)),
        make_buffer_of_tested_type(rng.draw_vector(b * t * stride)),
        make_f32_buffer(angles.iter().map(|a| a.cos()).collect()),
        make_f32_buffer(angles.iter().map(|a| a.sin()).collect()),
    ];
    errors += backends.compare(&format!("{shape:?}"), buffers, |ops, [x, dx, cos, sin]| {
        ops.rope_forward(x.view_mut(), cos.view(), sin.view(), shape);
        ops.rope_backward(dx.view_mut(), cos.view(), sin.view(), shape);
    })?;
    Ok(errors)
}

/// Compares SwiGLU, GeGLU and GELU on the GPU with the CPU as the reference, on `m` rows of `f`
/// elements.
pub(super) fn compare_activations(backends: &Backends, seed: u64, m: usize, f: usize) -> CaseResult {
    let mut errors = MaxErrors::default();
    let mut rng = CaseRng::new(seed);
    let mut large = |len| rng.draw_vector(len).iter().map(|x| x * 9.0).collect::<Vec<_>>();
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(m * f)),
        make_buffer_of_tested_type(make_nan_values(m * f)),
        make_buffer_of_tested_type(make_nan_values(m * 2 * f)),
        make_buffer_of_tested_type(make_nan_values(m * 2 * f)),
        make_buffer_of_tested_type(large(m * 2 * f)),
        make_buffer_of_tested_type(large(m * f)),
        make_buffer_of_tested_type(large(m * f)),
        make_buffer_of_tested_type(large(m * f)),
        make_buffer_of_tested_type(make_nan_values(m * f)),
        make_buffer_of_tested_type(make_nan_values(m * f)),
    ];
    errors += backends.compare(
        &format!("activations {m} {f}"),
        buffers,
        |ops, [silu, gelu, dsilu, dgelu, gate_up, dy, dy_gelu, dy_gelu_only, y, dx]| {
            ops.swiglu_forward(silu.view_mut(), gate_up.view(), m, f);
            ops.swiglu_backward(dsilu.view_mut(), dy.view_mut(), gate_up.view(), m, f);
            ops.geglu_forward(gelu.view_mut(), gate_up.view(), m, f);
            ops.geglu_backward(dgelu.view_mut(), dy_gelu.view_mut(), gate_up.view(), m, f);
            ops.gelu_forward(y.view_mut(), gate_up.view().slice(0..m * f));
            ops.gelu_backward(dx.view_mut(), dy_gelu_only.view_mut(), gate_up.view().slice(m * f..2 * m * f));
        },
    )?;
    Ok(errors)
}

/// Returns settings of attention dropout for a comparison of GPU and CPU, with the generator key
/// and the first sequence number derived from the random number `first`. The probability is 0.3.
pub(super) fn derive_dropout(first: u64) -> AttentionDropout {
    AttentionDropout { key: [first as u32, 5], probability: 0.3, first_sequence: first >> 22 }
}

/// Returns the largest number of elements of a head for which the GPU computes attention in f32.
/// The tiles of the backward kernel take 137 KiB of shared memory for heads of 256 elements. Only
/// data-centre GPUs have that much; others have 99 KiB.
pub(super) fn find_widest_head_in_f32(backends: &Backends) -> usize {
    if backends.cuda.properties().shared_memory_per_block < 144 << 10 { 176 } else { 256 }
}

/// Compares attention on the GPU with the CPU as the reference, for sequences of documents with
/// random lengths, where queries attend only within their document.
pub(super) fn compare_document_attention(
    backends: &Backends,
    seed: u64,
    shape: AttentionShape,
) -> CaseResult {
    let mut rng = CaseRng::new(seed);
    let mean = 1 + rng.draw_below(100);
    let starts = rng.draw_document_starts(shape.b, shape.t, mean);
    compare_attention_with_starts(backends, seed, shape, &starts)
}

/// Compares sliding-window attention on the GPU with the CPU as the reference: every query attends
/// to itself and up to `window − 1` positions before it.
pub(super) fn compare_windowed_attention(
    backends: &Backends,
    seed: u64,
    window: usize,
    shape: AttentionShape,
) -> CaseResult {
    let starts: Vec<u32> =
        (0..shape.b * shape.t).map(|i| (i % shape.t + 1).saturating_sub(window) as u32).collect();
    compare_attention_with_starts(backends, seed, shape, &starts)
}

/// Compares the GPU's attention with the CPU's, where the first position to which each query
/// attends is random.
pub(super) fn compare_attention_with_random_starts(
    backends: &Backends,
    seed: u64,
    shape: AttentionShape,
) -> CaseResult {
    let mut rng = CaseRng::new(seed);
    let starts: Vec<u32> = (0..shape.b * shape.t).map(|i| rng.draw_below(i % shape.t + 1) as u32).collect();
    compare_attention_with_starts(backends, seed, shape, &starts)
}

/// Compares attention on the GPU with the CPU as the reference, where `starts[i]` is the first
/// position to which query `i` attends.
fn compare_attention_with_starts(
    backends: &Backends,
    seed: u64,
    shape: AttentionShape,
    starts: &[u32],
) -> CaseResult {
    let mut errors = MaxErrors::default();
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let mut rng = CaseRng::new(seed);
    let qkv = b * t * (heads + 2 * kv_heads) * head_dim;
    let o = b * t * heads * head_dim;
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(o)),
        make_f32_buffer(make_nan_values(b * heads * t)),
        make_buffer_of_tested_type(make_nan_values(qkv)),
        make_buffer_of_tested_type(rng.draw_vector(qkv)),
        make_buffer_of_tested_type(rng.draw_vector(o)),
    ];
    errors += backends.compare(&format!("{shape:?}"), buffers, |ops, [o, lse, dqkv, qkv, d_o]| {
        ops.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), starts, shape);
        ops.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), starts, shape);
    })?;
    Ok(errors)
}

/// Compares the classifier op (output layer and cross-entropy loss in one op) on the GPU with the
/// CPU as the reference, with and without gradients.
pub(super) fn compare_classifier(backends: &Backends, seed: u64, shape: ClassifierShape) -> CaseResult {
    let ClassifierShape { m, d, v, .. } = shape;
    let mut errors = MaxErrors::default();
    let mut rng = CaseRng::new(seed);
    let labels: Vec<u32> = (0..m)
        .map(|_| if rng.draw_below(5) == 0 { IGNORE_LABEL } else { rng.draw_below(v) as u32 })
        .collect();
    for dw_write in [WriteMode::Overwrite, WriteMode::Accumulate] {
        let dw = rng.draw_initial_output(dw_write, v * d);
        let buffers = [
            make_f32_buffer(make_nan_values(m)),
            make_f32_buffer(make_nan_values(m)),
            make_buffer_of_tested_type(make_nan_values(m * d)),
            make_f32_buffer(dw),
            make_buffer_of_tested_type(rng.draw_vector(m * d)),
            make_buffer_of_tested_type(rng.draw_vector(v * d)),
        ];
        errors +=
            backends.compare(&format!("{shape:?}"), buffers, |ops, [loss, loss_only, dx, dw, x, w]| {
                let grads = ClassifierGrads { dx: dx.view_mut(), dw: dw.view_mut(), dw_write, scale: 0.25 };
                ops.compute_classifier_loss(loss.view_mut(), x.view(), w.view(), &labels, shape, Some(grads));
                ops.compute_classifier_loss(loss_only.view_mut(), x.view(), w.view(), &labels, shape, None);
            })?;
    }
    Ok(errors)
}

/// Compares the token embedding on the GPU with the CPU as the reference, for `m` tokens, `d`
/// elements per token and a vocabulary of `v`.
pub(super) fn compare_embedding(backends: &Backends, seed: u64, m: usize, d: usize, v: usize) -> CaseResult {
    let mut errors = MaxErrors::default();
    let mut rng = CaseRng::new(seed);
    let tokens: Vec<u32> = (0..m).map(|_| rng.draw_below(v) as u32).collect();
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(m * d)),
        make_buffer_of_tested_type(rng.draw_vector(v * d)),
        make_f32_buffer(rng.draw_vector(v * d)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
    ];
    errors += backends.compare(&format!("embedding {m} {d} {v}"), buffers, |ops, [x, w, dw, dx]| {
        ops.embedding_forward(x.view_mut(), w.view(), &tokens, d);
        ops.embedding_backward(dw.view_mut(), dx.view(), &tokens, d);
    })?;
    Ok(errors)
}

/// Compares elementwise ops and optimizers on the GPU with the CPU as the reference, on vectors of
/// `n` elements.
pub(super) fn compare_vectors_and_optimizers(backends: &Backends, seed: u64, n: usize) -> CaseResult {
    let mut errors = MaxErrors::default();
    let mut rng = CaseRng::new(seed);
    let buffers = [
        make_buffer_of_tested_type(rng.draw_vector(n)),
        make_buffer_of_tested_type(rng.draw_vector(n)),
        make_buffer_of_tested_type(rng.draw_vector(n)),
    ];
    let sums = RefCell::new(Vec::new());
    errors += backends.compare(&format!("elementwise ops {n}"), buffers, |ops, [y, x, z]| {
        ops.add(y.view_mut(), x.view());
        ops.scale(z.view_mut(), -0.75);
        let mut out = vec![f64::NAN; n.div_ceil(NORM_BLOCK_LEN)];
        ops.sum_squares_by_block(&mut out, x.view());
        sums.borrow_mut().push(out);
    })?;
    compare_sums(format!("sum_squares_by_block {n}"), sums.into_inner(), 1e-12)?;
    let square = |v: Vec<f32>| v.iter().map(|x| x * x).collect::<Vec<_>>();
    let buffers = [
        make_f32_buffer(rng.draw_vector(n)),
        make_f32_buffer(rng.draw_vector(n)),
        make_f32_buffer(rng.draw_vector(n)),
        make_f32_buffer(square(rng.draw_vector(n))),
        make_f32_buffer(rng.draw_vector(n)),
        make_f32_buffer(rng.draw_vector(n)),
        make_buffer_of_tested_type(make_nan_values(n)),
    ];
    errors += backends.compare(
        &format!("optimizers {n}"),
        buffers,
        |ops, [p, g, avg, avg_sq, momentum, q, rounded]| {
            for (step, beta1) in [(1, 0.9), (2, 0.3)] {
                let h = AdamWHyperparams {
                    lr: 1e-2,
                    beta1,
                    beta2: 0.95,
                    eps: 1e-8,
                    weight_decay: 0.1,
                    step,
                    grad_scale: 0.5,
                };
                let rounded = Some(rounded.view_mut());
                ops.adamw(p.view_mut(), rounded, g.view(), avg.view_mut(), avg_sq.view_mut(), &h);
                let h = LionHyperparams { lr: 1e-3, beta1, beta2: 0.99, weight_decay: 0.1, grad_scale: 2.0 };
                ops.lion(q.view_mut(), g.view(), avg.view_mut(), &h);
                let h = SgdHyperparams { lr: 1e-2, momentum: 0.9, weight_decay: 0.01, grad_scale: 1.5 };
                ops.sgd(p.view_mut(), g.view(), momentum.view_mut(), &h);
                let h = SgdHyperparams { momentum: 0.0, weight_decay: 0.0, ..h };
                ops.sgd(q.view_mut(), g.view(), momentum.view_mut().slice(0..0), &h);
            }
        },
    )?;
    errors += compare_copies_and_rare_vector_ops(backends, &mut rng, n)?;
    errors += compare_stochastic_rounding(backends, &mut rng, n)?;
    Ok(errors)
}

/// Compares the bf16 numbers that stochastic rounding gives on the GPU and on the CPU bit by bit,
/// for usual and extreme `f32` inputs.
fn compare_stochastic_rounding(backends: &Backends, rng: &mut CaseRng, n: usize) -> CaseResult {
    let values: Vec<f32> = (0..n)
        .map(|i| match i % 3 {
            0 => f32::from_bits((rng.draw_48_bits() >> 7) as u32),
            1 => f32::from_bits(0x7f7f_0000 | (rng.draw_48_bits() >> 7) as u32 & 0x8000_ffff), // near the largest number
            _ => rng.draw_vector(1)[0],
        })
        .collect();
    let (key, step) = ([n as u32, 11], (1 << 40) + 3);
    for first in [0, 1, 4096, (1 << 34) - 2] {
        let rounding = StochasticRounding { key, first_element: first, step };
        let run = |ops: &dyn Ops| {
            let (x, mut y) = (ops.clone_to_device(values[..].into()), ops.zeroed(Dtype::Bf16, n));
            ops.round_stochastically(y.view_mut(), x.view(), &rounding);
            ops.clone_to_host(y.view()).view().half_bits().to_vec()
        };
        let (expected, actual) = (run(&backends.cpu), run(backends.cuda));
        if let Some(i) = (0..n).find(|&i| expected[i] != actual[i]) {
            return Err(ConformanceError::StochasticRoundingDiffers {
                rounding,
                input: values[i],
                gpu: actual[i],
                cpu: expected[i],
            });
        }
    }
    Ok(MaxErrors::default())
}

/// Compares copies within GPU memory and rarely used vector ops (such as those of the optimizer
/// Muon) on the GPU with the CPU.
fn compare_copies_and_rare_vector_ops(backends: &Backends, rng: &mut CaseRng, n: usize) -> CaseResult {
    let (rows, columns) = (n.isqrt(), n / n.isqrt());
    let sums = RefCell::new(Vec::new());
    let buffers = [
        make_f32_buffer(rng.draw_vector(n)),
        make_f32_buffer(rng.draw_vector(n)),
        make_f32_buffer(rng.draw_vector(n)),
        make_f32_buffer(make_nan_values(n)),
        make_f32_buffer(make_nan_values(n)),
        make_f32_buffer(make_nan_values(n)),
        make_buffer_of_tested_type(rng.draw_vector(n)),
    ];
    let errors = backends.compare(
        &format!("vectors {n}"),
        buffers,
        |ops, [x, y, z, conv1d, copy, cleared, narrow]| {
            ops.add_scalar(x.view_mut(), 0.5);
            ops.axpby(y.view_mut(), 0.75, x.view(), -1.25);
            ops.softcap(z.view_mut(), 3.0);
            let dropout = SampleDropout {
                key: [n as u32, 7],
                probability: 0.3,
                sample_len: n.div_ceil(2),
                first_sample: (1 << 33) + 5,
            };
            let prefix = 0..n / 2 * 2 / dropout.sample_len * dropout.sample_len;
            ops.dropout(z.view_mut().slice(prefix.clone()), &dropout);
            ops.dropout(narrow.view_mut().slice(prefix), &dropout);
            ops.nesterov_momentum(x.view_mut(), z.view_mut(), 0.95, 0.5);
            let prefix = rows * columns;
            ops.fill_with_zeros(conv1d.view_mut());
            ops.transpose(conv1d.view_mut().slice(0..prefix), y.view().slice(0..prefix), rows, columns);
            ops.copy(copy.view_mut(), x.view());
            ops.move_elements_to_lower_index(copy.view_mut(), n / 3..n - n / 5, n / 4);
            ops.fill_with_zeros(cleared.view_mut());
            let parts = [x.view(), y.view().slice(0..n / 2), z.view()];
            let total = ops.sum_squares_by_block_concat(&parts).iter().sum();
            sums.borrow_mut().push(vec![ops.sum_squares(y.view()), total]);
        },
    )?;
    compare_sums(format!("sums of squares {n}"), sums.into_inner(), 1e-5)?;
    Ok(errors)
}

/// Compares pairs of sums, one from the CPU and one from the GPU, and fails if a relative
/// difference exceeds `tolerance`. The error contains the name `case`.
fn compare_sums(case: String, sums: Vec<Vec<f64>>, tolerance: f64) -> Result<(), ConformanceError> {
    for pair in sums.as_chunks::<2>().0 {
        let [cpu, gpu] = pair.clone();
        if !cpu.iter().zip(&gpu).all(|(cpu, gpu)| (cpu - gpu).abs() <= cpu * tolerance) {
            return Err(ConformanceError::SumsDiffer { case, gpu, cpu });
        }
    }
    Ok(())
}
