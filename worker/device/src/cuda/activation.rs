//! Rotary position embedding and activation functions on a GPU.
use super::backend::{Cuda, THREADS_PER_BLOCK};
use super::compile::ACTIVATION;
use super::launch::{KernelArg, LaunchConfig};
use super::tensor_arg::{TensorArg, are_vectorizable, f32_gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::expect_len;
use std::ffi::CStr;

/// Activation function of a gated linear unit: SiLU in SwiGLU, GELU in GeGLU.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GateActivation {
    Silu,
    Gelu,
}

/// Returns the name of the bf16 kernel if `is_bf16`, otherwise the name of the kernel for any
/// types.
fn select_bf16_kernel(is_bf16: bool, [bf16, general]: [&'static CStr; 2]) -> &'static CStr {
    if is_bf16 { bf16 } else { general }
}

/// Returns true if all tensors are bf16 and can be accessed as vectors of eight elements.
fn are_bf16<const N: usize>(width: usize, tensors: [TensorArg; N]) -> bool {
    are_vectorizable(width, &tensors.map(|tensor| (tensor, Dtype::Bf16)))
}

/// Shape of a matrix whose heads RoPE rotates: `heads` heads at the beginning of each of `b·t` rows
/// of `stride` elements.
#[derive(Clone, Copy)]
pub(super) struct RopeShape {
    pub(super) b: usize,
    pub(super) t: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) stride: usize,
}

/// Applies rotary position embedding in place. `sign` is 1 for the forward pass and −1 for the
/// backward pass.
pub(super) fn rotate_heads(cuda: &Cuda, x: ViewMut, cos: View, sin: View, shape: RopeShape, sign: f32) {
    let RopeShape { b, t, heads, head_dim, stride } = shape;
    let half = head_dim / 2;
    assert!(
        head_dim % 2 == 0 && heads * head_dim <= stride,
        "rope: {heads} heads of {head_dim} elements do not fit rows of {stride}"
    );
    expect_len("rope", "x", x.len(), b * t * stride);
    expect_len("rope", "cos", cos.len(), t * half);
    expect_len("rope", "sin", sin.len(), t * half);
    let (x, cos, sin) = (TensorArg::from(&x), f32_gpu_address(cos), f32_gpu_address(sin));
    let is_bf16 = are_bf16(half, [x])
        && are_vectorizable(stride, &[cos, sin].map(|at| (TensorArg { at, dtype: 0 }, Dtype::F32)));
    let name = select_bf16_kernel(is_bf16, [c"rope_bf16", c"rope"]);
    let width = half.div_ceil(8).clamp(1, 32);
    let grid = [t as u32, u32::try_from(b).unwrap_or(u32::MAX), 1];
    assert!(b <= 65_535 && half <= 1 << 20, "rope: {b} sequences with heads of {head_dim} exceed the grid");
    let config = LaunchConfig {
        grid,
        block: [width as u32, (THREADS_PER_BLOCK / width).min(heads.max(1)) as u32, 1],
        shared: 0,
    };
    let [h, half, stride] = [heads, half, stride].map(|n| n as i64);
    let arguments: [&dyn KernelArg; 7] = [&x, &cos, &sin, &h, &half, &stride, &sign];
    cuda.launch_kernel(ACTIVATION, name, config, &arguments);
}

/// Implements [`crate::Ops::gelu_forward`].
pub(super) fn gelu_forward(cuda: &Cuda, y: ViewMut, x: View) {
    expect_len("gelu_forward", "x", x.len(), y.len());
    let (y, n) = (TensorArg::from(&y), x.len());
    let x = TensorArg::from(x);
    let name = select_bf16_kernel(are_bf16(n, [x, y]), [c"gelu_forward_bf16", c"gelu_forward"]);
    cuda.launch_elementwise_by_8(ACTIVATION, name, n, &[&y, &x, &(n as i64)]);
}

/// Implements [`crate::Ops::gelu_backward`]. Overwrites `dy` with the output of the forward pass.
pub(super) fn gelu_backward(cuda: &Cuda, dx: ViewMut, dy: ViewMut, x: View) {
    expect_len("gelu_backward", "dy", dy.len(), dx.len());
    expect_len("gelu_backward", "x", x.len(), dx.len());
    let n = x.len();
    let (dx, dy, x) = (TensorArg::from(&dx), TensorArg::from(&dy), TensorArg::from(x));
    let name = select_bf16_kernel(are_bf16(n, [dx, dy, x]), [c"gelu_backward_bf16", c"gelu_backward"]);
    cuda.launch_elementwise_by_8(ACTIVATION, name, n, &[&dx, &dy, &x, &(n as i64)]);
}

/// Computes `y = activation(gate)·up` for `m` rows of `f` elements.
pub(super) fn gated_forward(
    cuda: &Cuda,
    y: ViewMut,
    gate_up: View,
    m: usize,
    f: usize,
    gate: GateActivation,
) {
    expect_len("gated_forward", "y", y.len(), m * f);
    expect_len("gated_forward", "gate_up", gate_up.len(), m * 2 * f);
    let (y, gate_up) = (TensorArg::from(&y), TensorArg::from(gate_up));
    let names = match gate {
        GateActivation::Silu => [c"swiglu_forward_bf16", c"swiglu_forward"],
        GateActivation::Gelu => [c"geglu_forward_bf16", c"geglu_forward"],
    };
    let name = select_bf16_kernel(are_bf16(f, [y, gate_up]), names);
    cuda.launch_row_blocks(ACTIVATION, name, m, f, &[&y, &gate_up, &(f as i64)]);
}

/// Computes the gradient of the gated activation, and overwrites `dy` with the output of the
/// forward pass.
pub(super) fn gated_backward(
    cuda: &Cuda,
    dgate_up: ViewMut,
    dy: ViewMut,
    gate_up: View,
    m: usize,
    f: usize,
    gate: GateActivation,
) {
    expect_len("gated_backward", "dy", dy.len(), m * f);
    expect_len("gated_backward", "dgate_up", dgate_up.len(), m * 2 * f);
    expect_len("gated_backward", "gate_up", gate_up.len(), m * 2 * f);
    let (d, dy, gate_up) = (TensorArg::from(&dgate_up), TensorArg::from(&dy), TensorArg::from(gate_up));
    let names = match gate {
        GateActivation::Silu => [c"swiglu_backward_bf16", c"swiglu_backward"],
        GateActivation::Gelu => [c"geglu_backward_bf16", c"geglu_backward"],
    };
    let name = select_bf16_kernel(are_bf16(f, [d, dy, gate_up]), names);
    cuda.launch_row_blocks(ACTIVATION, name, m, f, &[&d, &dy, &gate_up, &(f as i64)]);
}
