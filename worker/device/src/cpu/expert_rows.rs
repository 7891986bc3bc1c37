//! Ops of mixture-of-experts layers on rows, each of which is one token: gathering, weighted sums,
//! scaling and dot products.
use super::backend::Cpu;
use super::elements::{Element, InputElements, with_elements};
use super::instruction_set::multiversion;
use super::row_outputs::SliceRows;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{RowOps, WriteMode, expect_lens};

impl RowOps for Cpu {
    fn gather_rows(&self, y: ViewMut, x: View, rows: &[u32], d: usize) {
        copy_selected_rows(self, "gather_rows", y, x, rows, d);
    }

    fn combine_rows(
        &self,
        y: ViewMut,
        x: View,
        weights: Option<View>,
        row_indices: &[u32],
        m: usize,
        d: usize,
        write: WriteMode,
    ) {
        let (op, terms) = ("combine_rows", row_indices.len());
        let per_row = terms.checked_div(m).unwrap_or(0);
        expect_lens(op, [("y", y.len(), m * d), ("row_indices", terms, m * per_row)]);
        let weights = weights.map(View::host_slice);
        expect_lens(op, [("weights", weights.map_or(terms, <[f32]>::len), terms)]);
        let sum = WeightedRowSum { x: x.into(), weights, row_indices, d, write };
        self.run_over_each_output_row(
            m,
            d * per_row.max(1),
            self.as_output_rows(y, d, write),
            |row, mut y| {
                sum_selected_rows(self.instruction_set, &mut y, row * per_row..(row + 1) * per_row, sum);
            },
        );
    }

    fn dot_rows(&self, out: ViewMut, a: View, b: View, d: usize) {
        let rows = out.len();
        expect_lens("dot_rows", [("a", a.len(), rows * d), ("b", b.len(), rows * d)]);
        let (a, b) = (InputElements::from(a), InputElements::from(b));
        self.run_over_output_rows(rows, d, SliceRows::new(out.host_slice_mut(), 1), |rows, out| {
            let (a, b) = (a.rows_to_f32(self, &rows, d), b.rows_to_f32(self, &rows, d));
            for (i, out) in out.iter_mut().enumerate() {
                *out = dot(self.instruction_set, &a[i * d..][..d], &b[i * d..][..d]);
            }
        });
    }

    fn scale_rows(&self, x: ViewMut, factors: View, d: usize) {
        expect_lens("scale_rows", [("x", x.len(), factors.len() * d)]);
        let factors = factors.host_slice();
        self.run_over_output_rows(factors.len(), d, self.as_rows_to_update(x, d), |rows, mut x| {
            for (x, factor) in x.chunks_exact_mut(d.max(1)).zip(&factors[rows]) {
                x.iter_mut().for_each(|x| *x *= factor);
            }
        });
    }
}

/// Copies the rows of `x` that `rows` selects: `y[i] = x[rows[i]]`, for rows of `d` elements. `op`
/// is the op's name in panics.
pub(super) fn copy_selected_rows(cpu: &Cpu, op: &str, y: ViewMut, x: View, rows: &[u32], d: usize) {
    expect_lens(op, [("y", y.len(), rows.len() * d)]);
    let x = InputElements::from(x);
    cpu.run_over_output_rows(rows.len(), d, cpu.as_rows_to_overwrite(y, d), |range, mut y| {
        for (y, &row) in y.chunks_exact_mut(d.max(1)).zip(&rows[range]) {
            x.slice(row as usize * d..(row as usize + 1) * d).copy_to_f32(cpu, y);
        }
    });
}

/// Inputs of an op that computes weighted sums of selected rows ([`RowOps::combine_rows`]): the
/// matrix, the row indices and the weights.
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

multiversion! {
    /// Computes the weighted sum of matrix rows that `sum` describes (matrix, row indices, weights)
    /// with the given instruction set, and writes it to the row `y`.
    fn sum_selected_rows = sum_selected_rows_simd(y: &mut [f32], terms: std::ops::Range<usize>, sum: WeightedRowSum)
}
multiversion! {
    /// Returns the dot product of `a` and `b`, computed with the given instruction set.
    fn dot = dot_simd(a: &[f32], b: &[f32]) -> f32
}

/// Computes the weighted sum of the rows of the matrix `sum.x` with the indices `sum.row_indices`,
/// and writes it to the row `y`. `terms` are the indices of the sum's terms. Overwrites `y` with
/// the result or adds the result to `y`, as `sum.write` states.
#[inline(always)]
fn sum_selected_rows_simd<S: Simd>(s: S, y: &mut [f32], terms: std::ops::Range<usize>, sum: WeightedRowSum) {
    with_elements!(sum.x, x => sum_selected_elements(s, y, x, terms, sum));
}

/// Computes the weighted sum of the rows of the matrix `x` with the indices `sum.row_indices`, and
/// writes it to the row `y`. `terms` are the indices of the sum's terms, which are added in this
/// order. Overwrites `y` or adds to it, as `sum.write` states. `x` is `sum.x` with elements of type
/// `E`.
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

/// Returns the dot product of `a` and `b`, summed in 16 lanes in an order that is equal on every
/// instruction set.
#[inline(always)]
fn dot_simd<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut total = s.splat(0.0);
    for i in (0..a.len()).step_by(LANES) {
        total = s.fma(load_lanes(s, a, i), load_lanes(s, b, i), total);
    }
    s.sum(total)
}
