//! Tests that ops on 16-bit elements give the bits of the op in `f32` on the same values, rounded
//! once to 16 bits, for any number of threads and on every instruction set. Operands of products
//! stay bf16 numbers in both runs, because the rule of the sums depends on their type
//! ([`crate::bf16_rule`]).

use crate::reference::TestRng;
use device::ops::{
    ActivationOps, AttentionDropout, AttentionOps, AttentionShape, BiasOps, ClassifierGrads, ClassifierOps,
    ClassifierShape, EmbeddingOps, GroupedMatmulOps, HeadLayout, HeadNormOps, IGNORE_LABEL, LayerNormOps,
    LayerNormParams, MatmulOps, RmsNormOps, RopeOps, RopeShape, RowGroup, RowOps, VectorOps, WriteMode,
};
use device::{Buf, Cpu, Dtype};

/// One execution of an op: on 16-bit buffers, or on `f32` buffers with the same values.
struct TestRun<'a> {
    cpu: &'a Cpu,
    /// The 16-bit type under test.
    dtype: Dtype,
    /// True if the op runs on `f32` buffers.
    in_f32: bool,
}

impl TestRun<'_> {
    /// Creates a buffer of the values `x`, each rounded to 16 bits.
    fn make_buf(&self, x: &[f32]) -> Buf {
        let mut half = Buf::zeroed_as(self.dtype, x.len());
        self.cpu.cast(half.view_mut(), x.into());
        if self.in_f32 { self.convert_to_f32(&half) } else { half }
    }

    /// Creates a buffer of the values `x`, each rounded to 16 bits, for an operand of products. In
    /// bf16 it is a 16-bit buffer in both runs.
    fn make_operand(&self, x: &[f32]) -> Buf {
        TestRun { in_f32: self.in_f32 && self.dtype != Dtype::Bf16, ..*self }.make_buf(x)
    }

    /// Converts a buffer to `f32`.
    fn convert_to_f32(&self, x: &Buf) -> Buf {
        let mut wide = Buf::zeroed(x.len());
        self.cpu.cast(wide.view_mut(), x.view());
        wide
    }

    /// Returns the bits of the op's output `x`, as numbers of the 16-bit type of the test. An
    /// output in `f32` is rounded.
    fn to_half_bits(&self, x: &Buf) -> Vec<u16> {
        let mut half = Buf::zeroed_as(self.dtype, x.len());
        self.cpu.cast(half.view_mut(), x.view());
        half.view().half_bits().to_vec()
    }
}

/// The 16-bit outputs of an op, and the outputs that are always `f32`.
type OpOutputs = (Vec<Vec<u16>>, Vec<Vec<f32>>);

/// Asserts that an op gives the same outputs on 16-bit buffers as on `f32` buffers, for several
/// numbers of threads and on every instruction set. `what` names the op in failures.
#[track_caller]
fn assert_rounds_once(what: &str, op: impl Fn(&TestRun) -> OpOutputs) {
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
        for cpu in &Cpu::new_for_all_instruction_sets(2) {
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
        let mut r = TestRng::new(1);
        let (x, w, dy) = (r.draw_vec(m * k), r.draw_vec(n * k), r.draw_vec(m * n));
        assert_rounds_once(&format!("matmul {m} {n} {k}"), |run| {
            let (px, pw, pdy, mut out) =
                (run.make_operand(&x), run.make_operand(&w), run.make_operand(&dy), (Vec::new(), Vec::new()));
            for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
                let (mut y, mut dx, mut dw) = (run.make_buf(&dy), run.make_buf(&x), Buf::from_slice(&w));
                run.cpu.matmul_forward(y.view_mut(), px.view(), pw.view(), m, n, k, write);
                run.cpu.matmul_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, n, k, write);
                run.cpu.matmul_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, n, k, write);
                out.0.extend([run.to_half_bits(&y), run.to_half_bits(&dx)]);
                out.1.push(dw.host_slice().to_vec());
            }
            out
        });
    }
}

#[test]
fn embedding_and_bias_round_once() {
    let (m, d, v) = (70, 133, 11);
    let mut r = TestRng::new(2);
    let (w, dx) = (r.draw_vec(v * d), r.draw_vec(m * d));
    let tokens: Vec<u32> = (0..m).map(|_| r.draw_below(v) as u32).collect();
    assert_rounds_once("embedding", |run| {
        let (mut x, mut dw) = (run.make_buf(&dx), Buf::zeroed(v * d));
        run.cpu.embedding_forward(x.view_mut(), run.make_buf(&w).view(), &tokens, d);
        run.cpu.embedding_backward(dw.view_mut(), run.make_buf(&dx).view(), &tokens, d);
        (vec![run.to_half_bits(&x)], vec![dw.host_slice().to_vec()])
    });
    assert_rounds_once("bias", |run| {
        let (mut y, mut dbias) = (run.make_buf(&dx), Buf::zeroed(d));
        run.cpu.bias_forward(y.view_mut(), run.make_buf(&w[..d]).view(), m, d);
        run.cpu.bias_backward(dbias.view_mut(), run.make_buf(&dx).view(), m, d);
        (vec![run.to_half_bits(&y)], vec![dbias.host_slice().to_vec()])
    });
}

#[test]
fn rms_norms_round_once() {
    let (m, d, eps) = (75, 67, 1e-5);
    let mut r = TestRng::new(3);
    let (x, delta, w, dy) = (r.draw_vec(m * d), r.draw_vec(m * d), r.draw_vec(d), r.draw_vec(m * d));
    assert_rounds_once("rmsnorm", |run| {
        let (mut y, mut rstd, mut dw, pw) =
            (run.make_buf(&dy), Buf::zeroed(m), Buf::zeroed(d), run.make_buf(&w));
        let px = run.make_buf(&x);
        run.cpu.rmsnorm_forward(y.view_mut(), rstd.view_mut(), px.view(), pw.view(), m, d, eps);
        let mut out = (vec![run.to_half_bits(&y)], vec![rstd.host_slice().to_vec()]);
        for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
            let (mut dx, dy) = (run.make_buf(&delta), run.make_buf(&dy));
            let (to, dw) = (dx.view_mut(), dw.view_mut());
            run.cpu.rmsnorm_backward(to, dw, dy.view(), px.view(), pw.view(), rstd.view(), m, d, write);
            out.0.push(run.to_half_bits(&dx));
        }
        out.1.push(dw.host_slice().to_vec());
        out
    });
    // The norm reads the sum after its rounding to 16 bits.
    assert_rounds_once("add_rmsnorm", |run| {
        let (mut y, mut rstd, mut sum) = (run.make_buf(&dy), Buf::zeroed(m), run.make_buf(&x));
        let (pw, pdelta) = (run.make_buf(&w), run.make_buf(&delta));
        if run.in_f32 {
            run.cpu.add(sum.view_mut(), pdelta.view());
            let mut half = Buf::zeroed_as(run.dtype, m * d);
            run.cpu.cast(half.view_mut(), sum.view());
            sum = run.convert_to_f32(&half);
            run.cpu.rmsnorm_forward(y.view_mut(), rstd.view_mut(), sum.view(), pw.view(), m, d, eps);
        } else {
            let (y, rstd) = (y.view_mut(), rstd.view_mut());
            run.cpu.add_rmsnorm_forward(y, rstd, sum.view_mut(), pdelta.view(), pw.view(), m, d, eps);
        }
        (vec![run.to_half_bits(&y), run.to_half_bits(&sum)], vec![rstd.host_slice().to_vec()])
    });
}

#[test]
fn rms_norms_of_heads_round_once() {
    let h = HeadLayout { rows: 40, first_column: 5, heads: 3, head_dim: 7, stride: 31 };
    let mut r = TestRng::new(4);
    let (x, w, dy) = (r.draw_vec(h.rows * h.stride), r.draw_vec(h.head_dim), r.draw_vec(h.rows * h.stride));
    assert_rounds_once("rmsnorm_heads", |run| {
        let (mut px, pw, mut dx) = (run.make_buf(&x), run.make_buf(&w), run.make_buf(&dy));
        let (mut raw, mut rstd) =
            (run.make_buf(&vec![0.0; h.rows * h.width()]), Buf::zeroed(h.rows * h.heads));
        let mut dw = Buf::zeroed(h.head_dim);
        let (y, rstd_view) = (px.view_mut(), rstd.view_mut());
        run.cpu.rmsnorm_heads_forward(y, raw.view_mut(), rstd_view, pw.view(), h, 1e-6);
        let (to, dw_to) = (dx.view_mut(), dw.view_mut());
        run.cpu.rmsnorm_heads_backward(to, dw_to, raw.view(), rstd.view(), pw.view(), h);
        let f32s = vec![rstd.host_slice().to_vec(), dw.host_slice().to_vec()];
        (vec![run.to_half_bits(&px), run.to_half_bits(&raw), run.to_half_bits(&dx)], f32s)
    });
}

#[test]
fn rope_swiglu_and_elementwise_ops_round_once() {
    let (b, t, heads, head_dim, stride) = (2, 19, 3, 10, 41);
    let mut r = TestRng::new(5);
    let (x, cos, sin) =
        (r.draw_vec(b * t * stride), r.draw_vec(t * head_dim / 2), r.draw_vec(t * head_dim / 2));
    assert_rounds_once("rope", |run| {
        let (mut forward, mut back) = (run.make_buf(&x), run.make_buf(&x));
        let (c, s) = ((&cos[..]).into(), (&sin[..]).into());
        let shape = RopeShape { b, t, heads, head_dim, stride };
        run.cpu.rope_forward(forward.view_mut(), c, s, shape);
        run.cpu.rope_backward(back.view_mut(), c, s, shape);
        (vec![run.to_half_bits(&forward), run.to_half_bits(&back)], Vec::new())
    });
    let (m, f) = (33, 77);
    let (gate_up, dy) = (r.draw_vec(m * 2 * f), r.draw_vec(m * f));
    assert_rounds_once("swiglu", |run| {
        let (mut y, mut dgate_up, input) =
            (run.make_buf(&dy), run.make_buf(&gate_up), run.make_buf(&gate_up));
        run.cpu.swiglu_forward(y.view_mut(), input.view(), m, f);
        let mut again = run.make_buf(&dy);
        run.cpu.swiglu_backward(dgate_up.view_mut(), again.view_mut(), input.view(), m, f);
        (vec![run.to_half_bits(&y), run.to_half_bits(&dgate_up), run.to_half_bits(&again)], Vec::new())
    });
    assert_rounds_once("add and scale", |run| {
        let (mut sum, mut scaled) = (run.make_buf(&dy), run.make_buf(&dy));
        run.cpu.add(sum.view_mut(), run.make_buf(&gate_up[..m * f]).view());
        run.cpu.scale(scaled.view_mut(), 0.3);
        (vec![run.to_half_bits(&sum), run.to_half_bits(&scaled)], Vec::new())
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
        let mut r = TestRng::new(6);
        let (qkv, d_o) = (
            r.draw_vec(b * t * (shape.heads + 2 * kv_heads) * head_dim),
            r.draw_vec(b * t * shape.heads * head_dim),
        );
        let starts = r.draw_document_starts(b, t, 20);
        assert_rounds_once("attention", |run| {
            let (mut o, mut lse, mut dqkv) =
                (run.make_buf(&d_o), Buf::zeroed(b * shape.heads * t), run.make_buf(&qkv));
            let (pqkv, pd_o) = (run.make_operand(&qkv), run.make_operand(&d_o));
            run.cpu.attention_forward(o.view_mut(), lse.view_mut(), pqkv.view(), &starts, shape);
            // The backward pass reads the output after its rounding to 16 bits.
            let o_bits = run.to_half_bits(&o);
            let o_values: Vec<f32> = {
                let mut half = Buf::zeroed_as(run.dtype, o.len());
                half.view_mut().half_bits().copy_from_slice(&o_bits);
                run.convert_to_f32(&half).host_slice().to_vec()
            };
            let (d, rounded_o) = (dqkv.view_mut(), run.make_buf(&o_values));
            run.cpu.attention_backward(
                d,
                pd_o.view(),
                rounded_o.view(),
                lse.view(),
                pqkv.view(),
                &starts,
                shape,
            );
            (vec![o_bits, run.to_half_bits(&dqkv)], vec![lse.host_slice().to_vec()])
        });
    }
}

#[test]
fn classifier_rounds_once() {
    let (m, d, v) = (300, 13, 700);
    let mut r = TestRng::new(7);
    let (x, w) = (r.draw_vec(m * d), r.draw_vec(v * d));
    let labels: Vec<u32> =
        (0..m).map(|i| if i % 7 == 0 { IGNORE_LABEL } else { r.draw_below(v) as u32 }).collect();
    for cap in [None, Some(2.0)] {
        assert_rounds_once("classifier", |run| {
            let (px, pw, mut loss) = (run.make_operand(&x), run.make_operand(&w), Buf::zeroed(m));
            let (mut dx, mut dw) = (run.make_buf(&x), Buf::zeroed(v * d));
            let to = ClassifierGrads {
                dx: dx.view_mut(),
                dw: dw.view_mut(),
                dw_write: WriteMode::Overwrite,
                scale: 0.5,
            };
            let (loss_to, px, pw) = (loss.view_mut(), px.view(), pw.view());
            let shape = ClassifierShape { m, d, v, softcap: cap };
            run.cpu.compute_classifier_loss(loss_to, px, pw, &labels, shape, Some(to));
            (vec![run.to_half_bits(&dx)], vec![loss.host_slice().to_vec(), dw.host_slice().to_vec()])
        });
    }
}

#[test]
fn layer_norms_round_once() {
    let (m, d, eps) = (75, 67, 1e-5);
    let mut r = TestRng::new(8);
    let (x, delta, dy) = (r.draw_vec(m * d), r.draw_vec(m * d), r.draw_vec(m * d));
    let (w, b) = (r.draw_vec(d), r.draw_vec(d));
    assert_rounds_once("layernorm", |run| {
        let (px, pw, pb) = (run.make_buf(&x), run.make_buf(&w), run.make_buf(&b));
        let (mut y, mut stats) = (run.make_buf(&dy), Buf::zeroed(2 * m));
        let norm = LayerNormParams { w: pw.view(), b: pb.view(), eps };
        run.cpu.layernorm_forward(y.view_mut(), stats.view_mut(), px.view(), norm, m);
        let mut out = (vec![run.to_half_bits(&y)], vec![stats.host_slice().to_vec()]);
        let (mut dw, mut db) = (Buf::zeroed(d), Buf::zeroed(d));
        for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
            let (mut dx, dy) = (run.make_buf(&delta), run.make_buf(&dy));
            let (to, dw, db) = (dx.view_mut(), dw.view_mut(), db.view_mut());
            run.cpu.layernorm_backward(to, dw, db, dy.view(), px.view(), pw.view(), stats.view(), m, write);
            out.0.push(run.to_half_bits(&dx));
        }
        out.1.extend([dw.host_slice().to_vec(), db.host_slice().to_vec()]);
        out
    });
    // The norm reads the sum after its rounding to 16 bits.
    assert_rounds_once("add_layernorm", |run| {
        let (pw, pb, pdelta) = (run.make_buf(&w), run.make_buf(&b), run.make_buf(&delta));
        let (mut y, mut stats, mut sum) = (run.make_buf(&dy), Buf::zeroed(2 * m), run.make_buf(&x));
        let norm = LayerNormParams { w: pw.view(), b: pb.view(), eps };
        if run.in_f32 {
            run.cpu.add(sum.view_mut(), pdelta.view());
            let mut half = Buf::zeroed_as(run.dtype, m * d);
            run.cpu.cast(half.view_mut(), sum.view());
            sum = run.convert_to_f32(&half);
            run.cpu.layernorm_forward(y.view_mut(), stats.view_mut(), sum.view(), norm, m);
        } else {
            let (y, stats) = (y.view_mut(), stats.view_mut());
            run.cpu.add_layernorm_forward(y, stats, sum.view_mut(), pdelta.view(), norm, m);
        }
        (vec![run.to_half_bits(&y), run.to_half_bits(&sum)], vec![stats.host_slice().to_vec()])
    });
}

#[test]
fn gelu_and_geglu_round_once() {
    let (m, f) = (33, 77);
    let mut r = TestRng::new(9);
    let (gate_up, dy) = (r.draw_vec(m * 2 * f), r.draw_vec(m * f));
    assert_rounds_once("gelu", |run| {
        let (mut y, mut dx, input) = (run.make_buf(&dy), run.make_buf(&dy), run.make_buf(&gate_up[..m * f]));
        run.cpu.gelu_forward(y.view_mut(), input.view());
        let mut again = run.make_buf(&dy);
        run.cpu.gelu_backward(dx.view_mut(), again.view_mut(), input.view());
        (vec![run.to_half_bits(&y), run.to_half_bits(&dx), run.to_half_bits(&again)], Vec::new())
    });
    assert_rounds_once("geglu", |run| {
        let (mut y, mut dgate_up, input) =
            (run.make_buf(&dy), run.make_buf(&gate_up), run.make_buf(&gate_up));
        run.cpu.geglu_forward(y.view_mut(), input.view(), m, f);
        let mut again = run.make_buf(&dy);
        run.cpu.geglu_backward(dgate_up.view_mut(), again.view_mut(), input.view(), m, f);
        (vec![run.to_half_bits(&y), run.to_half_bits(&dgate_up), run.to_half_bits(&again)], Vec::new())
    });
}

#[test]
fn transposed_matrices_round_once() {
    let (m, inp, out) = (37, 50, 91);
    let mut r = TestRng::new(10);
    let (x, w, dy) = (r.draw_vec(m * inp), r.draw_vec(inp * out), r.draw_vec(m * out));
    assert_rounds_once("conv1d", |run| {
        let (px, pw, pdy) = (run.make_operand(&x), run.make_operand(&w), run.make_operand(&dy));
        let (mut y, mut dx, mut dw) = (run.make_buf(&dy), run.make_buf(&x), Buf::zeroed(inp * out));
        run.cpu.conv1d_forward(y.view_mut(), px.view(), pw.view(), m, inp, out);
        run.cpu.conv1d_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, inp, out);
        run.cpu.conv1d_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, inp, out);
        (vec![run.to_half_bits(&y), run.to_half_bits(&dx)], vec![dw.host_slice().to_vec()])
    });
}

/// Checks that 16-bit matmuls with a bias round once, and that in f32 they equal a matmul followed
/// by the bias op.
#[test]
fn matmuls_with_a_bias_round_once() {
    for (m, n, k) in [(37, 91, 50), (300, 4200, 9), (1, 1, 700)] {
        let mut r = TestRng::new(13);
        let (x, w, bias) = (r.draw_vec(m * k), r.draw_vec(n * k), r.draw_vec(n));
        assert_rounds_once(&format!("bias {m} {n} {k}"), |run| {
            let (px, pw, pb) = (run.make_operand(&x), run.make_operand(&w), run.make_buf(&bias));
            let zeros = vec![0.0; m * n];
            let mut y = [run.make_buf(&zeros), run.make_buf(&zeros), run.make_buf(&zeros)];
            let [a, b, c] = &mut y;
            run.cpu.matmul_bias_forward(a.view_mut(), px.view(), pw.view(), Some(pb.view()), m, n, k);
            run.cpu.matmul_bias_forward(b.view_mut(), px.view(), pw.view(), None, m, n, k);
            run.cpu.conv1d_bias_forward(c.view_mut(), px.view(), pw.view(), pb.view(), m, k, n);
            if run.in_f32 {
                let mut separate = [Buf::zeroed(m * n), Buf::zeroed(m * n)];
                let [d, e] = &mut separate;
                run.cpu.matmul_forward(d.view_mut(), px.view(), pw.view(), m, n, k, WriteMode::Overwrite);
                assert!(d.host_slice() == y[1].host_slice());
                run.cpu.bias_forward(d.view_mut(), pb.view(), m, n);
                run.cpu.conv1d_forward(e.view_mut(), px.view(), pw.view(), m, k, n);
                run.cpu.bias_forward(e.view_mut(), pb.view(), m, n);
                assert!(d.host_slice() == y[0].host_slice() && e.host_slice() == y[2].host_slice());
            }
            (y.iter().map(|y| run.to_half_bits(y)).collect(), Vec::new())
        });
    }
}

#[test]
fn rows_of_experts_round_once() {
    let (m, d, per_token) = (70, 45, 3);
    let mut r = TestRng::new(11);
    let (x, old, weights) = (r.draw_vec(m * d), r.draw_vec(m * d), r.draw_vec(m * per_token));
    let row_indices: Vec<u32> = (0..m * per_token).map(|_| r.draw_below(m) as u32).collect();
    assert_rounds_once("rows", |run| {
        let (px, pold) = (run.make_buf(&x), run.make_buf(&old));
        let mut gathered = run.make_buf(&vec![0.0; m * per_token * d]);
        run.cpu.gather_rows(gathered.view_mut(), px.view(), &row_indices, d);
        let mut out = (vec![run.to_half_bits(&gathered)], Vec::new());
        for (row_weights, write) in
            [(None, WriteMode::Overwrite), (Some((&weights[..]).into()), WriteMode::Accumulate)]
        {
            let mut y = run.make_buf(&old);
            run.cpu.combine_rows(y.view_mut(), px.view(), row_weights, &row_indices, m, d, write);
            out.0.push(run.to_half_bits(&y));
        }
        let (mut dots, mut scaled) = (Buf::zeroed(m), run.make_buf(&old));
        run.cpu.dot_rows(dots.view_mut(), px.view(), pold.view(), d);
        run.cpu.scale_rows(scaled.view_mut(), (&weights[..m]).into(), d);
        out.0.push(run.to_half_bits(&scaled));
        out.1.push(dots.host_slice().to_vec());
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
        let mut r = TestRng::new(12);
        let (x, w, dy) = (r.draw_vec(m * k), r.draw_vec(4 * n * k), r.draw_vec(m * n));
        assert_rounds_once(&format!("groups {rows:?}"), |run| {
            let (px, pw, pdy) = (run.make_operand(&x), run.make_operand(&w), run.make_operand(&dy));
            let (mut y, mut dx, mut dw) = (run.make_buf(&dy), run.make_buf(&x), Buf::from_slice(&w));
            run.cpu.grouped_forward(y.view_mut(), px.view(), pw.view(), &groups, n, k);
            run.cpu.grouped_backward_input(dx.view_mut(), pdy.view(), pw.view(), &groups, n, k);
            run.cpu.grouped_backward_weight(dw.view_mut(), pdy.view(), px.view(), &groups, n, k);
            (vec![run.to_half_bits(&y), run.to_half_bits(&dx)], vec![dw.host_slice().to_vec()])
        });
    }
}

#[test]
#[should_panic(expected = "a buffer of Bf16 is used as f32")]
fn weight_gradients_in_16_bits_are_rejected() {
    let half = || Buf::zeroed_as(Dtype::Bf16, 4);
    Cpu::new(1).bias_backward(half().view_mut(), half().view(), 1, 4);
}
