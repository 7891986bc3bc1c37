//! Tests that matmuls of bf16 operands follow the rule of docs/numerics.md on every instruction
//! set, including AMX, which an emulator executes on CPUs without it.
#[cfg(target_arch = "x86_64")]
use crate::amx_emulator;
use crate::reference::TestRng;
use device::ops::{MatmulOps, VectorOps, WriteMode};
use device::{Buf, Cpu, Dtype};

/// Replaces a subnormal number by zero.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// Computes the dot product of two rows by the rule, added to `c`. This is the formula that was
/// compared with the results of `TDPBF16PS` for 2.3 million random values.
fn multiply_by_rule(c: f32, a: &[f32], b: &[f32]) -> f32 {
    let mut c = flush(c);
    for first in (0..a.len()).step_by(32) {
        let (mut even, mut odd) = (0.0f32, 0.0f32);
        let term = |p: usize| match first + p < a.len() {
            true => (flush(a[first + p]), flush(b[first + p])),
            false => (0.0, 0.0),
        };
        for pair in 0..16 {
            let ((a0, b0), (a1, b1)) = (term(2 * pair), term(2 * pair + 1));
            even = flush(a0.mul_add(b0, even));
            odd = flush(a1.mul_add(b1, odd));
        }
        c = flush(c + flush(even + odd));
    }
    c
}

/// Returns the backends under test: one for each instruction set, and AMX.
fn make_backends(threads: usize) -> Vec<(String, Cpu)> {
    let mut backends: Vec<(String, Cpu)> =
        Cpu::new_for_all_instruction_sets(threads).into_iter().map(|cpu| (cpu.describe(), cpu)).collect();
    #[cfg(target_arch = "x86_64")]
    if !backends[0].0.starts_with("amx") {
        amx_emulator::install();
        // SAFETY: the emulator executes the instructions.
        backends.push(("emulated AMX".into(), unsafe { Cpu::assume_amx(threads) }));
    }
    backends
}

/// Kinds of random values.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Normal numbers near 1.
    Ordinary,
    /// Any bits: subnormal numbers, infinities, NaN and zeros of both signs are frequent.
    Any,
    /// Products of these are near the smallest normal number.
    Tiny,
}

/// Draws a bf16 number, as `f32`.
fn draw_value(r: &mut TestRng, values: Values) -> f32 {
    let bits = r.draw_below(1 << 16) as u32;
    let special = [0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc1, 0x0001, 0x807f, 0x0080, 0x7f7f];
    let bits = match values {
        Values::Ordinary => bits & 0x807f | (120 + bits % 14) << 7,
        Values::Tiny => bits & 0x807f | (60 + bits % 8) << 7,
        Values::Any if r.draw_below(16) == 0 => special[r.draw_below(special.len())],
        Values::Any => bits,
    };
    f32::from_bits(bits << 16)
}

/// Returns a bf16 buffer with the values `x`, which bf16 represents.
fn make_bf16(x: &[f32]) -> Buf {
    let mut half = Buf::zeroed_as(Dtype::Bf16, x.len());
    for (to, x) in half.view_mut().half_bits().iter_mut().zip(x) {
        *to = (x.to_bits() >> 16) as u16;
    }
    half
}

/// Transposes a matrix of `rows` rows.
fn transpose(x: &[f32], rows: usize) -> Vec<f32> {
    let columns = x.len() / rows;
    (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
}

/// Asserts that `actual` has the bits of `a·bᵀ` by the rule, added to `c`. All NaN are equal.
#[track_caller]
fn assert_follows_rule(what: &str, actual: &[f32], c: &[f32], a: &[f32], b: &[f32], k: usize) {
    let n = b.len() / k;
    for (i, actual) in actual.iter().enumerate() {
        let (a, b) = (&a[i / n * k..][..k], &b[i % n * k..][..k]);
        let expected = multiply_by_rule(c[i], a, b);
        let same = actual.to_bits() == expected.to_bits() || actual.is_nan() && expected.is_nan();
        assert!(same, "{what}: element {i} is {actual:e}, not {expected:e}");
    }
}

/// Compares all matmuls of a shape with the rule. The `f32` gradient `dy` has the values of bf16
/// numbers if `dy_is_bf16`.
fn check_matmuls(cpu: &Cpu, what: &str, seed: u64, [m, n, k]: [usize; 3], values: Values) {
    let mut r = TestRng::new(seed);
    let mut draw = |len: usize| -> Vec<f32> { (0..len).map(|_| draw_value(&mut r, values)).collect() };
    let (x, w, dy) = (draw(m * k), draw(n * k), draw(m * n));
    let (px, pw) = (make_bf16(&x), make_bf16(&w));
    for (write, f32_gradient) in [(WriteMode::Overwrite, false), (WriteMode::Accumulate, true)] {
        let pdy = if f32_gradient { Buf::from_slice(&dy) } else { make_bf16(&dy) };
        let old = |len: usize| -> Vec<f32> {
            let is_read = write == WriteMode::Accumulate;
            (0..len).map(|i| if is_read { dy[i % dy.len()] } else { 0.0 }).collect()
        };
        let (y0, dx0, dw0) = (old(m * n), old(m * k), old(n * k));
        let (mut y, mut dx, mut dw) = (Buf::from_slice(&y0), Buf::from_slice(&dx0), Buf::from_slice(&dw0));
        cpu.matmul_forward(y.view_mut(), px.view(), pw.view(), m, n, k, write);
        cpu.matmul_backward_input(dx.view_mut(), pdy.view(), pw.view(), m, n, k, write);
        cpu.matmul_backward_weight(dw.view_mut(), pdy.view(), px.view(), m, n, k, write);
        let what = format!("{what}, {m} {n} {k}, {values:?}, {write:?}");
        assert_follows_rule(&format!("{what}: y"), y.host(), &y0, &x, &w, k);
        assert_follows_rule(&format!("{what}: dx"), dx.host(), &dx0, &dy, &transpose(&w, n), n);
        assert_follows_rule(
            &format!("{what}: dw"),
            dw.host(),
            &dw0,
            &transpose(&dy, m),
            &transpose(&x, m),
            m,
        );
    }
}

#[test]
fn matmuls_follow_the_rule_on_every_instruction_set() {
    let shapes =
        [[1, 1, 1], [3, 17, 31], [7, 49, 32], [33, 40, 33], [16, 16, 64], [34, 33, 95], [5, 64, 600]];
    for threads in [1, 3] {
        for (name, cpu) in make_backends(threads) {
            for (i, shape) in shapes.into_iter().enumerate() {
                for values in [Values::Ordinary, Values::Any, Values::Tiny] {
                    check_matmuls(&cpu, &name, i as u64, shape, values);
                }
            }
        }
    }
}

/// Checks results around the smallest normal number: a sum is replaced by zero if it is subnormal
/// after it was rounded with an unlimited exponent.
#[test]
fn results_that_are_subnormal_after_rounding_become_zero() {
    let pow2 = |e: i32| 2.0f32.powi(e);
    let smallest = pow2(-63);
    for (subtracted, expected) in [
        // 2⁻¹²⁶·(1 − 2⁻²⁴) has 24 bits, and 2⁻¹²⁶·(1 − 2⁻²⁵) is rounded to 2⁻¹²⁶.
        ([pow2(-75), pow2(-75)], 0.0),
        ([pow2(-75), pow2(-76)], f32::MIN_POSITIVE),
    ] {
        let x = make_bf16(&[smallest, 0.0, -subtracted[0], 0.0]);
        let w = make_bf16(&[smallest, 0.0, subtracted[1], 0.0]);
        for (name, cpu) in make_backends(1) {
            let mut y = Buf::zeroed(1);
            cpu.matmul_forward(y.view_mut(), x.view(), w.view(), 1, 1, 4, WriteMode::Overwrite);
            assert_eq!(y.host()[0].to_bits(), f32::to_bits(expected), "{name}");
        }
    }
}

/// Checks that threads compute with subnormal numbers after a bf16 matmul.
#[test]
fn subnormal_numbers_are_kept_outside_of_bf16_matmuls() {
    let len = 1 << 17;
    let tiny = vec![f32::from_bits(3); len];
    let ones = make_bf16(&vec![1.0; 256 * 64]);
    for (name, cpu) in make_backends(2) {
        let mut y = Buf::zeroed(256 * 256);
        cpu.matmul_forward(y.view_mut(), ones.view(), ones.view(), 256, 256, 64, WriteMode::Overwrite);
        let mut sum = Buf::from_slice(&tiny);
        cpu.add(sum.view_mut(), (&tiny[..]).into());
        assert!(sum.host().iter().all(|x| x.to_bits() == 6), "{name}");
    }
}

/// Compares the emulator with the rule for tiles of odd shapes, and checks the other instructions.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_emulator_multiplies_tiles_by_the_rule() {
    use std::arch::asm;
    if !Cpu::new(1).describe().starts_with("amx") {
        amx_emulator::install();
    }
    let mut r = TestRng::new(77);
    for (rows, columns, pairs, values) in [
        (16, 16, 16, Values::Ordinary),
        (5, 3, 16, Values::Any),
        (1, 16, 7, Values::Tiny),
        (16, 1, 1, Values::Any),
    ] {
        let mut config = [0u8; 64];
        config[0] = 1;
        for (tile, (bytes, rows)) in
            [(4 * columns, rows), (4 * pairs, rows), (4 * columns, pairs)].into_iter().enumerate()
        {
            config[16 + 2 * tile] = bytes as u8;
            config[48 + tile] = rows as u8;
        }
        let mut draw = |len: usize| -> Vec<f32> { (0..len).map(|_| draw_value(&mut r, values)).collect() };
        let (a, b) = (draw(rows * 2 * pairs), draw(columns * 2 * pairs));
        let bits = |x: f32| (x.to_bits() >> 16) as u16;
        let (mut tile_a, mut tile_b) = ([[0u16; 32]; 16], [[0u16; 32]; 16]);
        for (i, x) in a.iter().enumerate() {
            tile_a[i / (2 * pairs)][i % (2 * pairs)] = bits(*x);
        }
        for (i, x) in b.iter().enumerate() {
            let (column, k) = (i / (2 * pairs), i % (2 * pairs));
            tile_b[k / 2][2 * column + k % 2] = bits(*x);
        }
        let c = draw(rows * columns);
        let mut memory = [[7.5f32; 17]; 17];
        for (i, x) in c.iter().enumerate() {
            memory[i / columns][i % columns] = *x;
        }
        // SAFETY: the tiles are in these arrays.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0",
                "tileloadd tmm0, [{c} + {c_stride} * 1]",
                "tileloadd tmm1, [{a} + {stride} * 1]",
                "tileloadd tmm2, [{b} + {stride} * 1]",
                "tdpbf16ps tmm0, tmm1, tmm2",
                "tilestored [{c} + {c_stride} * 1], tmm0",
                "tilerelease",
                config = in(reg) &config, c = in(reg) &mut memory, a = in(reg) &tile_a, b = in(reg) &tile_b,
                c_stride = in(reg) 17 * 4usize, stride = in(reg) 64usize, options(nostack)
            );
        }
        for (i, row) in memory.iter().enumerate() {
            for (j, actual) in row.iter().enumerate() {
                if i >= rows || j >= columns {
                    assert_eq!(*actual, 7.5, "element {i}, {j} is outside of the tile");
                    continue;
                }
                let (a, b) = (&a[i * 2 * pairs..][..2 * pairs], &b[j * 2 * pairs..][..2 * pairs]);
                let expected = multiply_by_rule(c[i * columns + j], a, b);
                let same = actual.to_bits() == expected.to_bits() || actual.is_nan() && expected.is_nan();
                assert!(same, "{values:?}: element {i}, {j} is {actual:e}, not {expected:e}");
            }
        }
    }
}
