//! The router of a layer with experts: softmax over the experts, the selection for each row, and
//! the gradients of both.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, exp, load_lanes, store_lanes};
use crate::ops::expect_len;
use crate::ops::{RouterBackwardInputs, RouterShape};

/// Cost of computing an exponential, as a multiple of the cost of copying an element.
const EXP_COST: usize = 4;

/// Outputs of [`crate::Ops::router_forward`].
pub(crate) struct RouterOutputs<'a> {
    /// Probability of each expert for each row, `[m, experts]`.
    pub(crate) probs: &'a mut [f32],
    /// Weights of the selected experts, `[m, experts_per_token]`.
    pub(crate) weights: &'a mut [f32],
    /// Log-sum-exp of each row's logits, `[m]`.
    pub(crate) lse: &'a mut [f32],
    /// Selected experts, best first, `[m, experts_per_token]`.
    pub(crate) chosen_experts: &'a mut [u32],
}

/// Implements [`crate::Ops::router_forward`].
pub(crate) fn forward(cpu: &Cpu, out: RouterOutputs, logits: &[f32], shape: RouterShape) {
    let RouterShape { m, experts, experts_per_token, normalize_weights } = shape;
    assert!(
        (1..=experts).contains(&experts_per_token),
        "router: experts_per_token is {experts_per_token}, not in 1..={experts}"
    );
    expect_len("router_forward", "logits", logits.len(), m * experts);
    expect_len("router_forward", "probs", out.probs.len(), m * experts);
    expect_len("router_forward", "weights", out.weights.len(), m * experts_per_token);
    expect_len("router_forward", "lse", out.lse.len(), m);
    expect_len("router_forward", "chosen_experts", out.chosen_experts.len(), m * experts_per_token);
    let (probs, weights) = (DisjointSlices::new(out.probs), DisjointSlices::new(out.weights));
    let (lse, chosen) = (DisjointSlices::new(out.lse), DisjointSlices::new(out.chosen_experts));
    cpu.run_over_rows(m, (EXP_COST + experts_per_token) * experts, |rows| {
        for row in rows {
            let (expert_range, chosen_range) =
                (row * experts..(row + 1) * experts, row * experts_per_token..(row + 1) * experts_per_token);
            // SAFETY: each task writes different rows.
            let (probs, weights) =
                unsafe { (probs.slice_mut(expert_range.clone()), weights.slice_mut(chosen_range.clone())) };
            // SAFETY: as above.
            let (lse, chosen) = unsafe { (lse.slice_mut(row..row + 1), chosen.slice_mut(chosen_range)) };
            lse[0] = softmax(cpu.instruction_set, probs, &logits[expert_range]);
            select_experts(chosen, probs);
            let sum = if normalize_weights { chosen.iter().map(|&e| probs[e as usize]).sum() } else { 1.0 };
            for (w, &e) in weights.iter_mut().zip(&*chosen) {
                *w = probs[e as usize] / sum;
            }
        }
    });
}

/// Writes the indices of the experts with the largest probabilities to `chosen`, best first. Of
/// equal probabilities the lower index comes first. If probabilities are NaN, the selected experts
/// are arbitrary but different from each other.
fn select_experts(chosen: &mut [u32], probs: &[f32]) {
    for k in 0..chosen.len() {
        let (before, rest) = chosen.split_at_mut(k);
        let free = (0..probs.len() as u32).filter(|e| !before.contains(e));
        let better = |best: u32, e: u32| if probs[e as usize] > probs[best as usize] { e } else { best };
        rest[0] = free.reduce(better).unwrap_or(0);
    }
}

/// Implements [`crate::Ops::router_backward`].
pub(crate) fn backward(
    cpu: &Cpu,
    dlogits: &mut [f32],
    dweights: &[f32],
    inputs: RouterBackwardInputs,
    shape: RouterShape,
) {
    let RouterShape { m, experts, experts_per_token, normalize_weights } = shape;
    let (probs, lse) = (inputs.probs.host(), inputs.lse.host());
    expect_len("router_backward", "dlogits", dlogits.len(), m * experts);
    expect_len("router_backward", "dweights", dweights.len(), m * experts_per_token);
    expect_len("router_backward", "probs", probs.len(), m * experts);
    expect_len("router_backward", "lse", lse.len(), m);
    expect_len("router_backward", "chosen_experts", inputs.chosen_experts.len(), m * experts_per_token);
    expect_len("router_backward", "balance_grad", inputs.balance_grad.len(), experts);
    let dlogits = DisjointSlices::new(dlogits);
    cpu.run_over_rows(m, EXP_COST * experts, |rows| {
        for row in rows {
            let (expert_range, chosen_range) =
                (row * experts..(row + 1) * experts, row * experts_per_token..(row + 1) * experts_per_token);
            // SAFETY: each task writes different rows.
            let dlogits = unsafe { dlogits.slice_mut(expert_range.clone()) };
            let (probs, chosen) = (&probs[expert_range], &inputs.chosen_experts[chosen_range.clone()]);
            dlogits.copy_from_slice(inputs.balance_grad);
            add_weight_gradients(dlogits, &dweights[chosen_range], probs, chosen, normalize_weights);
            softmax_backward(dlogits, probs, 2.0 * inputs.z_loss_coef * lse[row]);
        }
    });
}

/// Adds the gradient that reaches the probabilities through the selected experts' weights to
/// `dprobs`, the gradient of the probabilities.
fn add_weight_gradients(
    dprobs: &mut [f32],
    dweights: &[f32],
    probs: &[f32],
    chosen: &[u32],
    normalize_weights: bool,
) {
    let (mut sum, mut projection) = (1.0, 0.0);
    if normalize_weights {
        // w = p / Σp, so the component of the gradient along w has no effect.
        sum = chosen.iter().map(|&e| probs[e as usize]).sum();
        projection = chosen.iter().zip(dweights).map(|(&e, dw)| dw * (probs[e as usize] / sum)).sum();
    }
    for (&e, dw) in chosen.iter().zip(dweights) {
        dprobs[e as usize] += (dw - projection) / sum;
    }
}

/// Replaces `d`, the gradient of the probabilities, by the gradient of the logits. `slope` is the
/// gradient of the log-sum-exp.
fn softmax_backward(d: &mut [f32], probs: &[f32], slope: f32) {
    let projection: f32 = d.iter().zip(probs).map(|(d, p)| d * p).sum();
    for (d, p) in d.iter_mut().zip(probs) {
        *d = p * (*d - projection + slope);
    }
}

multiversion! {
    /// Computes the softmax of one row of logits with the given instruction set, writes it to
    /// `probs` and returns the log-sum-exp.
    fn softmax = softmax_row(probs: &mut [f32], logits: &[f32]) -> f32
}

/// Computes the softmax of one row of logits, writes it to `probs` and returns the log-sum-exp. The
/// exponentials are summed in `f64`, in order.
#[inline(always)]
fn softmax_row<S: Simd>(s: S, probs: &mut [f32], logits: &[f32]) -> f32 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    for i in (0..probs.len()).step_by(LANES) {
        store_lanes(s, probs, i, exp(s, s.sub(load_lanes(s, logits, i), s.splat(max))));
    }
    let total: f64 = probs.iter().map(|&p| f64::from(p)).sum();
    let factor = (1.0 / total) as f32;
    for i in (0..probs.len()).step_by(LANES) {
        store_lanes(s, probs, i, s.mul(load_lanes(s, probs, i), s.splat(factor)));
    }
    (f64::from(max) + libm::log(total)) as f32
}
