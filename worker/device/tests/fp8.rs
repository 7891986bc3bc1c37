//! Products in fp8 beside their definition in f64, and conversions beside torch's (tests/golden/fp8).
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod reference;

use device::ops::{Fp8Matrix, Write};
use device::{Buf, Cpu, Dtype, Fp8, Ops};
use reference::Random;

const KINDS: [Fp8; 2] = [Fp8::E4M3, Fp8::E5M2];

/// As fp8 keeps a matrix, by the rule of docs/numerics.md.
fn rounded(x: &[f32], kind: Fp8) -> Vec<f64> {
    let amax = x.iter().filter(|x| x.is_finite()).fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = (-60..=120).map(|e| 2f64.powi(e)).find(|s| f64::from(amax) / s <= f64::from(kind.max()));
    let scale = if amax == 0.0 { 1.0 } else { scale.unwrap() };
    let each = |x: &f32| f64::from(kind.decode(kind.encode((f64::from(*x) / scale) as f32))) * scale;
    x.iter().map(each).collect()
}

/// Some numbers as a buffer of this type that begins behind another element, and what they are there.
fn part(cpu: &Cpu, dtype: Dtype, x: &[f32]) -> (Buf, Vec<f32>) {
    let padded: Vec<f32> = [7.0].iter().chain(x).copied().collect();
    let (mut buf, mut wide) = (Buf::zeroed_as(dtype, padded.len()), Buf::zeroed(padded.len()));
    cpu.cast(buf.view_mut(), padded[..].into());
    cpu.cast(wide.view_mut(), buf.view());
    (buf, wide.host()[1..].to_vec())
}

/// Each product as a definition: `c[i, j] = Σ a[i, p]·b[p, j]`, every layout, odd numbers of rows.
#[test]
fn products_are_those_of_the_rounded_operands() {
    let mut r = Random::new(3);
    for (m, n, k) in [(1, 16, 1), (13, 32, 19), (70, 48, 531)] {
        for case in 0..8 {
            let [a_turned, b_turned, add] = [1, 2, 4].map(|bit| case & bit != 0);
            let kinds = [[Fp8::E4M3; 2], [Fp8::E5M2, Fp8::E4M3], [Fp8::E4M3, Fp8::E5M2]][case % 3];
            // Sizes that no scale of 1 fits.
            let (by_a, by_b) = (2f32.powi(case as i32 * 5 - 20), 1e4);
            let a: Vec<f32> = r.vec(m * k).iter().map(|x| x * by_a).collect();
            let b: Vec<f32> = r.vec(k * n).iter().map(|x| x * by_b).collect();
            for (cpu, dtype) in
                Cpu::each_level(2).iter().flat_map(|cpu| [(cpu, Dtype::F32), (cpu, Dtype::Bf16)])
            {
                let ((a, a_there), (b, b_there)) = (part(cpu, dtype, &a), part(cpu, dtype, &b));
                let (a8, b8) = (rounded(&a_there, kinds[0]), rounded(&b_there, kinds[1]));
                let old = if add { r.vec(m * n) } else { vec![f32::NAN; m * n] };
                let (mut c, old) = part(cpu, dtype, &old);
                let left = Fp8Matrix { x: a.view().slice(1..a.len()), kind: kinds[0], transposed: a_turned };
                let right = Fp8Matrix { x: b.view().slice(1..b.len()), kind: kinds[1], transposed: b_turned };
                let write = if add { Write::Add } else { Write::Set };
                let len = c.len();
                cpu.fp8_product(c.view_mut().slice(1..len), left, right, m, n, k, write);
                let mut got = Buf::zeroed(len);
                cpu.cast(got.view_mut(), c.view());
                for (at, (got, old)) in got.host()[1..].iter().zip(&old).enumerate() {
                    let (i, j) = (at / n, at % n);
                    let of = |p: usize| {
                        let x = a8[if a_turned { p * m + i } else { i * k + p }];
                        x * b8[if b_turned { j * k + p } else { p * n + j }]
                    };
                    let (sum, size) = (0..k).map(of).fold((0.0, 1e-30), |(s, z), x| (s + x, z + x.abs()));
                    let want = sum + if add { f64::from(*old) } else { 0.0 };
                    let slack = size * 1e-5 + want.abs() * if dtype == Dtype::Bf16 { 4e-3 } else { 1e-6 };
                    let apart = (f64::from(*got) - want).abs();
                    assert!(apart <= slack, "{m} {n} {k} case {case} {dtype:?} at {at}: {got:e}, {want:e}");
                }
            }
        }
    }
}

/// Rounding to fp8 is no small thing: the product isn't that of the operands as they were.
#[test]
fn operands_are_rounded() {
    let (cpu, mut r) = (Cpu::new(1), Random::new(5));
    let (x, w) = (r.vec(16 * 32), r.vec(32 * 16));
    let (mut eight, mut all) = (Buf::zeroed(256), Buf::zeroed(256));
    let (x, w) = (Buf::from_slice(&x), Buf::from_slice(&w));
    let a = Fp8Matrix { x: x.view(), kind: Fp8::E4M3, transposed: false };
    let b = Fp8Matrix { x: w.view(), kind: Fp8::E4M3, transposed: true };
    cpu.fp8_product(eight.view_mut(), a, b, 16, 16, 32, Write::Set);
    cpu.matmul_forward(all.view_mut(), x.view(), w.view(), 16, 16, 32, Write::Set);
    let worst = eight.host().iter().zip(all.host()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst > 1e-2 && worst < 0.3, "{worst}");
}

/// What isn't finite reaches every result that it is a term of, and no other.
#[test]
fn what_is_not_finite_is_not_hidden() {
    let cpu = Cpu::new(2);
    for (kind, poison) in
        KINDS.into_iter().flat_map(|k| [f32::NAN, f32::INFINITY, -f32::INFINITY].map(|x| (k, x)))
    {
        let mut x = vec![0.5f32; 3 * 4];
        x[5] = poison;
        let (x, w) = (Buf::from_slice(&x), Buf::from_slice(&[1.0; 4 * 16]));
        let mut c = Buf::zeroed(3 * 16);
        let a = Fp8Matrix { x: x.view(), kind, transposed: false };
        let b = Fp8Matrix { x: w.view(), kind: Fp8::E4M3, transposed: false };
        cpu.fp8_product(c.view_mut(), a, b, 3, 16, 4, Write::Set);
        let (hit, rest): (Vec<_>, Vec<_>) = c.host().iter().enumerate().partition(|(i, _)| i / 16 == 1);
        assert!(hit.iter().all(|(_, c)| !c.is_finite()), "{kind:?} {poison}");
        assert!(rest.iter().all(|(_, c)| **c == 2.0), "{kind:?} {poison}");
        let infinite = kind == Fp8::E5M2 && poison.is_infinite();
        assert!(hit.iter().all(|(_, c)| c.is_infinite() == infinite), "{kind:?} {poison}");
    }
}

#[test]
fn what_no_card_multiplies_is_refused() {
    let cpu = Cpu::new(1);
    let refused = |n: usize, kinds: [Fp8; 2]| {
        let (x, w) = (Buf::zeroed(4), Buf::zeroed(4 * n));
        let mut c = Buf::zeroed(n);
        let a = Fp8Matrix { x: x.view(), kind: kinds[0], transposed: false };
        let b = Fp8Matrix { x: w.view(), kind: kinds[1], transposed: false };
        let run = || cpu.fp8_product(c.view_mut(), a, b, 1, n, 4, Write::Set);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
    };
    assert!(refused(17, [Fp8::E4M3; 2]) && refused(16, [Fp8::E5M2; 2]) && !refused(16, [Fp8::E4M3; 2]));
}

/// tests/golden/fp8/README.md says what the lines are.
#[test]
fn conversions_are_torchs() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/fp8/casts.txt");
    let golden = std::fs::read_to_string(path).unwrap();
    for (kind, name) in KINDS.into_iter().zip(["e4m3", "e5m2"]) {
        let lines = |list: &str| -> Vec<(u32, u8)> {
            let lines = golden.lines().map(|line| line.split(' ').collect::<Vec<_>>());
            let number = |x: &str| u32::from_str_radix(x, 16).unwrap();
            let of_list = lines.filter(|line| line[..2] == [name, list]);
            of_list.map(|line| (number(line[2]), number(line[3]) as u8)).collect()
        };
        let is_nan = |code: u8| kind.decode(code).is_nan();
        let check = |bits: u32, torchs: u8| {
            let got = kind.encode(f32::from_bits(bits));
            // In E4M3 torch makes the largest number of what is too large, infinities included; here it is seen.
            let too_large = kind == Fp8::E4M3 && f32::from_bits(bits).abs() > 464.0;
            let want = if too_large { torchs | 0x7f } else { torchs };
            let same = got == want || (is_nan(got) && is_nan(want));
            assert!(same, "{name}: {bits:#x} is {got:#x}, torch says {want:#x}");
        };
        let runs = lines("bf16");
        let ends = runs[1..].iter().map(|(first, _)| *first).chain([1 << 16]);
        let all = runs.iter().zip(ends).flat_map(|(run, end)| (run.0..end).map(|bits| (bits << 16, run.1)));
        assert_eq!(all.map(|(bits, code)| check(bits, code)).count(), 1 << 16);
        let near = lines("f32");
        assert!(near.len() > 700);
        near.into_iter().for_each(|(bits, code)| check(bits, code));
        let values = lines("value");
        assert_eq!(values.len(), 256);
        for (want, code) in values {
            let (got, want) = (kind.decode(code), f32::from_bits(want));
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{name}: {code:#x}");
        }
    }
}
