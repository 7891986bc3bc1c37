//! [`Operand`]: a matrix that a matmul reads, and the format of its packed panels.
use super::bf16_rule::BF16_BLOCK;
use super::elements::InputElements;
use std::ops::Range;

/// An operand of a matmul. Element `p` of row `i` (left operand) or column `i` (right operand) is
/// at `data[i·row_stride + p·depth_stride]`, and `p` counts the terms of the sums. One of the
/// strides must be 1.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    /// The elements of the operand, of any type.
    pub(crate) data: InputElements<'a>,
    /// Number of elements between rows (left operand) or columns (right operand).
    pub(crate) row_stride: usize,
    /// Number of elements from one term of the sum to the next.
    pub(crate) depth_stride: usize,
    /// True if `f32` elements are rounded to bf16 when they are packed.
    pub(crate) rounds_to_bf16: bool,
}

impl<'a> Operand<'a> {
    /// Creates an operand whose rows are `stride` elements apart, and contiguous along the summed
    /// dimension.
    pub(crate) fn from_rows(data: impl Into<InputElements<'a>>, stride: usize) -> Operand<'a> {
        Operand { data: data.into(), row_stride: stride, depth_stride: 1, rounds_to_bf16: false }
    }

    /// Creates an operand that is stored transposed: one row of `stride` elements for each term of
    /// the sums.
    pub(crate) fn from_transposed(data: impl Into<InputElements<'a>>, stride: usize) -> Operand<'a> {
        Operand { data: data.into(), row_stride: 1, depth_stride: stride, rounds_to_bf16: false }
    }

    /// Returns the operand without its first `i` rows (left operand) or columns (right operand).
    pub(crate) fn skip_rows(self, i: usize) -> Operand<'a> {
        Operand { data: self.data.slice(i * self.row_stride..self.data.len()), ..self }
    }
}

/// How a packed operand is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PanelElements {
    /// `f32` elements, for kernels with vectors.
    F32,
    /// Tiles of bf16 elements of a left operand, for AMX ([`super::amx_packing`]).
    LeftTiles,
    /// Tiles of bf16 elements of a right operand, for AMX.
    RightTiles,
}

/// The format of packed panels: how many rows or columns a panel has, and how they are stored.
#[derive(Clone, Copy)]
pub(crate) struct PanelFormat {
    /// Number of rows of the left operand, or columns of the right operand, in a panel.
    pub(crate) width: usize,
    /// How the elements are stored.
    pub(crate) elements: PanelElements,
}

impl PanelFormat {
    /// Returns the number of `f32` elements that whole panels of `rows` rows or columns and `depth`
    /// terms take.
    pub(crate) fn count_floats(self, rows: usize, depth: usize) -> usize {
        match self.elements {
            PanelElements::F32 => rows * depth,
            // Two bf16 elements take the memory of one f32.
            PanelElements::LeftTiles | PanelElements::RightTiles => {
                rows * depth.next_multiple_of(BF16_BLOCK) / 2
            }
        }
    }
}

/// The block of a matmul operand that one call packs: its first element, and its numbers of rows
/// and terms.
#[derive(Clone)]
pub(crate) struct PackBlock {
    /// Index of the first row (left operand) or column (right operand).
    pub(crate) first_row: usize,
    /// Number of rows (left operand) or columns (right operand).
    pub(crate) rows: usize,
    /// Range of the summed dimension (depth) that is packed.
    pub(crate) depth: Range<usize>,
    /// Format of the panels.
    pub(crate) format: PanelFormat,
}

impl PackBlock {
    /// Returns the number of `f32` elements that the packed block takes. This includes the surplus
    /// that a transposed strip of 8 rows writes past a narrower panel.
    pub(crate) fn packed_len(&self) -> usize {
        let surplus = if self.format.width.is_multiple_of(8) { 0 } else { 8 };
        self.format.count_floats(self.rows.next_multiple_of(self.format.width), self.depth.len()) + surplus
    }
}
