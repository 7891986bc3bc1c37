//! Ops on 16-bit elements: the bits of the same op in `f32` on the widened values, rounded once; for any number of threads.
mod reference;

use device::ops::{
    AttentionDropout, AttentionShape, ClassifierGrads, Group, HeadRows, IGNORE, LayerNorm, Write,
};
use device::{Buf, Cpu, Dtype, Ops};
use reference::Random;

/// Makes buffers, of 16 bits or of `f32` with the same values.
struct Maker<'a> {
    cpu: &'a Cpu,
    dtype: Dtype,
    wide: bool,
}

impl Maker<'_> {
    /// A buffer of the values, each rounded to 16 bits.
    fn make(&self, x: &[f32]) -> Buf {
        let mut half = Buf::zeroed_as(self.dtype, x.len());
        self.cpu.cast(half.view_mut(), x.into());
        if self.wide { self.widened(&half) } else { half }
    }

    fn widened(&self, x: &Buf) -> Buf {
        let mut wide = Buf::zeroed(x.len());
        self.cpu.cast(wide.view_mut(), x.view());
        wide
    }

    /// 16 bits of an output, rounded now where it was computed in f32.
    fn bits(&self, x: &Buf) -> Vec<u16> {
        let mut half = Buf::zeroed_as(self.dtype, x.len());
        self.cpu.cast(half.view_mut(), x.view());
        half.view().halves().to_vec()
    }
}

/// Outputs in 16 bits, and those that stay `f32`.
type Outputs = (Vec<Vec<u16>>, Vec<Vec<f32>>);

#[track_caller]
fn check(what: &str, run: impl Fn(&Maker) -> Outputs) {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let one = Cpu::new(1);
        let want = run(&Maker { cpu: &one, dtype, wide: true });
        assert!(want.0.iter().flatten().any(|x| *x != 0) || want.1.iter().flatten().any(|x| *x != 0.0));
        for threads in [1, 3] {
            let cpu = Cpu::new(threads);
            let got = run(&Maker { cpu: &cpu, dtype, wide: false });
            assert!(got.0 == want.0, "{what}, {dtype:?}, {threads} threads: 16-bit outputs differ");
            assert!(got.1 == want.1, "{what}, {dtype:?}, {threads} threads: f32 outputs differ");
        }
        let levels = Cpu::each_level(2);
        for cpu in &levels[..levels.len().max(2) - 1] {
            assert!(run(&Maker { cpu, dtype, wide: false }) == want, "{what}, {dtype:?}, {}", cpu.describe());
        }
    }
}

#[test]
fn matmul() {
    for (m, n, k) in [(1, 1, 1), (17, 49, 33), (70, 31, 1100), (300, 4200, 9), (5, 100, 64)] {
        let mut r = Random::new(1);
        let (x, w, dy) = (r.vec(m * k), r.vec(n * k), r.vec(m * n));
        check(&format!("matmul {m} {n} {k}"), |of| {
            let (px, pw, pdy, mut out) = (of.make(&x), of.make(&w), of.make(&dy), (Vec::new(), Vec::new()));
            for write in [Write::Set, Write::Add] {
                let (mut y, mut dx, mut dw) = (of.make(&dy), of.make(&x), Buf::from_slice(&w));
                of.cpu.matmul_forward(y.view_mut(), px.view(), pw.view(), m, n, k, write);
                of.cpu.matmul_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, n, k, write);
                of.cpu.matmul_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, n, k, write);
                out.0.extend([of.bits(&y), of.bits(&dx)]);
                out.1.push(dw.host().to_vec());
            }
            out
        });
    }
}

#[test]
fn embedding_and_bias() {
    let (m, d, v) = (70, 133, 11);
    let mut r = Random::new(2);
    let (w, dx) = (r.vec(v * d), r.vec(m * d));
    let tokens: Vec<u32> = (0..m).map(|_| r.below(v) as u32).collect();
    check("embedding", |of| {
        let (mut x, mut dw) = (of.make(&dx), Buf::zeroed(v * d));
        of.cpu.embedding_forward(x.view_mut(), of.make(&w).view(), &tokens, d);
        of.cpu.embedding_backward(dw.view_mut(), of.make(&dx).view(), &tokens, d);
        (vec![of.bits(&x)], vec![dw.host().to_vec()])
    });
    check("bias", |of| {
        let (mut y, mut dbias) = (of.make(&dx), Buf::zeroed(d));
        of.cpu.bias_forward(y.view_mut(), of.make(&w[..d]).view(), m, d);
        of.cpu.bias_backward(dbias.view_mut(), of.make(&dx).view(), m, d);
        (vec![of.bits(&y)], vec![dbias.host().to_vec()])
    });
}

#[test]
fn norms() {
    let (m, d, eps) = (75, 67, 1e-5);
    let mut r = Random::new(3);
    let (x, delta, w, dy) = (r.vec(m * d), r.vec(m * d), r.vec(d), r.vec(m * d));
    check("rmsnorm", |of| {
        let (mut y, mut rstd, mut dw, pw) = (of.make(&dy), Buf::zeroed(m), Buf::zeroed(d), of.make(&w));
        let px = of.make(&x);
        of.cpu.rmsnorm_forward(y.view_mut(), rstd.view_mut(), px.view(), pw.view(), m, d, eps);
        let mut out = (vec![of.bits(&y)], vec![rstd.host().to_vec()]);
        for write in [Write::Set, Write::Add] {
            let (mut dx, dy) = (of.make(&delta), of.make(&dy));
            let (to, dw) = (dx.view_mut(), dw.view_mut());
            of.cpu.rmsnorm_backward(to, dw, dy.view(), px.view(), pw.view(), rstd.view(), m, d, write);
            out.0.push(of.bits(&dx));
        }
        out.1.push(dw.host().to_vec());
        out
    });
    // The norm is of the residual stream as it is kept.
    check("add_rmsnorm", |of| {
        let (mut y, mut rstd, mut sum) = (of.make(&dy), Buf::zeroed(m), of.make(&x));
        let (pw, pdelta) = (of.make(&w), of.make(&delta));
        if of.wide {
            of.cpu.add(sum.view_mut(), pdelta.view());
            let mut half = Buf::zeroed_as(of.dtype, m * d);
            of.cpu.cast(half.view_mut(), sum.view());
            sum = of.widened(&half);
            of.cpu.rmsnorm_forward(y.view_mut(), rstd.view_mut(), sum.view(), pw.view(), m, d, eps);
        } else {
            let (y, rstd) = (y.view_mut(), rstd.view_mut());
            of.cpu.add_rmsnorm_forward(y, rstd, sum.view_mut(), pdelta.view(), pw.view(), m, d, eps);
        }
        (vec![of.bits(&y), of.bits(&sum)], vec![rstd.host().to_vec()])
    });
}

#[test]
fn norms_of_heads() {
    let h = HeadRows { rows: 40, first: 5, heads: 3, head_dim: 7, stride: 31 };
    let mut r = Random::new(4);
    let (x, w, dy) = (r.vec(h.rows * h.stride), r.vec(h.head_dim), r.vec(h.rows * h.stride));
    check("rmsnorm_heads", |of| {
        let (mut px, pw, mut dx) = (of.make(&x), of.make(&w), of.make(&dy));
        let (mut raw, mut rstd) = (of.make(&vec![0.0; h.rows * h.width()]), Buf::zeroed(h.rows * h.heads));
        let mut dw = Buf::zeroed(h.head_dim);
        let (to, kept) = (px.view_mut(), rstd.view_mut());
        of.cpu.rmsnorm_heads_forward(to, raw.view_mut(), kept, pw.view(), h, 1e-6);
        let (to, dw_to) = (dx.view_mut(), dw.view_mut());
        of.cpu.rmsnorm_heads_backward(to, dw_to, raw.view(), rstd.view(), pw.view(), h);
        let f32s = vec![rstd.host().to_vec(), dw.host().to_vec()];
        (vec![of.bits(&px), of.bits(&raw), of.bits(&dx)], f32s)
    });
}

#[test]
fn rotations_and_swiglu() {
    let (b, t, heads, head_dim, stride) = (2, 19, 3, 10, 41);
    let mut r = Random::new(5);
    let (x, cos, sin) = (r.vec(b * t * stride), r.vec(t * head_dim / 2), r.vec(t * head_dim / 2));
    check("rope", |of| {
        let (mut forward, mut back) = (of.make(&x), of.make(&x));
        let (c, s) = ((&cos[..]).into(), (&sin[..]).into());
        of.cpu.rope_forward(forward.view_mut(), c, s, b, t, heads, head_dim, stride);
        of.cpu.rope_backward(back.view_mut(), c, s, b, t, heads, head_dim, stride);
        (vec![of.bits(&forward), of.bits(&back)], Vec::new())
    });
    let (m, f) = (33, 77);
    let (gate_up, dy) = (r.vec(m * 2 * f), r.vec(m * f));
    check("swiglu", |of| {
        let (mut y, mut dgate_up, given) = (of.make(&dy), of.make(&gate_up), of.make(&gate_up));
        of.cpu.swiglu_forward(y.view_mut(), given.view(), m, f);
        let mut again = of.make(&dy);
        of.cpu.swiglu_backward(dgate_up.view_mut(), again.view_mut(), given.view(), m, f);
        (vec![of.bits(&y), of.bits(&dgate_up), of.bits(&again)], Vec::new())
    });
    check("add and scale", |of| {
        let (mut sum, mut scaled) = (of.make(&dy), of.make(&dy));
        of.cpu.add(sum.view_mut(), of.make(&gate_up[..m * f]).view());
        of.cpu.scale(scaled.view_mut(), 0.3);
        (vec![of.bits(&sum), of.bits(&scaled)], Vec::new())
    });
}

#[test]
fn attention() {
    for (b, t, kv_heads, group, head_dim, softcap) in [(2, 11, 1, 3, 14, None), (1, 150, 2, 2, 24, Some(3.0))]
    {
        let dropout = softcap.map(|_| AttentionDropout { key: [4, 2], share: 0.25, first: 3 });
        let shape = AttentionShape {
            softcap,
            dropout,
            ..AttentionShape::new(b, t, kv_heads * group, kv_heads, head_dim)
        };
        let mut r = Random::new(6);
        let (qkv, d_o) =
            (r.vec(b * t * (shape.heads + 2 * kv_heads) * head_dim), r.vec(b * t * shape.heads * head_dim));
        let starts = r.starts(b, t, 20);
        check("attention", |of| {
            let (mut o, mut lse, mut dqkv) = (of.make(&d_o), Buf::zeroed(b * shape.heads * t), of.make(&qkv));
            let (pqkv, pd_o) = (of.make(&qkv), of.make(&d_o));
            of.cpu.attention_forward(o.view_mut(), lse.view_mut(), pqkv.view(), &starts, shape);
            // The backward reads the output as it was kept.
            let kept = of.bits(&o);
            let wide: Vec<f32> = {
                let mut half = Buf::zeroed_as(of.dtype, o.len());
                half.view_mut().halves().copy_from_slice(&kept);
                of.widened(&half).host().to_vec()
            };
            let (d, kept_o) = (dqkv.view_mut(), of.make(&wide));
            of.cpu.attention_backward(d, pd_o.view(), kept_o.view(), lse.view(), pqkv.view(), &starts, shape);
            (vec![kept, of.bits(&dqkv)], vec![lse.host().to_vec()])
        });
    }
}

#[test]
fn classifier() {
    let (m, d, v) = (300, 13, 700);
    let mut r = Random::new(7);
    let (x, w) = (r.vec(m * d), r.vec(v * d));
    let labels: Vec<u32> = (0..m).map(|i| if i % 7 == 0 { IGNORE } else { r.below(v) as u32 }).collect();
    for cap in [None, Some(2.0)] {
        check("classifier", |of| {
            let (px, pw, mut loss) = (of.make(&x), of.make(&w), Buf::zeroed(m));
            let (mut dx, mut dw) = (of.make(&x), Buf::zeroed(v * d));
            let to =
                ClassifierGrads { dx: dx.view_mut(), dw: dw.view_mut(), dw_write: Write::Set, scale: 0.5 };
            let (loss_to, px, pw) = (loss.view_mut(), px.view(), pw.view());
            of.cpu.capped_classifier(loss_to, px, pw, &labels, m, d, v, cap, Some(to));
            (vec![of.bits(&dx)], vec![loss.host().to_vec(), dw.host().to_vec()])
        });
    }
}

#[test]
fn layer_norms() {
    let (m, d, eps) = (75, 67, 1e-5);
    let mut r = Random::new(8);
    let (x, delta, dy) = (r.vec(m * d), r.vec(m * d), r.vec(m * d));
    let (w, b) = (r.vec(d), r.vec(d));
    check("layernorm", |of| {
        let (px, pw, pb) = (of.make(&x), of.make(&w), of.make(&b));
        let (mut y, mut stats) = (of.make(&dy), Buf::zeroed(2 * m));
        let norm = LayerNorm { w: pw.view(), b: pb.view(), eps };
        of.cpu.layernorm_forward(y.view_mut(), stats.view_mut(), px.view(), norm, m);
        let mut out = (vec![of.bits(&y)], vec![stats.host().to_vec()]);
        let (mut dw, mut db) = (Buf::zeroed(d), Buf::zeroed(d));
        for write in [Write::Set, Write::Add] {
            let (mut dx, dy) = (of.make(&delta), of.make(&dy));
            let (to, dw, db) = (dx.view_mut(), dw.view_mut(), db.view_mut());
            of.cpu.layernorm_backward(to, dw, db, dy.view(), px.view(), pw.view(), stats.view(), m, write);
            out.0.push(of.bits(&dx));
        }
        out.1.extend([dw.host().to_vec(), db.host().to_vec()]);
        out
    });
    // The norm is of the residual stream as it is kept.
    check("add_layernorm", |of| {
        let (pw, pb, pdelta) = (of.make(&w), of.make(&b), of.make(&delta));
        let (mut y, mut stats, mut sum) = (of.make(&dy), Buf::zeroed(2 * m), of.make(&x));
        let norm = LayerNorm { w: pw.view(), b: pb.view(), eps };
        if of.wide {
            of.cpu.add(sum.view_mut(), pdelta.view());
            let mut half = Buf::zeroed_as(of.dtype, m * d);
            of.cpu.cast(half.view_mut(), sum.view());
            sum = of.widened(&half);
            of.cpu.layernorm_forward(y.view_mut(), stats.view_mut(), sum.view(), norm, m);
        } else {
            let (y, stats) = (y.view_mut(), stats.view_mut());
            of.cpu.add_layernorm_forward(y, stats, sum.view_mut(), pdelta.view(), norm, m);
        }
        (vec![of.bits(&y), of.bits(&sum)], vec![stats.host().to_vec()])
    });
}

#[test]
fn gelu_alone_and_as_a_gate() {
    let (m, f) = (33, 77);
    let mut r = Random::new(9);
    let (gate_up, dy) = (r.vec(m * 2 * f), r.vec(m * f));
    check("gelu", |of| {
        let (mut y, mut dx, given) = (of.make(&dy), of.make(&dy), of.make(&gate_up[..m * f]));
        of.cpu.gelu_forward(y.view_mut(), given.view());
        let mut again = of.make(&dy);
        of.cpu.gelu_backward(dx.view_mut(), again.view_mut(), given.view());
        (vec![of.bits(&y), of.bits(&dx), of.bits(&again)], Vec::new())
    });
    check("geglu", |of| {
        let (mut y, mut dgate_up, given) = (of.make(&dy), of.make(&gate_up), of.make(&gate_up));
        of.cpu.geglu_forward(y.view_mut(), given.view(), m, f);
        let mut again = of.make(&dy);
        of.cpu.geglu_backward(dgate_up.view_mut(), again.view_mut(), given.view(), m, f);
        (vec![of.bits(&y), of.bits(&dgate_up), of.bits(&again)], Vec::new())
    });
}

#[test]
fn matrices_stored_the_other_way_round() {
    let (m, inp, out) = (37, 50, 91);
    let mut r = Random::new(10);
    let (x, w, dy) = (r.vec(m * inp), r.vec(inp * out), r.vec(m * out));
    check("conv1d", |of| {
        let (px, pw, pdy) = (of.make(&x), of.make(&w), of.make(&dy));
        let (mut y, mut dx, mut dw) = (of.make(&dy), of.make(&x), Buf::zeroed(inp * out));
        of.cpu.conv1d_forward(y.view_mut(), px.view(), pw.view(), m, inp, out);
        of.cpu.conv1d_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, inp, out);
        of.cpu.conv1d_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, inp, out);
        (vec![of.bits(&y), of.bits(&dx)], vec![dw.host().to_vec()])
    });
}

/// With a bias the sum is rounded once; in f32 it is that of both ops one after the other.
#[test]
fn products_with_a_bias() {
    for (m, n, k) in [(37, 91, 50), (300, 4200, 9), (1, 1, 700)] {
        let mut r = Random::new(13);
        let (x, w, bias) = (r.vec(m * k), r.vec(n * k), r.vec(n));
        check(&format!("bias {m} {n} {k}"), |of| {
            let (px, pw, pb) = (of.make(&x), of.make(&w), of.make(&bias));
            let zeros = vec![0.0; m * n];
            let mut y = [of.make(&zeros), of.make(&zeros), of.make(&zeros)];
            let [a, b, c] = &mut y;
            of.cpu.matmul_bias_forward(a.view_mut(), px.view(), pw.view(), Some(pb.view()), m, n, k);
            of.cpu.matmul_bias_forward(b.view_mut(), px.view(), pw.view(), None, m, n, k);
            of.cpu.conv1d_bias_forward(c.view_mut(), px.view(), pw.view(), pb.view(), m, k, n);
            if of.wide {
                let mut apart = [Buf::zeroed(m * n), Buf::zeroed(m * n)];
                let [d, e] = &mut apart;
                of.cpu.matmul_forward(d.view_mut(), px.view(), pw.view(), m, n, k, Write::Set);
                assert!(d.host() == y[1].host());
                of.cpu.bias_forward(d.view_mut(), pb.view(), m, n);
                of.cpu.conv1d_forward(e.view_mut(), px.view(), pw.view(), m, k, n);
                of.cpu.bias_forward(e.view_mut(), pb.view(), m, n);
                assert!(d.host() == y[0].host() && e.host() == y[2].host());
            }
            (y.iter().map(|y| of.bits(y)).collect(), Vec::new())
        });
    }
}

#[test]
fn rows_of_experts() {
    let (m, d, per_token) = (70, 45, 3);
    let mut r = Random::new(11);
    let (x, old, weights) = (r.vec(m * d), r.vec(m * d), r.vec(m * per_token));
    let places: Vec<u32> = (0..m * per_token).map(|_| r.below(m) as u32).collect();
    check("rows", |of| {
        let (px, pold) = (of.make(&x), of.make(&old));
        let mut gathered = of.make(&vec![0.0; m * per_token * d]);
        of.cpu.gather_rows(gathered.view_mut(), px.view(), &places, d);
        let mut out = (vec![of.bits(&gathered)], Vec::new());
        for (given, write) in [(None, Write::Set), (Some((&weights[..]).into()), Write::Add)] {
            let mut y = of.make(&old);
            of.cpu.combine_rows(y.view_mut(), px.view(), given, &places, m, d, write);
            out.0.push(of.bits(&y));
        }
        let (mut dots, mut scaled) = (Buf::zeroed(m), of.make(&old));
        of.cpu.row_dots(dots.view_mut(), px.view(), pold.view(), d);
        of.cpu.scale_rows(scaled.view_mut(), (&weights[..m]).into(), d);
        out.0.push(of.bits(&scaled));
        out.1.push(dots.host().to_vec());
        out
    });
}

#[test]
fn products_of_experts() {
    // Shared among the threads, one after the other, and one with more columns than are summed at once.
    for (rows, n, k) in [([9, 0, 11, 10], 33, 20), ([3, 0, 90, 1], 33, 20), ([1, 0, 300, 0], 4200, 9)] {
        let mut at = 0;
        let group = |(i, len): (usize, usize)| {
            at += len;
            Group { rows: at - len..at, matrix: (3 - i) * n * k }
        };
        let groups: Vec<Group> = rows.into_iter().enumerate().map(group).collect();
        let m: usize = rows.iter().sum();
        let mut r = Random::new(12);
        let (x, w, dy) = (r.vec(m * k), r.vec(4 * n * k), r.vec(m * n));
        check(&format!("groups {rows:?}"), |of| {
            let (px, pw, pdy) = (of.make(&x), of.make(&w), of.make(&dy));
            let (mut y, mut dx, mut dw) = (of.make(&dy), of.make(&x), Buf::from_slice(&w));
            of.cpu.grouped_forward(y.view_mut(), px.view(), pw.view(), &groups, n, k);
            of.cpu.grouped_backward_input(dx.view_mut(), pdy.view(), pw.view(), &groups, n, k);
            of.cpu.grouped_backward_weight(dw.view_mut(), pdy.view(), px.view(), &groups, n, k);
            (vec![of.bits(&y), of.bits(&dx)], vec![dw.host().to_vec()])
        });
    }
}

#[test]
#[should_panic(expected = "a buffer of Bf16 is used as f32")]
fn gradients_of_weights_are_f32() {
    let half = || Buf::zeroed_as(Dtype::Bf16, 4);
    Cpu::new(1).bias_backward(half().view_mut(), half().view(), 1, 4);
}
