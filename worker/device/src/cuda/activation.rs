//! Rotary position embedding and activations.
use super::compile::ACTIVATION;
use super::launch::{KernelArg, LaunchConfig};
use super::{Cuda, THREADS, TensorArg, are_vectorizable, expect_len, f32_address};
use crate::buffer::{Dtype, View, ViewMut};
use std::ffi::CStr;

/// The activation function of a gate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    Silu,
    Gelu,
}

/// The bf16 kernel if it can be used, otherwise the general one.
fn select_kernel(is_bf16: bool, [bf16, general]: [&'static CStr; 2]) -> &'static CStr {
    if is_bf16 { bf16 } else { general }
}

/// True if all tensors are bf16 and vectorizable.
fn are_bf16<const N: usize>(width: usize, tensors: [TensorArg; N]) -> bool {
    are_vectorizable(width, &tensors.map(|tensor| (tensor, Dtype::Bf16)))
}

/// `heads` heads at the beginning of each of `b·t` rows of `stride` elements.
#[derive(Clone, Copy)]
pub(super) struct RotaryShape {
    pub(super) b: usize,
    pub(super) t: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) stride: usize,
}

/// Rotary position embedding in place. `sign` is 1 for the forward pass, −1 for the backward pass.
pub(super) fn rope(cuda: &Cuda, x: ViewMut, cos: View, sin: View, shape: RotaryShape, sign: f32) {
    let RotaryShape { b, t, heads, head_dim, stride } = shape;
    let half = head_dim / 2;
    assert!(
        head_dim % 2 == 0 && heads * head_dim <= stride,
        "rope: {heads} heads of {head_dim} elements do not fit rows of {stride}"
    );
    expect_len("rope", "x", x.len(), b * t * stride);
    expect_len("rope", "cos", cos.len(), t * half);
    expect_len("rope", "sin", sin.len(), t * half);
    let (x, cos, sin) = (TensorArg::from(&x), f32_address(cos), f32_address(sin));
    let is_bf16 = are_bf16(half, [x])
        && are_vectorizable(stride, &[cos, sin].map(|at| (TensorArg { at, dtype: 0 }, Dtype::F32)));
    let name = select_kernel(is_bf16, [c"rope_bf16", c"rope"]);
    let width = half.div_ceil(8).clamp(1, 32);
    let grid = [t as u32, u32::try_from(b).unwrap_or(u32::MAX), 1];
    assert!(b <= 65_535 && half <= 1 << 20, "rope: {b} sequences with heads of {head_dim} exceed the grid");
    let config = LaunchConfig {
        grid,
        block: [width as u32, (THREADS / width).min(heads.max(1)) as u32, 1],
        shared: 0,
    };
    let [h, half, stride] = [heads, half, stride].map(|n| n as i64);
    let arguments: [&dyn KernelArg; 7] = [&x, &cos, &sin, &h, &half, &stride, &sign];
    cuda.launch(ACTIVATION, name, config, &arguments);
}

pub(super) fn gelu(cuda: &Cuda, y: ViewMut, x: View) {
    expect_len("gelu_forward", "x", x.len(), y.len());
    let (y, n) = (TensorArg::from(&y), x.len());
    let x = TensorArg::from(x);
    let name = select_kernel(are_bf16(n, [x, y]), [c"gelu_forward_bf16", c"gelu_forward"]);
    cuda.launch_elementwise_by_8(ACTIVATION, name, n, &[&y, &x, &(n as i64)]);
}

/// Overwrites `dy` with the output of the forward pass.
pub(super) fn gelu_backward(cuda: &Cuda, dx: ViewMut, dy: ViewMut, x: View) {
    expect_len("gelu_backward", "dy", dy.len(), dx.len());
    expect_len("gelu_backward", "x", x.len(), dx.len());
    let n = x.len();
    let (dx, dy, x) = (TensorArg::from(&dx), TensorArg::from(&dy), TensorArg::from(x));
    let name = select_kernel(are_bf16(n, [dx, dy, x]), [c"gelu_backward_bf16", c"gelu_backward"]);
    cuda.launch_elementwise_by_8(ACTIVATION, name, n, &[&dx, &dy, &x, &(n as i64)]);
}

pub(super) fn gated_forward(cuda: &Cuda, y: ViewMut, gate_up: View, m: usize, f: usize, gate: Gate) {
    expect_len("gated_forward", "y", y.len(), m * f);
    expect_len("gated_forward", "gate_up", gate_up.len(), m * 2 * f);
    let (y, gate_up) = (TensorArg::from(&y), TensorArg::from(gate_up));
    let names = match gate {
        Gate::Silu => [c"swiglu_forward_bf16", c"swiglu_forward"],
        Gate::Gelu => [c"geglu_forward_bf16", c"geglu_forward"],
    };
    let name = select_kernel(are_bf16(f, [y, gate_up]), names);
    cuda.launch_row_blocks(ACTIVATION, name, m, f, &[&y, &gate_up, &(f as i64)]);
}

/// Overwrites `dy` with the output of the forward pass.
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
    let (d, dy, gate_up) = (TensorArg::from(&dgate_up), TensorArg::from(&dy), TensorArg::from(gate_up));
    let names = match gate {
        Gate::Silu => [c"swiglu_backward_bf16", c"swiglu_backward"],
        Gate::Gelu => [c"geglu_backward_bf16", c"geglu_backward"],
    };
    let name = select_kernel(are_bf16(f, [d, dy, gate_up]), names);
    cuda.launch_row_blocks(ACTIVATION, name, m, f, &[&d, &dy, &gate_up, &(f as i64)]);
}
