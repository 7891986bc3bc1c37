//! LayerNorm with a bias, alone and after a residual add.
use super::bias::add_in_order;
use super::flat::add_range;
use super::half::{In, Old, Out};
use super::simd::{LANES, Simd, get, multiversion, put};
use super::{Cpu, Parts, expect_len};
use crate::ops::Write;

/// Rows whose share of the gradients of weight and bias is summed before it is added to the others'.
const ROWS: usize = 32;

/// Weight, bias and what is added to the variance.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) w: In<'a>,
    pub(crate) b: In<'a>,
    pub(crate) eps: f32,
}

pub(crate) fn forward(cpu: &Cpu, y: Out, stats: &mut [f32], x: In, norm: Norm, m: usize) {
    let d = check("layernorm_forward", &[("y", y.len()), ("x", x.len())], stats.len(), norm, m);
    let (w, b, stats) = (norm.w.all(cpu), norm.b.all(cpu), Parts::new(stats));
    let wide = Wide { w: &w, b: &b, eps: norm.eps };
    cpu.by_rows(m, 3 * d, |rows| {
        let (elements, pairs) = (rows.start * d..rows.end * d, 2 * rows.start..2 * rows.end);
        // SAFETY: tasks have rows of their own.
        let (mut y, stats) = unsafe { (y.part(elements.clone(), Old::Lost), stats.part(pairs)) };
        normalise(cpu.level, &mut y, stats, &x.part(cpu, elements), wide);
    });
}

pub(crate) fn add_forward(cpu: &Cpu, y: Out, stats: &mut [f32], x: Out, delta: In, norm: Norm, m: usize) {
    let lens = [("y", y.len()), ("x", x.len()), ("delta", delta.len())];
    let d = check("add_layernorm_forward", &lens, stats.len(), norm, m);
    let (w, b, stats) = (norm.w.all(cpu), norm.b.all(cpu), Parts::new(stats));
    let wide = Wide { w: &w, b: &b, eps: norm.eps };
    cpu.by_rows(m, 4 * d, |rows| {
        let (elements, pairs) = (rows.start * d..rows.end * d, 2 * rows.start..2 * rows.end);
        // SAFETY: tasks have rows of their own.
        let (mut y, stats, mut x) = unsafe {
            (y.part(elements.clone(), Old::Lost), stats.part(pairs), x.part(elements.clone(), Old::Read))
        };
        add_range(cpu.level, &mut x, &delta.part(cpu, elements));
        x.settle();
        normalise(cpu.level, &mut y, stats, &x, wide);
    });
}

pub(crate) fn backward(
    cpu: &Cpu,
    dx: Out,
    grads: [&mut [f32]; 2],
    dy: In,
    x: In,
    w: In,
    stats: &[f32],
    m: usize,
    write: Write,
) {
    let lens = [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())];
    let [dw, db] = grads;
    let d = check("layernorm_backward", &lens, stats.len(), Norm { w, b: In::F32(db), eps: 0.0 }, m);
    expect_len("layernorm_backward", "dw", dw.len(), d);
    let w = w.all(cpu);
    let old = if write == Write::Add { Old::Read } else { Old::Lost };
    let chunks = m.div_ceil(ROWS);
    let mut sums = [cpu.scratch.take(chunks * d), cpu.scratch.take(chunks * d)];
    let [w_sums, b_sums] = &mut sums;
    let parts = [Parts::new(w_sums), Parts::new(b_sums)];
    cpu.pool.run(chunks, &|chunk| {
        let rows = chunk * ROWS..((chunk + 1) * ROWS).min(m);
        let elements = rows.start * d..rows.end * d;
        let own = chunk * d..(chunk + 1) * d;
        // SAFETY: tasks have rows and rows of sums of their own.
        let (mut dx, dw, db) =
            unsafe { (dx.part(elements.clone(), old), parts[0].part(own.clone()), parts[1].part(own)) };
        dw.fill(0.0);
        db.fill(0.0);
        let (dy, x) = (dy.part(cpu, elements.clone()), x.part(cpu, elements));
        let given = Rows { dy: &dy, x: &x, w: &w, stats: &stats[2 * rows.start..2 * rows.end] };
        differentiate(cpu.level, &mut dx, dw, db, given, write);
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
    fn normalise = normalise_rows(y: &mut [f32], stats: &mut [f32], x: &[f32], norm: Wide)
}
multiversion! {
    fn differentiate = differentiate_rows(
        dx: &mut [f32], dw: &mut [f32], db: &mut [f32], given: Rows, write: Write
    )
}

/// A [`Norm`] as `f32`.
#[derive(Clone, Copy)]
struct Wide<'a> {
    w: &'a [f32],
    b: &'a [f32],
    eps: f32,
}

/// `y = (x − mean)·rstd·w + b`; the sum of squares is that of the differences, which lie in `y` meanwhile: lanes past
/// the end of a row read as 0 from there.
#[inline(always)]
fn normalise_rows<S: Simd>(s: S, y: &mut [f32], stats: &mut [f32], x: &[f32], norm: Wide) {
    let Wide { w, b, eps } = norm;
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
