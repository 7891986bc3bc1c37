//! [`matmul_bf16`]: multiplies bf16 matrices with AMX in blocks and parallel tasks, after copying
//! the operands into the order of their use if necessary.
//!
//! The depth is divided into slabs. For each slab, a part of the right operand is packed, in
//! parallel, and then multiplied by all rows of the left operand. The left operand is read in place
//! if its rows are contiguous and consist of whole tiles, and packed otherwise.
//!
//! A task computes a part of the result in passes over at most [`MAX_PASS_DEPTH`] terms. Both
//! operands of a pass, and the blocks of 32 × 32 elements of the result, fit into the L2 cache. A
//! block is added to the result, or rounded, when its last pass is complete, while the tiles of the
//! next block are multiplied. Each element is the sum of its steps of 32 terms in rising order, so
//! the division has no influence on the bits.
use super::packing::{Bf16Operand, Side, compute_packed_len, pack};
use super::result::ResultMatrix;
use super::tiles::{
    BLOCK_COLUMNS, BlockHeight, BlockProduct, MAX_BLOCK_LEN, TILE_BYTES, TILE_DEPTH, TILE_ROWS, Tiles,
};
use crate::cpu::backend::Cpu;
use crate::cpu::elements::OutputSlices;
use crate::cpu::packing::MatmulShape;
use crate::ops::WriteMode;
use std::ops::Range;

/// Maximum depth (number of terms of each sum) of an AMX matmul that rounds its results to 16 bits
/// or adds a bias. All terms of such a matmul are packed at once.
pub(crate) const MAX_ROUNDED_DEPTH: usize = 4096;
/// Maximum length, along the summed dimension, for which the operands of an AMX matmul are packed
/// (copied in the order of their use) at a time.
const MAX_SLAB_DEPTH: usize = MAX_ROUNDED_DEPTH;
/// Maximum number of bf16 elements of an operand that are packed (copied in the order of their use)
/// at a time, 4 MiB in total. 32 rows (or columns) with more elements are packed, too.
const MAX_PACKED_LEN: usize = 2 << 20;
/// Maximum number of terms that a parallel task adds to each element of the result in one pass over
/// both operands. Shorter passes, for which the operands would fit into the L1 cache, load and
/// store the blocks of the result more often, which costs more.
const MAX_PASS_DEPTH: usize = 1024;
/// Maximum number of rows and of columns of the part of a matmul's result that one parallel task
/// computes. The `f32` elements then take 256 KiB of the L2 cache of 2 MiB, and each operand of a
/// pass 512 KiB.
const MAX_TASK_SIDE: usize = 256;
/// Minimum number of rows and of columns of the part of a matmul's result that one parallel task
/// computes.
const MIN_TASK_SIDE: usize = 64;
/// The left operand's rows are copied before use if their distance in bytes is a multiple of this
/// number, because they then compete for L1 cache sets.
const CONFLICTING_STRIDE_BYTES: usize = 4096;

/// Returns the length of the parts when `len` is divided into the fewest parts of at most `max`,
/// rounded up to a multiple of `unit`.
fn choose_part_len(len: usize, max: usize, unit: usize) -> usize {
    let parts = len.div_ceil(max.max(unit)).max(1);
    len.div_ceil(parts).next_multiple_of(unit)
}

/// Computes the matmul `c[i,j] (=|+=) Σ_p a(i,p)·b(j,p)` of bf16 operands with AMX. The elements of
/// the result begin at index `first` of `c`. `bias[j]`, if there is a bias, is added to the
/// elements of column `j` before they are rounded.
///
/// The depth must be at most [`MAX_ROUNDED_DEPTH`] if the result has 16 bits or a bias. Panics if
/// the result does not fit into `c`.
///
/// # Safety
///
/// The caller must ensure that AMX can be used, and that the elements of the result are not
/// accessed in any other way during the call.
pub(crate) unsafe fn matmul_bf16(
    cpu: &Cpu,
    c: &OutputSlices,
    first: usize,
    [a, b]: [Bf16Operand; 2],
    bias: Option<&[f32]>,
    shape: MatmulShape,
) {
    let MatmulShape { m, n, k, ldc, write } = shape;
    let is_rounded = bias.is_some() || matches!(c, OutputSlices::Half(..));
    assert!(k <= MAX_ROUNDED_DEPTH || !is_rounded, "rounded sums of {k} terms");
    assert!(bias.is_none_or(|bias| bias.len() == n), "the bias has another length");
    let c = ResultMatrix { elements: c, first, ldc, bias };
    let slab_depth = choose_part_len(k, MAX_SLAB_DEPTH, TILE_DEPTH);
    let packs_left = !can_be_read_in_place(a, m, k);
    for p in (0..k).step_by(slab_depth) {
        let depth = p..(p + slab_depth).min(k);
        let max_rows = MAX_PACKED_LEN / depth.len().next_multiple_of(TILE_DEPTH);
        let slab_rows = if packs_left { choose_part_len(m, max_rows, BLOCK_COLUMNS) } else { m };
        let slab_columns = choose_part_len(n, max_rows, BLOCK_COLUMNS);
        for i in (0..m).step_by(slab_rows) {
            let rows = i..(i + slab_rows).min(m);
            let mut packed_a =
                cpu.scratch.borrow_buf(if packs_left { packed_f32_len(&rows, &depth) } else { 0 });
            let left = match packs_left {
                true => {
                    let packed = bytemuck::cast_slice_mut(&mut packed_a);
                    pack(cpu, packed, a, Side::Left, rows.clone(), depth.clone());
                    LeftOperand::from_packed(packed, rows.start, depth.len())
                }
                false => LeftOperand::in_place(a, m, depth.start),
            };
            for j in (0..n).step_by(slab_columns) {
                let columns = j..(j + slab_columns).min(n);
                let mut packed_b = cpu.scratch.borrow_buf(packed_f32_len(&columns, &depth));
                let packed_b = bytemuck::cast_slice_mut(&mut packed_b);
                pack(cpu, packed_b, b, Side::Right, columns.clone(), depth.clone());
                let accumulates = p > 0 || write == WriteMode::Accumulate;
                let slab = Slab { c, left, right: packed_b, depth: depth.len(), accumulates };
                slab.run(cpu, rows.clone(), columns);
            }
        }
    }
}

/// Returns the number of `f32` elements of scratch memory for a packed bf16 copy of the range
/// `depth` of the rows `rows`, padded to a multiple of 32 rows.
fn packed_f32_len(rows: &Range<usize>, depth: &Range<usize>) -> usize {
    compute_packed_len(rows.len().next_multiple_of(BLOCK_COLUMNS), depth.len()) / 2
}

/// Returns true if AMX can load tiles of the left operand `a` directly, without a packed copy.
fn can_be_read_in_place(a: Bf16Operand, m: usize, k: usize) -> bool {
    a.depth_stride == 1
        && m >= TILE_ROWS
        && k.is_multiple_of(TILE_DEPTH)
        && !(a.row_stride * 2).is_multiple_of(CONFLICTING_STRIDE_BYTES)
}

/// Tiles of a matmul's left operand for a range along the summed dimension, either in a packed copy
/// or in the operand's memory.
#[derive(Clone, Copy)]
struct LeftOperand<'a> {
    /// The elements, beginning with the first tile.
    data: &'a [u16],
    /// Index of the row with which the elements begin.
    first_row: usize,
    /// Number of rows in the result, if the operand is read in place.
    in_place_rows: Option<usize>,
    /// Distances in elements: between rows, between 16 rows and the next 16, and between steps.
    row_stride: usize,
    tile_stride: usize,
    step_stride: usize,
}

impl<'a> LeftOperand<'a> {
    /// Creates the description of a packed left operand that starts at row `first_row` of the
    /// matrix, with `depth` elements along the summed dimension per row.
    fn from_packed(data: &'a [u16], first_row: usize, depth: usize) -> Self {
        let tile_stride = TILE_ROWS * depth.next_multiple_of(TILE_DEPTH);
        let step_stride = TILE_BYTES / 2;
        LeftOperand { data, first_row, in_place_rows: None, row_stride: TILE_DEPTH, tile_stride, step_stride }
    }

    /// Creates the description of a left operand with `m` rows that is read without a packed copy,
    /// from element `first_term` of each row on.
    fn in_place(a: Bf16Operand<'a>, m: usize, first_term: usize) -> Self {
        LeftOperand {
            data: &a.data[first_term..],
            first_row: 0,
            in_place_rows: Some(m),
            row_stride: a.row_stride,
            tile_stride: TILE_ROWS * a.row_stride,
            step_stride: TILE_DEPTH,
        }
    }

    /// Returns the first row of the block of 16 or 32 rows that AMX loads to multiply row `row` and
    /// the rows below. This is `row`, or a row above if the operand would end within the block. A
    /// packed operand ends with zeros.
    fn find_block_start(&self, row: usize, height: BlockHeight) -> usize {
        self.in_place_rows.map_or(row, |m| row.min(m - height.rows()))
    }

    /// Returns the address of the left operand's AMX tile that begins at row `row` and at element
    /// `step` · [`TILE_DEPTH`] along the summed dimension. Panics if `steps` steps of a block from
    /// there on would be out of bounds.
    fn get_checked_address(&self, row: usize, step: usize, height: BlockHeight, steps: usize) -> *const u16 {
        let row = row - self.first_row;
        let first_tile = match self.in_place_rows {
            Some(_) => row * self.row_stride,
            None => row / TILE_ROWS * self.tile_stride,
        };
        let first = first_tile + step * self.step_stride;
        let last_tile = height.rows() / TILE_ROWS - 1;
        let last_row = last_tile * self.tile_stride + (TILE_ROWS - 1) * self.row_stride;
        let len = last_row + (steps - 1) * self.step_stride + TILE_DEPTH;
        self.data[first..first + len].as_ptr()
    }
}

/// A part of a matmul for which the right operand is packed at a time: a range along the summed
/// dimension, and some rows and columns of the result.
struct Slab<'a> {
    c: ResultMatrix<'a>,
    left: LeftOperand<'a>,
    /// Panels of the right operand, the first of which begins with the first column.
    right: &'a [u16],
    /// Number of terms.
    depth: usize,
    /// True if the products are added to the result, false if they overwrite it.
    accumulates: bool,
}

impl Slab<'_> {
    /// Computes the rows `rows` and columns `columns` of the result with parallel tasks, for the
    /// range along the summed dimension that this object covers.
    fn run(&self, cpu: &Cpu, rows: Range<usize>, columns: Range<usize>) {
        let tasks = if cpu.pool.thread_count() == 1 { 1 } else { cpu.pool.thread_count() * 3 };
        let (task_rows, task_columns) = choose_task_shape(rows.len(), columns.len(), tasks);
        let column_tasks = columns.len().div_ceil(task_columns);
        cpu.pool.run(rows.len().div_ceil(task_rows) * column_tasks, &|task| {
            let row = rows.start + task / column_tasks * task_rows;
            let column = columns.start + task % column_tasks * task_columns;
            let part = ResultPart {
                rows: row..(row + task_rows).min(rows.end),
                columns: column..(column + task_columns).min(columns.end),
                first_panel: (column - columns.start) / TILE_ROWS,
            };
            // SAFETY: the caller of `matmul_bf16` guarantees that AMX can be used, and each task
            // has another part of the result.
            unsafe { self.compute_part(cpu, &part) };
        });
    }

    /// Computes the part `part` of the result on the current thread, in passes over at most
    /// [`MAX_PASS_DEPTH`] terms of each sum.
    ///
    /// # Safety
    ///
    /// The caller must ensure that AMX can be used, and that no other thread uses this part of the
    /// result.
    unsafe fn compute_part(&self, cpu: &Cpu, part: &ResultPart) {
        // SAFETY: guaranteed by the caller.
        let tiles = unsafe { Tiles::configure() };
        let pass_depth = choose_part_len(self.depth, MAX_PASS_DEPTH, TILE_DEPTH);
        let passes = self.depth.div_ceil(pass_depth);
        let strips = part.list_strips(&self.left);
        let block_columns = part.columns.len().div_ceil(BLOCK_COLUMNS);
        // With one pass, two blocks suffice: one is computed while the other is written.
        let blocks = if passes == 1 { 2 } else { block_columns * strips.len() };
        let mut blocks = cpu.scratch.borrow_buf(blocks * MAX_BLOCK_LEN);
        let mut completed: Option<(usize, &Strip, Range<usize>)> = None;
        for pass in 0..passes {
            let terms = pass * pass_depth..((pass + 1) * pass_depth).min(self.depth);
            for (i, column) in part.columns.clone().step_by(BLOCK_COLUMNS).enumerate() {
                let columns = column..(column + BLOCK_COLUMNS).min(part.columns.end);
                for (j, strip) in strips.iter().enumerate() {
                    let index = i * strips.len() + j;
                    let first = if passes == 1 { index % 2 } else { index } * MAX_BLOCK_LEN;
                    let block = &mut blocks[first..first + MAX_BLOCK_LEN];
                    // SAFETY: guaranteed by the caller.
                    unsafe {
                        if pass == 0 && self.accumulates {
                            self.c.read_block(block, strip.skipped, strip.rows.clone(), columns.clone());
                        }
                        let adds = pass > 0 || self.accumulates;
                        self.multiply_block(&tiles, block, strip, part.first_panel + 2 * i, &terms, adds);
                        if pass + 1 == passes {
                            // A block is written while the tiles of the next are multiplied.
                            let previous = completed.replace((first, strip, columns.clone()));
                            self.write_completed(&blocks, previous);
                        }
                    }
                }
            }
        }
        // SAFETY: as above.
        unsafe { self.write_completed(&blocks, completed) };
    }

    /// Multiplies the range `terms` of the summed dimension of both operands for one block of the
    /// result (16 or 32 rows by 32 columns), and stores the sums in `block`. The right operand's
    /// columns begin with the panel `panel`.
    ///
    /// # Safety
    ///
    /// The caller must ensure that AMX can be used.
    unsafe fn multiply_block(
        &self,
        tiles: &Tiles,
        block: &mut [f32],
        strip: &Strip,
        panel: usize,
        terms: &Range<usize>,
        accumulate: bool,
    ) {
        let (step, steps) = (terms.start / TILE_DEPTH, terms.len().div_ceil(TILE_DEPTH));
        let row = strip.rows.start - strip.skipped;
        let panel_len = TILE_ROWS * self.depth.next_multiple_of(TILE_DEPTH);
        let b = &self.right[panel * panel_len..(panel + 2) * panel_len];
        assert!(block.len() >= MAX_BLOCK_LEN && (step + steps) * TILE_BYTES <= panel_len * 2);
        let product = BlockProduct {
            a: self.left.get_checked_address(row, step, strip.height, steps),
            a_row_stride: self.left.row_stride * 2,
            a_tile_stride: self.left.tile_stride * 2,
            a_step_stride: self.left.step_stride * 2,
            b: b[step * TILE_BYTES / 2..].as_ptr(),
            b_tile_stride: panel_len * 2,
            c: block.as_mut_ptr(),
            steps,
            accumulate,
        };
        // SAFETY: the tiles of both operands and the block are in bounds.
        unsafe { tiles.multiply(strip.height, &product) };
    }

    /// Writes the computed block that `block` describes from scratch memory to the result, or does
    /// nothing if `block` is `None`. `block` is the index of its first element in `blocks`, its
    /// rows (strip) and its columns.
    ///
    /// # Safety
    ///
    /// The caller must ensure that no other thread uses this part of the result.
    unsafe fn write_completed(&self, blocks: &[f32], block: Option<(usize, &Strip, Range<usize>)>) {
        if let Some((first, strip, columns)) = block {
            // SAFETY: guaranteed by the caller. Machines with AMX have AVX-512.
            unsafe {
                self.c.write_block(&blocks[first..], strip.skipped, strip.rows.clone(), columns);
            }
        }
    }
}

/// Chooses how many rows and columns of the result each parallel task computes, and returns both
/// numbers. Parts are halved until there are `tasks` of them, or they are small.
fn choose_task_shape(rows: usize, columns: usize, tasks: usize) -> (usize, usize) {
    let mut shape = [rows, columns].map(|len| choose_part_len(len, MAX_TASK_SIDE, BLOCK_COLUMNS));
    while rows.div_ceil(shape[0]) * columns.div_ceil(shape[1]) < tasks {
        let longer = if shape[0] > shape[1] { 0 } else { 1 };
        if shape[longer] <= MIN_TASK_SIDE {
            break;
        }
        shape[longer] = (shape[longer] / 2).next_multiple_of(BLOCK_COLUMNS);
    }
    shape.into()
}

/// The rows and columns of the result that one parallel task computes.
struct ResultPart {
    rows: Range<usize>,
    columns: Range<usize>,
    /// Number of the right operand's panel with which the columns begin.
    first_panel: usize,
}

/// A group of up to 16 or 32 consecutive rows of the result that AMX computes together.
#[derive(Debug)]
struct Strip {
    rows: Range<usize>,
    height: BlockHeight,
    /// Number of rows of the block above `rows`. They belong to the strip before, and are not
    /// written.
    skipped: usize,
}

impl ResultPart {
    /// Divides the rows of this part of the result into groups (strips) of 32 rows, and the
    /// remaining rows into groups of at most 16.
    fn list_strips(&self, left: &LeftOperand) -> Vec<Strip> {
        let mut strips = Vec::new();
        let mut row = self.rows.start;
        while row < self.rows.end {
            let height = match self.rows.end - row >= BlockHeight::Two.rows() {
                true => BlockHeight::Two,
                false => BlockHeight::One,
            };
            let end = (row + height.rows()).min(self.rows.end);
            strips.push(Strip { rows: row..end, height, skipped: row - left.find_block_start(row, height) });
            row = end;
        }
        strips
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_equal_multiples_of_the_unit() {
        assert_eq!(choose_part_len(1024, 384, 32), 352);
        assert_eq!(choose_part_len(768, 384, 32), 384);
        assert_eq!(choose_part_len(1, 384, 32), 32);
        assert_eq!(choose_part_len(100_000, 20, 32), 32);
    }

    #[test]
    fn tasks_cover_the_result_and_use_all_threads() {
        for (rows, columns) in [(1, 1), (2048, 1024), (33, 4000), (5000, 32)] {
            for tasks in [1, 6, 12] {
                let (task_rows, task_columns) = choose_task_shape(rows, columns, tasks);
                assert!(task_rows <= MAX_TASK_SIDE && task_columns <= MAX_TASK_SIDE);
                assert!(task_rows.is_multiple_of(32) && task_columns.is_multiple_of(32));
                let is_divided = rows.div_ceil(task_rows) * columns.div_ceil(task_columns) >= tasks;
                assert!(is_divided || task_rows.max(task_columns) <= MIN_TASK_SIDE);
            }
        }
    }
}
