//! Token embedding: looks up rows of the weight, and sums their gradient.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{InputElements, OutputElements, PriorContents};
use crate::ops::expect_len;

/// Number of columns of the weight's gradient that one task of the backward pass sums.
const TASK_COLUMNS: usize = 128;

/// Implements [`crate::Ops::embedding_forward`].
pub(crate) fn forward(cpu: &Cpu, x: OutputElements, w: InputElements, tokens: &[u32], d: usize) {
    expect_len("embedding_forward", "x", x.len(), tokens.len() * d);
    cpu.run_over_rows(tokens.len(), d, |rows| {
        // SAFETY: each task writes different rows.
        let mut x = unsafe { x.slice_as_f32(rows.start * d..rows.end * d, PriorContents::Ignored) };
        for (x, &token) in x.chunks_exact_mut(d.max(1)).zip(&tokens[rows]) {
            w.slice(token as usize * d..(token as usize + 1) * d).copy_to_f32(cpu, x);
        }
    });
}

/// Implements [`crate::Ops::embedding_backward`]. Each task sums some columns over all tokens, so
/// every element is summed in the order of the tokens.
pub(crate) fn backward(cpu: &Cpu, dw: &mut [f32], dx: InputElements, tokens: &[u32], d: usize) {
    expect_len("embedding_backward", "dx", dx.len(), tokens.len() * d);
    let dw = DisjointSlices::new(dw);
    cpu.pool.run(d.div_ceil(TASK_COLUMNS), &|task| {
        let columns = task * TASK_COLUMNS..((task + 1) * TASK_COLUMNS).min(d);
        let mut columns_dx = [0.0; TASK_COLUMNS];
        let columns_dx = &mut columns_dx[..columns.len()];
        for (i, &token) in tokens.iter().enumerate() {
            dx.slice(i * d + columns.start..i * d + columns.end).copy_to_f32(cpu, columns_dx);
            let row = token as usize * d;
            // SAFETY: each task writes different columns, and this is the task's only range.
            let dw = unsafe { dw.slice_mut(row + columns.start..row + columns.end) };
            for (dw, dx) in dw.iter_mut().zip(&*columns_dx) {
                *dw += dx;
            }
        }
    });
}
