//! Matrix products: `y = x·wᵀ` and its two backward products, all as `c[m,n] (=|+=) a·b`.
//!
//! The depth is cut into equal blocks by its length alone; each element is the sum of its blocks' chains in rising
//! order. Everything else about the cutting is free (see [`super::kernel`]) and follows caches and threads.
use super::Cpu;
use super::kernel::Tile;
use super::pack::{Block, Operand, pack};
use super::pool::Parts;
use super::simd::{LANES, Level, MAX_TILE, Simd, multiversion};
use crate::ops::Write;

/// Longest block of the depth: a strip of the left operand then takes 16 KB of the first-level cache.
const DEPTH: usize = 512;
/// Elements of the packed right operand that are held at once.
const PACKED: usize = 1 << 20;
/// Strips of the left operand that are packed at once by one task.
const STRIPS: usize = 16;
/// Elements of the right operand's panels that stay in the second-level cache while the strips go by.
const RESIDENT: usize = 96 << 10;

/// Shape of one product and how its result is written.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) write: Write,
}

/// Micro tile of an instruction set: rows, columns.
fn micro_shape(level: Level) -> (usize, usize) {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => (super::x86::Avx512::MR, super::x86::Avx512::NR),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => (super::x86::Avx2::MR, super::x86::Avx2::NR),
        Level::Portable => (super::simd::Portable::MR, super::simd::Portable::NR),
    }
}

/// Length of the blocks of a depth of `k`; the last may be shorter.
fn depth_block(k: usize) -> usize {
    k.div_ceil(k.div_ceil(DEPTH))
}

/// `c[m,n] (=|+=) Σ_p a(i,p)·b(j,p)`.
pub(crate) fn product(cpu: &Cpu, c: &mut [f32], a: Operand, b: Operand, shape: Product) {
    let Product { m, n, k, write } = shape;
    if k == 0 && write == Write::Set {
        c.fill(0.0);
    }
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let (_, nr) = micro_shape(cpu.level);
    // Columns whose packed operand is held at once.
    let held = (PACKED / k / nr).max(8) * nr;
    let c = Parts::new(c);
    let mut packed = cpu.scratch.take(n.min(held).next_multiple_of(nr) * k);
    for j0 in (0..n).step_by(held) {
        let columns = Columns { j0, count: held.min(n - j0) };
        pack_right(cpu, &mut packed, b, columns, k);
        multiply(cpu, &c, a, &packed, columns, shape);
    }
}

/// A range of columns of the result.
#[derive(Clone, Copy)]
struct Columns {
    j0: usize,
    count: usize,
}

/// Packs the right operand of `columns`: depth block after depth block, each its panels one after the other.
fn pack_right(cpu: &Cpu, packed: &mut [f32], b: Operand, columns: Columns, k: usize) {
    let (_, nr) = micro_shape(cpu.level);
    let kc = depth_block(k);
    let panels = columns.count.div_ceil(nr);
    // A task takes neighbouring panels: where the source is contiguous along the columns it reads longer runs.
    let group = (panels.div_ceil(cpu.pool.threads() * 4)).max(4);
    let groups = panels.div_ceil(group);
    let parts = Parts::new(packed);
    cpu.pool.run(k.div_ceil(kc) * groups, &|task| {
        let (p0, first) = (task / groups * kc, task % groups * group);
        let rows = (group * nr).min(columns.count - first * nr);
        let block = Block { i0: columns.j0 + first * nr, rows, p0, k: kc.min(k - p0), width: nr };
        let start = p0 * panels * nr + first * nr * block.k;
        // SAFETY: each (depth block, panel) is packed by one task.
        let dst = unsafe { parts.part(start..start + block.packed_len()) };
        pack(cpu.level, dst, b, block);
    });
}

/// Multiplies with a packed right operand; tasks are blocks of rows × groups of panels.
fn multiply(cpu: &Cpu, c: &Parts<f32>, a: Operand, packed: &[f32], columns: Columns, shape: Product) {
    let (mr, nr) = micro_shape(cpu.level);
    let strips = shape.m.div_ceil(mr);
    let wanted = if cpu.pool.threads() == 1 { 1 } else { cpu.pool.threads() * 3 };
    let per_task = strips.div_ceil(wanted).clamp(1, STRIPS);
    let row_blocks = strips.div_ceil(per_task);
    // Few rows: split the columns too.
    let panels = columns.count.div_ceil(nr);
    let groups = (wanted / row_blocks).clamp(1, panels);
    let per_group = panels.div_ceil(groups);
    let groups = panels.div_ceil(per_group);
    cpu.pool.run(row_blocks * groups, &|task| {
        let (rows, group) = (task / groups, task % groups);
        let first = rows * per_task * mr;
        let mut strip = cpu.scratch.take((per_task * mr) * depth_block(shape.k) + 8);
        let work = Work {
            level: cpu.level,
            i0: first,
            rows: (per_task * mr).min(shape.m - first),
            columns,
            panels: (group * per_group, ((group + 1) * per_group).min(panels)),
            shape,
        };
        work.run(c, a, packed, &mut strip);
    });
}

/// One task of [`multiply`].
struct Work {
    level: Level,
    i0: usize,
    rows: usize,
    columns: Columns,
    panels: (usize, usize),
    shape: Product,
}

impl Work {
    fn run(&self, c: &Parts<f32>, a: Operand, packed: &[f32], strip: &mut [f32]) {
        let (mr, nr) = micro_shape(self.level);
        let k = self.shape.k;
        let kc = depth_block(k);
        let panels = self.columns.count.div_ceil(nr);
        for p0 in (0..k).step_by(kc) {
            let block = Block { i0: self.i0, rows: self.rows, p0, k: kc.min(k - p0), width: mr };
            pack(self.level, strip, a, block);
            let right = &packed[p0 * panels * nr..][..panels * nr * block.k];
            let add = p0 > 0 || self.shape.write == Write::Add;
            let tiles = Tiles {
                // SAFETY: row i0 and column j0 lie in c[m,n].
                c: unsafe { c.as_mut_ptr().add(self.i0 * self.shape.n + self.columns.j0) },
                ldc: self.shape.n,
                rows: self.rows,
                columns: self.columns.count,
                panels: self.panels,
                k: block.k,
                add,
            };
            multiply_packed(self.level, tiles, strip, right);
        }
    }
}

/// The part of the result that packed strips × packed panels make.
#[derive(Clone, Copy)]
struct Tiles {
    c: *mut f32,
    ldc: usize,
    rows: usize,
    columns: usize,
    panels: (usize, usize),
    k: usize,
    add: bool,
}

multiversion! {
    fn multiply_packed = multiply_tiles(t: Tiles, a: &[f32], b: &[f32])
}

#[inline(always)]
fn multiply_tiles<S: Simd>(s: S, t: Tiles, a: &[f32], b: &[f32]) {
    let resident = (RESIDENT / (t.k * S::NR)).max(1);
    let (mut first, end) = t.panels;
    while first < end {
        let last = (first + resident).min(end);
        for i in (0..t.rows).step_by(S::MR) {
            for panel in first..last {
                let j = panel * S::NR;
                let columns = S::NR.min(t.columns - j);
                let tile = Tile {
                    k: t.k,
                    a: a[i * t.k..].as_ptr(),
                    rs: 1,
                    ks: S::MR,
                    b: b[j * t.k..].as_ptr(),
                    ldb: S::NR,
                    // SAFETY: row i, column j lie in c.
                    c: unsafe { t.c.add(i * t.ldc + j) },
                    ldc: t.ldc,
                    add: t.add,
                };
                // SAFETY: the packed panels are whole, and `write_tile` writes only the rows and columns given.
                unsafe { write_tile(s, &tile, S::MR.min(t.rows - i), columns) };
            }
        }
        first = last;
    }
}

/// A tile of which `rows` and `columns` exist; a cut one goes through a buffer.
///
/// # Safety
/// `t`'s operands are whole panels; the rows and columns of `c` that exist are writable by this thread alone.
#[inline(always)]
unsafe fn write_tile<S: Simd>(s: S, t: &Tile, rows: usize, columns: usize) {
    let nv = columns.div_ceil(LANES);
    if rows == S::MR && columns == nv * LANES {
        // SAFETY: the tile is whole.
        return unsafe { s.micro(nv, t) };
    }
    let mut whole = [0.0f32; MAX_TILE];
    // SAFETY: the buffer takes the largest tile.
    unsafe { s.micro(nv, &Tile { c: whole.as_mut_ptr(), ldc: nv * LANES, add: false, ..*t }) };
    for i in 0..rows {
        // SAFETY: row i < rows exists, `columns` long.
        let c = unsafe { std::slice::from_raw_parts_mut(t.c.add(i * t.ldc), columns) };
        for (c, x) in c.iter_mut().zip(&whole[i * nv * LANES..]) {
            *c = if t.add { *c + x } else { *x };
        }
    }
}
