//! AMX, the matrix unit of Intel's server CPUs: configuration and the micro-kernel.
//!
//! Tiles have 16 rows of 64 bytes. Every thread configures its tiles before it first uses them, and
//! keeps the configuration.
use super::amx_packing::TILE;
use core::arch::asm;
use std::cell::Cell;

/// Number of bytes in a row of a tile.
const TILE_ROW_BYTES: usize = 64;
/// Number of tiles.
const TILES: usize = 8;

/// The operand of `ldtilecfg`: the shape of each tile.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

/// Configures eight tiles of 16 rows of 64 bytes on this thread, unless it has configured them.
///
/// # Safety
///
/// The caller must ensure that the process may use AMX.
unsafe fn configure_tiles() {
    thread_local! {
        static IS_CONFIGURED: Cell<bool> = const { Cell::new(false) };
    }
    if IS_CONFIGURED.get() {
        return;
    }
    let mut config =
        TileConfig { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
    config.bytes_per_row[..TILES].fill(TILE_ROW_BYTES as u16);
    config.rows[..TILES].fill(TILE as u8);
    // SAFETY: the instruction reads the configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
    IS_CONFIGURED.set(true);
}

/// A panel of the left operand and a panel of the right operand of a matmul, packed as
/// [`super::amx_packing`] describes.
#[derive(Clone, Copy)]
pub(crate) struct TilePair {
    /// Address of the panel of the left operand.
    pub(crate) a: *const u16,
    /// Address of the panel of the right operand.
    pub(crate) b: *const u16,
    /// Number of blocks of 32 terms.
    pub(crate) blocks: usize,
}

impl TilePair {
    /// Multiplies the panels. Adds the 32 × 32 elements to `c` if `add`, otherwise overwrites `c`,
    /// whose rows are `stride` elements apart.
    ///
    /// # Safety
    ///
    /// The caller must ensure that the process may use AMX, that the panels are complete, and that
    /// 32 rows of 32 elements of `c` are accessed only by this thread.
    pub(crate) unsafe fn multiply(self, c: *mut f32, stride: usize, add: bool) {
        // SAFETY: guaranteed by the caller. The tiles of C are tmm0 to tmm3, those of A tmm4 and
        // tmm5, those of B tmm6 and tmm7.
        unsafe {
            configure_tiles();
            asm!(
                "test {add:e}, {add:e}",
                "jnz 2f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 3f",
                "2:",
                "tileloadd tmm0, [{c} + {stride} * 1]",
                "tileloadd tmm1, [{c} + {stride} * 1 + 64]",
                "tileloadd tmm2, [{low} + {stride} * 1]",
                "tileloadd tmm3, [{low} + {stride} * 1 + 64]",
                "3:",
                "tileloadd tmm4, [{a} + {row} * 1]",
                "tileloadd tmm6, [{b} + {row} * 1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {row} * 1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a} + {row} * 1 + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {n}",
                "jnz 3b",
                "tilestored [{c} + {stride} * 1], tmm0",
                "tilestored [{c} + {stride} * 1 + 64], tmm1",
                "tilestored [{low} + {stride} * 1], tmm2",
                "tilestored [{low} + {stride} * 1 + 64], tmm3",
                add = in(reg) u32::from(add),
                a = inout(reg) self.a => _,
                b = inout(reg) self.b => _,
                n = inout(reg) self.blocks => _,
                c = in(reg) c,
                low = in(reg) c.add(TILE * stride),
                stride = in(reg) stride * 4,
                row = in(reg) TILE_ROW_BYTES,
                options(nostack)
            );
        }
    }
}
