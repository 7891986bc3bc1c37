//! Rows that go to experts and come back: gathered, added up with weights, scaled, multiplied with each other.
use super::half::{Element, In, Old, Out, with_elements};
use super::simd::{LANES, Simd, get, multiversion, put};
use super::{Cpu, Parts, expect_len};
use crate::ops::Write;

pub(crate) fn gather(cpu: &Cpu, y: Out, x: In, rows: &[u32], d: usize) {
    expect_len("gather_rows", "y", y.len(), rows.len() * d);
    cpu.by_rows(rows.len(), d, |range| {
        // SAFETY: tasks have rows of their own.
        let mut y = unsafe { y.part(range.start * d..range.end * d, Old::Lost) };
        for (y, &row) in y.chunks_exact_mut(d.max(1)).zip(&rows[range]) {
            x.slice(row as usize * d..(row as usize + 1) * d).copy_to(cpu, y);
        }
    });
}

/// What [`combine`] adds up.
#[derive(Clone, Copy)]
pub(crate) struct Sum<'a> {
    pub(crate) x: In<'a>,
    pub(crate) weights: Option<&'a [f32]>,
    pub(crate) places: &'a [u32],
    pub(crate) d: usize,
    pub(crate) write: Write,
}

pub(crate) fn combine(cpu: &Cpu, y: Out, m: usize, sum: Sum) {
    let per_row = sum.places.len().checked_div(m).unwrap_or(0);
    expect_len("combine_rows", "y", y.len(), m * sum.d);
    expect_len("combine_rows", "places", sum.places.len(), m * per_row);
    if let Some(w) = sum.weights {
        expect_len("combine_rows", "weights", w.len(), sum.places.len());
    }
    let old = if sum.write == Write::Add { Old::Read } else { Old::Lost };
    cpu.by_rows(m, sum.d * per_row.max(1), |range| {
        for row in range {
            // SAFETY: tasks have rows of their own.
            let mut y = unsafe { y.part(row * sum.d..(row + 1) * sum.d, old) };
            add_up(cpu.level, &mut y, row * per_row..(row + 1) * per_row, sum);
        }
    });
}

pub(crate) fn dots(cpu: &Cpu, out: &mut [f32], a: In, b: In, d: usize) {
    expect_len("row_dots", "a", a.len(), out.len() * d);
    expect_len("row_dots", "b", b.len(), out.len() * d);
    let rows = out.len();
    let out = Parts::new(out);
    cpu.by_rows(rows, d, |range| {
        let elements = range.start * d..range.end * d;
        let (a, b) = (a.part(cpu, elements.clone()), b.part(cpu, elements));
        // SAFETY: tasks have rows of their own.
        for (i, out) in unsafe { out.part(range) }.iter_mut().enumerate() {
            *out = dot(cpu.level, &a[i * d..][..d], &b[i * d..][..d]);
        }
    });
}

pub(crate) fn scale(cpu: &Cpu, x: Out, factors: &[f32], d: usize) {
    expect_len("scale_rows", "x", x.len(), factors.len() * d);
    cpu.by_rows(factors.len(), d, |range| {
        // SAFETY: tasks have rows of their own.
        let mut x = unsafe { x.part(range.start * d..range.end * d, Old::Read) };
        for (x, factor) in x.chunks_exact_mut(d.max(1)).zip(&factors[range]) {
            x.iter_mut().for_each(|x| *x *= factor);
        }
    });
}

multiversion! {
    fn add_up = add_rows(y: &mut [f32], of: std::ops::Range<usize>, sum: Sum)
}
multiversion! {
    fn dot = dot_rows(a: &[f32], b: &[f32]) -> f32
}

#[inline(always)]
fn add_rows<S: Simd>(s: S, y: &mut [f32], of: std::ops::Range<usize>, sum: Sum) {
    with_elements!(sum.x, x => add_elements(s, y, x, of, sum));
}

/// In the order of `places`, whatever rows of `x` they name.
#[inline(always)]
fn add_elements<S: Simd, E: Element>(s: S, y: &mut [f32], x: &[E], of: std::ops::Range<usize>, sum: Sum) {
    for i in (0..sum.d).step_by(LANES) {
        let mut total = s.splat(0.0);
        for k in of.clone() {
            let x = E::lanes(s, &x[sum.places[k] as usize * sum.d..][..sum.d], i);
            total = match sum.weights {
                Some(w) => s.fma(x, s.splat(w[k]), total),
                None => s.add(total, x),
            };
        }
        if sum.write == Write::Add {
            total = s.add(get(s, y, i), total);
        }
        put(s, y, i, total);
    }
}

#[inline(always)]
fn dot_rows<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut total = s.splat(0.0);
    for i in (0..a.len()).step_by(LANES) {
        total = s.fma(get(s, a, i), get(s, b, i), total);
    }
    s.sum(total)
}
