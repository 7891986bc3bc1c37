//! The optimizer Muon (Jordan and others, 2024), which updates a matrix along its orthogonalized
//! momentum. AdamW updates the embedding, the head and everything that is not a matrix.
//!
//! The formula is that of torch.optim.Muon with Nesterov momentum and
//! `adjust_lr_fn="match_rms_adamw"`: the learning rate is multiplied by 0.2·√max(rows, columns), so
//! that a learning rate for AdamW suits Muon.
use super::adamw;
use crate::optim::{
    unit_states::StateViews,
    update_rule::{ElementwiseUpdate, UpdateInputs, UpdateMethod, UpdateRule, WholeTensorUpdate},
};
use ckpt::TensorRole;
use device::{Buf, Dtype, Ops, View, ViewMut, ops::WriteMode};
use jobspec::OptimizerSpec;

/// The number of Newton–Schulz iterations with which a matrix is orthogonalized.
const NEWTON_SCHULZ_STEPS: usize = 5;
/// The coefficients of the polynomial a·x + b·x³ + c·x⁵, which one Newton–Schulz iteration applies
/// to the singular values.
const NEWTON_SCHULZ_COEFFICIENTS: (f32, f32, f32) = (3.4445, -4.7750, 2.0315);
/// The smallest norm by which Muon divides a matrix before its orthogonalization, to avoid a
/// division by zero.
const MIN_NORM: f64 = 1e-7;

/// The optimizer Muon, which keeps a momentum for matrices, and updates all other parameters by
/// AdamW.
pub(super) struct Muon;

impl UpdateRule for Muon {
    /// Lists the kinds of optimizer states that Muon keeps: its momentum, and the first and second
    /// moments for the parameters that AdamW updates. The first moment of AdamW has another role
    /// than in a job with AdamW, so that checkpoints of the two optimizers are not confused.
    fn list_state_roles(&self, _: &OptimizerSpec) -> Vec<TensorRole> {
        vec![TensorRole::Momentum, TensorRole::ExpAvgSq]
    }

    fn select_method(&self, shape: &[usize], is_in_layer: bool) -> UpdateMethod {
        match is_in_layer && shape.len() == 2 {
            true => {
                UpdateMethod { direction: Some(&Muon), update: ElementwiseUpdate::InPlace(update_matrix) }
            }
            false => UpdateMethod {
                direction: None,
                update: ElementwiseUpdate::WithRounding(|ops, p, rounded, g, states, inputs| {
                    let roles = [TensorRole::Momentum, TensorRole::ExpAvgSq];
                    adamw::update_with_moments(ops, (p, rounded), g, states, roles, inputs);
                }),
            },
        }
    }
}

impl WholeTensorUpdate for Muon {
    fn memory_label(&self) -> &'static str {
        "Muon matrices"
    }

    fn count_allocated_elements(&self, shape: &[usize]) -> usize {
        let (small, large) = (shape[0].min(shape[1]), shape[0].max(shape[1]));
        2 * small * small + 2 * small * large
    }

    /// Adds this rank's part of a gradient to Muon's momentum, and replaces the gradient in `g` by
    /// the Nesterov momentum.
    fn prepare_gradient(&self, ops: &dyn Ops, g: ViewMut, mut states: StateViews, inputs: &UpdateInputs<'_>) {
        ops.nesterov_momentum(
            states.take_state(TensorRole::Momentum),
            g,
            inputs.group.momentum,
            inputs.grad_scale,
        );
    }

    fn compute_direction(
        &self,
        ops: &dyn Ops,
        prepared: View,
        _: StateViews,
        inputs: &UpdateInputs<'_>,
    ) -> Buf {
        orthogonalize(ops, prepared, inputs.shape[0], inputs.shape[1])
    }
}

/// Applies Muon's update to a part of a matrix: weight decay, and a step against `direction`, the
/// orthogonalized momentum.
fn update_matrix(ops: &dyn Ops, p: ViewMut, direction: View, _: StateViews, inputs: &UpdateInputs<'_>) {
    let larger_side = inputs.shape[0].max(inputs.shape[1]) as f64;
    let keep = (1.0 - inputs.lr * inputs.group.weight_decay) as f32;
    let by = (inputs.lr * (0.2 * larger_side.sqrt())) as f32;
    ops.axpby(p, keep, direction, -by);
}

/// Computes approximately the orthogonal matrix nearest to the matrix `x[rows, columns]`, by
/// Newton–Schulz iterations. The singular values of the result are close to 1.
fn orthogonalize(ops: &dyn Ops, x: View, rows: usize, columns: usize) -> Buf {
    let norm = ops.sum_squares(x).sqrt().max(MIN_NORM);
    let allocate = |len: usize| ops.zeroed_with_purpose("Muon's matrices", Dtype::F32, len);
    let tall = rows > columns;
    let (m, n) = if tall { (columns, rows) } else { (rows, columns) };
    let mut wide = allocate(m * n);
    match tall {
        true => ops.transpose(wide.view_mut(), x, rows, columns),
        false => ops.copy(wide.view_mut(), x),
    }
    ops.scale(wide.view_mut(), (1.0 / norm) as f32);
    let (mut gram, mut square, mut next) = (allocate(m * m), allocate(m * m), allocate(m * n));
    let (a, b, c) = NEWTON_SCHULZ_COEFFICIENTS;
    for _ in 0..NEWTON_SCHULZ_STEPS {
        ops.matmul_forward(gram.view_mut(), wide.view(), wide.view(), m, m, n, WriteMode::Overwrite);
        // the Gram matrix is symmetric, so it equals its transpose
        ops.matmul_forward(square.view_mut(), gram.view(), gram.view(), m, m, m, WriteMode::Overwrite);
        ops.axpby(square.view_mut(), c, gram.view(), b);
        ops.matmul_backward_input(next.view_mut(), square.view(), wide.view(), m, m, n, WriteMode::Overwrite);
        ops.axpby(wide.view_mut(), a, next.view(), 1.0);
    }
    if tall {
        ops.transpose(next.view_mut(), wide.view(), columns, rows);
        return next;
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::cpu::Cpu;

    /// Orthogonalizes a matrix in host memory with the CPU backend, for tests.
    fn run_orthogonalize(ops: &dyn Ops, x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        orthogonalize(ops, x.into(), rows, columns).host_slice().to_vec()
    }

    /// Returns the transpose of `x[rows, columns]`.
    fn transpose(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
    }

    #[test]
    fn singular_values_become_close_to_one() {
        for (rows, columns) in [(1, 1), (3, 8), (8, 3), (17, 17), (1, 9)] {
            // nearly independent rows
            let x: Vec<f32> = (0..rows * columns).map(|i| ((i * i * 7 + 3 * i) % 23) as f32 - 11.0).collect();
            let y = run_orthogonalize(&Cpu::new(1), &x, rows, columns);
            let flipped = run_orthogonalize(&Cpu::new(2), &transpose(&x, rows, columns), columns, rows);
            // a tall matrix is computed through its transpose
            if rows != columns {
                assert_eq!(
                    transpose(&flipped, columns, rows),
                    y,
                    "{rows} x {columns}: differs from the transpose's"
                );
            }
            // the sum of the squared singular values
            let squares: f32 = y.iter().map(|v| v * v).sum();
            let rank = rows.min(columns) as f32;
            assert!((0.3 * rank..1.6 * rank).contains(&squares), "{rows} x {columns}: {squares}");
        }
        assert_eq!(run_orthogonalize(&Cpu::new(1), &[0.0; 6], 2, 3), [0.0; 6]);
    }
}
