//! Rotary position embedding (Su et al., 2021): rotates each pair (i, i + head_dim/2) of a head's
//! elements by an angle that depends on i and the position.
use super::backend::Cpu;
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd, load_lanes, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{RopeOps, RopeShape};

impl RopeOps for Cpu {
    fn rope_forward(&self, x: ViewMut, cos: View, sin: View, shape: RopeShape) {
        rotate_heads(self, x, cos, sin, shape, 1.0);
    }

    fn rope_backward(&self, dx: ViewMut, cos: View, sin: View, shape: RopeShape) {
        rotate_heads(self, dx, cos, sin, shape, -1.0);
    }
}

/// Applies rotary position embedding in place to the attention heads in the first columns of each
/// row of `x`. For `sign` = 1 the angles are those of the tables, for `sign` = −1 the negative
/// angles.
fn rotate_heads(cpu: &Cpu, x: ViewMut, cos: View, sin: View, shape: RopeShape, sign: f32) {
    shape.check_lengths(x.len(), cos.len(), sin.len());
    let RopeShape { b, t, heads, head_dim, stride } = shape;
    let (cos, sin, width) = (cos.host_slice(), sin.host_slice(), heads * head_dim);
    cpu.run_over_each_output_row(
        b * t,
        width,
        cpu.as_columns_to_update(x, 0..width, stride),
        |row, mut x| {
            let angles = row % t * head_dim / 2..(row % t + 1) * head_dim / 2;
            rotate_row(cpu.instruction_set, &mut x, &cos[angles.clone()], &sin[angles], sign);
        },
    );
}

multiversion! {
    /// Applies rotary position embedding to the heads of one row in place, with the given
    /// instruction set.
    fn rotate_row = rotate_row_simd(x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32)
}

/// Applies rotary position embedding to the heads of one row, in place. `cos` and `sin` are the
/// tables' rows for the position of the row. `sign` is 1 in the forward pass and −1 in the backward
/// pass.
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
