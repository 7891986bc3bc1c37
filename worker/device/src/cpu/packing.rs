//! Copies operands of a matmul in the order in which the micro-kernel, the innermost function,
//! reads them (packing).
//!
//! A packed panel has `panel_width` rows of the left operand, or columns of the right operand.
//! Element `i` of the panel at depth `p` is at `panel[p·panel_width + i]`.
use super::elements::{Element, HalfFormat, InputElements, with_elements};
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd};
use super::sum_rule::SumRule;
use crate::ops::WriteMode;
use std::ops::Range;

/// Left or right operand of a matmul on the CPU: its elements, and the distances in elements
/// between its rows (or columns) and between its terms. Element `p` of row `i` (left operand) or
/// column `i` (right operand) is at `data[i·row_stride + p·depth_stride]`, and `p` counts the terms
/// of the sums. One of the strides must be 1.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    /// The elements of the operand, of any type.
    pub(crate) data: InputElements<'a>,
    /// Number of elements between rows (left operand) or columns (right operand).
    pub(crate) row_stride: usize,
    /// Number of elements from one term of the sum to the next.
    pub(crate) depth_stride: usize,
}

impl InputElements<'_> {
    /// Returns the order of additions for a matmul of these elements and `other`: one order if both
    /// are bf16, and another one otherwise.
    pub(crate) fn choose_sum_rule(&self, other: &InputElements) -> SumRule {
        match (self, other) {
            (InputElements::Half(HalfFormat::Bf16, _), InputElements::Half(HalfFormat::Bf16, _)) => {
                SumRule::Bf16Blocks
            }
            _ => SumRule::OneChain,
        }
    }
}

impl<'a> Operand<'a> {
    /// Creates an operand from a matrix whose rows (or, for a right operand, columns) are `stride`
    /// elements apart and contiguous along the summed dimension.
    pub(crate) fn from_rows(data: impl Into<InputElements<'a>>, stride: usize) -> Operand<'a> {
        Operand { data: data.into(), row_stride: stride, depth_stride: 1 }
    }

    /// Creates an operand from a transposed matrix, which has one contiguous row of `stride`
    /// elements for each index of the summed dimension.
    pub(crate) fn from_transposed(data: impl Into<InputElements<'a>>, stride: usize) -> Operand<'a> {
        Operand { data: data.into(), row_stride: 1, depth_stride: stride }
    }

    /// Returns the matmul operand without its first `i` rows (left operand) or columns (right
    /// operand).
    pub(crate) fn skip_rows(self, i: usize) -> Operand<'a> {
        Operand { data: self.data.slice(i * self.row_stride..self.data.len()), ..self }
    }
}

/// The shape of one matmul, and whether the result is overwritten or added to.
#[derive(Clone, Copy)]
pub(crate) struct MatmulShape {
    /// Number of rows of the result.
    pub(crate) m: usize,
    /// Number of columns of the result.
    pub(crate) n: usize,
    /// Depth: the number of terms of each sum.
    pub(crate) k: usize,
    /// Number of elements from one row of the result to the next; at least `n`.
    pub(crate) ldc: usize,
    /// Whether the matmul overwrites the output `c` or is added to its previous content.
    pub(crate) write: WriteMode,
}

/// An operand of a matmul on the CPU with the element type `E`, and the distances between its
/// elements in both dimensions.
#[derive(Clone, Copy)]
struct TypedOperand<'a, E> {
    data: &'a [E],
    row: usize,
    depth: usize,
}

/// Block of a matmul operand that is copied into packed order at a time: its first row, number of
/// rows, range along the summed dimension, and panel width.
#[derive(Clone)]
pub(crate) struct PackBlock {
    /// Index of the first row (left operand) or column (right operand).
    pub(crate) first_row: usize,
    /// Number of rows (left operand) or columns (right operand).
    pub(crate) rows: usize,
    /// Range of the summed dimension (depth) that is packed.
    pub(crate) depth: Range<usize>,
    /// Number of rows or columns in a panel.
    pub(crate) panel_width: usize,
}

impl PackBlock {
    /// Returns the number of `f32` elements that this block of a matmul operand takes when it is
    /// packed (copied for the micro-kernel). This includes the surplus that a transposed strip of 8
    /// rows writes past a narrower panel.
    pub(crate) fn packed_len(&self) -> usize {
        let surplus = if self.panel_width.is_multiple_of(8) { 0 } else { 8 };
        self.rows.next_multiple_of(self.panel_width) * self.depth.len() + surplus
    }
}

multiversion! {
    /// Copies a block of the matmul operand `src` into `dst` in the order in which the micro-kernel
    /// reads it: as panels of a few rows (or columns) each. Missing rows of the last panel become
    /// 0. `dst` has at least [`PackBlock::packed_len`] elements.
    pub(crate) fn pack = pack_block(dst: &mut [f32], src: Operand, block: PackBlock)
}

/// Copies a block of a matmul operand into panels of a few rows or columns each, with the code for
/// the operand's element type.
#[inline(always)]
fn pack_block<S: Simd>(s: S, dst: &mut [f32], src: Operand, block: PackBlock) {
    assert!(dst.len() >= block.packed_len(), "the packed panels do not fit into their buffer");
    let Operand { data, row_stride: row, depth_stride: depth } = src;
    with_elements!(data, data => pack_elements(s, dst, TypedOperand { data, row, depth }, block));
}

/// Copies a block of a matmul operand with elements of type `E` into panels of a few rows or
/// columns each, with a transposition if the operand's layout needs one.
#[inline(always)]
fn pack_elements<S: Simd, E: Element>(s: S, dst: &mut [f32], src: TypedOperand<E>, block: PackBlock) {
    let panels = block.rows.div_ceil(block.panel_width);
    if src.row == 1 {
        let group = (ELEMENTS_PER_COPY / block.panel_width).max(1);
        for first in (0..panels).step_by(group) {
            copy_panels(s, dst, src, &block, first..(first + group).min(panels));
        }
    } else {
        for panel in 0..panels {
            transpose_panel(s, dst, src, &block, panel);
        }
    }
}

/// Number of adjacent elements of an operand that are copied together into several panels (groups
/// of a few rows or columns). They are whole cache lines of the source, and belong to few panels
/// that are written at the same time.
const ELEMENTS_PER_COPY: usize = 32;

/// Distance, in rows of memory, from the row that is being copied to the row that is prefetched
/// into the cache.
const PREFETCH_ROWS: usize = 12;

/// Copies panels (groups of a few rows) of a transposed matmul operand, in which elements of
/// neighboring rows are adjacent in memory.
#[inline(always)]
fn copy_panels<S: Simd, E: Element>(
    s: S,
    dst: &mut [f32],
    src: TypedOperand<E>,
    block: &PackBlock,
    panels: Range<usize>,
) {
    let (width, k) = (block.panel_width, block.depth.len());
    let first = panels.start * width;
    let rows = (panels.len() * width).min(block.rows - first);
    let whole = rows / width;
    let dst = &mut dst[first * k..];
    for p in 0..k {
        let at = block.first_row + first + (block.depth.start + p) * src.depth;
        let from = &src.data[at..][..rows];
        // The distance between rows is too large for the hardware prefetcher. A prefetched address
        // need not be valid.
        for line in (0..rows).step_by(LANES) {
            s.prefetch(src.data.as_ptr().wrapping_add(at + PREFETCH_ROWS * src.depth + line).cast());
        }
        for panel in 0..whole {
            let from = &from[panel * width..][..width];
            let to = &mut dst[(panel * k + p) * width..][..width];
            // The compiler turns chunks of a fixed size into vector moves.
            if width.is_multiple_of(8) {
                convert_chunks::<E, 8>(to, from);
            } else {
                convert_chunks::<E, 2>(to, from);
            }
        }
        if whole < panels.len() {
            let to = &mut dst[(whole * k + p) * width..][..width];
            let rest = &from[whole * width..];
            widen_elements(&mut to[..rest.len()], rest);
            to[rest.len()..].fill(0.0);
        }
    }
}

/// Converts elements to `f32` in chunks of the constant size `N`, which the compiler turns into
/// vector instructions, and ignores an incomplete last chunk.
#[inline(always)]
fn convert_chunks<E: Element, const N: usize>(to: &mut [f32], from: &[E]) {
    for (to, from) in to.as_chunks_mut::<N>().0.iter_mut().zip(from.as_chunks::<N>().0) {
        *to = from.map(E::to_f32);
    }
}

/// Converts all elements of `from` to `f32`, and writes the results to `to`.
#[inline(always)]
fn widen_elements<E: Element>(to: &mut [f32], from: &[E]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
}

/// Copies one panel (a group of a few rows) of a matmul operand whose rows are contiguous in
/// memory, by transposing blocks of 8 × 8 elements. The remaining elements are copied one by one.
#[inline(always)]
fn transpose_panel<S: Simd, E: Element>(
    s: S,
    dst: &mut [f32],
    src: TypedOperand<E>,
    block: &PackBlock,
    panel: usize,
) {
    let first = panel * block.panel_width;
    let rows = block.panel_width.min(block.rows - first);
    let k = block.depth.len();
    let dst = &mut dst[first * k..];
    let from = &src.data[(block.first_row + first) * src.row + block.depth.start..];
    let whole = if rows == block.panel_width { block.panel_width.div_ceil(8) } else { rows / 8 };
    // If a panel is narrower than 8, a strip reads rows of the next panel, which must exist.
    let readable = |strip: usize| (strip * 8 + 7) * src.row + k <= from.len();
    let strips = (0..whole).take_while(|&i| readable(i)).count();
    let deep = k / 8 * 8;
    for strip in 0..strips {
        for p in (0..deep).step_by(8) {
            // SAFETY: `readable` checks that 8 rows of 8 elements are readable, and `packed_len`
            // includes space for 8 lanes.
            unsafe {
                let from = from.as_ptr().add(strip * 8 * src.row + p);
                let to = dst.as_mut_ptr().add(p * block.panel_width + strip * 8);
                E::transpose8(s, from, src.row, to, block.panel_width);
            }
        }
    }
    let done = (strips * 8).min(block.panel_width);
    for p in 0..k {
        let lanes = &mut dst[p * block.panel_width..(p + 1) * block.panel_width];
        let start = if p < deep { done } else { 0 };
        for (i, lane) in lanes.iter_mut().enumerate().skip(start) {
            *lane = if i < rows { from[i * src.row + p].to_f32() } else { 0.0 };
        }
    }
}
