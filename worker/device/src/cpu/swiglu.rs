//! SwiGLU: `silu(gate) · up`, silu(g) = g·σ(g).
use super::half::{In, Old, Out};
use super::simd::{LANES, Simd, exp, get, multiversion, put};
use super::{Cpu, expect_len};

/// Elements that an exponential costs as much as.
const COST: usize = 4;

pub(crate) fn forward(cpu: &Cpu, y: Out, gate_up: In, m: usize, f: usize) {
    expect_len("swiglu_forward", "y", y.len(), m * f);
    expect_len("swiglu_forward", "gate_up", gate_up.len(), m * 2 * f);
    cpu.by_rows(m, COST * f, |rows| {
        // SAFETY: tasks have rows of their own.
        let mut y = unsafe { y.part(rows.start * f..rows.end * f, Old::Lost) };
        activate(cpu.level, &mut y, &gate_up.part(cpu, rows.start * 2 * f..rows.end * 2 * f), f);
    });
}

/// `dy` becomes `y`.
pub(crate) fn backward(cpu: &Cpu, dgate_up: Out, dy: Out, gate_up: In, m: usize, f: usize) {
    expect_len("swiglu_backward", "dgate_up", dgate_up.len(), m * 2 * f);
    expect_len("swiglu_backward", "dy", dy.len(), m * f);
    expect_len("swiglu_backward", "gate_up", gate_up.len(), m * 2 * f);
    cpu.by_rows(m, COST * f, |rows| {
        let pairs = rows.start * 2 * f..rows.end * 2 * f;
        // SAFETY: tasks have rows of their own.
        let mut dgate_up = unsafe { dgate_up.part(pairs.clone(), Old::Lost) };
        // SAFETY: as above.
        let mut dy = unsafe { dy.part(rows.start * f..rows.end * f, Old::Read) };
        differentiate(cpu.level, &mut dgate_up, &mut dy, &gate_up.part(cpu, pairs), f);
    });
}

multiversion! {
    fn activate = activate_rows(y: &mut [f32], gate_up: &[f32], f: usize)
}
multiversion! {
    fn differentiate = differentiate_rows(dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize)
}

/// σ(x)
#[inline(always)]
pub(super) fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

#[inline(always)]
fn activate_rows<S: Simd>(s: S, y: &mut [f32], gate_up: &[f32], f: usize) {
    for row in 0..y.len() / f.max(1) {
        let y = &mut y[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        for i in (0..f).step_by(LANES) {
            let g = get(s, gate, i);
            put(s, y, i, s.mul(s.mul(g, sigmoid(s, g)), get(s, up, i)));
        }
    }
}

/// `dup = dy·silu(g)`, `dgate = dy·up·σ(g)·(1 + g·(1 − σ(g)))`; `dy` becomes `silu(g)·up`.
#[inline(always)]
fn differentiate_rows<S: Simd>(s: S, dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize) {
    let one = s.splat(1.0);
    for row in 0..dy.len() / f.max(1) {
        let dy_to_y = &mut dy[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        let (dgate, dup) = dgate_up[row * 2 * f..][..2 * f].split_at_mut(f);
        for i in (0..f).step_by(LANES) {
            let (g, up, dy) = (get(s, gate, i), get(s, up, i), get(s, dy_to_y, i));
            let sigma = sigmoid(s, g);
            let slope = s.mul(sigma, s.fma(g, s.sub(one, sigma), one));
            put(s, dgate, i, s.mul(s.mul(dy, up), slope));
            put(s, dup, i, s.mul(dy, s.mul(g, sigma)));
            put(s, dy_to_y, i, s.mul(s.mul(g, sigma), up));
        }
    }
}
