//! Matmul on the CPU: `y = x·wᵀ` and the gradients of `x` and `w`, all computed as `c[m,n] (=|+=)
//! a·b`.
//!
//! **Order of summation.** The element types of the operands determine the rule of the sums
//! ([`SumRule`]). The depth `k` is divided into passes of equal length, which depends on `k` alone.
//! With [`SumRule::OneChain`], each element is the sum of its passes' chains in rising order. With
//! [`SumRule::Bf16Blocks`], the division into passes has no influence on the bits. The division
//! into rows, columns and tiles never has. It is chosen for the caches and the number of threads.
//!
//! **Packing.** For each block of the depth, the smaller operand is packed once for all tasks. Each
//! task packs its block of the larger operand right before using it. A left operand with contiguous
//! rows, or a right operand with contiguous columns, is not packed, unless the distance between the
//! rows of the right operand lets them compete for few cache lines.
#[cfg(target_arch = "x86_64")]
use super::amx;
use super::backend::Cpu;
use super::bias::add_bias_to_rows;
use super::disjoint_slices::DisjointSlices;
#[cfg(target_arch = "x86_64")]
use super::elements::OutputSlices;
use super::elements::{InputElements, OutputElements};
use super::instruction_set::{InstructionSet, multiversion};
use super::micro_kernel::prepare_thread;
pub(crate) use super::packing::MatmulShape;
use super::packing::{Operand, PackBlock, pack};
use super::simd::{LANES, MAX_TILE_LEN, MicroTile, Simd};
use super::sum_rule::{BF16_BLOCK_LEN, SumRule};
use crate::buffer::View;
use crate::ops::WriteMode;
use std::ops::Range;

/// Maximum number of terms of each sum that a matmul adds in one pass over its operands, before it
/// continues with the next pass. A strip of the left operand then takes 16 KiB of the L1 cache.
const MAX_DEPTH_BLOCK: usize = 512;
/// Maximum number of elements of a matmul's smaller operand that are copied into the order of their
/// use (packed) at a time, for all tasks to read.
const SHARED_PACKED_LEN: usize = 1 << 20;
/// Maximum number of elements of a matmul's larger operand that one task copies into the order of
/// their use (packs) at a time. They take half of an L2 cache.
const TASK_PACKED_LEN: usize = 96 << 10;
/// Number of elements of a matmul's packed right operand that are multiplied by many rows of the
/// left operand at a time, chosen to fit into the L2 cache. The rest of the cache holds the result
/// and prefetched elements.
const RESIDENT_PANELS_LEN: usize = 48 << 10;

/// Distance in bytes between addresses that share a set of the L1 cache, so that they can evict
/// each other's cache lines. It is 64 lines of 64 bytes on common CPUs. A panel of the right
/// operand, read in place, then evicts its own lines before they are used again.
const CACHE_SET_PERIOD: usize = 4096;
/// Minimum number of result rows for which a matmul copies the right operand if the operand's rows
/// compete for the same cache sets.
const MIN_ROWS_TO_AVOID_CONFLICTS: usize = 32;

/// Returns how many rows and columns of a matmul's result the innermost function (the micro-kernel)
/// computes at a time with this instruction set.
fn get_micro_tile_shape(instruction_set: InstructionSet) -> (usize, usize) {
    match instruction_set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Amx | InstructionSet::Avx512 => {
            (super::x86::Avx512::TILE_ROWS, super::x86::Avx512::TILE_COLUMNS)
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => (super::x86::Avx2::TILE_ROWS, super::x86::Avx2::TILE_COLUMNS),
        InstructionSet::Portable => {
            (super::portable::Portable::TILE_ROWS, super::portable::Portable::TILE_COLUMNS)
        }
    }
}

/// Returns how many terms of each sum a matmul with `k` terms per sum adds in one pass, at most
/// [`MAX_DEPTH_BLOCK`], so that passes are about equally long. The last pass may add fewer.
fn choose_depth_block_len(k: usize, rule: SumRule) -> usize {
    let len = k.div_ceil(k.div_ceil(MAX_DEPTH_BLOCK));
    match rule {
        SumRule::OneChain => len,
        SumRule::Bf16Blocks => len.next_multiple_of(BF16_BLOCK_LEN),
    }
}

/// Computes the matmul `c[i,j] (=|+=) Σ_p a(i,p)·b(j,p)` with a result in `f32`. Panics if the
/// result does not fit into `c`.
pub(crate) fn matmul_f32(cpu: &Cpu, c: &mut [f32], a: Operand, b: Operand, shape: MatmulShape) {
    let MatmulShape { m, n, k, ldc, write } = shape;
    if m == 0 || n == 0 {
        return;
    }
    assert!(ldc >= n && c.len() >= (m - 1) * ldc + n, "the result does not fit into its buffer");
    if k == 0 && write == WriteMode::Overwrite {
        c.chunks_mut(ldc).take(m).for_each(|row| row[..n].fill(0.0));
    }
    if k == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(operands) = amx::Bf16Operand::select(cpu.instruction_set, [a, b]) {
        let len = c.len();
        let c = OutputSlices::F32(DisjointSlices::new(c), len);
        // SAFETY: the instruction set AMX exists only where it can be used, and this call owns `c`.
        return unsafe { amx::matmul_bf16(cpu, &c, 0, operands, None, shape) };
    }
    let (mr, nr) = get_micro_tile_shape(cpu.instruction_set);
    let rule = a.data.choose_sum_rule(&b.data);
    let (a, b) = (
        PackableOperand { operand: a, count: m, width: mr },
        PackableOperand { operand: b, count: n, width: nr },
    );
    let left_is_shared = m < n;
    let (shared, other) = if left_is_shared { (a, b) } else { (b, a) };
    let block_depth = choose_depth_block_len(k, rule);
    let shared_block_rows = (SHARED_PACKED_LEN / block_depth / shared.width).max(1) * shared.width;
    let unpacked = UnpackedOperands {
        a: UnpackedOperand::from_rows(a.operand, m, mr),
        b: UnpackedOperand::from_columns(b.operand, m, n),
    };
    let is_packed = !unpacked.is_unpacked(left_is_shared);
    let packed_len = if is_packed {
        shared_block_rows.min(shared.count.next_multiple_of(shared.width)) * block_depth + 8
    } else {
        0
    };
    let mut packed = cpu.scratch.borrow_buf(packed_len);
    let c = DisjointSlices::new(c);
    for p0 in (0..k).step_by(block_depth) {
        let depth = p0..(p0 + block_depth).min(k);
        for i0 in (0..shared.count).step_by(shared_block_rows) {
            let range = i0..(i0 + shared_block_rows).min(shared.count);
            if is_packed {
                pack_shared_operand(cpu, &mut packed, shared, range.clone(), depth.clone());
            }
            let add = p0 > 0 || write == WriteMode::Accumulate;
            let pass = MatmulPass {
                rule,
                c: &c,
                ldc,
                add,
                packed: &packed,
                left_is_shared,
                unpacked,
                range,
                other,
                depth: depth.clone(),
            };
            pass.run(cpu, shared.width);
        }
    }
}

/// Number of elements of a 16-bit result that a matmul computes in `f32` at a time before it rounds
/// them.
const F32_BLOCK_LEN: usize = 1 << 20;
/// Minimum number of rows of a 16-bit result that a matmul computes in `f32` at a time before it
/// rounds them. With fewer rows, packing the right operand again for each block would be too slow.
const MIN_BLOCK_ROWS: usize = 256;

/// Computes the matmul `c[i,j] (=|+=) Σ_p a(i,p)·b(j,p)` with a result of any element type. Each
/// element is rounded once.
pub(crate) fn matmul(cpu: &Cpu, c: OutputElements, a: Operand, b: Operand, shape: MatmulShape) {
    // SAFETY: this call owns `c`.
    unsafe { matmul_at_offset(cpu, &c, 0, a, b, shape) }
}

/// Computes the matmul `c[i,j] = Σ_p a(i,p)·b(j,p) + bias[j]`. Each element is rounded once, after
/// the bias was added.
pub(crate) fn matmul_with_bias(
    cpu: &Cpu,
    c: OutputElements,
    a: Operand,
    b: Operand,
    bias: Option<View>,
    shape: MatmulShape,
) {
    let bias = bias.map(|b| cpu.to_f32(b));
    // SAFETY: this call owns `c`.
    unsafe { matmul_row_blocks(cpu, &c, 0, a, b, bias.as_deref(), shape) }
}

/// Computes the matmul of `a` and `b`, and writes the result of any element type to `c`, beginning
/// at element `first`.
///
/// # Safety
///
/// The caller must ensure that the elements of the result are not accessed in any other way during
/// the call.
pub(crate) unsafe fn matmul_at_offset(
    cpu: &Cpu,
    c: &OutputElements,
    first: usize,
    a: Operand,
    b: Operand,
    shape: MatmulShape,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { matmul_row_blocks(cpu, c, first, a, b, None, shape) }
}

/// Computes a matmul one block of rows at a time, adds the optional `bias` to each row, and rounds
/// each block to the element type of `c`.
///
/// # Safety
///
/// The caller must meet the requirements of [`matmul_at_offset`].
unsafe fn matmul_row_blocks(
    cpu: &Cpu,
    c: &OutputElements,
    first: usize,
    a: Operand,
    b: Operand,
    bias: Option<&[f32]>,
    shape: MatmulShape,
) {
    let MatmulShape { m, n, ldc, write, .. } = shape;
    assert!(ldc == n, "the rows of the result are contiguous");
    #[cfg(target_arch = "x86_64")]
    if m * n > 0
        && (1..=amx::MAX_ROUNDED_DEPTH).contains(&shape.k)
        && let Some(operands) = amx::Bf16Operand::select(cpu.instruction_set, [a, b])
    {
        // SAFETY: the instruction set AMX exists only where it can be used. The caller guarantees
        // that the result is not in use.
        return unsafe { amx::matmul_bf16(cpu, &c.elements, first, operands, bias, shape) };
    }
    let rows = if c.is_f32() { m } else { (F32_BLOCK_LEN / n.max(1)).max(MIN_BLOCK_ROWS).min(m) };
    for i in (0..m).step_by(rows.max(1)) {
        let m = rows.min(m - i);
        let elements = first + i * n..first + (i + m) * n;
        let block = |c: &mut [f32]| {
            matmul_f32(cpu, c, a.skip_rows(i), b, MatmulShape { m, ..shape });
            if let Some(bias) = bias {
                add_bias_to_rows(cpu, c.into(), bias);
            }
        };
        // SAFETY: guaranteed by the caller.
        unsafe { c.update_as_f32(elements, write.into(), block) };
    }
}

/// A matmul operand that tasks can copy into packed order: its elements, its number of rows or
/// columns, and the panel width. Consists of the elements, the number of rows (left operand) or
/// columns (right operand), and the number of rows or columns per panel.
#[derive(Clone, Copy)]
struct PackableOperand<'a> {
    operand: Operand<'a>,
    count: usize,
    width: usize,
}

/// Copies a range of the rows or columns of a matmul's operand into `packed` in the order in which
/// the micro-kernel (the innermost function) reads them, on all threads.
fn pack_shared_operand(
    cpu: &Cpu,
    packed: &mut [f32],
    side: PackableOperand,
    range: Range<usize>,
    depth: Range<usize>,
) {
    let panels = range.len().div_ceil(side.width);
    // A task packs neighbouring panels, and so reads longer runs of a source that is contiguous
    // along them. With a panel width that leaves a surplus, tasks would overwrite each other's
    // panels.
    let tasks = if side.width.is_multiple_of(8) { (cpu.pool.thread_count() * 2).min(panels) } else { 1 };
    let group = panels.div_ceil(tasks) * side.width;
    let len = range.len();
    let parts = DisjointSlices::new(packed);
    cpu.pool.run(len.div_ceil(group), &|task| {
        let rows = group.min(len - task * group);
        let block = PackBlock {
            first_row: range.start + task * group,
            rows,
            depth: depth.clone(),
            panel_width: side.width,
        };
        let start = task * group * depth.len();
        // SAFETY: one task packs each panel.
        let dst = unsafe { parts.slice_mut(start..start + block.packed_len()) };
        pack(cpu.instruction_set, dst, side.operand, block);
    });
}

/// One pass of a matmul, which adds the products of a range of terms to the result, for some rows
/// or columns of the operand that all tasks share. A pass includes all rows or columns of the other
/// operand.
struct MatmulPass<'a> {
    rule: SumRule,
    c: &'a DisjointSlices<'a, f32>,
    ldc: usize,
    add: bool,
    /// The shared operand's packed panels; empty if it is not packed.
    packed: &'a [f32],
    /// True if the left operand is shared, false if the right one is.
    left_is_shared: bool,
    unpacked: UnpackedOperands<'a>,
    /// Range of rows or columns of the shared operand.
    range: Range<usize>,
    other: PackableOperand<'a>,
    depth: Range<usize>,
}

impl MatmulPass<'_> {
    /// Computes this pass of the matmul with parallel tasks on all threads, and returns when all
    /// tasks are done. Each task computes one block of the operand that is not shared. If there are
    /// fewer blocks than threads, the panels of the shared operand are divided into groups, too.
    fn run(&self, cpu: &Cpu, shared_width: usize) {
        let (width, k) = (self.other.width, self.depth.len());
        let panels = self.other.count.div_ceil(width);
        let target_tasks = if cpu.pool.thread_count() == 1 { 1 } else { cpu.pool.thread_count() * 3 };
        let panels_per_block = panels.div_ceil(target_tasks).clamp(1, (TASK_PACKED_LEN / (k * width)).max(1));
        let blocks = panels.div_ceil(panels_per_block);
        let shared_panels = self.range.len().div_ceil(shared_width);
        let panels_per_group = shared_panels.div_ceil((target_tasks / blocks).clamp(1, shared_panels));
        let groups = shared_panels.div_ceil(panels_per_group);
        cpu.pool.run(blocks * groups, &|task| {
            let first = task / groups * panels_per_block * width;
            let rows = (panels_per_block * width).min(self.other.count - first);
            let block = PackBlock { first_row: first, rows, depth: self.depth.clone(), panel_width: width };
            let is_packed = !self.unpacked.is_unpacked(!self.left_is_shared);
            let mut packed_other = cpu.scratch.borrow_buf(if is_packed { block.packed_len() } else { 0 });
            if is_packed {
                pack(cpu.instruction_set, &mut packed_other, self.other.operand, block);
            }
            let from = task % groups * panels_per_group * shared_width;
            let to = (from + panels_per_group * shared_width).min(self.range.len());
            let shared = self.packed.get(from * k..).unwrap_or_default();
            let shared_range = (self.range.start + from, to - from);
            let ((i0, rows), (j0, columns), a, b) = if self.left_is_shared {
                (shared_range, (first, rows), shared, &packed_other[..])
            } else {
                ((first, rows), shared_range, &packed_other[..], shared)
            };
            let p = self.depth.start;
            let a = self
                .unpacked
                .a
                .map_or(OperandSource::Packed(a), |operand| OperandSource::InPlace(operand, i0, p));
            let b = self
                .unpacked
                .b
                .map_or(OperandSource::Packed(b), |operand| OperandSource::InPlace(operand, j0, p));
            // SAFETY: row i0 and column j0 are in c.
            let c = unsafe { self.c.as_mut_ptr().add(i0 * self.ldc + j0) };
            let tiles = ResultBlock { rule: self.rule, c, ldc: self.ldc, rows, columns, k, add: self.add };
            multiply_block(cpu.instruction_set, tiles, a, b);
        });
    }
}

/// An `f32` operand of a matmul that the micro-kernel (the innermost function) reads directly from
/// the operand's memory, without a packed copy.
#[derive(Clone, Copy)]
struct UnpackedOperand<'a> {
    data: &'a [f32],
    /// Number of elements between rows of the left operand, or between terms of the right operand's
    /// sums.
    stride: usize,
}

impl<'a> UnpackedOperand<'a> {
    /// Returns the left operand `a` (with `m` rows) for direct reads by the micro-kernel, or `None`
    /// if `a` must be packed first. Returns `None` if the operand is not `f32`, its rows are not
    /// contiguous, or it has fewer than `mr` rows, the height of a tile.
    fn from_rows(a: Operand<'a>, m: usize, mr: usize) -> Option<Self> {
        match a.data {
            InputElements::F32(data) if a.depth_stride == 1 && m >= mr => {
                Some(UnpackedOperand { data, stride: a.row_stride })
            }
            _ => None,
        }
    }

    /// Returns the right operand `b` of a matmul for direct reads by the micro-kernel, or `None` if
    /// `b` should be packed first. Returns `None` if the operand is not `f32`, its columns are not
    /// contiguous, the last columns do not fill a vector, or its rows compete for the same cache
    /// sets.
    fn from_columns(b: Operand<'a>, m: usize, n: usize) -> Option<Self> {
        let has_conflicts = (b.depth_stride * size_of::<f32>()).is_multiple_of(CACHE_SET_PERIOD)
            && m >= MIN_ROWS_TO_AVOID_CONFLICTS;
        match b.data {
            InputElements::F32(data) if b.row_stride == 1 && n.is_multiple_of(LANES) && !has_conflicts => {
                Some(UnpackedOperand { data, stride: b.depth_stride })
            }
            _ => None,
        }
    }

    /// Returns the address of element `first` of the operand, after a check that the micro-kernel's
    /// reads from there stay within bounds. Panics if the micro-kernel, which reads `lines` runs of
    /// `len` contiguous elements from this address on, would read out of bounds. The runs are
    /// `stride` elements apart.
    fn get_checked_address(&self, first: usize, lines: usize, len: usize) -> *const f32 {
        self.data[first..first + (lines - 1) * self.stride + len].as_ptr()
    }
}

/// The operands of a matmul that the micro-kernel (the innermost function) reads in place, without
/// a packed copy. An operand that is packed is `None`.
#[derive(Clone, Copy)]
struct UnpackedOperands<'a> {
    a: Option<UnpackedOperand<'a>>,
    b: Option<UnpackedOperand<'a>>,
}

impl UnpackedOperands<'_> {
    /// Returns true if the micro-kernel reads the operand directly, without a packed copy: the left
    /// operand if `is_left` is true, otherwise the right one.
    fn is_unpacked(&self, is_left: bool) -> bool {
        if is_left { self.a.is_some() } else { self.b.is_some() }
    }
}

/// Where a matmul task reads one of its operands: in a packed copy, or directly in the operand's
/// memory.
#[derive(Clone, Copy)]
enum OperandSource<'a> {
    /// Packed panels of the block's rows or columns.
    Packed(&'a [f32]),
    /// The whole operand, the row or column at which the block begins, and the depth at which the
    /// block begins.
    InPlace(UnpackedOperand<'a>, usize, usize),
}

/// The block of a matmul's result that one parallel task computes: its address and its size.
#[derive(Clone, Copy)]
struct ResultBlock {
    rule: SumRule,
    c: *mut f32,
    ldc: usize,
    rows: usize,
    columns: usize,
    k: usize,
    add: bool,
}

multiversion! {
    /// Computes a block of a matmul's result with the given instruction set.
    fn multiply_block = multiply_block_tiles(t: ResultBlock, a: OperandSource, b: OperandSource)
}

/// Computes a block of a matmul's result, one tile (as many elements as fit in registers) after
/// another.
#[inline(always)]
fn multiply_block_tiles<S: Simd>(s: S, t: ResultBlock, a: OperandSource, b: OperandSource) {
    let _mode = prepare_thread(s, t.rule);
    let resident = (RESIDENT_PANELS_LEN / (t.k * S::TILE_COLUMNS)).max(1);
    let panels = t.columns.div_ceil(S::TILE_COLUMNS);
    for first in (0..panels).step_by(resident) {
        let last = (first + resident).min(panels);
        for i in (0..t.rows).step_by(S::TILE_ROWS) {
            let rows = S::TILE_ROWS.min(t.rows - i);
            let (a, rs, ks, rows_above) = match a {
                OperandSource::Packed(a) => (a[i * t.k..].as_ptr(), 1, S::TILE_ROWS, 0),
                // The last tile begins above its rows, so that it is complete.
                OperandSource::InPlace(operand, i0, p) => {
                    let rows_above = S::TILE_ROWS - rows;
                    (
                        operand.get_checked_address(
                            (i0 + i - rows_above) * operand.stride + p,
                            S::TILE_ROWS,
                            t.k,
                        ),
                        operand.stride,
                        1,
                        rows_above,
                    )
                }
            };
            for panel in first..last {
                let j = panel * S::TILE_COLUMNS;
                let columns = S::TILE_COLUMNS.min(t.columns - j);
                let (b, ldb) = match b {
                    OperandSource::Packed(b) => (b[j * t.k..].as_ptr(), S::TILE_COLUMNS),
                    OperandSource::InPlace(operand, j0, p) => (
                        operand.get_checked_address(p * operand.stride + j0 + j, t.k, columns),
                        operand.stride,
                    ),
                };
                let tile = MicroTile {
                    rule: t.rule,
                    depth_start: 0,
                    depth: t.k,
                    a,
                    a_row_stride: rs,
                    a_depth_stride: ks,
                    b,
                    b_row_stride: ldb,
                    // SAFETY: row i and column j are in c.
                    c: unsafe { t.c.add(i * t.ldc + j) },
                    c_row_stride: t.ldc,
                    accumulate: t.add,
                };
                // SAFETY: the operands are complete, and `compute_and_write_tile` writes only these
                // rows and columns.
                unsafe { compute_and_write_tile(s, &tile, rows_above, rows, columns) };
            }
        }
    }
}

/// Computes a small block (tile) of a matmul's result in registers, and writes only the requested
/// rows and columns of the tile to the result. These are `rows` rows, beginning with row
/// `rows_above`, and the first `columns` elements of each. A tile that is not written completely is
/// computed in a buffer.
///
/// # Safety
///
/// The caller must ensure that the operands of `t` are complete panels, that the written rows and
/// columns are in `c`, and that only this thread accesses them.
#[inline(always)]
unsafe fn compute_and_write_tile<S: Simd>(
    s: S,
    t: &MicroTile,
    rows_above: usize,
    rows: usize,
    columns: usize,
) {
    let nv = columns.div_ceil(LANES);
    if rows == S::TILE_ROWS && columns == nv * LANES {
        // SAFETY: the tile is complete.
        return unsafe { s.run_micro_kernel(nv, t) };
    }
    let mut buffer = [0.0f32; MAX_TILE_LEN];
    let width = nv * LANES;
    // SAFETY: the caller guarantees `columns` elements of each of these rows.
    let row = |i: usize| unsafe { std::slice::from_raw_parts_mut(t.c.add(i * t.c_row_stride), columns) };
    if t.accumulate {
        for i in 0..rows {
            buffer[(rows_above + i) * width..][..columns].copy_from_slice(row(i));
        }
    }
    // SAFETY: the buffer has space for the largest tile.
    unsafe { s.run_micro_kernel(nv, &MicroTile { c: buffer.as_mut_ptr(), c_row_stride: width, ..*t }) };
    for i in 0..rows {
        row(i).copy_from_slice(&buffer[(rows_above + i) * width..][..columns]);
    }
}
