//! The router of a mixture-of-experts layer: softmax over the experts, the selection of experts for
//! each row, and the gradients of both.
use super::backend::Cpu;
use super::instruction_set::multiversion;
use super::row_outputs::SliceRows;
use super::simd::{LANES, Simd, exp, load_lanes, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{RouterBackwardInputs, RouterOps, RouterShape};

/// Approximate cost of computing one exponential, where copying an element costs 1, for dividing
/// work into tasks.
const EXP_COST: usize = 4;

impl RouterOps for Cpu {
    fn router_forward(
        &self,
        probs: ViewMut,
        weights: ViewMut,
        lse: ViewMut,
        chosen_experts: Option<&mut [u32]>,
        logits: View,
        shape: RouterShape,
    ) {
        let RouterShape { m, experts, experts_per_token, normalize_weights } = shape;
        let mut unused_choice = Vec::new();
        let chosen_experts = chosen_experts.unwrap_or_else(|| {
            unused_choice.resize(m * experts_per_token, 0);
            &mut unused_choice
        });
        let matrices = [("logits", logits.len()), ("probs", probs.len())];
        let lists = [("weights", weights.len()), ("chosen_experts", chosen_experts.len())];
        shape.check_arguments("router_forward", &matrices, &lists, lse.len());
        let logits = logits.host_slice();
        let selections = (
            SliceRows::new(weights.host_slice_mut(), experts_per_token),
            SliceRows::new(chosen_experts, experts_per_token),
        );
        let outputs = (
            SliceRows::new(probs.host_slice_mut(), experts),
            SliceRows::new(lse.host_slice_mut(), 1),
            selections,
        );
        let cost = (EXP_COST + experts_per_token) * experts;
        self.run_over_each_output_row(m, cost, outputs, |row, (probs, lse, (weights, chosen))| {
            lse[0] = softmax(self.instruction_set, probs, &logits[row * experts..(row + 1) * experts]);
            select_experts(chosen, probs);
            let sum = if normalize_weights { chosen.iter().map(|&e| probs[e as usize]).sum() } else { 1.0 };
            for (w, &e) in weights.iter_mut().zip(&*chosen) {
                *w = probs[e as usize] / sum;
            }
        });
    }

    fn router_backward(
        &self,
        dlogits: ViewMut,
        dweights: View,
        inputs: RouterBackwardInputs,
        shape: RouterShape,
    ) {
        inputs.check_arguments(dlogits.len(), dweights.len(), shape);
        let RouterShape { m, experts, experts_per_token, normalize_weights } = shape;
        let (probs, lse, dweights) =
            (inputs.probs.host_slice(), inputs.lse.host_slice(), dweights.host_slice());
        self.run_over_each_output_row(
            m,
            EXP_COST * experts,
            SliceRows::new(dlogits.host_slice_mut(), experts),
            |row, dlogits| {
                let probs = &probs[row * experts..(row + 1) * experts];
                let selected = row * experts_per_token..(row + 1) * experts_per_token;
                let (dweights, chosen) = (&dweights[selected.clone()], &inputs.chosen_experts[selected]);
                dlogits.copy_from_slice(inputs.balance_grad);
                add_expert_weight_gradients(dlogits, dweights, probs, chosen, normalize_weights);
                softmax_backward(dlogits, probs, 2.0 * inputs.z_loss_coef * lse[row]);
            },
        );
    }
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

/// Computes the gradient of one row's router probabilities from `dweights`, the gradient of the
/// selected experts' weights, and adds it to `dprobs`.
fn add_expert_weight_gradients(
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

/// Computes the gradient of softmax in place: replaces `d`, the gradient of the probabilities, by
/// the gradient of the logits. `slope` is the gradient of the log-sum-exp.
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
