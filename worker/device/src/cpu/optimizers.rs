//! Optimizers on the CPU: updates of AdamW, SGD and Lion, and Nesterov momentum.
//!
//! The updates use no fused multiply-add, so every machine computes the same bits. This costs no
//! time, because updates are limited by memory bandwidth.
use super::backend::Cpu;
use super::instruction_set::multiversion;
use super::row_outputs::SliceRows;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{
    AdamWCoefficients, AdamWHyperparams, LionCoefficients, LionHyperparams, OptimizerOps, SgdHyperparams,
    VectorOps, expect_lens,
};

/// Returns an `f32` vector, which an optimizer updates, as a matrix with one element per row, so
/// that parallel tasks can update different ranges.
fn to_single_element_rows(x: ViewMut<'_>) -> SliceRows<'_, f32> {
    SliceRows::new(x.host_slice_mut(), 1)
}

impl OptimizerOps for Cpu {
    fn adamw(
        &self,
        mut p: ViewMut,
        rounded: Option<ViewMut>,
        g: View,
        exp_avg: ViewMut,
        exp_avg_sq: ViewMut,
        hyper: &AdamWHyperparams,
    ) {
        let len = p.len();
        let (avg, avg_sq) = (("exp_avg", exp_avg.len(), len), ("exp_avg_sq", exp_avg_sq.len(), len));
        expect_lens("adamw", [("g", g.len(), len), avg, avg_sq]);
        let (g, scalars) = (g.host_slice(), hyper.compute_coefficients());
        let outputs = (
            to_single_element_rows(p.reborrow()),
            to_single_element_rows(exp_avg),
            to_single_element_rows(exp_avg_sq),
        );
        self.run_over_output_rows(len, 1, outputs, |r, (p, avg, avg_sq)| {
            adamw_range(self.instruction_set, p, &g[r], avg, avg_sq, scalars);
        });
        if let Some(rounded) = rounded {
            self.cast(rounded, p.into_view());
        }
    }

    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, hyper: &SgdHyperparams) {
        let len = p.len();
        // Without momentum, the buffer's rows are empty.
        let width = usize::from(hyper.momentum != 0.0);
        let buffer_len = momentum_buffer.len();
        expect_lens("sgd", [("g", g.len(), len), ("momentum_buffer", buffer_len, width * len)]);
        let g = g.host_slice();
        let outputs = (to_single_element_rows(p), SliceRows::new(momentum_buffer.host_slice_mut(), width));
        self.run_over_output_rows(len, 1, outputs, |r, (p, buffer)| {
            sgd_range(self.instruction_set, p, &g[r], buffer, *hyper);
        });
    }

    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, hyper: &LionHyperparams) {
        let len = p.len();
        expect_lens("lion", [("g", g.len(), len), ("exp_avg", exp_avg.len(), len)]);
        let (g, scalars) = (g.host_slice(), hyper.compute_coefficients());
        self.run_over_output_rows(
            len,
            1,
            (to_single_element_rows(p), to_single_element_rows(exp_avg)),
            |r, (p, avg)| {
                lion_range(self.instruction_set, p, &g[r], avg, scalars);
            },
        );
    }

    fn nesterov_momentum(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32) {
        let len = g.len();
        expect_lens("nesterov_momentum", [("g", len, buffer.len())]);
        let (mu, one_minus_mu) = (mu as f32, (1.0 - mu) as f32);
        self.run_over_output_rows(
            len,
            1,
            (to_single_element_rows(buffer), to_single_element_rows(g)),
            |_, (buffer, g)| {
                for (b, g) in buffer.iter_mut().zip(g) {
                    let scaled = *g * scale;
                    *b += one_minus_mu * (scaled - *b);
                    *g = scaled + mu * (*b - scaled);
                }
            },
        );
    }
}

multiversion! {
    /// Applies one AdamW update to a range of parameters with the given instruction set.
    fn adamw_range = adamw_vectors(p: &mut [f32], g: &[f32], avg: &mut [f32], avg_sq: &mut [f32], hyper: AdamWCoefficients)
}
multiversion! {
    /// Applies one SGD update to a range of parameters with the given instruction set.
    fn sgd_range = sgd_vectors(p: &mut [f32], g: &[f32], buffer: &mut [f32], hyper: SgdHyperparams)
}
multiversion! {
    /// Applies one Lion update to a range of parameters with the given instruction set.
    fn lion_range = lion_vectors(p: &mut [f32], g: &[f32], avg: &mut [f32], hyper: LionCoefficients)
}

/// Applies one AdamW update to a range of parameters and to the two moving averages of these
/// parameters.
#[inline(always)]
fn adamw_vectors<S: Simd>(
    s: S,
    p: &mut [f32],
    g: &[f32],
    avg: &mut [f32],
    avg_sq: &mut [f32],
    hyper: AdamWCoefficients,
) {
    let (from_end, weight) = (hyper.from_end != 0, s.splat(hyper.weight));
    for i in (0..p.len()).step_by(LANES) {
        let grad = s.mul(load_lanes(s, g, i), s.splat(hyper.grad_scale));
        let param = s.mul(load_lanes(s, p, i), s.splat(hyper.decay_factor));
        let m = load_lanes(s, avg, i);
        let m = s.add(if from_end { grad } else { m }, s.mul(weight, s.sub(grad, m)));
        let v = s.mul(load_lanes(s, avg_sq, i), s.splat(hyper.beta2));
        let v = s.add(v, s.mul(s.mul(s.splat(hyper.one_minus_beta2), grad), grad));
        let denom = s.add(s.div(s.sqrt(v), s.splat(hyper.correction2)), s.splat(hyper.eps));
        store_lanes(s, avg, i, m);
        store_lanes(s, avg_sq, i, v);
        store_lanes(s, p, i, s.add(param, s.div(s.mul(s.splat(hyper.step), m), denom)));
    }
}

/// Applies one SGD update to a range of parameters and to the momentum buffer. `buffer` is empty
/// without momentum.
#[inline(always)]
fn sgd_vectors<S: Simd>(s: S, p: &mut [f32], g: &[f32], buffer: &mut [f32], hyper: SgdHyperparams) {
    let (decay, momentum) = (s.splat(hyper.weight_decay as f32), s.splat(hyper.momentum as f32));
    for i in (0..p.len()).step_by(LANES) {
        let param = load_lanes(s, p, i);
        let mut grad = s.mul(load_lanes(s, g, i), s.splat(hyper.grad_scale));
        if hyper.weight_decay != 0.0 {
            grad = s.add(grad, s.mul(decay, param));
        }
        if !buffer.is_empty() {
            grad = s.add(s.mul(momentum, load_lanes(s, buffer, i)), grad);
            store_lanes(s, buffer, i, grad);
        }
        store_lanes(s, p, i, s.add(param, s.mul(s.splat(-hyper.lr as f32), grad)));
    }
}

/// Applies one Lion update to a range of parameters and to the moving averages of these parameters'
/// gradients. The sign of 0 is 0.
#[inline(always)]
fn lion_vectors<S: Simd>(_: S, p: &mut [f32], g: &[f32], avg: &mut [f32], hyper: LionCoefficients) {
    let LionCoefficients { grad_scale, decay_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, lr } =
        hyper;
    for ((p, g), m) in p.iter_mut().zip(g).zip(avg) {
        let grad = g * grad_scale;
        let interpolated = *m * beta1 + grad * one_minus_beta1;
        let sign = f32::from(interpolated > 0.0) - f32::from(interpolated < 0.0);
        *p = *p * decay_factor - lr * sign;
        *m = *m * beta2 + grad * one_minus_beta2;
    }
}
