//! GELU (Hendrycks and Gimpel, 2016) in its tanh approximation, alone and as a gate (GeGLU).
//!
//! `½·x·(1 + tanh u)` is computed as `x·σ(2u)`, which loses no accuracy where tanh is close to −1.
use super::backend::Cpu;
use super::elements::{InputElements, OutputElements, PriorContents};
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use super::swiglu::sigmoid;
use crate::ops::expect_len;

/// Cost of computing one element, as a multiple of the cost of copying an element.
const GELU_COST: usize = 8;
/// The constant 2·√(2/π) of GELU's tanh approximation.
const TWO_SQRT_2_OVER_PI: f32 = core::f32::consts::FRAC_2_SQRT_PI * core::f32::consts::SQRT_2;
/// Coefficient of x³ in the tanh approximation.
const CUBIC_COEFFICIENT: f32 = 0.044715;

/// Implements [`crate::Ops::gelu_forward`].
pub(crate) fn forward(cpu: &Cpu, y: OutputElements, x: InputElements) {
    expect_len("gelu_forward", "x", x.len(), y.len());
    let len = y.len();
    cpu.run_over_rows(len.div_ceil(LANES), GELU_COST * LANES, |vectors| {
        let range = vectors.start * LANES..(vectors.end * LANES).min(len);
        // SAFETY: each task writes different elements.
        let mut y = unsafe { y.slice_as_f32(range.clone(), PriorContents::Ignored) };
        activate(cpu.instruction_set, &mut y, &x.to_f32(cpu, range));
    });
}

/// Implements [`crate::Ops::gelu_backward`]: writes the gradient to `dx` and replaces `dy` by the
/// output `y`.
pub(crate) fn backward(cpu: &Cpu, dx: OutputElements, dy: OutputElements, x: InputElements) {
    expect_len("gelu_backward", "dy", dy.len(), dx.len());
    expect_len("gelu_backward", "x", x.len(), dx.len());
    let len = dx.len();
    cpu.run_over_rows(len.div_ceil(LANES), GELU_COST * LANES, |vectors| {
        let range = vectors.start * LANES..(vectors.end * LANES).min(len);
        // SAFETY: each task writes different elements.
        let mut dx = unsafe { dx.slice_as_f32(range.clone(), PriorContents::Ignored) };
        // SAFETY: as above.
        let mut dy = unsafe { dy.slice_as_f32(range.clone(), PriorContents::Read) };
        differentiate(cpu.instruction_set, &mut dx, &mut dy, &x.to_f32(cpu, range));
    });
}

/// Implements [`crate::Ops::geglu_forward`].
pub(crate) fn geglu_forward(cpu: &Cpu, y: OutputElements, gate_up: InputElements, m: usize, f: usize) {
    expect_len("geglu_forward", "y", y.len(), m * f);
    expect_len("geglu_forward", "gate_up", gate_up.len(), m * 2 * f);
    cpu.run_over_rows(m, GELU_COST * f, |rows| {
        // SAFETY: each task writes different rows.
        let mut y = unsafe { y.slice_as_f32(rows.start * f..rows.end * f, PriorContents::Ignored) };
        gate(cpu.instruction_set, &mut y, &gate_up.to_f32(cpu, rows.start * 2 * f..rows.end * 2 * f), f);
    });
}

/// Implements [`crate::Ops::geglu_backward`]: writes the gradient to `dgate_up` and replaces `dy`
/// by the output `y`.
pub(crate) fn geglu_backward(
    cpu: &Cpu,
    dgate_up: OutputElements,
    dy: OutputElements,
    gate_up: InputElements,
    m: usize,
    f: usize,
) {
    expect_len("geglu_backward", "dgate_up", dgate_up.len(), m * 2 * f);
    expect_len("geglu_backward", "dy", dy.len(), m * f);
    expect_len("geglu_backward", "gate_up", gate_up.len(), m * 2 * f);
    cpu.run_over_rows(m, GELU_COST * f, |rows| {
        let pairs = rows.start * 2 * f..rows.end * 2 * f;
        // SAFETY: each task writes different rows.
        let mut dgate_up = unsafe { dgate_up.slice_as_f32(pairs.clone(), PriorContents::Ignored) };
        // SAFETY: as above.
        let mut dy = unsafe { dy.slice_as_f32(rows.start * f..rows.end * f, PriorContents::Read) };
        differentiate_gate(cpu.instruction_set, &mut dgate_up, &mut dy, &gate_up.to_f32(cpu, pairs), f);
    });
}

multiversion! {
    fn activate = activate_elements(y: &mut [f32], x: &[f32])
}
multiversion! {
    fn differentiate = differentiate_elements(dx: &mut [f32], dy: &mut [f32], x: &[f32])
}
multiversion! {
    fn gate = compute_geglu_rows(y: &mut [f32], gate_up: &[f32], f: usize)
}
multiversion! {
    fn differentiate_gate = differentiate_geglu_rows(dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize)
}

/// Returns gelu(x) and its derivative in each lane. With s = σ(2u) these are `x·s` and `s + x·s·(1
/// − s)·2u'`.
#[inline(always)]
fn compute_gelu_and_derivative<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let one = s.splat(1.0);
    let square = s.mul(x, x);
    let sigma = sigmoid(
        s,
        s.mul(s.mul(x, s.splat(TWO_SQRT_2_OVER_PI)), s.fma(square, s.splat(CUBIC_COEFFICIENT), one)),
    );
    let inner = s.mul(s.splat(TWO_SQRT_2_OVER_PI), s.fma(square, s.splat(3.0 * CUBIC_COEFFICIENT), one));
    let value = s.mul(x, sigma);
    (value, s.fma(s.mul(value, s.sub(one, sigma)), inner, sigma))
}

/// Computes GELU of each element: `y = gelu(x)`.
#[inline(always)]
fn activate_elements<S: Simd>(s: S, y: &mut [f32], x: &[f32]) {
    for i in (0..y.len()).step_by(LANES) {
        store_lanes(s, y, i, compute_gelu_and_derivative(s, load_lanes(s, x, i)).0);
    }
}

/// Computes the gradient of GELU's input, `dx = dy·gelu'(x)`, and replaces `dy` by gelu(x).
#[inline(always)]
fn differentiate_elements<S: Simd>(s: S, dx: &mut [f32], dy: &mut [f32], x: &[f32]) {
    for i in (0..dx.len()).step_by(LANES) {
        let (value, slope) = compute_gelu_and_derivative(s, load_lanes(s, x, i));
        store_lanes(s, dx, i, s.mul(load_lanes(s, dy, i), slope));
        store_lanes(s, dy, i, value);
    }
}

/// Computes GeGLU of each row of `gate_up`, which has `f` gates and then `f` ups: `y =
/// gelu(gate)·up`.
#[inline(always)]
fn compute_geglu_rows<S: Simd>(s: S, y: &mut [f32], gate_up: &[f32], f: usize) {
    for row in 0..y.len() / f.max(1) {
        let y = &mut y[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        for i in (0..f).step_by(LANES) {
            store_lanes(
                s,
                y,
                i,
                s.mul(compute_gelu_and_derivative(s, load_lanes(s, gate, i)).0, load_lanes(s, up, i)),
            );
        }
    }
}

/// Computes the gradients of gate and up, and replaces `dy` by the output of the forward pass.
#[inline(always)]
fn differentiate_geglu_rows<S: Simd>(s: S, dgate_up: &mut [f32], dy: &mut [f32], gate_up: &[f32], f: usize) {
    for row in 0..dy.len() / f.max(1) {
        let dy_to_y = &mut dy[row * f..][..f];
        let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
        let (dgate, dup) = dgate_up[row * 2 * f..][..2 * f].split_at_mut(f);
        for i in (0..f).step_by(LANES) {
            let (dy, up) = (load_lanes(s, dy_to_y, i), load_lanes(s, up, i));
            let (value, slope) = compute_gelu_and_derivative(s, load_lanes(s, gate, i));
            store_lanes(s, dgate, i, s.mul(s.mul(dy, up), slope));
            store_lanes(s, dup, i, s.mul(dy, value));
            store_lanes(s, dy_to_y, i, s.mul(value, up));
        }
    }
}
