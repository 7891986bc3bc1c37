//! Updates of AdamW, SGD and Lion, and Nesterov momentum.
//!
//! The updates use no fused multiply-add, so every machine computes the same bits. This costs no
//! time, because updates are limited by memory bandwidth.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::ops::expect_len;
use crate::ops::{AdamWHyperparams, LionHyperparams, SgdHyperparams};

/// Implements [`crate::Ops::adamw`].
pub(crate) fn adamw(
    cpu: &Cpu,
    p: &mut [f32],
    g: &[f32],
    avg: &mut [f32],
    avg_sq: &mut [f32],
    hyper: &AdamWHyperparams,
) {
    let len = p.len();
    expect_len("adamw", "g", g.len(), len);
    expect_len("adamw", "exp_avg", avg.len(), len);
    expect_len("adamw", "exp_avg_sq", avg_sq.len(), len);
    assert!(hyper.step > 0, "adamw: the step is 0, but steps count from 1");
    let scalars = AdamWCoefficients::new(hyper);
    let (p, avg, avg_sq) = (DisjointSlices::new(p), DisjointSlices::new(avg), DisjointSlices::new(avg_sq));
    cpu.run_over_elements(len, |r| {
        // SAFETY: each task writes a different range.
        let (p, avg, avg_sq) =
            unsafe { (p.slice_mut(r.clone()), avg.slice_mut(r.clone()), avg_sq.slice_mut(r.clone())) };
        adamw_range(cpu.instruction_set, p, &g[r], avg, avg_sq, scalars);
    });
}

/// Implements [`crate::Ops::sgd`].
pub(crate) fn sgd(cpu: &Cpu, p: &mut [f32], g: &[f32], momentum_buffer: &mut [f32], hyper: &SgdHyperparams) {
    let len = p.len();
    expect_len("sgd", "g", g.len(), len);
    let buffered = if hyper.momentum == 0.0 { 0 } else { len };
    expect_len("sgd", "momentum_buffer", momentum_buffer.len(), buffered);
    let (p, buffer) = (DisjointSlices::new(p), DisjointSlices::new(momentum_buffer));
    cpu.run_over_elements(len, |r| {
        let in_buffer = r.start.min(buffered)..r.end.min(buffered);
        // SAFETY: each task writes a different range.
        let (p, buffer) = unsafe { (p.slice_mut(r.clone()), buffer.slice_mut(in_buffer)) };
        sgd_range(cpu.instruction_set, p, &g[r], buffer, *hyper);
    });
}

/// Implements [`crate::Ops::lion`].
pub(crate) fn lion(cpu: &Cpu, p: &mut [f32], g: &[f32], avg: &mut [f32], hyper: &LionHyperparams) {
    let len = p.len();
    expect_len("lion", "g", g.len(), len);
    expect_len("lion", "exp_avg", avg.len(), len);
    let (p, avg) = (DisjointSlices::new(p), DisjointSlices::new(avg));
    cpu.run_over_elements(len, |r| {
        // SAFETY: each task writes a different range.
        let (p, avg) = unsafe { (p.slice_mut(r.clone()), avg.slice_mut(r.clone())) };
        lion_range(cpu.instruction_set, p, &g[r], avg, *hyper);
    });
}

/// Implements [`crate::Ops::nesterov_momentum`].
pub(crate) fn nesterov_momentum(cpu: &Cpu, buffer: &mut [f32], g: &mut [f32], mu: f64, scale: f32) {
    expect_len("nesterov_momentum", "g", g.len(), buffer.len());
    let (len, mu, one_minus_mu) = (g.len(), mu as f32, (1.0 - mu) as f32);
    let (buffer, g) = (DisjointSlices::new(buffer), DisjointSlices::new(g));
    cpu.run_over_elements(len, |r| {
        // SAFETY: each task writes a different range.
        let (buffer, g) = unsafe { (buffer.slice_mut(r.clone()), g.slice_mut(r)) };
        for (b, g) in buffer.iter_mut().zip(g) {
            let scaled = *g * scale;
            *b += one_minus_mu * (scaled - *b);
            *g = scaled + mu * (*b - scaled);
        }
    });
}

multiversion! {
    fn adamw_range = adamw_vectors(p: &mut [f32], g: &[f32], avg: &mut [f32], avg_sq: &mut [f32], hyper: AdamWCoefficients)
}
multiversion! {
    fn sgd_range = sgd_vectors(p: &mut [f32], g: &[f32], buffer: &mut [f32], hyper: SgdHyperparams)
}

multiversion! {
    fn lion_range = lion_vectors(p: &mut [f32], g: &[f32], avg: &mut [f32], hyper: LionHyperparams)
}

/// Coefficients of one AdamW update, computed in `f64` and rounded once, as torch does.
#[derive(Clone, Copy)]
struct AdamWCoefficients {
    /// Factor by which the gradient is multiplied first.
    grad_scale: f32,
    /// Factor of the parameter for weight decay: 1 − lr·weight_decay.
    decay_factor: f32,
    /// Weight of the interpolation of the first moment towards the gradient.
    lerp: LerpWeight,
    /// Factor of the previous second moment: beta2.
    beta2: f32,
    /// Factor of the squared gradient in the second moment: 1 − beta2.
    one_minus_beta2: f32,
    /// Bias correction of the second moment: √(1 − beta2ᵗ).
    correction2: f32,
    /// Number that is added to the denominator of the update.
    eps: f32,
    /// Factor of the first moment in the update: −lr / (1 − beta1ᵗ).
    step: f32,
}

/// Weight of a linear interpolation. As in `torch.lerp`, it starts from the nearer end.
#[derive(Clone, Copy)]
enum LerpWeight {
    /// `start + weight·(end − start)`, for weights below ½.
    FromStart(f32),
    /// `end + (weight − 1)·(end − start)`, for other weights.
    FromEnd(f32),
}

impl AdamWCoefficients {
    /// Computes the coefficients of update number `hyper.step`.
    fn new(hyper: &AdamWHyperparams) -> Self {
        let weight = (1.0 - hyper.beta1) as f32;
        let t = hyper.step as f64;
        AdamWCoefficients {
            grad_scale: hyper.grad_scale,
            decay_factor: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            lerp: if weight < 0.5 {
                LerpWeight::FromStart(weight)
            } else {
                LerpWeight::FromEnd(weight - 1.0)
            },
            beta2: hyper.beta2 as f32,
            one_minus_beta2: (1.0 - hyper.beta2) as f32,
            correction2: (1.0 - libm::pow(hyper.beta2, t)).sqrt() as f32,
            eps: hyper.eps as f32,
            step: -(hyper.lr / (1.0 - libm::pow(hyper.beta1, t))) as f32,
        }
    }
}

/// Applies one AdamW update to a range of parameters and to both moments.
#[inline(always)]
fn adamw_vectors<S: Simd>(
    s: S,
    p: &mut [f32],
    g: &[f32],
    avg: &mut [f32],
    avg_sq: &mut [f32],
    hyper: AdamWCoefficients,
) {
    let (from_end, weight) = match hyper.lerp {
        LerpWeight::FromStart(w) => (false, s.splat(w)),
        LerpWeight::FromEnd(w) => (true, s.splat(w)),
    };
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

/// Applies one Lion update to a range of parameters and to the moving average. The sign of 0 is 0.
#[inline(always)]
fn lion_vectors<S: Simd>(_: S, p: &mut [f32], g: &[f32], avg: &mut [f32], hyper: LionHyperparams) {
    let decay_factor = (1.0 - hyper.lr * hyper.weight_decay) as f32;
    let (beta1, one_minus_beta1) = (hyper.beta1 as f32, (1.0 - hyper.beta1) as f32);
    let (beta2, one_minus_beta2, lr) = (hyper.beta2 as f32, (1.0 - hyper.beta2) as f32, hyper.lr as f32);
    for ((p, g), m) in p.iter_mut().zip(g).zip(avg) {
        let grad = g * hyper.grad_scale;
        let interpolated = *m * beta1 + grad * one_minus_beta1;
        let sign = f32::from(interpolated > 0.0) - f32::from(interpolated < 0.0);
        *p = *p * decay_factor - lr * sign;
        *m = *m * beta2 + grad * one_minus_beta2;
    }
}
