//! Compares the ops of mixture-of-experts layers (router, row ops, grouped matmuls) on the GPU with
//! the CPU, for a given shape.
use super::comparison::{
    Backends, CaseResult, CaseRng, make_buffer_of_tested_type, make_f32_buffer, make_nan_values,
};
use super::error::ConformanceError;
use crate::ops::{RouterBackwardInputs, RouterShape, RowGroup, WriteMode};
use std::cell::RefCell;

/// Compares the router of a mixture-of-experts layer, and ops on rows of tokens (gather, combine,
/// dot, scale), on the GPU with the CPU as the reference.
pub(super) fn compare_expert_ops(
    backends: &Backends,
    seed: u64,
    m: usize,
    count: usize,
    per_token: usize,
    d: usize,
) -> CaseResult {
    let mut rng = CaseRng::new(seed);
    let shape = RouterShape {
        m,
        experts: count,
        experts_per_token: per_token,
        normalize_weights: seed.is_multiple_of(2),
    };
    let mut errors = compare_router(backends, &mut rng, shape)?;
    errors += compare_expert_row_ops(backends, &mut rng, m, per_token, d)?;
    Ok(errors)
}

/// Compares the forward and the backward pass of a mixture-of-experts router on the GPU with the
/// CPU as the reference. Both must choose the same experts.
fn compare_router(backends: &Backends, rng: &mut CaseRng, shape: RouterShape) -> CaseResult {
    let RouterShape { m, experts, experts_per_token, .. } = shape;
    let (balance, z) = (rng.draw_vector(experts), 0.3);
    // Multiples of ¼, which every type represents exactly. Some are equal.
    let logits: Vec<f32> = (0..m * experts).map(|_| rng.draw_below(40) as f32 * 0.25).collect();
    let buffers = [
        make_f32_buffer(make_nan_values(m * experts)),
        make_f32_buffer(make_nan_values(m * experts_per_token)),
        make_f32_buffer(make_nan_values(m)),
        make_buffer_of_tested_type(make_nan_values(m * experts)),
        make_buffer_of_tested_type(logits),
        make_f32_buffer(rng.draw_vector(m * experts_per_token)),
    ];
    let selections = RefCell::new(Vec::new());
    let errors = backends.compare(
        &format!("{shape:?}"),
        buffers,
        |ops, [probs, weights, lse, dlogits, logits, dweights]| {
            let mut chosen = vec![u32::MAX; m * experts_per_token];
            let outputs = (probs.view_mut(), weights.view_mut(), lse.view_mut());
            ops.router_forward(outputs.0, outputs.1, outputs.2, Some(&mut chosen), logits.view(), shape);
            let buffers = RouterBackwardInputs {
                probs: probs.view(),
                lse: lse.view(),
                chosen_experts: &chosen,
                balance_grad: &balance,
                z_loss_coef: z,
            };
            ops.router_backward(dlogits.view_mut(), dweights.view(), buffers, shape);
            selections.borrow_mut().push(chosen);
        },
    )?;
    let selections = selections.into_inner();
    if selections.iter().any(|c| c != &selections[0]) {
        return Err(ConformanceError::ExpertsDiffer(shape));
    }
    Ok(errors)
}

/// Compares row operations of mixture-of-experts layers (gather, combine, dot, scale) on the GPU
/// with the CPU, for `m` tokens of `d` elements and `per_token` experts per token.
fn compare_expert_row_ops(
    backends: &Backends,
    rng: &mut CaseRng,
    m: usize,
    per_token: usize,
    d: usize,
) -> CaseResult {
    let row_indices: Vec<u32> = (0..m * per_token).map(|_| rng.draw_below(m) as u32).collect();
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(m * per_token * d)),
        make_buffer_of_tested_type(make_nan_values(m * d)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
        make_f32_buffer(make_nan_values(m)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
        make_buffer_of_tested_type(rng.draw_vector(m * d)),
        make_f32_buffer(rng.draw_vector(m * per_token)),
        make_f32_buffer(rng.draw_vector(m)),
    ];
    backends.compare(
        &format!("rows {m} {per_token} {d}"),
        buffers,
        |ops, [gathered, set, added, dots, x, scaled, weights, factors]| {
            ops.gather_rows(gathered.view_mut(), x.view(), &row_indices, d);
            let weights = Some(weights.view());
            ops.combine_rows(set.view_mut(), x.view(), weights, &row_indices, m, d, WriteMode::Overwrite);
            ops.combine_rows(added.view_mut(), x.view(), None, &row_indices, m, d, WriteMode::Accumulate);
            ops.dot_rows(dots.view_mut(), x.view(), scaled.view(), d);
            ops.scale_rows(scaled.view_mut(), factors.view(), d);
        },
    )
}

/// Compares grouped matmuls, in which each group of rows has a separate matrix, on GPU and CPU, for
/// groups with `sizes` rows.
pub(super) fn compare_grouped_matmul(
    backends: &Backends,
    seed: u64,
    sizes: &[usize],
    n: usize,
    k: usize,
) -> CaseResult {
    let mut rng = CaseRng::new(seed);
    let mut groups = Vec::new();
    let (mut at, mut matrix) = (0, 1);
    for &size in sizes {
        groups.push(RowGroup { rows: at..at + size, matrix_offset: matrix });
        (at, matrix) = (at + size, matrix + n * k + 2);
    }
    let buffers = [
        make_buffer_of_tested_type(make_nan_values(at * n)),
        make_buffer_of_tested_type(make_nan_values(at * k)),
        make_f32_buffer(rng.draw_vector(matrix)),
        make_buffer_of_tested_type(rng.draw_vector(at * k)),
        make_buffer_of_tested_type(rng.draw_vector(at * n)),
        make_buffer_of_tested_type(rng.draw_vector(matrix)),
    ];
    backends.compare(&format!("groups {sizes:?} {n} {k}"), buffers, |ops, [y, dx, dw, x, dy, w]| {
        ops.grouped_forward(y.view_mut(), x.view(), w.view(), &groups, n, k);
        ops.grouped_backward_input(dx.view_mut(), dy.view(), w.view(), &groups, n, k);
        ops.grouped_backward_weight(dw.view_mut(), dy.view(), x.view(), &groups, n, k);
    })
}
