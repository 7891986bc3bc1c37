//! Tests of the rule by which products of bf16 numbers are summed (docs/numerics.md): results have
//! the bits of the definition, on every instruction set and for any number of threads.

use crate::reference::TestRng;
use device::ops::{
    AttentionDropout, AttentionOps, AttentionShape, ClassifierGrads, ClassifierOps, ClassifierShape,
    Fp8Operand, Fp8Ops, GroupedMatmulOps, IGNORE_LABEL, MatmulOps, RowGroup, VectorOps, WriteMode,
};
use device::{Buf, Cpu, Dtype, Fp8Format};
use proptest::prelude::*;

/// Replaces a subnormal number by a zero of the same sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// Computes one element of a product of bf16 matrices by the definition of the rule: `c + Σ a·b`.
fn sum_by_definition(c: f32, terms: &[(f32, f32)]) -> f32 {
    let mut c = flush(c);
    for block in terms.chunks(32) {
        let mut chains = [0.0f32; 2];
        for i in 0..32 {
            let (a, b) = block.get(i).copied().unwrap_or((0.0, 0.0));
            let chain = &mut chains[i % 2];
            *chain = flush(flush(a).mul_add(flush(b), *chain));
        }
        c = flush(c + flush(chains[0] + chains[1]));
    }
    c
}

/// Rounds numbers to bf16, stored as 16 bits.
fn round_to_bf16(cpu: &Cpu, x: &[f32]) -> Buf {
    let mut half = Buf::zeroed_as(Dtype::Bf16, x.len());
    cpu.cast(half.view_mut(), x.into());
    half
}

/// Rounds numbers to bf16, stored as `f32`.
fn round_values(x: &[f32]) -> Vec<f32> {
    let cpu = Cpu::new(1);
    let mut wide = vec![0.0; x.len()];
    cpu.cast((&mut wide[..]).into(), round_to_bf16(&cpu, x).view());
    wide
}

fn to_bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The random numbers that a test multiplies.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Numbers in [−1, 1).
    Units,
    /// Numbers with all exponents, zeros of both signs and subnormal numbers included, whose
    /// products do not overflow.
    AllExponents,
    /// Numbers whose products are near the smallest normal number.
    NearSmallest,
}

impl Values {
    fn draw(self, r: &mut TestRng, len: usize) -> Vec<f32> {
        let number = |r: &mut TestRng| {
            let (sign, mantissa) = ((r.draw_below(2) as u32) << 31, (r.draw_below(128) as u32) << 16);
            let exponent = match self {
                Values::Units => return r.draw_signed_unit(),
                Values::AllExponents => r.draw_below(189) as u32,
                Values::NearSmallest => 60 + r.draw_below(6) as u32,
            };
            match r.draw_below(12) {
                0 => f32::from_bits(sign),
                1 => f32::from_bits(sign | mantissa),
                _ => f32::from_bits(sign | exponent << 23 | mantissa),
            }
        };
        let numbers: Vec<f32> = (0..len).map(|_| number(r)).collect();
        round_values(&numbers)
    }
}

/// Asserts that the matmuls of this shape in all directions, overwriting and accumulating, have the
/// bits of the definition on every instruction set and for several numbers of threads.
fn assert_matmuls_match_definition(seed: u64, values: Values, [m, n, k]: [usize; 3]) {
    let mut r = TestRng::new(seed);
    let (x, w, dy) = (values.draw(&mut r, m * k), values.draw(&mut r, n * k), values.draw(&mut r, m * n));
    let product = |rows: usize,
                   columns: usize,
                   depth: usize,
                   old: &[f32],
                   term: &dyn Fn(usize, usize, usize) -> (f32, f32)| {
        let element = |i: usize| {
            let terms: Vec<(f32, f32)> = (0..depth).map(|p| term(i / columns, i % columns, p)).collect();
            sum_by_definition(old[i], &terms)
        };
        to_bits(&(0..rows * columns).map(element).collect::<Vec<f32>>())
    };
    for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
        let old = |x: &[f32]| if write == WriteMode::Accumulate { x.to_vec() } else { vec![0.0; x.len()] };
        let want = [
            product(m, n, k, &old(&dy), &|i, j, p| (x[i * k + p], w[j * k + p])),
            product(m, k, n, &old(&x), &|i, j, p| (dy[i * n + p], w[p * k + j])),
            product(n, k, m, &old(&w), &|i, j, p| (dy[p * n + i], x[p * k + j])),
        ];
        let backends = [Cpu::new(1), Cpu::new(3)].into_iter().chain(Cpu::new_for_all_instruction_sets(2));
        for cpu in backends {
            let [px, pw, pdy] = [&x, &w, &dy].map(|x| round_to_bf16(&cpu, x));
            let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), w.clone());
            cpu.matmul_forward((&mut y[..]).into(), px.view(), pw.view(), m, n, k, write);
            cpu.matmul_backward_input((&mut dx[..]).into(), pdy.view(), pw.view(), m, n, k, write);
            cpu.matmul_backward_weight((&mut dw[..]).into(), pdy.view(), px.view(), m, n, k, write);
            let directions = ["forward", "backward input", "backward weight"];
            for ((direction, got), want) in directions.into_iter().zip([&y, &dx, &dw]).zip(&want) {
                let got = to_bits(got);
                let wrong = got.iter().zip(want).position(|(g, w)| g != w);
                assert!(
                    wrong.is_none(),
                    "{} {direction} {m} {n} {k}, {values:?}, {write:?}: element {wrong:?}",
                    cpu.describe()
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn matmuls_of_any_shape_match_the_definition(
        seed: u64, kind in 0..3usize, m in 1usize..70, n in 1usize..70, k in 1usize..150,
    ) {
        let values = [Values::Units, Values::AllExponents, Values::NearSmallest][kind];
        assert_matmuls_match_definition(seed, values, [m, n, k]);
    }

    #[test]
    fn attention_of_any_shape_gives_the_same_bits(
        seed: u64, b in 1usize..3, t in 1usize..150, kv_heads in 1usize..3, group in 1usize..4, head_dim in 1usize..40,
    ) {
        let shape = AttentionShape::new(b, t, kv_heads * group, kv_heads, head_dim);
        let dropout = (t % 3 == 0).then_some(AttentionDropout { key: [seed as u32, 1], probability: 0.2, first_sequence: seed >> 22 });
        assert_same_attention_bits(seed, AttentionShape { softcap: (t % 2 == 0).then_some(4.0), dropout, ..shape });
    }

    #[test]
    fn the_classifier_gives_the_same_bits(seed: u64, m in 1usize..300, d in 1usize..70, v in 2usize..1100) {
        assert_same_classifier_bits(seed, [m, d, v]);
    }
}

#[test]
fn matmuls_of_special_shapes_match_the_definition() {
    for values in [Values::Units, Values::AllExponents, Values::NearSmallest] {
        for shape in
            [[1, 1, 1], [1, 70, 31], [70, 1, 33], [9, 50, 32], [5, 7, 63], [3, 3, 1100], [17, 530, 3]]
        {
            assert_matmuls_match_definition(1, values, shape);
        }
    }
}

/// Asserts that an op gives the same bits on every instruction set and for any number of threads.
#[track_caller]
fn assert_same_bits(what: &str, run: impl Fn(&Cpu) -> Vec<Vec<u32>>) {
    let want = run(&Cpu::new(1));
    assert!(want.iter().flatten().any(|x| *x != 0), "{what} has an output");
    for cpu in [Cpu::new(3)].into_iter().chain(Cpu::new_for_all_instruction_sets(2)) {
        assert!(run(&cpu) == want, "{what}: {}", cpu.describe());
    }
}

/// Asserts that attention of this shape over documents of random lengths gives the same bits on
/// every instruction set. Some inputs are so small that products and gradients are flushed to zero.
fn assert_same_attention_bits(seed: u64, shape: AttentionShape) {
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let mut r = TestRng::new(seed);
    let (mut qkv, mut d_o) =
        (r.draw_vec(b * t * (heads + 2 * kv_heads) * head_dim), r.draw_vec(b * t * heads * head_dim));
    if seed.is_multiple_of(3) {
        qkv.iter_mut().chain(&mut d_o).for_each(|x| *x *= [1.0, 1e-19, 1e-37][r.draw_below(3)]);
    }
    let starts = r.draw_document_starts(b, t, 1 + (seed % 100) as usize);
    assert_same_bits(&format!("{shape:?}"), |cpu| {
        let (qkv, d_o) = (round_to_bf16(cpu, &qkv), round_to_bf16(cpu, &d_o));
        let (mut o, mut lse, mut dqkv) =
            (Buf::zeroed(d_o.len()), Buf::zeroed(b * heads * t), Buf::zeroed(qkv.len()));
        cpu.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &starts, shape);
        let (dqkv_to, lse_from) = (dqkv.view_mut(), lse.view());
        cpu.attention_backward(dqkv_to, d_o.view(), o.view(), lse_from, qkv.view(), &starts, shape);
        [&o, &lse, &dqkv].map(|x| to_bits(x.host_slice())).to_vec()
    });
}

#[test]
fn attention_over_several_tiles_gives_the_same_bits() {
    for (seed, head_dim) in [(3, 64), (4, 33), (6, 8)] {
        assert_same_attention_bits(seed, AttentionShape::new(1, 300, 4, 2, head_dim));
    }
}

/// Asserts that the classifier gives the same bits on every instruction set.
fn assert_same_classifier_bits(seed: u64, [m, d, v]: [usize; 3]) {
    let mut r = TestRng::new(seed);
    let (x, w) = (r.draw_vec(m * d), r.draw_vec(v * d));
    let labels: Vec<u32> =
        (0..m).map(|i| if i % 5 == 4 { IGNORE_LABEL } else { r.draw_below(v) as u32 }).collect();
    let softcap = v.is_multiple_of(2).then_some(3.0);
    assert_same_bits(&format!("classifier {m} {d} {v}"), |cpu| {
        let (x, w) = (round_to_bf16(cpu, &x), round_to_bf16(cpu, &w));
        let (mut loss, mut dx, mut dw) = (Buf::zeroed(m), Buf::zeroed(m * d), Buf::zeroed(v * d));
        let grads = ClassifierGrads {
            dx: dx.view_mut(),
            dw: dw.view_mut(),
            dw_write: WriteMode::Accumulate,
            scale: 0.1,
        };
        let shape = ClassifierShape { m, d, v, softcap };
        cpu.compute_classifier_loss(loss.view_mut(), x.view(), w.view(), &labels, shape, Some(grads));
        [&loss, &dx, &dw].map(|x| to_bits(x.host_slice())).to_vec()
    });
}

#[test]
fn grouped_matmuls_give_the_same_bits() {
    for (rows, n, k) in [([9, 0, 11, 10], 33, 20), ([3, 0, 90, 1], 65, 70), ([1, 0, 300, 0], 40, 9)] {
        let mut at = 0;
        let group = |(i, len): (usize, usize)| {
            at += len;
            RowGroup { rows: at - len..at, matrix_offset: (3 - i) * n * k }
        };
        let groups: Vec<RowGroup> = rows.into_iter().enumerate().map(group).collect();
        let m: usize = rows.iter().sum();
        let mut r = TestRng::new(12);
        let (x, w, dy) = (r.draw_vec(m * k), r.draw_vec(4 * n * k), r.draw_vec(m * n));
        assert_same_bits(&format!("groups {rows:?}"), |cpu| {
            let [x, w, dy] = [&x, &w, &dy].map(|x| round_to_bf16(cpu, x));
            let [mut y, mut dx, mut dw] = [m * n, m * k, w.len()].map(Buf::zeroed);
            cpu.grouped_forward(y.view_mut(), x.view(), w.view(), &groups, n, k);
            cpu.grouped_backward_input(dx.view_mut(), dy.view(), w.view(), &groups, n, k);
            cpu.grouped_backward_weight(dw.view_mut(), dy.view(), x.view(), &groups, n, k);
            // Each group is a separate matmul.
            let g = &groups[2];
            let mut alone = Buf::zeroed(g.rows.len() * n);
            let rows = x.view().slice(g.rows.start * k..g.rows.end * k);
            let matrix = w.view().slice(g.matrix_offset..g.matrix_offset + n * k);
            cpu.matmul_forward(alone.view_mut(), rows, matrix, g.rows.len(), n, k, WriteMode::Overwrite);
            assert!(alone.host_slice() == &y.host_slice()[g.rows.start * n..g.rows.end * n]);
            [&y, &dx, &dw].map(|x| to_bits(x.host_slice())).to_vec()
        });
    }
}

#[test]
fn fp8_matmuls_give_the_same_bits() {
    for (m, n, k) in [(16, 16, 16), (33, 48, 80), (64, 16, 304)] {
        let mut r = TestRng::new(14);
        let (a, b, c) = (r.draw_vec(m * k), r.draw_vec(k * n), r.draw_vec(m * n));
        for write in [WriteMode::Overwrite, WriteMode::Accumulate] {
            assert_same_bits(&format!("fp8 {m} {n} {k}"), |cpu| {
                let mut c = c.clone();
                let a = Fp8Operand { x: (&a[..]).into(), format: Fp8Format::E4M3, transposed: false };
                let b = Fp8Operand { x: (&b[..]).into(), format: Fp8Format::E5M2, transposed: true };
                cpu.fp8_matmul((&mut c[..]).into(), a, b, m, n, k, write);
                vec![to_bits(&c)]
            });
        }
    }
}

/// Checks that kernels restore the mode of the CPU in which subnormal numbers count as numbers.
#[test]
fn subnormal_numbers_are_kept_outside_of_bf16_products() {
    let cpu = Cpu::new(1);
    let x = round_to_bf16(&cpu, &vec![1.0; 64 * 64]);
    let mut y = Buf::zeroed(64 * 64);
    cpu.matmul_forward(y.view_mut(), x.view(), x.view(), 64, 64, 64, WriteMode::Overwrite);
    let smallest = std::hint::black_box(f32::from_bits(1));
    assert_eq!((smallest + smallest).to_bits(), 2);
    let subnormal = vec![f32::from_bits(3); 64];
    let mut sums = [0.0];
    let ones = vec![1.0; 64];
    let (to, subnormal, ones) = ((&mut sums[..]).into(), (&subnormal[..]).into(), (&ones[..]).into());
    cpu.matmul_forward(to, subnormal, ones, 1, 1, 64, WriteMode::Overwrite);
    assert_eq!(sums[0].to_bits(), 3 * 64, "products of f32 numbers keep subnormal numbers");
}
