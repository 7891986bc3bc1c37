//! The head: logits, cross-entropy and their gradients, a chunk of rows at a time.
//!
//! A chunk's logits are worked on in blocks of the vocabulary, so that each block is read where it was just written:
//! the forward makes a block and folds it into each row's running maximum and sum; the backward turns it into gradients
//! and uses them in both products.
use super::attention_backward::before_cap;
use super::half::{In, Old, Out};
use super::matmul::{Product, product};
use super::pack::Operand;
use super::simd::{LANES, Simd, exp, get, multiversion, put, tanh};
use super::{Cpu, Parts, expect_len};
use crate::ops::{ClassifierGrads, IGNORE, Write};
use std::ops::Range;

/// Logits that are held at once; the chunks of rows follow from the vocabulary alone.
const LOGITS: usize = 4 << 20;
/// Most rows in a chunk, and fewest: for each chunk `w` is packed twice, and its gradient read and written.
const MOST_ROWS: usize = 512;
const FEWEST_ROWS: usize = 256;
/// Columns in a block of the vocabulary.
const BLOCK: usize = 512;

/// Of how many of `m` rows the logits, `v` each, are held at once.
pub fn classifier_rows(m: usize, v: usize) -> usize {
    (LOGITS / v.max(1)).clamp(FEWEST_ROWS, MOST_ROWS).min(m)
}

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) d: usize,
    pub(crate) v: usize,
    /// A logit l becomes cap·tanh(l / cap).
    pub(crate) cap: Option<f32>,
}

pub(crate) fn classifier(
    cpu: &Cpu,
    loss: &mut [f32],
    x: In,
    w: In,
    labels: &[u32],
    shape: Shape,
    grads: Option<ClassifierGrads>,
) {
    let Shape { m, d, v, .. } = shape;
    check(loss.len(), x.len(), w.len(), labels, shape);
    let mut grads = grads.map(|g| {
        expect_len("classifier", "dx", g.dx.len(), m * d);
        if !g.dw.is_empty() {
            expect_len("classifier", "dw", g.dw.len(), v * d);
        }
        Grads { dx: Out::new(cpu, g.dx), dw: g.dw.host(), dw_write: g.dw_write, scale: g.scale }
    });
    if let (0, Some(g)) = (m, &mut grads)
        && g.dw_write == Write::Set
    {
        g.dw.fill(0.0);
    }
    let rows = classifier_rows(m, v);
    let mut logits = cpu.scratch.take(rows * v);
    let mut sums = cpu.scratch.take(rows * RowSums::FLOATS);
    for start in (0..m).step_by(rows.max(1)) {
        let rows = start..(start + rows).min(m);
        let chunk = Chunk {
            cpu,
            x: x.slice(rows.start * d..rows.end * d),
            w,
            labels: &labels[rows.clone()],
            shape: Shape { m: rows.len(), ..shape },
        };
        let logits = &mut logits[..rows.len() * v];
        let sums: &mut [RowSums] = bytemuck::cast_slice_mut(&mut sums[..rows.len() * RowSums::FLOATS]);
        chunk.forward(logits, sums);
        for ((loss, sums), &label) in loss[rows.clone()].iter_mut().zip(&*sums).zip(chunk.labels) {
            *loss = if label == IGNORE { 0.0 } else { sums.loss() };
        }
        if let Some(g) = &mut grads {
            chunk.backward(logits, sums, g, rows.start);
        }
    }
}

fn check(loss: usize, x: usize, w: usize, labels: &[u32], shape: Shape) {
    let Shape { m, d, v, .. } = shape;
    assert!(v > 0 && d > 0, "classifier: an empty vocabulary or model");
    expect_len("classifier", "loss", loss, m);
    expect_len("classifier", "x", x, m * d);
    expect_len("classifier", "w", w, v * d);
    expect_len("classifier", "labels", labels.len(), m);
    let outside = labels.iter().find(|&&l| l != IGNORE && l as usize >= v);
    assert!(outside.is_none(), "classifier: label {outside:?} is not below the vocabulary of {v}");
}

/// The backward's outputs, on the host.
struct Grads<'a> {
    dx: Out<'a>,
    dw: &'a mut [f32],
    dw_write: Write,
    scale: f32,
}

/// What is known of a row's logits so far.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct RowSums {
    max: f64,
    /// Σ e^(logit − max)
    total: f64,
    at_label: f64,
}

impl RowSums {
    const FLOATS: usize = size_of::<Self>() / size_of::<f32>();
    const EMPTY: Self = RowSums { max: f64::NEG_INFINITY, total: 0.0, at_label: 0.0 };

    fn loss(&self) -> f32 {
        (libm::log(self.total) + self.max - self.at_label) as f32
    }
}

/// Some rows.
struct Chunk<'a> {
    cpu: &'a Cpu,
    x: In<'a>,
    w: In<'a>,
    labels: &'a [u32],
    shape: Shape,
}

impl Chunk<'_> {
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let v = self.shape.v;
        (0..v).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(v))
    }

    /// The part of `w` (or `dw`) that belongs to a block.
    fn of_weights(&self, block: &Range<usize>) -> Range<usize> {
        block.start * self.shape.d..block.end * self.shape.d
    }

    /// Fills `logits` and `sums`.
    fn forward(&self, logits: &mut [f32], sums: &mut [RowSums]) {
        let Shape { m, d, v, .. } = self.shape;
        sums.fill(RowSums::EMPTY);
        for block in self.blocks() {
            let a = Operand { data: self.x, row: d, depth: 1 };
            let b = Operand { data: self.w.slice(self.of_weights(&block)), row: d, depth: 1 };
            let shape = Product { m, n: block.len(), k: d, ldc: v, write: Write::Set };
            product(self.cpu, &mut logits[block.start..], a, b, shape);
            let (sums, logits) = (Parts::new(sums), Parts::new(logits));
            self.cpu.by_rows(m, 4 * block.len(), |rows| {
                // SAFETY: tasks have rows of their own.
                let sums = unsafe { sums.part(rows.clone()) };
                for (sums, row) in sums.iter_mut().zip(rows) {
                    // SAFETY: as above.
                    let logits = unsafe { logits.part(row * v + block.start..row * v + block.end) };
                    if let Some(cap) = self.shape.cap {
                        cap_logits(self.cpu.level, logits, cap);
                    }
                    let label = self.labels[row] as usize;
                    if block.contains(&label) {
                        sums.at_label = f64::from(logits[label - block.start]);
                    }
                    fold_row(self.cpu.level, sums, logits);
                }
            });
        }
    }

    /// `dx = dlogits·w` of these rows, `dw (=|+=) dlogitsᵀ·x`; `logits` becomes dlogits. `first`: the chunk's first row.
    fn backward(&self, logits: &mut [f32], sums: &[RowSums], g: &mut Grads, first: usize) {
        let Shape { m, d, .. } = self.shape;
        let dw_write = if first == 0 { g.dw_write } else { Write::Add };
        let Grads { dx, dw, scale, .. } = g;
        let work = |dx: &mut [f32]| self.backward_blocks(logits, sums, dx, dw, dw_write, *scale);
        // SAFETY: chunks follow one another.
        unsafe { dx.through(first * d..(first + m) * d, Old::Lost, work) };
    }

    /// Block after block of the vocabulary.
    fn backward_blocks(
        &self,
        logits: &mut [f32],
        sums: &[RowSums],
        dx: &mut [f32],
        dw: &mut [f32],
        dw_write: Write,
        scale: f32,
    ) {
        let Shape { m, d, v, .. } = self.shape;
        for block in self.blocks() {
            self.differentiate(logits, sums, &block, scale);
            let dlogits = In::F32(&logits[block.start..]);
            let a = Operand { data: dlogits, row: v, depth: 1 };
            let b = Operand { data: self.w.slice(self.of_weights(&block)), row: 1, depth: d };
            let write = if block.start == 0 { Write::Set } else { Write::Add };
            product(self.cpu, dx, a, b, Product { m, n: d, k: block.len(), ldc: d, write });
            if dw.is_empty() {
                continue;
            }
            let a = Operand { data: dlogits, row: 1, depth: v };
            let b = Operand { data: self.x, row: 1, depth: d };
            let shape = Product { m: block.len(), n: d, k: m, ldc: d, write: dw_write };
            product(self.cpu, &mut dw[self.of_weights(&block)], a, b, shape);
        }
    }

    /// A block of logits becomes `(softmax − one-hot)·scale`, 0 in the rows without a loss.
    fn differentiate(&self, logits: &mut [f32], sums: &[RowSums], block: &Range<usize>, scale: f32) {
        let v = self.shape.v;
        let logits = Parts::new(logits);
        self.cpu.by_rows(self.shape.m, 4 * block.len(), |rows| {
            for row in rows {
                // SAFETY: tasks have rows of their own.
                let part = unsafe { logits.part(row * v + block.start..row * v + block.end) };
                let label = self.labels[row] as usize;
                if self.labels[row] == IGNORE {
                    part.fill(0.0);
                    continue;
                }
                let factor = (f64::from(scale) / sums[row].total) as f32;
                let at_label = block.contains(&label).then(|| label - block.start);
                let slope = |l: f32| self.shape.cap.map_or(1.0, |cap| 1.0 - (l / cap) * (l / cap));
                let of_label = at_label.map(|at| (at, scale * slope(part[at])));
                let max = sums[row].max as f32;
                match self.shape.cap {
                    Some(cap) => exponentiate_capped(self.cpu.level, part, max, factor, cap),
                    None => exponentiate(self.cpu.level, part, max, factor),
                }
                if let Some((at, less)) = of_label {
                    part[at] -= less;
                }
            }
        });
    }
}

multiversion! {
    fn fold_row = fold_logits(sums: &mut RowSums, logits: &[f32])
}
multiversion! {
    fn exponentiate = exponentiate_logits(x: &mut [f32], shift: f32, factor: f32)
}

multiversion! {
    fn cap_logits = cap_each(x: &mut [f32], cap: f32)
}
multiversion! {
    fn exponentiate_capped = exponentiate_capped_logits(x: &mut [f32], shift: f32, factor: f32, cap: f32)
}

#[inline(always)]
fn cap_each<S: Simd>(s: S, x: &mut [f32], cap: f32) {
    for i in (0..x.len()).step_by(LANES) {
        put(s, x, i, s.mul(s.splat(cap), tanh(s, s.mul(get(s, x, i), s.splat(1.0 / cap)))));
    }
}

/// Takes some logits of a row into account. A number that is none makes the sum none.
#[inline(always)]
fn fold_logits<S: Simd>(s: S, sums: &mut RowSums, logits: &[f32]) {
    let whole = logits.len() / LANES * LANES;
    let mut max = s.splat(sums.max as f32);
    for i in (0..whole).step_by(LANES) {
        max = s.max(max, get(s, logits, i));
    }
    let max = logits[whole..].iter().fold(s.largest(max), |a, &b| if a > b { a } else { b });
    let shift = s.splat(max);
    let mut total = s.splat(0.0);
    for i in (0..whole).step_by(LANES) {
        total = s.add(total, exp(s, s.sub(get(s, logits, i), shift)));
    }
    if whole < logits.len() {
        let mut rest = [f32::NEG_INFINITY; LANES];
        rest[..logits.len() - whole].copy_from_slice(&logits[whole..]);
        total = s.add(total, exp(s, s.sub(get(s, &rest, 0), shift)));
    }
    let grown = f64::from(max) - sums.max;
    if grown != 0.0 {
        sums.total *= libm::exp(-grown);
        sums.max = f64::from(max);
    }
    sums.total += f64::from(s.sum(total));
}

/// `x = e^(x − shift)·factor`
#[inline(always)]
fn exponentiate_logits<S: Simd>(s: S, x: &mut [f32], shift: f32, factor: f32) {
    let (shift, factor) = (s.splat(shift), s.splat(factor));
    for i in (0..x.len()).step_by(LANES) {
        put(s, x, i, s.mul(exp(s, s.sub(get(s, x, i), shift)), factor));
    }
}

/// As [`exponentiate_logits`] of capped logits, and on to the gradient of what they were before.
#[inline(always)]
fn exponentiate_capped_logits<S: Simd>(s: S, x: &mut [f32], shift: f32, factor: f32, cap: f32) {
    let (shift, factor) = (s.splat(shift), s.splat(factor));
    for i in (0..x.len()).step_by(LANES) {
        let capped = get(s, x, i);
        let p = s.mul(exp(s, s.sub(capped, shift)), factor);
        put(s, x, i, before_cap(s, p, capped, cap));
    }
}
