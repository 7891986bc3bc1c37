//! LayerNorm with bias (Ba et al., 2016) on the CPU, with and without a preceding residual
//! addition.
//!
//! Sums over a row have 16 lanes, which are then added in the order of [`Simd::sum`]. Gradients of
//! weight and bias are summed over chunks of rows, and the chunks' sums are added in order.
use super::backend::Cpu;
use super::elements::InputElements;
use super::elementwise::add_slices;
use super::instruction_set::multiversion;
use super::row_outputs::SliceRows;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{LayerNormOps, LayerNormParams, WriteMode, expect_lens};

impl LayerNormOps for Cpu {
    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, norm: LayerNormParams, m: usize) {
        let d = norm.w.len();
        let lens = [("y", y.len()), ("x", x.len())];
        check_lengths("layernorm_forward", &lens, stats.len(), norm.b.len(), m, d);
        let (x, w, b) = (InputElements::from(x), self.to_f32(norm.w), self.to_f32(norm.b));
        let params = F32LayerNormParams { w: &w, b: &b, eps: norm.eps };
        let outputs = (self.as_rows_to_overwrite(y, d), SliceRows::new(stats.host_slice_mut(), 2));
        self.run_over_output_rows(m, 3 * d, outputs, |rows, (mut y, stats)| {
            normalize(self.instruction_set, &mut y, stats, &x.rows_to_f32(self, &rows, d), params);
        });
    }

    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        norm: LayerNormParams,
        m: usize,
    ) {
        let d = norm.w.len();
        let lens = [("y", y.len()), ("x", x.len()), ("delta", delta.len())];
        check_lengths("add_layernorm_forward", &lens, stats.len(), norm.b.len(), m, d);
        let (delta, w, b) = (InputElements::from(delta), self.to_f32(norm.w), self.to_f32(norm.b));
        let params = F32LayerNormParams { w: &w, b: &b, eps: norm.eps };
        let x = self.as_rows_to_update(x, d);
        let outputs = (self.as_rows_to_overwrite(y, d), SliceRows::new(stats.host_slice_mut(), 2), x);
        self.run_over_output_rows(m, 4 * d, outputs, |rows, (mut y, stats, mut x)| {
            add_slices(self.instruction_set, &mut x, &delta.rows_to_f32(self, &rows, d));
            x.round_now();
            normalize(self.instruction_set, &mut y, stats, &x, params);
        });
    }

    fn layernorm_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        db: ViewMut,
        dy: View,
        x: View,
        w: View,
        stats: View,
        m: usize,
        write: WriteMode,
    ) {
        let (op, d) = ("layernorm_backward", w.len());
        let lens = [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())];
        check_lengths(op, &lens, stats.len(), db.len(), m, d);
        expect_lens(op, [("dw", dw.len(), d)]);
        let (dy, x, w) = (InputElements::from(dy), InputElements::from(x), self.to_f32(w));
        let (dx, stats) = (self.as_output_rows(dx, d, write), stats.host_slice());
        self.run_over_rows_and_sum(
            m,
            dx,
            [dw.host_slice_mut(), db.host_slice_mut()],
            |rows, mut dx, grads| {
                let (dy, x) = (dy.rows_to_f32(self, &rows, d), x.rows_to_f32(self, &rows, d));
                let stats = &stats[2 * rows.start..2 * rows.end];
                let inputs = LayerNormBackwardRows { dy: &dy, x: &x, w: &w, stats };
                let (dw, db) = grads.split_at_mut(d);
                differentiate(self.instruction_set, &mut dx, dw, db, inputs, write);
            },
        );
    }
}

/// Panics if an argument of the LayerNorm op `op` has a length that does not fit `m` rows of `d`
/// elements.
fn check_lengths(op: &str, matrices: &[(&str, usize)], stats: usize, b: usize, m: usize, d: usize) {
    assert!(d > 0, "{op}: d is 0");
    matrices.iter().for_each(|(name, len)| expect_lens(op, [(name, *len, m * d)]));
    expect_lens(op, [("stats", stats, 2 * m), ("b", b, d)]);
}

multiversion! {
    /// Computes LayerNorm of each row with the given instruction set, and writes mean and
    /// reciprocal standard deviation of the rows to `stats`.
    fn normalize = normalize_rows(y: &mut [f32], stats: &mut [f32], x: &[f32], norm: F32LayerNormParams)
}
multiversion! {
    /// Computes LayerNorm's gradients of the input, weight and bias for the rows of one parallel
    /// task, with the given instruction set.
    fn differentiate = differentiate_rows(
        dx: &mut [f32], dw: &mut [f32], db: &mut [f32], inputs: LayerNormBackwardRows, write: WriteMode
    )
}

/// Weight and bias of a LayerNorm, converted to `f32`, and the epsilon that is added to the
/// variance.
#[derive(Clone, Copy)]
struct F32LayerNormParams<'a> {
    w: &'a [f32],
    b: &'a [f32],
    eps: f32,
}

/// Computes LayerNorm, `y = (x − mean)·rstd·w + b`, for each row, and writes mean and rstd to
/// `stats`. The differences from the mean are stored in `y` first, because the variance is their
/// mean square. Lanes past the end of a row read as 0 there.
#[inline(always)]
fn normalize_rows<S: Simd>(s: S, y: &mut [f32], stats: &mut [f32], x: &[f32], norm: F32LayerNormParams) {
    let F32LayerNormParams { w, b, eps } = norm;
    let d = w.len();
    for (row, stats) in stats.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (x, y) = (&x[row * d..][..d], &mut y[row * d..][..d]);
        let mut sum = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            sum = s.add(sum, load_lanes(s, x, i));
        }
        let mean = (f64::from(s.sum(sum)) / d as f64) as f32;
        for i in (0..d).step_by(LANES) {
            store_lanes(s, y, i, s.sub(load_lanes(s, x, i), s.splat(mean)));
        }
        let mut squares = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            let c = load_lanes(s, y, i);
            squares = s.fma(c, c, squares);
        }
        let variance = f64::from(s.sum(squares)) / d as f64;
        let rstd = (1.0 / (variance + f64::from(eps)).sqrt()) as f32;
        for i in (0..d).step_by(LANES) {
            let xhat = s.mul(load_lanes(s, y, i), s.splat(rstd));
            store_lanes(s, y, i, s.fma(xhat, load_lanes(s, w, i), load_lanes(s, b, i)));
        }
        *stats = [mean, rstd];
    }
}

/// Inputs of LayerNorm's backward pass for one parallel task: the weight, and the task's rows of
/// the input, of the output gradient and of the statistics.
#[derive(Clone, Copy)]
struct LayerNormBackwardRows<'a> {
    dy: &'a [f32],
    x: &'a [f32],
    w: &'a [f32],
    stats: &'a [f32],
}

/// Computes LayerNorm's gradients of the input, weight and bias for the rows of one parallel task.
/// With x̂ = (x − mean)·rstd and g = dy·w, these are `dx (=|+=) rstd·(g − mean(g) −
/// x̂·mean(g·x̂))`, `dw += dy·x̂` and `db += dy`.
#[inline(always)]
fn differentiate_rows<S: Simd>(
    s: S,
    dx: &mut [f32],
    dw: &mut [f32],
    db: &mut [f32],
    inputs: LayerNormBackwardRows,
    write: WriteMode,
) {
    let d = inputs.w.len();
    for (row, &[mean, rstd]) in inputs.stats.as_chunks::<2>().0.iter().enumerate() {
        let (dy, x) = (&inputs.dy[row * d..][..d], &inputs.x[row * d..][..d]);
        let dx = &mut dx[row * d..][..d];
        let (mean, rstd) = (s.splat(mean), s.splat(rstd));
        let (mut sum, mut dot) = (s.splat(0.0), s.splat(0.0));
        for i in (0..d).step_by(LANES) {
            let (dy, xhat) = (load_lanes(s, dy, i), s.mul(s.sub(load_lanes(s, x, i), mean), rstd));
            store_lanes(s, db, i, s.add(load_lanes(s, db, i), dy));
            store_lanes(s, dw, i, s.fma(dy, xhat, load_lanes(s, dw, i)));
            let g = s.mul(dy, load_lanes(s, inputs.w, i));
            sum = s.add(sum, g);
            dot = s.fma(g, xhat, dot);
        }
        let mean_g = s.splat((f64::from(s.sum(sum)) / d as f64) as f32);
        let mean_dot = s.splat((f64::from(s.sum(dot)) / d as f64) as f32);
        for i in (0..d).step_by(LANES) {
            let xhat = s.mul(s.sub(load_lanes(s, x, i), mean), rstd);
            let g = s.sub(s.mul(load_lanes(s, dy, i), load_lanes(s, inputs.w, i)), mean_g);
            let v = s.mul(rstd, s.fnma(xhat, mean_dot, g));
            let v = if write == WriteMode::Accumulate { s.add(load_lanes(s, dx, i), v) } else { v };
            store_lanes(s, dx, i, v);
        }
    }
}
