//! Elementwise ops on vectors, dropout and matrix transposition.
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{InputElements, OutputElements, PriorContents};
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::ops::expect_len;
use crate::{ops::SampleDropout, philox::compute_random_words};

/// Implements [`crate::Ops::add`].
pub(crate) fn add(cpu: &Cpu, y: OutputElements, x: InputElements) {
    expect_len("add", "x", x.len(), y.len());
    cpu.run_over_elements(y.len(), |r| {
        // SAFETY: each task writes a different range.
        add_slices(
            cpu.instruction_set,
            &mut unsafe { y.slice_as_f32(r.clone(), PriorContents::Read) },
            &x.to_f32(cpu, r),
        );
    });
}

/// Implements [`crate::Ops::scale`].
pub(crate) fn scale(cpu: &Cpu, y: OutputElements, factor: f32) {
    cpu.run_over_elements(y.len(), |r| {
        // SAFETY: each task writes a different range.
        scale_slice(cpu.instruction_set, &mut unsafe { y.slice_as_f32(r, PriorContents::Read) }, factor);
    });
}

/// Implements [`crate::Ops::add_scalar`].
pub(crate) fn add_scalar(cpu: &Cpu, y: &mut [f32], s: f32) {
    let len = y.len();
    let y = DisjointSlices::new(y);
    cpu.run_over_elements(len, |r| {
        // SAFETY: each task writes a different range.
        unsafe { y.slice_mut(r) }.iter_mut().for_each(|y| *y += s);
    });
}

/// Implements [`crate::Ops::axpby`].
pub(crate) fn axpby(cpu: &Cpu, y: &mut [f32], a: f32, x: &[f32], b: f32) {
    expect_len("axpby", "x", x.len(), y.len());
    let y = DisjointSlices::new(y);
    cpu.run_over_elements(x.len(), |r| {
        // SAFETY: each task writes a different range.
        let y = unsafe { y.slice_mut(r.clone()) };
        y.iter_mut().zip(&x[r]).for_each(|(y, x)| *y = a * *y + b * x);
    });
}

/// Implements [`crate::Ops::softcap`].
pub(crate) fn softcap(cpu: &Cpu, y: &mut [f32], cap: f32) {
    let len = y.len();
    let y = DisjointSlices::new(y);
    cpu.run_over_elements(len, |r| {
        // SAFETY: each task writes a different range.
        unsafe { y.slice_mut(r) }.iter_mut().for_each(|y| *y = cap * libm::tanhf(*y / cap));
    });
}

/// Implements [`crate::Ops::transpose`].
pub(crate) fn transpose(cpu: &Cpu, y: &mut [f32], x: &[f32], rows: usize, columns: usize) {
    expect_len("transpose", "x", x.len(), rows * columns);
    expect_len("transpose", "y", y.len(), rows * columns);
    let y = DisjointSlices::new(y);
    cpu.run_over_rows(columns, rows, |range| {
        // SAFETY: each task writes different rows of the result.
        let y = unsafe { y.slice_mut(range.start * rows..range.end * rows) };
        for (column, row) in range.zip(y.chunks_exact_mut(rows.max(1))) {
            row.iter_mut().enumerate().for_each(|(i, y)| *y = x[i * columns + column]);
        }
    });
}

/// Implements [`crate::Ops::dropout`].
pub(crate) fn dropout(cpu: &Cpu, x: OutputElements, d: &SampleDropout) {
    let (len, threshold, keep_scale) = (x.len(), d.drop_threshold(), d.keep_scale());
    if d.sample_len == 0 {
        return expect_len("dropout", "x", len, 0);
    }
    let per_sample = d.sample_len.div_ceil(4);
    expect_len("dropout", "x", len % d.sample_len, 0);
    // Returns how many elements precede a block, counted over all samples.
    let elements_before = |block: usize| block / per_sample * d.sample_len + 4 * (block % per_sample);
    cpu.run_over_rows(len / d.sample_len * per_sample, 4, |range| {
        let first = elements_before(range.start);
        // SAFETY: different blocks have different elements.
        let mut x = unsafe { x.slice_as_f32(first..elements_before(range.end), PriorContents::Read) };
        let mut rest = &mut x[..];
        for block in range {
            let (sample, block_of_sample) = (block / per_sample, block % per_sample);
            let words =
                compute_random_words(d.key, block_of_sample as u64, d.first_sample + sample as u64, 0);
            let (values, after) =
                rest.split_at_mut((elements_before(block + 1) - elements_before(block)).min(4));
            for (value, word) in values.iter_mut().zip(words) {
                *value = if u64::from(word) < threshold { 0.0 } else { *value * keep_scale };
            }
            rest = after;
        }
    });
}

multiversion! {
    pub(super) fn add_slices = add_vectors(y: &mut [f32], x: &[f32])
}

multiversion! {
    fn scale_slice = scale_vectors(y: &mut [f32], factor: f32)
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
fn scale_vectors<S: Simd>(s: S, y: &mut [f32], factor: f32) {
    for i in (0..y.len()).step_by(LANES) {
        store_lanes(s, y, i, s.mul(load_lanes(s, y, i), s.splat(factor)));
    }
}
