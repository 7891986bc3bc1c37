//! GELU in its tanh form, alone and as a gate (GeGLU).
//!
//! `½·x·(1 + tanh u)` is `x·σ(2u)`, which loses nothing where tanh is close to −1.
use super::half::{In, Old, Out};
use super::simd::{LANES, Simd, get, multiversion, put};
use super::swiglu::sigmoid;
use super::{Cpu, expect_len};

/// What an element costs, in elements that are only copied.
const COST: usize = 8;
/// 2·√(2/π)
const TWICE: f32 = core::f32::consts::FRAC_2_SQRT_PI * core::f32::consts::SQRT_2;
const CUBIC: f32 = 0.044715;

pub(crate) fn forward(cpu: &Cpu, y: Out, x: In) {
    expect_len("gelu_forward", "x", x.len(), y.len());
    let len = y.len();
    cpu.by_rows(len.div_ceil(LANES), COST * LANES, |vectors| {
        let range = vectors.start * LANES..(vectors.end * LANES).min(len);
        // SAFETY: tasks have elements of their own.
        let mut y = unsafe { y.part(range.clone(), Old::Lost) };
        activate(cpu.level, &mut y, &x.part(cpu, range));
    });
}

/// `dy` becomes `y`.
pub(crate) fn backward(cpu: &Cpu, dx: Out, dy: Out, x: In) {
    expect_len("gelu_backward", "dy", dy.len(), dx.len());
    expect_len("gelu_backward", "x", x.len(), dx.len());
    let len = dx.len();
    cpu.by_rows(len.div_ceil(LANES), COST * LANES, |vectors| {
        let range = vectors.start * LANES..(vectors.end * LANES).min(len);
        // SAFETY: tasks have elements of their own.
        let mut dx = unsafe { dx.part(range.clone(), Old::Lost) };
        // SAFETY: as above.
        let mut dy = unsafe { dy.part(range.clone(), Old::Read) };
        differentiate(cpu.level, &mut dx, &mut dy, &x.part(cpu, range));
    });
}

pub(crate) fn gated_forward(cpu: &Cpu, y: Out, gate_up: In, m: usize, f: usize) {
    expect_len("geglu_forward", "y", y.len(), m * f);
    expect_len("geglu_forward", "gate_up", gate_up.len(), m * 2 * f);
    cpu.by_rows(m, COST * f, |rows| {
        // SAFETY: tasks have rows of their own.
        let mut y = unsafe { y.part(rows.start * f..rows.end * f, Old::Lost) };
        gate(cpu.level, &mut y, &gate_up.part(cpu, rows.start * 2 * f..rows.end * 2 * f), f);
    });
}

/// `dy` becomes `y`.
pub(crate) fn gated_backward(cpu: &Cpu, dgate_up: Out, dy: Out, gate_up: In, m: usize, f: usize) {
    expect_len("geglu_backward", "dgate_up", dgate_up.len(), m * 2 * f);
    expect_len("geglu_backward", "dy", dy.len(), m * f);
    expect_len("geglu_backward", "gate_up", gate_up.len(), m * 2 * f);
    cpu.by_rows(m, COST * f, |rows| {
        let pairs = rows.start * 2 * f..rows.end * 2 * f;
        // SAFETY: tasks have rows of their own.
        let mut dgate_up = unsafe { dgate_up.part(pairs.clone(), Old::Lost) };
        // SAFETY: as above.
        let mut dy = unsafe { dy.part(rows.start * f..rows.end * f, Old::Read) };
        differentiate_gate(cpu.level, &mut dgate_up, &mut dy, &gate_up.part(cpu, pairs), f);
    });
}

multiversion! {
    fn activate = activate_elements(y: &mut [f32], x: &[f32])
}
multiversion! {
    fn differentiate = differentiate_elements(dx: &mut [f32], dy: &mut [f32], x: &[f32])
}
multiversion! {
    fn gate = gate_rows(y: &mut [f32], gate_up: &[f32], f: usize)
}
multiversion! {
    fn differentiate_gate = differentiate_gate_rows(dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize)
}

/// gelu(x) and its derivative: with s = σ(2u), `x·s` and `s + x·s·(1 − s)·2u'`.
#[inline(always)]
fn value_and_slope<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let one = s.splat(1.0);
    let square = s.mul(x, x);
    let sigma = sigmoid(s, s.mul(s.mul(x, s.splat(TWICE)), s.fma(square, s.splat(CUBIC), one)));
    let inner = s.mul(s.splat(TWICE), s.fma(square, s.splat(3.0 * CUBIC), one));
    let value = s.mul(x, sigma);
    (value, s.fma(s.mul(value, s.sub(one, sigma)), inner, sigma))
}

#[inline(always)]
fn activate_elements<S: Simd>(s: S, y: &mut [f32], x: &[f32]) {
    for i in (0..y.len()).step_by(LANES) {
        put(s, y, i, value_and_slope(s, get(s, x, i)).0);
    }
}

#[inline(always)]
fn differentiate_elements<S: Simd>(s: S, dx: &mut [f32], dy: &mut [f32], x: &[f32]) {
    for i in (0..dx.len()).step_by(LANES) {
        let (value, slope) = value_and_slope(s, get(s, x, i));
        put(s, dx, i, s.mul(get(s, dy, i), slope));
        put(s, dy, i, value);
    }
}

#[inline(always)]
fn gate_rows<S: Simd>(s: S, y: &mut [f32], gate_up: &[f32], f: usize) {
    for row in 0..y.len() / f.max(1) {
        let y = &mut y[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        for i in (0..f).step_by(LANES) {
            put(s, y, i, s.mul(value_and_slope(s, get(s, gate, i)).0, get(s, up, i)));
        }
    }
}

#[inline(always)]
fn differentiate_gate_rows<S: Simd>(s: S, dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize) {
    for row in 0..dy.len() / f.max(1) {
        let dy_to_y = &mut dy[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        let (dgate, dup) = dgate_up[row * 2 * f..][..2 * f].split_at_mut(f);
        for i in (0..f).step_by(LANES) {
            let (dy, up) = (get(s, dy_to_y, i), get(s, up, i));
            let (value, slope) = value_and_slope(s, get(s, gate, i));
            put(s, dgate, i, s.mul(s.mul(dy, up), slope));
            put(s, dup, i, s.mul(dy, value));
            put(s, dy_to_y, i, s.mul(value, up));
        }
    }
}
