//! Matmuls in fp8 on a GPU. Operands are quantized by kernels. The quantized operands are
//! contiguous along the summed dimension, as cuBLASLt requires, and their scales stay on the GPU.
use super::backend::Cuda;
use super::compile::FP8;
use super::launch::{KernelArg, LaunchConfig};
use super::matmul::{InputFormat, Matmul, MatrixRef};
use super::matmul_operand::{MatmulOperand, finish_empty_matmul, run_with_f32_result};
use super::memory::DeviceMemory;
use super::tensor_arg::TensorArg;
use crate::buffer::{Dtype, ViewMut};
use crate::fp8::Fp8Format;
use crate::ops::{Fp8Operand, WriteMode, check_fp8_shapes};

/// Alignment of fp8 operands that cuBLASLt requires: 16 bytes for addresses, and multiples of 16
/// terms for sums.
const ALIGNMENT: usize = 16;
/// Maximum number of threads of a block. The kernel that transposes a tile has exactly this number
/// of threads.
const MAX_THREADS_PER_BLOCK: usize = 256;
/// Number of elements of a transposed tile along the summed dimension. This is `TILE_DEPTH` of
/// fp8.cu.
const TILE_DEPTH: usize = 128;
/// Number of elements of a transposed tile across the summed dimension. This is `TILE_WIDTH` of
/// fp8.cu.
const TILE_WIDTH: usize = 32;

/// Implements [`crate::Ops::fp8_matmul`].
pub(super) fn matmul_fp8(
    cuda: &Cuda,
    c: ViewMut,
    a: Fp8Operand,
    b: Fp8Operand,
    [m, n, k]: [usize; 3],
    write: WriteMode,
) {
    check_fp8_shapes(c.len(), &a, &b, [m, n, k]);
    let c = MatmulOperand::new(c.as_view(), n, false);
    if finish_empty_matmul(cuda, c, [m, n, k], write) {
        return;
    }
    let depth = k.next_multiple_of(ALIGNMENT);
    let left = QuantizedMatrix::new(cuda, a, !a.transposed, m, k);
    let right = QuantizedMatrix::new(cuda, b, b.transposed, n, k);
    let [a, b] = [(&left, false), (&right, true)].map(|(quantized, transposed)| MatrixRef {
        at: quantized.elements.address(),
        stride: depth,
        transposed,
    });
    let inputs =
        InputFormat::Fp8([&left, &right].map(|quantized| (quantized.format, quantized.scales.address())));
    let run = |c: MatmulOperand, add| {
        let (output, c) = (c.dtype, c.to_matrix_ref());
        cuda.run_matmul(&Matmul { m, n, k: depth, a, b, c, inputs, output, add, bias: None });
    };
    let add = write == WriteMode::Accumulate;
    if c.dtype != Dtype::F16 && c.at.is_multiple_of(ALIGNMENT as u64) {
        return run(c, add);
    }
    run_with_f32_result(cuda, c, m * n, add, run);
}

/// A matrix in fp8: the rows of the left operand or the columns of the right one. Each row or
/// column is contiguous along the sum and padded with zeros.
struct QuantizedMatrix {
    format: Fp8Format,
    elements: DeviceMemory,
    /// The matrix's scale and its reciprocal, two `f32` in GPU memory.
    scales: DeviceMemory,
}

impl QuantizedMatrix {
    /// Quantizes an operand: `count` rows or columns of `k` terms each. If `is_contiguous`, each is
    /// a row of the matrix in memory. Otherwise the matrix is transposed.
    fn new(cuda: &Cuda, matrix: Fp8Operand, is_contiguous: bool, count: usize, k: usize) -> Self {
        let (format, x, depth) = (matrix.format, TensorArg::from(matrix.x), k.next_multiple_of(ALIGNMENT));
        let scales = compute_scales(cuda, x, count * k, format);
        let elements = cuda.alloc_scratch(count * depth);
        let (rows, columns) = if is_contiguous { (count, k) } else { (k, count) };
        let sizes = [rows, columns, depth].map(|n| n as i64);
        let arguments: [&dyn KernelArg; 7] = [
            &elements.address(),
            &x,
            &scales.address(),
            &sizes[0],
            &sizes[1],
            &sizes[2],
            &format_code(format),
        ];
        if is_contiguous {
            cuda.launch_elementwise_by_8(FP8, c"quantize", count * depth, &arguments);
        } else {
            let tiles = depth.div_ceil(TILE_DEPTH) * count.div_ceil(TILE_WIDTH);
            cuda.launch_kernel(
                FP8,
                c"quantize_and_transpose",
                build_launch_config(tiles, MAX_THREADS_PER_BLOCK),
                &arguments,
            );
        }
        QuantizedMatrix { format, elements, scales }
    }
}

/// Computes the scale of a matrix and its reciprocal on the GPU. `len` is the number of elements of
/// the matrix.
fn compute_scales(cuda: &Cuda, x: TensorArg, len: usize, kind: Fp8Format) -> DeviceMemory {
    let count = len.div_ceil(8 * MAX_THREADS_PER_BLOCK).min(cuda.properties().multiprocessor_count * 4);
    let (parts, scales) =
        (cuda.alloc_scratch(count * size_of::<f32>()), cuda.alloc_scratch(2 * size_of::<f32>()));
    cuda.launch_kernel(
        FP8,
        c"compute_block_amax",
        build_launch_config(count, len.div_ceil(8)),
        &[&parts.address(), &x, &(len as i64)],
    );
    let arguments: [&dyn KernelArg; 4] =
        [&scales.address(), &parts.address(), &(count as i64), &format_code(kind)];
    cuda.launch_kernel(FP8, c"compute_scale", build_launch_config(1, count), &arguments);
    scales
}

/// Returns the launch configuration for `blocks` blocks of about `threads` threads each, rounded up
/// to whole warps.
fn build_launch_config(blocks: usize, threads: usize) -> LaunchConfig {
    let threads = threads.next_multiple_of(32).min(MAX_THREADS_PER_BLOCK);
    LaunchConfig { grid: [blocks as u32, 1, 1], block: [threads as u32, 1, 1], shared: 0 }
}

/// Returns the number that represents a format in the kernels of fp8.cu.
fn format_code(kind: Fp8Format) -> i64 {
    match kind {
        Fp8Format::E4M3 => 0,
        Fp8Format::E5M2 => 1,
    }
}
