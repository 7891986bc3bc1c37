//! RMSNorm, alone and after a residual add.
use super::bias::add_in_order;
use super::flat::add_range;
use super::half::{In, Old, Out, Written};
use super::simd::{LANES, Simd, get, multiversion, put};
use super::{Cpu, Parts, expect_len};
use crate::ops::Write;

/// Rows whose share of the weight's gradient is summed before it is added to the others'.
const ROWS: usize = 32;

pub(crate) fn forward(cpu: &Cpu, y: Out, rstd: &mut [f32], x: In, w: In, m: usize, d: usize, eps: f32) {
    check("rmsnorm_forward", &[("y", y.len()), ("x", x.len())], rstd.len(), w.len(), m, d);
    let (w, rstd) = (w.all(cpu), Parts::new(rstd));
    cpu.by_rows(m, 2 * d, |rows| {
        // SAFETY: tasks have rows of their own.
        let (mut y, rstd) =
            unsafe { (y.part(rows.start * d..rows.end * d, Old::Lost), rstd.part(rows.clone())) };
        normalise(cpu.level, &mut y, rstd, &x.part(cpu, rows.start * d..rows.end * d), &w, eps);
    });
}

pub(crate) fn add_forward(
    cpu: &Cpu,
    y: Out,
    rstd: &mut [f32],
    x: Out,
    delta: In,
    w: In,
    m: usize,
    d: usize,
    eps: f32,
) {
    let lens = [("y", y.len()), ("x", x.len()), ("delta", delta.len())];
    check("add_rmsnorm_forward", &lens, rstd.len(), w.len(), m, d);
    let (w, rstd) = (w.all(cpu), Parts::new(rstd));
    cpu.by_rows(m, 3 * d, |rows| {
        let elements = rows.start * d..rows.end * d;
        // SAFETY: tasks have rows of their own.
        let (mut y, rstd, mut x) = unsafe {
            (y.part(elements.clone(), Old::Lost), rstd.part(rows), x.part(elements.clone(), Old::Read))
        };
        let delta = delta.part(cpu, elements);
        match &mut x {
            Written::There(x) => add_normalise(cpu.level, &mut y, rstd, x, &delta, &w, eps),
            // The norm is of the sum as it is kept: the backward will read that.
            sum => {
                add_range(cpu.level, sum, &delta);
                sum.settle();
                normalise(cpu.level, &mut y, rstd, sum, &w, eps);
            }
        }
    });
}

pub(crate) fn backward(
    cpu: &Cpu,
    dx: Out,
    dw: &mut [f32],
    dy: In,
    x: In,
    w: In,
    rstd: &[f32],
    m: usize,
    d: usize,
    write: Write,
) {
    let lens = [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())];
    check("rmsnorm_backward", &lens, rstd.len(), w.len(), m, d);
    expect_len("rmsnorm_backward", "dw", dw.len(), d);
    let chunks = m.div_ceil(ROWS);
    let mut sums = cpu.scratch.take(chunks * d);
    let (w, parts) = (w.all(cpu), Parts::new(&mut sums));
    let old = if write == Write::Add { Old::Read } else { Old::Lost };
    cpu.pool.run(chunks, &|chunk| {
        let rows = chunk * ROWS..((chunk + 1) * ROWS).min(m);
        let elements = rows.start * d..rows.end * d;
        // SAFETY: tasks have rows and a row of sums of their own.
        let (mut dx, dw) =
            unsafe { (dx.part(elements.clone(), old), parts.part(chunk * d..(chunk + 1) * d)) };
        dw.fill(0.0);
        let (dy, x) = (dy.part(cpu, elements.clone()), x.part(cpu, elements));
        let given = Rows { dy: &dy, x: &x, w: &w, rstd: &rstd[rows] };
        differentiate(cpu.level, &mut dx, dw, given, write);
    });
    add_in_order(dw, &mut sums[..chunks * d]);
}

fn check(op: &str, matrices: &[(&str, usize)], rstd: usize, w: usize, m: usize, d: usize) {
    assert!(d > 0, "{op}: rows of no element have no mean");
    for (name, len) in matrices {
        expect_len(op, name, *len, m * d);
    }
    expect_len(op, "rstd", rstd, m);
    expect_len(op, "w", w, d);
}

multiversion! {
    pub(super) fn normalise = normalise_rows(y: &mut [f32], rstd: &mut [f32], x: &[f32], w: &[f32], eps: f32)
}
multiversion! {
    fn add_normalise = add_normalise_rows(
        y: &mut [f32], rstd: &mut [f32], x: &mut [f32], delta: &[f32], w: &[f32], eps: f32
    )
}
multiversion! {
    pub(super) fn differentiate = differentiate_rows(dx: &mut [f32], dw: &mut [f32], given: Rows, write: Write)
}

#[inline(always)]
fn normalise_rows<S: Simd>(s: S, y: &mut [f32], rstd: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    let d = w.len();
    for (row, rstd) in rstd.iter_mut().enumerate() {
        let (x, y) = (&x[row * d..][..d], &mut y[row * d..][..d]);
        let mut squares = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            let x = get(s, x, i);
            squares = s.fma(x, x, squares);
        }
        *rstd = scale_row(s, y, x, w, squares, eps);
    }
}

#[inline(always)]
fn add_normalise_rows<S: Simd>(
    s: S,
    y: &mut [f32],
    rstd: &mut [f32],
    x: &mut [f32],
    delta: &[f32],
    w: &[f32],
    eps: f32,
) {
    let d = w.len();
    for (row, rstd) in rstd.iter_mut().enumerate() {
        let (x, delta) = (&mut x[row * d..][..d], &delta[row * d..][..d]);
        let mut squares = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            let sum = s.add(get(s, x, i), get(s, delta, i));
            put(s, x, i, sum);
            squares = s.fma(sum, sum, squares);
        }
        *rstd = scale_row(s, &mut y[row * d..][..d], x, w, squares, eps);
    }
}

/// `y = x · rstd · w`; returns rstd.
#[inline(always)]
fn scale_row<S: Simd>(s: S, y: &mut [f32], x: &[f32], w: &[f32], squares: S::V, eps: f32) -> f32 {
    let d = x.len();
    let mean = f64::from(s.sum(squares)) / d as f64;
    let rstd = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
    let r = s.splat(rstd);
    for i in (0..d).step_by(LANES) {
        put(s, y, i, s.mul(s.mul(get(s, x, i), r), get(s, w, i)));
    }
    rstd
}

/// Inputs of the backward over some rows.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) dy: &'a [f32],
    pub(super) x: &'a [f32],
    pub(super) w: &'a [f32],
    pub(super) rstd: &'a [f32],
}

/// With x̂ = x·rstd and g = dy·w: `dx = rstd·(g − x̂·mean(g·x̂))`, `dw += dy·x̂`.
#[inline(always)]
fn differentiate_rows<S: Simd>(s: S, dx: &mut [f32], dw: &mut [f32], given: Rows, write: Write) {
    let d = given.w.len();
    for (row, &rstd) in given.rstd.iter().enumerate() {
        let (dy, x) = (&given.dy[row * d..][..d], &given.x[row * d..][..d]);
        let dx = &mut dx[row * d..][..d];
        let r = s.splat(rstd);
        let mut dot = s.splat(0.0);
        for i in (0..d).step_by(LANES) {
            let (dy, xhat) = (get(s, dy, i), s.mul(get(s, x, i), r));
            put(s, dw, i, s.fma(dy, xhat, get(s, dw, i)));
            dot = s.fma(s.mul(dy, get(s, given.w, i)), xhat, dot);
        }
        let mean = s.splat((f64::from(s.sum(dot)) / d as f64) as f32);
        for i in (0..d).step_by(LANES) {
            let xhat = s.mul(get(s, x, i), r);
            let g = s.mul(get(s, dy, i), get(s, given.w, i));
            let v = s.mul(r, s.fnma(xhat, mean, g));
            let v = if write == Write::Add { s.add(get(s, dx, i), v) } else { v };
            put(s, dx, i, v);
        }
    }
}
