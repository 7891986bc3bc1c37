//! Rotary position embedding: the pair (i, i + head_dim/2) of a head is turned by the position's angle i.
use super::half::{Old, Out};
use super::simd::{LANES, Simd, get, multiversion, put};
use super::{Cpu, expect_len};

/// `b·t` rows of `stride` elements, of which the first `heads·head_dim` are turned.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) b: usize,
    pub(crate) t: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) stride: usize,
}

/// `sign` 1 turns forward, −1 back.
pub(crate) fn rotate(cpu: &Cpu, x: Out, cos: &[f32], sin: &[f32], shape: Shape, sign: f32) {
    let Shape { b, t, heads, head_dim, stride } = shape;
    assert!(head_dim % 2 == 0, "rope: head_dim {head_dim} is odd");
    assert!(heads * head_dim <= stride, "rope: {heads} heads of {head_dim} don't fit a row of {stride}");
    expect_len("rope", "x", x.len(), b * t * stride);
    expect_len("rope", "cos", cos.len(), t * head_dim / 2);
    expect_len("rope", "sin", sin.len(), t * head_dim / 2);
    cpu.by_rows(b * t, heads * head_dim, |rows| {
        for row in rows {
            let angles = row % t * head_dim / 2..(row % t + 1) * head_dim / 2;
            // SAFETY: tasks have rows of their own.
            let mut x = unsafe { x.part(row * stride..row * stride + heads * head_dim, Old::Read) };
            turn(cpu.level, &mut x, &cos[angles.clone()], &sin[angles], sign);
        }
    });
}

multiversion! {
    fn turn = turn_row(x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32)
}

#[inline(always)]
fn turn_row<S: Simd>(s: S, x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    let half = cos.len();
    if half == 0 {
        return;
    }
    for head in x.chunks_exact_mut(2 * half) {
        let (first, second) = head.split_at_mut(half);
        for i in (0..half).step_by(LANES) {
            let (c, sn) = (get(s, cos, i), s.mul(get(s, sin, i), s.splat(sign)));
            let (a, b) = (get(s, first, i), get(s, second, i));
            put(s, first, i, s.fnma(b, sn, s.mul(a, c)));
            put(s, second, i, s.fma(a, sn, s.mul(b, c)));
        }
    }
}
