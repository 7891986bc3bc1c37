//! Blocks of bf16 matmuls: multiplies packed panels by the rule of [`super::bf16_rule`], with
//! vector instructions or with the tiles of AMX.
#[cfg(target_arch = "x86_64")]
use super::amx::TilePair;
use super::amx_packing::{TILE_ELEMENTS, TILE_PANEL};
use super::backend::Cpu;
use super::bf16_fma::Bf16Tile;
use super::bf16_rule::{BF16_BLOCK, Bf16Panels};
use super::instruction_set::InstructionSet;
use super::operand::{PanelElements, PanelFormat};
use super::simd::{LANES, Simd};

/// Number of bytes of packed panels of the right operand that stay in the L2 cache while they are
/// multiplied by strips of the left operand with vector instructions.
const RESIDENT_PANEL_BYTES: usize = 192 << 10;
/// Number of bytes of tiles of the right operand that stay in the L2 cache, which has 2 MiB on CPUs
/// with AMX, while they are multiplied by strips of the left operand.
const RESIDENT_TILE_BYTES: usize = 1 << 20;

/// The instructions with which a bf16 matmul is computed. All give the same bits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bf16Kernel {
    /// Fused multiply-adds of an instruction set.
    Fma(InstructionSet),
    /// AMX.
    Tiles,
}

impl Bf16Kernel {
    /// Selects the instructions of a backend.
    pub(crate) fn select(cpu: &Cpu) -> Self {
        if cpu.uses_amx { Bf16Kernel::Tiles } else { Bf16Kernel::Fma(cpu.instruction_set) }
    }

    /// Returns the formats of panels of the left and the right operand for AMX.
    pub(crate) fn tile_formats() -> [PanelFormat; 2] {
        [PanelElements::LeftTiles, PanelElements::RightTiles]
            .map(|elements| PanelFormat { width: TILE_PANEL, elements })
    }
}

/// The block of a matmul's result that one task computes.
#[derive(Clone, Copy)]
pub(crate) struct ResultBlock {
    /// Address of the block's first element.
    pub(crate) c: *mut f32,
    /// Number of elements from one row of the result to the next.
    pub(crate) ldc: usize,
    /// Number of rows.
    pub(crate) rows: usize,
    /// Number of columns.
    pub(crate) columns: usize,
    /// Number of terms that are added to each element.
    pub(crate) k: usize,
    /// True if the sums are added to the result, false if they overwrite it.
    pub(crate) add: bool,
}

impl ResultBlock {
    /// Copies a part of the result to `tile`, or fills it with zeros if the result is overwritten.
    /// `part` is the first row, the first column and the numbers of rows and columns of the part.
    /// The rows of `tile` have `width` elements.
    ///
    /// # Safety
    ///
    /// The caller must ensure that only this thread accesses the part.
    unsafe fn load(&self, tile: &mut [f32], width: usize, [i, j, rows, columns]: [usize; 4]) {
        if !self.add {
            return tile.fill(0.0);
        }
        for (row, tile) in tile.chunks_exact_mut(width).take(rows).enumerate() {
            // SAFETY: the part is in the block.
            let c = unsafe { std::slice::from_raw_parts(self.c.add((i + row) * self.ldc + j), columns) };
            tile[..columns].copy_from_slice(c);
        }
    }

    /// Copies `tile` to a part of the result, as [`Self::load`] does in the other direction.
    ///
    /// # Safety
    ///
    /// The caller must meet the requirements of [`Self::load`].
    unsafe fn store(&self, tile: &[f32], width: usize, [i, j, rows, columns]: [usize; 4]) {
        for (row, tile) in tile.chunks_exact(width).take(rows).enumerate() {
            // SAFETY: the part is in the block.
            let c = unsafe { std::slice::from_raw_parts_mut(self.c.add((i + row) * self.ldc + j), columns) };
            c.copy_from_slice(&tile[..columns]);
        }
    }
}

/// Multiplies packed panels and writes the product to a block of the result.
pub(crate) fn multiply_bf16_block(kernel: Bf16Kernel, t: ResultBlock, a: &[f32], b: &[f32]) {
    match kernel {
        #[cfg(target_arch = "x86_64")]
        Bf16Kernel::Fma(set @ InstructionSet::Avx512) => multiply_panels::<super::x86::Avx512>(set, t, a, b),
        #[cfg(target_arch = "x86_64")]
        Bf16Kernel::Fma(set @ InstructionSet::Avx2) => multiply_panels::<super::x86::Avx2>(set, t, a, b),
        Bf16Kernel::Fma(set @ InstructionSet::Portable) => {
            multiply_panels::<super::portable::Portable>(set, t, a, b);
        }
        Bf16Kernel::Tiles => multiply_tiles(t, bytemuck::cast_slice(a), bytemuck::cast_slice(b)),
    }
}

/// Multiplies panels of `f32` elements, one tile of the micro-kernel after another.
fn multiply_panels<S: Simd>(set: InstructionSet, t: ResultBlock, a: &[f32], b: &[f32]) {
    let panels = t.columns.div_ceil(S::TILE_COLUMNS);
    let resident = (RESIDENT_PANEL_BYTES / (4 * t.k * S::TILE_COLUMNS)).max(1);
    let mut tile = Bf16Tile::new();
    for first in (0..panels).step_by(resident) {
        let last = (first + resident).min(panels);
        for i in (0..t.rows).step_by(S::TILE_ROWS) {
            for panel in first..last {
                let j = panel * S::TILE_COLUMNS;
                let columns = S::TILE_COLUMNS.min(t.columns - j);
                let vectors = columns.div_ceil(LANES);
                let part = [i, j, S::TILE_ROWS.min(t.rows - i), columns];
                let len = S::TILE_ROWS * vectors * LANES;
                let panels = Bf16Panels {
                    a: a[i * t.k..][..S::TILE_ROWS * t.k].as_ptr(),
                    b: b[j * t.k..][..S::TILE_COLUMNS * t.k].as_ptr(),
                    b_stride: S::TILE_COLUMNS,
                    depth: t.k,
                };
                // SAFETY: the slices are whole panels, and only this task writes the block.
                unsafe {
                    t.load(&mut tile.c[..len], vectors * LANES, part);
                    tile.add_product(set, panels, vectors);
                    t.store(&tile.c[..len], vectors * LANES, part);
                }
            }
        }
    }
}

/// Multiplies panels of bf16 tiles with AMX, one pair of panels after another.
#[cfg(target_arch = "x86_64")]
fn multiply_tiles(t: ResultBlock, a: &[u16], b: &[u16]) {
    let blocks = t.k.div_ceil(BF16_BLOCK);
    let panel_len = 2 * blocks * TILE_ELEMENTS;
    let panels = t.columns.div_ceil(TILE_PANEL);
    let resident = (RESIDENT_TILE_BYTES / (2 * panel_len)).max(1);
    let mut buffer = [0.0f32; TILE_PANEL * TILE_PANEL];
    for first in (0..panels).step_by(resident) {
        let last = (first + resident).min(panels);
        for i in (0..t.rows).step_by(TILE_PANEL) {
            for panel in first..last {
                let j = panel * TILE_PANEL;
                let part = [i, j, TILE_PANEL.min(t.rows - i), TILE_PANEL.min(t.columns - j)];
                let pair = TilePair {
                    a: a[i / TILE_PANEL * panel_len..][..panel_len].as_ptr(),
                    b: b[panel * panel_len..][..panel_len].as_ptr(),
                    blocks,
                };
                // SAFETY: the slices are whole panels, and only this task writes the block.
                unsafe {
                    if part[2..] == [TILE_PANEL; 2] {
                        pair.multiply(t.c.add(i * t.ldc + j), t.ldc, t.add);
                    } else {
                        t.load(&mut buffer, TILE_PANEL, part);
                        pair.multiply(buffer.as_mut_ptr(), TILE_PANEL, t.add);
                        t.store(&buffer, TILE_PANEL, part);
                    }
                }
            }
        }
    }
}

/// Never called, because only x86-64 has AMX.
#[cfg(not(target_arch = "x86_64"))]
fn multiply_tiles(_: ResultBlock, _: &[u16], _: &[u16]) {
    unreachable!("only x86-64 has AMX")
}
