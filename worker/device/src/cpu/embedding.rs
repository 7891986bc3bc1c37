//! Token embedding.
use super::half::{In, Old, Out};
use super::{Cpu, Parts, expect_len};

/// Columns that one task of the backward sums.
const COLUMNS: usize = 128;

pub(crate) fn forward(cpu: &Cpu, x: Out, w: In, tokens: &[u32], d: usize) {
    expect_len("embedding_forward", "x", x.len(), tokens.len() * d);
    cpu.by_rows(tokens.len(), d, |rows| {
        // SAFETY: tasks have rows of their own.
        let mut x = unsafe { x.part(rows.start * d..rows.end * d, Old::Lost) };
        for (x, &token) in x.chunks_exact_mut(d.max(1)).zip(&tokens[rows]) {
            w.slice(token as usize * d..(token as usize + 1) * d).copy_to(cpu, x);
        }
    });
}

/// Each task sums some columns over all tokens, so an element's order is that of the tokens.
pub(crate) fn backward(cpu: &Cpu, dw: &mut [f32], dx: In, tokens: &[u32], d: usize) {
    expect_len("embedding_backward", "dx", dx.len(), tokens.len() * d);
    let dw = Parts::new(dw);
    cpu.pool.run(d.div_ceil(COLUMNS), &|task| {
        let columns = task * COLUMNS..((task + 1) * COLUMNS).min(d);
        let mut given = [0.0; COLUMNS];
        let given = &mut given[..columns.len()];
        for (i, &token) in tokens.iter().enumerate() {
            dx.slice(i * d + columns.start..i * d + columns.end).copy_to(cpu, given);
            let row = token as usize * d;
            // SAFETY: tasks have columns of their own, and this is the task's only part.
            let dw = unsafe { dw.part(row + columns.start..row + columns.end) };
            for (dw, dx) in dw.iter_mut().zip(&*given) {
                *dw += dx;
            }
        }
    });
}
