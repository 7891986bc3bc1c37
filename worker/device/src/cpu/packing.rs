//! Packing: copies operands of a matmul in the order in which the micro-kernel reads them.
//!
//! A packed panel has `panel_width` rows of the left operand, or columns of the right operand.
//! Element `i` of the panel at depth `p` is at `panel[p·panel_width + i]`.
use super::amx_packing::pack_tile_block;
use super::elements::{Element, InputElements, bf16_to_f32, f32_to_bf16, with_elements};
use super::instruction_set::InstructionSet;
use super::instruction_set::multiversion;
use super::operand::{Operand, PackBlock, PanelElements};
use super::simd::{LANES, Simd};
use std::ops::Range;

/// An [`Operand`] with elements of type `E`.
#[derive(Clone, Copy)]
struct TypedOperand<'a, E> {
    data: &'a [E],
    row: usize,
    depth: usize,
}

/// An `f32` element that is rounded to bf16 when it is read.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct RoundedToBf16(f32);

impl Element for RoundedToBf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16_to_f32(f32_to_bf16(self.0))
    }
}

/// Copies a block of the matmul operand `src` into `dst` in the micro-kernel's order, one panel
/// after another. Missing rows of the last panel become 0. `dst` has at least
/// [`PackBlock::packed_len`] elements.
pub(crate) fn pack(instruction_set: InstructionSet, dst: &mut [f32], src: Operand, block: PackBlock) {
    match block.format.elements {
        PanelElements::F32 => pack_floats(instruction_set, dst, src, block),
        PanelElements::LeftTiles | PanelElements::RightTiles => {
            pack_tiles(instruction_set, bytemuck::cast_slice_mut(dst), src, block);
        }
    }
}

multiversion! {
    fn pack_floats = pack_block(dst: &mut [f32], src: Operand, block: PackBlock)
}
multiversion! {
    fn pack_tiles = pack_tile_block(dst: &mut [u16], src: Operand, block: PackBlock)
}

/// Copies a block of a matmul operand, with elements of any type, into panels in the micro-kernel's
/// order.
#[inline(always)]
fn pack_block<S: Simd>(s: S, dst: &mut [f32], src: Operand, block: PackBlock) {
    assert!(dst.len() >= block.packed_len(), "the packed panels do not fit into their buffer");
    let Operand { data, row_stride: row, depth_stride: depth, rounds_to_bf16 } = src;
    if let (InputElements::F32(data), true) = (data, rounds_to_bf16) {
        let data: &[RoundedToBf16] = bytemuck::cast_slice(data);
        return pack_elements(s, dst, TypedOperand { data, row, depth }, block);
    }
    with_elements!(data, data => pack_elements(s, dst, TypedOperand { data, row, depth }, block));
}

/// Copies a block of a matmul operand, with elements of type `E`, into panels in the micro-kernel's
/// order.
#[inline(always)]
fn pack_elements<S: Simd, E: Element>(s: S, dst: &mut [f32], src: TypedOperand<E>, block: PackBlock) {
    let panels = block.rows.div_ceil(block.format.width);
    if src.row == 1 {
        let group = (ELEMENTS_PER_COPY / block.format.width).max(1);
        for first in (0..panels).step_by(group) {
            copy_panels(s, dst, src, &block, first..(first + group).min(panels));
        }
    } else {
        for panel in 0..panels {
            transpose_panel(s, dst, src, &block, panel);
        }
    }
}

/// Number of elements that are copied together when several panels are packed at the same time.
/// They are whole cache lines of the source, and belong to few panels that are written at the same
/// time.
const ELEMENTS_PER_COPY: usize = 32;

/// Number of rows by which prefetching of the source is ahead of the row that is copied.
const PREFETCH_ROWS: usize = 12;

/// Packs the panels `panels` of an operand whose row stride is 1, which means that elements of
/// neighbouring rows are adjacent in memory.
#[inline(always)]
fn copy_panels<S: Simd, E: Element>(
    s: S,
    dst: &mut [f32],
    src: TypedOperand<E>,
    block: &PackBlock,
    panels: Range<usize>,
) {
    let (width, k) = (block.format.width, block.depth.len());
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

/// Converts the elements of `from` to `f32` and writes them to `to`, in chunks of `N` elements.
#[inline(always)]
fn convert_chunks<E: Element, const N: usize>(to: &mut [f32], from: &[E]) {
    for (to, from) in to.as_chunks_mut::<N>().0.iter_mut().zip(from.as_chunks::<N>().0) {
        *to = from.map(E::to_f32);
    }
}

/// Converts the elements of `from` to `f32` and writes them to `to`, one by one.
#[inline(always)]
fn widen_elements<E: Element>(to: &mut [f32], from: &[E]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
}

/// Packs one panel of an operand whose rows are contiguous in memory, by transposing blocks of 8 ×
/// 8 elements. The remaining elements are copied one by one.
#[inline(always)]
fn transpose_panel<S: Simd, E: Element>(
    s: S,
    dst: &mut [f32],
    src: TypedOperand<E>,
    block: &PackBlock,
    panel: usize,
) {
    let first = panel * block.format.width;
    let rows = block.format.width.min(block.rows - first);
    let k = block.depth.len();
    let dst = &mut dst[first * k..];
    let from = &src.data[(block.first_row + first) * src.row + block.depth.start..];
    let whole = if rows == block.format.width { block.format.width.div_ceil(8) } else { rows / 8 };
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
                let to = dst.as_mut_ptr().add(p * block.format.width + strip * 8);
                E::transpose8(s, from, src.row, to, block.format.width);
            }
        }
    }
    let done = (strips * 8).min(block.format.width);
    for p in 0..k {
        let lanes = &mut dst[p * block.format.width..(p + 1) * block.format.width];
        let start = if p < deep { done } else { 0 };
        for (i, lane) in lanes.iter_mut().enumerate().skip(start) {
            *lane = if i < rows { from[i * src.row + p].to_f32() } else { 0.0 };
        }
    }
}
