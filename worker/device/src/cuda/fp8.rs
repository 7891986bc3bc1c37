//! Products in fp8: operands are rounded on the card, each along the sum, as cuBLASLt wants them; their scales never leave it.
use super::card::{Launch, Param};
use super::compile::FP8;
use super::matmul::{Inputs, Matrix, Product};
use super::memory::Memory;
use super::ops::{Operand, nothing_to_sum, through_f32};
use super::{Cuda, Tensor};
use crate::fp8::Fp8;
use crate::mem::{Dtype, ViewMut};
use crate::ops::{Fp8Matrix, Write, check_fp8};

/// cuBLASLt wants pointers of 16 bytes and, of fp8, sums of a multiple of 16 terms.
const ALIGNED: usize = 16;
/// Most threads of a block, and those that turn a tile.
const THREADS: usize = 256;
/// DEEP and WIDE of fp8.cu.
const DEEP: usize = 128;
const WIDE: usize = 32;

/// [`crate::Ops::fp8_product`]
pub(super) fn product(
    cuda: &Cuda,
    c: ViewMut,
    a: Fp8Matrix,
    b: Fp8Matrix,
    [m, n, k]: [usize; 3],
    write: Write,
) {
    check_fp8(c.len(), &a, &b, [m, n, k]);
    let c = Operand::of(c.as_view(), n, false);
    if nothing_to_sum(cuda, c, [m, n, k], write) {
        return;
    }
    let depth = k.next_multiple_of(ALIGNED);
    let (left, right) = (Rounded::of(cuda, a, !a.transposed, m, k), Rounded::of(cuda, b, b.transposed, n, k));
    let [a, b] = [(&left, false), (&right, true)].map(|(rounded, transposed)| Matrix {
        at: rounded.codes.at(),
        stride: depth,
        transposed,
    });
    let inputs = Inputs::Fp8([&left, &right].map(|rounded| (rounded.kind, rounded.scales.at())));
    let run = |c: Operand, add| {
        let (output, c) = (c.dtype, c.matrix());
        cuda.multiply(&Product { m, n, k: depth, a, b, c, inputs, output, add, bias: None });
    };
    let add = write == Write::Add;
    if c.dtype != Dtype::F16 && c.at.is_multiple_of(ALIGNED as u64) {
        return run(c, add);
    }
    through_f32(cuda, c, m * n, add, run);
}

/// A matrix in fp8: `count` rows (of the left operand) or columns (of the right one), each contiguous along the sum and padded with
/// zeros.
struct Rounded {
    kind: Fp8,
    codes: Memory,
    /// The scale and its reciprocal.
    scales: Memory,
}

impl Rounded {
    /// `along`: rows as the matrix is stored follow the sum.
    fn of(cuda: &Cuda, matrix: Fp8Matrix, along: bool, count: usize, k: usize) -> Self {
        let (kind, x, depth) = (matrix.kind, Tensor::from(matrix.x), k.next_multiple_of(ALIGNED));
        let scales = scales(cuda, x, count * k, kind);
        let codes = cuda.scratch(count * depth);
        let (rows, columns) = if along { (count, k) } else { (k, count) };
        let numbers = [rows, columns, depth].map(|n| n as i64);
        let arguments: [&dyn Param; 7] =
            [&codes.at(), &x, &scales.at(), &numbers[0], &numbers[1], &numbers[2], &number(kind)];
        if along {
            cuda.each_eight(FP8, c"quantize", count * depth, &arguments);
        } else {
            let tiles = depth.div_ceil(DEEP) * count.div_ceil(WIDE);
            cuda.launch(FP8, c"quantize_turned", blocks(tiles, THREADS), &arguments);
        }
        Rounded { kind, codes, scales }
    }
}

/// The scale of a vector and its reciprocal, on the card.
fn scales(cuda: &Cuda, x: Tensor, len: usize, kind: Fp8) -> Memory {
    let count = len.div_ceil(8 * THREADS).min(cuda.facts().multiprocessors * 4);
    let (parts, scales) = (cuda.scratch(count * size_of::<f32>()), cuda.scratch(2 * size_of::<f32>()));
    cuda.launch(FP8, c"amax", blocks(count, len.div_ceil(8)), &[&parts.at(), &x, &(len as i64)]);
    let arguments: [&dyn Param; 4] = [&scales.at(), &parts.at(), &(count as i64), &number(kind)];
    cuda.launch(FP8, c"scale", blocks(1, count), &arguments);
    scales
}

/// Blocks of whole warps, for about `threads` each.
fn blocks(count: usize, threads: usize) -> Launch {
    let threads = threads.next_multiple_of(32).min(THREADS);
    Launch { grid: [count as u32, 1, 1], block: [threads as u32, 1, 1], shared: 0 }
}

/// As fp8.cu numbers the kinds.
fn number(kind: Fp8) -> i64 {
    match kind {
        Fp8::E4M3 => 0,
        Fp8::E5M2 => 1,
    }
}
