//! Flat vectors: sums, the gradient norm's parts, optimizers.
//!
//! Optimizers use no fused multiply-add: they wait for memory anyway, and so every machine gives the same bits.
use super::half::{In, Old, Out};
use super::simd::{LANES, Simd, get, multiversion, put};
use super::{Cpu, Parts, expect_len};
use crate::ops::{AdamW, Lion, NORM_BLOCK, Sgd};

pub(crate) fn add(cpu: &Cpu, y: Out, x: In) {
    expect_len("add", "x", x.len(), y.len());
    cpu.by_elements(y.len(), |r| {
        // SAFETY: tasks have ranges of their own.
        add_range(cpu.level, &mut unsafe { y.part(r.clone(), Old::Read) }, &x.part(cpu, r));
    });
}

pub(crate) fn scale(cpu: &Cpu, y: Out, factor: f32) {
    cpu.by_elements(y.len(), |r| {
        // SAFETY: tasks have ranges of their own.
        scale_range(cpu.level, &mut unsafe { y.part(r, Old::Read) }, factor);
    });
}

pub(crate) fn norm_blocks(cpu: &Cpu, out: &mut [f64], x: &[f32]) {
    expect_len("norm_blocks", "out", out.len(), x.len().div_ceil(NORM_BLOCK));
    let blocks = out.len();
    let out = Parts::new(out);
    cpu.by_rows(blocks, NORM_BLOCK, |range| {
        // SAFETY: tasks have blocks of their own.
        let out = unsafe { out.part(range.clone()) };
        for (out, block) in out.iter_mut().zip(x.chunks(NORM_BLOCK).skip(range.start)) {
            *out = sum_squares(cpu.level, block);
        }
    });
}

pub(crate) fn adamw(cpu: &Cpu, p: &mut [f32], g: &[f32], avg: &mut [f32], avg_sq: &mut [f32], h: &AdamW) {
    let len = p.len();
    expect_len("adamw", "g", g.len(), len);
    expect_len("adamw", "exp_avg", avg.len(), len);
    expect_len("adamw", "exp_avg_sq", avg_sq.len(), len);
    assert!(h.step > 0, "adamw: steps count from 1");
    let scalars = AdamScalars::new(h);
    let (p, avg, avg_sq) = (Parts::new(p), Parts::new(avg), Parts::new(avg_sq));
    cpu.by_elements(len, |r| {
        // SAFETY: tasks have ranges of their own.
        let (p, avg, avg_sq) = unsafe { (p.part(r.clone()), avg.part(r.clone()), avg_sq.part(r.clone())) };
        adamw_range(cpu.level, p, &g[r], avg, avg_sq, scalars);
    });
}

pub(crate) fn sgd(cpu: &Cpu, p: &mut [f32], g: &[f32], momentum_buffer: &mut [f32], h: &Sgd) {
    let len = p.len();
    expect_len("sgd", "g", g.len(), len);
    let buffered = if h.momentum == 0.0 { 0 } else { len };
    expect_len("sgd", "momentum_buffer", momentum_buffer.len(), buffered);
    let (p, buffer) = (Parts::new(p), Parts::new(momentum_buffer));
    cpu.by_elements(len, |r| {
        let in_buffer = r.start.min(buffered)..r.end.min(buffered);
        // SAFETY: tasks have ranges of their own.
        let (p, buffer) = unsafe { (p.part(r.clone()), buffer.part(in_buffer)) };
        sgd_range(cpu.level, p, &g[r], buffer, *h);
    });
}

pub(crate) fn lion(cpu: &Cpu, p: &mut [f32], g: &[f32], avg: &mut [f32], h: &Lion) {
    let len = p.len();
    expect_len("lion", "g", g.len(), len);
    expect_len("lion", "exp_avg", avg.len(), len);
    let (p, avg) = (Parts::new(p), Parts::new(avg));
    cpu.by_elements(len, |r| {
        // SAFETY: tasks have ranges of their own.
        let (p, avg) = unsafe { (p.part(r.clone()), avg.part(r.clone())) };
        lion_range(cpu.level, p, &g[r], avg, *h);
    });
}

multiversion! {
    pub(super) fn add_range = add_vectors(y: &mut [f32], x: &[f32])
}
multiversion! {
    fn scale_range = scale_vectors(y: &mut [f32], factor: f32)
}
multiversion! {
    fn sum_squares = sum_squares_of(x: &[f32]) -> f64
}
multiversion! {
    fn adamw_range = adamw_vectors(p: &mut [f32], g: &[f32], avg: &mut [f32], avg_sq: &mut [f32], h: AdamScalars)
}
multiversion! {
    fn sgd_range = sgd_vectors(p: &mut [f32], g: &[f32], buffer: &mut [f32], h: Sgd)
}

multiversion! {
    fn lion_range = lion_vectors(p: &mut [f32], g: &[f32], avg: &mut [f32], h: Lion)
}

#[inline(always)]
fn add_vectors<S: Simd>(s: S, y: &mut [f32], x: &[f32]) {
    for i in (0..y.len()).step_by(LANES) {
        put(s, y, i, s.add(get(s, y, i), get(s, x, i)));
    }
}

#[inline(always)]
fn scale_vectors<S: Simd>(s: S, y: &mut [f32], factor: f32) {
    for i in (0..y.len()).step_by(LANES) {
        put(s, y, i, s.mul(get(s, y, i), s.splat(factor)));
    }
}

/// Element i goes to lane i mod 16; lanes are then summed as [`Simd::sum`] does. A square of an f32 is exact in f64.
#[inline(always)]
fn sum_squares_of<S: Simd>(_: S, x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f64::from(x) * f64::from(x);
    }
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            lanes[i] += lanes[i + w];
        }
    }
    lanes[0]
}

/// [`AdamW`]'s numbers as torch makes them: computed in f64, then rounded once.
#[derive(Clone, Copy)]
struct AdamScalars {
    grad_scale: f32,
    /// 1 − lr·weight_decay
    keep: f32,
    lerp: Lerp,
    beta2: f32,
    /// 1 − beta2
    rest2: f32,
    /// √(1 − beta2ᵗ)
    correction2: f32,
    eps: f32,
    /// −lr / (1 − beta1ᵗ)
    step: f32,
}

/// torch's lerp starts from the nearer end.
#[derive(Clone, Copy)]
enum Lerp {
    /// start + weight·(end − start)
    FromStart(f32),
    /// end + (weight − 1)·(end − start)
    FromEnd(f32),
}

impl AdamScalars {
    fn new(h: &AdamW) -> Self {
        let weight = (1.0 - h.beta1) as f32;
        let t = h.step as f64;
        AdamScalars {
            grad_scale: h.grad_scale,
            keep: (1.0 - h.lr * h.weight_decay) as f32,
            lerp: if weight < 0.5 { Lerp::FromStart(weight) } else { Lerp::FromEnd(weight - 1.0) },
            beta2: h.beta2 as f32,
            rest2: (1.0 - h.beta2) as f32,
            correction2: (1.0 - libm::pow(h.beta2, t)).sqrt() as f32,
            eps: h.eps as f32,
            step: -(h.lr / (1.0 - libm::pow(h.beta1, t))) as f32,
        }
    }
}

#[inline(always)]
fn adamw_vectors<S: Simd>(
    s: S,
    p: &mut [f32],
    g: &[f32],
    avg: &mut [f32],
    avg_sq: &mut [f32],
    h: AdamScalars,
) {
    let (from_end, weight) = match h.lerp {
        Lerp::FromStart(w) => (false, s.splat(w)),
        Lerp::FromEnd(w) => (true, s.splat(w)),
    };
    for i in (0..p.len()).step_by(LANES) {
        let grad = s.mul(get(s, g, i), s.splat(h.grad_scale));
        let param = s.mul(get(s, p, i), s.splat(h.keep));
        let m = get(s, avg, i);
        let m = s.add(if from_end { grad } else { m }, s.mul(weight, s.sub(grad, m)));
        let v = s.mul(get(s, avg_sq, i), s.splat(h.beta2));
        let v = s.add(v, s.mul(s.mul(s.splat(h.rest2), grad), grad));
        let denom = s.add(s.div(s.sqrt(v), s.splat(h.correction2)), s.splat(h.eps));
        put(s, avg, i, m);
        put(s, avg_sq, i, v);
        put(s, p, i, s.add(param, s.div(s.mul(s.splat(h.step), m), denom)));
    }
}

/// `buffer` is empty without momentum.
#[inline(always)]
fn sgd_vectors<S: Simd>(s: S, p: &mut [f32], g: &[f32], buffer: &mut [f32], h: Sgd) {
    let (decay, momentum) = (s.splat(h.weight_decay as f32), s.splat(h.momentum as f32));
    for i in (0..p.len()).step_by(LANES) {
        let param = get(s, p, i);
        let mut grad = s.mul(get(s, g, i), s.splat(h.grad_scale));
        if h.weight_decay != 0.0 {
            grad = s.add(grad, s.mul(decay, param));
        }
        if !buffer.is_empty() {
            grad = s.add(s.mul(momentum, get(s, buffer, i)), grad);
            put(s, buffer, i, grad);
        }
        put(s, p, i, s.add(param, s.mul(s.splat(-h.lr as f32), grad)));
    }
}

/// The sign of 0 is 0.
#[inline(always)]
fn lion_vectors<S: Simd>(_: S, p: &mut [f32], g: &[f32], avg: &mut [f32], h: Lion) {
    let keep = (1.0 - h.lr * h.weight_decay) as f32;
    let (beta1, rest1) = (h.beta1 as f32, (1.0 - h.beta1) as f32);
    let (beta2, rest2, lr) = (h.beta2 as f32, (1.0 - h.beta2) as f32, h.lr as f32);
    for ((p, g), m) in p.iter_mut().zip(g).zip(avg) {
        let grad = g * h.grad_scale;
        let towards = *m * beta1 + grad * rest1;
        let sign = f32::from(towards > 0.0) - f32::from(towards < 0.0);
        *p = *p * keep - lr * sign;
        *m = *m * beta2 + grad * rest2;
    }
}
