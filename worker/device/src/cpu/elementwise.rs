//! Implements elementwise vector operations, dropout, matrix transposition and sums of squares for
//! the CPU backend.
use super::backend::Cpu;
use super::elements::{InputElements, PriorContents};
use super::instruction_set::multiversion;
use super::row_outputs::SliceRows;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use super::stochastic_rounding::round_range;
use crate::buffer::{View, ViewMut};
use crate::ops::{NORM_BLOCK_LEN, SampleDropout, StochasticRounding, VectorOps, expect_lens};
use crate::philox::compute_random_words;

impl VectorOps for Cpu {
    fn cast(&self, y: ViewMut, x: View) {
        let len = y.len();
        expect_lens("cast", [("x", x.len(), len)]);
        let x = InputElements::from(x);
        self.run_over_output_rows(len, 1, self.as_rows_to_overwrite(y, 1), |range, mut y| {
            y.copy_from_slice(&x.to_f32(self, range));
        });
    }

    fn round_stochastically(&self, y: ViewMut, x: View, rounding: &StochasticRounding) {
        rounding.check_output_and_range(&y);
        let len = y.len();
        expect_lens("round_stochastically", [("x", x.len(), len)]);
        let x = x.host_slice();
        self.run_over_output_rows(len, 1, SliceRows::new(y.half_bits(), 1), |r, y| {
            let first_element = rounding.first_element + r.start as u64;
            let rounding = StochasticRounding { first_element, ..*rounding };
            round_range(self.instruction_set, y, &x[r], rounding);
        });
    }

    fn add(&self, y: ViewMut, x: View) {
        expect_lens("add", [("x", x.len(), y.len())]);
        let x = InputElements::from(x);
        self.update_elements(y, |r, y| add_slices(self.instruction_set, y, &x.to_f32(self, r)));
    }

    fn scale(&self, y: ViewMut, s: f32) {
        self.update_elements(y, |_, y| scale_slice(self.instruction_set, y, s));
    }

    fn add_scalar(&self, y: ViewMut, s: f32) {
        self.update_elements(y.host_slice_mut().into(), |_, y| y.iter_mut().for_each(|y| *y += s));
    }

    fn axpby(&self, y: ViewMut, a: f32, x: View, b: f32) {
        expect_lens("axpby", [("x", x.len(), y.len())]);
        let x = x.host_slice();
        self.update_elements(y.host_slice_mut().into(), |r, y| {
            y.iter_mut().zip(&x[r]).for_each(|(y, x)| *y = a * *y + b * x);
        });
    }

    fn softcap(&self, y: ViewMut, cap: f32) {
        self.update_elements(y.host_slice_mut().into(), |_, y| {
            y.iter_mut().for_each(|y| *y = cap * libm::tanhf(*y / cap));
        });
    }

    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize) {
        let len = rows * columns;
        expect_lens("transpose", [("x", x.len(), len), ("y", y.len(), len)]);
        let x = x.host_slice();
        self.run_over_each_output_row(
            columns,
            rows,
            SliceRows::new(y.host_slice_mut(), rows),
            |column, row| {
                row.iter_mut().enumerate().for_each(|(i, y)| *y = x[i * columns + column]);
            },
        );
    }

    fn dropout(&self, x: ViewMut, d: &SampleDropout) {
        let (len, threshold, keep_scale) = (x.len(), d.drop_threshold(), d.keep_scale());
        let samples = len.checked_div(d.sample_len).unwrap_or(0);
        expect_lens("dropout", [("x", len, samples * d.sample_len)]);
        let per_sample = d.sample_len.div_ceil(4);
        // Returns how many elements precede a block, counted over all samples.
        let elements_before = |block: usize| block / per_sample * d.sample_len + 4 * (block % per_sample);
        let x = self.as_output(x);
        self.run_over_rows(samples * per_sample, 4, |range| {
            let first = elements_before(range.start);
            // SAFETY: different blocks have different elements.
            let mut x = unsafe { x.slice_as_f32(first..elements_before(range.end), PriorContents::Read) };
            let mut rest = &mut x[..];
            for block in range {
                let (sample, block_of_sample) =
                    (d.first_sample + (block / per_sample) as u64, block % per_sample);
                let words = compute_random_words(d.key, block_of_sample as u64, sample, 0);
                let (values, after) =
                    rest.split_at_mut((elements_before(block + 1) - elements_before(block)).min(4));
                for (value, word) in values.iter_mut().zip(words) {
                    *value = if u64::from(word) < threshold { 0.0 } else { *value * keep_scale };
                }
                rest = after;
            }
        });
    }

    /// Returns the sum of squares of `x`, added in the order of the elements on the calling thread.
    fn sum_squares(&self, x: View) -> f64 {
        x.host_slice().iter().map(|v| f64::from(*v).powi(2)).sum()
    }

    fn sum_squares_by_block(&self, out: &mut [f64], x: View) {
        let blocks = x.len().div_ceil(NORM_BLOCK_LEN);
        expect_lens("sum_squares_by_block", [("out", out.len(), blocks)]);
        let x = x.host_slice();
        self.run_over_output_rows(blocks, NORM_BLOCK_LEN, SliceRows::new(out, 1), |range, out| {
            for (out, block) in out.iter_mut().zip(x.chunks(NORM_BLOCK_LEN).skip(range.start)) {
                *out = sum_squares_of_block(self.instruction_set, block);
            }
        });
    }
}

multiversion! {
    /// Adds `x` to `y` elementwise with the given instruction set, on the calling thread.
    pub(super) fn add_slices = add_vectors(y: &mut [f32], x: &[f32])
}
multiversion! {
    /// Multiplies every element of `y` by `factor` with the given instruction set, on the calling
    /// thread.
    fn scale_slice = scale_vector(y: &mut [f32], factor: f32)
}
multiversion! {
    /// Returns the sum of the squares of the elements of `x` in `f64`, computed with the given
    /// instruction set.
    fn sum_squares_of_block = sum_squares_of_block_simd(x: &[f32]) -> f64
}

/// Adds `x` to `y` elementwise: `y += x`, on the calling thread.
#[inline(always)]
fn add_vectors<S: Simd>(s: S, y: &mut [f32], x: &[f32]) {
    for i in (0..y.len()).step_by(LANES) {
        store_lanes(s, y, i, s.add(load_lanes(s, y, i), load_lanes(s, x, i)));
    }
}

/// Multiplies every element of `y` by `factor`, on the calling thread.
#[inline(always)]
fn scale_vector<S: Simd>(s: S, y: &mut [f32], factor: f32) {
    for i in (0..y.len()).step_by(LANES) {
        store_lanes(s, y, i, s.mul(load_lanes(s, y, i), s.splat(factor)));
    }
}

/// Returns the sum of the squares of `x` in `f64`. Element i is added to lane i mod 16, and the
/// lanes are added in the order of [`Simd::sum`]. Squares are exact, because the square of an `f32`
/// is representable in `f64`.
#[inline(always)]
fn sum_squares_of_block_simd<S: Simd>(_: S, x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f64::from(x) * f64::from(x);
    }
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            lanes[i] += lanes[i + w];
        }
    }
    lanes[0]
}
