//! Matmul in fp8, the reference for GPUs: operands are rounded to fp8, converted to bfloat16, and
//! multiplied as bfloat16.
//!
//! An fp8 number times its scale is exactly a bfloat16, because it has at most four significant
//! bits and scales are at least 2⁻⁶⁰. (Values from 2¹²⁸·15/16 on, which round to 2¹²⁸, become
//! infinite.)
use super::elements::{HalfFormat, Input, f32_to_bf16};
use super::matmul::{MatmulShape, matmul};
use super::packing::Operand;
use super::{Cpu, DisjointSlices, Output};
use crate::buffer::ViewMut;
use crate::ops::{Fp8Matrix, WriteMode, check_fp8_shapes};

/// Elements that one task converts.
const TASK_LEN: usize = 16 << 10;

/// Implements [`crate::Ops::fp8_matmul`].
pub(super) fn matmul_fp8(
    cpu: &Cpu,
    c: ViewMut,
    a: Fp8Matrix,
    b: Fp8Matrix,
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
    matmul(cpu, Output::new(cpu, c), a, b, MatmulShape { m, n, k, ldc: n, write });
}

/// Rounds a matrix to fp8 and returns it as bfloat16. `buffer` receives two bfloat16 in each `f32`.
fn round_to_fp8<'a>(cpu: &Cpu, buffer: &'a mut [f32], matrix: Fp8Matrix) -> Input<'a> {
    let (x, format) = (Input::from(matrix.x), matrix.format);
    let scale = format.scale_for(largest_magnitude(cpu, x));
    let to = &mut bytemuck::cast_slice_mut(buffer)[..x.len()];
    let parts = DisjointSlices::new(&mut *to);
    cpu.pool.run(x.len().div_ceil(TASK_LEN), &|task| {
        let range = task * TASK_LEN..((task + 1) * TASK_LEN).min(x.len());
        // SAFETY: each task writes a different range.
        let to = unsafe { parts.slice_mut(range.clone()) };
        for (to, x) in to.iter_mut().zip(x.to_f32(cpu, range).iter()) {
            *to = f32_to_bf16(format.decode(format.encode(x / scale)) * scale);
        }
    });
    Input::Half(HalfFormat::Bf16, to)
}

/// Returns the largest magnitude of the finite elements, 0 if there are none.
fn largest_magnitude(cpu: &Cpu, x: Input) -> f32 {
    let tasks = x.len().div_ceil(TASK_LEN);
    let mut maxima = cpu.scratch.take(tasks);
    let parts = DisjointSlices::new(&mut maxima[..tasks]);
    cpu.pool.run(tasks, &|task| {
        let range = task * TASK_LEN..((task + 1) * TASK_LEN).min(x.len());
        let finite = |x: &f32| if x.is_finite() { x.abs() } else { 0.0 };
        // SAFETY: each task writes a different element.
        let maxima = unsafe { parts.slice_mut(task..task + 1) };
        maxima[0] = x.to_f32(cpu, range).iter().map(finite).fold(0.0, f32::max);
    });
    maxima[..tasks].iter().copied().fold(0.0, f32::max)
}
