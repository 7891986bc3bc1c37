//! [`pack`]: copies bf16 operands of a matmul into the order in which AMX loads their tiles.
//!
//! A panel has 16 rows of the left operand, or 16 columns of the right operand. Its tiles of 32
//! terms follow one another, 1 KiB each. A row of a tile of the left operand is 32 terms of one
//! row. A row of a tile of the right operand is two terms, `2p` and `2p + 1`, of each of the 16
//! columns. Missing rows, columns and terms are 0.
use super::tiles::{TILE_BYTES, TILE_DEPTH, TILE_ROWS};
use crate::cpu::backend::Cpu;
use crate::cpu::disjoint_slices::DisjointSlices;
use crate::cpu::elements::{HalfFormat, InputElements};
use crate::cpu::instruction_set::InstructionSet;
use crate::cpu::packing::Operand;
use std::arch::x86_64::*;
use std::ops::Range;

/// An operand of a matmul whose elements are bf16. Element `p` of row `i` (left operand) or column
/// `i` (right operand) is at `data[i·row_stride + p·depth_stride]`, and one of the strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Operand<'a> {
    /// The bits of the elements.
    pub(super) data: &'a [u16],
    /// Number of elements between rows (left operand) or columns (right operand).
    pub(super) row_stride: usize,
    /// Number of elements from one term of the sum to the next.
    pub(super) depth_stride: usize,
}

impl<'a> Bf16Operand<'a> {
    /// Returns both operands of a matmul as bf16 operands if AMX can multiply them, which requires
    /// bf16 elements and the instruction set AMX.
    pub(crate) fn select(
        instruction_set: InstructionSet,
        operands: [Operand<'a>; 2],
    ) -> Option<[Bf16Operand<'a>; 2]> {
        let to_bf16 = |Operand { data, row_stride, depth_stride }| match data {
            InputElements::Half(HalfFormat::Bf16, data) => {
                Some(Bf16Operand { data, row_stride, depth_stride })
            }
            _ => None,
        };
        match (instruction_set, operands.map(to_bf16)) {
            (InstructionSet::Amx, [Some(a), Some(b)]) => Some([a, b]),
            _ => None,
        }
    }
}

/// Whether an operand is the left or the right one of a matmul, which determines the order of the
/// elements in its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// A row of a tile has 32 terms of one row.
    Left,
    /// A row of a tile has two terms of each of 16 columns.
    Right,
}

/// Number of elements in a tile of an operand.
const TILE_LEN: usize = TILE_BYTES / 2;

/// Number of panels (groups of 16 rows or columns) that are packed together, so that whole cache
/// lines of a transposed operand are read.
const PANELS_PER_GROUP: usize = 8;

/// Returns the number of elements that `rows` rows (or columns) with `depth` elements each occupy
/// in packed order, including padding to whole AMX tiles.
pub(super) fn compute_packed_len(rows: usize, depth: usize) -> usize {
    rows.next_multiple_of(TILE_ROWS) * depth.next_multiple_of(TILE_DEPTH)
}

/// Copies the elements `depth` of the rows (or columns) `rows` of an operand to `to`, in the order
/// in which AMX loads tiles, on all threads. `to` must have [`compute_packed_len`] elements and
/// begin on a cache line.
pub(super) fn pack(
    cpu: &Cpu,
    to: &mut [u16],
    operand: Bf16Operand,
    side: Side,
    rows: Range<usize>,
    depth: Range<usize>,
) {
    assert!(to.len() >= compute_packed_len(rows.len(), depth.len()), "the panels do not fit");
    let panels = rows.len().div_ceil(TILE_ROWS);
    let panel_len = TILE_ROWS * depth.len().next_multiple_of(TILE_DEPTH);
    let tasks = (cpu.pool.thread_count() * 2).min(panels.div_ceil(PANELS_PER_GROUP));
    let panels_per_task = panels.div_ceil(tasks.max(1)).next_multiple_of(PANELS_PER_GROUP);
    let to = DisjointSlices::new(to);
    cpu.pool.run(panels.div_ceil(panels_per_task), &|task| {
        let end = ((task + 1) * panels_per_task).min(panels);
        for first in (task * panels_per_task..end).step_by(PANELS_PER_GROUP) {
            let group = first..(first + PANELS_PER_GROUP).min(end);
            // SAFETY: one task packs each panel.
            let to = unsafe { to.slice_mut(group.start * panel_len..group.end * panel_len) };
            let rows =
                rows.start + group.start * TILE_ROWS..(rows.start + group.end * TILE_ROWS).min(rows.end);
            // SAFETY: AMX is only used on machines with AVX-512.
            unsafe { pack_group(to, operand, side, rows, depth.clone()) };
        }
    });
}

/// Copies several neighboring panels (groups of 16 rows or columns) of an operand to `to` in the
/// order of tiles. Panels whose rows are contiguous are packed one after another, and others
/// together.
///
/// # Safety
///
/// The caller must ensure that this machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn pack_group(
    to: &mut [u16],
    operand: Bf16Operand,
    side: Side,
    rows: Range<usize>,
    depth: Range<usize>,
) {
    let panels = rows.len().div_ceil(TILE_ROWS);
    let steps = depth.len().div_ceil(TILE_DEPTH);
    let mut pack_tile = |panel: usize, step: usize| {
        let first = rows.start + panel * TILE_ROWS;
        let source = TileSource {
            operand,
            rows: first..(first + TILE_ROWS).min(rows.end),
            depth: depth.start + step * TILE_DEPTH..(depth.start + (step + 1) * TILE_DEPTH).min(depth.end),
        };
        let to: &mut [u16] = &mut to[(panel * steps + step) * TILE_LEN..][..TILE_LEN];
        let (lines, is_transposed) = match operand.depth_stride == 1 {
            true => (source.load_rows(), side == Side::Right),
            false => (source.load_pairs(), side == Side::Left),
        };
        let lines = if is_transposed { transpose(lines) } else { lines };
        for (line, to) in lines.into_iter().zip(to.chunks_exact_mut(TILE_DEPTH)) {
            // SAFETY: `to` has 64 bytes.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), line) };
        }
    };
    match operand.depth_stride == 1 {
        true => (0..panels).for_each(|panel| (0..steps).for_each(|step| pack_tile(panel, step))),
        false => (0..steps).for_each(|step| (0..panels).for_each(|panel| pack_tile(panel, step))),
    }
}

/// The elements of an operand that form one AMX tile: at most 16 rows (or columns) with 32 elements
/// each.
struct TileSource<'a> {
    operand: Bf16Operand<'a>,
    rows: Range<usize>,
    depth: Range<usize>,
}

impl TileSource<'_> {
    /// Loads an AMX tile whose rows are contiguous in memory, so that vector `i` of the result
    /// contains row `i`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn load_rows(&self) -> [__m512i; 16] {
        let Bf16Operand { data, row_stride, .. } = self.operand;
        let mut lines = [_mm512_setzero_si512(); 16];
        let mask = ((1u64 << self.depth.len()) - 1) as __mmask32;
        for (row, line) in self.rows.clone().zip(&mut lines) {
            let from = &data[row * row_stride + self.depth.start..][..self.depth.len()];
            // SAFETY: the mask selects the elements of `from`.
            *line = unsafe { _mm512_maskz_loadu_epi16(mask, from.as_ptr().cast()) };
        }
        lines
    }

    /// Loads an AMX tile of a transposed operand, so that vector `p` of the result contains the
    /// elements `2p` and `2p + 1` of each row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn load_pairs(&self) -> [__m512i; 16] {
        let mut lines = [_mm512_setzero_si512(); 16];
        for (pair, line) in self.depth.clone().step_by(2).zip(&mut lines) {
            let first = self.load_term(pair);
            let second =
                if pair + 1 < self.depth.end { self.load_term(pair + 1) } else { _mm512_setzero_si512() };
            *line = _mm512_or_si512(first, _mm512_slli_epi32::<16>(second));
        }
        lines
    }

    /// Loads element `p` of each of the tile's rows, and extends each 16-bit number to 32 bits with
    /// zeros.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn load_term(&self, p: usize) -> __m512i {
        let Bf16Operand { data, depth_stride, .. } = self.operand;
        let mask = ((1u32 << self.rows.len()) - 1) as __mmask16;
        let from = &data[p * depth_stride + self.rows.start..][..self.rows.len()];
        // The distance between terms is too large for the hardware prefetcher.
        _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(TILE_DEPTH * depth_stride).cast());
        // SAFETY: the mask selects the elements of `from`.
        _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(mask, from.as_ptr().cast()) })
    }
}

/// Transposes a 16 × 16 matrix of 32-bit numbers in vector registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    // In each lane of 128 bits, transposes the 4 × 4 numbers of four rows: `quads[4q + i]` has
    // number `i` of each lane, of the rows `4q..4q + 4`.
    let mut quads = [_mm512_setzero_si512(); 16];
    for (rows, quads) in rows.chunks_exact(4).zip(quads.chunks_exact_mut(4)) {
        let (low0, high0) =
            (_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]));
        let (low1, high1) =
            (_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3]));
        quads[0] = _mm512_unpacklo_epi64(low0, low1);
        quads[1] = _mm512_unpackhi_epi64(low0, low1);
        quads[2] = _mm512_unpacklo_epi64(high0, high1);
        quads[3] = _mm512_unpackhi_epi64(high0, high1);
    }
    // Transposes the 4 × 4 lanes of four registers that have the same number of each lane.
    let mut columns = [_mm512_setzero_si512(); 16];
    for i in 0..4 {
        let even = _mm512_shuffle_i32x4::<0x88>(quads[i], quads[4 + i]);
        let odd = _mm512_shuffle_i32x4::<0xDD>(quads[i], quads[4 + i]);
        let even2 = _mm512_shuffle_i32x4::<0x88>(quads[8 + i], quads[12 + i]);
        let odd2 = _mm512_shuffle_i32x4::<0xDD>(quads[8 + i], quads[12 + i]);
        columns[i] = _mm512_shuffle_i32x4::<0x88>(even, even2);
        columns[8 + i] = _mm512_shuffle_i32x4::<0xDD>(even, even2);
        columns[4 + i] = _mm512_shuffle_i32x4::<0x88>(odd, odd2);
        columns[12 + i] = _mm512_shuffle_i32x4::<0xDD>(odd, odd2);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::x86;

    /// Packs matrices of several shapes in both orders and compares each element of each tile with
    /// the definition.
    #[test]
    fn tiles_have_the_elements_of_the_definition() {
        if !x86::has_avx512() {
            return;
        }
        for threads in [1, 3] {
            let cpu = Cpu::new(threads);
            for (rows, depth) in [(1, 1), (16, 32), (17, 33), (40, 100), (300, 65)] {
                for side in [Side::Left, Side::Right] {
                    for is_transposed in [false, true] {
                        assert_packs(&cpu, rows, depth, side, is_transposed);
                    }
                }
            }
        }
    }

    /// Packs the inner part of a matrix and compares it with the definition.
    fn assert_packs(cpu: &Cpu, rows: usize, depth: usize, side: Side, is_transposed: bool) {
        let (first_row, first_term) = (3, 5);
        let (all_rows, all_terms) = (rows + first_row, depth + first_term);
        let data: Vec<u16> = (0..all_rows * all_terms).map(|i| (i * 40503) as u16 | 1).collect();
        let (row_stride, depth_stride) = if is_transposed { (1, all_rows) } else { (all_terms, 1) };
        let operand = Bf16Operand { data: &data, row_stride, depth_stride };
        let mut packed = vec![7u16; compute_packed_len(rows, depth)];
        let (row_range, depth_range) = (first_row..all_rows, first_term..all_terms);
        pack(cpu, &mut packed, operand, side, row_range, depth_range);
        let steps = depth.div_ceil(32);
        for (at, x) in packed.iter().enumerate() {
            let (tile, line, item) = (at / 512, at / 32 % 16, at % 32);
            let (panel, step) = (tile / steps, tile % steps);
            let (row, term) = match side {
                Side::Left => (panel * 16 + line, step * 32 + item),
                Side::Right => (panel * 16 + item / 2, step * 32 + 2 * line + item % 2),
            };
            let is_inside = row < rows && term < depth;
            let index = (row + first_row) * row_stride + (term + first_term) * depth_stride;
            let expected = if is_inside { data[index] } else { 0 };
            assert_eq!(*x, expected, "{side:?} {rows} × {depth}, transposed {is_transposed}: {row}, {term}");
        }
    }
}
