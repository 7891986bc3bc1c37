//! Muon (Jordan et al. 2024): a matrix moves along its momentum made orthogonal, by five Newton–Schulz steps in fp32.
//!
//! As torch.optim.Muon with Nesterov momentum and `adjust_lr_fn="match_rms_adamw"`: the learning rate is multiplied by
//! 0.2·√max(rows, columns), so that one that suits AdamW suits Muon. A matrix is made orthogonal whole, by every rank that
//! updates some of it: the same arithmetic on the same numbers, whatever the sharding.
use device::{Ops, View, ops::Write};

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

/// Momentum of some elements, and in place of their gradient the direction that is made orthogonal.
pub(super) fn momentum(buffer: &mut [f32], gradient: &mut [f32], mu: f64, scale: f32) {
    let (mu, rest) = (mu as f32, (1.0 - mu) as f32);
    for (b, g) in buffer.iter_mut().zip(gradient) {
        let scaled = *g * scale;
        *b += rest * (scaled - *b);
        *g = scaled + mu * (*b - scaled);
    }
}

/// The nearest orthogonal matrix to `x[rows, columns]`, roughly: its singular values come to lie around 1.
pub(super) fn orthogonal(ops: &dyn Ops, x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let norm = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt().max(EPS);
    let by = (1.0 / norm) as f32;
    let mut x: Vec<f32> = x.iter().map(|v| v * by).collect();
    let tall = rows > columns;
    let (m, n) = if tall { (columns, rows) } else { (rows, columns) };
    if tall {
        x = transposed(&x, rows, columns);
    }
    let (mut gram, mut square, mut next) = (vec![0f32; m * m], vec![0f32; m * m], vec![0f32; m * n]);
    let (a, b, c) = COEFFICIENTS;
    for _ in 0..STEPS {
        ops.matmul_forward((&mut gram[..]).into(), (&x[..]).into(), (&x[..]).into(), m, m, n, Write::Set);
        // it is symmetric: its transpose is itself
        let g = View::from(&gram[..]);
        ops.matmul_forward((&mut square[..]).into(), g, g, m, m, m, Write::Set);
        square.iter_mut().zip(&gram).for_each(|(s, g)| *s = b * g + c * *s);
        let (s, whole) = (View::from(&square[..]), View::from(&x[..]));
        ops.matmul_backward_input((&mut next[..]).into(), s, whole, m, m, n, Write::Set);
        x.iter_mut().zip(&next).for_each(|(x, y)| *x = a * *x + y);
    }
    if tall { transposed(&x, columns, rows) } else { x }
}

/// `[rows, columns]` to `[columns, rows]`.
fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::cpu::Cpu;

    #[test]
    fn singular_values_come_to_lie_around_one() {
        for (rows, columns) in [(1, 1), (3, 8), (8, 3), (17, 17), (1, 9)] {
            // rows that are nearly independent
            let x: Vec<f32> = (0..rows * columns).map(|i| ((i * i * 7 + 3 * i) % 23) as f32 - 11.0).collect();
            let y = orthogonal(&Cpu::new(1), &x, rows, columns);
            let flipped = orthogonal(&Cpu::new(2), &transposed(&x, rows, columns), columns, rows);
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
        assert_eq!(orthogonal(&Cpu::new(1), &[0.0; 6], 2, 3), [0.0; 6]);
    }
}
