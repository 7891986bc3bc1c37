//! Tests that the optimizers' updates equal torch's arithmetic, which is written here for single
//! elements.

use crate::reference;
use crate::reference::TestRng;
use device::Cpu;
use device::ops::{
    AdamWHyperparams, LionHyperparams, NORM_BLOCK_LEN, OptimizerOps, SgdHyperparams, VectorOps,
};

/// Computes the update of one element by torch.optim.AdamW (single tensor), rounded to f32 where
/// torch rounds.
fn update_as_torch_adamw(p: &mut f32, g: f32, m: &mut f32, v: &mut f32, h: &AdamWHyperparams) {
    let g = g * h.grad_scale;
    *p *= (1.0 - h.lr * h.weight_decay) as f32;
    let weight = (1.0 - h.beta1) as f32;
    *m = if weight < 0.5 { *m + weight * (g - *m) } else { g + (weight - 1.0) * (g - *m) };
    *v *= h.beta2 as f32;
    *v += (1.0 - h.beta2) as f32 * g * g;
    let correction1 = 1.0 - h.beta1.powi(h.step as i32);
    let correction2 = 1.0 - h.beta2.powi(h.step as i32);
    let denom = v.sqrt() / correction2.sqrt() as f32 + h.eps as f32;
    *p += -(h.lr / correction1) as f32 * *m / denom;
}

#[test]
fn adamw_updates_equal_torchs_arithmetic() {
    let mut r = TestRng::new(1);
    let len = 37;
    for cpu in Cpu::new_for_all_instruction_sets(2) {
        for beta1 in [0.9, 0.3] {
            let (mut p, mut m, mut v) = (r.draw_vec(len), vec![0.0; len], vec![0.0; len]);
            let (mut p1, mut m1, mut v1) = (p.clone(), m.clone(), v.clone());
            for step in 1..=20 {
                let g = r.draw_vec(len);
                let (lr, grad_scale) = (0.01 / step as f64, 0.5);
                let h = AdamWHyperparams {
                    lr,
                    beta1,
                    beta2: 0.95,
                    eps: 1e-8,
                    weight_decay: 0.1,
                    step,
                    grad_scale,
                };
                cpu.adamw(
                    (&mut p[..]).into(),
                    None,
                    (&g[..]).into(),
                    (&mut m[..]).into(),
                    (&mut v[..]).into(),
                    &h,
                );
                for i in 0..len {
                    update_as_torch_adamw(&mut p1[i], g[i], &mut m1[i], &mut v1[i], &h);
                }
                assert_eq!((&p, &m, &v), (&p1, &m1, &v1), "{} step {step}", cpu.describe());
            }
        }
    }
}

/// Checks that ten AdamW steps in f32 differ from the update rule in f64 by rounding only.
#[test]
fn ten_adamw_steps_match_the_update_rule_in_f64() {
    let mut r = TestRng::new(2);
    let len = 50;
    let cpu = Cpu::new(1);
    let (mut p, mut m, mut v) = (r.draw_vec(len), vec![0.0; len], vec![0.0; len]);
    let mut exact: Vec<[f64; 3]> = p.iter().map(|&p| [f64::from(p), 0.0, 0.0]).collect();
    for step in 1..=10u64 {
        let g = r.draw_vec(len);
        let h = AdamWHyperparams {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
            grad_scale: 1.0,
        };
        cpu.adamw((&mut p[..]).into(), None, (&g[..]).into(), (&mut m[..]).into(), (&mut v[..]).into(), &h);
        for ([p, m, v], g) in exact.iter_mut().zip(&g) {
            let g = f64::from(*g);
            *p -= h.lr * h.weight_decay * *p;
            *m = h.beta1 * *m + (1.0 - h.beta1) * g;
            *v = h.beta2 * *v + (1.0 - h.beta2) * g * g;
            let t = step as i32;
            let (m, v) = (*m / (1.0 - h.beta1.powi(t)), *v / (1.0 - h.beta2.powi(t)));
            *p -= h.lr * m / (v.sqrt() + h.eps);
        }
    }
    let want: Vec<f64> = exact.iter().map(|e| e[0]).collect();
    reference::assert_close("p", &p, &want, 1e-6);
}

#[test]
fn sgd_updates_equal_torchs_arithmetic() {
    let mut r = TestRng::new(3);
    let len = 37;
    for cpu in Cpu::new_for_all_instruction_sets(2) {
        for (momentum, weight_decay) in [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)] {
            let h = SgdHyperparams { lr: 0.1, momentum, weight_decay, grad_scale: 0.25 };
            let mut p = r.draw_vec(len);
            let mut buffer = if momentum == 0.0 { vec![] } else { vec![0.0; len] };
            let (mut p1, mut b1) = (p.clone(), vec![0.0f32; len]);
            for _ in 0..5 {
                let g = r.draw_vec(len);
                cpu.sgd((&mut p[..]).into(), (&g[..]).into(), (&mut buffer[..]).into(), &h);
                for i in 0..len {
                    let g = g[i] * h.grad_scale + weight_decay as f32 * p1[i];
                    b1[i] = momentum as f32 * b1[i] + g;
                    p1[i] -= h.lr as f32 * b1[i];
                }
                assert_eq!(p, p1, "{} {h:?}", cpu.describe());
            }
        }
    }
}

#[test]
fn six_lion_steps_match_the_update_rule_in_f64() {
    let mut r = TestRng::new(5);
    let len = 37;
    for cpu in Cpu::new_for_all_instruction_sets(2) {
        for weight_decay in [0.0, 0.1] {
            let h = LionHyperparams { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay, grad_scale: 0.25 };
            let (mut p, mut m) = (r.draw_vec(len), vec![0.0; len]);
            let mut exact: Vec<[f64; 2]> = p.iter().map(|&p| [f64::from(p), 0.0]).collect();
            for step in 0..6 {
                let mut g = r.draw_vec(len);
                // Without momentum and gradient the sign is 0.
                if step == 0 {
                    g[3] = 0.0;
                }
                cpu.lion((&mut p[..]).into(), (&g[..]).into(), (&mut m[..]).into(), &h);
                for ([p, m], g) in exact.iter_mut().zip(&g) {
                    let g = f64::from(g * h.grad_scale);
                    let direction = h.beta1 * *m + (1.0 - h.beta1) * g;
                    let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
                    *p = *p * (1.0 - h.lr * weight_decay) - h.lr * sign;
                    *m = h.beta2 * *m + (1.0 - h.beta2) * g;
                }
            }
            let (want_p, want_m): (Vec<f64>, Vec<f64>) = exact.iter().map(|[p, m]| (*p, *m)).unzip();
            reference::assert_close("p", &p, &want_p, 1e-6);
            reference::assert_close("exp_avg", &m, &want_m, 1e-6);
        }
    }
}

#[test]
fn sums_and_norms_match_their_definitions() {
    let mut r = TestRng::new(4);
    for len in [0, 1, 15, 4095, 4096, 4097, 40_000] {
        let (x, y) = (r.draw_vec(len), r.draw_vec(len));
        for cpu in Cpu::new_for_all_instruction_sets(3) {
            let mut sum = y.clone();
            cpu.add((&mut sum[..]).into(), (&x[..]).into());
            assert!(sum.iter().zip(x.iter().zip(&y)).all(|(s, (x, y))| *s == x + y));
            cpu.scale((&mut sum[..]).into(), 0.1);
            assert!(sum.iter().zip(x.iter().zip(&y)).all(|(s, (x, y))| *s == (x + y) * 0.1));
            let mut norms = vec![f64::NAN; len.div_ceil(NORM_BLOCK_LEN)];
            cpu.sum_squares_by_block(&mut norms, (&x[..]).into());
            for (norm, block) in norms.iter().zip(x.chunks(NORM_BLOCK_LEN)) {
                let want: f64 = block.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                assert!((norm - want).abs() <= 1e-12 * want, "{norm} {want}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "adamw: g has 3 elements, but the shape needs 4")]
fn vectors_of_different_lengths_are_rejected() {
    let (mut p, mut m, mut v) = ([0.0; 4], [0.0; 4], [0.0; 4]);
    let h = AdamWHyperparams {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.9,
        eps: 1e-8,
        weight_decay: 0.0,
        step: 1,
        grad_scale: 1.0,
    };
    Cpu::new(1).adamw(
        (&mut p[..]).into(),
        None,
        (&[0.0; 3][..]).into(),
        (&mut m[..]).into(),
        (&mut v[..]).into(),
        &h,
    );
}
