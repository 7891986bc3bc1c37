//! RMSNorm (Zhang and Sennrich, 2019) on the CPU, with and without a preceding residual addition.
//!
//! Sums over a row have 16 lanes, which are then added in the order of [`Simd::sum`]. The gradient
//! of the weight is summed over chunks of rows, and the chunks' sums are added in order.
use super::backend::Cpu;
use super::elements::{F32Output, InputElements};
use super::elementwise::add_slices;
use super::instruction_set::multiversion;
use super::row_outputs::SliceRows;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{RmsNormOps, WriteMode, expect_lens};

impl RmsNormOps for Cpu {
    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32) {
        let op = "rmsnorm_forward";
        check_lengths(op, &[("y", y.len()), ("x", x.len())], rstd.len(), w.len(), m, d);
        let (x, w) = (InputElements::from(x), self.to_f32(w));
        let outputs = (self.as_rows_to_overwrite(y, d), SliceRows::new(rstd.host_slice_mut(), 1));
        self.run_over_output_rows(m, 2 * d, outputs, |rows, (mut y, rstd)| {
            normalize(self.instruction_set, &mut y, rstd, &x.rows_to_f32(self, &rows, d), &w, eps);
        });
    }

    fn add_rmsnorm_forward(
        &self,
        y: ViewMut,
        rstd: ViewMut,
        x: ViewMut,
        delta: View,
        w: View,
        m: usize,
        d: usize,
        eps: f32,
    ) {
        let lens = [("y", y.len()), ("x", x.len()), ("delta", delta.len())];
        check_lengths("add_rmsnorm_forward", &lens, rstd.len(), w.len(), m, d);
        let (delta, w) = (InputElements::from(delta), self.to_f32(w));
        let x = self.as_rows_to_update(x, d);
        let outputs = (self.as_rows_to_overwrite(y, d), SliceRows::new(rstd.host_slice_mut(), 1), x);
        self.run_over_output_rows(m, 3 * d, outputs, |rows, (mut y, rstd, mut x)| {
            let delta = delta.rows_to_f32(self, &rows, d);
            match &mut x {
                F32Output::Borrowed(x) => {
                    add_normalize(self.instruction_set, &mut y, rstd, x, &delta, &w, eps)
                }
                // The norm is computed from the rounded sum, which is what the backward pass reads.
                sum => {
                    add_slices(self.instruction_set, sum, &delta);
                    sum.round_now();
                    normalize(self.instruction_set, &mut y, rstd, sum, &w, eps);
                }
            }
        });
    }

    fn rmsnorm_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        dy: View,
        x: View,
        w: View,
        rstd: View,
        m: usize,
        d: usize,
        write: WriteMode,
    ) {
        let lens = [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())];
        check_lengths("rmsnorm_backward", &lens, rstd.len(), w.len(), m, d);
        expect_lens("rmsnorm_backward", [("dw", dw.len(), d)]);
        let (dy, x, w) = (InputElements::from(dy), InputElements::from(x), self.to_f32(w));
        let (dx, rstd) = (self.as_output_rows(dx, d, write), rstd.host_slice());
        self.run_over_rows_and_sum(m, dx, [dw.host_slice_mut()], |rows, mut dx, dw| {
            let (dy, x) = (dy.rows_to_f32(self, &rows, d), x.rows_to_f32(self, &rows, d));
            let inputs = RmsNormBackwardRows { dy: &dy, x: &x, w: &w, rstd: &rstd[rows] };
            differentiate(self.instruction_set, &mut dx, dw, inputs, write);
        });
    }
}

/// Panics if an argument of the RMSNorm op `op` has a length that does not fit `m` rows of `d`
/// elements.
fn check_lengths(op: &str, matrices: &[(&str, usize)], rstd: usize, w: usize, m: usize, d: usize) {
    assert!(d > 0, "{op}: d is 0");
    matrices.iter().for_each(|(name, len)| expect_lens(op, [(name, *len, m * d)]));
    expect_lens(op, [("rstd", rstd, m), ("w", w, d)]);
}

multiversion! {
    /// Computes RMSNorm of each row of `x` with the given instruction set, and writes the
    /// reciprocal root mean squares to `rstd`.
    pub(super) fn normalize = normalize_rows(y: &mut [f32], rstd: &mut [f32], x: &[f32], w: &[f32], eps: f32)
}
multiversion! {
    /// Adds `delta` to `x` in place, and computes RMSNorm of each row of the sum, with the given
    /// instruction set.
    fn add_normalize = add_normalize_rows(
        y: &mut [f32], rstd: &mut [f32], x: &mut [f32], delta: &[f32], w: &[f32], eps: f32
    )
}
multiversion! {
    /// Computes RMSNorm's gradients of the input and the weight for the rows of one parallel task,
    /// with the given instruction set.
    pub(super) fn differentiate = differentiate_rows(dx: &mut [f32], dw: &mut [f32], inputs: RmsNormBackwardRows, write: WriteMode)
}

/// Computes RMSNorm of each row of `x`, and writes the reciprocal root mean square of each row to
/// `rstd`.
#[inline(always)]
fn normalize_rows<S: Simd>(s: S, y: &mut [f32], rstd: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    let d = w.len();
    for (row, rstd) in rstd.iter_mut().enumerate() {
        let (x, y) = (&x[row * d..][..d], &mut y[row * d..][..d]);
        let mut squares = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            let x = load_lanes(s, x, i);
            squares = s.fma(x, x, squares);
        }
        *rstd = write_normalized_row(s, y, x, w, squares, eps);
    }
}

/// Adds `delta` to `x` in place (a residual addition), and computes RMSNorm of each row of the sum.
#[inline(always)]
fn add_normalize_rows<S: Simd>(
    s: S,
    y: &mut [f32],
    rstd: &mut [f32],
    x: &mut [f32],
    delta: &[f32],
    w: &[f32],
    eps: f32,
) {
    let d = w.len();
    for (row, rstd) in rstd.iter_mut().enumerate() {
        let (x, delta) = (&mut x[row * d..][..d], &delta[row * d..][..d]);
        let mut squares = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            let sum = s.add(load_lanes(s, x, i), load_lanes(s, delta, i));
            store_lanes(s, x, i, sum);
            squares = s.fma(sum, sum, squares);
        }
        *rstd = write_normalized_row(s, &mut y[row * d..][..d], x, w, squares, eps);
    }
}

/// Normalizes one row, given the sum of its squares: writes `y = x·rstd·w`, and returns `rstd`, the
/// reciprocal root mean square.
#[inline(always)]
fn write_normalized_row<S: Simd>(s: S, y: &mut [f32], x: &[f32], w: &[f32], squares: S::V, eps: f32) -> f32 {
    let d = x.len();
    let mean = f64::from(s.sum(squares)) / d as f64;
    let rstd = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
    let r = s.splat(rstd);
    for i in (0..d).step_by(LANES) {
        store_lanes(s, y, i, s.mul(s.mul(load_lanes(s, x, i), r), load_lanes(s, w, i)));
    }
    rstd
}

/// Inputs of RMSNorm's backward pass for one parallel task: the weight, and the task's rows of the
/// input, the output gradient and the reciprocal root mean squares.
#[derive(Clone, Copy)]
pub(super) struct RmsNormBackwardRows<'a> {
    /// Gradient of the forward pass's output.
    pub(super) dy: &'a [f32],
    /// Input of the forward pass.
    pub(super) x: &'a [f32],
    /// Weight, one element per column.
    pub(super) w: &'a [f32],
    /// Reciprocal root mean square of each row, from the forward pass.
    pub(super) rstd: &'a [f32],
}

/// Computes RMSNorm's gradients of the input and the weight for the rows of one parallel task. With
/// x̂ = x·rstd and g = dy·w, these are `dx (=|+=) rstd·(g − x̂·mean(g·x̂))` and `dw += dy·x̂`.
#[inline(always)]
fn differentiate_rows<S: Simd>(
    s: S,
    dx: &mut [f32],
    dw: &mut [f32],
    inputs: RmsNormBackwardRows,
    write: WriteMode,
) {
    let d = inputs.w.len();
    for (row, &rstd) in inputs.rstd.iter().enumerate() {
        let (dy, x) = (&inputs.dy[row * d..][..d], &inputs.x[row * d..][..d]);
        let dx = &mut dx[row * d..][..d];
        let r = s.splat(rstd);
        let mut dot = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            let (dy, xhat) = (load_lanes(s, dy, i), s.mul(load_lanes(s, x, i), r));
            store_lanes(s, dw, i, s.fma(dy, xhat, load_lanes(s, dw, i)));
            dot = s.fma(s.mul(dy, load_lanes(s, inputs.w, i)), xhat, dot);
        }
        let mean = s.splat((f64::from(s.sum(dot)) / d as f64) as f32);
        for i in (0..d).step_by(LANES) {
            let xhat = s.mul(load_lanes(s, x, i), r);
            let g = s.mul(load_lanes(s, dy, i), load_lanes(s, inputs.w, i));
            let v = s.mul(r, s.fnma(xhat, mean, g));
            let v = if write == WriteMode::Accumulate { s.add(load_lanes(s, dx, i), v) } else { v };
            store_lanes(s, dx, i, v);
        }
    }
}
