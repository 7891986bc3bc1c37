//! Rotary position embedding and activation functions on a GPU.
use super::backend::{Cuda, LaunchSize, THREADS_PER_BLOCK};
use super::compile::ACTIVATION_SOURCE;
use super::launch::LaunchConfig;
use super::tensor_arg::{TensorArg, are_vectorizable, f32_gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::{ActivationOps, RopeOps, RopeShape, expect_lens};
use std::ffi::CStr;

/// The names of the two kernels of one function, such as SwiGLU: one for bf16 tensors, and a
/// general one for any element types.
type KernelNames = [&'static CStr; 2];

/// Returns the name of the bf16 kernel if all tensors are bf16 and allow access in vectors of eight
/// elements, and of the general kernel otherwise.
fn select_kernel<const N: usize>(
    [bf16, general]: KernelNames,
    width: usize,
    tensors: [TensorArg; N],
) -> &'static CStr {
    if are_vectorizable(width, &tensors.map(|tensor| (tensor, Dtype::Bf16))) { bf16 } else { general }
}

impl RopeOps for Cuda {
    fn rope_forward(&self, x: ViewMut, cos: View, sin: View, shape: RopeShape) {
        rotate_heads(self, x, cos, sin, shape, 1.0);
    }

    fn rope_backward(&self, dx: ViewMut, cos: View, sin: View, shape: RopeShape) {
        rotate_heads(self, dx, cos, sin, shape, -1.0);
    }
}

/// Applies rotary position embedding in place to the attention heads at the beginning of each row
/// of a matrix in GPU memory. `sign` is 1 for the forward pass and −1 for the backward pass.
fn rotate_heads(cuda: &Cuda, x: ViewMut, cos: View, sin: View, shape: RopeShape, sign: f32) {
    shape.check_lengths(x.len(), cos.len(), sin.len());
    let RopeShape { b, t, heads, head_dim, stride } = shape;
    let half = head_dim / 2;
    assert!(b <= 65_535 && half <= 1 << 20, "rope: {b} sequences with heads of {head_dim} exceed the grid");
    let (x, cos, sin) = (TensorArg::from(&x), f32_gpu_address(cos), f32_gpu_address(sin));
    let tables = [cos, sin].map(|at| (TensorArg { at, dtype: 0 }, Dtype::F32));
    let is_vectorizable = are_vectorizable(stride, &tables);
    let name = if is_vectorizable { select_kernel([c"rope_bf16", c"rope"], half, [x]) } else { c"rope" };
    let width = half.div_ceil(8).clamp(1, 32);
    let block = [width as u32, (THREADS_PER_BLOCK / width).min(heads.max(1)) as u32, 1];
    let work = LaunchSize::Config(LaunchConfig { grid: [t as u32, b as u32, 1], block, shared: 0 });
    cuda.launch(ACTIVATION_SOURCE, name, work, &[&x, &cos, &sin, &heads, &half, &stride, &sign]);
}

impl ActivationOps for Cuda {
    fn swiglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        gated_forward(self, [c"swiglu_forward_bf16", c"swiglu_forward"], y, gate_up, [m, f]);
    }

    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        gated_backward(self, [c"swiglu_backward_bf16", c"swiglu_backward"], dgate_up, dy, gate_up, [m, f]);
    }

    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        gated_forward(self, [c"geglu_forward_bf16", c"geglu_forward"], y, gate_up, [m, f]);
    }

    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        gated_backward(self, [c"geglu_backward_bf16", c"geglu_backward"], dgate_up, dy, gate_up, [m, f]);
    }

    fn gelu_forward(&self, y: ViewMut, x: View) {
        let n = x.len();
        expect_lens("gelu_forward", [("x", n, y.len())]);
        let (y, x) = (TensorArg::from(&y), TensorArg::from(x));
        let name = select_kernel([c"gelu_forward_bf16", c"gelu_forward"], n, [x, y]);
        self.launch(ACTIVATION_SOURCE, name, LaunchSize::ElementsBy8(n), &[&y, &x, &n]);
    }

    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View) {
        let n = x.len();
        expect_lens("gelu_backward", [("dy", dy.len(), dx.len()), ("x", n, dx.len())]);
        let (dx, dy, x) = (TensorArg::from(&dx), TensorArg::from(&dy), TensorArg::from(x));
        let name = select_kernel([c"gelu_backward_bf16", c"gelu_backward"], n, [dx, dy, x]);
        self.launch(ACTIVATION_SOURCE, name, LaunchSize::ElementsBy8(n), &[&dx, &dy, &x, &n]);
    }
}

/// Computes a gated linear unit, `y = activation(gate)·up`, on the GPU, for `m` rows of `f`
/// elements. The kernel determines the activation function.
fn gated_forward(cuda: &Cuda, names: KernelNames, y: ViewMut, gate_up: View, [m, f]: [usize; 2]) {
    expect_lens("gated_forward", [("y", y.len(), m * f), ("gate_up", gate_up.len(), m * 2 * f)]);
    let (y, gate_up) = (TensorArg::from(&y), TensorArg::from(gate_up));
    let name = select_kernel(names, f, [y, gate_up]);
    cuda.launch(ACTIVATION_SOURCE, name, LaunchSize::RowBlocks { rows: m, width: f }, &[&y, &gate_up, &f]);
}

/// Computes the gradients of a gated linear unit's inputs gate and up on the GPU, and replaces the
/// output gradient in `dy` by the unit's output.
fn gated_backward(
    cuda: &Cuda,
    names: KernelNames,
    dgate_up: ViewMut,
    dy: ViewMut,
    gate_up: View,
    [m, f]: [usize; 2],
) {
    let (op, pairs) = ("gated_backward", m * 2 * f);
    expect_lens(op, [("dy", dy.len(), m * f), ("dgate_up", dgate_up.len(), pairs)]);
    expect_lens(op, [("gate_up", gate_up.len(), pairs)]);
    let (d, dy, gate_up) = (TensorArg::from(&dgate_up), TensorArg::from(&dy), TensorArg::from(gate_up));
    let name = select_kernel(names, f, [d, dy, gate_up]);
    cuda.launch(
        ACTIVATION_SOURCE,
        name,
        LaunchSize::RowBlocks { rows: m, width: f },
        &[&d, &dy, &gate_up, &f],
    );
}
