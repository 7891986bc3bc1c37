//! Tests that bf16 matmuls with AMX have the bits of their definition. Without AMX, the
//! instructions are emulated.

use crate::emulated_amx;
use crate::own_process::{is_own_process, run_test_alone};
use crate::reference::TestRng;
use device::ops::{
    ClassifierGrads, ClassifierOps, ClassifierShape, GroupedMatmulOps, MatmulOps, RowGroup, VectorOps,
    WriteMode,
};
use device::{Buf, Cpu, Dtype};

/// Opens a backend that uses AMX. Returns `None` if this CPU cannot use it, even with the emulator.
fn open_amx_backend(threads: usize) -> Option<Cpu> {
    if !emulated_amx::provide_amx() {
        return None;
    }
    let cpu = Cpu::new_for_all_instruction_sets(threads).remove(0);
    assert!(cpu.describe().starts_with("amx"), "{}", cpu.describe());
    assert!(cpu.describe_rejected_instructions().is_none());
    Some(cpu)
}

/// Creates a bf16 buffer with these bits.
fn make_bf16(bits: &[u16]) -> Buf {
    let mut buf = Buf::zeroed_as(Dtype::Bf16, bits.len());
    buf.view_mut().half_bits().copy_from_slice(bits);
    buf
}

/// Returns the bits of random bf16 numbers in [−1, 1).
fn draw_bf16(r: &mut TestRng, len: usize) -> Vec<u16> {
    (0..len).map(|_| (r.draw_signed_unit().to_bits() >> 16) as u16).collect()
}

/// Returns the bits of random bf16 numbers of all magnitudes, with denormal numbers among them. One
/// of a thousand is infinite or NaN if `with_infinities`.
fn draw_extreme_bf16(r: &mut TestRng, len: usize, with_infinities: bool) -> Vec<u16> {
    let mut draw = || match r.draw_below(1000) {
        0 if with_infinities => 0x7f80 | r.draw_below(2) as u16,
        0..300 => (r.draw_below(128) | r.draw_below(2) << 15) as u16,
        _ => (r.draw_number() as u16 & 0x807f) | ((1 + r.draw_below(160)) << 7) as u16,
    };
    (0..len).map(|_| draw()).collect()
}

/// Returns 0 with the sign of `x` if `x` is denormal, and `x` otherwise.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// Adds the products of `a[k]` and `b[k]` to `c` as docs/numerics.md defines it: blocks of 32
/// terms, padded with zeros. In each block, one chain of fused multiply-adds over the even terms
/// and one over the odd terms start from 0. Denormal numbers count as 0.
fn add_products(c: f32, a: impl Fn(usize) -> u16, b: impl Fn(usize) -> u16, k: usize) -> f32 {
    let wide = |x: u16| flush(f32::from_bits(u32::from(x) << 16));
    let mut sum = flush(c);
    for block in 0..k.div_ceil(32) {
        let mut chains = [0f32, 0f32];
        for p in block * 32..block * 32 + 32 {
            let (x, y) = if p < k { (wide(a(p)), wide(b(p))) } else { (0.0, 0.0) };
            chains[p % 2] = flush(x.mul_add(y, chains[p % 2]));
        }
        sum = flush(sum + flush(chains[0] + chains[1]));
    }
    sum
}

/// Rounds to the nearest bf16 number, ties to even. `x` must not be NaN.
fn round_to_bf16(x: f32) -> u16 {
    let (bits, rest) = (x.to_bits() >> 16, x.to_bits() & 0xffff);
    (bits + u32::from(rest > 0x8000 || (rest == 0x8000 && bits & 1 == 1))) as u16
}

/// Asserts that `got` has the bits of `expected`, or both are NaN.
#[track_caller]
fn assert_bits(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (x, y)) in got.iter().zip(expected).enumerate() {
        assert!(
            x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan()),
            "{what}: element {i}: {x:e}, not {y:e}"
        );
    }
}

/// A matmul of one of the three directions: how its operands are stored, and how an op computes it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Direction {
    /// `c[m,n] = a[m,k] · b[n,k]ᵀ`
    Forward,
    /// `c[m,n] = a[m,k] · b[k,n]`
    BackwardInput,
    /// `c[m,n] = a[k,m]ᵀ · b[k,n]`
    BackwardWeight,
}

impl Direction {
    const ALL: [Direction; 3] = [Direction::Forward, Direction::BackwardInput, Direction::BackwardWeight];

    /// Computes the result by the definition, with the previous result `c`.
    fn compute_by_definition(self, c: &[f32], a: &[u16], b: &[u16], [m, n, k]: [usize; 3]) -> Vec<f32> {
        let a = |i: usize, p: usize| a[if self == Direction::BackwardWeight { p * m + i } else { i * k + p }];
        let b = |j: usize, p: usize| b[if self == Direction::Forward { j * k + p } else { p * n + j }];
        (0..m * n).map(|at| add_products(c[at], |p| a(at / n, p), |p| b(at % n, p), k)).collect()
    }

    /// Computes the result with the op of the direction.
    fn run(self, cpu: &Cpu, c: &mut Buf, a: &Buf, b: &Buf, [m, n, k]: [usize; 3], write: WriteMode) {
        let (c, a, b) = (c.view_mut(), a.view(), b.view());
        match self {
            Direction::Forward => cpu.matmul_forward(c, a, b, m, n, k, write),
            Direction::BackwardInput => cpu.matmul_backward_input(c, a, b, m, k, n, write),
            Direction::BackwardWeight => cpu.matmul_backward_weight(c, a, b, k, m, n, write),
        }
    }
}

/// Shapes of matmuls, with single rows, columns and terms, incomplete tiles, several passes over
/// the depth, several tasks, and rows that are 4096 bytes apart.
const SHAPES: [[usize; 3]; 13] = [
    [1, 1, 1],
    [1, 100, 64],
    [70, 1, 32],
    [16, 32, 32],
    [17, 33, 31],
    [31, 40, 96],
    [33, 65, 33],
    [47, 20, 800],
    [130, 200, 64],
    [64, 96, 1024],
    [50, 40, 2048],
    [40, 30, 4500],
    [500, 420, 32],
];

/// Asserts that a matmul has the bits of its definition, overwriting and adding, in `f32` and
/// rounded to bf16.
fn assert_matmul(cpu: &Cpu, direction: Direction, shape: [usize; 3], a: &[u16], b: &[u16], r: &mut TestRng) {
    let [m, n, _] = shape;
    let what = format!("{direction:?} {shape:?}, {}", cpu.describe());
    let (a_buf, b_buf) = (make_bf16(a), make_bf16(b));
    let zeros = vec![0.0; m * n];
    let product = direction.compute_by_definition(&zeros, a, b, shape);
    let mut c = Buf::from_slice(&vec![f32::NAN; m * n]);
    direction.run(cpu, &mut c, &a_buf, &b_buf, shape, WriteMode::Overwrite);
    assert_bits(&what, c.host_slice(), &product);

    let previous = r.draw_vec(m * n);
    let sum = direction.compute_by_definition(&previous, a, b, shape);
    let mut c = Buf::from_slice(&previous);
    direction.run(cpu, &mut c, &a_buf, &b_buf, shape, WriteMode::Accumulate);
    assert_bits(&format!("{what}, adding"), c.host_slice(), &sum);

    let expected: Vec<u16> = product.iter().map(|x| round_to_bf16(*x)).collect();
    let mut c = Buf::zeroed_as(Dtype::Bf16, m * n);
    direction.run(cpu, &mut c, &a_buf, &b_buf, shape, WriteMode::Overwrite);
    assert_halves(&format!("{what}, rounded"), &c, &product, &expected);

    let previous = draw_bf16(r, m * n);
    let wide: Vec<f32> = previous.iter().map(|x| f32::from_bits(u32::from(*x) << 16)).collect();
    let sum = direction.compute_by_definition(&wide, a, b, shape);
    let expected: Vec<u16> = sum.iter().map(|x| round_to_bf16(*x)).collect();
    let mut c = make_bf16(&previous);
    direction.run(cpu, &mut c, &a_buf, &b_buf, shape, WriteMode::Accumulate);
    assert_halves(&format!("{what}, added and rounded"), &c, &sum, &expected);
}

/// Asserts that the bf16 numbers `got` have the bits `expected`, except where the unrounded result
/// is NaN.
#[track_caller]
fn assert_halves(what: &str, got: &Buf, unrounded: &[f32], expected: &[u16]) {
    for (i, x) in got.view().half_bits().iter().enumerate() {
        let is_right = if unrounded[i].is_nan() { x & 0x7fff > 0x7f80 } else { *x == expected[i] };
        assert!(is_right, "{what}: element {i}: {x:#x}, not {:#x}", expected[i]);
    }
}

#[test]
fn matmuls_have_the_bits_of_the_definition() {
    for threads in [1, 4] {
        let Some(cpu) = open_amx_backend(threads) else { return };
        let mut r = TestRng::new(21);
        for shape @ [m, n, k] in SHAPES {
            let (a, b) = (draw_bf16(&mut r, m * k), draw_bf16(&mut r, n * k));
            for direction in Direction::ALL {
                assert_matmul(&cpu, direction, shape, &a, &b, &mut r);
            }
        }
    }
}

#[test]
fn random_shapes_have_the_bits_of_the_definition() {
    let Some(cpu) = open_amx_backend(2) else { return };
    let mut r = TestRng::new(22);
    for _ in 0..40 {
        let shape @ [m, n, k] = [1 + r.draw_below(90), 1 + r.draw_below(90), 1 + r.draw_below(150)];
        let (a, b) = (draw_bf16(&mut r, m * k), draw_bf16(&mut r, n * k));
        let direction = Direction::ALL[r.draw_below(3)];
        assert_matmul(&cpu, direction, shape, &a, &b, &mut r);
    }
}

#[test]
fn extreme_numbers_have_the_bits_of_the_definition() {
    let Some(cpu) = open_amx_backend(2) else { return };
    let mut r = TestRng::new(23);
    for (shape @ [m, n, k], with_infinities) in
        [([40, 50, 70], false), ([33, 32, 96], false), ([64, 64, 300], true), ([48, 64, 64], true)]
    {
        for direction in Direction::ALL {
            let a = draw_extreme_bf16(&mut r, m * k, with_infinities);
            let b = draw_extreme_bf16(&mut r, n * k, with_infinities);
            assert_matmul(&cpu, direction, shape, &a, &b, &mut r);
        }
    }
}

#[test]
fn a_bias_is_added_before_the_result_is_rounded() {
    let Some(cpu) = open_amx_backend(3) else { return };
    let mut r = TestRng::new(24);
    for shape @ [m, n, k] in [[1, 40, 32], [70, 100, 96], [20, 33, 4200], [40, 70, 13]] {
        let (a, b, bias) = (draw_bf16(&mut r, m * k), draw_bf16(&mut r, n * k), draw_bf16(&mut r, n));
        let zeros = vec![0.0; m * n];
        for direction in [Direction::Forward, Direction::BackwardInput] {
            let mut sums = direction.compute_by_definition(&zeros, &a, &b, shape);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum += f32::from_bits(u32::from(bias[i % n]) << 16);
            }
            let expected: Vec<u16> = sums.iter().map(|x| round_to_bf16(*x)).collect();
            let (a, b, bias) = (make_bf16(&a), make_bf16(&b), make_bf16(&bias));
            for dtype in [Dtype::Bf16, Dtype::F32] {
                let mut c = Buf::zeroed_as(dtype, m * n);
                match direction {
                    Direction::Forward => {
                        cpu.matmul_bias_forward(c.view_mut(), a.view(), b.view(), Some(bias.view()), m, n, k)
                    }
                    _ => cpu.conv1d_bias_forward(c.view_mut(), a.view(), b.view(), bias.view(), m, k, n),
                }
                let what = format!("{direction:?} {shape:?} {dtype:?}");
                match dtype {
                    Dtype::F32 => assert_bits(&what, c.host_slice(), &sums),
                    _ => assert_halves(&what, &c, &sums, &expected),
                }
            }
        }
    }
}

#[test]
fn grouped_matmuls_have_the_bits_of_the_definition() {
    let (n, k) = (70, 96);
    let sizes = [5, 0, 33, 16, 150];
    for threads in [1, 4] {
        let Some(cpu) = open_amx_backend(threads) else { return };
        let mut r = TestRng::new(25);
        let rows: usize = sizes.iter().sum();
        let (x, dy, w) =
            (draw_bf16(&mut r, rows * k), draw_bf16(&mut r, rows * n), draw_bf16(&mut r, 5 * n * k));
        let mut first = 0;
        let mut groups = Vec::new();
        for (expert, size) in sizes.into_iter().enumerate() {
            groups.push(RowGroup { rows: first..first + size, matrix_offset: (4 - expert) * n * k });
            first += size;
        }
        let (x_buf, dy_buf, w_buf) = (make_bf16(&x), make_bf16(&dy), make_bf16(&w));
        let mut y = Buf::zeroed(rows * n);
        let mut dx = Buf::zeroed(rows * k);
        let mut dw = Buf::zeroed(5 * n * k);
        cpu.grouped_forward(y.view_mut(), x_buf.view(), w_buf.view(), &groups, n, k);
        cpu.grouped_backward_input(dx.view_mut(), dy_buf.view(), w_buf.view(), &groups, n, k);
        cpu.grouped_backward_weight(dw.view_mut(), dy_buf.view(), x_buf.view(), &groups, n, k);
        for group in &groups {
            let (of_x, of_y) =
                (group.rows.start * k..group.rows.end * k, group.rows.start * n..group.rows.end * n);
            let of_w = group.matrix_offset..group.matrix_offset + n * k;
            let (m, w) = (group.rows.len(), &w[of_w.clone()]);
            let (x, dy) = (&x[of_x.clone()], &dy[of_y.clone()]);
            let compute = |direction: Direction, a, b, shape: [usize; 3]| {
                direction.compute_by_definition(&vec![0.0; shape[0] * shape[1]], a, b, shape)
            };
            let expected = compute(Direction::Forward, x, w, [m, n, k]);
            assert_bits("forward", &y.host_slice()[of_y], &expected);
            let expected = compute(Direction::BackwardInput, dy, w, [m, k, n]);
            assert_bits("backward input", &dx.host_slice()[of_x], &expected);
            let expected = compute(Direction::BackwardWeight, dy, x, [n, k, m]);
            assert_bits("backward weight", &dw.host_slice()[of_w], &expected);
        }
    }
}

/// The classifier computes logits of a part of the vocabulary, whose rows are not adjacent.
#[test]
fn the_classifier_is_as_near_to_the_exact_loss_as_without_amx() {
    if !emulated_amx::provide_amx() {
        return;
    }
    let shape = ClassifierShape { m: 50, d: 64, v: 70, softcap: None };
    let mut r = TestRng::new(26);
    let (x, w) = (draw_bf16(&mut r, shape.m * shape.d), draw_bf16(&mut r, shape.v * shape.d));
    let labels: Vec<u32> = (0..shape.m).map(|i| (i * 31 % shape.v) as u32).collect();
    let results: Vec<[Vec<f32>; 3]> = Cpu::new_for_all_instruction_sets(3)
        .iter()
        .map(|cpu| {
            let [mut loss, mut dx, mut dw] = [shape.m, shape.m * shape.d, shape.v * shape.d].map(Buf::zeroed);
            let (dx_view, dw_view) = (dx.view_mut(), dw.view_mut());
            let grads =
                ClassifierGrads { dx: dx_view, dw: dw_view, dw_write: WriteMode::Overwrite, scale: 0.1 };
            let (x, w) = (make_bf16(&x), make_bf16(&w));
            cpu.compute_classifier_loss(loss.view_mut(), x.view(), w.view(), &labels, shape, Some(grads));
            [loss, dx, dw].map(|buf| buf.host_slice().to_vec())
        })
        .collect();
    for result in &results[1..] {
        for (got, expected) in results[0].iter().zip(result) {
            for (x, y) in got.iter().zip(expected) {
                assert!((x - y).abs() <= 2e-3 * (1.0 + y.abs()), "{x} is not near {y}");
            }
        }
    }
}

#[test]
fn only_bf16_matmuls_use_the_tiles() {
    if !is_own_process("amx::only_bf16_matmuls_use_the_tiles") || !emulated_amx::provide_amx() {
        return;
    }
    emulated_amx::load();
    let Some(cpu) = open_amx_backend(1) else { return };
    let is_emulated = emulated_amx::count_products() > 0;
    let x = draw_bf16(&mut TestRng::new(27), 64 * 64);
    let mut y = Buf::zeroed(64 * 64);
    for (dtype, products) in [(Dtype::F32, 0), (Dtype::F16, 0), (Dtype::Bf16, 4 * 4 * 2)] {
        let before = emulated_amx::count_products();
        let mut operand = Buf::zeroed_as(dtype, 64 * 64);
        cpu.cast(operand.view_mut(), make_bf16(&x).view());
        cpu.matmul_forward(y.view_mut(), operand.view(), operand.view(), 64, 64, 64, WriteMode::Overwrite);
        if is_emulated {
            assert_eq!(emulated_amx::count_products() - before, products, "{dtype:?}");
        }
    }
}

#[test]
fn amx_with_wrong_results_is_not_used() {
    if emulated_amx::machine_has_amx() {
        return;
    }
    let has_error = std::env::var_os(emulated_amx::ERROR_VARIABLE).is_some();
    if !has_error {
        let name = "amx::amx_with_wrong_results_is_not_used";
        let output = run_test_alone(name, emulated_amx::ERROR_VARIABLE, "1");
        return assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    if emulated_amx::provide_amx() {
        let cpu = Cpu::new(1);
        assert!(!cpu.describe().starts_with("amx"), "{}", cpu.describe());
        assert!(cpu.describe_rejected_instructions().is_some());
        assert!(emulated_amx::count_products() > 0);
    }
}

/// AMX instructions would end the process with SIGILL.
#[test]
fn without_amx_no_instruction_is_executed() {
    if !is_own_process("amx::without_amx_no_instruction_is_executed") {
        return;
    }
    let mut r = TestRng::new(28);
    let shape @ [m, n, k] = [33, 40, 64];
    let (a, b) = (make_bf16(&draw_bf16(&mut r, m * k)), make_bf16(&draw_bf16(&mut r, n * k)));
    for cpu in Cpu::new_for_all_instruction_sets(2) {
        let mut c = Buf::from_slice(&vec![f32::NAN; m * n]);
        Direction::Forward.run(&cpu, &mut c, &a, &b, shape, WriteMode::Overwrite);
        assert!(c.host_slice().iter().all(|x| x.is_finite()), "{}", cpu.describe());
        if !emulated_amx::machine_has_amx() {
            assert!(!cpu.describe().starts_with("amx"), "{}", cpu.describe());
        }
    }
}
