//! Grouped matmul: each group of rows is multiplied by a separate matrix, such as the tokens of an
//! expert by the expert's weight.
//!
//! Every group is a separate matmul, so its result does not depend on the other groups. Each group
//! is one task, unless one group is most of the work. In that case, the groups run one after
//! another on all threads.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{InputElements, OutputElements};
use super::matmul::{MatmulShape, matmul_at_offset, matmul_f32};
use super::packing::Operand;
use crate::ops::expect_len;
use crate::ops::{RowGroup, WriteMode};

/// Implements [`crate::Ops::grouped_forward`]: `y[rows, n] = x[rows, k] · w[n, k]ᵀ` for each group.
pub(crate) fn forward(
    cpu: &Cpu,
    y: OutputElements,
    x: InputElements,
    w: InputElements,
    groups: &[RowGroup],
    n: usize,
    k: usize,
) {
    check_groups(groups, x.len(), k, w.len(), n * k);
    expect_len("grouped_forward", "y", y.len(), x.len() / k * n);
    for_each_group(cpu, groups, |g| {
        let (rows, m) = (&g.rows, g.rows.len());
        let a = Operand { data: x.slice(rows.start * k..rows.end * k), row_stride: k, depth_stride: 1 };
        let b = Operand {
            data: w.slice(g.matrix_offset..g.matrix_offset + n * k),
            row_stride: k,
            depth_stride: 1,
        };
        let shape = MatmulShape { m, n, k, ldc: n, write: WriteMode::Overwrite };
        // SAFETY: different groups have different rows.
        unsafe { matmul_at_offset(cpu, &y, rows.start * n, a, b, shape) };
    });
}

/// Implements [`crate::Ops::grouped_backward_input`]: `dx[rows, k] = dy[rows, n] · w[n, k]` for
/// each group.
pub(crate) fn backward_input(
    cpu: &Cpu,
    dx: OutputElements,
    dy: InputElements,
    w: InputElements,
    groups: &[RowGroup],
    n: usize,
    k: usize,
) {
    check_groups(groups, dx.len(), k, w.len(), n * k);
    expect_len("grouped_backward_input", "dy", dy.len(), dx.len() / k * n);
    for_each_group(cpu, groups, |g| {
        let (rows, m) = (&g.rows, g.rows.len());
        let a = Operand { data: dy.slice(rows.start * n..rows.end * n), row_stride: n, depth_stride: 1 };
        let b = Operand {
            data: w.slice(g.matrix_offset..g.matrix_offset + n * k),
            row_stride: 1,
            depth_stride: k,
        };
        let shape = MatmulShape { m, n: k, k: n, ldc: k, write: WriteMode::Overwrite };
        // SAFETY: different groups have different rows.
        unsafe { matmul_at_offset(cpu, &dx, rows.start * k, a, b, shape) };
    });
}

/// Implements [`crate::Ops::grouped_backward_weight`]: `dw[n, k] = dy[rows, n]ᵀ · x[rows, k]` for
/// each group, zeros for an empty group.
pub(crate) fn backward_weight(
    cpu: &Cpu,
    dw: &mut [f32],
    dy: InputElements,
    x: InputElements,
    groups: &[RowGroup],
    n: usize,
    k: usize,
) {
    check_groups(groups, x.len(), k, dw.len(), n * k);
    expect_len("grouped_backward_weight", "dy", dy.len(), x.len() / k * n);
    let mut matrices: Vec<usize> = groups.iter().map(|g| g.matrix_offset).collect();
    matrices.sort_unstable();
    assert!(matrices.windows(2).all(|m| m[0] + n * k <= m[1]), "grouped_backward_weight: matrices overlap");
    let dw = DisjointSlices::new(dw);
    for_each_group(cpu, groups, |g| {
        let (rows, m) = (&g.rows, g.rows.len());
        // SAFETY: the matrices do not overlap.
        let dw = unsafe { dw.slice_mut(g.matrix_offset..g.matrix_offset + n * k) };
        let a = Operand { data: dy.slice(rows.start * n..rows.end * n), row_stride: 1, depth_stride: n };
        let b = Operand { data: x.slice(rows.start * k..rows.end * k), row_stride: 1, depth_stride: k };
        matmul_f32(cpu, dw, a, b, MatmulShape { m: n, n: k, k: m, ldc: k, write: WriteMode::Overwrite });
    });
}

/// Panics unless the groups' rows are in order without overlap, and all rows and matrices are in
/// bounds. `k` is the length of a row, `matrix_len` that of a matrix.
#[track_caller]
fn check_groups(groups: &[RowGroup], x_len: usize, k: usize, weights_len: usize, matrix_len: usize) {
    assert!(k > 0 && x_len.is_multiple_of(k), "grouped matmul: {x_len} elements are not rows of {k}");
    let mut previous_end = 0;
    for g in groups {
        let is_valid = g.rows.start >= previous_end && g.rows.start <= g.rows.end && g.rows.end <= x_len / k;
        assert!(is_valid, "grouped matmul: rows {:?} are not within {previous_end}..{}", g.rows, x_len / k);
        assert!(
            g.matrix_offset + matrix_len <= weights_len,
            "grouped matmul: the matrix at {} exceeds the {weights_len} weights",
            g.matrix_offset
        );
        previous_end = g.rows.end;
    }
}

/// Calls `run` for each group. The calls are made in parallel, unless one group has most of the
/// rows.
fn for_each_group(cpu: &Cpu, groups: &[RowGroup], run: impl Fn(&RowGroup) + Sync) {
    let rows = groups.iter().map(|g| g.rows.len());
    let (total, largest) = (rows.clone().sum::<usize>(), rows.max().unwrap_or(0));
    // A matmul inside a task runs on one thread.
    match largest * cpu.pool.threads() <= total.max(1) * 3 / 2 {
        true => cpu.pool.run(groups.len(), &|i| run(&groups[i])),
        false => groups.iter().for_each(run),
    }
}
