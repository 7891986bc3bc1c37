//! LayerNorm with bias (Ba et al., 2016), alone and after a residual add.
//!
//! Sums over a row have 16 lanes, which are then added in the order of [`Simd::sum`]. Gradients of
//! weight and bias are summed over chunks of rows, and the chunks' sums are added in order.
use super::backend::Cpu;
use super::bias::add_partial_sums;
use super::disjoint_slices::DisjointSlices;
use super::elements::{InputElements, OutputElements, PriorContents};
use super::elementwise::add_slices;
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::ops::WriteMode;
use crate::ops::expect_len;

/// Number of rows whose contributions to the gradients of weight and bias are summed first, before
/// the sums are added in order.
const ROWS_PER_PARTIAL_SUM: usize = 32;

/// Parameters of a LayerNorm ([`crate::ops::LayerNormParams`]), as inputs with elements of any
/// type.
#[derive(Clone, Copy)]
pub(crate) struct LayerNormParamInputs<'a> {
    /// Weight, one element per column.
    pub(crate) w: InputElements<'a>,
    /// Bias, one element per column.
    pub(crate) b: InputElements<'a>,
    /// Number that is added to the variance before the square root.
    pub(crate) eps: f32,
}

/// Implements [`crate::Ops::layernorm_forward`].
pub(crate) fn forward(
    cpu: &Cpu,
    y: OutputElements,
    stats: &mut [f32],
    x: InputElements,
    norm: LayerNormParamInputs,
    m: usize,
) {
    let d = check_lengths("layernorm_forward", &[("y", y.len()), ("x", x.len())], stats.len(), norm, m);
    let (w, b, stats) = (norm.w.all_to_f32(cpu), norm.b.all_to_f32(cpu), DisjointSlices::new(stats));
    let params = F32LayerNormParams { w: &w, b: &b, eps: norm.eps };
    cpu.run_over_rows(m, 3 * d, |rows| {
        let (elements, pairs) = (rows.start * d..rows.end * d, 2 * rows.start..2 * rows.end);
        // SAFETY: each task writes different rows.
        let (mut y, stats) =
            unsafe { (y.slice_as_f32(elements.clone(), PriorContents::Ignored), stats.slice_mut(pairs)) };
        normalize(cpu.instruction_set, &mut y, stats, &x.to_f32(cpu, elements), params);
    });
}

/// Implements [`crate::Ops::add_layernorm_forward`].
pub(crate) fn forward_with_residual(
    cpu: &Cpu,
    y: OutputElements,
    stats: &mut [f32],
    x: OutputElements,
    delta: InputElements,
    norm: LayerNormParamInputs,
    m: usize,
) {
    let lens = [("y", y.len()), ("x", x.len()), ("delta", delta.len())];
    let d = check_lengths("add_layernorm_forward", &lens, stats.len(), norm, m);
    let (w, b, stats) = (norm.w.all_to_f32(cpu), norm.b.all_to_f32(cpu), DisjointSlices::new(stats));
    let params = F32LayerNormParams { w: &w, b: &b, eps: norm.eps };
    cpu.run_over_rows(m, 4 * d, |rows| {
        let (elements, pairs) = (rows.start * d..rows.end * d, 2 * rows.start..2 * rows.end);
        // SAFETY: each task writes different rows.
        let (mut y, stats, mut x) = unsafe {
            (
                y.slice_as_f32(elements.clone(), PriorContents::Ignored),
                stats.slice_mut(pairs),
                x.slice_as_f32(elements.clone(), PriorContents::Read),
            )
        };
        add_slices(cpu.instruction_set, &mut x, &delta.to_f32(cpu, elements));
        x.round_now();
        normalize(cpu.instruction_set, &mut y, stats, &x, params);
    });
}

/// Implements [`crate::Ops::layernorm_backward`].
pub(crate) fn backward(
    cpu: &Cpu,
    dx: OutputElements,
    grads: [&mut [f32]; 2],
    dy: InputElements,
    x: InputElements,
    w: InputElements,
    stats: &[f32],
    m: usize,
    write: WriteMode,
) {
    let lens = [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())];
    let [dw, db] = grads;
    let d = check_lengths(
        "layernorm_backward",
        &lens,
        stats.len(),
        LayerNormParamInputs { w, b: InputElements::F32(db), eps: 0.0 },
        m,
    );
    expect_len("layernorm_backward", "dw", dw.len(), d);
    let w = w.all_to_f32(cpu);
    let prior = if write == WriteMode::Accumulate { PriorContents::Read } else { PriorContents::Ignored };
    let chunks = m.div_ceil(ROWS_PER_PARTIAL_SUM);
    let mut sums = [cpu.scratch.take(chunks * d), cpu.scratch.take(chunks * d)];
    let [w_sums, b_sums] = &mut sums;
    let parts = [DisjointSlices::new(w_sums), DisjointSlices::new(b_sums)];
    cpu.pool.run(chunks, &|chunk| {
        let rows = chunk * ROWS_PER_PARTIAL_SUM..((chunk + 1) * ROWS_PER_PARTIAL_SUM).min(m);
        let elements = rows.start * d..rows.end * d;
        let chunk_sums = chunk * d..(chunk + 1) * d;
        // SAFETY: each task writes different rows, and different rows of the partial sums.
        let (mut dx, dw, db) = unsafe {
            (
                dx.slice_as_f32(elements.clone(), prior),
                parts[0].slice_mut(chunk_sums.clone()),
                parts[1].slice_mut(chunk_sums),
            )
        };
        dw.fill(0.0);
        db.fill(0.0);
        let (dy, x) = (dy.to_f32(cpu, elements.clone()), x.to_f32(cpu, elements));
        let inputs =
            LayerNormBackwardRows { dy: &dy, x: &x, w: &w, stats: &stats[2 * rows.start..2 * rows.end] };
        differentiate(cpu.instruction_set, &mut dx, dw, db, inputs, write);
    });
    let [w_sums, b_sums] = &mut sums;
    add_partial_sums(dw, &mut w_sums[..chunks * d]);
    add_partial_sums(db, &mut b_sums[..chunks * d]);
}

/// Checks the lengths of an op's arguments and returns the number of elements in a row. Panics if a
/// length does not fit the shape.
fn check_lengths(
    op: &str,
    matrices: &[(&str, usize)],
    stats: usize,
    norm: LayerNormParamInputs,
    m: usize,
) -> usize {
    let d = norm.w.len();
    assert!(d > 0, "{op}: d is 0");
    for (name, len) in matrices {
        expect_len(op, name, *len, m * d);
    }
    expect_len(op, "stats", stats, 2 * m);
    expect_len(op, "b", norm.b.len(), d);
    d
}

multiversion! {
    fn normalize = normalize_rows(y: &mut [f32], stats: &mut [f32], x: &[f32], norm: F32LayerNormParams)
}
multiversion! {
    fn differentiate = differentiate_rows(
        dx: &mut [f32], dw: &mut [f32], db: &mut [f32], inputs: LayerNormBackwardRows, write: WriteMode
    )
}

/// Parameters of a LayerNorm, converted to `f32`.
#[derive(Clone, Copy)]
struct F32LayerNormParams<'a> {
    w: &'a [f32],
    b: &'a [f32],
    eps: f32,
}

/// Computes `y = (x − mean)·rstd·w + b` for each row, and writes mean and rstd to `stats`. The
/// differences from the mean are stored in `y` first, because the variance is their mean square.
/// Lanes past the end of a row read as 0 there.
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

/// Inputs of LayerNorm's backward pass for the rows that one task processes.
#[derive(Clone, Copy)]
struct LayerNormBackwardRows<'a> {
    dy: &'a [f32],
    x: &'a [f32],
    w: &'a [f32],
    stats: &'a [f32],
}

/// Computes the gradients of LayerNorm for some rows. With x̂ = (x − mean)·rstd and g = dy·w, these
/// are `dx (=|+=) rstd·(g − mean(g) − x̂·mean(g·x̂))`, `dw += dy·x̂` and `db += dy`.
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
