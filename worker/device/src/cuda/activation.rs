//! Rotary position embedding and activations.
use super::card::{Launch, Param};
use super::compile::ACTIVATION;
use super::{Cuda, THREADS, Tensor, eights, expect_len, floats};
use crate::mem::{Dtype, View, ViewMut};
use std::ffi::CStr;

/// What a gate goes through.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    Silu,
    Gelu,
}

/// The first kernel where everything is bf16 in whole eights, else the second.
fn either(is_bf16: bool, [bf16, any]: [&'static CStr; 2]) -> &'static CStr {
    if is_bf16 { bf16 } else { any }
}

fn are_bf16<const N: usize>(width: usize, tensors: [Tensor; N]) -> bool {
    eights(width, &tensors.map(|tensor| (tensor, Dtype::Bf16)))
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
    let is_bf16 =
        are_bf16(half, [x]) && eights(stride, &[cos, sin].map(|at| (Tensor { at, dtype: 0 }, Dtype::F32)));
    let name = either(is_bf16, [c"rope_bf16", c"rope"]);
    let wide = half.div_ceil(8).clamp(1, 32);
    let grid = [t as u32, u32::try_from(b).unwrap_or(u32::MAX), 1];
    assert!(b <= 65_535 && half <= 1 << 20, "rope: {b} sequences, heads of {head_dim}");
    let launch =
        Launch { grid, block: [wide as u32, (THREADS / wide).min(heads.max(1)) as u32, 1], shared: 0 };
    let [h, half, stride] = [heads, half, stride].map(|n| n as i64);
    let arguments: [&dyn Param; 7] = [&x, &cos, &sin, &h, &half, &stride, &sign];
    cuda.launch(ACTIVATION, name, launch, &arguments);
}

pub(super) fn gelu(cuda: &Cuda, y: ViewMut, x: View) {
    expect_len("gelu_forward", "x", x.len(), y.len());
    let (y, n) = (Tensor::from(&y), x.len());
    let x = Tensor::from(x);
    let name = either(are_bf16(n, [x, y]), [c"gelu_forward_bf16", c"gelu_forward"]);
    cuda.each_eight(ACTIVATION, name, n, &[&y, &x, &(n as i64)]);
}

/// `dy` becomes what the forward wrote.
pub(super) fn gelu_backward(cuda: &Cuda, dx: ViewMut, dy: ViewMut, x: View) {
    expect_len("gelu_backward", "dy", dy.len(), dx.len());
    expect_len("gelu_backward", "x", x.len(), dx.len());
    let n = x.len();
    let (dx, dy, x) = (Tensor::from(&dx), Tensor::from(&dy), Tensor::from(x));
    let name = either(are_bf16(n, [dx, dy, x]), [c"gelu_backward_bf16", c"gelu_backward"]);
    cuda.each_eight(ACTIVATION, name, n, &[&dx, &dy, &x, &(n as i64)]);
}

pub(super) fn gated(cuda: &Cuda, y: ViewMut, gate_up: View, m: usize, f: usize, gate: Gate) {
    expect_len("gated_forward", "y", y.len(), m * f);
    expect_len("gated_forward", "gate_up", gate_up.len(), m * 2 * f);
    let (y, gate_up) = (Tensor::from(&y), Tensor::from(gate_up));
    let names = match gate {
        Gate::Silu => [c"swiglu_forward_bf16", c"swiglu_forward"],
        Gate::Gelu => [c"geglu_forward_bf16", c"geglu_forward"],
    };
    let name = either(are_bf16(f, [y, gate_up]), names);
    cuda.each_row(ACTIVATION, name, m, f, &[&y, &gate_up, &(f as i64)]);
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
    let names = match gate {
        Gate::Silu => [c"swiglu_backward_bf16", c"swiglu_backward"],
        Gate::Gelu => [c"geglu_backward_bf16", c"geglu_backward"],
    };
    let name = either(are_bf16(f, [d, dy, gate_up]), names);
    cuda.each_row(ACTIVATION, name, m, f, &[&d, &dy, &gate_up, &(f as i64)]);
}
