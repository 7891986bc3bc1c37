//! Compares matmuls in fp8 with their definition in f64, and conversions to fp8 with those of torch
//! (`tests/golden/fp8`).

use crate::reference::TestRng;
use device::ops::{Fp8Operand, Fp8Ops, MatmulOps, VectorOps, WriteMode};
use device::{Buf, Cpu, Dtype, Fp8Format};

/// Both formats of fp8 numbers, which every test checks.
const FORMATS: [Fp8Format; 2] = [Fp8Format::E4M3, Fp8Format::E5M2];

/// Rounds a matrix to fp8 with the power-of-two scale that docs/numerics.md defines, and returns
/// the rounded elements times the scale.
fn round_to_fp8(x: &[f32], format: Fp8Format) -> Vec<f64> {
    let amax = x.iter().filter(|x| x.is_finite()).fold(0.0f32, |most, x| most.max(x.abs()));
    let scale =
        (-60..=120).map(|e| 2f64.powi(e)).find(|s| f64::from(amax) / s <= f64::from(format.largest_finite()));
    let scale = if amax == 0.0 { 1.0 } else { scale.expect("a scale fits every finite amax") };
    let each = |x: &f32| f64::from(format.decode(format.encode((f64::from(*x) / scale) as f32))) * scale;
    x.iter().map(each).collect()
}

/// Converts `x` to `dtype` and stores the result in a buffer after one padding element, so that the
/// address of the result is not aligned. Returns the buffer, and the result as `f32` without the
/// padding.
fn copy_to_unaligned_buf(cpu: &Cpu, dtype: Dtype, x: &[f32]) -> (Buf, Vec<f32>) {
    let padded: Vec<f32> = [7.0].iter().chain(x).copied().collect();
    let (mut buf, mut wide) = (Buf::zeroed_as(dtype, padded.len()), Buf::zeroed(padded.len()));
    cpu.cast(buf.view_mut(), padded[..].into());
    cpu.cast(wide.view_mut(), buf.view());
    (buf, wide.host_slice()[1..].to_vec())
}

/// Compares matmuls with their definition `c[i, j] = Σ a[i, p]·b[p, j]` on rounded operands, for
/// every layout and for odd numbers of rows.
#[test]
fn matmuls_multiply_the_rounded_operands() {
    let mut r = TestRng::new(3);
    for (m, n, k) in [(1, 16, 1), (13, 32, 19), (70, 48, 531)] {
        for case in 0..8 {
            let [a_transposed, b_transposed, add] = [1, 2, 4].map(|bit| case & bit != 0);
            let formats = [
                [Fp8Format::E4M3; 2],
                [Fp8Format::E5M2, Fp8Format::E4M3],
                [Fp8Format::E4M3, Fp8Format::E5M2],
            ][case % 3];
            // magnitudes that need a scale other than 1
            let (a_factor, b_factor) = (2f32.powi(case as i32 * 5 - 20), 1e4);
            let a: Vec<f32> = r.draw_vec(m * k).iter().map(|x| x * a_factor).collect();
            let b: Vec<f32> = r.draw_vec(k * n).iter().map(|x| x * b_factor).collect();
            for (cpu, dtype) in Cpu::new_for_all_instruction_sets(2)
                .iter()
                .flat_map(|cpu| [(cpu, Dtype::F32), (cpu, Dtype::Bf16)])
            {
                let (a, a_values) = copy_to_unaligned_buf(cpu, dtype, &a);
                let (b, b_values) = copy_to_unaligned_buf(cpu, dtype, &b);
                let (a8, b8) = (round_to_fp8(&a_values, formats[0]), round_to_fp8(&b_values, formats[1]));
                let old = if add { r.draw_vec(m * n) } else { vec![f32::NAN; m * n] };
                let (mut c, old) = copy_to_unaligned_buf(cpu, dtype, &old);
                let left = Fp8Operand {
                    x: a.view().slice(1..a.len()),
                    format: formats[0],
                    transposed: a_transposed,
                };
                let right = Fp8Operand {
                    x: b.view().slice(1..b.len()),
                    format: formats[1],
                    transposed: b_transposed,
                };
                let write = if add { WriteMode::Accumulate } else { WriteMode::Overwrite };
                let len = c.len();
                cpu.fp8_matmul(c.view_mut().slice(1..len), left, right, m, n, k, write);
                let mut got = Buf::zeroed(len);
                cpu.cast(got.view_mut(), c.view());
                for (at, (got, old)) in got.host_slice()[1..].iter().zip(&old).enumerate() {
                    let (i, j) = (at / n, at % n);
                    let term = |p: usize| {
                        let x = a8[if a_transposed { p * m + i } else { i * k + p }];
                        x * b8[if b_transposed { j * k + p } else { p * n + j }]
                    };
                    let (sum, size) = (0..k).map(term).fold((0.0, 1e-30), |(s, z), x| (s + x, z + x.abs()));
                    let want = sum + if add { f64::from(*old) } else { 0.0 };
                    let slack = size * 1e-5 + want.abs() * if dtype == Dtype::Bf16 { 4e-3 } else { 1e-6 };
                    let error = (f64::from(*got) - want).abs();
                    assert!(error <= slack, "{m} {n} {k} case {case} {dtype:?} at {at}: {got:e}, {want:e}");
                }
            }
        }
    }
}

/// Checks that the result of an fp8 matmul differs measurably from that of unrounded operands, so
/// that the operands are really rounded.
#[test]
fn operands_are_rounded() {
    let (cpu, mut r) = (Cpu::new(1), TestRng::new(5));
    let (x, w) = (r.draw_vec(16 * 32), r.draw_vec(32 * 16));
    let (mut in_fp8, mut in_f32) = (Buf::zeroed(256), Buf::zeroed(256));
    let (x, w) = (Buf::from_slice(&x), Buf::from_slice(&w));
    let a = Fp8Operand { x: x.view(), format: Fp8Format::E4M3, transposed: false };
    let b = Fp8Operand { x: w.view(), format: Fp8Format::E4M3, transposed: true };
    cpu.fp8_matmul(in_fp8.view_mut(), a, b, 16, 16, 32, WriteMode::Overwrite);
    cpu.matmul_forward(in_f32.view_mut(), x.view(), w.view(), 16, 16, 32, WriteMode::Overwrite);
    let worst =
        in_fp8.host_slice().iter().zip(in_f32.host_slice()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst > 1e-2 && worst < 0.3, "{worst}");
}

/// Checks that a NaN or infinity in an operand affects exactly those results to whose sums it
/// contributes.
#[test]
fn nan_and_infinity_reach_the_results() {
    let cpu = Cpu::new(2);
    for (format, poison) in
        FORMATS.into_iter().flat_map(|k| [f32::NAN, f32::INFINITY, -f32::INFINITY].map(|x| (k, x)))
    {
        let mut x = vec![0.5f32; 3 * 4];
        x[5] = poison;
        let (x, w) = (Buf::from_slice(&x), Buf::from_slice(&[1.0; 4 * 16]));
        let mut c = Buf::zeroed(3 * 16);
        let a = Fp8Operand { x: x.view(), format, transposed: false };
        let b = Fp8Operand { x: w.view(), format: Fp8Format::E4M3, transposed: false };
        cpu.fp8_matmul(c.view_mut(), a, b, 3, 16, 4, WriteMode::Overwrite);
        let (hit, rest): (Vec<_>, Vec<_>) = c.host_slice().iter().enumerate().partition(|(i, _)| i / 16 == 1);
        assert!(hit.iter().all(|(_, c)| !c.is_finite()), "{format:?} {poison}");
        assert!(rest.iter().all(|(_, c)| **c == 2.0), "{format:?} {poison}");
        let infinite = format == Fp8Format::E5M2 && poison.is_infinite();
        assert!(hit.iter().all(|(_, c)| c.is_infinite() == infinite), "{format:?} {poison}");
    }
}

#[test]
fn operands_that_no_gpu_multiplies_are_rejected() {
    let cpu = Cpu::new(1);
    let is_rejected = |n: usize, formats: [Fp8Format; 2]| {
        let (x, w) = (Buf::zeroed(4), Buf::zeroed(4 * n));
        let mut c = Buf::zeroed(n);
        let a = Fp8Operand { x: x.view(), format: formats[0], transposed: false };
        let b = Fp8Operand { x: w.view(), format: formats[1], transposed: false };
        let run = || cpu.fp8_matmul(c.view_mut(), a, b, 1, n, 4, WriteMode::Overwrite);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
    };
    // 17 columns are not a multiple of 16, and at least one operand must be E4M3.
    assert!(is_rejected(17, [Fp8Format::E4M3; 2]) && is_rejected(16, [Fp8Format::E5M2; 2]));
    assert!(!is_rejected(16, [Fp8Format::E4M3; 2]));
}

/// Compares conversions with torch's results in the golden file. tests/golden/fp8/README.md
/// describes the file's lines.
#[test]
fn conversions_match_torch() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/fp8/casts.txt");
    let golden = std::fs::read_to_string(path).unwrap();
    for (format, name) in FORMATS.into_iter().zip(["e4m3", "e5m2"]) {
        let lines = |list: &str| -> Vec<(u32, u8)> {
            let lines = golden.lines().map(|line| line.split(' ').collect::<Vec<_>>());
            let number = |x: &str| u32::from_str_radix(x, 16).unwrap();
            let selected = lines.filter(|line| line[..2] == [name, list]);
            selected.map(|line| (number(line[2]), number(line[3]) as u8)).collect()
        };
        let is_nan = |code: u8| format.decode(code).is_nan();
        let check = |bits: u32, torch_code: u8| {
            let got = format.encode(f32::from_bits(bits));
            // torch converts values that are too large for E4M3, and infinities, to the largest
            // E4M3 number. Here they become NaN.
            let too_large = format == Fp8Format::E4M3 && f32::from_bits(bits).abs() > 464.0;
            let want = if too_large { torch_code | 0x7f } else { torch_code };
            let same = got == want || (is_nan(got) && is_nan(want));
            assert!(same, "{name}: {bits:#x} is {got:#x}, expected {want:#x}");
        };
        let runs = lines("bf16");
        let ends = runs[1..].iter().map(|(first, _)| *first).chain([1 << 16]);
        let codes = runs.iter().zip(ends).flat_map(|(run, end)| (run.0..end).map(|bits| (bits << 16, run.1)));
        assert_eq!(codes.map(|(bits, code)| check(bits, code)).count(), 1 << 16);
        let near = lines("f32");
        assert!(near.len() > 700);
        near.into_iter().for_each(|(bits, code)| check(bits, code));
        let values = lines("value");
        assert_eq!(values.len(), 256);
        for (want, code) in values {
            let (got, want) = (format.decode(code), f32::from_bits(want));
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{name}: {code:#x}");
        }
    }
}
