//! Tests that compare each op's forward pass with its definition in f64, and the backward pass with
//! finite differences of that definition, on every instruction set of this machine. The classifier
//! and experts have separate tests.

use crate::reference;
use crate::reference::*;
use device::Cpu;
use device::ops::{
    ActivationOps, AttentionDropout, AttentionOps, AttentionShape, BiasOps, EmbeddingOps, HeadLayout,
    HeadNormOps, LayerNormOps, LayerNormParams, MatmulOps, RmsNormOps, RopeOps, RopeShape, WriteMode,
};

#[test]
fn matmul_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(1);
    for (m, n, k) in
        [(1, 1, 1), (5, 7, 3), (17, 49, 33), (8, 48, 1), (3, 100, 130), (70, 31, 1100), (2, 5, 0)]
    {
        let (x, w, dy) = (r.draw_vec(m * k), r.draw_vec(n * k), r.draw_vec(m * n));
        let want = reference::compute_matmul(&to_f64(&x), &to_f64(&w), m, n, k);
        for cpu in open_backends() {
            let what = format!("{} {m}x{n}x{k}", cpu.describe());
            let start = r.draw_vec(m * n);
            let mut y = start.clone();
            cpu.matmul_forward(
                (&mut y[..]).into(),
                (&x[..]).into(),
                (&w[..]).into(),
                m,
                n,
                k,
                WriteMode::Overwrite,
            );
            assert_close(&what, &y, &want, 2e-6);
            y.copy_from_slice(&start);
            cpu.matmul_forward(
                (&mut y[..]).into(),
                (&x[..]).into(),
                (&w[..]).into(),
                m,
                n,
                k,
                WriteMode::Accumulate,
            );
            let added: Vec<f64> = want.iter().zip(&start).map(|(w, s)| w + f64::from(*s)).collect();
            assert_close(&what, &y, &added, 2e-6);

            // A matmul is linear, so differences of any size are exact.
            let objective =
                |x: &[f64], w: &[f64]| dot(&reference::compute_matmul(x, w, m, n, k), &to_f64(&dy));
            let step = 1 + m * k / 40;
            let mut dx = r.draw_vec(m * k);
            cpu.matmul_backward_input(
                (&mut dx[..]).into(),
                (&dy[..]).into(),
                (&w[..]).into(),
                m,
                n,
                k,
                WriteMode::Overwrite,
            );
            assert_gradient(&what, &dx, &to_f64(&x), step, 2e-6, |x| objective(x, &to_f64(&w)));
            let step = 1 + n * k / 40;
            let mut dw = vec![0.0; n * k];
            for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
                cpu.matmul_backward_weight(
                    (&mut dw[..]).into(),
                    (&dy[..]).into(),
                    (&x[..]).into(),
                    m,
                    n,
                    k,
                    write,
                );
            }
            let half: Vec<f32> = dw.iter().map(|d| d / 2.0).collect();
            assert_gradient(&what, &half, &to_f64(&w), step, 2e-6, |w| objective(&to_f64(&x), w));
        }
    }
}

#[test]
fn embedding_and_its_gradient_match_the_definition() {
    let (rows, d, m) = (7, 131, 50);
    let mut r = TestRng::new(2);
    let w = r.draw_vec(rows * d);
    let tokens: Vec<u32> = (0..m).map(|_| r.draw_below(rows) as u32).collect();
    let dx = r.draw_vec(m * d);
    for cpu in open_backends() {
        let mut x = r.draw_vec(m * d);
        cpu.embedding_forward((&mut x[..]).into(), (&w[..]).into(), &tokens, d);
        assert_eq!(to_f64(&x), reference::compute_embedding(&to_f64(&w), &tokens, d));
        let mut dw = vec![0.0; rows * d];
        cpu.embedding_backward((&mut dw[..]).into(), (&dx[..]).into(), &tokens, d);
        assert_gradient("dw", &dw, &to_f64(&w), 13, 2e-6, |w| {
            dot(&reference::compute_embedding(w, &tokens, d), &to_f64(&dx))
        });
    }
}

#[test]
fn rmsnorm_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(3);
    for (m, d) in [(1, 3), (3, 5), (67, 16), (70, 37), (33, 100)] {
        let (x, delta, w, dy) = (r.draw_vec(m * d), r.draw_vec(m * d), r.draw_vec(d), r.draw_vec(m * d));
        let eps = 1e-5;
        for cpu in open_backends() {
            let what = format!("{} {m}x{d}", cpu.describe());
            let (mut y, mut rstd) = (r.draw_vec(m * d), r.draw_vec(m));
            let (xv, wv) = ((&x[..]).into(), (&w[..]).into());
            cpu.rmsnorm_forward((&mut y[..]).into(), (&mut rstd[..]).into(), xv, wv, m, d, eps);
            assert_close(
                &what,
                &y,
                &reference::compute_rmsnorm(&to_f64(&x), &to_f64(&w), f64::from(eps)),
                1e-6,
            );

            let objective =
                |x: &[f64], w: &[f64]| dot(&reference::compute_rmsnorm(x, w, f64::from(eps)), &to_f64(&dy));
            let start = r.draw_vec(m * d);
            for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
                let (mut dx, mut dw) = (start.clone(), vec![0.5; d]);
                cpu.rmsnorm_backward(
                    (&mut dx[..]).into(),
                    (&mut dw[..]).into(),
                    (&dy[..]).into(),
                    xv,
                    wv,
                    (&rstd[..]).into(),
                    m,
                    d,
                    write,
                );
                if write == WriteMode::Accumulate {
                    dx.iter_mut().zip(&start).for_each(|(x, s)| *x -= s);
                }
                dw.iter_mut().for_each(|w| *w -= 0.5);
                assert_gradient(&what, &dx, &to_f64(&x), 1 + m * d / 300, 1e-5, |x| {
                    objective(x, &to_f64(&w))
                });
                assert_gradient(&what, &dw, &to_f64(&w), 1, 2e-6, |w| objective(&to_f64(&x), w));
            }

            let mut sum = x.clone();
            let s = (&mut sum[..]).into();
            cpu.add_rmsnorm_forward(
                (&mut y[..]).into(),
                (&mut rstd[..]).into(),
                s,
                (&delta[..]).into(),
                wv,
                m,
                d,
                eps,
            );
            let want: Vec<f32> = x.iter().zip(&delta).map(|(a, b)| a + b).collect();
            assert_eq!(sum, want);
            assert_close(
                &what,
                &y,
                &reference::compute_rmsnorm(&to_f64(&want), &to_f64(&w), f64::from(eps)),
                1e-6,
            );
        }
    }
}

#[test]
fn bias_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(9);
    for (m, n) in [(0, 3), (1, 1), (3, 17), (70, 37), (33, 100)] {
        let (x, b, dy) = (r.draw_vec(m * n), r.draw_vec(n), r.draw_vec(m * n));
        for cpu in open_backends() {
            let mut y = x.clone();
            cpu.bias_forward((&mut y[..]).into(), (&b[..]).into(), m, n);
            let want: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + b[i % n]).collect();
            assert_eq!(y, want);
            let mut db = vec![0.5; n];
            cpu.bias_backward((&mut db[..]).into(), (&dy[..]).into(), m, n);
            let want: Vec<f64> =
                (0..n).map(|j| 0.5 + (0..m).map(|i| f64::from(dy[i * n + j])).sum::<f64>()).collect();
            assert_close(&format!("{} {m}x{n}", cpu.describe()), &db, &want, 1e-6);
        }
    }
}

#[test]
fn rmsnorm_of_heads_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(10);
    for (rows, first, heads, head_dim, stride) in
        [(0, 0, 1, 2, 2), (1, 0, 1, 3, 3), (5, 7, 3, 5, 25), (67, 4, 2, 16, 41)]
    {
        let h = HeadLayout { rows, first_column: first, heads, head_dim, stride };
        let (x, w, dy) = (r.draw_vec(rows * stride), r.draw_vec(head_dim), r.draw_vec(rows * stride));
        let eps = 1e-5;
        let normed = |x: &[f64], w: &[f64]| {
            let mut y = x.to_vec();
            for row in y.chunks_exact_mut(stride) {
                let heads = &mut row[first..first + heads * head_dim];
                heads.copy_from_slice(&reference::compute_rmsnorm(heads, w, f64::from(eps)));
            }
            y
        };
        for cpu in open_backends() {
            let what = format!("{} {h:?}", cpu.describe());
            let (mut y, mut raw, mut rstd) =
                (x.clone(), r.draw_vec(rows * h.width()), r.draw_vec(rows * heads));
            let wv = (&w[..]).into();
            let (rawv, rstdv) = ((&mut raw[..]).into(), (&mut rstd[..]).into());
            cpu.rmsnorm_heads_forward((&mut y[..]).into(), rawv, rstdv, wv, h, eps);
            assert_close(&what, &y, &normed(&to_f64(&x), &to_f64(&w)), 1e-6);
            let (mut dx, mut dw) = (dy.clone(), vec![0.5; head_dim]);
            let (rawv, rstdv) = ((&raw[..]).into(), (&rstd[..]).into());
            cpu.rmsnorm_heads_backward((&mut dx[..]).into(), (&mut dw[..]).into(), rawv, rstdv, wv, h);
            dw.iter_mut().for_each(|w| *w -= 0.5);
            let objective = |x: &[f64], w: &[f64]| dot(&normed(x, w), &to_f64(&dy));
            assert_gradient(&what, &dx, &to_f64(&x), 1 + x.len() / 300, 1e-5, |x| objective(x, &to_f64(&w)));
            assert_gradient(&what, &dw, &to_f64(&w), 1, 2e-6, |w| objective(&to_f64(&x), w));
        }
    }
}

#[test]
fn rope_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(4);
    for (b, t, heads, head_dim, stride) in [(1, 1, 1, 2, 2), (2, 5, 3, 10, 41), (2, 7, 2, 64, 200)] {
        let half = head_dim / 2;
        let angles: Vec<f32> = (0..t * half).map(|_| 4.0 * r.draw_signed_unit()).collect();
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        let (x, dy) = (r.draw_vec(b * t * stride), r.draw_vec(b * t * stride));
        let rotate =
            |x: &[f64]| reference::compute_rope(x, &to_f64(&cos), &to_f64(&sin), t, heads, head_dim, stride);
        let shape = RopeShape { b, t, heads, head_dim, stride };
        for cpu in open_backends() {
            let mut y = x.clone();
            let (c, s) = ((&cos[..]).into(), (&sin[..]).into());
            cpu.rope_forward((&mut y[..]).into(), c, s, shape);
            assert_close("rope", &y, &rotate(&to_f64(&x)), 5e-7);
            let mut dx = dy.clone();
            cpu.rope_backward((&mut dx[..]).into(), c, s, shape);
            assert_gradient("rope", &dx, &to_f64(&x), 1 + x.len() / 100, 1e-6, |x| {
                dot(&rotate(x), &to_f64(&dy))
            });
        }
    }
}

/// Asserts that the forward and the backward pass of attention match the definition on every
/// instruction set.
fn assert_attention_matches(r: &mut TestRng, shape: AttentionShape, starts: &[u32]) {
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let width = (heads + 2 * kv_heads) * head_dim;
    let qkv: Vec<f32> = r.draw_vec(b * t * width).iter().map(|x| 3.0 * x).collect();
    let d_o = r.draw_vec(b * t * heads * head_dim);
    let (want, want_lse) = reference::compute_attention(&to_f64(&qkv), starts, shape);
    for cpu in open_backends() {
        let what = format!("{} {shape:?}", cpu.describe());
        let (mut o, mut lse) = (r.draw_vec(want.len()), r.draw_vec(want_lse.len()));
        cpu.attention_forward((&mut o[..]).into(), (&mut lse[..]).into(), (&qkv[..]).into(), starts, shape);
        assert_close(&what, &o, &want, 2e-6);
        assert_close(&what, &lse, &want_lse, 1e-6);
        let mut dqkv = r.draw_vec(qkv.len());
        cpu.attention_backward(
            (&mut dqkv[..]).into(),
            (&d_o[..]).into(),
            (&o[..]).into(),
            (&lse[..]).into(),
            (&qkv[..]).into(),
            starts,
            shape,
        );
        assert_gradient(&what, &dqkv, &to_f64(&qkv), 1 + qkv.len() / 120, 5e-6, |qkv| {
            dot(&reference::compute_attention(qkv, starts, shape).0, &to_f64(&d_o))
        });
    }
}

#[test]
fn attention_over_whole_sequences_matches_the_definition() {
    let mut r = TestRng::new(5);
    for (b, t, heads, kv_heads, head_dim) in
        [(1, 1, 1, 1, 1), (2, 9, 4, 2, 5), (1, 130, 2, 1, 3), (1, 67, 3, 3, 18)]
    {
        let shape = AttentionShape::new(b, t, heads, kv_heads, head_dim);
        assert_attention_matches(&mut r, shape, &vec![0; b * t]);
    }
}

#[test]
fn attention_within_documents_matches_the_definition() {
    let mut r = TestRng::new(6);
    // Documents longer and shorter than a tile, so that tiles are skipped, partial and whole.
    for (t, mean) in [(140, 4), (140, 45), (200, 70)] {
        let shape = AttentionShape::new(2, t, 2, 1, 2);
        let starts = r.draw_document_starts(2, t, mean);
        assert_attention_matches(&mut r, shape, &starts);
    }
    // Any start up to the token itself is allowed, also one before the previous token's start.
    let shape = AttentionShape::new(1, 150, 1, 1, 4);
    let starts: Vec<u32> = (0..150).map(|q| r.draw_below(q + 1) as u32).collect();
    assert_attention_matches(&mut r, shape, &starts);
}

/// Checks attention with dropout: the backward pass drops the elements that the forward pass drops.
/// The cases have odd shapes, grouped heads, packed documents and sliding windows, with and without
/// a softcap.
#[test]
fn attention_with_dropout_matches_the_definition() {
    let mut r = TestRng::new(16);
    for (b, t, heads, kv_heads, head_dim, probability) in
        [(2, 9, 4, 2, 5, 0.1), (1, 130, 2, 1, 3, 0.5), (1, 67, 3, 3, 18, 0.25), (3, 5, 2, 2, 4, 0.9)]
    {
        let dropout = Some(AttentionDropout { key: [7, 11], probability, first_sequence: (1 << 40) - 1 });
        let shape = AttentionShape { dropout, ..AttentionShape::new(b, t, heads, kv_heads, head_dim) };
        assert_attention_matches(&mut r, shape, &vec![0; b * t]);
        let softcap = Some(2.0);
        let packed = r.draw_document_starts(b, t, 12);
        assert_attention_matches(&mut r, AttentionShape { softcap, ..shape }, &packed);
        let window: Vec<u32> = (0..b * t).map(|i| (i % t).saturating_sub(6) as u32).collect();
        assert_attention_matches(&mut r, shape, &window);
    }
}

#[test]
fn swiglu_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(7);
    for (m, f) in [(1, 1), (3, 17), (40, 33)] {
        let gate_up: Vec<f32> = r.draw_vec(m * 2 * f).iter().map(|x| 6.0 * x).collect();
        let dy = r.draw_vec(m * f);
        for cpu in open_backends() {
            let mut y = r.draw_vec(m * f);
            cpu.swiglu_forward((&mut y[..]).into(), (&gate_up[..]).into(), m, f);
            assert_close("swiglu", &y, &reference::compute_swiglu(&to_f64(&gate_up), f), 5e-7);
            let mut grad = r.draw_vec(gate_up.len());
            let mut again = dy.clone();
            cpu.swiglu_backward((&mut grad[..]).into(), (&mut again[..]).into(), (&gate_up[..]).into(), m, f);
            assert_eq!(again, y, "the backward pass recomputes the output");
            assert_gradient("swiglu", &grad, &to_f64(&gate_up), 1, 2e-6, |x| {
                dot(&reference::compute_swiglu(x, f), &to_f64(&dy))
            });
        }
    }
}

#[test]
fn layernorm_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(11);
    let eps = 1e-5;
    for (m, d) in [(1, 3), (3, 5), (67, 16), (70, 37), (33, 100)] {
        let (x, delta, dy) = (r.draw_vec(m * d), r.draw_vec(m * d), r.draw_vec(m * d));
        // The mean is large compared with the standard deviation.
        let x: Vec<f32> = x.iter().map(|x| x + 3.0).collect();
        let (w, b) = (r.draw_vec(d), r.draw_vec(d));
        let norm = LayerNormParams { w: (&w[..]).into(), b: (&b[..]).into(), eps };
        let normed = |x: &[f64], w: &[f64], b: &[f64]| reference::compute_layernorm(x, w, b, f64::from(eps));
        for cpu in open_backends() {
            let what = format!("{} {m}x{d}", cpu.describe());
            let (mut y, mut stats) = (r.draw_vec(m * d), r.draw_vec(2 * m));
            cpu.layernorm_forward((&mut y[..]).into(), (&mut stats[..]).into(), (&x[..]).into(), norm, m);
            assert_close(&what, &y, &normed(&to_f64(&x), &to_f64(&w), &to_f64(&b)), 2e-6);

            let objective = |x: &[f64], w: &[f64], b: &[f64]| dot(&normed(x, w, b), &to_f64(&dy));
            let start = r.draw_vec(m * d);
            for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
                let (mut dx, mut dw, mut db) = (start.clone(), vec![0.5; d], vec![0.25; d]);
                let (dxv, dwv, dbv) = ((&mut dx[..]).into(), (&mut dw[..]).into(), (&mut db[..]).into());
                let (dyv, xv, sv) = ((&dy[..]).into(), (&x[..]).into(), (&stats[..]).into());
                cpu.layernorm_backward(dxv, dwv, dbv, dyv, xv, norm.w, sv, m, write);
                if write == WriteMode::Accumulate {
                    dx.iter_mut().zip(&start).for_each(|(x, s)| *x -= s);
                }
                dw.iter_mut().for_each(|w| *w -= 0.5);
                db.iter_mut().for_each(|b| *b -= 0.25);
                let step = 1 + m * d / 300;
                let (x, w, b) = (to_f64(&x), to_f64(&w), to_f64(&b));
                assert_gradient(&what, &dx, &x, step, 2e-5, |x| objective(x, &w, &b));
                assert_gradient(&what, &dw, &w, 1, 4e-6, |w| objective(&x, w, &b));
                assert_gradient(&what, &db, &b, 1, 4e-6, |b| objective(&x, &w, b));
            }

            let mut sum = x.clone();
            let (sumv, deltav) = ((&mut sum[..]).into(), (&delta[..]).into());
            let (yv, sv) = ((&mut y[..]).into(), (&mut stats[..]).into());
            cpu.add_layernorm_forward(yv, sv, sumv, deltav, norm, m);
            let want: Vec<f32> = x.iter().zip(&delta).map(|(a, b)| a + b).collect();
            assert_eq!(sum, want);
            assert_close(&what, &y, &normed(&to_f64(&want), &to_f64(&w), &to_f64(&b)), 2e-6);
        }
    }
}

#[test]
fn gelu_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(12);
    for (m, f) in [(1, 1), (3, 17), (40, 33)] {
        let gate_up: Vec<f32> = r.draw_vec(m * 2 * f).iter().map(|x| 7.0 * x).collect();
        let (dy, both) = (r.draw_vec(m * f), r.draw_vec(m * 2 * f));
        let each = |x: &[f64]| x.iter().map(|&x| reference::compute_gelu(x)).collect::<Vec<_>>();
        for cpu in open_backends() {
            let (mut y, mut grad) = (r.draw_vec(gate_up.len()), r.draw_vec(gate_up.len()));
            cpu.gelu_forward((&mut y[..]).into(), (&gate_up[..]).into());
            assert_close("gelu", &y, &each(&to_f64(&gate_up)), 5e-7);
            let mut again = both.clone();
            cpu.gelu_backward((&mut grad[..]).into(), (&mut again[..]).into(), (&gate_up[..]).into());
            assert_eq!(again, y, "the backward pass recomputes the output");
            assert_gradient("gelu", &grad, &to_f64(&gate_up), 1, 2e-6, |x| dot(&each(x), &to_f64(&both)));
            let mut y = r.draw_vec(m * f);
            cpu.geglu_forward((&mut y[..]).into(), (&gate_up[..]).into(), m, f);
            assert_close("geglu", &y, &reference::compute_geglu(&to_f64(&gate_up), f), 5e-7);
            let mut again = dy.clone();
            cpu.geglu_backward((&mut grad[..]).into(), (&mut again[..]).into(), (&gate_up[..]).into(), m, f);
            assert_eq!(again, y, "the backward pass recomputes the output");
            assert_gradient("geglu", &grad, &to_f64(&gate_up), 1, 2e-6, |x| {
                dot(&reference::compute_geglu(x, f), &to_f64(&dy))
            });
        }
    }
}

/// Checks the op Conv1D, whose weight is stored as `[in, out]`: the results must be those of a
/// matmul with the transposed weight.
#[test]
fn conv1d_and_its_gradient_match_the_definition() {
    let mut r = TestRng::new(13);
    for (m, inp, out) in [(1, 1, 1), (5, 7, 3), (17, 33, 49)] {
        let (x, w, dy) = (r.draw_vec(m * inp), r.draw_vec(inp * out), r.draw_vec(m * out));
        let matmul = |x: &[f64], w: &[f64]| {
            let transposed: Vec<f64> = (0..out).flat_map(|o| (0..inp).map(move |i| w[i * out + o])).collect();
            reference::compute_matmul(x, &transposed, m, out, inp)
        };
        let objective = |x: &[f64], w: &[f64]| dot(&matmul(x, w), &to_f64(&dy));
        for cpu in open_backends() {
            let what = format!("{} {m}x{inp}x{out}", cpu.describe());
            let (mut y, mut dx, mut dw) = (r.draw_vec(m * out), r.draw_vec(m * inp), r.draw_vec(inp * out));
            let (xv, wv, dyv) = ((&x[..]).into(), (&w[..]).into(), (&dy[..]).into());
            cpu.conv1d_forward((&mut y[..]).into(), xv, wv, m, inp, out);
            assert_close(&what, &y, &matmul(&to_f64(&x), &to_f64(&w)), 2e-6);
            cpu.conv1d_backward_input((&mut dx[..]).into(), dyv, wv, m, inp, out);
            cpu.conv1d_backward_weight((&mut dw[..]).into(), dyv, xv, m, inp, out);
            assert_gradient(&what, &dx, &to_f64(&x), 1 + x.len() / 40, 2e-6, |x| objective(x, &to_f64(&w)));
            assert_gradient(&what, &dw, &to_f64(&w), 1 + w.len() / 40, 2e-6, |w| objective(&to_f64(&x), w));
        }
    }
}

#[test]
fn attention_of_scaled_and_capped_scores_matches_the_definition() {
    let mut r = TestRng::new(14);
    for (cap, scale) in [(None, 0.1), (Some(2.0), 0.4), (Some(30.0), 0.7)] {
        let shape = AttentionShape { scale, softcap: cap, ..AttentionShape::new(2, 80, 2, 1, 5) };
        let starts = r.draw_document_starts(2, 80, 40);
        assert_attention_matches(&mut r, shape, &starts);
    }
}

/// Checks that every op accepts empty inputs, because a rank may have no rows.
#[test]
fn ops_accept_empty_inputs() {
    for cpu in open_backends() {
        let shape = AttentionShape::new(0, 5, 2, 1, 4);
        for shape in [shape, AttentionShape { b: 3, t: 0, ..shape }] {
            let none = || (&mut [][..]).into();
            let nothing = || (&[][..]).into();
            cpu.attention_forward(none(), none(), nothing(), &[], shape);
            cpu.attention_backward(none(), nothing(), nothing(), nothing(), nothing(), &[], shape);
            let rope = RopeShape { b: 3, t: 0, heads: 2, head_dim: 4, stride: 16 };
            cpu.rope_forward(none(), nothing(), nothing(), rope);
            cpu.swiglu_forward(none(), nothing(), 0, 5);
            cpu.embedding_forward(none(), (&[1.0; 4][..]).into(), &[], 2);
            cpu.rmsnorm_forward(none(), none(), nothing(), (&[1.0; 4][..]).into(), 0, 4, 1e-5);
            let mut dw = [2.0; 4];
            let dwv = (&mut dw[..]).into();
            let w = (&[1.0; 4][..]).into();
            cpu.rmsnorm_backward(none(), dwv, nothing(), nothing(), w, nothing(), 0, 4, WriteMode::Overwrite);
            assert_eq!(dw, [2.0; 4]);
        }
    }
}

#[test]
#[should_panic(expected = "attention_forward: the start 2 of token 1 is after the token")]
fn a_document_start_after_its_token_is_rejected() {
    let shape = AttentionShape::new(1, 3, 1, 1, 1);
    let (mut o, mut lse) = ([0.0; 3], [0.0; 3]);
    let qkv = [0.0; 9];
    let (o, lse) = ((&mut o[..]).into(), (&mut lse[..]).into());
    Cpu::new(1).attention_forward(o, lse, (&qkv[..]).into(), &[0, 2, 2], shape);
}
