//! [`gives_right_results`]: compares sums that AMX computes with the prescribed order and rounding
//! of bf16 sums, before AMX is used for the first time.
//!
//! A CPU or hypervisor with an error in these instructions would otherwise train with wrong bits.
use super::tiles::{BLOCK_COLUMNS, BlockHeight, BlockProduct, MAX_BLOCK_LEN, TILE_DEPTH, Tiles};

/// Number of terms of each sum in the check of AMX: two tiles of [`TILE_DEPTH`] terms, to check the
/// order of additions across tiles.
const DEPTH: usize = 2 * TILE_DEPTH;
const ROWS: usize = 32;

/// A product of random matrices with which AMX is checked: the two operands in the order of tiles,
/// and the block to which AMX adds their product.
#[repr(C, align(64))]
struct CheckedProduct {
    /// Left operand, row by row.
    a: [[u16; DEPTH]; ROWS],
    /// Right operand: two groups of 16 columns, each with pairs of terms for each column.
    b: [[[[u16; 2]; 16]; DEPTH / 2]; 2],
    c: [f32; MAX_BLOCK_LEN],
}

/// Returns true if AMX multiplies random matrices with exactly the bits that result from the
/// prescribed order and rounding of bf16 sums. The numbers are random, with denormal and large ones
/// among them.
///
/// # Safety
///
/// The caller must ensure that the AMX instructions can be executed.
pub(super) unsafe fn gives_right_results() -> bool {
    let mut checked = draw_operands();
    // SAFETY: guaranteed by the caller.
    let tiles = unsafe { Tiles::configure() };
    [BlockHeight::Two, BlockHeight::One].into_iter().all(|height| {
        let expected = compute_by_rule(&checked, height);
        let product = BlockProduct {
            a: checked.a.as_ptr().cast(),
            a_row_stride: DEPTH * 2,
            a_tile_stride: 16 * DEPTH * 2,
            a_step_stride: TILE_DEPTH * 2,
            b: checked.b.as_ptr().cast(),
            b_tile_stride: size_of_val(&checked.b[0]),
            c: checked.c.as_mut_ptr(),
            steps: DEPTH / TILE_DEPTH,
            accumulate: true,
        };
        // SAFETY: the operands and the result have space for the block.
        unsafe { tiles.multiply(height, &product) };
        checked.c.iter().zip(expected).all(|(c, expected)| c.to_bits() == expected.to_bits())
    })
}

/// Creates random operands for the check of AMX, and a random matrix to which their product is
/// added. Exponents are between 2⁻⁹⁰ and 2²⁷, so that some products are denormal, and no sum is
/// infinite.
fn draw_operands() -> CheckedProduct {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut draw_bf16 = || {
        let x = draw();
        // Every eighth number is small.
        let exponent = if x & 7 == 0 { 37 + (x >> 16) % 20 } else { 124 + (x >> 16) % 30 };
        ((x >> 32) as u16 & 0x807f) | (exponent as u16) << 7
    };
    let mut checked =
        CheckedProduct { a: [[0; DEPTH]; ROWS], b: [[[[0; 2]; 16]; DEPTH / 2]; 2], c: [0.0; MAX_BLOCK_LEN] };
    checked.a.iter_mut().flatten().for_each(|x| *x = draw_bf16());
    checked.b.iter_mut().flatten().flatten().flatten().for_each(|x| *x = draw_bf16());
    // denormal operands count as 0
    checked.a[3][5] = 0x0023;
    checked.b[1][7][4][1] = 0x8001;
    checked.c.iter_mut().for_each(|c| *c = widen(draw_bf16()) * 1.2345);
    checked
}

/// Computes the expected result of the check of AMX with scalar fused multiply-adds, in the
/// prescribed order and rounding of bf16 sums.
fn compute_by_rule(checked: &CheckedProduct, height: BlockHeight) -> [f32; MAX_BLOCK_LEN] {
    let mut result = checked.c;
    for row in 0..height.rows() {
        for column in 0..BLOCK_COLUMNS {
            let at = (row / 16 * 2 + column / 16) * 256 + row % 16 * 16 + column % 16;
            for step in 0..DEPTH / TILE_DEPTH {
                let mut chains = [0.0f32; 2];
                for pair in step * TILE_DEPTH / 2..(step + 1) * TILE_DEPTH / 2 {
                    for (half, chain) in chains.iter_mut().enumerate() {
                        let a = flush(widen(checked.a[row][2 * pair + half]));
                        let b = flush(widen(checked.b[column / 16][pair][column % 16][half]));
                        *chain = flush(a.mul_add(b, *chain));
                    }
                }
                result[at] = flush(flush(result[at]) + flush(chains[0] + chains[1]));
            }
        }
    }
    result
}

/// Converts a bf16 number to `f32`. The conversion is exact.
fn widen(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Returns 0 with the sign of `x` if `x` is denormal, and `x` otherwise.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}
