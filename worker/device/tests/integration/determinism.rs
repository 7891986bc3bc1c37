//! Tests that results of the CPU backend do not depend on the number of threads, on the alignment
//! of buffers, or on the instruction set.

use crate::reference::TestRng;
use device::ops::{
    ActivationOps, AdamWHyperparams, AttentionDropout, AttentionOps, AttentionShape, BiasOps,
    ClassifierGrads, ClassifierOps, ClassifierShape, EmbeddingOps, HeadLayout, HeadNormOps, IGNORE_LABEL,
    LayerNormOps, LayerNormParams, MatmulOps, OptimizerOps, RmsNormOps, RopeOps, RopeShape, SgdHyperparams,
    VectorOps, WriteMode,
};
use device::{Cpu, View, ViewMut};
use proptest::prelude::*;

/// A vector that begins `shift` elements after a 64-byte boundary.
struct ShiftedBuf {
    data: device::Buf,
    shift: usize,
}

impl ShiftedBuf {
    fn new(x: &[f32], shift: usize) -> Self {
        let mut data = device::Buf::zeroed(x.len() + shift);
        data.host_slice_mut()[shift..].copy_from_slice(x);
        ShiftedBuf { data, shift }
    }
    fn view(&self) -> View<'_> {
        self.data.view().slice(self.shift..self.data.len())
    }
    fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.data.len();
        self.data.view_mut().slice(self.shift..len)
    }
    fn bits(&self) -> Vec<u32> {
        self.view().host_slice().iter().map(|x| x.to_bits()).collect()
    }
}

/// Asserts that an op gives the same bits with any number of threads, alignment and instruction
/// set. `run` executes the op and returns the bits of its outputs. Its second argument is a
/// function that copies a vector to a buffer of the alignment under test.
#[track_caller]
fn assert_same_bits(what: &str, run: impl Fn(&Cpu, &dyn Fn(&[f32]) -> ShiftedBuf) -> Vec<Vec<u32>>) {
    let want = run(&Cpu::new(1), &|x| ShiftedBuf::new(x, 0));
    assert!(want.iter().any(|w| !w.is_empty()), "{what} has an output");
    for threads in 1..=4 {
        let cpu = Cpu::new(threads);
        for shifts in [[0, 0, 0], [1, 5, 9], [3, 0, 15]] {
            let turn = std::cell::Cell::new(0);
            let place = |x: &[f32]| {
                turn.set(turn.get() + 1);
                ShiftedBuf::new(x, shifts[turn.get() % 3])
            };
            assert!(run(&cpu, &place) == want, "{what}: {threads} threads, shifts {shifts:?}");
        }
    }
    for cpu in &Cpu::new_for_all_instruction_sets(2) {
        assert!(run(cpu, &|x| ShiftedBuf::new(x, 2)) == want, "{what}: {}", cpu.describe());
    }
}

/// Asserts that the matmuls of this shape give the same bits with any number of threads, alignment
/// and instruction set.
fn assert_same_matmul_bits(seed: u64, m: usize, n: usize, k: usize) {
    let mut r = TestRng::new(seed);
    let (x, w, dy) = (r.draw_vec(m * k), r.draw_vec(n * k), r.draw_vec(m * n));
    assert_same_bits(&format!("matmul {m} {n} {k}"), |cpu, place| {
        let (px, pw, pdy) = (place(&x), place(&w), place(&dy));
        let mut out = Vec::new();
        for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
            let (mut y, mut dx, mut dw) = (place(&dy), place(&x), place(&w));
            cpu.matmul_forward(y.view_mut(), px.view(), pw.view(), m, n, k, write);
            cpu.matmul_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, n, k, write);
            cpu.matmul_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, n, k, write);
            out.extend([y.bits(), dx.bits(), dw.bits()]);
        }
        out
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn matmuls_of_any_shape_give_the_same_bits(seed: u64, m in 1usize..150, n in 1usize..150, k in 1usize..150) {
        assert_same_matmul_bits(seed, m, n, k);
    }

    #[test]
    fn attention_of_any_shape_gives_the_same_bits(
        seed: u64, b in 1usize..3, t in 1usize..150, kv_heads in 1usize..4, group in 1usize..4, head_dim in 1usize..40,
    ) {
        let shape = AttentionShape::new(b, t, kv_heads * group, kv_heads, head_dim);
        let dropout = (t % 3 == 0).then_some(AttentionDropout { key: [seed as u32, 1], probability: 0.2, first_sequence: seed >> 22 });
        assert_same_attention_bits(seed, AttentionShape { softcap: (t % 2 == 0).then_some(4.0), dropout, ..shape });
    }

    #[test]
    fn row_ops_of_any_shape_give_the_same_bits(seed: u64, m in 1usize..200, d in 1usize..200) {
        assert_same_row_op_bits(seed, m, d);
    }
}

#[test]
fn matmuls_of_deep_and_wide_shapes_give_the_same_bits() {
    for (m, n, k) in [(33, 65, 1500), (1, 3000, 5), (700, 2, 600), (257, 385, 513)] {
        assert_same_matmul_bits(9, m, n, k);
    }
}

/// Computes one element of an fp32 matmul by definition: one chain of fused multiply-adds for each
/// pass of at most 512 terms, added in rising order.
fn sum_by_definition(old: f32, terms: &[(f32, f32)]) -> f32 {
    let pass_len = terms.len().div_ceil(terms.len().div_ceil(512));
    let chain = |pass: &[(f32, f32)]| pass.iter().fold(0.0f32, |sum, (a, b)| a.mul_add(*b, sum));
    terms.chunks(pass_len).fold(old, |sum, pass| sum + chain(pass))
}

/// Checks the order of summation of matmuls whose rows are a multiple of 4,096 bytes apart, which
/// the CPU backend copies before it reads them, and of matmuls with neighbouring distances.
#[test]
fn matmuls_with_rows_of_any_distance_match_the_definition() {
    let shapes =
        [(33, 40, 1024), (35, 17, 2048), (33, 9, 4096), (3, 33, 3072), (9, 1024, 48), (33, 32, 1040)];
    for (m, n, k) in shapes {
        let mut r = TestRng::new(k as u64);
        let (x, w, dy) = (r.draw_vec(m * k), r.draw_vec(n * k), r.draw_vec(m * n));
        let product = |columns: usize, depth: usize, old: &[f32], term: &dyn Fn(usize, usize, usize) -> _| {
            let element = |i: usize| {
                let terms: Vec<(f32, f32)> = (0..depth).map(|p| term(i / columns, i % columns, p)).collect();
                sum_by_definition(old[i], &terms).to_bits()
            };
            (0..old.len()).map(element).collect::<Vec<u32>>()
        };
        let want = [
            product(n, k, &dy, &|i, j, p| (x[i * k + p], w[j * k + p])),
            product(k, n, &x, &|i, j, p| (dy[i * n + p], w[p * k + j])),
            product(k, m, &w, &|i, j, p| (dy[p * n + i], x[p * k + j])),
        ];
        for cpu in [Cpu::new(1), Cpu::new(3)].into_iter().chain(Cpu::new_for_all_instruction_sets(2)) {
            let copy = |x: &[f32]| ShiftedBuf::new(x, 0);
            let (mut y, mut dx, mut dw) = (copy(&dy), copy(&x), copy(&w));
            let [px, pw, pdy] = [&x, &w, &dy].map(|x| copy(x));
            let write = WriteMode::Accumulate;
            cpu.matmul_forward(y.view_mut(), px.view(), pw.view(), m, n, k, write);
            cpu.matmul_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, n, k, write);
            cpu.matmul_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, n, k, write);
            assert!([y.bits(), dx.bits(), dw.bits()] == want, "{} {m} {n} {k}", cpu.describe());
        }
    }
}

/// Checks that a row's result does not depend on the other rows, so that a batch may be divided
/// anywhere.
#[test]
fn each_row_of_a_matmul_is_independent_of_the_other_rows() {
    let (m, n, k) = (37, 83, 700);
    let mut r = TestRng::new(10);
    let (x, w) = (r.draw_vec(m * k), r.draw_vec(n * k));
    let cpu = Cpu::new(2);
    let mut whole = vec![0.0; m * n];
    cpu.matmul_forward(
        (&mut whole[..]).into(),
        (&x[..]).into(),
        (&w[..]).into(),
        m,
        n,
        k,
        WriteMode::Overwrite,
    );
    for i in 0..m {
        let mut row = vec![0.0; n];
        cpu.matmul_forward(
            (&mut row[..]).into(),
            (&x[i * k..(i + 1) * k]).into(),
            (&w[..]).into(),
            1,
            n,
            k,
            WriteMode::Overwrite,
        );
        assert_eq!(row, whole[i * n..(i + 1) * n]);
    }
}

/// Asserts that attention of this shape, over documents of random lengths, gives the same bits with
/// any number of threads, alignment and instruction set.
fn assert_same_attention_bits(seed: u64, shape: AttentionShape) {
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let mut r = TestRng::new(seed);
    let (qkv, d_o) =
        (r.draw_vec(b * t * (heads + 2 * kv_heads) * head_dim), r.draw_vec(b * t * heads * head_dim));
    let mean = 1 + r.draw_below(100);
    let starts = r.draw_document_starts(b, t, mean);
    assert_same_bits(&format!("{shape:?}"), |cpu, place| {
        let (pqkv, pd_o) = (place(&qkv), place(&d_o));
        let (mut o, mut lse, mut dqkv) = (place(&d_o), place(&vec![0.0; b * heads * t]), place(&qkv));
        cpu.attention_forward(o.view_mut(), lse.view_mut(), pqkv.view(), &starts, shape);
        cpu.attention_backward(
            dqkv.view_mut(),
            pd_o.view(),
            o.view(),
            lse.view(),
            pqkv.view(),
            &starts,
            shape,
        );
        vec![o.bits(), lse.bits(), dqkv.bits()]
    });
}

/// Random inputs with which tests run ops that process `m` rows of `d` elements.
struct RowInputs {
    m: usize,
    d: usize,
    x: Vec<f32>,
    dy: Vec<f32>,
    /// The vector that is added to `x` before a norm.
    delta: Vec<f32>,
    /// The weight of a norm, or a bias.
    w: Vec<f32>,
}

/// Asserts that norms, embedding, activations, RoPE and the classifier over `m` rows of `d`
/// elements give the same bits with any number of threads, alignment and instruction set.
fn assert_same_row_op_bits(seed: u64, m: usize, d: usize) {
    let mut r = TestRng::new(seed);
    let (x, dy, w, delta) = (r.draw_vec(m * d), r.draw_vec(m * d), r.draw_vec(d), r.draw_vec(m * d));
    let inputs = RowInputs { m, d, x, dy, delta, w };
    assert_same_rmsnorm_bits(&inputs);
    assert_same_bias_and_head_norm_bits(&inputs);
    assert_same_layernorm_bits(&inputs, &mut r);
    assert_same_gelu_bits(&inputs);
    assert_same_embedding_bits(&inputs, &mut r);
    assert_same_gated_activation_and_rope_bits(&inputs, &mut r);
    assert_same_classifier_bits(&inputs, &mut r);
}

/// Asserts that RMSNorm gives the same bits with any number of threads, alignment and instruction
/// set.
fn assert_same_rmsnorm_bits(inputs: &RowInputs) {
    let &RowInputs { m, d, ref x, ref dy, ref delta, ref w } = inputs;
    assert_same_bits(&format!("rmsnorm {m} {d}"), |cpu, place| {
        let (mut sum, mut y, mut rstd, pw) = (place(x), place(dy), place(&vec![0.0; m]), place(w));
        let pdelta = place(delta);
        let (yv, rv) = (y.view_mut(), rstd.view_mut());
        cpu.add_rmsnorm_forward(yv, rv, sum.view_mut(), pdelta.view(), pw.view(), m, d, 1e-5);
        let (mut dx, mut dw, pdy) = (place(x), place(w), place(dy));
        let (dxv, dwv) = (dx.view_mut(), dw.view_mut());
        cpu.rmsnorm_backward(
            dxv,
            dwv,
            pdy.view(),
            sum.view(),
            pw.view(),
            rstd.view(),
            m,
            d,
            WriteMode::Accumulate,
        );
        let mut plain = place(dy);
        cpu.rmsnorm_forward(plain.view_mut(), rstd.view_mut(), pdelta.view(), pw.view(), m, d, 1e-5);
        vec![sum.bits(), y.bits(), rstd.bits(), dx.bits(), dw.bits(), plain.bits()]
    });
}

/// Asserts that bias and RMSNorm of heads give the same bits with any number of threads, alignment
/// and instruction set.
fn assert_same_bias_and_head_norm_bits(inputs: &RowInputs) {
    let &RowInputs { m, d, ref x, ref dy, ref w, .. } = inputs;
    assert_same_bits(&format!("bias and heads' rmsnorm {m} {d}"), |cpu, place| {
        let (mut y, pb, pdy, mut db) = (place(x), place(w), place(dy), place(w));
        cpu.bias_forward(y.view_mut(), pb.view(), m, d);
        cpu.bias_backward(db.view_mut(), pdy.view(), m, d);
        // the last head of each row, which has two heads if `d` is even
        let head_dim = (d / 2).max(1);
        let h = HeadLayout { rows: m, first_column: d - head_dim, heads: 1, head_dim, stride: d };
        let pw = place(&w[..head_dim]);
        let (mut raw, mut rstd) = (place(&vec![0.0; m * head_dim]), place(&vec![0.0; m]));
        cpu.rmsnorm_heads_forward(y.view_mut(), raw.view_mut(), rstd.view_mut(), pw.view(), h, 1e-5);
        let (mut dx, mut dw) = (place(dy), place(&w[..head_dim]));
        cpu.rmsnorm_heads_backward(dx.view_mut(), dw.view_mut(), raw.view(), rstd.view(), pw.view(), h);
        vec![y.bits(), db.bits(), raw.bits(), rstd.bits(), dx.bits(), dw.bits()]
    });
}

/// Asserts that LayerNorm gives the same bits with any number of threads, alignment and instruction
/// set.
fn assert_same_layernorm_bits(inputs: &RowInputs, r: &mut TestRng) {
    let &RowInputs { m, d, ref x, ref dy, ref delta, ref w } = inputs;
    let b = r.draw_vec(d);
    assert_same_bits(&format!("layernorm {m} {d}"), |cpu, place| {
        let (mut sum, mut y, mut stats) = (place(x), place(dy), place(&vec![0.0; 2 * m]));
        let (pw, pb, pdelta) = (place(w), place(&b), place(delta));
        let norm = LayerNormParams { w: pw.view(), b: pb.view(), eps: 1e-5 };
        let (yv, sv) = (y.view_mut(), stats.view_mut());
        cpu.add_layernorm_forward(yv, sv, sum.view_mut(), pdelta.view(), norm, m);
        let (mut dx, mut dw, mut db, pdy) = (place(x), place(w), place(w), place(dy));
        let (dxv, dwv, dbv) = (dx.view_mut(), dw.view_mut(), db.view_mut());
        cpu.layernorm_backward(
            dxv,
            dwv,
            dbv,
            pdy.view(),
            sum.view(),
            pw.view(),
            stats.view(),
            m,
            WriteMode::Accumulate,
        );
        let mut plain = place(dy);
        cpu.layernorm_forward(plain.view_mut(), stats.view_mut(), pdelta.view(), norm, m);
        vec![sum.bits(), y.bits(), stats.bits(), dx.bits(), dw.bits(), db.bits(), plain.bits()]
    });
}

/// Asserts that GELU gives the same bits with any number of threads, alignment and instruction set.
fn assert_same_gelu_bits(inputs: &RowInputs) {
    let &RowInputs { m, d, ref x, ref dy, .. } = inputs;
    assert_same_bits(&format!("gelu {m} {d}"), |cpu, place| {
        let (px, mut pdy, mut y, mut dx) = (place(x), place(dy), place(x), place(x));
        cpu.gelu_forward(y.view_mut(), px.view());
        cpu.gelu_backward(dx.view_mut(), pdy.view_mut(), px.view());
        vec![y.bits(), dx.bits(), pdy.bits()]
    });
}

/// Asserts that the token embedding gives the same bits with any number of threads, alignment and
/// instruction set.
fn assert_same_embedding_bits(inputs: &RowInputs, r: &mut TestRng) {
    let &RowInputs { m, d, ref x, ref dy, .. } = inputs;
    let tokens: Vec<u32> = (0..m).map(|_| r.draw_below(9) as u32).collect();
    let table = r.draw_vec(9 * d);
    assert_same_bits(&format!("embedding {m} {d}"), |cpu, place| {
        let (mut px, mut table, pdy) = (place(x), place(&table), place(dy));
        cpu.embedding_forward(px.view_mut(), table.view(), &tokens, d);
        cpu.embedding_backward(table.view_mut(), pdy.view(), &tokens, d);
        vec![px.bits(), table.bits()]
    });
}

/// Asserts that SwiGLU, GeGLU and RoPE give the same bits with any number of threads, alignment and
/// instruction set.
fn assert_same_gated_activation_and_rope_bits(inputs: &RowInputs, r: &mut TestRng) {
    let &RowInputs { m, d, ref x, ref dy, .. } = inputs;
    let gate_up = r.draw_vec(m * 2 * d);
    let (cos, sin) = (r.draw_vec(m * d), r.draw_vec(m * d));
    assert_same_bits(&format!("swiglu and rope {m} {d}"), |cpu, place| {
        let (pg, mut pdy, mut y, mut dg) = (place(&gate_up), place(dy), place(x), place(&gate_up));
        cpu.swiglu_forward(y.view_mut(), pg.view(), m, d);
        cpu.swiglu_backward(dg.view_mut(), pdy.view_mut(), pg.view(), m, d);
        let (mut turned, c, s) = (place(&gate_up), place(&cos), place(&sin));
        let shape = RopeShape { b: 1, t: m, heads: 1, head_dim: 2 * d, stride: 2 * d };
        cpu.rope_forward(turned.view_mut(), c.view(), s.view(), shape);
        let forward = turned.bits();
        cpu.rope_backward(turned.view_mut(), s.view(), c.view(), shape);
        let (mut gated, mut dgated) = (place(x), place(&gate_up));
        cpu.geglu_forward(gated.view_mut(), pg.view(), m, d);
        let activated = pdy.bits();
        pdy = place(dy);
        cpu.geglu_backward(dgated.view_mut(), pdy.view_mut(), pg.view(), m, d);
        let geglu = [gated.bits(), dgated.bits(), pdy.bits()];
        [y.bits(), dg.bits(), activated, forward, turned.bits()].into_iter().chain(geglu).collect()
    });
}

/// Asserts that the classifier gives the same bits with any number of threads, alignment and
/// instruction set.
fn assert_same_classifier_bits(inputs: &RowInputs, r: &mut TestRng) {
    let &RowInputs { m, d, ref x, .. } = inputs;
    let v = 1 + r.draw_below(300);
    let head = r.draw_vec(v * d);
    let labels: Vec<u32> =
        (0..m).map(|i| if i % 5 == 4 { IGNORE_LABEL } else { r.draw_below(v) as u32 }).collect();
    assert_same_bits(&format!("classifier {m} {d} {v}"), |cpu, place| {
        let (px, pw) = (place(x), place(&head));
        let (mut loss, mut dx, mut dw) = (place(&vec![0.0; m]), place(x), place(&head));
        let (dxv, dwv) = (dx.view_mut(), dw.view_mut());
        let grads = ClassifierGrads { dx: dxv, dw: dwv, dw_write: WriteMode::Accumulate, scale: 0.1 };
        let cap = v.is_multiple_of(2).then_some(3.0);
        let shape = ClassifierShape { m, d, v, softcap: cap };
        cpu.compute_classifier_loss(loss.view_mut(), px.view(), pw.view(), &labels, shape, Some(grads));
        vec![loss.bits(), dx.bits(), dw.bits()]
    });
}

const ADAMW: AdamWHyperparams = AdamWHyperparams {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 7,
    grad_scale: 0.3,
};
const SGD: SgdHyperparams = SgdHyperparams { lr: 1e-2, momentum: 0.9, weight_decay: 0.05, grad_scale: 0.3 };

#[test]
fn flat_vector_ops_give_the_same_bits() {
    let len = 100_003;
    let mut r = TestRng::new(11);
    let (p, g, a) = (r.draw_vec(len), r.draw_vec(len), r.draw_vec(len));
    let b: Vec<f32> = r.draw_vec(len).iter().map(|x| x * x).collect();
    assert_same_bits("flat", |cpu, place| {
        let (mut sum, x) = (place(&p), place(&g));
        cpu.add(sum.view_mut(), x.view());
        cpu.scale(sum.view_mut(), 0.7);
        let mut norms = vec![0.0f64; len.div_ceil(device::ops::NORM_BLOCK_LEN)];
        cpu.sum_squares_by_block(&mut norms, sum.view());
        let norms = norms.iter().flat_map(|n| [n.to_bits() as u32, (n.to_bits() >> 32) as u32]).collect();
        let (mut pp, mut pa, mut pb) = (place(&p), place(&a), place(&b));
        cpu.adamw(pp.view_mut(), None, x.view(), pa.view_mut(), pb.view_mut(), &ADAMW);
        let (mut ps, mut pm) = (place(&p), place(&a));
        cpu.sgd(ps.view_mut(), x.view(), pm.view_mut(), &SGD);
        vec![sum.bits(), norms, pp.bits(), pa.bits(), pb.bits(), ps.bits(), pm.bits()]
    });
}

/// Checks that an element's update does not depend on its position, so that a flat vector may be
/// divided anywhere.
#[test]
fn optimizer_updates_do_not_depend_on_the_position() {
    let mut r = TestRng::new(12);
    let cpu = Cpu::new(1);
    let len = 203;
    let (p, g, a) = (r.draw_vec(len), r.draw_vec(len), r.draw_vec(len));
    let b: Vec<f32> = r.draw_vec(len).iter().map(|x| x * x).collect();
    let run = |from: usize, to: usize| {
        let (mut p1, mut a1, mut b1) = (p[from..to].to_vec(), a[from..to].to_vec(), b[from..to].to_vec());
        let gv: View = (&g[from..to]).into();
        cpu.adamw((&mut p1[..]).into(), None, gv, (&mut a1[..]).into(), (&mut b1[..]).into(), &ADAMW);
        let (mut p2, mut m2) = (p[from..to].to_vec(), a[from..to].to_vec());
        cpu.sgd((&mut p2[..]).into(), gv, (&mut m2[..]).into(), &SGD);
        [p1, a1, b1, p2, m2]
    };
    let whole = run(0, len);
    for from in 0..40 {
        for to in [from + 1, from + 15, from + 16, from + 17, from + 100] {
            for (part, whole) in run(from, to).iter().zip(&whole) {
                assert_eq!(part[..], whole[from..to]);
            }
        }
    }
}

/// Checks that calls from several threads at once give the results of single calls, although they
/// share the thread pool.
#[test]
fn concurrent_calls_do_not_affect_each_other() {
    let cpu = Cpu::new(3);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let cpu = &cpu;
            scope.spawn(move || {
                let (m, n, k) = (60 + seed as usize, 70, 80);
                let mut r = TestRng::new(seed);
                let (x, w) = (r.draw_vec(m * k), r.draw_vec(n * k));
                let matmul = |cpu: &Cpu| {
                    let mut y = vec![0.0; m * n];
                    cpu.matmul_forward(
                        (&mut y[..]).into(),
                        (&x[..]).into(),
                        (&w[..]).into(),
                        m,
                        n,
                        k,
                        WriteMode::Overwrite,
                    );
                    y
                };
                let want = matmul(&Cpu::new(1));
                for _ in 0..50 {
                    assert_eq!(matmul(cpu), want);
                }
            });
        }
    });
}

/// Checks that scratch memory does not grow after the first calls of each size.
#[test]
fn scratch_memory_is_reused() {
    let cpu = Cpu::new(1);
    let shape = AttentionShape::new(2, 70, 4, 2, 16);
    let mut r = TestRng::new(13);
    let qkv = r.draw_vec(140 * 8 * 16);
    let (mut o, mut lse, mut dqkv) = (vec![0.0; 140 * 64], vec![0.0; 8 * 70], qkv.clone());
    let starts = [0; 140];
    let mut step = || {
        let q = (&qkv[..]).into();
        cpu.attention_forward((&mut o[..]).into(), (&mut lse[..]).into(), q, &starts, shape);
        let d_o = o.clone();
        let (ov, lv) = ((&o[..]).into(), (&lse[..]).into());
        cpu.attention_backward((&mut dqkv[..]).into(), (&d_o[..]).into(), ov, lv, q, &starts, shape);
        cpu.matmul_forward(
            (&mut o[..70 * 64]).into(),
            (&qkv[..70 * 8]).into(),
            (&qkv[..64 * 8]).into(),
            70,
            64,
            8,
            WriteMode::Overwrite,
        );
        cpu.scratch_bytes()
    };
    let first = step();
    assert!(first > 0);
    let warm = step();
    for _ in 0..5 {
        assert_eq!(step(), warm);
    }
}
