//! Rotary position embedding and activations.
use super::compile::ACTIVATION;
use super::{Cuda, Tensor, expect_len, floats};
use crate::mem::{View, ViewMut};

/// What a gate goes through, as activation.cu numbers it.
#[derive(Clone, Copy)]
pub(super) enum Gate {
    Silu = 0,
    Gelu = 1,
}

/// Heads at the beginning of each of `b·t` rows of `stride`.
#[derive(Clone, Copy)]
pub(super) struct Turned {
    pub(super) b: usize,
    pub(super) t: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) stride: usize,
}

/// `sign` −1 turns back.
pub(super) fn rope(cuda: &Cuda, x: ViewMut, cos: View, sin: View, shape: Turned, sign: f32) {
    let Turned { b, t, heads, head_dim, stride } = shape;
    let half = head_dim / 2;
    assert!(
        head_dim % 2 == 0 && heads * head_dim <= stride,
        "rope: {heads} heads of {head_dim} in rows of {stride}"
    );
    expect_len("rope", "x", x.len(), b * t * stride);
    expect_len("rope", "cos", cos.len(), t * half);
    expect_len("rope", "sin", sin.len(), t * half);
    let (x, cos, sin) = (Tensor::from(&x), floats(cos), floats(sin));
    let [t, h, half, stride] = [t, heads, half, stride].map(|n| n as i64);
    let arguments: [&dyn super::Param; 8] = [&x, &cos, &sin, &t, &h, &half, &stride, &sign];
    cuda.each_row(ACTIVATION, c"rope", b * shape.t, heads * head_dim / 2, &arguments);
}

pub(super) fn gelu(cuda: &Cuda, y: ViewMut, x: View) {
    expect_len("gelu_forward", "x", x.len(), y.len());
    cuda.each_eight(
        ACTIVATION,
        c"gelu_forward",
        x.len(),
        &[&Tensor::from(&y), &Tensor::from(x), &(x.len() as i64)],
    );
}

/// `dy` becomes what the forward wrote.
pub(super) fn gelu_backward(cuda: &Cuda, dx: ViewMut, dy: ViewMut, x: View) {
    expect_len("gelu_backward", "dy", dy.len(), dx.len());
    expect_len("gelu_backward", "x", x.len(), dx.len());
    let (dx, dy, n) = (Tensor::from(&dx), Tensor::from(&dy), x.len() as i64);
    cuda.each_eight(ACTIVATION, c"gelu_backward", x.len(), &[&dx, &dy, &Tensor::from(x), &n]);
}

pub(super) fn gated(cuda: &Cuda, y: ViewMut, gate_up: View, m: usize, f: usize, gate: Gate) {
    expect_len("gated_forward", "y", y.len(), m * f);
    expect_len("gated_forward", "gate_up", gate_up.len(), m * 2 * f);
    let (y, gate_up) = (Tensor::from(&y), Tensor::from(gate_up));
    cuda.each_row(ACTIVATION, c"gated_forward", m, f, &[&y, &gate_up, &(f as i64), &(gate as i64)]);
}

/// `dy` becomes what the forward wrote.
pub(super) fn gated_backward(
    cuda: &Cuda,
    dgate_up: ViewMut,
    dy: ViewMut,
    gate_up: View,
    m: usize,
    f: usize,
    gate: Gate,
) {
    expect_len("gated_backward", "dy", dy.len(), m * f);
    expect_len("gated_backward", "dgate_up", dgate_up.len(), m * 2 * f);
    expect_len("gated_backward", "gate_up", gate_up.len(), m * 2 * f);
    let (d, dy, gate_up) = (Tensor::from(&dgate_up), Tensor::from(&dy), Tensor::from(gate_up));
    cuda.each_row(ACTIVATION, c"gated_backward", m, f, &[&d, &dy, &gate_up, &(f as i64), &(gate as i64)]);
}
