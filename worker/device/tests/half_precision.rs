//! Ops on 16-bit elements give the bits of the op in `f32` on the same values, rounded once to 16
//! bits, for any number of threads and on every instruction set.
mod reference;

use device::ops::{
    AttentionDropout, AttentionShape, ClassifierGrads, HeadLayout, IGNORE_LABEL, LayerNormParams, RowGroup,
    WriteMode,
};
use device::{Buf, Cpu, Dtype, Ops};
use reference::Random;

/// One execution of an op: on 16-bit buffers, or on `f32` buffers with the same values.
struct TestRun<'a> {
    cpu: &'a Cpu,
    /// The 16-bit type.
    dtype: Dtype,
    in_f32: bool,
}

impl TestRun<'_> {
    /// A buffer of the values, each rounded to 16 bits.
    fn buf(&self, x: &[f32]) -> Buf {
        let mut half = Buf::zeroed_as(self.dtype, x.len());
        self.cpu.cast(half.view_mut(), x.into());
        if self.in_f32 { self.to_f32(&half) } else { half }
    }

    fn to_f32(&self, x: &Buf) -> Buf {
        let mut wide = Buf::zeroed(x.len());
        self.cpu.cast(wide.view_mut(), x.view());
        wide
    }

    /// The bits of an output in the 16-bit type, which rounds an output in `f32`.
    fn bits(&self, x: &Buf) -> Vec<u16> {
        let mut half = Buf::zeroed_as(self.dtype, x.len());
        self.cpu.cast(half.view_mut(), x.view());
        half.view().half_bits().to_vec()
    }
}

/// The 16-bit outputs of an op, and the outputs that are always `f32`.
type Outputs = (Vec<Vec<u16>>, Vec<Vec<f32>>);

/// Asserts that an op gives the same outputs on 16-bit buffers as on `f32` buffers.
#[track_caller]
fn check(what: &str, op: impl Fn(&TestRun) -> Outputs) {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let one = Cpu::new(1);
        let want = op(&TestRun { cpu: &one, dtype, in_f32: true });
        assert!(want.0.iter().flatten().any(|x| *x != 0) || want.1.iter().flatten().any(|x| *x != 0.0));
        for threads in [1, 3] {
            let cpu = Cpu::new(threads);
            let got = op(&TestRun { cpu: &cpu, dtype, in_f32: false });
            assert!(got.0 == want.0, "{what}, {dtype:?}, {threads} threads: 16-bit outputs differ");
            assert!(got.1 == want.1, "{what}, {dtype:?}, {threads} threads: f32 outputs differ");
        }
        let levels = Cpu::all_instruction_sets(2);
        for cpu in &levels[..levels.len().max(2) - 1] {
            assert!(
                op(&TestRun { cpu, dtype, in_f32: false }) == want,
                "{what}, {dtype:?}, {}",
                cpu.describe()
            );
        }
    }
}

#[test]
fn matmul_rounds_once() {
    for (m, n, k) in [(1, 1, 1), (17, 49, 33), (70, 31, 1100), (300, 4200, 9), (5, 100, 64)] {
        let mut r = Random::new(1);
        let (x, w, dy) = (r.vec(m * k), r.vec(n * k), r.vec(m * n));
        check(&format!("matmul {m} {n} {k}"), |run| {
            let (px, pw, pdy, mut out) = (run.buf(&x), run.buf(&w), run.buf(&dy), (Vec::new(), Vec::new()));
            for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
                let (mut y, mut dx, mut dw) = (run.buf(&dy), run.buf(&x), Buf::from_slice(&w));
                run.cpu.matmul_forward(y.view_mut(), px.view(), pw.view(), m, n, k, write);
                run.cpu.matmul_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, n, k, write);
                run.cpu.matmul_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, n, k, write);
                out.0.extend([run.bits(&y), run.bits(&dx)]);
                out.1.push(dw.host().to_vec());
            }
            out
        });
    }
}

#[test]
fn embedding_and_bias_round_once() {
    let (m, d, v) = (70, 133, 11);
    let mut r = Random::new(2);
    let (w, dx) = (r.vec(v * d), r.vec(m * d));
    let tokens: Vec<u32> = (0..m).map(|_| r.below(v) as u32).collect();
    check("embedding", |run| {
        let (mut x, mut dw) = (run.buf(&dx), Buf::zeroed(v * d));
        run.cpu.embedding_forward(x.view_mut(), run.buf(&w).view(), &tokens, d);
        run.cpu.embedding_backward(dw.view_mut(), run.buf(&dx).view(), &tokens, d);
        (vec![run.bits(&x)], vec![dw.host().to_vec()])
    });
    check("bias", |run| {
        let (mut y, mut dbias) = (run.buf(&dx), Buf::zeroed(d));
        run.cpu.bias_forward(y.view_mut(), run.buf(&w[..d]).view(), m, d);
        run.cpu.bias_backward(dbias.view_mut(), run.buf(&dx).view(), m, d);
        (vec![run.bits(&y)], vec![dbias.host().to_vec()])
    });
}

#[test]
fn rms_norms_round_once() {
    let (m, d, eps) = (75, 67, 1e-5);
    let mut r = Random::new(3);
    let (x, delta, w, dy) = (r.vec(m * d), r.vec(m * d), r.vec(d), r.vec(m * d));
    check("rmsnorm", |run| {
        let (mut y, mut rstd, mut dw, pw) = (run.buf(&dy), Buf::zeroed(m), Buf::zeroed(d), run.buf(&w));
        let px = run.buf(&x);
        run.cpu.rmsnorm_forward(y.view_mut(), rstd.view_mut(), px.view(), pw.view(), m, d, eps);
        let mut out = (vec![run.bits(&y)], vec![rstd.host().to_vec()]);
        for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
            let (mut dx, dy) = (run.buf(&delta), run.buf(&dy));
            let (to, dw) = (dx.view_mut(), dw.view_mut());
            run.cpu.rmsnorm_backward(to, dw, dy.view(), px.view(), pw.view(), rstd.view(), m, d, write);
            out.0.push(run.bits(&dx));
        }
        out.1.push(dw.host().to_vec());
        out
    });
    // The norm reads the sum after its rounding to 16 bits.
    check("add_rmsnorm", |run| {
        let (mut y, mut rstd, mut sum) = (run.buf(&dy), Buf::zeroed(m), run.buf(&x));
        let (pw, pdelta) = (run.buf(&w), run.buf(&delta));
        if run.in_f32 {
            run.cpu.add(sum.view_mut(), pdelta.view());
            let mut half = Buf::zeroed_as(run.dtype, m * d);
            run.cpu.cast(half.view_mut(), sum.view());
            sum = run.to_f32(&half);
            run.cpu.rmsnorm_forward(y.view_mut(), rstd.view_mut(), sum.view(), pw.view(), m, d, eps);
        } else {
            let (y, rstd) = (y.view_mut(), rstd.view_mut());
            run.cpu.add_rmsnorm_forward(y, rstd, sum.view_mut(), pdelta.view(), pw.view(), m, d, eps);
        }
        (vec![run.bits(&y), run.bits(&sum)], vec![rstd.host().to_vec()])
    });
}

#[test]
fn rms_norms_of_heads_round_once() {
    let h = HeadLayout { rows: 40, first_column: 5, heads: 3, head_dim: 7, stride: 31 };
    let mut r = Random::new(4);
    let (x, w, dy) = (r.vec(h.rows * h.stride), r.vec(h.head_dim), r.vec(h.rows * h.stride));
    check("rmsnorm_heads", |run| {
        let (mut px, pw, mut dx) = (run.buf(&x), run.buf(&w), run.buf(&dy));
        let (mut raw, mut rstd) = (run.buf(&vec![0.0; h.rows * h.width()]), Buf::zeroed(h.rows * h.heads));
        let mut dw = Buf::zeroed(h.head_dim);
        let (y, rstd_view) = (px.view_mut(), rstd.view_mut());
        run.cpu.rmsnorm_heads_forward(y, raw.view_mut(), rstd_view, pw.view(), h, 1e-6);
        let (to, dw_to) = (dx.view_mut(), dw.view_mut());
        run.cpu.rmsnorm_heads_backward(to, dw_to, raw.view(), rstd.view(), pw.view(), h);
        let f32s = vec![rstd.host().to_vec(), dw.host().to_vec()];
        (vec![run.bits(&px), run.bits(&raw), run.bits(&dx)], f32s)
    });
}

#[test]
fn rope_swiglu_and_elementwise_ops_round_once() {
    let (b, t, heads, head_dim, stride) = (2, 19, 3, 10, 41);
    let mut r = Random::new(5);
    let (x, cos, sin) = (r.vec(b * t * stride), r.vec(t * head_dim / 2), r.vec(t * head_dim / 2));
    check("rope", |run| {
        let (mut forward, mut back) = (run.buf(&x), run.buf(&x));
        let (c, s) = ((&cos[..]).into(), (&sin[..]).into());
        run.cpu.rope_forward(forward.view_mut(), c, s, b, t, heads, head_dim, stride);
        run.cpu.rope_backward(back.view_mut(), c, s, b, t, heads, head_dim, stride);
        (vec![run.bits(&forward), run.bits(&back)], Vec::new())
    });
    let (m, f) = (33, 77);
    let (gate_up, dy) = (r.vec(m * 2 * f), r.vec(m * f));
    check("swiglu", |run| {
        let (mut y, mut dgate_up, input) = (run.buf(&dy), run.buf(&gate_up), run.buf(&gate_up));
        run.cpu.swiglu_forward(y.view_mut(), input.view(), m, f);
        let mut again = run.buf(&dy);
        run.cpu.swiglu_backward(dgate_up.view_mut(), again.view_mut(), input.view(), m, f);
        (vec![run.bits(&y), run.bits(&dgate_up), run.bits(&again)], Vec::new())
    });
    check("add and scale", |run| {
        let (mut sum, mut scaled) = (run.buf(&dy), run.buf(&dy));
        run.cpu.add(sum.view_mut(), run.buf(&gate_up[..m * f]).view());
        run.cpu.scale(scaled.view_mut(), 0.3);
        (vec![run.bits(&sum), run.bits(&scaled)], Vec::new())
    });
}

#[test]
fn attention_rounds_once() {
    for (b, t, kv_heads, group, head_dim, softcap) in [(2, 11, 1, 3, 14, None), (1, 150, 2, 2, 24, Some(3.0))]
    {
        let dropout = softcap.map(|_| AttentionDropout { key: [4, 2], probability: 0.25, first_sequence: 3 });
        let shape = AttentionShape {
            softcap,
            dropout,
            ..AttentionShape::new(b, t, kv_heads * group, kv_heads, head_dim)
        };
        let mut r = Random::new(6);
        let (qkv, d_o) =
            (r.vec(b * t * (shape.heads + 2 * kv_heads) * head_dim), r.vec(b * t * shape.heads * head_dim));
        let starts = r.starts(b, t, 20);
        check("attention", |run| {
            let (mut o, mut lse, mut dqkv) = (run.buf(&d_o), Buf::zeroed(b * shape.heads * t), run.buf(&qkv));
            let (pqkv, pd_o) = (run.buf(&qkv), run.buf(&d_o));
            run.cpu.attention_forward(o.view_mut(), lse.view_mut(), pqkv.view(), &starts, shape);
            // The backward pass reads the output after its rounding to 16 bits.
            let o_bits = run.bits(&o);
            let o_values: Vec<f32> = {
                let mut half = Buf::zeroed_as(run.dtype, o.len());
                half.view_mut().half_bits().copy_from_slice(&o_bits);
                run.to_f32(&half).host().to_vec()
            };
            let (d, rounded_o) = (dqkv.view_mut(), run.buf(&o_values));
            run.cpu.attention_backward(
                d,
                pd_o.view(),
                rounded_o.view(),
                lse.view(),
                pqkv.view(),
                &starts,
                shape,
            );
            (vec![o_bits, run.bits(&dqkv)], vec![lse.host().to_vec()])
        });
    }
}

#[test]
fn classifier_rounds_once() {
    let (m, d, v) = (300, 13, 700);
    let mut r = Random::new(7);
    let (x, w) = (r.vec(m * d), r.vec(v * d));
    let labels: Vec<u32> =
        (0..m).map(|i| if i % 7 == 0 { IGNORE_LABEL } else { r.below(v) as u32 }).collect();
    for cap in [None, Some(2.0)] {
        check("classifier", |run| {
            let (px, pw, mut loss) = (run.buf(&x), run.buf(&w), Buf::zeroed(m));
            let (mut dx, mut dw) = (run.buf(&x), Buf::zeroed(v * d));
            let to = ClassifierGrads {
                dx: dx.view_mut(),
                dw: dw.view_mut(),
                dw_write: WriteMode::Overwrite,
                scale: 0.5,
            };
            let (loss_to, px, pw) = (loss.view_mut(), px.view(), pw.view());
            run.cpu.classifier_with_softcap(loss_to, px, pw, &labels, m, d, v, cap, Some(to));
            (vec![run.bits(&dx)], vec![loss.host().to_vec(), dw.host().to_vec()])
        });
    }
}

#[test]
fn layer_norms_round_once() {
    let (m, d, eps) = (75, 67, 1e-5);
    let mut r = Random::new(8);
    let (x, delta, dy) = (r.vec(m * d), r.vec(m * d), r.vec(m * d));
    let (w, b) = (r.vec(d), r.vec(d));
    check("layernorm", |run| {
        let (px, pw, pb) = (run.buf(&x), run.buf(&w), run.buf(&b));
        let (mut y, mut stats) = (run.buf(&dy), Buf::zeroed(2 * m));
        let norm = LayerNormParams { w: pw.view(), b: pb.view(), eps };
        run.cpu.layernorm_forward(y.view_mut(), stats.view_mut(), px.view(), norm, m);
        let mut out = (vec![run.bits(&y)], vec![stats.host().to_vec()]);
        let (mut dw, mut db) = (Buf::zeroed(d), Buf::zeroed(d));
        for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
            let (mut dx, dy) = (run.buf(&delta), run.buf(&dy));
            let (to, dw, db) = (dx.view_mut(), dw.view_mut(), db.view_mut());
            run.cpu.layernorm_backward(to, dw, db, dy.view(), px.view(), pw.view(), stats.view(), m, write);
            out.0.push(run.bits(&dx));
        }
        out.1.extend([dw.host().to_vec(), db.host().to_vec()]);
        out
    });
    // The norm reads the sum after its rounding to 16 bits.
    check("add_layernorm", |run| {
        let (pw, pb, pdelta) = (run.buf(&w), run.buf(&b), run.buf(&delta));
        let (mut y, mut stats, mut sum) = (run.buf(&dy), Buf::zeroed(2 * m), run.buf(&x));
        let norm = LayerNormParams { w: pw.view(), b: pb.view(), eps };
        if run.in_f32 {
            run.cpu.add(sum.view_mut(), pdelta.view());
            let mut half = Buf::zeroed_as(run.dtype, m * d);
            run.cpu.cast(half.view_mut(), sum.view());
            sum = run.to_f32(&half);
            run.cpu.layernorm_forward(y.view_mut(), stats.view_mut(), sum.view(), norm, m);
        } else {
            let (y, stats) = (y.view_mut(), stats.view_mut());
            run.cpu.add_layernorm_forward(y, stats, sum.view_mut(), pdelta.view(), norm, m);
        }
        (vec![run.bits(&y), run.bits(&sum)], vec![stats.host().to_vec()])
    });
}

#[test]
fn gelu_and_geglu_round_once() {
    let (m, f) = (33, 77);
    let mut r = Random::new(9);
    let (gate_up, dy) = (r.vec(m * 2 * f), r.vec(m * f));
    check("gelu", |run| {
        let (mut y, mut dx, input) = (run.buf(&dy), run.buf(&dy), run.buf(&gate_up[..m * f]));
        run.cpu.gelu_forward(y.view_mut(), input.view());
        let mut again = run.buf(&dy);
        run.cpu.gelu_backward(dx.view_mut(), again.view_mut(), input.view());
        (vec![run.bits(&y), run.bits(&dx), run.bits(&again)], Vec::new())
    });
    check("geglu", |run| {
        let (mut y, mut dgate_up, input) = (run.buf(&dy), run.buf(&gate_up), run.buf(&gate_up));
        run.cpu.geglu_forward(y.view_mut(), input.view(), m, f);
        let mut again = run.buf(&dy);
        run.cpu.geglu_backward(dgate_up.view_mut(), again.view_mut(), input.view(), m, f);
        (vec![run.bits(&y), run.bits(&dgate_up), run.bits(&again)], Vec::new())
    });
}

#[test]
fn transposed_matrices_round_once() {
    let (m, inp, out) = (37, 50, 91);
    let mut r = Random::new(10);
    let (x, w, dy) = (r.vec(m * inp), r.vec(inp * out), r.vec(m * out));
    check("conv1d", |run| {
        let (px, pw, pdy) = (run.buf(&x), run.buf(&w), run.buf(&dy));
        let (mut y, mut dx, mut dw) = (run.buf(&dy), run.buf(&x), Buf::zeroed(inp * out));
        run.cpu.conv1d_forward(y.view_mut(), px.view(), pw.view(), m, inp, out);
        run.cpu.conv1d_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, inp, out);
        run.cpu.conv1d_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, inp, out);
        (vec![run.bits(&y), run.bits(&dx)], vec![dw.host().to_vec()])
    });
}

/// A matmul with a bias rounds once. In f32 it equals a matmul followed by the bias op.
#[test]
fn matmuls_with_a_bias_round_once() {
    for (m, n, k) in [(37, 91, 50), (300, 4200, 9), (1, 1, 700)] {
        let mut r = Random::new(13);
        let (x, w, bias) = (r.vec(m * k), r.vec(n * k), r.vec(n));
        check(&format!("bias {m} {n} {k}"), |run| {
            let (px, pw, pb) = (run.buf(&x), run.buf(&w), run.buf(&bias));
            let zeros = vec![0.0; m * n];
            let mut y = [run.buf(&zeros), run.buf(&zeros), run.buf(&zeros)];
            let [a, b, c] = &mut y;
            run.cpu.matmul_bias_forward(a.view_mut(), px.view(), pw.view(), Some(pb.view()), m, n, k);
            run.cpu.matmul_bias_forward(b.view_mut(), px.view(), pw.view(), None, m, n, k);
            run.cpu.conv1d_bias_forward(c.view_mut(), px.view(), pw.view(), pb.view(), m, k, n);
            if run.in_f32 {
                let mut separate = [Buf::zeroed(m * n), Buf::zeroed(m * n)];
                let [d, e] = &mut separate;
                run.cpu.matmul_forward(d.view_mut(), px.view(), pw.view(), m, n, k, WriteMode::Overwrite);
                assert!(d.host() == y[1].host());
                run.cpu.bias_forward(d.view_mut(), pb.view(), m, n);
                run.cpu.conv1d_forward(e.view_mut(), px.view(), pw.view(), m, k, n);
                run.cpu.bias_forward(e.view_mut(), pb.view(), m, n);
                assert!(d.host() == y[0].host() && e.host() == y[2].host());
            }
            (y.iter().map(|y| run.bits(y)).collect(), Vec::new())
        });
    }
}

#[test]
fn rows_of_experts_round_once() {
    let (m, d, per_token) = (70, 45, 3);
    let mut r = Random::new(11);
    let (x, old, weights) = (r.vec(m * d), r.vec(m * d), r.vec(m * per_token));
    let row_indices: Vec<u32> = (0..m * per_token).map(|_| r.below(m) as u32).collect();
    check("rows", |run| {
        let (px, pold) = (run.buf(&x), run.buf(&old));
        let mut gathered = run.buf(&vec![0.0; m * per_token * d]);
        run.cpu.gather_rows(gathered.view_mut(), px.view(), &row_indices, d);
        let mut out = (vec![run.bits(&gathered)], Vec::new());
        for (row_weights, write) in
            [(None, WriteMode::Overwrite), (Some((&weights[..]).into()), WriteMode::Accumulate)]
        {
            let mut y = run.buf(&old);
            run.cpu.combine_rows(y.view_mut(), px.view(), row_weights, &row_indices, m, d, write);
            out.0.push(run.bits(&y));
        }
        let (mut dots, mut scaled) = (Buf::zeroed(m), run.buf(&old));
        run.cpu.dot_rows(dots.view_mut(), px.view(), pold.view(), d);
        run.cpu.scale_rows(scaled.view_mut(), (&weights[..m]).into(), d);
        out.0.push(run.bits(&scaled));
        out.1.push(dots.host().to_vec());
        out
    });
}

#[test]
fn grouped_matmuls_round_once() {
    // Groups that threads share, groups that run one after the other, and groups with more columns
    // than one pass sums.
    for (rows, n, k) in [([9, 0, 11, 10], 33, 20), ([3, 0, 90, 1], 33, 20), ([1, 0, 300, 0], 4200, 9)] {
        let mut at = 0;
        let group = |(i, len): (usize, usize)| {
            at += len;
            RowGroup { rows: at - len..at, matrix_offset: (3 - i) * n * k }
        };
        let groups: Vec<RowGroup> = rows.into_iter().enumerate().map(group).collect();
        let m: usize = rows.iter().sum();
        let mut r = Random::new(12);
        let (x, w, dy) = (r.vec(m * k), r.vec(4 * n * k), r.vec(m * n));
        check(&format!("groups {rows:?}"), |run| {
            let (px, pw, pdy) = (run.buf(&x), run.buf(&w), run.buf(&dy));
            let (mut y, mut dx, mut dw) = (run.buf(&dy), run.buf(&x), Buf::from_slice(&w));
            run.cpu.grouped_forward(y.view_mut(), px.view(), pw.view(), &groups, n, k);
            run.cpu.grouped_backward_input(dx.view_mut(), pdy.view(), pw.view(), &groups, n, k);
            run.cpu.grouped_backward_weight(dw.view_mut(), pdy.view(), px.view(), &groups, n, k);
            (vec![run.bits(&y), run.bits(&dx)], vec![dw.host().to_vec()])
        });
    }
}

#[test]
#[should_panic(expected = "a buffer of Bf16 is used as f32")]
fn weight_gradients_in_16_bits_are_rejected() {
    let half = || Buf::zeroed_as(Dtype::Bf16, 4);
    Cpu::new(1).bias_backward(half().view_mut(), half().view(), 1, 4);
}
