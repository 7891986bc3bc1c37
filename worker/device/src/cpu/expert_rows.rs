//! Ops on rows that are sent to experts and return: gather, weighted sums, scaling and dot
//! products.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{Element, InputElements, OutputElements, PriorContents, with_elements};
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::ops::WriteMode;
use crate::ops::expect_len;

/// Implements [`crate::Ops::gather_rows`].
pub(crate) fn gather_rows(cpu: &Cpu, y: OutputElements, x: InputElements, rows: &[u32], d: usize) {
    expect_len("gather_rows", "y", y.len(), rows.len() * d);
    cpu.run_over_rows(rows.len(), d, |range| {
        // SAFETY: each task writes different rows.
        let mut y = unsafe { y.slice_as_f32(range.start * d..range.end * d, PriorContents::Ignored) };
        for (y, &row) in y.chunks_exact_mut(d.max(1)).zip(&rows[range]) {
            x.slice(row as usize * d..(row as usize + 1) * d).copy_to_f32(cpu, y);
        }
    });
}

/// Arguments of [`combine_rows`], as in [`crate::Ops::combine_rows`].
#[derive(Clone, Copy)]
pub(crate) struct WeightedRowSum<'a> {
    /// The matrix whose rows are summed.
    pub(crate) x: InputElements<'a>,
    /// Weight of each term of the sums, in the order of `row_indices`. If `None`, every weight is
    /// 1.
    pub(crate) weights: Option<&'a [f32]>,
    /// Index of the row of `x` for each term. Each output row has equally many terms.
    pub(crate) row_indices: &'a [u32],
    /// Number of elements in a row.
    pub(crate) d: usize,
    /// Whether the sums overwrite the output or are added to it.
    pub(crate) write: WriteMode,
}

/// Implements [`crate::Ops::combine_rows`].
pub(crate) fn combine_rows(cpu: &Cpu, y: OutputElements, m: usize, sum: WeightedRowSum) {
    let per_row = sum.row_indices.len().checked_div(m).unwrap_or(0);
    expect_len("combine_rows", "y", y.len(), m * sum.d);
    expect_len("combine_rows", "row_indices", sum.row_indices.len(), m * per_row);
    if let Some(w) = sum.weights {
        expect_len("combine_rows", "weights", w.len(), sum.row_indices.len());
    }
    let prior = if sum.write == WriteMode::Accumulate { PriorContents::Read } else { PriorContents::Ignored };
    cpu.run_over_rows(m, sum.d * per_row.max(1), |range| {
        for row in range {
            // SAFETY: each task writes different rows.
            let mut y = unsafe { y.slice_as_f32(row * sum.d..(row + 1) * sum.d, prior) };
            sum_selected_rows(cpu.instruction_set, &mut y, row * per_row..(row + 1) * per_row, sum);
        }
    });
}

/// Implements [`crate::Ops::dot_rows`].
pub(crate) fn dot_rows(cpu: &Cpu, out: &mut [f32], a: InputElements, b: InputElements, d: usize) {
    expect_len("dot_rows", "a", a.len(), out.len() * d);
    expect_len("dot_rows", "b", b.len(), out.len() * d);
    let rows = out.len();
    let out = DisjointSlices::new(out);
    cpu.run_over_rows(rows, d, |range| {
        let elements = range.start * d..range.end * d;
        let (a, b) = (a.to_f32(cpu, elements.clone()), b.to_f32(cpu, elements));
        // SAFETY: each task writes different rows.
        for (i, out) in unsafe { out.slice_mut(range) }.iter_mut().enumerate() {
            *out = dot(cpu.instruction_set, &a[i * d..][..d], &b[i * d..][..d]);
        }
    });
}

/// Implements [`crate::Ops::scale_rows`].
pub(crate) fn scale_rows(cpu: &Cpu, x: OutputElements, factors: &[f32], d: usize) {
    expect_len("scale_rows", "x", x.len(), factors.len() * d);
    cpu.run_over_rows(factors.len(), d, |range| {
        // SAFETY: each task writes different rows.
        let mut x = unsafe { x.slice_as_f32(range.start * d..range.end * d, PriorContents::Read) };
        for (x, factor) in x.chunks_exact_mut(d.max(1)).zip(&factors[range]) {
            x.iter_mut().for_each(|x| *x *= factor);
        }
    });
}

multiversion! {
    fn sum_selected_rows = sum_selected_rows_simd(y: &mut [f32], terms: std::ops::Range<usize>, sum: WeightedRowSum)
}
multiversion! {
    fn dot = dot_simd(a: &[f32], b: &[f32]) -> f32
}

/// Computes the weighted sum of the rows of `sum.x` that the terms with indices in `terms` select.
/// Overwrites `y` with the result or adds the result to `y`, as `sum.write` states.
#[inline(always)]
fn sum_selected_rows_simd<S: Simd>(s: S, y: &mut [f32], terms: std::ops::Range<usize>, sum: WeightedRowSum) {
    with_elements!(sum.x, x => sum_selected_elements(s, y, x, terms, sum));
}

/// Computes the weighted sum of the rows of `x` that the terms with indices in `terms` select, in
/// the order of the terms. Overwrites `y` with the result or adds the result to `y`, as `sum.write`
/// states. `x` is `sum.x` with elements of type `E`.
#[inline(always)]
fn sum_selected_elements<S: Simd, E: Element>(
    s: S,
    y: &mut [f32],
    x: &[E],
    terms: std::ops::Range<usize>,
    sum: WeightedRowSum,
) {
    for i in (0..sum.d).step_by(LANES) {
        let mut total = s.splat(0.0);
        for k in terms.clone() {
            let x = E::load_lanes(s, &x[sum.row_indices[k] as usize * sum.d..][..sum.d], i);
            total = match sum.weights {
                Some(w) => s.fma(x, s.splat(w[k]), total),
                None => s.add(total, x),
            };
        }
        if sum.write == WriteMode::Accumulate {
            total = s.add(load_lanes(s, y, i), total);
        }
        store_lanes(s, y, i, total);
    }
}

/// Returns the dot product of `a` and `b`, summed in 16 lanes, which are added in the order of
/// [`Simd::sum`].
#[inline(always)]
fn dot_simd<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut total = s.splat(0.0);
    for i in (0..a.len()).step_by(LANES) {
        total = s.fma(load_lanes(s, a, i), load_lanes(s, b, i), total);
    }
    s.sum(total)
}
