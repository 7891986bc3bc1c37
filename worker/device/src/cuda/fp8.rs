//! Matmuls in fp8. Operands are quantized on the GPU, contiguous along the summed dimension as
//! cuBLASLt needs them. Their scales stay on the GPU.
use super::compile::FP8;
use super::launch::{KernelArg, LaunchConfig};
use super::matmul::{InputFormat, Matmul, MatrixRef};
use super::memory::DeviceMemory;
use super::ops::{Operand, finish_empty_matmul, via_f32_result};
use super::{Cuda, TensorArg};
use crate::buffer::{Dtype, ViewMut};
use crate::fp8::Fp8Format;
use crate::ops::{Fp8Matrix, WriteMode, check_fp8_shapes};

/// For fp8, cuBLASLt needs pointers aligned to 16 bytes and sums of a multiple of 16 terms.
const ALIGNMENT: usize = 16;
/// Maximum number of threads of a block. The kernel that transposes a tile has exactly this many.
const THREADS: usize = 256;
/// `TILE_DEPTH` of fp8.cu: elements of a tile along the sum.
const TILE_DEPTH: usize = 128;
/// `TILE_WIDTH` of fp8.cu: elements of a tile across the sum.
const TILE_WIDTH: usize = 32;

/// Implements [`crate::Ops::fp8_matmul`].
pub(super) fn matmul(
    cuda: &Cuda,
    c: ViewMut,
    a: Fp8Matrix,
    b: Fp8Matrix,
    [m, n, k]: [usize; 3],
    write: WriteMode,
) {
    check_fp8_shapes(c.len(), &a, &b, [m, n, k]);
    let c = Operand::new(c.as_view(), n, false);
    if finish_empty_matmul(cuda, c, [m, n, k], write) {
        return;
    }
    let depth = k.next_multiple_of(ALIGNMENT);
    let left = QuantizedMatrix::new(cuda, a, !a.transposed, m, k);
    let right = QuantizedMatrix::new(cuda, b, b.transposed, n, k);
    let [a, b] = [(&left, false), (&right, true)].map(|(quantized, transposed)| MatrixRef {
        at: quantized.elements.at(),
        stride: depth,
        transposed,
    });
    let inputs = InputFormat::Fp8([&left, &right].map(|quantized| (quantized.kind, quantized.scales.at())));
    let run = |c: Operand, add| {
        let (output, c) = (c.dtype, c.matrix());
        cuda.run_matmul(&Matmul { m, n, k: depth, a, b, c, inputs, output, add, bias: None });
    };
    let add = write == WriteMode::Accumulate;
    if c.dtype != Dtype::F16 && c.at.is_multiple_of(ALIGNMENT as u64) {
        return run(c, add);
    }
    via_f32_result(cuda, c, m * n, add, run);
}

/// A matrix in fp8: rows of the left operand or columns of the right one, each contiguous along the
/// sum and padded with zeros.
struct QuantizedMatrix {
    kind: Fp8Format,
    elements: DeviceMemory,
    /// The scale and its reciprocal.
    scales: DeviceMemory,
}

impl QuantizedMatrix {
    /// Quantizes `count` vectors of `k` terms. `is_contiguous` is true if a stored row of the
    /// matrix is such a vector; otherwise the matrix is transposed.
    fn new(cuda: &Cuda, matrix: Fp8Matrix, is_contiguous: bool, count: usize, k: usize) -> Self {
        let (kind, x, depth) = (matrix.format, TensorArg::from(matrix.x), k.next_multiple_of(ALIGNMENT));
        let scales = compute_scales(cuda, x, count * k, kind);
        let elements = cuda.scratch(count * depth);
        let (rows, columns) = if is_contiguous { (count, k) } else { (k, count) };
        let sizes = [rows, columns, depth].map(|n| n as i64);
        let arguments: [&dyn KernelArg; 7] =
            [&elements.at(), &x, &scales.at(), &sizes[0], &sizes[1], &sizes[2], &kind_code(kind)];
        if is_contiguous {
            cuda.launch_elementwise_by_8(FP8, c"quantize", count * depth, &arguments);
        } else {
            let tiles = depth.div_ceil(TILE_DEPTH) * count.div_ceil(TILE_WIDTH);
            cuda.launch(FP8, c"quantize_transposed", launch_config(tiles, THREADS), &arguments);
        }
        QuantizedMatrix { kind, elements, scales }
    }
}

/// The scale of a vector and its reciprocal, computed on the GPU.
fn compute_scales(cuda: &Cuda, x: TensorArg, len: usize, kind: Fp8Format) -> DeviceMemory {
    let count = len.div_ceil(8 * THREADS).min(cuda.properties().multiprocessor_count * 4);
    let (parts, scales) = (cuda.scratch(count * size_of::<f32>()), cuda.scratch(2 * size_of::<f32>()));
    cuda.launch(FP8, c"amax", launch_config(count, len.div_ceil(8)), &[&parts.at(), &x, &(len as i64)]);
    let arguments: [&dyn KernelArg; 4] = [&scales.at(), &parts.at(), &(count as i64), &kind_code(kind)];
    cuda.launch(FP8, c"scale", launch_config(1, count), &arguments);
    scales
}

/// `blocks` blocks of whole warps, of about `threads` threads each.
fn launch_config(blocks: usize, threads: usize) -> LaunchConfig {
    let threads = threads.next_multiple_of(32).min(THREADS);
    LaunchConfig { grid: [blocks as u32, 1, 1], block: [threads as u32, 1, 1], shared: 0 }
}

/// The number of a format in fp8.cu.
fn kind_code(kind: Fp8Format) -> i64 {
    match kind {
        Fp8Format::E4M3 => 0,
        Fp8Format::E5M2 => 1,
    }
}
