//! Token embedding.
use super::{Cpu, Parts, expect_len};

/// Columns that one task of the backward sums.
const COLUMNS: usize = 128;

pub(crate) fn forward(cpu: &Cpu, x: &mut [f32], w: &[f32], tokens: &[u32], d: usize) {
    expect_len("embedding_forward", "x", x.len(), tokens.len() * d);
    let x = Parts::new(x);
    cpu.by_rows(tokens.len(), d, |rows| {
        // SAFETY: tasks have rows of their own.
        let x = unsafe { x.part(rows.start * d..rows.end * d) };
        for (x, &token) in x.chunks_exact_mut(d.max(1)).zip(&tokens[rows]) {
            x.copy_from_slice(&w[token as usize * d..][..d]);
        }
    });
}

/// Each task sums some columns over all tokens, so an element's order is that of the tokens.
pub(crate) fn backward(cpu: &Cpu, dw: &mut [f32], dx: &[f32], tokens: &[u32], d: usize) {
    expect_len("embedding_backward", "dx", dx.len(), tokens.len() * d);
    let dw = Parts::new(dw);
    cpu.pool.run(d.div_ceil(COLUMNS), &|task| {
        let columns = task * COLUMNS..((task + 1) * COLUMNS).min(d);
        for (dx, &token) in dx.chunks_exact(d).zip(tokens) {
            let row = token as usize * d;
            // SAFETY: tasks have columns of their own, and this is the task's only part.
            let dw = unsafe { dw.part(row + columns.start..row + columns.end) };
            for (dw, dx) in dw.iter_mut().zip(&dx[columns.clone()]) {
                *dw += dx;
            }
        }
    });
}
