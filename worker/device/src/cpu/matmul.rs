//! Matrix products: `y = x·wᵀ` and its two backward products, all as `c[m,n] (=|+=) a·b`.
//!
//! The depth is cut into equal blocks by its length alone; each element is the sum of its blocks' chains in rising
//! order. Everything else about the cutting is free (see [`super::kernel`]) and follows caches and threads: of each
//! block of the depth the smaller operand is packed once for all tasks, the larger by the task that uses it, just before. A left
//! operand whose rows are contiguous is not packed at all, nor a right one whose columns lie side by side.
use super::Cpu;
use super::bias::add_to_rows;
use super::half::{In, Old, Out};
use super::kernel::Tile;
use super::pack::{Block, Operand, pack};
use super::pool::Parts;
use super::simd::{LANES, Level, MAX_TILE, Simd, multiversion};
use crate::ops::Write;
use std::ops::Range;

/// Longest block of the depth: a strip of the left operand then takes 16 KB of the first-level cache.
const DEPTH: usize = 512;
/// Elements of the operand that is packed for all tasks at once.
const SHARED: usize = 1 << 20;
/// Elements of the operand that a task packs for itself: half of a second-level cache.
const OWN: usize = 96 << 10;
/// Elements of the right operand's panels that stay in the second-level cache while the left one's strips go by; with what comes
/// of them, and what is fetched ahead, there is no room for more.
const RESIDENT: usize = 48 << 10;

/// Shape of one product and how its result is written.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Elements between the rows of the result; `n` when it stands alone.
    pub(crate) ldc: usize,
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
    let Product { m, n, k, ldc, write } = shape;
    if m == 0 || n == 0 {
        return;
    }
    assert!(ldc >= n && c.len() >= (m - 1) * ldc + n, "the result doesn't fit");
    if k == 0 && write == Write::Set {
        c.chunks_mut(ldc).take(m).for_each(|row| row[..n].fill(0.0));
    }
    if k == 0 {
        return;
    }
    let (mr, nr) = micro_shape(cpu.level);
    let (a, b) = (Side { operand: a, count: m, width: mr }, Side { operand: b, count: n, width: nr });
    let a_shared = m < n;
    let (shared, own) = if a_shared { (a, b) } else { (b, a) };
    let kc = depth_block(k);
    let held = (SHARED / kc / shared.width).max(1) * shared.width;
    let lies = Lies { a: Lines::of_rows(a.operand, m, mr), b: Lines::of_columns(b.operand, n) };
    let needs_packing = !lies.has(a_shared);
    let room = if needs_packing { held.min(shared.count.next_multiple_of(shared.width)) * kc + 8 } else { 0 };
    let mut packed = cpu.scratch.take(room);
    let c = Parts::new(c);
    for p0 in (0..k).step_by(kc) {
        let depth = p0..(p0 + kc).min(k);
        for i0 in (0..shared.count).step_by(held) {
            let range = i0..(i0 + held).min(shared.count);
            if needs_packing {
                pack_shared(cpu, &mut packed, shared, range.clone(), depth.clone());
            }
            let add = p0 > 0 || write == Write::Add;
            let pass =
                Pass { c: &c, ldc, add, packed: &packed, a_shared, lies, range, own, depth: depth.clone() };
            pass.run(cpu, shared.width);
        }
    }
}

/// Elements of a 16-bit result that are summed in `f32` at once, and fewest rows of it (below which packing the right
/// operand again for each block of rows would cost too much).
const WIDE: usize = 1 << 20;
const FEWEST_ROWS: usize = 256;

/// As [`product`] for a result of any element type; 16-bit ones are rounded once.
pub(crate) fn product_to(cpu: &Cpu, c: Out, a: Operand, b: Operand, shape: Product) {
    // SAFETY: the result is this call's own.
    unsafe { product_part(cpu, &c, 0, a, b, shape) }
}

/// As [`product_to`], with a bias added to every row before it is rounded.
pub(crate) fn product_bias(cpu: &Cpu, c: Out, a: Operand, b: Operand, bias: Option<In>, shape: Product) {
    let bias = bias.map(|b| b.all(cpu));
    // SAFETY: the result is this call's own.
    unsafe { rows_of_product(cpu, &c, 0, a, b, bias.as_deref(), shape) }
}

/// As [`product_to`] for a result that begins at element `first` of `c`.
///
/// # Safety
/// Nobody else writes or reads the result's elements meanwhile.
pub(crate) unsafe fn product_part(cpu: &Cpu, c: &Out, first: usize, a: Operand, b: Operand, shape: Product) {
    // SAFETY: as the caller promises.
    unsafe { rows_of_product(cpu, c, first, a, b, None, shape) }
}

/// Block after block of rows, each rounded when it is done.
///
/// # Safety
/// As [`product_part`].
unsafe fn rows_of_product(
    cpu: &Cpu,
    c: &Out,
    first: usize,
    a: Operand,
    b: Operand,
    bias: Option<&[f32]>,
    shape: Product,
) {
    let Product { m, n, ldc, write, .. } = shape;
    assert!(ldc == n, "the result stands alone");
    let rows = if c.is_f32() { m } else { (WIDE / n.max(1)).max(FEWEST_ROWS).min(m) };
    let old = if write == Write::Add { Old::Read } else { Old::Lost };
    for i in (0..m).step_by(rows.max(1)) {
        let m = rows.min(m - i);
        let elements = first + i * n..first + (i + m) * n;
        let block = |c: &mut [f32]| {
            product(cpu, c, a.from(i), b, Product { m, ..shape });
            if let Some(bias) = bias {
                add_to_rows(cpu, c, bias);
            }
        };
        // SAFETY: as the caller promises.
        unsafe { c.through(elements, old, block) };
    }
}

/// An operand, its number of rows (left) or columns (right), and how many of them a panel holds.
#[derive(Clone, Copy)]
struct Side<'a> {
    operand: Operand<'a>,
    count: usize,
    width: usize,
}

/// Packs a range of rows or columns, panel after panel.
fn pack_shared(cpu: &Cpu, packed: &mut [f32], side: Side, range: Range<usize>, depth: Range<usize>) {
    let panels = range.len().div_ceil(side.width);
    // A task takes neighbouring panels: it then reads longer runs of a source that is contiguous along them. Tasks write
    // apart from each other only where the panels' width leaves no surplus.
    let tasks = if side.width.is_multiple_of(8) { (cpu.pool.threads() * 2).min(panels) } else { 1 };
    let group = panels.div_ceil(tasks) * side.width;
    let len = range.len();
    let parts = Parts::new(packed);
    cpu.pool.run(len.div_ceil(group), &|task| {
        let rows = group.min(len - task * group);
        let block = Block { i0: range.start + task * group, rows, depth: depth.clone(), width: side.width };
        let start = task * group * depth.len();
        // SAFETY: each panel is packed by one task.
        let dst = unsafe { parts.part(start..start + block.packed_len()) };
        pack(cpu.level, dst, side.operand, block);
    });
}

/// One block of the depth × a range of the shared operand × all of the other.
struct Pass<'a> {
    c: &'a Parts<'a, f32>,
    ldc: usize,
    add: bool,
    packed: &'a [f32],
    /// The shared operand is the left one.
    a_shared: bool,
    lies: Lies<'a>,
    /// Rows or columns of the shared operand.
    range: Range<usize>,
    own: Side<'a>,
    depth: Range<usize>,
}

impl Pass<'_> {
    /// Tasks are blocks of the other operand, and groups of shared panels when the blocks are too few.
    fn run(&self, cpu: &Cpu, shared_width: usize) {
        let (width, k) = (self.own.width, self.depth.len());
        let panels = self.own.count.div_ceil(width);
        let wanted = if cpu.pool.threads() == 1 { 1 } else { cpu.pool.threads() * 3 };
        let per_block = panels.div_ceil(wanted).clamp(1, (OWN / (k * width)).max(1));
        let blocks = panels.div_ceil(per_block);
        let shared_panels = self.range.len().div_ceil(shared_width);
        let per_group = shared_panels.div_ceil((wanted / blocks).clamp(1, shared_panels));
        let groups = shared_panels.div_ceil(per_group);
        cpu.pool.run(blocks * groups, &|task| {
            let first = task / groups * per_block * width;
            let rows = (per_block * width).min(self.own.count - first);
            let block = Block { i0: first, rows, depth: self.depth.clone(), width };
            let needs_packing = !self.lies.has(!self.a_shared);
            let mut own = cpu.scratch.take(if needs_packing { block.packed_len() } else { 0 });
            if needs_packing {
                pack(cpu.level, &mut own, self.own.operand, block);
            }
            let from = task % groups * per_group * shared_width;
            let to = (from + per_group * shared_width).min(self.range.len());
            let shared = self.packed.get(from * k..).unwrap_or_default();
            let of_shared = (self.range.start + from, to - from);
            let ((i0, rows), (j0, columns), a, b) = if self.a_shared {
                (of_shared, (first, rows), shared, &own[..])
            } else {
                ((first, rows), of_shared, &own[..], shared)
            };
            let p = self.depth.start;
            let a = self.lies.a.map_or(Place::Packed(a), |all| Place::AsItLies(all, i0, p));
            let b = self.lies.b.map_or(Place::Packed(b), |all| Place::AsItLies(all, j0, p));
            // SAFETY: row i0, column j0 lie in c.
            let c = unsafe { self.c.as_mut_ptr().add(i0 * self.ldc + j0) };
            let tiles = Tiles { c, ldc: self.ldc, rows, columns, k, add: self.add };
            multiply_packed(cpu.level, tiles, a, b);
        });
    }
}

/// Rows of a left operand that are contiguous along the depth, or columns of a right one that lie side by side: the micro tile
/// takes them from there.
#[derive(Clone, Copy)]
struct Lines<'a> {
    data: &'a [f32],
    /// Elements between rows of the left operand, or between places of the depth of the right one.
    stride: usize,
}

impl<'a> Lines<'a> {
    /// `None`: it has to be packed, as another type, as columns, or since it has too few rows for a tile.
    fn of_rows(a: Operand<'a>, m: usize, mr: usize) -> Option<Self> {
        match a.data {
            In::F32(data) if a.depth == 1 && m >= mr => Some(Lines { data, stride: a.row }),
            _ => None,
        }
    }

    /// `None`: it has to be packed, as another type, as rows, or since the last columns are no whole vector.
    fn of_columns(b: Operand<'a>, n: usize) -> Option<Self> {
        match b.data {
            In::F32(data) if b.row == 1 && n.is_multiple_of(LANES) => Some(Lines { data, stride: b.depth }),
            _ => None,
        }
    }

    /// The first of `lines` runs of `len` elements, all of which are there.
    fn at(&self, first: usize, lines: usize, len: usize) -> *const f32 {
        self.data[first..first + (lines - 1) * self.stride + len].as_ptr()
    }
}

/// What isn't packed of the operands.
#[derive(Clone, Copy)]
struct Lies<'a> {
    a: Option<Lines<'a>>,
    b: Option<Lines<'a>>,
}

impl Lies<'_> {
    /// Is the left operand, or the right one, taken as it lies?
    fn has(&self, left: bool) -> bool {
        if left { self.a.is_some() } else { self.b.is_some() }
    }
}

/// Where an operand of a part of the result is.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// Strips or panels of this part's rows or columns and depth.
    Packed(&'a [f32]),
    /// All of it, and where this part begins: row or column, depth.
    AsItLies(Lines<'a>, usize, usize),
}

/// The part of the result that packed strips × packed panels make.
#[derive(Clone, Copy)]
struct Tiles {
    c: *mut f32,
    ldc: usize,
    rows: usize,
    columns: usize,
    k: usize,
    add: bool,
}

multiversion! {
    fn multiply_packed = multiply_tiles(t: Tiles, a: Place, b: Place)
}

#[inline(always)]
fn multiply_tiles<S: Simd>(s: S, t: Tiles, a: Place, b: Place) {
    let resident = (RESIDENT / (t.k * S::NR)).max(1);
    let panels = t.columns.div_ceil(S::NR);
    for first in (0..panels).step_by(resident) {
        let last = (first + resident).min(panels);
        for i in (0..t.rows).step_by(S::MR) {
            let rows = S::MR.min(t.rows - i);
            let (a, rs, ks, above) = match a {
                Place::Packed(a) => (a[i * t.k..].as_ptr(), 1, S::MR, 0),
                // The last tile begins above its rows, so that it is whole.
                Place::AsItLies(all, i0, p) => {
                    let above = S::MR - rows;
                    (all.at((i0 + i - above) * all.stride + p, S::MR, t.k), all.stride, 1, above)
                }
            };
            for panel in first..last {
                let j = panel * S::NR;
                let columns = S::NR.min(t.columns - j);
                let (b, ldb) = match b {
                    Place::Packed(b) => (b[j * t.k..].as_ptr(), S::NR),
                    Place::AsItLies(all, j0, p) => {
                        (all.at(p * all.stride + j0 + j, t.k, columns), all.stride)
                    }
                };
                let tile = Tile {
                    k: t.k,
                    a,
                    rs,
                    ks,
                    b,
                    ldb,
                    // SAFETY: row i, column j lie in c.
                    c: unsafe { t.c.add(i * t.ldc + j) },
                    ldc: t.ldc,
                    add: t.add,
                };
                // SAFETY: the operands are whole, and `write_tile` writes only the rows and columns given.
                unsafe { write_tile(s, &tile, above, rows, columns) };
            }
        }
    }
}

/// A tile of which `rows` below the first `above`, and `columns`, are wanted; a cut one goes through a buffer. `t.c` is the first
/// wanted row's.
///
/// # Safety
/// `t`'s operands are whole panels; the rows and columns of `c` that exist are writable by this thread alone.
#[inline(always)]
unsafe fn write_tile<S: Simd>(s: S, t: &Tile, above: usize, rows: usize, columns: usize) {
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
        for (c, x) in c.iter_mut().zip(&whole[(above + i) * nv * LANES..]) {
            *c = if t.add { *c + x } else { *x };
        }
    }
}
