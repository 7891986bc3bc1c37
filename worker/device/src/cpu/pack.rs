//! Copies of matrix operands in the order in which the micro tile reads them.
//!
//! A packed panel holds `width` rows (of the left operand) or columns (of the right one): `panel[p·width + i]`.
use super::half::{Element, In, with_elements};
use super::simd::{LANES, Simd, multiversion};
use std::ops::Range;

/// An operand of a product, element (i, p) at `data[i·row + p·depth]`; i counts rows of the left or columns of the right
/// operand, p the summation. One of the strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) data: In<'a>,
    pub(crate) row: usize,
    pub(crate) depth: usize,
}

impl<'a> Operand<'a> {
    /// The same from row (or column) `i` on.
    pub(crate) fn from(self, i: usize) -> Operand<'a> {
        Operand { data: self.data.slice(i * self.row..self.data.len()), ..self }
    }
}

/// An operand whose elements' type is known.
#[derive(Clone, Copy)]
struct Source<'a, E> {
    data: &'a [E],
    row: usize,
    depth: usize,
}

/// What one packing call copies: rows `i0..i0+rows` over a part of the depth, into panels of `width`.
#[derive(Clone)]
pub(crate) struct Block {
    pub(crate) i0: usize,
    pub(crate) rows: usize,
    pub(crate) depth: Range<usize>,
    pub(crate) width: usize,
}

impl Block {
    /// Elements of the packed panels, with the surplus that a strip of 8 may write beyond a narrower panel.
    pub(crate) fn packed_len(&self) -> usize {
        let surplus = if self.width.is_multiple_of(8) { 0 } else { 8 };
        self.rows.next_multiple_of(self.width) * self.depth.len() + surplus
    }
}

multiversion! {
    /// Packs panel after panel; rows missing from the last one are 0. `dst` has [`Block::packed_len`] elements at least.
    pub(crate) fn pack = pack_block(dst: &mut [f32], src: Operand, block: Block)
}

#[inline(always)]
fn pack_block<S: Simd>(s: S, dst: &mut [f32], src: Operand, block: Block) {
    assert!(dst.len() >= block.packed_len(), "packed panels don't fit");
    let Operand { data, row, depth } = src;
    with_elements!(data, data => pack_elements(s, dst, Source { data, row, depth }, block));
}

#[inline(always)]
fn pack_elements<S: Simd, E: Element>(s: S, dst: &mut [f32], src: Source<E>, block: Block) {
    let panels = block.rows.div_ceil(block.width);
    if src.row == 1 {
        let group = (LINES / block.width).max(1);
        for first in (0..panels).step_by(group) {
            copy_panels(s, dst, src, &block, first..(first + group).min(panels));
        }
    } else {
        for panel in 0..panels {
            transpose_panel(s, dst, src, &block, panel);
        }
    }
}

/// Lanes of neighbouring panels that are copied together: whole cache lines of the source, few streams to write.
const LINES: usize = 32;

/// Rows of the source that are asked for in advance.
const AHEAD: usize = 12;

/// Panels whose source is contiguous along the rows.
#[inline(always)]
fn copy_panels<S: Simd, E: Element>(
    s: S,
    dst: &mut [f32],
    src: Source<E>,
    block: &Block,
    panels: Range<usize>,
) {
    let (width, k) = (block.width, block.depth.len());
    let first = panels.start * width;
    let rows = (panels.len() * width).min(block.rows - first);
    let whole = rows / width;
    let dst = &mut dst[first * k..];
    for p in 0..k {
        let at = block.i0 + first + (block.depth.start + p) * src.depth;
        let from = &src.data[at..][..rows];
        // The rows lie too far apart for the machine to guess the next; a hint needs no valid address.
        for line in (0..rows).step_by(LANES) {
            s.prefetch(src.data.as_ptr().wrapping_add(at + AHEAD * src.depth + line).cast());
        }
        for panel in 0..whole {
            let from = &from[panel * width..][..width];
            let to = &mut dst[(panel * k + p) * width..][..width];
            // Chunks of a fixed size become vector moves.
            if width.is_multiple_of(8) {
                copy_chunks::<E, 8>(to, from);
            } else {
                copy_chunks::<E, 2>(to, from);
            }
        }
        if whole < panels.len() {
            let to = &mut dst[(whole * k + p) * width..][..width];
            let rest = &from[whole * width..];
            widen(&mut to[..rest.len()], rest);
            to[rest.len()..].fill(0.0);
        }
    }
}

#[inline(always)]
fn copy_chunks<E: Element, const N: usize>(to: &mut [f32], from: &[E]) {
    for (to, from) in to.as_chunks_mut::<N>().0.iter_mut().zip(from.as_chunks::<N>().0) {
        *to = from.map(E::wide);
    }
}

#[inline(always)]
fn widen<E: Element>(to: &mut [f32], from: &[E]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = x.wide());
}

/// A panel whose source is contiguous along the depth: blocks of 8×8, and the rest one by one.
#[inline(always)]
fn transpose_panel<S: Simd, E: Element>(s: S, dst: &mut [f32], src: Source<E>, block: &Block, panel: usize) {
    let first = panel * block.width;
    let rows = block.width.min(block.rows - first);
    let k = block.depth.len();
    let dst = &mut dst[first * k..];
    let from = &src.data[(block.i0 + first) * src.row + block.depth.start..];
    let whole = if rows == block.width { block.width.div_ceil(8) } else { rows / 8 };
    // With a width below 8 the strip's surplus rows belong to the next panel; they must exist to be read.
    let readable = |strip: usize| (strip * 8 + 7) * src.row + k <= from.len();
    let strips = (0..whole).take_while(|&i| readable(i)).count();
    let deep = k / 8 * 8;
    for strip in 0..strips {
        for p in (0..deep).step_by(8) {
            // SAFETY: 8 rows × 8 of the depth are readable (`readable`); `packed_len` leaves room for 8 lanes.
            unsafe {
                let from = from.as_ptr().add(strip * 8 * src.row + p);
                let to = dst.as_mut_ptr().add(p * block.width + strip * 8);
                E::transpose8(s, from, src.row, to, block.width);
            }
        }
    }
    let done = (strips * 8).min(block.width);
    for p in 0..k {
        let lanes = &mut dst[p * block.width..(p + 1) * block.width];
        let start = if p < deep { done } else { 0 };
        for (i, lane) in lanes.iter_mut().enumerate().skip(start) {
            *lane = if i < rows { from[i * src.row + p].wide() } else { 0.0 };
        }
    }
}
