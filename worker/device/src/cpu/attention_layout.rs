//! [`AttentionLayout`]: sizes and strides of the matrices of attention on the CPU, and functions
//! that copy heads, scale scores and find visible keys.
use super::attention_dropout::KEY_TILE;
use super::backend::Cpu;
use super::elements::{Element, InputElements, bf16_to_f32, f32_to_bf16, with_elements};
use super::scratch_product::ProductMethod;
use super::simd::{LANES, Simd, load_array, store_array, store_lanes, tanh};
use super::sum_rule::SumRule;
use crate::ops::AttentionShape;
use std::ops::Range;

/// Number of queries in a tile, the block of queries that attention on the CPU processes at a time.
pub(crate) const QUERY_TILE: usize = 64;
/// Number of elements that scratch matrices need after their last row, because a matmul always
/// reads a fixed number of rows.
pub(crate) const READ_SLACK: usize = 16;
/// Maximum number of rows of a matmul's result that are computed in registers at a time, over all
/// instruction sets.
pub(crate) const MAX_TILE_ROWS: usize = 8;

/// The shape of an attention op, and sizes that follow from it, such as the padded head dimension.
#[derive(Clone, Copy)]
pub(crate) struct AttentionLayout {
    /// The shape and options of the attention.
    pub(crate) shape: AttentionShape,
    /// Number of elements in a row of qkv.
    pub(crate) stride: usize,
    /// Number of query heads that share a key head.
    pub(crate) group: usize,
    /// `head_dim`, rounded up to a multiple of the vector length.
    pub(crate) padded: usize,
    /// How products of scratch matrices are computed.
    pub(crate) products: ProductMethod,
}

impl AttentionLayout {
    /// Checks the lengths of an attention op's arguments, and computes sizes such as row strides
    /// and the padded head dimension. Panics if the shape or an argument is invalid. `lens` are the
    /// lengths of the output, of the log-sum-exps and of qkv, `rule` is the rule of the products,
    /// and `op` is the op's name in panics.
    pub(crate) fn new(
        cpu: &Cpu,
        op: &str,
        [o, lse, qkv]: [usize; 3],
        rule: SumRule,
        starts: &[u32],
        shape: AttentionShape,
    ) -> Self {
        shape.check_arguments(op, o, lse, qkv, starts);
        let AttentionShape { t, heads, kv_heads, head_dim, .. } = shape;
        for (i, &start) in starts.iter().enumerate() {
            assert!(start as usize <= i % t, "{op}: the start {start} of token {} is after the token", i % t);
        }
        AttentionLayout {
            shape,
            stride: (heads + 2 * kv_heads) * head_dim,
            group: heads / kv_heads,
            padded: head_dim.next_multiple_of(LANES),
            products: ProductMethod { instruction_set: cpu.instruction_set, rule },
        }
    }

    /// Returns the scale of the attention scores as two factors: one for an operand (such as the
    /// queries) before the matmul, and one for the computed scores. The operands of products that
    /// are summed as products of bf16 numbers are bf16 numbers, so the scores are multiplied.
    pub(crate) fn split_scale(&self) -> (f32, f32) {
        match self.products.rule {
            SumRule::OneChain => (self.shape.scale, 1.0),
            SumRule::Bf16Blocks => (1.0, self.shape.scale),
        }
    }

    /// Returns the number of blocks of [`KEY_TILE`] keys in a sequence.
    pub(crate) fn key_tile_count(&self) -> usize {
        self.shape.t.div_ceil(KEY_TILE)
    }

    /// Returns the column at which query head `h` begins in a row of qkv.
    pub(crate) fn query_column(&self, h: usize) -> usize {
        h * self.shape.head_dim
    }

    /// Returns the column at which key head `h` begins in a row of qkv.
    pub(crate) fn key_column(&self, h: usize) -> usize {
        (self.shape.heads + h) * self.shape.head_dim
    }

    /// Returns the column at which value head `h` begins in a row of qkv.
    pub(crate) fn value_column(&self, h: usize) -> usize {
        (self.shape.heads + self.shape.kv_heads + h) * self.shape.head_dim
    }
}

/// Consecutive rows of one attention head, stored in some columns of a wider matrix such as qkv.
#[derive(Clone, Copy)]
pub(crate) struct HeadSlice<'a> {
    /// The elements of the whole matrix.
    pub(crate) data: InputElements<'a>,
    /// Index of the matrix row at which this slice begins.
    pub(crate) first: usize,
    /// Number of rows.
    pub(crate) count: usize,
    /// Number of elements from one row of the matrix to the next.
    pub(crate) stride: usize,
    /// First column of the head.
    pub(crate) column: usize,
    /// Number of elements of the head in each row.
    pub(crate) width: usize,
}

impl<'a> HeadSlice<'a> {
    /// Returns the head's elements in row `i` of the slice.
    #[inline(always)]
    fn row(&self, i: usize) -> InputElements<'a> {
        let first = (self.first + i) * self.stride + self.column;
        self.data.slice(first..first + self.width)
    }
}

/// Copies the rows of a head, multiplied by a factor: `dst[i·padded + j] = rows[i][j]·factor`.
/// Elements past the width, and rows past the last row up to `height`, become 0.
#[inline(always)]
pub(crate) fn copy_scaled_rows<S: Simd>(
    s: S,
    dst: &mut [f32],
    rows: HeadSlice,
    padded: usize,
    height: usize,
    factor: f32,
) {
    let factor = s.splat(factor);
    for i in 0..rows.count {
        let dst = &mut dst[i * padded..][..padded];
        with_elements!(rows.row(i), row => write_scaled_row(s, dst, row, factor));
    }
    dst[rows.count * padded..height * padded].fill(0.0);
}

/// Writes one row of a head, multiplied by `factor`, to `dst` as `f32`.
#[inline(always)]
fn write_scaled_row<S: Simd, E: Element>(s: S, dst: &mut [f32], row: &[E], factor: S::V) {
    for j in (0..row.len()).step_by(LANES) {
        store_lanes(s, dst, j, s.mul(E::load_lanes(s, row, j), factor));
    }
}

/// Transposes the rows of a head: `dst[j·KEY_TILE + i] = rows[i][j]`. Columns past the last row
/// become 0.
#[inline(always)]
pub(crate) fn transpose_rows<S: Simd>(s: S, dst: &mut [f32], rows: HeadSlice) {
    assert!(rows.count <= KEY_TILE && dst.len() >= rows.width * KEY_TILE);
    let (whole, deep) = (rows.count / 8 * 8, rows.width / 8 * 8);
    for i in (0..whole).step_by(8) {
        let first = (rows.first + i) * rows.stride + rows.column;
        let from = rows.data.slice(first..first + 7 * rows.stride + rows.width);
        with_elements!(from, from => transpose_strip(s, &mut dst[i..], from, rows.stride, deep));
    }
    for j in 0..rows.width {
        let line = &mut dst[j * KEY_TILE..][..KEY_TILE];
        let start = if j < deep { whole } else { 0 };
        for (i, x) in line.iter_mut().enumerate().skip(start) {
            *x = if i < rows.count { rows.row(i).get(j) } else { 0.0 };
        }
    }
}

/// Transposes 8 rows and `deep` columns of a matrix: `dst[j·KEY_TILE + i] = from[i·stride + j]` for
/// i in 0..8 and j in 0..deep. `deep` must be a multiple of 8.
#[inline(always)]
fn transpose_strip<S: Simd, E: Element>(s: S, dst: &mut [f32], from: &[E], stride: usize, deep: usize) {
    for j in (0..deep).step_by(8) {
        let (from, dst) = (&from[j..7 * stride + j + 8], &mut dst[j * KEY_TILE..][..7 * KEY_TILE + 8]);
        // SAFETY: `from` and `dst` have 8 rows of 8 elements.
        unsafe { E::transpose8(s, from.as_ptr(), stride, dst.as_mut_ptr(), KEY_TILE) };
    }
}

/// Returns the indices of the keys to which the query at position `q` attends, in the block of keys
/// that begins at position `k0`. `start` is the first position to which the query attends.
#[inline(always)]
pub(crate) fn find_visible_keys(q: usize, start: u32, k0: usize) -> Range<usize> {
    let end = (q + 1).clamp(k0, k0 + KEY_TILE) - k0;
    (start as usize).clamp(k0, k0 + end) - k0..end
}

/// Applies the softcap to attention scores in place: a score `s` becomes `cap·tanh(s / cap)`.
#[inline(always)]
pub(crate) fn softcap_scores<S: Simd>(s: S, scores: &mut [f32], cap: f32) {
    let (cap, inverse) = (s.splat(cap), s.splat(1.0 / cap));
    for v in scores.as_chunks_mut().0 {
        let capped = s.mul(cap, tanh(s, s.mul(load_array(s, v), inverse)));
        store_array(s, v, capped);
    }
}

/// Multiplies elements, such as a row of attention scores, by a factor in place.
#[inline(always)]
pub(crate) fn scale_in_place<S: Simd>(s: S, x: &mut [f32], factor: f32) {
    let factor = s.splat(factor);
    for v in x.as_chunks_mut().0 {
        store_array(s, v, s.mul(load_array(s, v), factor));
    }
}

/// Rounds elements to the nearest bf16 numbers, ties to even, in place.
#[inline(always)]
pub(crate) fn round_to_bf16_in_place(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = bf16_to_f32(f32_to_bf16(*x)));
}
