//! RMSNorm of each head inside wider rows, with one weight for all heads, as Qwen3 applies it to
//! queries and keys.
use super::backend::Cpu;
use super::bias::add_partial_sums;
use super::disjoint_slices::DisjointSlices;
use super::elements::{InputElements, OutputElements, PriorContents};
use super::rms_norm::{RmsNormBackwardRows, differentiate, normalize};
use crate::ops::expect_len;
use crate::ops::{HeadLayout, WriteMode};

/// Number of rows whose contributions to the weight's gradient are summed first, before the sums
/// are added in order.
const ROWS_PER_PARTIAL_SUM: usize = 32;

/// Panics if the length of a buffer of the op `op` does not fit `layout`.
fn check_lengths(op: &str, x: usize, raw: usize, rstd: usize, w: usize, layout: HeadLayout) {
    assert!(layout.head_dim > 0, "{op}: head_dim is 0");
    assert!(
        layout.first_column + layout.width() <= layout.stride,
        "{op}: {} heads exceed the row of {} elements",
        layout.heads,
        layout.stride
    );
    expect_len(op, "x", x, layout.rows * layout.stride);
    expect_len(op, "raw", raw, layout.rows * layout.width());
    expect_len(op, "rstd", rstd, layout.rows * layout.heads);
    expect_len(op, "w", w, layout.head_dim);
}

/// Implements [`crate::Ops::rmsnorm_heads_forward`].
pub(crate) fn forward(
    cpu: &Cpu,
    x: OutputElements,
    raw: OutputElements,
    rstd: &mut [f32],
    w: InputElements,
    layout: HeadLayout,
    eps: f32,
) {
    check_lengths("rmsnorm_heads_forward", x.len(), raw.len(), rstd.len(), w.len(), layout);
    let (w, rstd) = (w.all_to_f32(cpu), DisjointSlices::new(rstd));
    cpu.run_over_rows(layout.rows, 3 * layout.width(), |rows| {
        for row in rows {
            let first = row * layout.stride + layout.first_column;
            // SAFETY: each task writes different rows.
            let (mut x, mut raw, rstd) = unsafe {
                let width = layout.width();
                (
                    x.slice_as_f32(first..first + width, PriorContents::Read),
                    raw.slice_as_f32(row * width..(row + 1) * width, PriorContents::Ignored),
                    rstd.slice_mut(row * layout.heads..(row + 1) * layout.heads),
                )
            };
            raw.copy_from_slice(&x);
            normalize(cpu.instruction_set, &mut x, rstd, &raw, &w, eps);
        }
    });
}

/// Implements [`crate::Ops::rmsnorm_heads_backward`].
pub(crate) fn backward(
    cpu: &Cpu,
    dx: OutputElements,
    dw: &mut [f32],
    raw: InputElements,
    rstd: &[f32],
    w: InputElements,
    layout: HeadLayout,
) {
    let op = "rmsnorm_heads_backward";
    check_lengths(op, dx.len(), raw.len(), rstd.len(), w.len(), layout);
    expect_len(op, "dw", dw.len(), layout.head_dim);
    let chunks = layout.rows.div_ceil(ROWS_PER_PARTIAL_SUM);
    let mut sums = cpu.scratch.take(chunks * layout.head_dim);
    let (w, parts) = (w.all_to_f32(cpu), DisjointSlices::new(&mut sums));
    cpu.pool.run(chunks, &|chunk| {
        let mut dy = cpu.scratch.take(layout.width());
        // SAFETY: each task writes its own row of partial sums.
        let dw = unsafe { parts.slice_mut(chunk * layout.head_dim..(chunk + 1) * layout.head_dim) };
        dw.fill(0.0);
        for row in chunk * ROWS_PER_PARTIAL_SUM..((chunk + 1) * ROWS_PER_PARTIAL_SUM).min(layout.rows) {
            let (first, width) = (row * layout.stride + layout.first_column, layout.width());
            // SAFETY: each task writes different rows.
            let mut dx = unsafe { dx.slice_as_f32(first..first + width, PriorContents::Read) };
            dy[..width].copy_from_slice(&dx);
            let x = raw.to_f32(cpu, row * width..(row + 1) * width);
            let inputs = RmsNormBackwardRows {
                dy: &dy[..width],
                x: &x,
                w: &w,
                rstd: &rstd[row * layout.heads..(row + 1) * layout.heads],
            };
            differentiate(cpu.instruction_set, &mut dx, dw, inputs, WriteMode::Overwrite);
        }
    });
    add_partial_sums(dw, &mut sums[..chunks * layout.head_dim]);
}
