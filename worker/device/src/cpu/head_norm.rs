//! RMSNorm of each head inside wider rows, with one weight for all heads.
use super::bias::add_in_order;
use super::half::{In, Old, Out};
use super::norm::{Rows, differentiate, normalise};
use super::{Cpu, Parts, expect_len};
use crate::ops::{HeadRows, Write};

/// Rows whose share of the weight's gradient is summed before it is added to the others'.
const ROWS: usize = 32;

fn check(op: &str, x: usize, raw: usize, rstd: usize, w: usize, h: HeadRows) {
    assert!(h.head_dim > 0, "{op}: heads of no element have no mean");
    assert!(h.first + h.width() <= h.stride, "{op}: {} heads don't fit a row of {}", h.heads, h.stride);
    expect_len(op, "x", x, h.rows * h.stride);
    expect_len(op, "raw", raw, h.rows * h.width());
    expect_len(op, "rstd", rstd, h.rows * h.heads);
    expect_len(op, "w", w, h.head_dim);
}

pub(crate) fn forward(cpu: &Cpu, x: Out, raw: Out, rstd: &mut [f32], w: In, h: HeadRows, eps: f32) {
    check("rmsnorm_heads_forward", x.len(), raw.len(), rstd.len(), w.len(), h);
    let (w, rstd) = (w.all(cpu), Parts::new(rstd));
    cpu.by_rows(h.rows, 3 * h.width(), |rows| {
        for row in rows {
            let at = row * h.stride + h.first;
            // SAFETY: tasks have rows of their own.
            let (mut x, mut raw, rstd) = unsafe {
                let width = h.width();
                (
                    x.part(at..at + width, Old::Read),
                    raw.part(row * width..(row + 1) * width, Old::Lost),
                    rstd.part(row * h.heads..(row + 1) * h.heads),
                )
            };
            raw.copy_from_slice(&x);
            normalise(cpu.level, &mut x, rstd, &raw, &w, eps);
        }
    });
}

pub(crate) fn backward(cpu: &Cpu, dx: Out, dw: &mut [f32], raw: In, rstd: &[f32], w: In, h: HeadRows) {
    let op = "rmsnorm_heads_backward";
    check(op, dx.len(), raw.len(), rstd.len(), w.len(), h);
    expect_len(op, "dw", dw.len(), h.head_dim);
    let chunks = h.rows.div_ceil(ROWS);
    let mut sums = cpu.scratch.take(chunks * h.head_dim);
    let (w, parts) = (w.all(cpu), Parts::new(&mut sums));
    cpu.pool.run(chunks, &|chunk| {
        let mut dy = cpu.scratch.take(h.width());
        // SAFETY: tasks have a row of sums of their own.
        let dw = unsafe { parts.part(chunk * h.head_dim..(chunk + 1) * h.head_dim) };
        dw.fill(0.0);
        for row in chunk * ROWS..((chunk + 1) * ROWS).min(h.rows) {
            let (at, width) = (row * h.stride + h.first, h.width());
            // SAFETY: tasks have rows of their own.
            let mut dx = unsafe { dx.part(at..at + width, Old::Read) };
            dy[..width].copy_from_slice(&dx);
            let x = raw.part(cpu, row * width..(row + 1) * width);
            let given =
                Rows { dy: &dy[..width], x: &x, w: &w, rstd: &rstd[row * h.heads..(row + 1) * h.heads] };
            differentiate(cpu.level, &mut dx, dw, given, Write::Set);
        }
    });
    add_in_order(dw, &mut sums[..chunks * h.head_dim]);
}
