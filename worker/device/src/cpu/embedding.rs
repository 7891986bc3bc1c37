//! Token embedding on the CPU: looks up each token's row of the weight in the forward pass, and
//! adds up the gradients of the rows in the backward pass.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::InputElements;
use super::expert_rows::copy_selected_rows;
use crate::buffer::{View, ViewMut};
use crate::ops::{EmbeddingOps, expect_lens};

/// Number of columns of the embedding weight's gradient that one parallel task computes in the
/// backward pass.
const COLUMNS_PER_TASK: usize = 128;

impl EmbeddingOps for Cpu {
    fn embedding_forward(&self, x: ViewMut, w: View, tokens: &[u32], d: usize) {
        copy_selected_rows(self, "embedding_forward", x, w, tokens, d);
    }

    /// Adds the gradient of each token's embedding to the token's row in the gradient of the
    /// embedding weight. Each task sums some columns over all tokens, so every element is summed in
    /// the order of the tokens.
    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize) {
        expect_lens("embedding_backward", [("dx", dx.len(), tokens.len() * d)]);
        let (dw, dx) = (DisjointSlices::new(dw.host_slice_mut()), InputElements::from(dx));
        self.pool.run(d.div_ceil(COLUMNS_PER_TASK), &|task| {
            let columns = task * COLUMNS_PER_TASK..((task + 1) * COLUMNS_PER_TASK).min(d);
            let mut columns_dx = [0.0; COLUMNS_PER_TASK];
            let columns_dx = &mut columns_dx[..columns.len()];
            for (i, &token) in tokens.iter().enumerate() {
                dx.slice(i * d + columns.start..i * d + columns.end).copy_to_f32(self, columns_dx);
                let row = token as usize * d;
                // SAFETY: each task writes different columns, and this is the task's only range.
                let dw = unsafe { dw.slice_mut(row + columns.start..row + columns.end) };
                dw.iter_mut().zip(&*columns_dx).for_each(|(dw, dx)| *dw += dx);
            }
        });
    }
}
