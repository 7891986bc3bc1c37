//! Rotary position embedding (Su et al., 2021): the elements (i, i + head_dim/2) of a head are
//! rotated by angle i of the position.
use super::backend::Cpu;
use super::elements::{OutputElements, PriorContents};
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::ops::expect_len;

/// Shape of the matrix whose heads RoPE rotates. The matrix has `b·t` rows.
#[derive(Clone, Copy)]
pub(crate) struct RopeShape {
    /// Number of sequences.
    pub(crate) b: usize,
    /// Tokens of each sequence.
    pub(crate) t: usize,
    /// Number of heads at the beginning of each row that are rotated.
    pub(crate) heads: usize,
    /// Number of elements in a head.
    pub(crate) head_dim: usize,
    /// Number of elements in a row.
    pub(crate) stride: usize,
}

/// Rotates the first `heads` heads of every row in place, by the angles of the row's position. For
/// `sign` = 1 the angles are those of the tables, for `sign` = −1 the negative angles.
pub(crate) fn rotate_heads(
    cpu: &Cpu,
    x: OutputElements,
    cos: &[f32],
    sin: &[f32],
    shape: RopeShape,
    sign: f32,
) {
    let RopeShape { b, t, heads, head_dim, stride } = shape;
    assert!(head_dim % 2 == 0, "rope: head_dim {head_dim} is odd");
    assert!(
        heads * head_dim <= stride,
        "rope: {heads} heads of {head_dim} exceed the row of {stride} elements"
    );
    expect_len("rope", "x", x.len(), b * t * stride);
    expect_len("rope", "cos", cos.len(), t * head_dim / 2);
    expect_len("rope", "sin", sin.len(), t * head_dim / 2);
    cpu.run_over_rows(b * t, heads * head_dim, |rows| {
        for row in rows {
            let angles = row % t * head_dim / 2..(row % t + 1) * head_dim / 2;
            // SAFETY: each task writes different rows.
            let mut x =
                unsafe { x.slice_as_f32(row * stride..row * stride + heads * head_dim, PriorContents::Read) };
            rotate_row(cpu.instruction_set, &mut x, &cos[angles.clone()], &sin[angles], sign);
        }
    });
}

multiversion! {
    fn rotate_row = rotate_row_simd(x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32)
}

/// Rotates the heads of one row in place. `cos` and `sin` are the tables' rows for the row's
/// position, and `sign` is 1 or −1.
#[inline(always)]
fn rotate_row_simd<S: Simd>(s: S, x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    let half = cos.len();
    if half == 0 {
        return;
    }
    for head in x.chunks_exact_mut(2 * half) {
        let (first, second) = head.split_at_mut(half);
        for i in (0..half).step_by(LANES) {
            let (c, sn) = (load_lanes(s, cos, i), s.mul(load_lanes(s, sin, i), s.splat(sign)));
            let (a, b) = (load_lanes(s, first, i), load_lanes(s, second, i));
            store_lanes(s, first, i, s.fnma(b, sn, s.mul(a, c)));
            store_lanes(s, second, i, s.fma(a, sn, s.mul(b, c)));
        }
    }
}
