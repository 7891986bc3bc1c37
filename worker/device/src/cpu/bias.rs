//! Adds a bias vector to every row of a matrix, and computes the gradient of the bias, on the CPU.
//!
//! The gradient is summed over chunks of rows, and the chunks' sums are added in order.
use super::backend::Cpu;
use super::elements::InputElements;
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{BiasOps, expect_lens};

impl BiasOps for Cpu {
    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize) {
        expect_lens("bias_forward", [("y", y.len(), m * n), ("bias", bias.len(), n)]);
        add_bias_to_rows(self, y, &self.to_f32(bias));
    }

    fn bias_backward(&self, dbias: ViewMut, dy: View, m: usize, n: usize) {
        expect_lens("bias_backward", [("dbias", dbias.len(), n), ("dy", dy.len(), m * n)]);
        let dy = InputElements::from(dy);
        self.run_over_rows_and_sum(m, (), [dbias.host_slice_mut()], |rows, (), sum| {
            accumulate_rows(self.instruction_set, sum, &dy.rows_to_f32(self, &rows, n));
        });
    }
}

/// Adds `bias` to every row of `y`, on all threads.
pub(crate) fn add_bias_to_rows(cpu: &Cpu, y: ViewMut, bias: &[f32]) {
    let n = bias.len();
    let rows = y.len().checked_div(n).unwrap_or(0);
    cpu.run_over_output_rows(rows, n, cpu.as_rows_to_update(y, n), |_, mut y| {
        add_bias(cpu.instruction_set, &mut y, bias)
    });
}

multiversion! {
    /// Adds `bias` to every row of `y` with the given instruction set, on the calling thread.
    fn add_bias = add_bias_simd(y: &mut [f32], bias: &[f32])
}
multiversion! {
    /// Adds every row of the matrix `dy` to the vector `sum`, with the given instruction set.
    fn accumulate_rows = sum_rows_simd(sum: &mut [f32], dy: &[f32])
}

/// Adds `bias` elementwise to every row of `y`, on the calling thread.
#[inline(always)]
fn add_bias_simd<S: Simd>(s: S, y: &mut [f32], bias: &[f32]) {
    for row in y.chunks_exact_mut(bias.len().max(1)) {
        for i in (0..row.len()).step_by(LANES) {
            store_lanes(s, row, i, s.add(load_lanes(s, row, i), load_lanes(s, bias, i)));
        }
    }
}

/// Adds every row of the matrix `dy` elementwise to the vector `sum`, in the order of the rows.
#[inline(always)]
fn sum_rows_simd<S: Simd>(s: S, sum: &mut [f32], dy: &[f32]) {
    for row in dy.chunks_exact(sum.len().max(1)) {
        for i in (0..row.len()).step_by(LANES) {
            store_lanes(s, sum, i, s.add(load_lanes(s, sum, i), load_lanes(s, row, i)));
        }
    }
}
