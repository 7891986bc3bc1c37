//! Flat vectors: casts, sums, the gradient norm's parts, optimizers.
use super::card::{Launch, Param};
use super::compile::FLAT;
use super::{Address, Cuda, Tensor, expect_len, floats, must};
use crate::mem::{View, ViewMut};
use crate::ops::{AdamW, Dropout, Lion, NORM_BLOCK, Sgd, StochasticRounding};

pub(super) fn cast(cuda: &Cuda, y: ViewMut, x: View) {
    expect_len("cast", "x", x.len(), y.len());
    copy(cuda, Tensor::from(&y), Tensor::from(x), x.len());
}

/// `y = x`, each of its type.
pub(super) fn copy(cuda: &Cuda, y: Tensor, x: Tensor, len: usize) {
    cuda.each_eight(FLAT, c"cast", len, &[&y, &x, &(len as i64)]);
}

pub(super) fn add(cuda: &Cuda, y: ViewMut, x: View) {
    expect_len("add", "x", x.len(), y.len());
    cuda.each_eight(FLAT, c"add", x.len(), &[&Tensor::from(&y), &Tensor::from(x), &(x.len() as i64)]);
}

pub(super) fn scale(cuda: &Cuda, y: ViewMut, factor: f32) {
    cuda.each_eight(FLAT, c"scale", y.len(), &[&Tensor::from(&y), &(y.len() as i64), &factor]);
}

pub(super) fn offset(cuda: &Cuda, y: ViewMut, by: f32) {
    cuda.each(FLAT, c"offset", y.len(), &[&Tensor::from(&y), &(y.len() as i64), &by]);
}

pub(super) fn blend(cuda: &Cuda, y: ViewMut, a: f32, x: View, b: f32) {
    expect_len("blend", "x", x.len(), y.len());
    let arguments: [&dyn Param; 5] = [&floats(y.as_view()), &floats(x), &(x.len() as i64), &a, &b];
    cuda.each(FLAT, c"blend", x.len(), &arguments);
}

pub(super) fn softcap(cuda: &Cuda, y: ViewMut, cap: f32) {
    cuda.each(FLAT, c"softcap", y.len(), &[&floats(y.as_view()), &(y.len() as i64), &cap]);
}

pub(super) fn transpose(cuda: &Cuda, y: ViewMut, x: View, rows: usize, columns: usize) {
    expect_len("transpose", "x", x.len(), rows * columns);
    expect_len("transpose", "y", y.len(), rows * columns);
    let arguments: [&dyn Param; 4] = [&floats(y.as_view()), &floats(x), &(rows as i64), &(columns as i64)];
    cuda.each(FLAT, c"transpose", x.len(), &arguments);
}

pub(super) fn nesterov(cuda: &Cuda, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32) {
    let len = g.len();
    expect_len("nesterov", "g", len, buffer.len());
    let (buffer, g) = (floats(buffer.as_view()), floats(g.as_view()));
    let (mu, rest) = (mu as f32, (1.0 - mu) as f32);
    cuda.each(FLAT, c"nesterov", len, &[&buffer, &g, &(len as i64), &mu, &rest, &scale]);
}

/// `DropoutScalars` of flat.cu.
#[repr(C)]
struct DropoutScalars {
    sample: i64,
    first: i64,
    threshold: u64,
    key: [u32; 2],
    keep: f32,
    unused: f32,
}

// SAFETY: struct DropoutScalars of flat.cu.
unsafe impl Param for DropoutScalars {}

pub(super) fn dropout(cuda: &Cuda, x: ViewMut, d: &Dropout) {
    let samples = x.len().checked_div(d.sample).unwrap_or(0);
    expect_len("dropout", "x", x.len(), samples * d.sample);
    let scalars = DropoutScalars {
        sample: d.sample as i64,
        first: d.first as i64,
        threshold: d.threshold(),
        key: d.key,
        keep: d.keep(),
        unused: 0.0,
    };
    let blocks = samples * d.sample.div_ceil(4);
    cuda.each(FLAT, c"dropout", blocks, &[&Tensor::from(&x), &(blocks as i64), &scalars]);
}

/// `RoundingScalars` of flat.cu.
#[repr(C)]
struct RoundingScalars {
    first: i64,
    step: u64,
    key: [u32; 2],
}

// SAFETY: struct RoundingScalars of flat.cu.
unsafe impl Param for RoundingScalars {}

pub(super) fn round_stochastically(cuda: &Cuda, y: ViewMut, x: View, draw: &StochasticRounding) {
    expect_len("round_stochastically", "x", x.len(), y.len());
    let StochasticRounding { key, first, step } = *draw;
    let scalars = RoundingScalars { first: first as i64, step, key };
    // Blocks of four elements of the tensor, of which the first and the last may lie in the part only partly.
    let blocks = match x.len() as u64 {
        0 => 0,
        len => ((first + len - 1) / 4 - first / 4 + 1) as usize,
    };
    let arguments: [&dyn Param; 5] =
        [&Tensor::from(&y), &floats(x), &(x.len() as i64), &(blocks as i64), &scalars];
    cuda.each(FLAT, c"round_stochastically", blocks, &arguments);
}

/// One launch for each vector, one wait for all.
pub(super) fn norm_blocks(cuda: &Cuda, vectors: &[View]) -> Vec<f64> {
    let count = |x: &View| x.len().div_ceil(NORM_BLOCK);
    let mut out = vec![0.0f64; vectors.iter().map(count).sum()];
    let sums = cuda.scratch(size_of_val(&out[..]));
    let mut at = sums.at();
    for x in vectors {
        let shape = Launch { grid: [count(x) as u32, 1, 1], block: [256, 1, 1], shared: 0 };
        let arguments: [&dyn Param; 4] = [&at, &Tensor::from(*x), &(x.len() as i64), &(NORM_BLOCK as i64)];
        cuda.launch(FLAT, c"norm_blocks", shape, &arguments);
        at += (count(x) * size_of::<f64>()) as u64;
    }
    must(cuda.card.download(bytemuck::cast_slice_mut(&mut out), sums.at()));
    out
}

/// `AdamScalars` of flat.cu: computed in f64, then rounded once, as torch does.
#[repr(C)]
struct AdamScalars {
    grad_scale: f32,
    keep: f32,
    weight: f32,
    beta2: f32,
    rest2: f32,
    correction2: f32,
    eps: f32,
    step: f32,
    from_end: i64,
}

// SAFETY: struct AdamScalars of flat.cu.
unsafe impl Param for AdamScalars {}

impl AdamScalars {
    fn new(h: &AdamW) -> Self {
        let (weight, t) = ((1.0 - h.beta1) as f32, h.step as f64);
        // torch's lerp starts from the nearer end
        let from_end = weight >= 0.5;
        AdamScalars {
            grad_scale: h.grad_scale,
            keep: (1.0 - h.lr * h.weight_decay) as f32,
            weight: if from_end { weight - 1.0 } else { weight },
            beta2: h.beta2 as f32,
            rest2: (1.0 - h.beta2) as f32,
            correction2: (1.0 - libm::pow(h.beta2, t)).sqrt() as f32,
            eps: h.eps as f32,
            step: -(h.lr / (1.0 - libm::pow(h.beta1, t))) as f32,
            from_end: i64::from(from_end),
        }
    }
}

pub(super) fn adamw(cuda: &Cuda, p: ViewMut, g: View, avg: ViewMut, avg_sq: ViewMut, h: &AdamW) {
    let len = p.len();
    expect_len("adamw", "g", g.len(), len);
    expect_len("adamw", "exp_avg", avg.len(), len);
    expect_len("adamw", "exp_avg_sq", avg_sq.len(), len);
    assert!(h.step > 0, "adamw: steps count from 1");
    let states = [avg, avg_sq].map(|s| floats(s.as_view()));
    let scalars = AdamScalars::new(h);
    let arguments: [&dyn Param; 6] =
        [&Tensor::from(&p), &Tensor::from(g), &states[0], &states[1], &(len as i64), &scalars];
    cuda.each_eight(FLAT, c"adamw", len, &arguments);
}

pub(super) fn sgd(cuda: &Cuda, p: ViewMut, g: View, momentum_buffer: ViewMut, h: &Sgd) {
    let len = p.len();
    expect_len("sgd", "g", g.len(), len);
    expect_len("sgd", "momentum_buffer", momentum_buffer.len(), if h.momentum == 0.0 { 0 } else { len });
    let buffer: Address = if h.momentum == 0.0 { 0 } else { floats(momentum_buffer.as_view()) };
    let (decay, momentum, lr) = (h.weight_decay as f32, h.momentum as f32, h.lr as f32);
    let (p, g, n) = (Tensor::from(&p), Tensor::from(g), len as i64);
    cuda.each(FLAT, c"sgd", len, &[&p, &g, &buffer, &n, &h.grad_scale, &decay, &momentum, &lr]);
}

/// `LionScalars` of flat.cu.
#[repr(C)]
struct LionScalars {
    grad_scale: f32,
    keep: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    lr: f32,
}

// SAFETY: struct LionScalars of flat.cu.
unsafe impl Param for LionScalars {}

pub(super) fn lion(cuda: &Cuda, p: ViewMut, g: View, avg: ViewMut, h: &Lion) {
    let len = p.len();
    expect_len("lion", "g", g.len(), len);
    expect_len("lion", "exp_avg", avg.len(), len);
    let scalars = LionScalars {
        grad_scale: h.grad_scale,
        keep: (1.0 - h.lr * h.weight_decay) as f32,
        beta1: h.beta1 as f32,
        rest1: (1.0 - h.beta1) as f32,
        beta2: h.beta2 as f32,
        rest2: (1.0 - h.beta2) as f32,
        lr: h.lr as f32,
    };
    let avg = floats(avg.as_view());
    cuda.each(FLAT, c"lion", len, &[&Tensor::from(&p), &Tensor::from(g), &avg, &(len as i64), &scalars]);
}
