//! Reads and writes blocks of the result of a matmul with AMX ([`ResultMatrix`]).
use super::tiles::BLOCK_COLUMNS;
use crate::cpu::elements::{OutputSlices, round_slice, widen_slice};
use crate::cpu::x86::Avx512;
use std::ops::Range;

/// The result matrix of a matmul in memory, of which parallel tasks write different blocks.
/// Elements are `f32` or 16 bits.
#[derive(Clone, Copy)]
pub(super) struct ResultMatrix<'a> {
    /// The memory of the elements.
    pub(super) elements: &'a OutputSlices<'a>,
    /// Index of the first element of the first row.
    pub(super) first: usize,
    /// Number of elements from one row to the next.
    pub(super) ldc: usize,
    /// The number that is added to each element of a column before it is rounded.
    pub(super) bias: Option<&'a [f32]>,
}

/// Returns the index, in a block stored as 16 × 16 tiles, of the first element of row `row` in the
/// left (`half` 0) or right (`half` 1) tile.
fn find_row_in_block(row: usize, half: usize) -> usize {
    (row / 16 * 2 + half) * 256 + row % 16 * 16
}

impl ResultMatrix<'_> {
    /// Returns the range of indices, in the memory of the result matrix, of the elements in row
    /// `row` and columns `columns`.
    fn element_range(&self, row: usize, columns: &Range<usize>) -> Range<usize> {
        let start = self.first + row * self.ldc;
        start + columns.start..start + columns.end
    }

    /// Loads the elements in `rows` and `columns` of the result into the block `block` (tiles of
    /// `f32`), starting at row `block_row` of the block. Columns that the part lacks become 0.
    ///
    /// # Safety
    ///
    /// The caller must ensure that no other thread uses this part of the result, and that this
    /// machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) unsafe fn read_block(
        &self,
        block: &mut [f32],
        block_row: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) {
        // SAFETY: guaranteed by the caller.
        let s = unsafe { Avx512::assume_supported() };
        for (row, block_row) in rows.zip(block_row..) {
            let range = self.element_range(row, &columns);
            let mut wide = [0.0; BLOCK_COLUMNS];
            let part = &mut wide[..range.len()];
            // SAFETY: guaranteed by the caller.
            unsafe {
                match self.elements {
                    OutputSlices::F32(x, _) => part.copy_from_slice(x.slice_mut(range)),
                    OutputSlices::Half(format, x, _) => widen_slice(s, *format, part, x.slice_mut(range)),
                }
            }
            for half in 0..2 {
                block[find_row_in_block(block_row, half)..][..16].copy_from_slice(&wide[half * 16..][..16]);
            }
        }
    }

    /// Writes rows of the block `block` (tiles of `f32`), starting at row `block_row` of the block,
    /// to `rows` and `columns` of the result. Adds the bias, and rounds each element once.
    ///
    /// # Safety
    ///
    /// The caller must ensure that no other thread uses this part of the result, and that this
    /// machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) unsafe fn write_block(
        &self,
        block: &[f32],
        block_row: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) {
        // SAFETY: guaranteed by the caller.
        let s = unsafe { Avx512::assume_supported() };
        for (row, block_row) in rows.zip(block_row..) {
            let range = self.element_range(row, &columns);
            let mut wide = [0.0; BLOCK_COLUMNS];
            for half in 0..2 {
                wide[half * 16..][..16].copy_from_slice(&block[find_row_in_block(block_row, half)..][..16]);
            }
            if let Some(bias) = self.bias {
                wide.iter_mut().zip(&bias[columns.clone()]).for_each(|(x, bias)| *x += bias);
            }
            let part = &wide[..range.len()];
            // SAFETY: guaranteed by the caller.
            unsafe {
                match self.elements {
                    OutputSlices::F32(x, _) => x.slice_mut(range).copy_from_slice(part),
                    OutputSlices::Half(format, x, _) => round_slice(s, *format, x.slice_mut(range), part),
                }
            }
        }
    }
}
