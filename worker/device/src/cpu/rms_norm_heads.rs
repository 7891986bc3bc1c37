//! RMSNorm of each attention head within wider rows, with one weight for all heads, as Qwen3
//! applies it to queries and keys.
use super::backend::Cpu;
use super::elements::InputElements;
use super::rms_norm::{RmsNormBackwardRows, differentiate, normalize};
use super::row_outputs::{RowOutputs, SliceRows};
use crate::buffer::{View, ViewMut};
use crate::ops::{HeadLayout, HeadNormOps, WriteMode, expect_lens};
use std::ops::Range;

/// Returns the range of columns of the wider matrix that contain the attention heads to normalize.
fn head_columns(layout: HeadLayout) -> Range<usize> {
    layout.first_column..layout.first_column + layout.width()
}

impl HeadNormOps for Cpu {
    fn rmsnorm_heads_forward(
        &self,
        x: ViewMut,
        raw: ViewMut,
        rstd: ViewMut,
        w: View,
        layout: HeadLayout,
        eps: f32,
    ) {
        layout.check_norm_lengths("rmsnorm_heads_forward", x.len(), raw.len(), rstd.len(), w.len());
        let w = self.to_f32(w);
        let x = self.as_columns_to_update(x, head_columns(layout), layout.stride);
        let outputs = (
            x,
            self.as_rows_to_overwrite(raw, layout.width()),
            SliceRows::new(rstd.host_slice_mut(), layout.heads),
        );
        self.run_over_each_output_row(
            layout.rows,
            3 * layout.width(),
            outputs,
            |_, (mut x, mut raw, rstd)| {
                raw.copy_from_slice(&x);
                normalize(self.instruction_set, &mut x, rstd, &raw, &w, eps);
            },
        );
    }

    fn rmsnorm_heads_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        raw: View,
        rstd: View,
        w: View,
        layout: HeadLayout,
    ) {
        let op = "rmsnorm_heads_backward";
        layout.check_norm_lengths(op, dx.len(), raw.len(), rstd.len(), w.len());
        expect_lens(op, [("dw", dw.len(), layout.head_dim)]);
        let (raw, rstd, w) = (InputElements::from(raw), rstd.host_slice(), self.to_f32(w));
        let width = layout.width();
        let dx = self.as_columns_to_update(dx, head_columns(layout), layout.stride);
        self.run_over_rows_and_sum(layout.rows, (), [dw.host_slice_mut()], |rows, (), dw| {
            let mut dy = self.scratch.borrow_buf(width);
            for row in rows {
                let heads = row * layout.heads..(row + 1) * layout.heads;
                let row = row..row + 1;
                // SAFETY: each task writes different rows.
                let mut dx = unsafe { dx.get_rows(&row) };
                dy[..width].copy_from_slice(&dx);
                let (x, rstd) = (raw.rows_to_f32(self, &row, width), &rstd[heads]);
                let inputs = RmsNormBackwardRows { dy: &dy[..width], x: &x, w: &w, rstd };
                differentiate(self.instruction_set, &mut dx, dw, inputs, WriteMode::Overwrite);
            }
        });
    }
}
