//! Matmul on the CPU with operands that are rounded to fp8, as the reference for fp8 matmuls on
//! GPUs. The rounded operands are multiplied as bfloat16.
//!
//! An fp8 number times its scale is exactly a bfloat16, because it has at most four significant
//! bits and scales are at least 2⁻⁶⁰. (Values from 2¹²⁸·15/16 on, which round to 2¹²⁸, become
//! infinite.)
use super::backend::Cpu;
use super::elements::{HalfFormat, InputElements, f32_to_bf16};
use super::matmul::{MatmulShape, matmul};
use super::packing::Operand;
use super::row_outputs::SliceRows;
use crate::buffer::ViewMut;
use crate::ops::{Fp8Operand, Fp8Ops, WriteMode};

/// Number of elements per parallel task when the largest magnitude in a matrix is searched to
/// choose the scale for fp8.
const ELEMENTS_PER_TASK: usize = 16 << 10;

impl Fp8Ops for Cpu {
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
        let mut buffers = [m * k, k * n].map(|len| self.scratch.borrow_buf(len.div_ceil(2)));
        let [buffer_a, buffer_b] = &mut buffers;
        let (rounded_a, rounded_b) = (round_to_fp8(self, buffer_a, a), round_to_fp8(self, buffer_b, b));
        let a = match a.transposed {
            true => Operand::from_transposed(rounded_a, m),
            false => Operand::from_rows(rounded_a, k),
        };
        let b = match b.transposed {
            true => Operand::from_rows(rounded_b, k),
            false => Operand::from_transposed(rounded_b, n),
        };
        matmul(self, self.as_output(c), a, b, MatmulShape { m, n, k, ldc: n, write });
    }
}

/// Rounds a matrix to fp8 and returns the rounded elements as bf16 numbers, which are stored in
/// `buffer`. Each `f32` of `buffer` receives two bf16.
fn round_to_fp8<'a>(cpu: &Cpu, buffer: &'a mut [f32], matrix: Fp8Operand) -> InputElements<'a> {
    let (x, format) = (InputElements::from(matrix.x), matrix.format);
    let scale = format.compute_scale(find_largest_magnitude(cpu, x));
    let to = &mut bytemuck::cast_slice_mut(buffer)[..x.len()];
    let outputs = SliceRows::new(&mut *to, 1);
    cpu.run_over_output_rows(x.len(), 1, outputs, |range, to| {
        for (to, x) in to.iter_mut().zip(x.to_f32(cpu, range).iter()) {
            *to = f32_to_bf16(format.decode(format.encode(x / scale)) * scale);
        }
    });
    InputElements::Half(HalfFormat::Bf16, to)
}

/// Returns the largest magnitude of the finite elements of `x`, or 0 if no element is finite.
fn find_largest_magnitude(cpu: &Cpu, x: InputElements) -> f32 {
    let tasks = x.len().div_ceil(ELEMENTS_PER_TASK);
    let mut maxima = cpu.scratch.borrow_buf(tasks);
    let maxima = &mut maxima[..tasks];
    let finite = |x: &f32| if x.is_finite() { x.abs() } else { 0.0 };
    cpu.run_over_each_output_row(
        tasks,
        ELEMENTS_PER_TASK,
        SliceRows::new(&mut *maxima, 1),
        |task, maximum| {
            let range = task * ELEMENTS_PER_TASK..((task + 1) * ELEMENTS_PER_TASK).min(x.len());
            maximum[0] = x.to_f32(cpu, range).iter().map(finite).fold(0.0, f32::max);
        },
    );
    maxima.iter().copied().fold(0.0, f32::max)
}
