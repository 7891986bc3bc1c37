//! LayerNorm with a bias, alone and after a residual add.
use super::bias::add_in_order;
use super::simd::{LANES, Simd, get, multiversion, put};
use super::{Cpu, Parts, expect_len};
use crate::ops::Write;

/// Rows whose share of the gradients of weight and bias is summed before it is added to the others'.
const ROWS: usize = 32;

/// Weight, bias and what is added to the variance.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) w: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) eps: f32,
}

pub(crate) fn forward(cpu: &Cpu, y: &mut [f32], stats: &mut [f32], x: &[f32], norm: Norm, m: usize) {
    let d = check("layernorm_forward", &[("y", y.len()), ("x", x.len())], stats.len(), norm, m);
    let (y, stats) = (Parts::new(y), Parts::new(stats));
    cpu.by_rows(m, 3 * d, |rows| {
        let (elements, pairs) = (rows.start * d..rows.end * d, 2 * rows.start..2 * rows.end);
        // SAFETY: tasks have rows of their own.
        let (y, stats) = unsafe { (y.part(elements.clone()), stats.part(pairs)) };
        normalise(cpu.level, y, stats, &x[elements], norm);
    });
}

pub(crate) fn add_forward(
    cpu: &Cpu,
    y: &mut [f32],
    stats: &mut [f32],
    x: &mut [f32],
    delta: &[f32],
    norm: Norm,
    m: usize,
) {
    let lens = [("y", y.len()), ("x", x.len()), ("delta", delta.len())];
    let d = check("add_layernorm_forward", &lens, stats.len(), norm, m);
    let (y, stats, x) = (Parts::new(y), Parts::new(stats), Parts::new(x));
    cpu.by_rows(m, 4 * d, |rows| {
        let (elements, pairs) = (rows.start * d..rows.end * d, 2 * rows.start..2 * rows.end);
        // SAFETY: tasks have rows of their own.
        let (y, stats, x) =
            unsafe { (y.part(elements.clone()), stats.part(pairs), x.part(elements.clone())) };
        add(cpu.level, x, &delta[elements]);
        normalise(cpu.level, y, stats, x, norm);
    });
}

pub(crate) fn backward(
    cpu: &Cpu,
    dx: &mut [f32],
    grads: [&mut [f32]; 2],
    dy: &[f32],
    x: &[f32],
    w: &[f32],
    stats: &[f32],
    m: usize,
    write: Write,
) {
    let lens = [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())];
    let [dw, db] = grads;
    let d = check("layernorm_backward", &lens, stats.len(), Norm { w, b: db, eps: 0.0 }, m);
    expect_len("layernorm_backward", "dw", dw.len(), d);
    let chunks = m.div_ceil(ROWS);
    let mut sums = [cpu.scratch.take(chunks * d), cpu.scratch.take(chunks * d)];
    let [w_sums, b_sums] = &mut sums;
    let (dx, parts) = (Parts::new(dx), [Parts::new(w_sums), Parts::new(b_sums)]);
    cpu.pool.run(chunks, &|chunk| {
        let rows = chunk * ROWS..((chunk + 1) * ROWS).min(m);
        let elements = rows.start * d..rows.end * d;
        let own = chunk * d..(chunk + 1) * d;
        // SAFETY: tasks have rows and rows of sums of their own.
        let (dx, dw, db) =
            unsafe { (dx.part(elements.clone()), parts[0].part(own.clone()), parts[1].part(own)) };
        dw.fill(0.0);
        db.fill(0.0);
        let stats = &stats[2 * rows.start..2 * rows.end];
        differentiate(
            cpu.level,
            dx,
            dw,
            db,
            Rows { dy: &dy[elements.clone()], x: &x[elements], w, stats },
            write,
        );
    });
    let [w_sums, b_sums] = &mut sums;
    add_in_order(dw, &mut w_sums[..chunks * d]);
    add_in_order(db, &mut b_sums[..chunks * d]);
}

/// Checks the lengths; returns that of a row.
fn check(op: &str, matrices: &[(&str, usize)], stats: usize, norm: Norm, m: usize) -> usize {
    let d = norm.w.len();
    assert!(d > 0, "{op}: rows of no element have no mean");
    for (name, len) in matrices {
        expect_len(op, name, *len, m * d);
    }
    expect_len(op, "stats", stats, 2 * m);
    expect_len(op, "b", norm.b.len(), d);
    d
}

multiversion! {
    fn add = add_elements(x: &mut [f32], delta: &[f32])
}
multiversion! {
    fn normalise = normalise_rows(y: &mut [f32], stats: &mut [f32], x: &[f32], norm: Norm)
}
multiversion! {
    fn differentiate = differentiate_rows(
        dx: &mut [f32], dw: &mut [f32], db: &mut [f32], given: Rows, write: Write
    )
}

#[inline(always)]
fn add_elements<S: Simd>(s: S, x: &mut [f32], delta: &[f32]) {
    for i in (0..x.len()).step_by(LANES) {
        put(s, x, i, s.add(get(s, x, i), get(s, delta, i)));
    }
}

/// `y = (x − mean)·rstd·w + b`; the sum of squares is that of the differences, which lie in `y` meanwhile: lanes past
/// the end of a row read as 0 from there.
#[inline(always)]
fn normalise_rows<S: Simd>(s: S, y: &mut [f32], stats: &mut [f32], x: &[f32], norm: Norm) {
    let Norm { w, b, eps } = norm;
    let d = w.len();
    for (row, stats) in stats.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (x, y) = (&x[row * d..][..d], &mut y[row * d..][..d]);
        let mut sum = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            sum = s.add(sum, get(s, x, i));
        }
        let mean = (f64::from(s.sum(sum)) / d as f64) as f32;
        for i in (0..d).step_by(LANES) {
            put(s, y, i, s.sub(get(s, x, i), s.splat(mean)));
        }
        let mut squares = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            let c = get(s, y, i);
            squares = s.fma(c, c, squares);
        }
        let variance = f64::from(s.sum(squares)) / d as f64;
        let rstd = (1.0 / (variance + f64::from(eps)).sqrt()) as f32;
        for i in (0..d).step_by(LANES) {
            let xhat = s.mul(get(s, y, i), s.splat(rstd));
            put(s, y, i, s.fma(xhat, get(s, w, i), get(s, b, i)));
        }
        *stats = [mean, rstd];
    }
}

/// Inputs of the backward over some rows.
#[derive(Clone, Copy)]
struct Rows<'a> {
    dy: &'a [f32],
    x: &'a [f32],
    w: &'a [f32],
    stats: &'a [f32],
}

/// With x̂ = (x − mean)·rstd and g = dy·w: `dx = rstd·(g − mean(g) − x̂·mean(g·x̂))`, `dw += dy·x̂`, `db += dy`.
#[inline(always)]
fn differentiate_rows<S: Simd>(
    s: S,
    dx: &mut [f32],
    dw: &mut [f32],
    db: &mut [f32],
    given: Rows,
    write: Write,
) {
    let d = given.w.len();
    for (row, &[mean, rstd]) in given.stats.as_chunks::<2>().0.iter().enumerate() {
        let (dy, x) = (&given.dy[row * d..][..d], &given.x[row * d..][..d]);
        let dx = &mut dx[row * d..][..d];
        let (mean, rstd) = (s.splat(mean), s.splat(rstd));
        let (mut sum, mut dot) = (s.splat(0.0), s.splat(0.0));
        for i in (0..d).step_by(LANES) {
            let (dy, xhat) = (get(s, dy, i), s.mul(s.sub(get(s, x, i), mean), rstd));
            put(s, db, i, s.add(get(s, db, i), dy));
            put(s, dw, i, s.fma(dy, xhat, get(s, dw, i)));
            let g = s.mul(dy, get(s, given.w, i));
            sum = s.add(sum, g);
            dot = s.fma(g, xhat, dot);
        }
        let of_g = s.splat((f64::from(s.sum(sum)) / d as f64) as f32);
        let of_dot = s.splat((f64::from(s.sum(dot)) / d as f64) as f32);
        for i in (0..d).step_by(LANES) {
            let xhat = s.mul(s.sub(get(s, x, i), mean), rstd);
            let g = s.sub(s.mul(get(s, dy, i), get(s, given.w, i)), of_g);
            let v = s.mul(rstd, s.fnma(xhat, of_dot, g));
            let v = if write == Write::Add { s.add(get(s, dx, i), v) } else { v };
            put(s, dx, i, v);
        }
    }
}
