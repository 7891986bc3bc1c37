//! Bias: a vector that is added to every row, and its gradient.
//!
//! The gradient is summed over chunks of rows, and the chunks' sums are added in order.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{InputElements, OutputElements, PriorContents};
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::ops::expect_len;

/// Number of rows whose gradients are summed first, before the sums are added in order.
const ROWS_PER_PARTIAL_SUM: usize = 32;

/// Implements [`crate::Ops::bias_forward`].
pub(crate) fn forward(cpu: &Cpu, y: OutputElements, bias: InputElements, m: usize, n: usize) {
    expect_len("bias_forward", "y", y.len(), m * n);
    expect_len("bias_forward", "bias", bias.len(), n);
    let bias = bias.all_to_f32(cpu);
    cpu.run_over_rows(m, n, |rows| {
        // SAFETY: each task writes different rows.
        add_bias(
            cpu.instruction_set,
            &mut unsafe { y.slice_as_f32(rows.start * n..rows.end * n, PriorContents::Read) },
            &bias,
        );
    });
}

/// Adds `bias` to every row of `y`, on all threads.
pub(crate) fn add_bias_to_rows(cpu: &Cpu, y: &mut [f32], bias: &[f32]) {
    let n = bias.len();
    let rows = y.len().checked_div(n).unwrap_or(0);
    let y = DisjointSlices::new(y);
    cpu.run_over_rows(rows, n, |rows| {
        // SAFETY: each task writes different rows.
        add_bias(cpu.instruction_set, unsafe { y.slice_mut(rows.start * n..rows.end * n) }, bias);
    });
}

/// Implements [`crate::Ops::bias_backward`].
pub(crate) fn backward(cpu: &Cpu, dbias: &mut [f32], dy: InputElements, m: usize, n: usize) {
    expect_len("bias_backward", "dbias", dbias.len(), n);
    expect_len("bias_backward", "dy", dy.len(), m * n);
    let chunks = m.div_ceil(ROWS_PER_PARTIAL_SUM);
    let mut sums = cpu.scratch.take(chunks * n);
    let parts = DisjointSlices::new(&mut sums);
    cpu.pool.run(chunks, &|chunk| {
        // SAFETY: each task writes its own row of partial sums.
        let sum = unsafe { parts.slice_mut(chunk * n..(chunk + 1) * n) };
        sum.fill(0.0);
        accumulate_rows(
            cpu.instruction_set,
            sum,
            &dy.to_f32(
                cpu,
                chunk * ROWS_PER_PARTIAL_SUM * n..((chunk + 1) * ROWS_PER_PARTIAL_SUM).min(m) * n,
            ),
        );
    });
    add_partial_sums(dbias, &mut sums[..chunks * n]);
}

/// Adds all rows of `sums` to `to`. The rows are first added to each other in order, which
/// overwrites the first row of `sums`.
pub(crate) fn add_partial_sums(to: &mut [f32], sums: &mut [f32]) {
    let n = to.len();
    if sums.is_empty() {
        return;
    }
    let (first, rest) = sums.split_at_mut(n);
    for row in rest.chunks_exact(n) {
        first.iter_mut().zip(row).for_each(|(a, b)| *a += b);
    }
    to.iter_mut().zip(first).for_each(|(to, s)| *to += *s);
}

multiversion! {
    fn add_bias = add_bias_simd(y: &mut [f32], bias: &[f32])
}
multiversion! {
    fn accumulate_rows = sum_rows_simd(sum: &mut [f32], dy: &[f32])
}

/// Adds `bias` elementwise to every row of `y`, on the calling thread.
#[inline(always)]
fn add_bias_simd<S: Simd>(s: S, y: &mut [f32], bias: &[f32]) {
    for row in y.chunks_exact_mut(bias.len().max(1)) {
        for i in (0..row.len()).step_by(LANES) {
            store_lanes(s, row, i, s.add(load_lanes(s, row, i), load_lanes(s, bias, i)));
        }
    }
}

/// Adds the rows of `dy` to the row `sum` elementwise, in order.
#[inline(always)]
fn sum_rows_simd<S: Simd>(s: S, sum: &mut [f32], dy: &[f32]) {
    for row in dy.chunks_exact(sum.len().max(1)) {
        for i in (0..row.len()).step_by(LANES) {
            store_lanes(s, sum, i, s.add(load_lanes(s, sum, i), load_lanes(s, row, i)));
        }
    }
}
