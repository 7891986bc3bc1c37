//! A vector added to every row.
use super::half::{In, Old, Out};
use super::simd::{LANES, Simd, get, multiversion, put};
use super::{Cpu, Parts, expect_len};

/// Rows whose share of the gradient is summed before it is added to the others'.
const ROWS: usize = 32;

pub(crate) fn forward(cpu: &Cpu, y: Out, bias: In, m: usize, n: usize) {
    expect_len("bias_forward", "y", y.len(), m * n);
    expect_len("bias_forward", "bias", bias.len(), n);
    let bias = bias.all(cpu);
    cpu.by_rows(m, n, |rows| {
        // SAFETY: tasks have rows of their own.
        add(cpu.level, &mut unsafe { y.part(rows.start * n..rows.end * n, Old::Read) }, &bias);
    });
}

/// `y += bias` in every row of `y`, by all threads.
pub(crate) fn add_to_rows(cpu: &Cpu, y: &mut [f32], bias: &[f32]) {
    let n = bias.len();
    let rows = y.len().checked_div(n).unwrap_or(0);
    let y = Parts::new(y);
    cpu.by_rows(rows, n, |rows| {
        // SAFETY: tasks have rows of their own.
        add(cpu.level, unsafe { y.part(rows.start * n..rows.end * n) }, bias);
    });
}

pub(crate) fn backward(cpu: &Cpu, dbias: &mut [f32], dy: In, m: usize, n: usize) {
    expect_len("bias_backward", "dbias", dbias.len(), n);
    expect_len("bias_backward", "dy", dy.len(), m * n);
    let chunks = m.div_ceil(ROWS);
    let mut sums = cpu.scratch.take(chunks * n);
    let parts = Parts::new(&mut sums);
    cpu.pool.run(chunks, &|chunk| {
        // SAFETY: tasks have a row of sums of their own.
        let sum = unsafe { parts.part(chunk * n..(chunk + 1) * n) };
        sum.fill(0.0);
        collect(cpu.level, sum, &dy.part(cpu, chunk * ROWS * n..((chunk + 1) * ROWS).min(m) * n));
    });
    add_in_order(dbias, &mut sums[..chunks * n]);
}

/// `to += Σ` of the rows of `sums`, which are added one after the other; `sums` is spent.
pub(crate) fn add_in_order(to: &mut [f32], sums: &mut [f32]) {
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
    fn add = add_rows(y: &mut [f32], bias: &[f32])
}
multiversion! {
    fn collect = collect_rows(sum: &mut [f32], dy: &[f32])
}

#[inline(always)]
fn add_rows<S: Simd>(s: S, y: &mut [f32], bias: &[f32]) {
    for row in y.chunks_exact_mut(bias.len().max(1)) {
        for i in (0..row.len()).step_by(LANES) {
            put(s, row, i, s.add(get(s, row, i), get(s, bias, i)));
        }
    }
}

#[inline(always)]
fn collect_rows<S: Simd>(s: S, sum: &mut [f32], dy: &[f32]) {
    for row in dy.chunks_exact(sum.len().max(1)) {
        for i in (0..row.len()).step_by(LANES) {
            put(s, sum, i, s.add(get(s, sum, i), get(s, row, i)));
        }
    }
}
