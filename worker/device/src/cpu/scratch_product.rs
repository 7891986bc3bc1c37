//! [`ScratchProduct`]: multiplies pairs of small `f32` matrices in temporary memory, such as the
//! tiles of queries and keys in attention.
use super::instruction_set::{InstructionSet, multiversion};
use super::micro_kernel::{multiply_small_matrices, prepare_thread};
use super::simd::{LANES, MicroTile, Simd};
use super::sum_rule::SumRule;
use std::ops::Range;

/// How an op multiplies matrices: the instruction set, and the prescribed order of the additions.
#[derive(Clone, Copy)]
pub(crate) struct ProductMethod {
    /// The instruction set.
    pub(crate) instruction_set: InstructionSet,
    /// The order of the terms. With [`SumRule::Bf16Blocks`], all operands are bf16 numbers, stored
    /// as `f32`.
    pub(crate) rule: SumRule,
}

/// Which part of a matrix product must be computed in causal attention, where a query attends only
/// to keys up to the query's position. Each variant contains the position of the first query,
/// relative to that of the first key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CausalBound {
    /// Rows are queries, and columns are keys. Columns after the last key of a row need not be
    /// computed.
    Columns(usize),
    /// Rows are queries, and terms are keys. Terms after the last key of a row are zero.
    LastTerm(usize),
    /// Rows are keys, and terms are queries. Terms before the first query that attends to the key
    /// of a row are zero.
    FirstTerm(usize),
}

/// A product of two matrices in scratch memory: `c[i·c_stride + j] (=|+=) Σ_p a[i·a_row_stride +
/// p·a_depth_stride] · b[p·b_stride + j]`, for i < `rows`, j < `columns` and p < `depth`.
///
/// Rows are computed in strips of the height of a micro tile, so `a` and `c` must have space for
/// the last strip.
pub(crate) struct ScratchProduct<'a> {
    /// The left operand.
    pub(crate) a: &'a [f32],
    /// Number of elements from one row of `a` to the next.
    pub(crate) a_row_stride: usize,
    /// Number of elements from one term of a row of `a` to the next.
    pub(crate) a_depth_stride: usize,
    /// The right operand.
    pub(crate) b: &'a [f32],
    /// Number of elements from one term of a column of `b` to the next.
    pub(crate) b_stride: usize,
    /// The result.
    pub(crate) c: &'a mut [f32],
    /// Number of elements from one row of `c` to the next.
    pub(crate) c_stride: usize,
    /// Number of rows of the result.
    pub(crate) rows: usize,
    /// Number of columns of the result; a multiple of [`LANES`].
    pub(crate) columns: usize,
    /// Number of terms of each sum.
    pub(crate) depth: usize,
    /// True if the product is added to `c`, false if it overwrites `c`.
    pub(crate) accumulate: bool,
    /// Which part of the product is needed.
    pub(crate) bound: CausalBound,
}

impl ScratchProduct<'_> {
    /// Panics if an operand or the result is too short, given that rows are computed in groups of
    /// `strip_rows`.
    fn assert_fits(&self, strip_rows: usize) {
        let last_row = self.rows.next_multiple_of(strip_rows).saturating_sub(1);
        let last_term = self.depth.saturating_sub(1);
        let fits = self.columns.is_multiple_of(LANES)
            && last_row * self.a_row_stride + last_term * self.a_depth_stride < self.a.len()
            && last_term * self.b_stride + self.columns <= self.b.len()
            && last_row * self.c_stride + self.columns <= self.c.len();
        assert!(fits, "an operand of a product in scratch memory is too short");
    }

    /// Returns the number of columns and the range of terms that must be computed in the rows from
    /// `first` to `last` of a product in causal attention.
    #[inline(always)]
    fn find_needed_part(&self, rule: SumRule, first: usize, last: usize) -> (usize, Range<usize>) {
        let (columns, depth) = (self.columns, self.depth);
        match self.bound {
            CausalBound::Columns(offset) => {
                ((last + offset + 1).next_multiple_of(LANES).min(columns), 0..depth)
            }
            CausalBound::LastTerm(offset) => (columns, 0..(last + offset + 1).min(depth)),
            CausalBound::FirstTerm(offset) => {
                let start = first.saturating_sub(offset).min(depth);
                // A chain over the even or the odd terms begins at an even term.
                (columns, if rule == SumRule::Bf16Blocks { start & !1 } else { start }..depth)
            }
        }
    }
}

impl ProductMethod {
    /// Computes a product of two matrices in scratch memory.
    pub(crate) fn multiply(self, product: ScratchProduct) {
        multiply_in_scratch(self.instruction_set, self.rule, product);
    }
}

multiversion! {
    /// Computes a product of two matrices in scratch memory with the given instruction set.
    fn multiply_in_scratch = multiply_strips(rule: SumRule, product: ScratchProduct)
}

/// Computes a product of two matrices in temporary memory, in groups of as many rows as the
/// micro-kernel computes in registers.
#[inline(always)]
fn multiply_strips<S: Simd>(s: S, rule: SumRule, product: ScratchProduct) {
    let rows = product.rows;
    product.assert_fits(S::TILE_ROWS);
    let _mode = prepare_thread(s, rule);
    for i in (0..rows).step_by(S::TILE_ROWS) {
        let last = (i + S::TILE_ROWS).min(rows) - 1;
        let (columns, terms) = product.find_needed_part(rule, i, last);
        if terms.is_empty() && product.accumulate {
            continue;
        }
        let tile = MicroTile {
            rule,
            depth_start: terms.start,
            depth: terms.len(),
            a: product.a[i * product.a_row_stride + terms.start * product.a_depth_stride..].as_ptr(),
            a_row_stride: product.a_row_stride,
            a_depth_stride: product.a_depth_stride,
            b: product.b[terms.start * product.b_stride..].as_ptr(),
            b_row_stride: product.b_stride,
            c: product.c[i * product.c_stride..].as_mut_ptr(),
            c_row_stride: product.c_stride,
            accumulate: product.accumulate,
        };
        // SAFETY: `assert_fits` has checked that the operands and the result have the rows of the
        // last strip; the needed part is within the columns and the depth.
        unsafe { multiply_small_matrices(s, S::TILE_ROWS, columns / LANES, tile) };
    }
}
