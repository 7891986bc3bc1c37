//! Multiplies each group of rows by a separate matrix (grouped matmul), such as the tokens of an
//! expert by the expert's weight.
//!
//! Every group is a separate matmul, so its result does not depend on the other groups. Each group
//! is one task, unless one group is most of the work. In that case, the groups run one after
//! another on all threads.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::InputElements;
use super::matmul::{MatmulShape, matmul_at_offset, matmul_f32};
use super::packing::Operand;
use crate::buffer::{View, ViewMut};
use crate::ops::{GroupedMatmulOps, RowGroup, WriteMode, expect_len};

impl GroupedMatmulOps for Cpu {
    fn grouped_forward(&self, y: ViewMut, x: View, w: View, groups: &[RowGroup], n: usize, k: usize) {
        check_groups(groups, x.len(), k, w.len(), n * k);
        expect_len("grouped_forward", "y", y.len(), x.len() / k * n);
        let (y, x, w) = (self.as_output(y), InputElements::from(x), InputElements::from(w));
        for_each_group(self, groups, |g| {
            let a = Operand::from_rows(x.slice(g.row_element_range(k)), k);
            let b = Operand::from_rows(w.slice(g.matrix_element_range(n * k)), k);
            let shape = MatmulShape { m: g.rows.len(), n, k, ldc: n, write: WriteMode::Overwrite };
            // SAFETY: different groups have different rows.
            unsafe { matmul_at_offset(self, &y, g.rows.start * n, a, b, shape) };
        });
    }

    fn grouped_backward_input(
        &self,
        dx: ViewMut,
        dy: View,
        w: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    ) {
        check_groups(groups, dx.len(), k, w.len(), n * k);
        expect_len("grouped_backward_input", "dy", dy.len(), dx.len() / k * n);
        let (dx, dy, w) = (self.as_output(dx), InputElements::from(dy), InputElements::from(w));
        for_each_group(self, groups, |g| {
            let a = Operand::from_rows(dy.slice(g.row_element_range(n)), n);
            let b = Operand::from_transposed(w.slice(g.matrix_element_range(n * k)), k);
            let shape = MatmulShape { m: g.rows.len(), n: k, k: n, ldc: k, write: WriteMode::Overwrite };
            // SAFETY: different groups have different rows.
            unsafe { matmul_at_offset(self, &dx, g.rows.start * k, a, b, shape) };
        });
    }

    fn grouped_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    ) {
        let op = "grouped_backward_weight";
        check_groups(groups, x.len(), k, dw.len(), n * k);
        expect_len(op, "dy", dy.len(), x.len() / k * n);
        let mut matrices: Vec<usize> = groups.iter().map(|g| g.matrix_offset).collect();
        matrices.sort_unstable();
        assert!(matrices.windows(2).all(|m| m[0] + n * k <= m[1]), "{op}: matrices overlap");
        let (dw, dy, x) =
            (DisjointSlices::new(dw.host_slice_mut()), InputElements::from(dy), InputElements::from(x));
        for_each_group(self, groups, |g| {
            // SAFETY: the matrices do not overlap.
            let dw = unsafe { dw.slice_mut(g.matrix_element_range(n * k)) };
            let a = Operand::from_transposed(dy.slice(g.row_element_range(n)), n);
            let b = Operand::from_transposed(x.slice(g.row_element_range(k)), k);
            let shape = MatmulShape { m: n, n: k, k: g.rows.len(), ldc: k, write: WriteMode::Overwrite };
            matmul_f32(self, dw, a, b, shape);
        });
    }
}

/// Panics unless the row groups of a grouped matmul are in order without overlap, and all rows and
/// matrices are in bounds. `k` is the length of a row, `matrix_len` that of a matrix.
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

/// Calls `run` for each row group of a grouped matmul, in parallel tasks if the groups have similar
/// sizes, and otherwise one after another. In the latter case, each matmul uses all threads.
fn for_each_group(cpu: &Cpu, groups: &[RowGroup], run: impl Fn(&RowGroup) + Sync) {
    let rows = groups.iter().map(|g| g.rows.len());
    let (total, largest) = (rows.clone().sum::<usize>(), rows.max().unwrap_or(0));
    // A matmul inside a task runs on one thread.
    match largest * cpu.pool.thread_count() <= total.max(1) * 3 / 2 {
        true => cpu.pool.run(groups.len(), &|i| run(&groups[i])),
        false => groups.iter().for_each(run),
    }
}
