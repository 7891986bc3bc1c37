//! Small elementwise ops on vectors of `f32`, and the matrix transpose: what few models and Muon need.
use super::half::{Old, Out};
use super::{Cpu, Parts, expect_len};
use crate::{ops::Dropout, philox::words};

pub(crate) fn offset(cpu: &Cpu, y: &mut [f32], s: f32) {
    let len = y.len();
    let y = Parts::new(y);
    cpu.by_elements(len, |r| {
        // SAFETY: tasks have ranges of their own.
        unsafe { y.part(r) }.iter_mut().for_each(|y| *y += s);
    });
}

pub(crate) fn blend(cpu: &Cpu, y: &mut [f32], a: f32, x: &[f32], b: f32) {
    expect_len("blend", "x", x.len(), y.len());
    let y = Parts::new(y);
    cpu.by_elements(x.len(), |r| {
        // SAFETY: tasks have ranges of their own.
        let own = unsafe { y.part(r.clone()) };
        own.iter_mut().zip(&x[r]).for_each(|(y, x)| *y = a * *y + b * x);
    });
}

pub(crate) fn softcap(cpu: &Cpu, y: &mut [f32], cap: f32) {
    let len = y.len();
    let y = Parts::new(y);
    cpu.by_elements(len, |r| {
        // SAFETY: tasks have ranges of their own.
        unsafe { y.part(r) }.iter_mut().for_each(|y| *y = cap * libm::tanhf(*y / cap));
    });
}

pub(crate) fn transpose(cpu: &Cpu, y: &mut [f32], x: &[f32], rows: usize, columns: usize) {
    expect_len("transpose", "x", x.len(), rows * columns);
    expect_len("transpose", "y", y.len(), rows * columns);
    let y = Parts::new(y);
    cpu.by_rows(columns, rows, |range| {
        // SAFETY: tasks have rows of the result of their own.
        let own = unsafe { y.part(range.start * rows..range.end * rows) };
        for (column, row) in range.zip(own.chunks_exact_mut(rows.max(1))) {
            row.iter_mut().enumerate().for_each(|(i, y)| *y = x[i * columns + column]);
        }
    });
}

/// One after the other: the sum has one order, whatever the number of threads.
pub(crate) fn sum_of_squares(x: &[f32]) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum()
}

pub(crate) fn nesterov(cpu: &Cpu, buffer: &mut [f32], g: &mut [f32], mu: f64, scale: f32) {
    expect_len("nesterov", "g", g.len(), buffer.len());
    let (len, mu, rest) = (g.len(), mu as f32, (1.0 - mu) as f32);
    let (buffer, g) = (Parts::new(buffer), Parts::new(g));
    cpu.by_elements(len, |r| {
        // SAFETY: tasks have ranges of their own.
        let (buffer, g) = unsafe { (buffer.part(r.clone()), g.part(r)) };
        for (b, g) in buffer.iter_mut().zip(g) {
            let scaled = *g * scale;
            *b += rest * (scaled - *b);
            *g = scaled + mu * (*b - scaled);
        }
    });
}

pub(crate) fn dropout(cpu: &Cpu, x: Out, d: &Dropout) {
    let (len, threshold, keep) = (x.len(), d.threshold(), d.keep());
    if d.sample == 0 {
        return expect_len("dropout", "x", len, 0);
    }
    let per_sample = d.sample.div_ceil(4);
    expect_len("dropout", "x", len % d.sample, 0);
    // Elements before a block, counted over all samples.
    let before = |block: usize| block / per_sample * d.sample + 4 * (block % per_sample);
    cpu.by_rows(len / d.sample * per_sample, 4, |range| {
        let first = before(range.start);
        // SAFETY: blocks have elements of their own.
        let mut own = unsafe { x.part(first..before(range.end), Old::Read) };
        let mut rest = &mut own[..];
        for block in range {
            let (sample, block_of_sample) = (block / per_sample, block % per_sample);
            let drawn = words(d.key, block_of_sample as u64, d.first + sample as u64, 0);
            let (values, after) = rest.split_at_mut((before(block + 1) - before(block)).min(4));
            for (value, word) in values.iter_mut().zip(drawn) {
                *value = if u64::from(word) < threshold { 0.0 } else { *value * keep };
            }
            rest = after;
        }
    });
}
