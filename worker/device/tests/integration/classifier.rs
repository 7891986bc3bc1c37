//! Tests of the classifier (output layer with cross-entropy loss) on every instruction set of this
//! machine: its losses are compared with their definition in f64, and its gradients with finite
//! differences of that definition.

use crate::reference;
use crate::reference::*;
use device::Cpu;
use device::ops::{ClassifierGrads, ClassifierOps, ClassifierShape, IGNORE_LABEL, WriteMode};

#[test]
fn classifier_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(8);
    // 600 rows are more than one chunk.
    for (m, d, v) in [(1, 1, 1), (9, 5, 21), (600, 3, 19), (4, 7, 1100)] {
        let x: Vec<f32> = r.draw_vec(m * d).iter().map(|x| 4.0 * x).collect();
        let w = r.draw_vec(v * d);
        let label =
            |r: &mut TestRng| if r.draw_below(4) == 0 { IGNORE_LABEL } else { r.draw_below(v) as u32 };
        let labels: Vec<u32> = (0..m).map(|_| label(&mut r)).collect();
        let scale = 0.37;
        let total = |x: &[f64], w: &[f64]| {
            f64::from(scale) * reference::compute_cross_entropy(x, w, &labels, d, v).iter().sum::<f64>()
        };
        for cpu in open_backends() {
            let what = format!("{} {m}x{d}x{v}", cpu.describe());
            let shape = ClassifierShape { m, d, v, softcap: None };
            let want = reference::compute_cross_entropy(&to_f64(&x), &to_f64(&w), &labels, d, v);
            let (xv, wv) = ((&x[..]).into(), (&w[..]).into());
            let mut loss = r.draw_vec(m);
            cpu.compute_classifier_loss((&mut loss[..]).into(), xv, wv, &labels, shape, None);
            assert_close(&what, &loss, &want, 1e-6);
            for dw_write in [WriteMode::Overwrite, WriteMode::Accumulate] {
                let (mut dx, mut dw) = (r.draw_vec(m * d), vec![0.25; v * d]);
                let mut again = r.draw_vec(m);
                let grads =
                    ClassifierGrads { dx: (&mut dx[..]).into(), dw: (&mut dw[..]).into(), dw_write, scale };
                cpu.compute_classifier_loss((&mut again[..]).into(), xv, wv, &labels, shape, Some(grads));
                assert_eq!(loss, again);
                let (mut alone, dw_none) = (r.draw_vec(m * d), (&mut [][..]).into());
                let grads = ClassifierGrads { dx: (&mut alone[..]).into(), dw: dw_none, dw_write, scale };
                cpu.compute_classifier_loss((&mut again[..]).into(), xv, wv, &labels, shape, Some(grads));
                assert_eq!(dx, alone, "{what}: dx does not depend on whether dw is computed");
                if dw_write == WriteMode::Accumulate {
                    dw.iter_mut().for_each(|x| *x -= 0.25);
                }
                assert_gradient(&what, &dx, &to_f64(&x), 1 + m * d / 100, 3e-6, |x| total(x, &to_f64(&w)));
                assert_gradient(&what, &dw, &to_f64(&w), 1 + v * d / 100, 5e-6, |w| total(&to_f64(&x), w));
                for (row, _) in labels.iter().enumerate().filter(|(_, l)| **l == IGNORE_LABEL) {
                    assert_eq!(loss[row], 0.0);
                    assert!(dx[row * d..(row + 1) * d].iter().all(|x| *x == 0.0));
                }
            }
        }
    }
}

#[test]
fn classifier_of_capped_logits_matches_the_definition() {
    let mut r = TestRng::new(15);
    for (m, d, v) in [(9, 5, 21), (4, 7, 1100)] {
        let x: Vec<f32> = r.draw_vec(m * d).iter().map(|x| 4.0 * x).collect();
        let w = r.draw_vec(v * d);
        let labels: Vec<u32> =
            (0..m).map(|i| if i == 2 { IGNORE_LABEL } else { r.draw_below(v) as u32 }).collect();
        for cap in [Some(1.5), Some(30.0)] {
            let losses =
                |x: &[f64], w: &[f64]| reference::compute_capped_cross_entropy(x, w, &labels, d, v, cap);
            let total = |x: &[f64], w: &[f64]| 0.5 * losses(x, w).iter().sum::<f64>();
            for cpu in open_backends() {
                let what = format!("{} {m}x{d}x{v}, cap {cap:?}", cpu.describe());
                let (mut loss, mut dx, mut dw) = (r.draw_vec(m), r.draw_vec(m * d), r.draw_vec(v * d));
                let (dxv, dwv) = ((&mut dx[..]).into(), (&mut dw[..]).into());
                let grads = ClassifierGrads { dx: dxv, dw: dwv, dw_write: WriteMode::Overwrite, scale: 0.5 };
                let (xv, wv) = ((&x[..]).into(), (&w[..]).into());
                let shape = ClassifierShape { m, d, v, softcap: cap };
                cpu.compute_classifier_loss((&mut loss[..]).into(), xv, wv, &labels, shape, Some(grads));
                assert_close(&what, &loss, &losses(&to_f64(&x), &to_f64(&w)), 1e-6);
                assert_gradient(&what, &dx, &to_f64(&x), 1, 3e-6, |x| total(x, &to_f64(&w)));
                assert_gradient(&what, &dw, &to_f64(&w), 1 + v * d / 100, 5e-6, |w| total(&to_f64(&x), w));
            }
        }
    }
}

#[test]
fn classifier_without_rows_clears_the_weights_gradient() {
    let cpu = Cpu::new(1);
    let (w, mut dw) = ([1.0; 6], [3.0; 6]);
    for (dw_write, want) in [(WriteMode::Accumulate, 3.0), (WriteMode::Overwrite, 0.0)] {
        let dx = (&mut [][..]).into();
        let grads = ClassifierGrads { dx, dw: (&mut dw[..]).into(), dw_write, scale: 1.0 };
        let shape = ClassifierShape { m: 0, d: 2, v: 3, softcap: None };
        let (loss, x) = ((&mut [][..]).into(), (&[][..]).into());
        cpu.compute_classifier_loss(loss, x, (&w[..]).into(), &[], shape, Some(grads));
        assert_eq!(dw, [want; 6]);
    }
}

#[test]
fn extreme_and_non_finite_logits_have_the_expected_loss() {
    for cpu in open_backends() {
        let compute_loss = |w: &[f32]| {
            let mut loss = [0.0];
            let shape = ClassifierShape { m: 1, d: 1, v: w.len(), softcap: None };
            let loss_view = (&mut loss[..]).into();
            cpu.compute_classifier_loss(loss_view, (&[1.0][..]).into(), w.into(), &[0], shape, None);
            loss[0]
        };
        assert_eq!(compute_loss(&[3e38, -3e38]), 0.0);
        assert_eq!(compute_loss(&[-1000.0, 1000.0, 0.0]), 2000.0);
        // A NaN or infinity at any position reaches the loss.
        for at in 0..40 {
            for poison in [f32::NAN, f32::INFINITY] {
                let mut w = vec![0.5; 40];
                w[at] = poison;
                assert!(compute_loss(&w).is_nan() || compute_loss(&w) == f32::INFINITY, "{at} {poison}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "classifier: label Some(3) is not below the vocabulary size 3")]
fn labels_beyond_the_vocabulary_are_rejected() {
    let mut loss = [0.0];
    let (x, w) = ([0.0; 2], [0.0; 6]);
    let loss = (&mut loss[..]).into();
    let shape = ClassifierShape { m: 1, d: 2, v: 3, softcap: None };
    Cpu::new(1).compute_classifier_loss(loss, (&x[..]).into(), (&w[..]).into(), &[3], shape, None);
}
