//! Tests the ops of mixtures of experts on the CPU: router, row ops and grouped matmuls. Each
//! forward pass is compared with its definition in f64, and each backward pass with finite
//! differences. Any number of threads gives the same bits.

use crate::reference;
use crate::reference::*;
use device::Cpu;
use device::ops::{
    GroupedMatmulOps, MatmulOps, RouterBackwardInputs, RouterOps, RouterShape, RowGroup, RowOps, WriteMode,
};

/// Computes the softmax of each row of `logits`, in f64. Returns the probabilities, and the
/// log-sum-exp of each row.
fn compute_softmax(logits: &[f64], experts: usize) -> (Vec<f64>, Vec<f64>) {
    let lse = |row: &[f64]| row.iter().map(|x| x.exp()).sum::<f64>().ln();
    let lse: Vec<f64> = logits.chunks(experts).map(lse).collect();
    let probs = logits.iter().enumerate().map(|(i, x)| (x - lse[i / experts]).exp()).collect();
    (probs, lse)
}

/// Computes, in f64, the weights with which the outputs of each token's experts are summed. The
/// choice of experts is given, so that finite differences of the logits do not change it.
fn compute_expert_weights(logits: &[f64], chosen: &[u32], shape: RouterShape) -> Vec<f64> {
    let (probs, _) = compute_softmax(logits, shape.experts);
    let rows = chosen.chunks(shape.experts_per_token).zip(probs.chunks(shape.experts));
    rows.flat_map(|(chosen, probs)| {
        let p: Vec<f64> = chosen.iter().map(|&e| probs[e as usize]).collect();
        let sum = if shape.normalize_weights { p.iter().sum() } else { 1.0 };
        p.into_iter().map(move |p| p / sum)
    })
    .collect()
}

/// The outputs of the forward pass of a router, which selects the experts of each token.
struct RouterOutput {
    probs: Vec<f32>,
    weights: Vec<f32>,
    lse: Vec<f32>,
    chosen: Vec<u32>,
}

/// Runs the forward pass of a router on `logits`. The output buffers first contain arbitrary
/// values, which the router must overwrite.
fn run_router(cpu: &Cpu, logits: &[f32], s: RouterShape) -> RouterOutput {
    let mut r = RouterOutput {
        probs: vec![7.0; s.m * s.experts],
        weights: vec![7.0; s.m * s.experts_per_token],
        lse: vec![7.0; s.m],
        chosen: vec![99; s.m * s.experts_per_token],
    };
    let (probs, weights, lse) =
        ((&mut r.probs[..]).into(), (&mut r.weights[..]).into(), (&mut r.lse[..]).into());
    cpu.router_forward(probs, weights, lse, Some(&mut r.chosen), logits.into(), s);
    r
}

/// Returns the shapes (numbers of tokens, experts and so on) with which tests run the router.
fn list_router_shapes() -> impl Iterator<Item = RouterShape> {
    let sizes = [(1, 1, 1), (5, 3, 1), (40, 8, 2), (33, 6, 3), (7, 130, 8), (4, 5, 5)];
    sizes.into_iter().flat_map(|(m, experts, per_token)| {
        [false, true].map(|normalize| RouterShape {
            m,
            experts,
            experts_per_token: per_token,
            normalize_weights: normalize,
        })
    })
}

#[test]
fn the_router_chooses_the_most_probable_experts_and_has_the_right_gradient() {
    let mut r = TestRng::new(21);
    for shape in list_router_shapes() {
        let RouterShape { m, experts, experts_per_token: per_token, .. } = shape;
        let logits: Vec<f32> = r.draw_vec(m * experts).iter().map(|x| 3.0 * x).collect();
        let (dweights, balance, z) = (r.draw_vec(m * per_token), r.draw_vec(experts), 0.3);
        for cpu in Cpu::new_for_all_instruction_sets(2) {
            let what = format!("{} {shape:?}", cpu.describe());
            let got = run_router(&cpu, &logits, shape);
            let (probs, lse) = compute_softmax(&to_f64(&logits), experts);
            assert_close(&what, &got.probs, &probs, 1e-6);
            assert_close(&what, &got.lse, &lse, 1e-6);
            for (chosen, probs) in got.chosen.chunks(per_token).zip(got.probs.chunks(experts)) {
                let mut sorted: Vec<u32> = (0..experts as u32).collect();
                sorted.sort_by(|&a, &b| probs[b as usize].total_cmp(&probs[a as usize]).then(a.cmp(&b)));
                assert_eq!(chosen, &sorted[..per_token], "{what}");
            }
            assert_close(
                &what,
                &got.weights,
                &compute_expert_weights(&to_f64(&logits), &got.chosen, shape),
                1e-6,
            );

            let mut dlogits = vec![5.0; m * experts];
            let given = RouterBackwardInputs {
                probs: (&got.probs[..]).into(),
                lse: (&got.lse[..]).into(),
                chosen_experts: &got.chosen,
                balance_grad: &balance,
                z_loss_coef: z,
            };
            cpu.router_backward((&mut dlogits[..]).into(), (&dweights[..]).into(), given, shape);
            assert_gradient(&what, &dlogits, &to_f64(&logits), 1 + m * experts / 60, 3e-6, |logits| {
                let (probs, lse) = compute_softmax(logits, experts);
                let balanced: f64 = probs.chunks(experts).map(|p| dot(p, &to_f64(&balance))).sum();
                let z: f64 = lse.iter().map(|l| f64::from(z) * l * l).sum();
                dot(&compute_expert_weights(logits, &got.chosen, shape), &to_f64(&dweights)) + balanced + z
            });
        }
    }
}

#[test]
fn equal_and_nan_probabilities_still_choose_different_experts() {
    let shape = RouterShape { m: 3, experts: 5, experts_per_token: 3, normalize_weights: true };
    let mut logits = vec![0.5; 15];
    logits[5..10].fill(f32::NAN);
    logits[12] = f32::NEG_INFINITY;
    for cpu in Cpu::new_for_all_instruction_sets(1) {
        let got = run_router(&cpu, &logits, shape);
        assert_eq!(got.chosen, [0, 1, 2, 0, 1, 2, 0, 1, 3], "{}", cpu.describe());
        assert!(got.weights[3..6].iter().all(|w| w.is_nan()));
        assert_close("weights", &got.weights[6..], &[1.0 / 3.0; 3], 1e-6);
    }
}

#[test]
fn row_ops_match_their_definitions() {
    let mut r = TestRng::new(22);
    for (m, d, per_row) in [(1, 1, 1), (19, 37, 2), (50, 16, 8), (3, 5, 0)] {
        let row_indices: Vec<u32> = (0..m * per_row).map(|_| r.draw_below(m) as u32).collect();
        let (x, w, start) = (r.draw_vec(m * d), r.draw_vec(m * per_row), r.draw_vec(m * d));
        for cpu in Cpu::new_for_all_instruction_sets(3) {
            let mut y = vec![7.0; row_indices.len() * d];
            cpu.gather_rows((&mut y[..]).into(), (&x[..]).into(), &row_indices, d);
            assert_eq!(to_f64(&y), reference::compute_embedding(&to_f64(&x), &row_indices, d));
            for (weights, write) in
                [(None, WriteMode::Overwrite), (Some((&w[..]).into()), WriteMode::Accumulate)]
            {
                let mut want = if write == WriteMode::Accumulate { to_f64(&start) } else { vec![0.0; m * d] };
                for (k, &row) in row_indices.iter().enumerate() {
                    let factor = if weights.is_some() { f64::from(w[k]) } else { 1.0 };
                    for i in 0..d {
                        want[k / per_row * d + i] += factor * f64::from(x[row as usize * d + i]);
                    }
                }
                let mut y = start.clone();
                cpu.combine_rows((&mut y[..]).into(), (&x[..]).into(), weights, &row_indices, m, d, write);
                assert_close(&cpu.describe(), &y, &want, 1e-6);
            }
            let mut dots = vec![7.0; m];
            cpu.dot_rows((&mut dots[..]).into(), (&x[..]).into(), (&start[..]).into(), d);
            let want: Vec<f64> =
                to_f64(&x).chunks(d).zip(to_f64(&start).chunks(d)).map(|(a, b)| dot(a, b)).collect();
            assert_close(&cpu.describe(), &dots, &want, 2e-6);
            let mut scaled = x.clone();
            cpu.scale_rows((&mut scaled[..]).into(), (&dots[..]).into(), d);
            assert!((0..m * d).all(|i| scaled[i] == x[i] * dots[i / d]));
        }
    }
}

/// Creates row groups for a grouped matmul, with the numbers of rows `sizes` and a gap of one row
/// after the second group. Their matrices are stored in reverse order, with gaps of three elements.
fn make_row_groups(sizes: &[usize], matrix: usize) -> Vec<RowGroup> {
    let mut at = 0;
    let group = |(i, &n): (usize, &usize)| {
        let rows = at..at + n;
        at += n + usize::from(i == 1);
        RowGroup { rows, matrix_offset: (sizes.len() - 1 - i) * (matrix + 3) }
    };
    sizes.iter().enumerate().map(group).collect()
}

#[test]
fn a_grouped_matmul_equals_one_matmul_per_group() {
    let mut r = TestRng::new(23);
    for (sizes, n, k) in
        [(&[3, 0, 5, 1][..], 7, 5), (&[0, 0, 90, 0], 33, 20), (&[8; 12], 16, 40), (&[2, 2], 1, 1)]
    {
        let groups = make_row_groups(sizes, n * k);
        let rows = groups.last().unwrap().rows.end + 1;
        let (x, dy, w) = (r.draw_vec(rows * k), r.draw_vec(rows * n), r.draw_vec(groups.len() * (n * k + 3)));
        let mut first = None;
        for threads in [1, 2, 4] {
            let cpu = Cpu::new(threads);
            let (mut y, mut dx, mut dw) = (vec![7.0; rows * n], vec![7.0; rows * k], vec![7.0; w.len()]);
            let (xv, dyv, wv) = ((&x[..]).into(), (&dy[..]).into(), (&w[..]).into());
            cpu.grouped_forward((&mut y[..]).into(), xv, wv, &groups, n, k);
            cpu.grouped_backward_input((&mut dx[..]).into(), dyv, wv, &groups, n, k);
            cpu.grouped_backward_weight((&mut dw[..]).into(), dyv, xv, &groups, n, k);
            let (mut want, mut dx_want, mut dw_want) =
                (vec![7.0; rows * n], vec![7.0; rows * k], vec![7.0; w.len()]);
            for g in &groups {
                let (m, matrix) = (g.rows.len(), g.matrix_offset..g.matrix_offset + n * k);
                let (ins, outs) = (g.rows.start * k..g.rows.end * k, g.rows.start * n..g.rows.end * n);
                let (x, dy, w) =
                    ((&x[ins.clone()]).into(), (&dy[outs.clone()]).into(), (&w[matrix.clone()]).into());
                cpu.matmul_forward((&mut want[outs]).into(), x, w, m, n, k, WriteMode::Overwrite);
                cpu.matmul_backward_input((&mut dx_want[ins]).into(), dy, w, m, n, k, WriteMode::Overwrite);
                cpu.matmul_backward_weight(
                    (&mut dw_want[matrix]).into(),
                    dy,
                    x,
                    m,
                    n,
                    k,
                    WriteMode::Overwrite,
                );
            }
            assert_eq!((&y, &dx, &dw), (&want, &dx_want, &dw_want), "{sizes:?} on {threads} threads");
            assert_eq!(first.get_or_insert((y.clone(), dx.clone(), dw.clone())), &(y, dx, dw));
        }
    }
}
