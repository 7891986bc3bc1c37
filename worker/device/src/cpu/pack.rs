//! Copies of matrix operands in the order in which the micro tile reads them.
//!
//! A packed panel holds `width` rows (of the left operand) or columns (of the right one): `panel[p·width + i]`.
use super::simd::{Simd, multiversion};

/// An operand of a product, element (i, p) at `data[i·row + p·depth]`; i counts rows of the left or columns of the right
/// operand, p the summation. One of the strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row: usize,
    pub(crate) depth: usize,
}

/// What one packing call copies: rows `i0..i0+rows`, depth `p0..p0+k`, into panels of `width`.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) i0: usize,
    pub(crate) rows: usize,
    pub(crate) p0: usize,
    pub(crate) k: usize,
    pub(crate) width: usize,
}

impl Block {
    /// Elements of the packed panels, with the surplus that a strip of 8 may write beyond a narrower panel.
    pub(crate) fn packed_len(&self) -> usize {
        let surplus = if self.width.is_multiple_of(8) { 0 } else { 8 };
        self.rows.next_multiple_of(self.width) * self.k + surplus
    }
}

multiversion! {
    /// Packs panel after panel; rows missing from the last one are 0. `dst` has [`Block::packed_len`] elements at least.
    pub(crate) fn pack = pack_block(dst: &mut [f32], src: Operand, block: Block)
}

#[inline(always)]
fn pack_block<S: Simd>(s: S, dst: &mut [f32], src: Operand, block: Block) {
    assert!(dst.len() >= block.packed_len(), "packed panels don't fit");
    let panels = block.rows.div_ceil(block.width);
    if src.row == 1 {
        // Depth outermost: the source is then read row after row.
        for p in 0..block.k {
            for panel in 0..panels {
                copy_lanes(dst, src, block, panel, p);
            }
        }
    } else {
        for panel in 0..panels {
            transpose_panel(s, dst, src, block, panel);
        }
    }
}

/// Depth `p` of a panel whose source is contiguous along the rows.
#[inline(always)]
fn copy_lanes(dst: &mut [f32], src: Operand, block: Block, panel: usize, p: usize) {
    let first = panel * block.width;
    let rows = block.width.min(block.rows - first);
    let to = (first * block.k) + p * block.width;
    let from = &src.data[block.i0 + first + (block.p0 + p) * src.depth..];
    let dst = &mut dst[to..to + block.width];
    if rows == block.width {
        // Chunks of a fixed size become vector moves.
        if block.width.is_multiple_of(8) {
            dst.chunks_exact_mut(8).zip(from.chunks_exact(8)).for_each(|(d, f)| d.copy_from_slice(f));
        } else {
            dst.chunks_exact_mut(2).zip(from.chunks_exact(2)).for_each(|(d, f)| d.copy_from_slice(f));
        }
    } else {
        dst[..rows].copy_from_slice(&from[..rows]);
        dst[rows..].fill(0.0);
    }
}

/// A panel whose source is contiguous along the depth: blocks of 8×8, and the rest one by one.
#[inline(always)]
fn transpose_panel<S: Simd>(s: S, dst: &mut [f32], src: Operand, block: Block, panel: usize) {
    let first = panel * block.width;
    let rows = block.width.min(block.rows - first);
    let dst = &mut dst[first * block.k..];
    let from = &src.data[(block.i0 + first) * src.row + block.p0..];
    let whole = if rows == block.width { block.width.div_ceil(8) } else { rows / 8 };
    // With a width below 8 the strip's surplus rows belong to the next panel; they must exist to be read.
    let readable = |strip: usize| (strip * 8 + 7) * src.row + block.k <= from.len();
    let strips = (0..whole).take_while(|&i| readable(i)).count();
    let deep = block.k / 8 * 8;
    for strip in 0..strips {
        for p in (0..deep).step_by(8) {
            // SAFETY: 8 rows × 8 of the depth are readable (`readable`); `packed_len` leaves room for 8 lanes.
            unsafe {
                let from = from.as_ptr().add(strip * 8 * src.row + p);
                let to = dst.as_mut_ptr().add(p * block.width + strip * 8);
                s.transpose8(from, src.row, to, block.width);
            }
        }
    }
    let done = (strips * 8).min(block.width);
    for p in 0..block.k {
        let lanes = &mut dst[p * block.width..(p + 1) * block.width];
        let start = if p < deep { done } else { 0 };
        for (i, lane) in lanes.iter_mut().enumerate().skip(start) {
            *lane = if i < rows { from[i * src.row + p] } else { 0.0 };
        }
    }
}
