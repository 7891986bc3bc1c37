//! Matmul in fp8, the reference for GPUs: operands are rounded to fp8, converted to bfloat16, and
//! multiplied as bfloat16.
//!
//! An fp8 number times its scale is exactly a bfloat16, because it has at most four significant
//! bits and scales are at least 2⁻⁶⁰. (Values from 2¹²⁸·15/16 on, which round to 2¹²⁸, become
//! infinite.)
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::OutputElements;
use super::elements::{HalfFormat, InputElements, f32_to_bf16};
use super::matmul::{MatmulShape, matmul};
use super::packing::Operand;
use crate::buffer::ViewMut;
use crate::ops::{Fp8Operand, WriteMode, check_fp8_shapes};

/// Number of elements that one task rounds to fp8.
const ELEMENTS_PER_TASK: usize = 16 << 10;

/// Implements [`crate::Ops::fp8_matmul`].
pub(super) fn matmul_fp8(
    cpu: &Cpu,
    c: ViewMut,
    a: Fp8Operand,
    b: Fp8Operand,
    [m, n, k]: [usize; 3],
    write: WriteMode,
) {
    check_fp8_shapes(c.len(), &a, &b, [m, n, k]);
    let mut buffers = [m * k, k * n].map(|len| cpu.scratch.take(len.div_ceil(2)));
    let [buffer_a, buffer_b] = &mut buffers;
    let (rounded_a, rounded_b) = (round_to_fp8(cpu, buffer_a, a), round_to_fp8(cpu, buffer_b, b));
    let (row, depth) = if a.transposed { (1, m) } else { (k, 1) };
    let a = Operand { data: rounded_a, row_stride: row, depth_stride: depth };
    let (row, depth) = if b.transposed { (k, 1) } else { (1, n) };
    let b = Operand { data: rounded_b, row_stride: row, depth_stride: depth };
    matmul(cpu, OutputElements::new(cpu, c), a, b, MatmulShape { m, n, k, ldc: n, write });
}

/// Rounds a matrix to fp8 and returns the rounded elements as bf16, stored in `buffer`. Each `f32`
/// of `buffer` receives two bf16.
fn round_to_fp8<'a>(cpu: &Cpu, buffer: &'a mut [f32], matrix: Fp8Operand) -> InputElements<'a> {
    let (x, format) = (InputElements::from(matrix.x), matrix.format);
    let scale = format.compute_scale(find_largest_magnitude(cpu, x));
    let to = &mut bytemuck::cast_slice_mut(buffer)[..x.len()];
    let parts = DisjointSlices::new(&mut *to);
    cpu.pool.run(x.len().div_ceil(ELEMENTS_PER_TASK), &|task| {
        let range = task * ELEMENTS_PER_TASK..((task + 1) * ELEMENTS_PER_TASK).min(x.len());
        // SAFETY: each task writes a different range.
        let to = unsafe { parts.slice_mut(range.clone()) };
        for (to, x) in to.iter_mut().zip(x.to_f32(cpu, range).iter()) {
            *to = f32_to_bf16(format.decode(format.encode(x / scale)) * scale);
        }
    });
    InputElements::Half(HalfFormat::Bf16, to)
}

/// Returns the largest magnitude of the finite elements, or 0 if no element is finite.
fn find_largest_magnitude(cpu: &Cpu, x: InputElements) -> f32 {
    let tasks = x.len().div_ceil(ELEMENTS_PER_TASK);
    let mut maxima = cpu.scratch.take(tasks);
    let parts = DisjointSlices::new(&mut maxima[..tasks]);
    cpu.pool.run(tasks, &|task| {
        let range = task * ELEMENTS_PER_TASK..((task + 1) * ELEMENTS_PER_TASK).min(x.len());
        let finite = |x: &f32| if x.is_finite() { x.abs() } else { 0.0 };
        // SAFETY: each task writes a different element.
        let maxima = unsafe { parts.slice_mut(task..task + 1) };
        maxima[0] = x.to_f32(cpu, range).iter().map(finite).fold(0.0, f32::max);
    });
    maxima[..tasks].iter().copied().fold(0.0, f32::max)
}
