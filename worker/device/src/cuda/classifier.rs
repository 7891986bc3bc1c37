//! Logits, cross-entropy and their gradients, a chunk of rows at a time: the logits never exist whole.
use super::card::Param;
use super::compile::CLASSIFIER;
use super::ops::{Operand, product};
use super::{Cuda, expect_len, floats, number};
use crate::mem::{Dtype, View, ViewMut};
use crate::ops::{ClassifierGrads, IGNORE, Write};
use crate::storage::Storage;

/// Logits that are held at once. Each chunk reads and writes the whole gradient of the matrix, and products want many rows.
const LOGITS: usize = 256 << 20;
/// Fewest rows in a chunk.
const FEWEST_ROWS: usize = 1024;
/// Rows of logits begin at multiples of as many elements: products are slow where they don't lie at 16 bytes.
const ALIGNED: usize = 64;

#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) d: usize,
    pub(super) v: usize,
    pub(super) cap: Option<f32>,
}

/// Of `m` rows, those whose `v` logits exist at once.
fn rows_at_once(m: usize, v: usize) -> usize {
    (LOGITS / v.max(1)).max(FEWEST_ROWS).min(m)
}

/// Bytes that logits of `m` rows over `v` take at once.
pub fn logits_bytes(m: usize, v: usize) -> usize {
    rows_at_once(m, v) * v.next_multiple_of(ALIGNED) * size_of::<f32>()
}

pub(super) fn classifier(
    cuda: &Cuda,
    loss: ViewMut,
    x: View,
    w: View,
    labels: &[u32],
    shape: Shape,
    mut grads: Option<ClassifierGrads>,
) {
    let Shape { m, d, v, cap } = shape;
    check(loss.len(), x.len(), w.len(), labels, shape, grads.as_ref());
    if let Some(g) = grads.as_mut().filter(|g| g.dw_write == Write::Set && !g.dw.is_empty() && m == 0) {
        cuda.clear(g.dw.reborrow());
    }
    let (rows, stride) = (rows_at_once(m, v), v.next_multiple_of(ALIGNED));
    let logits = cuda.scratch(logits_bytes(m, v));
    // The gradients' products want both operands of one type: dlogits are rounded to that of the activations and the weights.
    // They are written over the logits, row by row.
    let inner = if x.dtype() == w.dtype() { x.dtype() } else { Dtype::F32 };
    let dlogits = Operand {
        at: logits.at(),
        dtype: inner,
        stride: stride * size_of::<f32>() / inner.size(),
        transposed: false,
    };
    let loss = floats(loss.as_view());
    let labels_there = cuda.numbers("labels", labels);
    for start in (0..m).step_by(rows.max(1)) {
        let count = rows.min(m - start);
        let x = Operand::of(x.slice(start * d..(start + count) * d), d, false);
        let whole = Operand { dtype: Dtype::F32, stride, ..dlogits };
        product(cuda, whole, x, Operand::of(w, d, true), [count, v, d], Write::Set);
        let over = if grads.is_some() { number(inner) } else { -1 };
        let (loss, labels) = (loss + (start * 4) as u64, labels_there + (start * 4) as u64);
        let factor = grads.as_ref().map_or(0.0, |g| g.scale);
        let numbers = [v as i64, stride as i64, over];
        let arguments: [&dyn Param; 8] = [
            &loss,
            &logits.at(),
            &labels,
            &numbers[0],
            &numbers[1],
            &numbers[2],
            &cap.unwrap_or(0.0),
            &factor,
        ];
        let kernel = if cap.is_some() { c"cross_entropy_capped" } else { c"cross_entropy" };
        cuda.each_row(CLASSIFIER, kernel, count, v, &arguments);
        if let Some(g) = &grads {
            let dx = Operand::of(g.dx.as_view().slice(start * d..(start + count) * d), d, false);
            product(cuda, dx, dlogits, Operand::of(w, d, false), [count, d, v], Write::Set);
            if !g.dw.is_empty() {
                let write = if start == 0 { g.dw_write } else { Write::Add };
                let dw = Operand::of(g.dw.as_view(), d, false);
                product(cuda, dw, Operand { transposed: true, ..dlogits }, x, [v, d, count], write);
            }
        }
    }
}

fn check(loss: usize, x: usize, w: usize, labels: &[u32], shape: Shape, grads: Option<&ClassifierGrads>) {
    let Shape { m, d, v, .. } = shape;
    assert!(v > 0 && d > 0, "classifier: an empty vocabulary or model");
    expect_len("classifier", "loss", loss, m);
    expect_len("classifier", "x", x, m * d);
    expect_len("classifier", "w", w, v * d);
    expect_len("classifier", "labels", labels.len(), m);
    let outside = labels.iter().find(|&&l| l != IGNORE && l as usize >= v);
    assert!(outside.is_none(), "classifier: label {outside:?} is not below the vocabulary of {v}");
    if let Some(g) = grads {
        expect_len("classifier", "dx", g.dx.len(), m * d);
        if !g.dw.is_empty() {
            expect_len("classifier", "dw", g.dw.len(), v * d);
        }
    }
}
