//! [`Tiles`]: the AMX instructions that configure a thread's tiles, and that multiply 16 or 32 rows
//! by 32 columns.
use std::arch::asm;

/// Number of rows of an AMX tile.
pub(super) const TILE_ROWS: usize = 16;
/// Number of products that one pair of AMX operand tiles contributes to each element of the result.
pub(super) const TILE_DEPTH: usize = 32;
/// Number of columns of the block of a result that AMX computes at a time: two tiles.
pub(super) const BLOCK_COLUMNS: usize = 32;
/// Number of `f32` elements in an AMX tile of the result.
const RESULT_TILE_LEN: usize = 16 * 16;
/// Number of `f32` elements in the largest block of a result that AMX computes at a time: 2 × 2
/// tiles.
pub(super) const MAX_BLOCK_LEN: usize = 4 * RESULT_TILE_LEN;
/// Number of bytes in an AMX tile.
pub(super) const TILE_BYTES: usize = 1024;

/// The memory operand of the instruction LDTILECFG, which sets the numbers of rows and of bytes per
/// row of each tile.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tile configuration for all matmuls: eight tiles with 16 rows of 64 bytes each. Operands are
/// padded with zeros instead of using smaller tiles, so that the configuration never changes.
static FULL_TILES: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Height of a block of the result that AMX computes at a time: 16 or 32 rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockHeight {
    /// One tile, 16 rows.
    One,
    /// Two tiles, 32 rows.
    Two,
}

impl BlockHeight {
    /// Returns the number of rows of the block.
    pub(super) fn rows(self) -> usize {
        match self {
            BlockHeight::One => TILE_ROWS,
            BlockHeight::Two => 2 * TILE_ROWS,
        }
    }
}

/// Addresses and strides in bytes of the operands and the result when AMX computes one block of the
/// result. A step is the product of [`TILE_DEPTH`] terms. All distances are in bytes.
#[derive(Clone, Copy)]
pub(super) struct BlockProduct {
    /// Address of the first tile of the left operand.
    pub(super) a: *const u16,
    /// Distance between the rows of the left operand.
    pub(super) a_row_stride: usize,
    /// Distance between the first 16 and the next 16 rows of the left operand.
    pub(super) a_tile_stride: usize,
    /// Distance between the steps of the left operand.
    pub(super) a_step_stride: usize,
    /// Address of the first tile of the right operand. Each tile is contiguous and follows the tile
    /// of the step before.
    pub(super) b: *const u16,
    /// Distance between the first 16 and the next 16 columns of the right operand.
    pub(super) b_tile_stride: usize,
    /// Address of the block of the result: its tiles one after another, row by row.
    pub(super) c: *mut f32,
    /// Number of steps, at least 1.
    pub(super) steps: usize,
    /// True if the products are added to the block, false if they are added to 0.
    pub(super) accumulate: bool,
}

/// The AMX tiles of the current thread, which are configured and ready for matmuls. Dropping them
/// returns them to their initial state.
///
/// Tiles are configured for each task, and not once per thread. A task takes a hundred thousand
/// cycles, and the configuration a few hundred. Threads that wait for tasks, or compute something
/// else, then have no tile state of 8 KiB that the kernel would save at each switch of threads and
/// in each signal frame, and a thread that ends leaves nothing behind.
pub(super) struct Tiles {
    /// The tiles belong to one thread.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Tiles {
    /// Configures the AMX tiles of the current thread, and returns a guard that releases the tiles
    /// when dropped. At most one value may exist per thread.
    ///
    /// # Safety
    ///
    /// The caller must ensure that the AMX instructions can be executed.
    pub(super) unsafe fn configure() -> Tiles {
        // SAFETY: the operand has 64 bytes and is valid. The compiler does not use tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &FULL_TILES, options(nostack, readonly, preserves_flags)) };
        Tiles { not_send: std::marker::PhantomData }
    }

    /// Multiplies `height` rows of the left operand by 32 columns of the right operand with AMX,
    /// and stores the block of the result.
    ///
    /// # Safety
    ///
    /// The caller must ensure that all tiles of the operands are readable, and that the block of
    /// the result is writable and used by no other thread.
    #[inline]
    pub(super) unsafe fn multiply(&self, height: BlockHeight, product: &BlockProduct) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match height {
                BlockHeight::One => multiply_one_row_of_tiles(product),
                BlockHeight::Two => multiply_two_rows_of_tiles(product),
            }
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the tiles are configured, so the instruction exists.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// Multiplies 32 rows of the left operand by 32 columns of the right operand, as 2 × 2 AMX tiles of
/// the result. Each step loads two tiles of each operand for four products.
///
/// The operands are not prefetched: 32 prefetches per step would need as many cycles of the load
/// units as the loads themselves.
///
/// # Safety
///
/// The caller must meet the requirements of [`Tiles::multiply`].
unsafe fn multiply_two_rows_of_tiles(p: &BlockProduct) {
    // SAFETY: the caller guarantees the operands and the result.
    unsafe {
        asm!(
            "test {adds}, {adds}",
            "jz 2f",
            "tileloadd tmm0, [{c} + {width}]",
            "tileloadd tmm1, [{c} + {width} + 1024]",
            "tileloadd tmm2, [{c} + {width} + 2048]",
            "tileloadd tmm3, [{c} + {width} + 3072]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "tileloadd tmm4, [{a0} + {row}]",
            "tileloadd tmm6, [{b0} + {width}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {width}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a1} + {row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, {step}",
            "add {a1}, {step}",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{c} + {width}], tmm0",
            "tilestored [{c} + {width} + 1024], tmm1",
            "tilestored [{c} + {width} + 2048], tmm2",
            "tilestored [{c} + {width} + 3072], tmm3",
            a0 = inout(reg) p.a => _,
            a1 = inout(reg) p.a.wrapping_byte_add(p.a_tile_stride) => _,
            b0 = inout(reg) p.b => _,
            b1 = inout(reg) p.b.wrapping_byte_add(p.b_tile_stride) => _,
            c = in(reg) p.c,
            width = in(reg) 64usize,
            row = in(reg) p.a_row_stride,
            step = in(reg) p.a_step_stride,
            steps = inout(reg) p.steps => _,
            adds = in(reg) usize::from(p.accumulate),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Multiplies 16 rows of the left operand by 32 columns of the right operand, as 1 × 2 AMX tiles of
/// the result.
///
/// # Safety
///
/// The caller must meet the requirements of [`Tiles::multiply`].
unsafe fn multiply_one_row_of_tiles(p: &BlockProduct) {
    // SAFETY: the caller guarantees the operands and the result.
    unsafe {
        asm!(
            "test {adds}, {adds}",
            "jz 2f",
            "tileloadd tmm0, [{c} + {width}]",
            "tileloadd tmm1, [{c} + {width} + 1024]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "3:",
            "tileloadd tmm4, [{a0} + {row}]",
            "tileloadd tmm6, [{b0} + {width}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {width}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {a0}, {step}",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{c} + {width}], tmm0",
            "tilestored [{c} + {width} + 1024], tmm1",
            a0 = inout(reg) p.a => _,
            b0 = inout(reg) p.b => _,
            b1 = inout(reg) p.b.wrapping_byte_add(p.b_tile_stride) => _,
            c = in(reg) p.c,
            width = in(reg) 64usize,
            row = in(reg) p.a_row_stride,
            step = in(reg) p.a_step_stride,
            steps = inout(reg) p.steps => _,
            adds = in(reg) usize::from(p.accumulate),
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
