//! Matmuls in fp8 on a GPU: kernels quantize the operands, and cuBLASLt multiplies them. The
//! quantized operands are contiguous along the summed dimension, as cuBLASLt requires, and their
//! scales stay on the GPU.
use super::backend::{Cuda, LaunchSize};
use super::compile::FP8_SOURCE;
use super::launch::{KernelArg, LaunchConfig};
use super::matmul::{Epilogue, Matmul, MatrixRef, OperandFormat};
use super::matmul_operand::{MatmulOperand, finish_empty_matmul, run_with_f32_result};
use super::memory::DeviceMemory;
use super::tensor_arg::TensorArg;
use crate::buffer::{Dtype, ViewMut};
use crate::fp8::Fp8Format;
use crate::ops::{Fp8Operand, Fp8Ops, WriteMode};

/// Number of which the operand addresses (in bytes) and the summed dimension `k` of an fp8 matmul
/// must be multiples, as cuBLASLt requires.
const ALIGNMENT: usize = 16;
/// Maximum number of threads per block of the kernels that quantize to fp8. The kernel that
/// transposes a tile has exactly this number of threads.
const MAX_THREADS_PER_BLOCK: usize = 256;
/// Height in elements of the tiles in which a matrix is transposed and rounded to fp8. The matmul
/// sums over this dimension. This is `TILE_DEPTH` of fp8.cu.
const TILE_DEPTH: usize = 128;
/// Width in elements of the tiles in which a matrix is transposed and rounded to fp8. The matmul
/// does not sum over this dimension. This is `TILE_WIDTH` of fp8.cu.
const TILE_WIDTH: usize = 32;

impl Fp8Ops for Cuda {
    fn fp8_matmul(
        &self,
        c: ViewMut,
        a: Fp8Operand,
        b: Fp8Operand,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    ) {
        Fp8Operand::check_matmul_operands(c.len(), &a, &b, [m, n, k]);
        let c = MatmulOperand::from_rows(c.as_view(), n);
        if finish_empty_matmul(self, c, [m, n, k], write) {
            return;
        }
        let depth = k.next_multiple_of(ALIGNMENT);
        let left = QuantizedMatrix::new(self, a, !a.transposed, m, k);
        let right = QuantizedMatrix::new(self, b, b.transposed, n, k);
        let [a, b] = [(&left, false), (&right, true)].map(|(quantized, transposed)| MatrixRef {
            at: quantized.elements.address(),
            stride: depth,
            transposed,
        });
        let scales = [&left, &right].map(|quantized| (quantized.format, quantized.scales.address()));
        let run = |c: MatmulOperand, add| {
            let (inputs, output, c) = (OperandFormat::Fp8(scales), c.dtype, c.to_matrix_ref());
            self.enqueue_matmul(&Matmul {
                m,
                n,
                k: depth,
                a,
                b,
                c,
                inputs,
                output,
                add,
                epilogue: Epilogue::None,
                varying: None,
            });
        };
        let add = write == WriteMode::Accumulate;
        if c.dtype != Dtype::F16 && c.at.is_multiple_of(ALIGNMENT as u64) {
            return run(c, add);
        }
        run_with_f32_result(self, c, m * n, add, run);
    }
}

/// An operand of a matmul, rounded to fp8 in GPU memory, with its scale. Each row or column is
/// contiguous along the sum and padded with zeros.
struct QuantizedMatrix {
    format: Fp8Format,
    elements: DeviceMemory,
    /// The matrix's scale and its reciprocal, two `f32` in GPU memory.
    scales: DeviceMemory,
}

impl QuantizedMatrix {
    /// Rounds a matmul operand to fp8 on the GPU; the operand has `count` rows (left operand) or
    /// columns (right operand) of `k` elements. If `is_contiguous`, each is a row of the matrix in
    /// memory. Otherwise the matrix is transposed.
    fn new(cuda: &Cuda, matrix: Fp8Operand, is_contiguous: bool, count: usize, k: usize) -> Self {
        let (format, x, depth) = (matrix.format, TensorArg::from(matrix.x), k.next_multiple_of(ALIGNMENT));
        let scales = compute_scales(cuda, x, count * k, format);
        let elements = cuda.alloc_scratch(count * depth);
        let (rows, columns) = if is_contiguous { (count, k) } else { (k, count) };
        let (at, scale, code) = (elements.address(), scales.address(), fp8_format_code(format));
        let arguments: [&dyn KernelArg; 7] = [&at, &x, &scale, &rows, &columns, &depth, &code];
        if is_contiguous {
            cuda.launch(FP8_SOURCE, c"quantize", LaunchSize::ElementsBy8(count * depth), &arguments);
        } else {
            let tiles = depth.div_ceil(TILE_DEPTH) * count.div_ceil(TILE_WIDTH);
            let work = compute_launch_size(tiles, MAX_THREADS_PER_BLOCK);
            cuda.launch(FP8_SOURCE, c"quantize_and_transpose", work, &arguments);
        }
        QuantizedMatrix { format, elements, scales }
    }
}

/// Computes on the GPU the scale for rounding the matrix `x` to fp8 (`x` is divided by it first),
/// and the reciprocal of the scale. `len` is the number of elements of the matrix.
fn compute_scales(cuda: &Cuda, x: TensorArg, len: usize, format: Fp8Format) -> DeviceMemory {
    let count = len.div_ceil(8 * MAX_THREADS_PER_BLOCK).min(cuda.properties().multiprocessor_count * 4);
    let [parts, scales] = [count, 2].map(|len| cuda.alloc_scratch(len * size_of::<f32>()));
    let work = compute_launch_size(count, len.div_ceil(8));
    cuda.launch(FP8_SOURCE, c"compute_block_amax", work, &[&parts.address(), &x, &len]);
    let (at, parts, code) = (scales.address(), parts.address(), fp8_format_code(format));
    cuda.launch(FP8_SOURCE, c"compute_scale", compute_launch_size(1, count), &[&at, &parts, &count, &code]);
    scales
}

/// Returns the launch configuration of a kernel with `blocks` blocks of `threads` threads, where
/// the number of threads is rounded up to whole warps.
fn compute_launch_size(blocks: usize, threads: usize) -> LaunchSize {
    let threads = threads.next_multiple_of(32).min(MAX_THREADS_PER_BLOCK);
    LaunchSize::Config(LaunchConfig { grid: [blocks as u32, 1, 1], block: [threads as u32, 1, 1], shared: 0 })
}

/// Returns the number that represents an fp8 format in kernel arguments, as fp8.cu defines it.
fn fp8_format_code(format: Fp8Format) -> i64 {
    match format {
        Fp8Format::E4M3 => 0,
        Fp8Format::E5M2 => 1,
    }
}
