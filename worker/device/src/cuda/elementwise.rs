//! Ops on vectors on a GPU: elementwise ops, dropout, stochastic rounding, sums of squares by
//! block, and optimizers.
use super::backend::Cuda;
use super::bindings::Address;
use super::compile::ELEMENTWISE;
use super::launch::{KernelArg, LaunchConfig};
use super::tensor_arg::{TensorArg, f32_gpu_address};
use crate::buffer::{View, ViewMut};
use crate::ops::expect_len;
use crate::ops::{
    AdamWHyperparams, LionHyperparams, NORM_BLOCK_LEN, SampleDropout, SgdHyperparams, StochasticRounding,
};

/// Implements [`crate::Ops::cast`].
pub(super) fn cast(cuda: &Cuda, y: ViewMut, x: View) {
    expect_len("cast", "x", x.len(), y.len());
    convert_elements(cuda, TensorArg::from(&y), TensorArg::from(x), x.len());
}

/// Converts `len` elements of `x` to the type of `y`: `y = x`.
pub(super) fn convert_elements(cuda: &Cuda, y: TensorArg, x: TensorArg, len: usize) {
    cuda.launch_elementwise_by_8(ELEMENTWISE, c"cast", len, &[&y, &x, &(len as i64)]);
}

/// Implements [`crate::Ops::add`].
pub(super) fn add(cuda: &Cuda, y: ViewMut, x: View) {
    expect_len("add", "x", x.len(), y.len());
    cuda.launch_elementwise_by_8(
        ELEMENTWISE,
        c"add",
        x.len(),
        &[&TensorArg::from(&y), &TensorArg::from(x), &(x.len() as i64)],
    );
}

/// Implements [`crate::Ops::scale`].
pub(super) fn scale(cuda: &Cuda, y: ViewMut, factor: f32) {
    cuda.launch_elementwise_by_8(
        ELEMENTWISE,
        c"scale",
        y.len(),
        &[&TensorArg::from(&y), &(y.len() as i64), &factor],
    );
}

/// Implements [`crate::Ops::add_scalar`].
pub(super) fn add_scalar(cuda: &Cuda, y: ViewMut, offset: f32) {
    cuda.launch_elementwise(
        ELEMENTWISE,
        c"add_scalar",
        y.len(),
        &[&TensorArg::from(&y), &(y.len() as i64), &offset],
    );
}

/// Implements [`crate::Ops::axpby`].
pub(super) fn axpby(cuda: &Cuda, y: ViewMut, a: f32, x: View, b: f32) {
    expect_len("axpby", "x", x.len(), y.len());
    let arguments: [&dyn KernelArg; 5] =
        [&f32_gpu_address(y.as_view()), &f32_gpu_address(x), &(x.len() as i64), &a, &b];
    cuda.launch_elementwise(ELEMENTWISE, c"axpby", x.len(), &arguments);
}

/// Implements [`crate::Ops::softcap`].
pub(super) fn softcap(cuda: &Cuda, y: ViewMut, cap: f32) {
    cuda.launch_elementwise(
        ELEMENTWISE,
        c"softcap",
        y.len(),
        &[&f32_gpu_address(y.as_view()), &(y.len() as i64), &cap],
    );
}

/// Implements [`crate::Ops::transpose`].
pub(super) fn transpose(cuda: &Cuda, y: ViewMut, x: View, rows: usize, columns: usize) {
    expect_len("transpose", "x", x.len(), rows * columns);
    expect_len("transpose", "y", y.len(), rows * columns);
    let arguments: [&dyn KernelArg; 4] =
        [&f32_gpu_address(y.as_view()), &f32_gpu_address(x), &(rows as i64), &(columns as i64)];
    cuda.launch_elementwise(ELEMENTWISE, c"transpose", x.len(), &arguments);
}

/// Implements [`crate::Ops::nesterov_momentum`].
pub(super) fn nesterov_momentum(cuda: &Cuda, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32) {
    let len = g.len();
    expect_len("nesterov_momentum", "g", len, buffer.len());
    let (buffer, g) = (f32_gpu_address(buffer.as_view()), f32_gpu_address(g.as_view()));
    let (mu, one_minus_mu) = (mu as f32, (1.0 - mu) as f32);
    cuda.launch_elementwise(
        ELEMENTWISE,
        c"nesterov_momentum",
        len,
        &[&buffer, &g, &(len as i64), &mu, &one_minus_mu, &scale],
    );
}

/// Scalar arguments of the kernel `dropout`. The layout is that of `DropoutScalars` in
/// elementwise.cu.
#[repr(C)]
struct DropoutScalars {
    sample: i64,
    first: i64,
    threshold: u64,
    key: [u32; 2],
    keep: f32,
    unused: f32,
}

// SAFETY: struct DropoutScalars of elementwise.cu.
unsafe impl KernelArg for DropoutScalars {}

/// Implements [`crate::Ops::dropout`].
pub(super) fn dropout(cuda: &Cuda, x: ViewMut, d: &SampleDropout) {
    let samples = x.len().checked_div(d.sample_len).unwrap_or(0);
    expect_len("dropout", "x", x.len(), samples * d.sample_len);
    let scalars = DropoutScalars {
        sample: d.sample_len as i64,
        first: d.first_sample as i64,
        threshold: d.drop_threshold(),
        key: d.key,
        keep: d.keep_scale(),
        unused: 0.0,
    };
    let blocks = samples * d.sample_len.div_ceil(4);
    cuda.launch_elementwise(
        ELEMENTWISE,
        c"dropout",
        blocks,
        &[&TensorArg::from(&x), &(blocks as i64), &scalars],
    );
}

/// Scalar arguments of the kernel `round_stochastically`. The layout is that of `RoundingScalars`
/// in elementwise.cu.
#[repr(C)]
struct RoundingScalars {
    first: i64,
    step: u64,
    key: [u32; 2],
}

// SAFETY: struct RoundingScalars of elementwise.cu.
unsafe impl KernelArg for RoundingScalars {}

/// Implements [`crate::Ops::round_stochastically`].
pub(super) fn round_stochastically(cuda: &Cuda, y: ViewMut, x: View, draw: &StochasticRounding) {
    expect_len("round_stochastically", "x", x.len(), y.len());
    let StochasticRounding { key, first_element: first, step } = *draw;
    let scalars = RoundingScalars { first: first as i64, step, key };
    // A thread rounds a block of four elements of the whole tensor. The first and the last block
    // may be only partly within `x`.
    let blocks = match x.len() as u64 {
        0 => 0,
        len => ((first + len - 1) / 4 - first / 4 + 1) as usize,
    };
    let arguments: [&dyn KernelArg; 5] =
        [&TensorArg::from(&y), &f32_gpu_address(x), &(x.len() as i64), &(blocks as i64), &scalars];
    cuda.launch_elementwise(ELEMENTWISE, c"round_stochastically", blocks, &arguments);
}

/// Implements [`crate::Ops::sum_squares_by_block_concat`]. Launches one kernel per vector, and
/// waits once for all of them.
pub(super) fn sum_squares_by_block(cuda: &Cuda, vectors: &[View]) -> Vec<f64> {
    let count = |x: &View| x.len().div_ceil(NORM_BLOCK_LEN);
    let mut out = vec![0.0f64; vectors.iter().map(count).sum()];
    let sums = cuda.alloc_scratch(size_of_val(&out[..]));
    let mut at = sums.address();
    for x in vectors {
        let shape = LaunchConfig { grid: [count(x) as u32, 1, 1], block: [256, 1, 1], shared: 0 };
        let arguments: [&dyn KernelArg; 4] =
            [&at, &TensorArg::from(*x), &(x.len() as i64), &(NORM_BLOCK_LEN as i64)];
        cuda.launch_kernel(ELEMENTWISE, c"sum_squares_by_block", shape, &arguments);
        at += (count(x) * size_of::<f64>()) as u64;
    }
    cuda.gpu.attempt(|| cuda.gpu.download_blocking(bytemuck::cast_slice_mut(&mut out), sums.address()));
    out
}

/// Scalar arguments of the kernel `adamw`, computed in f64 and rounded once, as PyTorch does. The
/// layout is that of `AdamWScalars` in elementwise.cu.
#[repr(C)]
struct AdamWScalars {
    grad_scale: f32,
    keep: f32,
    weight: f32,
    beta2: f32,
    one_minus_beta2: f32,
    correction2: f32,
    eps: f32,
    step: f32,
    from_end: i64,
}

// SAFETY: struct AdamScalars of elementwise.cu.
unsafe impl KernelArg for AdamWScalars {}

impl AdamWScalars {
    /// Computes the scalars of update number `h.step`.
    fn new(h: &AdamWHyperparams) -> Self {
        let (weight, t) = ((1.0 - h.beta1) as f32, h.step as f64);
        // PyTorch's lerp starts from the nearer end
        let from_end = weight >= 0.5;
        AdamWScalars {
            grad_scale: h.grad_scale,
            keep: (1.0 - h.lr * h.weight_decay) as f32,
            weight: if from_end { weight - 1.0 } else { weight },
            beta2: h.beta2 as f32,
            one_minus_beta2: (1.0 - h.beta2) as f32,
            correction2: (1.0 - libm::pow(h.beta2, t)).sqrt() as f32,
            eps: h.eps as f32,
            step: -(h.lr / (1.0 - libm::pow(h.beta1, t))) as f32,
            from_end: i64::from(from_end),
        }
    }
}

/// Implements [`crate::Ops::adamw`].
pub(super) fn adamw(cuda: &Cuda, p: ViewMut, g: View, avg: ViewMut, avg_sq: ViewMut, h: &AdamWHyperparams) {
    let len = p.len();
    expect_len("adamw", "g", g.len(), len);
    expect_len("adamw", "exp_avg", avg.len(), len);
    expect_len("adamw", "exp_avg_sq", avg_sq.len(), len);
    assert!(h.step > 0, "adamw: steps count from 1");
    let states = [avg, avg_sq].map(|s| f32_gpu_address(s.as_view()));
    let scalars = AdamWScalars::new(h);
    let arguments: [&dyn KernelArg; 6] =
        [&TensorArg::from(&p), &TensorArg::from(g), &states[0], &states[1], &(len as i64), &scalars];
    cuda.launch_elementwise_by_8(ELEMENTWISE, c"adamw", len, &arguments);
}

/// Implements [`crate::Ops::sgd`].
pub(super) fn sgd(cuda: &Cuda, p: ViewMut, g: View, momentum_buffer: ViewMut, h: &SgdHyperparams) {
    let len = p.len();
    expect_len("sgd", "g", g.len(), len);
    expect_len("sgd", "momentum_buffer", momentum_buffer.len(), if h.momentum == 0.0 { 0 } else { len });
    let buffer: Address = if h.momentum == 0.0 { 0 } else { f32_gpu_address(momentum_buffer.as_view()) };
    let (decay, momentum, lr) = (h.weight_decay as f32, h.momentum as f32, h.lr as f32);
    let (p, g, n) = (TensorArg::from(&p), TensorArg::from(g), len as i64);
    cuda.launch_elementwise(
        ELEMENTWISE,
        c"sgd",
        len,
        &[&p, &g, &buffer, &n, &h.grad_scale, &decay, &momentum, &lr],
    );
}

/// Scalar arguments of the kernel `lion`. The layout is that of `LionScalars` in elementwise.cu.
#[repr(C)]
struct LionScalars {
    grad_scale: f32,
    keep: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    lr: f32,
}

// SAFETY: struct LionScalars of elementwise.cu.
unsafe impl KernelArg for LionScalars {}

/// Implements [`crate::Ops::lion`].
pub(super) fn lion(cuda: &Cuda, p: ViewMut, g: View, avg: ViewMut, h: &LionHyperparams) {
    let len = p.len();
    expect_len("lion", "g", g.len(), len);
    expect_len("lion", "exp_avg", avg.len(), len);
    let scalars = LionScalars {
        grad_scale: h.grad_scale,
        keep: (1.0 - h.lr * h.weight_decay) as f32,
        beta1: h.beta1 as f32,
        one_minus_beta1: (1.0 - h.beta1) as f32,
        beta2: h.beta2 as f32,
        one_minus_beta2: (1.0 - h.beta2) as f32,
        lr: h.lr as f32,
    };
    let avg = f32_gpu_address(avg.as_view());
    cuda.launch_elementwise(
        ELEMENTWISE,
        c"lion",
        len,
        &[&TensorArg::from(&p), &TensorArg::from(g), &avg, &(len as i64), &scalars],
    );
}
