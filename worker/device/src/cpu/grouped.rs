//! Products of groups of rows, each with a matrix of its own: what the experts of a layer compute.
//!
//! Every group is a product of its own, so its bits don't depend on the other groups. Groups go to threads whole, unless one
//! of them is most of the work: then they follow one another and each uses all threads.
use super::half::{In, Out};
use super::matmul::{Product, product, product_part};
use super::pack::Operand;
use super::{Cpu, Parts, expect_len};
use crate::ops::{Group, Write};

/// `y[rows, n] = x[rows, k] · w[n, k]ᵀ` of each group.
pub(crate) fn forward(cpu: &Cpu, y: Out, x: In, w: In, groups: &[Group], n: usize, k: usize) {
    check(groups, x.len(), k, w.len(), n * k);
    expect_len("grouped_forward", "y", y.len(), x.len() / k * n);
    each(cpu, groups, |g| {
        let (rows, m) = (&g.rows, g.rows.len());
        let a = Operand { data: x.slice(rows.start * k..rows.end * k), row: k, depth: 1 };
        let b = Operand { data: w.slice(g.matrix..g.matrix + n * k), row: k, depth: 1 };
        let shape = Product { m, n, k, ldc: n, write: Write::Set };
        // SAFETY: groups have rows of their own.
        unsafe { product_part(cpu, &y, rows.start * n, a, b, shape) };
    });
}

/// `dx[rows, k] = dy[rows, n] · w[n, k]` of each group.
pub(crate) fn backward_input(cpu: &Cpu, dx: Out, dy: In, w: In, groups: &[Group], n: usize, k: usize) {
    check(groups, dx.len(), k, w.len(), n * k);
    expect_len("grouped_backward_input", "dy", dy.len(), dx.len() / k * n);
    each(cpu, groups, |g| {
        let (rows, m) = (&g.rows, g.rows.len());
        let a = Operand { data: dy.slice(rows.start * n..rows.end * n), row: n, depth: 1 };
        let b = Operand { data: w.slice(g.matrix..g.matrix + n * k), row: 1, depth: k };
        let shape = Product { m, n: k, k: n, ldc: k, write: Write::Set };
        // SAFETY: groups have rows of their own.
        unsafe { product_part(cpu, &dx, rows.start * k, a, b, shape) };
    });
}

/// `dw[n, k] = dy[rows, n]ᵀ · x[rows, k]` of each group; zeros for a group without rows.
pub(crate) fn backward_weight(
    cpu: &Cpu,
    dw: &mut [f32],
    dy: In,
    x: In,
    groups: &[Group],
    n: usize,
    k: usize,
) {
    check(groups, x.len(), k, dw.len(), n * k);
    expect_len("grouped_backward_weight", "dy", dy.len(), x.len() / k * n);
    let mut matrices: Vec<usize> = groups.iter().map(|g| g.matrix).collect();
    matrices.sort_unstable();
    assert!(matrices.windows(2).all(|m| m[0] + n * k <= m[1]), "grouped_backward_weight: matrices overlap");
    let dw = Parts::new(dw);
    each(cpu, groups, |g| {
        let (rows, m) = (&g.rows, g.rows.len());
        // SAFETY: the matrices don't overlap.
        let dw = unsafe { dw.part(g.matrix..g.matrix + n * k) };
        let a = Operand { data: dy.slice(rows.start * n..rows.end * n), row: 1, depth: n };
        let b = Operand { data: x.slice(rows.start * k..rows.end * k), row: 1, depth: k };
        product(cpu, dw, a, b, Product { m: n, n: k, k: m, ldc: k, write: Write::Set });
    });
}

/// Stops the program unless the groups' rows follow one another without overlap and every row and matrix is there.
#[track_caller]
fn check(groups: &[Group], x: usize, k: usize, weights: usize, matrix: usize) {
    assert!(k > 0 && x.is_multiple_of(k), "groups: {x} elements are no rows of {k}");
    let mut at = 0;
    for g in groups {
        let there = g.rows.start >= at && g.rows.start <= g.rows.end && g.rows.end <= x / k;
        assert!(there, "groups: rows {:?} of {} after {at}", g.rows, x / k);
        assert!(g.matrix + matrix <= weights, "groups: no matrix at {} of {weights}", g.matrix);
        at = g.rows.end;
    }
}

fn each(cpu: &Cpu, groups: &[Group], run: impl Fn(&Group) + Sync) {
    let rows = groups.iter().map(|g| g.rows.len());
    let (total, largest) = (rows.clone().sum::<usize>(), rows.max().unwrap_or(0));
    // A product inside a task runs on its thread alone.
    match largest * cpu.pool.threads() <= total.max(1) * 3 / 2 {
        true => cpu.pool.run(groups.len(), &|i| run(&groups[i])),
        false => groups.iter().for_each(run),
    }
}
