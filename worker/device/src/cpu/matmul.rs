//! Matmul: `y = x·wᵀ` and the gradients of `x` and `w`, all as `c[m,n] (=|+=) a·b`.
//!
//! **Order of summation.** The depth `k` is divided into blocks of equal length, which depends on
//! `k` alone. Each element is the sum of its blocks' chains in rising order
//! ([`super::micro_kernel`]). Any other division has no influence on the bits, and follows caches
//! and threads.
//!
//! **Packing.** For each block of the depth, the smaller operand is packed once for all tasks. Each
//! task packs its block of the larger operand right before using it. A left operand with contiguous
//! rows, or a right operand with contiguous columns, is not packed.
use super::bias::add_bias_to_rows;
use super::elements::{Input, Output, PriorContents};
use super::micro_kernel::MicroTile;
use super::packing::{Operand, PackBlock, pack};
use super::simd::{InstructionSet, LANES, MAX_TILE_LEN, Simd, multiversion};
use super::{Cpu, DisjointSlices};
use crate::ops::WriteMode;
use std::ops::Range;

/// Longest block of the depth. A strip of the left operand then takes 16 KB of the L1 cache.
const MAX_DEPTH_BLOCK: usize = 512;
/// Elements of the smaller operand that are packed for all tasks at a time.
const SHARED_PACKED_LEN: usize = 1 << 20;
/// Elements of the larger operand that a task packs at a time: half of an L2 cache.
const TASK_PACKED_LEN: usize = 96 << 10;
/// Elements of the right operand's panels that stay in the L2 cache while strips of the left
/// operand are multiplied by them. The rest of the cache holds the result and prefetched elements.
const RESIDENT_PANELS_LEN: usize = 48 << 10;

/// Shape of one matmul, and how its result is written.
#[derive(Clone, Copy)]
pub(crate) struct MatmulShape {
    /// Rows of the result.
    pub(crate) m: usize,
    /// Columns of the result.
    pub(crate) n: usize,
    /// Depth: terms of each sum.
    pub(crate) k: usize,
    /// Elements between rows of the result; at least `n`.
    pub(crate) ldc: usize,
    /// Whether the result is overwritten or added to.
    pub(crate) write: WriteMode,
}

/// Returns rows and columns of the micro tile of an instruction set.
fn micro_tile_shape(level: InstructionSet) -> (usize, usize) {
    match level {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => (super::x86::Avx512::MR, super::x86::Avx512::NR),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => (super::x86::Avx2::MR, super::x86::Avx2::NR),
        InstructionSet::Portable => (super::simd::Portable::MR, super::simd::Portable::NR),
    }
}

/// Returns the length of the depth's blocks; the last one may be shorter.
fn depth_block_len(k: usize) -> usize {
    k.div_ceil(k.div_ceil(MAX_DEPTH_BLOCK))
}

/// Computes `c[i,j] (=|+=) Σ_p a(i,p)·b(j,p)` in `f32`.
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
    let (mr, nr) = micro_tile_shape(cpu.instruction_set);
    let (a, b) = (
        PackableOperand { operand: a, count: m, width: mr },
        PackableOperand { operand: b, count: n, width: nr },
    );
    let left_is_shared = m < n;
    let (shared, other) = if left_is_shared { (a, b) } else { (b, a) };
    let block_depth = depth_block_len(k);
    let shared_block_rows = (SHARED_PACKED_LEN / block_depth / shared.width).max(1) * shared.width;
    let unpacked = UnpackedOperands {
        a: UnpackedOperand::from_rows(a.operand, m, mr),
        b: UnpackedOperand::from_columns(b.operand, n),
    };
    let is_packed = !unpacked.contains(left_is_shared);
    let packed_len = if is_packed {
        shared_block_rows.min(shared.count.next_multiple_of(shared.width)) * block_depth + 8
    } else {
        0
    };
    let mut packed = cpu.scratch.take(packed_len);
    let c = DisjointSlices::new(c);
    for p0 in (0..k).step_by(block_depth) {
        let depth = p0..(p0 + block_depth).min(k);
        for i0 in (0..shared.count).step_by(shared_block_rows) {
            let range = i0..(i0 + shared_block_rows).min(shared.count);
            if is_packed {
                pack_shared(cpu, &mut packed, shared, range.clone(), depth.clone());
            }
            let add = p0 > 0 || write == WriteMode::Accumulate;
            let pass = MatmulPass {
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

/// Elements of a 16-bit result that are summed in `f32` at a time.
const F32_BLOCK_LEN: usize = 1 << 20;
/// Fewest rows of such a block. Packing the right operand again for each block would be too slow
/// for fewer rows.
const MIN_BLOCK_ROWS: usize = 256;

/// Computes the matmul with a result of any element type, which is rounded once.
pub(crate) fn matmul(cpu: &Cpu, c: Output, a: Operand, b: Operand, shape: MatmulShape) {
    // SAFETY: this call owns `c`.
    unsafe { matmul_at_offset(cpu, &c, 0, a, b, shape) }
}

/// Computes the matmul, adds `bias` to every row, and rounds the result once.
pub(crate) fn matmul_with_bias(
    cpu: &Cpu,
    c: Output,
    a: Operand,
    b: Operand,
    bias: Option<Input>,
    shape: MatmulShape,
) {
    let bias = bias.map(|b| b.all_to_f32(cpu));
    // SAFETY: this call owns `c`.
    unsafe { matmul_row_blocks(cpu, &c, 0, a, b, bias.as_deref(), shape) }
}

/// Computes the matmul with a result that begins at element `first` of `c`.
///
/// # Safety
/// The elements of the result are not accessed in any other way during the call.
pub(crate) unsafe fn matmul_at_offset(
    cpu: &Cpu,
    c: &Output,
    first: usize,
    a: Operand,
    b: Operand,
    shape: MatmulShape,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { matmul_row_blocks(cpu, c, first, a, b, None, shape) }
}

/// Computes the matmul in blocks of rows, each of which is rounded when it is complete.
///
/// # Safety
/// That of [`matmul_at_offset`].
unsafe fn matmul_row_blocks(
    cpu: &Cpu,
    c: &Output,
    first: usize,
    a: Operand,
    b: Operand,
    bias: Option<&[f32]>,
    shape: MatmulShape,
) {
    let MatmulShape { m, n, ldc, write, .. } = shape;
    assert!(ldc == n, "the rows of the result are contiguous");
    let rows = if c.is_f32() { m } else { (F32_BLOCK_LEN / n.max(1)).max(MIN_BLOCK_ROWS).min(m) };
    let prior = if write == WriteMode::Accumulate { PriorContents::Read } else { PriorContents::Ignored };
    for i in (0..m).step_by(rows.max(1)) {
        let m = rows.min(m - i);
        let elements = first + i * n..first + (i + m) * n;
        let block = |c: &mut [f32]| {
            matmul_f32(cpu, c, a.skip_rows(i), b, MatmulShape { m, ..shape });
            if let Some(bias) = bias {
                add_bias_to_rows(cpu, c, bias);
            }
        };
        // SAFETY: guaranteed by the caller.
        unsafe { c.update_as_f32(elements, prior, block) };
    }
}

/// An operand, the number of its rows (left) or columns (right), and how many of them a panel has.
#[derive(Clone, Copy)]
struct PackableOperand<'a> {
    operand: Operand<'a>,
    count: usize,
    width: usize,
}

/// Packs a range of rows or columns on all threads.
fn pack_shared(
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
    let tasks = if side.width.is_multiple_of(8) { (cpu.pool.threads() * 2).min(panels) } else { 1 };
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

/// The part of a matmul for one block of the depth and one range of the shared operand, which all
/// tasks read. The other operand is complete.
struct MatmulPass<'a> {
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
    /// Runs one task for each block of the other operand. If these are too few for the threads, the
    /// panels of the shared operand are divided into groups, too.
    fn run(&self, cpu: &Cpu, shared_width: usize) {
        let (width, k) = (self.other.width, self.depth.len());
        let panels = self.other.count.div_ceil(width);
        let target_tasks = if cpu.pool.threads() == 1 { 1 } else { cpu.pool.threads() * 3 };
        let panels_per_block = panels.div_ceil(target_tasks).clamp(1, (TASK_PACKED_LEN / (k * width)).max(1));
        let blocks = panels.div_ceil(panels_per_block);
        let shared_panels = self.range.len().div_ceil(shared_width);
        let panels_per_group = shared_panels.div_ceil((target_tasks / blocks).clamp(1, shared_panels));
        let groups = shared_panels.div_ceil(panels_per_group);
        cpu.pool.run(blocks * groups, &|task| {
            let first = task / groups * panels_per_block * width;
            let rows = (panels_per_block * width).min(self.other.count - first);
            let block = PackBlock { first_row: first, rows, depth: self.depth.clone(), panel_width: width };
            let is_packed = !self.unpacked.contains(!self.left_is_shared);
            let mut packed_other = cpu.scratch.take(if is_packed { block.packed_len() } else { 0 });
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
            let tiles = ResultBlock { c, ldc: self.ldc, rows, columns, k, add: self.add };
            multiply_block(cpu.instruction_set, tiles, a, b);
        });
    }
}

/// An operand that the micro-kernel reads without packing: a left operand whose rows are contiguous
/// along the depth, or a right operand whose columns are contiguous.
#[derive(Clone, Copy)]
struct UnpackedOperand<'a> {
    data: &'a [f32],
    /// Elements between rows of the left operand, or between terms of the right operand's sums.
    stride: usize,
}

impl<'a> UnpackedOperand<'a> {
    /// Returns `None` if the left operand has to be packed: if it is not `f32`, its rows are not
    /// contiguous, or it has fewer rows than a tile.
    fn from_rows(a: Operand<'a>, m: usize, mr: usize) -> Option<Self> {
        match a.data {
            Input::F32(data) if a.depth_stride == 1 && m >= mr => {
                Some(UnpackedOperand { data, stride: a.row_stride })
            }
            _ => None,
        }
    }

    /// Returns `None` if the right operand has to be packed: if it is not `f32`, its columns are
    /// not contiguous, or the last columns do not fill a vector.
    fn from_columns(b: Operand<'a>, n: usize) -> Option<Self> {
        match b.data {
            Input::F32(data) if b.row_stride == 1 && n.is_multiple_of(LANES) => {
                Some(UnpackedOperand { data, stride: b.depth_stride })
            }
            _ => None,
        }
    }

    /// Returns the address of element `first`. Panics unless `lines` runs of `len` elements from
    /// there are in the operand.
    fn runs_from(&self, first: usize, lines: usize, len: usize) -> *const f32 {
        self.data[first..first + (lines - 1) * self.stride + len].as_ptr()
    }
}

/// The operands that are not packed.
#[derive(Clone, Copy)]
struct UnpackedOperands<'a> {
    a: Option<UnpackedOperand<'a>>,
    b: Option<UnpackedOperand<'a>>,
}

impl UnpackedOperands<'_> {
    /// True if the left operand, or without `is_left` the right operand, is not packed.
    fn contains(&self, is_left: bool) -> bool {
        if is_left { self.a.is_some() } else { self.b.is_some() }
    }
}

/// The memory from which a task reads an operand of its block of the result.
#[derive(Clone, Copy)]
enum OperandSource<'a> {
    /// Packed panels of the block's rows or columns.
    Packed(&'a [f32]),
    /// The whole operand, and the row or column and the depth at which the block begins.
    InPlace(UnpackedOperand<'a>, usize, usize),
}

/// The block of the result that one task computes.
#[derive(Clone, Copy)]
struct ResultBlock {
    c: *mut f32,
    ldc: usize,
    rows: usize,
    columns: usize,
    k: usize,
    add: bool,
}

multiversion! {
    fn multiply_block = multiply_block_tiles(t: ResultBlock, a: OperandSource, b: OperandSource)
}

/// Computes a block of the result, tile after tile.
#[inline(always)]
fn multiply_block_tiles<S: Simd>(s: S, t: ResultBlock, a: OperandSource, b: OperandSource) {
    let resident = (RESIDENT_PANELS_LEN / (t.k * S::NR)).max(1);
    let panels = t.columns.div_ceil(S::NR);
    for first in (0..panels).step_by(resident) {
        let last = (first + resident).min(panels);
        for i in (0..t.rows).step_by(S::MR) {
            let rows = S::MR.min(t.rows - i);
            let (a, rs, ks, rows_above) = match a {
                OperandSource::Packed(a) => (a[i * t.k..].as_ptr(), 1, S::MR, 0),
                // The last tile begins above its rows, so that it is complete.
                OperandSource::InPlace(operand, i0, p) => {
                    let rows_above = S::MR - rows;
                    (
                        operand.runs_from((i0 + i - rows_above) * operand.stride + p, S::MR, t.k),
                        operand.stride,
                        1,
                        rows_above,
                    )
                }
            };
            for panel in first..last {
                let j = panel * S::NR;
                let columns = S::NR.min(t.columns - j);
                let (b, ldb) = match b {
                    OperandSource::Packed(b) => (b[j * t.k..].as_ptr(), S::NR),
                    OperandSource::InPlace(operand, j0, p) => {
                        (operand.runs_from(p * operand.stride + j0 + j, t.k, columns), operand.stride)
                    }
                };
                let tile = MicroTile {
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
                // SAFETY: the operands are complete, and `write_tile` writes only these rows and
                // columns.
                unsafe { write_tile(s, &tile, rows_above, rows, columns) };
            }
        }
    }
}

/// Computes a micro tile and writes a part of it to `t.c`: its first `columns` columns of `rows`
/// rows, without the first `rows_above` rows of the tile. A tile that is not written completely
/// passes through a buffer.
///
/// # Safety
/// The operands of `t` are complete panels. The rows and columns that are written are in `c`, and
/// only this thread accesses them.
#[inline(always)]
unsafe fn write_tile<S: Simd>(s: S, t: &MicroTile, rows_above: usize, rows: usize, columns: usize) {
    let nv = columns.div_ceil(LANES);
    if rows == S::MR && columns == nv * LANES {
        // SAFETY: the tile is complete.
        return unsafe { s.run_micro_kernel(nv, t) };
    }
    let mut buffer = [0.0f32; MAX_TILE_LEN];
    // SAFETY: the buffer has space for the largest tile.
    unsafe {
        s.run_micro_kernel(
            nv,
            &MicroTile { c: buffer.as_mut_ptr(), c_row_stride: nv * LANES, accumulate: false, ..*t },
        )
    };
    for i in 0..rows {
        // SAFETY: the caller guarantees `columns` elements of row i < rows.
        let c = unsafe { std::slice::from_raw_parts_mut(t.c.add(i * t.c_row_stride), columns) };
        for (c, x) in c.iter_mut().zip(&buffer[(rows_above + i) * nv * LANES..]) {
            *c = if t.accumulate { *c + x } else { *x };
        }
    }
}
