//! Packing of bf16 matmul operands into tiles, in the layout that AMX reads.
//!
//! A panel has 32 rows of the left operand, or 32 columns of the right operand, which are two tiles
//! of 16. For each block of 32 terms, the panel has the two tiles one after the other, of 1 KiB
//! each. A tile of the left operand has one row of 32 terms for each of its rows. A tile of the
//! right operand has one row for each pair of terms, with the pairs of its 16 columns (Intel's VNNI
//! layout).
use super::bf16_rule::BF16_BLOCK;
use super::elements::{HalfFormat, InputElements, f32_to_bf16};
use super::operand::{Operand, PackBlock, PanelElements};
use super::simd::Simd;

/// Number of rows and columns of a tile of the result.
pub(crate) const TILE: usize = 16;
/// Number of rows or columns in a panel: two tiles.
pub(crate) const TILE_PANEL: usize = 2 * TILE;
/// Number of bf16 elements of a tile.
pub(crate) const TILE_ELEMENTS: usize = TILE * BF16_BLOCK;

/// 16 rows or columns and 32 terms of an operand, as pairs of terms: `[row][pair of terms]`.
type TilePairs = [[[u16; 2]; TILE]; TILE];

/// Copies a block of a matmul operand into tiles. Missing rows, columns and terms become 0. `f32`
/// elements are rounded to bf16.
#[inline(always)]
pub(crate) fn pack_tile_block<S: Simd>(_: S, dst: &mut [u16], src: Operand, block: PackBlock) {
    let blocks = block.depth.len().div_ceil(BF16_BLOCK);
    let is_left = block.format.elements == PanelElements::LeftTiles;
    let panels = dst.chunks_exact_mut(2 * blocks * TILE_ELEMENTS);
    for (panel, dst) in panels.take(block.rows.div_ceil(TILE_PANEL)).enumerate() {
        for (index, tile) in dst.chunks_exact_mut(TILE_ELEMENTS).enumerate() {
            let first = panel * TILE_PANEL + index % 2 * TILE;
            let rows = block.rows.saturating_sub(first).min(TILE);
            let depth = index / 2 * BF16_BLOCK;
            let terms = (block.depth.len() - depth).min(BF16_BLOCK);
            let pairs = read_pairs(src, block.first_row + first, rows, block.depth.start + depth, terms);
            write_tile(tile, &pairs, is_left);
        }
    }
}

/// Writes a tile of pairs of terms, transposed for a right operand.
#[inline(always)]
fn write_tile(tile: &mut [u16], pairs: &TilePairs, is_left: bool) {
    let lines = tile.as_chunks_mut::<BF16_BLOCK>().0;
    for (i, line) in lines.iter_mut().enumerate() {
        for (j, pair) in line.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *pair = if is_left { pairs[i][j] } else { pairs[j][i] };
        }
    }
}

/// Reads `rows` rows (or columns) and `terms` terms of an operand as bf16. Others are 0.
#[inline(always)]
fn read_pairs(src: Operand, first_row: usize, rows: usize, first_term: usize, terms: usize) -> TilePairs {
    let mut pairs = [[[0; 2]; TILE]; TILE];
    let start = first_row * src.row_stride + first_term * src.depth_stride;
    if rows == 0 {
        return pairs;
    }
    match src.data {
        InputElements::F32(x) => {
            fill_pairs(&mut pairs, &x[start..], src, rows, terms, f32_to_bf16);
        }
        InputElements::Half(HalfFormat::Bf16, x) => {
            fill_pairs(&mut pairs, &x[start..], src, rows, terms, |x| x)
        }
        InputElements::Half(HalfFormat::F16, _) => unreachable!("fp16 is not multiplied as bf16"),
    }
    pairs
}

/// Fills `pairs` with elements of an operand that begins with the tile's first element.
#[inline(always)]
fn fill_pairs<E: Copy>(
    pairs: &mut TilePairs,
    x: &[E],
    src: Operand,
    rows: usize,
    terms: usize,
    to_bf16: impl Fn(E) -> u16,
) {
    if src.depth_stride == 1 {
        for (i, row) in pairs.iter_mut().enumerate().take(rows) {
            let line = &x[i * src.row_stride..][..terms];
            row.as_flattened_mut().iter_mut().zip(line).for_each(|(to, x)| *to = to_bf16(*x));
        }
    } else {
        for p in 0..terms {
            let line = &x[p * src.depth_stride..][..rows];
            for (row, x) in pairs.iter_mut().zip(line) {
                row[p / 2][p % 2] = to_bf16(*x);
            }
        }
    }
}
