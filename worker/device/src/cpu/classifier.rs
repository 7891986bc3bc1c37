//! The head: logits, cross-entropy and their gradients, a chunk of rows at a time.
use super::matmul::{Product, product};
use super::pack::Operand;
use super::simd::{LANES, Simd, exp, get, multiversion, put};
use super::{Cpu, Parts, expect_len};
use crate::ops::{ClassifierGrads, IGNORE, Write};

/// Logits that are held at once; the chunks of rows follow from the vocabulary alone.
const LOGITS: usize = 4 << 20;
/// Most rows in a chunk, and fewest (below which packing `w` again for each chunk would cost too much).
const MOST_ROWS: usize = 512;
const FEWEST_ROWS: usize = 128;

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) d: usize,
    pub(crate) v: usize,
}

pub(crate) fn classifier(
    cpu: &Cpu,
    loss: &mut [f32],
    x: &[f32],
    w: &[f32],
    labels: &[u32],
    shape: Shape,
    grads: Option<ClassifierGrads>,
) {
    let Shape { m, d, v } = shape;
    assert!(v > 0 && d > 0, "classifier: an empty vocabulary or model");
    expect_len("classifier", "loss", loss.len(), m);
    expect_len("classifier", "x", x.len(), m * d);
    expect_len("classifier", "w", w.len(), v * d);
    expect_len("classifier", "labels", labels.len(), m);
    let outside = labels.iter().find(|&&l| l != IGNORE && l as usize >= v);
    assert!(outside.is_none(), "classifier: label {outside:?} is not below the vocabulary of {v}");
    let mut grads = grads.map(|g| {
        expect_len("classifier", "dx", g.dx.len(), m * d);
        expect_len("classifier", "dw", g.dw.len(), v * d);
        Grads { dx: g.dx.host(), dw: g.dw.host(), dw_write: g.dw_write, scale: g.scale }
    });
    if let (0, Some(g)) = (m, &mut grads)
        && g.dw_write == Write::Set
    {
        g.dw.fill(0.0);
    }
    let rows = (LOGITS / v).clamp(FEWEST_ROWS, MOST_ROWS);
    let mut logits = cpu.scratch.take(rows.min(m) * v);
    for start in (0..m).step_by(rows) {
        let chunk = start..(start + rows).min(m);
        let x = Operand { data: &x[chunk.start * d..chunk.end * d], row: d, depth: 1 };
        let shape = Shape { m: chunk.len(), ..shape };
        let logits = &mut logits[..shape.m * v];
        let w_forward = Operand { data: w, row: d, depth: 1 };
        product(cpu, logits, x, w_forward, Product { m: shape.m, n: v, k: d, write: Write::Set });
        cross_entropy(
            cpu,
            &mut loss[chunk.clone()],
            logits,
            &labels[chunk.clone()],
            v,
            grads.as_ref().map(|g| g.scale),
        );
        if let Some(g) = &mut grads {
            g.add_chunk(cpu, logits, x.data, w, start, shape);
        }
    }
}

/// The backward's outputs, on the host.
struct Grads<'a> {
    dx: &'a mut [f32],
    dw: &'a mut [f32],
    dw_write: Write,
    scale: f32,
}

impl Grads<'_> {
    /// `dx = dlogits·w` and `dw (=|+=) dlogitsᵀ·x` of the rows from `start`.
    fn add_chunk(&mut self, cpu: &Cpu, dlogits: &[f32], x: &[f32], w: &[f32], start: usize, shape: Shape) {
        let Shape { m, d, v } = shape;
        let dx = &mut self.dx[start * d..(start + m) * d];
        let a = Operand { data: dlogits, row: v, depth: 1 };
        let b = Operand { data: w, row: 1, depth: d };
        product(cpu, dx, a, b, Product { m, n: d, k: v, write: Write::Set });
        let a = Operand { data: dlogits, row: 1, depth: v };
        let b = Operand { data: x, row: 1, depth: d };
        let write = if start == 0 { self.dw_write } else { Write::Add };
        product(cpu, self.dw, a, b, Product { m: v, n: d, k: m, write });
    }
}

/// Losses of some rows; with `scale`, `logits` becomes `(softmax − one-hot)·scale`.
fn cross_entropy(
    cpu: &Cpu,
    loss: &mut [f32],
    logits: &mut [f32],
    labels: &[u32],
    v: usize,
    scale: Option<f32>,
) {
    let (loss, logits) = (Parts::new(loss), Parts::new(logits));
    cpu.by_rows(labels.len(), 4 * v, |rows| {
        for row in rows {
            // SAFETY: tasks have rows of their own.
            let (loss, logits) =
                unsafe { (&mut loss.part(row..row + 1)[0], logits.part(row * v..(row + 1) * v)) };
            if labels[row] != IGNORE {
                *loss = row_loss(cpu.level, logits, labels[row] as usize, scale);
                continue;
            }
            *loss = 0.0;
            if scale.is_some() {
                logits.fill(0.0);
            }
        }
    });
}

multiversion! {
    fn row_loss = row_cross_entropy(logits: &mut [f32], label: usize, scale: Option<f32>) -> f32
}

/// Elements whose exponentials are summed in f32 before the sum is added in f64.
const BLOCK: usize = 32 * LANES;

#[inline(always)]
fn row_cross_entropy<S: Simd>(s: S, logits: &mut [f32], label: usize, scale: Option<f32>) -> f32 {
    let v = logits.len();
    let at_label = f64::from(logits[label]);
    let max = row_max(s, logits);
    let shift = s.splat(max);
    let mut total = 0.0f64;
    for start in (0..v).step_by(BLOCK) {
        let block = &mut logits[start..(start + BLOCK).min(v)];
        let mut sum = s.splat(0.0);
        for i in (0..block.len()).step_by(LANES) {
            let e = exp(s, s.sub(get(s, block, i), shift));
            put(s, block, i, e);
            let inside = block.len() - i;
            // Lanes past the end hold e^(0 − max).
            sum = s.add(sum, if inside < LANES { get(s, block, i) } else { e });
        }
        total += f64::from(s.sum(sum));
    }
    if let Some(scale) = scale {
        let factor = s.splat((f64::from(scale) / total) as f32);
        for i in (0..v).step_by(LANES) {
            put(s, logits, i, s.mul(get(s, logits, i), factor));
        }
        logits[label] -= scale;
    }
    (total.ln() + f64::from(max) - at_label) as f32
}

/// The largest element.
#[inline(always)]
fn row_max<S: Simd>(s: S, x: &[f32]) -> f32 {
    let whole = x.len() / LANES * LANES;
    let mut max = s.splat(f32::NEG_INFINITY);
    for i in (0..whole).step_by(LANES) {
        max = s.max(max, get(s, x, i));
    }
    x[whole..].iter().fold(s.largest(max), |a, &b| if a > b { a } else { b })
}
