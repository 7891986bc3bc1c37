//! Muon (Jordan et al. 2024): a matrix moves along its momentum made orthogonal, by five Newton–Schulz steps in fp32.
//!
//! As torch.optim.Muon with Nesterov momentum and `adjust_lr_fn="match_rms_adamw"`: the learning rate is multiplied by
//! 0.2·√max(rows, columns), so that one that suits AdamW suits Muon. A matrix is made orthogonal whole, by every rank that
//! updates some of it: the same arithmetic on the same numbers, whatever the sharding.
use device::{Buf, Dtype, Ops, View, needed_for, ops::Write};

/// Steps of the iteration.
const STEPS: usize = 5;
/// Coefficients of its polynomial a·x + b·x³ + c·x⁵.
const COEFFICIENTS: (f32, f32, f32) = (3.4445, -4.7750, 2.0315);
/// Below it a norm is taken for this.
const EPS: f64 = 1e-7;

/// What the learning rate of a matrix of this shape is multiplied by.
pub(super) fn lr_factor(rows: usize, columns: usize) -> f64 {
    0.2 * (rows.max(columns) as f64).sqrt()
}

/// The nearest orthogonal matrix to `x[rows, columns]`, roughly: its singular values come to lie around 1.
pub(super) fn orthogonal(ops: &dyn Ops, x: View, rows: usize, columns: usize) -> Buf {
    let norm = ops.sum_of_squares(x).sqrt().max(EPS);
    let room = |len: usize| needed_for("Muon's matrices", || ops.zeroed(Dtype::F32, len));
    let tall = rows > columns;
    let (m, n) = if tall { (columns, rows) } else { (rows, columns) };
    let mut wide = room(m * n);
    match tall {
        true => ops.transpose(wide.view_mut(), x, rows, columns),
        false => ops.copy(wide.view_mut(), x),
    }
    ops.scale(wide.view_mut(), (1.0 / norm) as f32);
    let (mut gram, mut square, mut next) = (room(m * m), room(m * m), room(m * n));
    let (a, b, c) = COEFFICIENTS;
    for _ in 0..STEPS {
        ops.matmul_forward(gram.view_mut(), wide.view(), wide.view(), m, m, n, Write::Set);
        // it is symmetric: its transpose is itself
        ops.matmul_forward(square.view_mut(), gram.view(), gram.view(), m, m, m, Write::Set);
        ops.blend(square.view_mut(), c, gram.view(), b);
        ops.matmul_backward_input(next.view_mut(), square.view(), wide.view(), m, m, n, Write::Set);
        ops.blend(wide.view_mut(), a, next.view(), 1.0);
    }
    if tall {
        ops.transpose(next.view_mut(), wide.view(), columns, rows);
        return next;
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::cpu::Cpu;

    fn of(ops: &dyn Ops, x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        orthogonal(ops, x.into(), rows, columns).host().to_vec()
    }

    /// `[rows, columns]` to `[columns, rows]`.
    fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
    }

    #[test]
    fn singular_values_come_to_lie_around_one() {
        for (rows, columns) in [(1, 1), (3, 8), (8, 3), (17, 17), (1, 9)] {
            // rows that are nearly independent
            let x: Vec<f32> = (0..rows * columns).map(|i| ((i * i * 7 + 3 * i) % 23) as f32 - 11.0).collect();
            let y = of(&Cpu::new(1), &x, rows, columns);
            let flipped = of(&Cpu::new(2), &transposed(&x, rows, columns), columns, rows);
            // a tall one is computed as a wide one; a square one as it is
            if rows != columns {
                assert_eq!(
                    transposed(&flipped, columns, rows),
                    y,
                    "{rows} x {columns}: that of the transpose"
                );
            }
            // the sum of the squared singular values
            let squares: f32 = y.iter().map(|v| v * v).sum();
            let rank = rows.min(columns) as f32;
            assert!((0.3 * rank..1.6 * rank).contains(&squares), "{rows} x {columns}: {squares}");
        }
        assert_eq!(of(&Cpu::new(1), &[0.0; 6], 2, 3), [0.0; 6]);
    }
}
