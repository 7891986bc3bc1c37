//! The optimizer Adafactor (Shazeer and Stern, 2018), which estimates the second moments of a
//! matrix from the means of its rows and columns.
//!
//! The formula is that of `Adafactor` of transformers with `scale_parameter=False`,
//! `relative_step=False` and `warmup_init=False`: the job's learning rate applies unchanged.
use crate::optim::{
    unit_states::StateViews,
    update_rule::{ElementwiseUpdate, UpdateInputs, UpdateMethod, UpdateRule, WholeTensorUpdate},
};
use ckpt::TensorRole;
use device::{Buf, Dtype, Ops, View, ViewMut};
use jobspec::OptimizerSpec;

/// The optimizer Adafactor, which stores second moments of a matrix only as one number per row and
/// one per column.
pub(super) struct Adafactor;

impl UpdateRule for Adafactor {
    fn list_state_roles(&self, spec: &OptimizerSpec) -> Vec<TensorRole> {
        let first_moment = spec.beta1.map(|_| TensorRole::ExpAvg);
        let second_moments = [TensorRole::ExpAvgSqRow, TensorRole::ExpAvgSqCol, TensorRole::ExpAvgSqVector];
        first_moment.into_iter().chain(second_moments).collect()
    }

    fn select_method(&self, _: &[usize], _: bool) -> UpdateMethod {
        UpdateMethod { direction: Some(&Adafactor), update: ElementwiseUpdate::InPlace(update) }
    }
}

/// The purpose that out-of-memory errors state for memory that Adafactor needs for its updates.
const MEMORY_LABEL: &str = "Adafactor updates";

impl WholeTensorUpdate for Adafactor {
    fn memory_label(&self) -> &'static str {
        MEMORY_LABEL
    }

    fn count_allocated_elements(&self, shape: &[usize]) -> usize {
        2 * shape.iter().product::<usize>() + if shape.len() == 2 { shape[0] + shape[1] } else { 0 }
    }

    /// Multiplies this rank's part of a gradient in place by the step's gradient scale, which
    /// includes the clipping of the gradient norm. For a parameter that is not a matrix, also
    /// updates the second moments, and divides the gradient by their roots.
    fn prepare_gradient(
        &self,
        ops: &dyn Ops,
        mut g: ViewMut,
        mut states: StateViews,
        inputs: &UpdateInputs<'_>,
    ) {
        ops.scale(g.reborrow(), inputs.grad_scale);
        if inputs.shape.len() != 2 {
            let mut exp_avg_sq = states.take_state(TensorRole::ExpAvgSqVector);
            update_row_square_means(ops, exp_avg_sq.reborrow(), g.as_view(), 1, inputs);
            divide_rows_by_roots(ops, g, exp_avg_sq.as_view(), 1, |_| 1.0);
        }
    }

    /// Computes by how much Adafactor changes each element of a tensor: the normalized gradient
    /// with a limited root mean square, multiplied by the learning rate.
    fn compute_direction(
        &self,
        ops: &dyn Ops,
        prepared: View,
        states: StateViews,
        inputs: &UpdateInputs<'_>,
    ) -> Buf {
        let mut direction = match *inputs.shape {
            [rows, columns] => normalize_matrix(ops, prepared, [rows, columns], states, inputs),
            _ => ops.clone_to_device(prepared),
        };
        let rms = libm::sqrt(ops.sum_squares(direction.view()) / direction.len() as f64);
        let clip = (rms / inputs.spec.clip_threshold).max(1.0);
        ops.scale(direction.view_mut(), (inputs.lr / clip) as f32);
        direction
    }
}

/// Updates the moving averages of a matrix gradient's squares for each row and column, and returns
/// the gradient divided by the root mean squares estimated from these averages. The estimate for an
/// element is the mean of its row times that of its column, divided by the mean over all rows.
fn normalize_matrix(
    ops: &dyn Ops,
    g: View,
    [rows, columns]: [usize; 2],
    mut states: StateViews,
    inputs: &UpdateInputs<'_>,
) -> Buf {
    let allocate = || ops.zeroed_with_purpose(MEMORY_LABEL, Dtype::F32, g.len());
    let (mut by_column, mut normalized) = (allocate(), allocate());
    ops.transpose(by_column.view_mut(), g, rows, columns);
    let [mut row_means, mut column_means] =
        [TensorRole::ExpAvgSqRow, TensorRole::ExpAvgSqCol].map(|role| states.take_state(role));
    update_row_square_means(ops, row_means.reborrow(), g, columns, inputs);
    update_row_square_means(ops, column_means.reborrow(), by_column.view(), rows, inputs);
    divide_rows_by_roots(ops, by_column.view_mut(), column_means.as_view(), rows, |_| 1.0);
    ops.transpose(normalized.view_mut(), by_column.view(), columns, rows);
    let compute_mean = |means: &[f32]| means.iter().map(|&m| f64::from(m)).sum::<f64>() / means.len() as f64;
    divide_rows_by_roots(ops, normalized.view_mut(), row_means.as_view(), columns, compute_mean);
    normalized
}

/// Updates the moving average of the squared gradient of each row, in `means`, with the mean of the
/// row's squared elements in the gradient `g`. A row has `len` elements. `eps` is added to every
/// square.
fn update_row_square_means(ops: &dyn Ops, means: ViewMut, g: View, len: usize, inputs: &UpdateInputs<'_>) {
    let mut squares = ops.zeroed_with_purpose(MEMORY_LABEL, Dtype::F32, means.len());
    ops.dot_rows(squares.view_mut(), g, g, len);
    ops.scale(squares.view_mut(), (1.0 / len as f64) as f32);
    ops.add_scalar(squares.view_mut(), inputs.group.eps as f32);
    let one_minus_beta2 = libm::pow(inputs.update as f64, inputs.spec.beta2_decay);
    ops.axpby(means, (1.0 - one_minus_beta2) as f32, squares.view(), one_minus_beta2 as f32);
}

/// Divides row r of the matrix `x` by the square root of `means[r]`, where all `means` are first
/// divided by the number `unit(means)`.
fn divide_rows_by_roots(ops: &dyn Ops, x: ViewMut, means: View, len: usize, unit: impl Fn(&[f32]) -> f64) {
    let means = ops.clone_to_host(means);
    let unit = unit(means.host_slice());
    let factors: Vec<f32> =
        means.host_slice().iter().map(|&m| libm::sqrt(unit / f64::from(m)) as f32).collect();
    let factors = ops.clone_to_device(factors[..].into());
    ops.scale_rows(x, factors.view(), len);
}

/// Applies weight decay to a part of a parameter and subtracts Adafactor's direction, or the moving
/// average of the directions if the job sets `beta1`.
fn update(ops: &dyn Ops, p: ViewMut, direction: View, mut states: StateViews, inputs: &UpdateInputs<'_>) {
    let keep = (1.0 - inputs.lr * inputs.group.weight_decay) as f32;
    let Some(beta1) = inputs.spec.beta1 else { return ops.axpby(p, keep, direction, -1.0) };
    let mut exp_avg = states.take_state(TensorRole::ExpAvg);
    ops.axpby(exp_avg.reborrow(), beta1 as f32, direction, (1.0 - beta1) as f32);
    ops.axpby(p, keep, exp_avg.as_view(), -1.0);
}
