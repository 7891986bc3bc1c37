//! SwiGLU (Shazeer, 2020): `silu(gate)·up`, where silu(g) = g·σ(g).
use super::backend::Cpu;
use super::elements::{InputElements, OutputElements, PriorContents};
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, exp, load_lanes, store_lanes};
use crate::ops::expect_len;

/// Cost of computing an exponential, as a multiple of the cost of copying an element.
const EXP_COST: usize = 4;

/// Implements [`crate::Ops::swiglu_forward`].
pub(crate) fn forward(cpu: &Cpu, y: OutputElements, gate_up: InputElements, m: usize, f: usize) {
    expect_len("swiglu_forward", "y", y.len(), m * f);
    expect_len("swiglu_forward", "gate_up", gate_up.len(), m * 2 * f);
    cpu.run_over_rows(m, EXP_COST * f, |rows| {
        // SAFETY: each task writes different rows.
        let mut y = unsafe { y.slice_as_f32(rows.start * f..rows.end * f, PriorContents::Ignored) };
        activate(cpu.instruction_set, &mut y, &gate_up.to_f32(cpu, rows.start * 2 * f..rows.end * 2 * f), f);
    });
}

/// Implements [`crate::Ops::swiglu_backward`]: writes the gradient to `dgate_up` and replaces `dy`
/// by the output `y`.
pub(crate) fn backward(
    cpu: &Cpu,
    dgate_up: OutputElements,
    dy: OutputElements,
    gate_up: InputElements,
    m: usize,
    f: usize,
) {
    expect_len("swiglu_backward", "dgate_up", dgate_up.len(), m * 2 * f);
    expect_len("swiglu_backward", "dy", dy.len(), m * f);
    expect_len("swiglu_backward", "gate_up", gate_up.len(), m * 2 * f);
    cpu.run_over_rows(m, EXP_COST * f, |rows| {
        let pairs = rows.start * 2 * f..rows.end * 2 * f;
        // SAFETY: each task writes different rows.
        let mut dgate_up = unsafe { dgate_up.slice_as_f32(pairs.clone(), PriorContents::Ignored) };
        // SAFETY: as above.
        let mut dy = unsafe { dy.slice_as_f32(rows.start * f..rows.end * f, PriorContents::Read) };
        differentiate(cpu.instruction_set, &mut dgate_up, &mut dy, &gate_up.to_f32(cpu, pairs), f);
    });
}

multiversion! {
    fn activate = activate_rows(y: &mut [f32], gate_up: &[f32], f: usize)
}
multiversion! {
    fn differentiate = differentiate_rows(dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize)
}

/// Computes the logistic function σ(x) = 1 / (1 + e⁻ˣ) in each lane.
#[inline(always)]
pub(super) fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// Computes SwiGLU of each row of `gate_up`, which has `f` gates and then `f` ups: `y =
/// silu(gate)·up`.
#[inline(always)]
fn activate_rows<S: Simd>(s: S, y: &mut [f32], gate_up: &[f32], f: usize) {
    for row in 0..y.len() / f.max(1) {
        let y = &mut y[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        for i in (0..f).step_by(LANES) {
            let g = load_lanes(s, gate, i);
            store_lanes(s, y, i, s.mul(s.mul(g, sigmoid(s, g)), load_lanes(s, up, i)));
        }
    }
}

/// Computes the gradients of gate and up for some rows: `dup = dy·silu(g)` and `dgate =
/// dy·up·σ(g)·(1 + g·(1 − σ(g)))`. Replaces `dy` by the output `silu(g)·up`.
#[inline(always)]
fn differentiate_rows<S: Simd>(s: S, dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize) {
    let one = s.splat(1.0);
    for row in 0..dy.len() / f.max(1) {
        let dy_to_y = &mut dy[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        let (dgate, dup) = dgate_up[row * 2 * f..][..2 * f].split_at_mut(f);
        for i in (0..f).step_by(LANES) {
            let (g, up, dy) = (load_lanes(s, gate, i), load_lanes(s, up, i), load_lanes(s, dy_to_y, i));
            let sigma = sigmoid(s, g);
            let slope = s.mul(sigma, s.fma(g, s.sub(one, sigma), one));
            store_lanes(s, dgate, i, s.mul(s.mul(dy, up), slope));
            store_lanes(s, dup, i, s.mul(dy, s.mul(g, sigma)));
            store_lanes(s, dy_to_y, i, s.mul(s.mul(g, sigma), up));
        }
    }
}
