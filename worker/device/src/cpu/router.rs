//! The router of a layer with experts: softmax over the experts, the best of each row, and both backwards.
use super::simd::{LANES, Simd, exp, get, multiversion, put};
use super::{Cpu, Parts, expect_len};
use crate::ops::{RouterGradient, RouterShape};

/// Elements that an exponential costs as much as.
const COST: usize = 4;

/// Outputs of the forward.
pub(crate) struct Out<'a> {
    pub(crate) probs: &'a mut [f32],
    pub(crate) weights: &'a mut [f32],
    pub(crate) lse: &'a mut [f32],
    pub(crate) chosen: &'a mut [u32],
}

pub(crate) fn forward(cpu: &Cpu, out: Out, logits: &[f32], shape: RouterShape) {
    let RouterShape { m, experts, per_token, normalise } = shape;
    assert!((1..=experts).contains(&per_token), "router: {per_token} of {experts} experts");
    expect_len("router_forward", "logits", logits.len(), m * experts);
    expect_len("router_forward", "probs", out.probs.len(), m * experts);
    expect_len("router_forward", "weights", out.weights.len(), m * per_token);
    expect_len("router_forward", "lse", out.lse.len(), m);
    expect_len("router_forward", "chosen", out.chosen.len(), m * per_token);
    let (probs, weights) = (Parts::new(out.probs), Parts::new(out.weights));
    let (lse, chosen) = (Parts::new(out.lse), Parts::new(out.chosen));
    cpu.by_rows(m, (COST + per_token) * experts, |rows| {
        for row in rows {
            let (wide, narrow) = (row * experts..(row + 1) * experts, row * per_token..(row + 1) * per_token);
            // SAFETY: tasks have rows of their own.
            let (probs, weights) = unsafe { (probs.part(wide.clone()), weights.part(narrow.clone())) };
            // SAFETY: as above.
            let (lse, chosen) = unsafe { (lse.part(row..row + 1), chosen.part(narrow)) };
            lse[0] = softmax(cpu.level, probs, &logits[wide]);
            choose(chosen, probs);
            let sum = if normalise { chosen.iter().map(|&e| probs[e as usize]).sum() } else { 1.0 };
            for (w, &e) in weights.iter_mut().zip(&*chosen) {
                *w = probs[e as usize] / sum;
            }
        }
    });
}

/// The experts with the largest probabilities, best first; of equal ones the first. Numbers that are none count as the least.
fn choose(chosen: &mut [u32], probs: &[f32]) {
    for k in 0..chosen.len() {
        let (before, rest) = chosen.split_at_mut(k);
        let free = (0..probs.len() as u32).filter(|e| !before.contains(e));
        let better = |best: u32, e: u32| if probs[e as usize] > probs[best as usize] { e } else { best };
        rest[0] = free.reduce(better).unwrap_or(0);
    }
}

pub(crate) fn backward(
    cpu: &Cpu,
    dlogits: &mut [f32],
    dweights: &[f32],
    given: RouterGradient,
    shape: RouterShape,
) {
    let RouterShape { m, experts, per_token, normalise } = shape;
    let (probs, lse) = (given.probs.host(), given.lse.host());
    expect_len("router_backward", "dlogits", dlogits.len(), m * experts);
    expect_len("router_backward", "dweights", dweights.len(), m * per_token);
    expect_len("router_backward", "probs", probs.len(), m * experts);
    expect_len("router_backward", "lse", lse.len(), m);
    expect_len("router_backward", "chosen", given.chosen.len(), m * per_token);
    expect_len("router_backward", "balance", given.balance.len(), experts);
    let dlogits = Parts::new(dlogits);
    cpu.by_rows(m, COST * experts, |rows| {
        for row in rows {
            let (wide, narrow) = (row * experts..(row + 1) * experts, row * per_token..(row + 1) * per_token);
            // SAFETY: tasks have rows of their own.
            let dlogits = unsafe { dlogits.part(wide.clone()) };
            let (probs, chosen) = (&probs[wide], &given.chosen[narrow.clone()]);
            dlogits.copy_from_slice(given.balance);
            to_probs(dlogits, &dweights[narrow], probs, chosen, normalise);
            through_softmax(dlogits, probs, 2.0 * given.z * lse[row]);
        }
    });
}

/// Adds the gradient of the chosen weights to that of the probabilities.
fn to_probs(dprobs: &mut [f32], dweights: &[f32], probs: &[f32], chosen: &[u32], normalise: bool) {
    let (mut sum, mut along) = (1.0, 0.0);
    if normalise {
        // w = p / Σp: what all of them have in common changes nothing.
        sum = chosen.iter().map(|&e| probs[e as usize]).sum();
        along = chosen.iter().zip(dweights).map(|(&e, dw)| dw * (probs[e as usize] / sum)).sum();
    }
    for (&e, dw) in chosen.iter().zip(dweights) {
        dprobs[e as usize] += (dw - along) / sum;
    }
}

/// The gradient of the probabilities becomes that of the logits; `slope` is that of the log-sum-exp.
fn through_softmax(d: &mut [f32], probs: &[f32], slope: f32) {
    let along: f32 = d.iter().zip(probs).map(|(d, p)| d * p).sum();
    for (d, p) in d.iter_mut().zip(probs) {
        *d = p * (*d - along + slope);
    }
}

multiversion! {
    /// Writes the probabilities of one row and returns its log-sum-exp.
    fn softmax = softmax_row(probs: &mut [f32], logits: &[f32]) -> f32
}

#[inline(always)]
fn softmax_row<S: Simd>(s: S, probs: &mut [f32], logits: &[f32]) -> f32 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    for i in (0..probs.len()).step_by(LANES) {
        put(s, probs, i, exp(s, s.sub(get(s, logits, i), s.splat(max))));
    }
    let total: f64 = probs.iter().map(|&p| f64::from(p)).sum();
    let share = (1.0 / total) as f32;
    for i in (0..probs.len()).step_by(LANES) {
        put(s, probs, i, s.mul(get(s, probs, i), s.splat(share)));
    }
    (f64::from(max) + libm::log(total)) as f32
}
