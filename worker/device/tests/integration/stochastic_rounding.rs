//! Tests that stochastic rounding to bf16 selects one of the two neighbours of a value. The
//! probability of the upper one is the value's relative distance from the lower one, and the choice
//! depends only on key, step and element.

use crate::reference::TestRng;
use device::ops::{StochasticRounding, VectorOps};
use device::{Buf, Cpu, Dtype, View};
use proptest::prelude::*;

/// The key (seed) of the random number generator, Philox, in these tests.
const KEY: [u32; 2] = [17, 0x9E37_79B9];

/// Rounds `x` stochastically to bf16, as elements of a vector, of which the first has the index
/// `first`. Returns the bits of the results.
fn round_on_cpu(cpu: &Cpu, x: &[f32], first: u64, step: u64) -> Vec<u16> {
    let mut y = Buf::zeroed_as(Dtype::Bf16, x.len());
    let draw = StochasticRounding { key: KEY, first_element: first, step };
    cpu.round_stochastically(y.view_mut(), View::from(x), &draw);
    y.view().half_bits().to_vec()
}

/// Converts the bits of a bf16 number to `f32`.
fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the bf16 numbers next to a finite `x`, first towards zero and then away from zero, and
/// the position of `x` between them, from 0 to 1.
fn find_neighbours(x: f32) -> (f32, f32, f64) {
    let below = f32::from_bits(x.to_bits() & 0xffff_0000);
    let above = f32::from_bits(below.to_bits() + 0x1_0000);
    let step = f64::from(above.abs()) - f64::from(below.abs());
    (below, above, (f64::from(x) - f64::from(below)).abs() / step)
}

/// Checks that an element rounds away from zero if the upper half of its random word, plus the bits
/// that truncation removes, overflows 16 bits.
#[test]
fn each_element_uses_the_random_word_of_its_number() {
    let mut r = TestRng::new(1);
    let x: Vec<f32> = r.draw_vec(40_003);
    let (first, step) = ((1 << 34) - 70, 12_345);
    for cpu in Cpu::new_for_all_instruction_sets(3) {
        let y = round_on_cpu(&cpu, &x, first, step);
        for (i, (x, y)) in x.iter().zip(&y).enumerate() {
            let element = first + i as u64;
            let word =
                device::philox::compute_random_words(KEY, element / 4, 0, step)[(element % 4) as usize];
            let (below, above, share) = find_neighbours(*x);
            let want = if f64::from(word >> 16) + share * 65536.0 >= 65536.0 { above } else { below };
            assert_eq!(bf16_to_f32(*y), want, "{} element {i}: {x:e}", cpu.describe());
        }
    }
}

/// Checks that the mean of many stochastic roundings of a value equals the value within five
/// standard errors. Their variance must be that of a choice between two numbers.
#[test]
fn rounding_is_unbiased() {
    let n = 20_000u64;
    let cpu = Cpu::new(1);
    for x in [1.0 + 1e-5, 1.003, -0.3, 3.0e-5, 1.0 + 127.0 / 128.0 + 0.004, 1.5 + 1.0 / 256.0, -7.0e-40, 2e38]
    {
        let (below, above, share) = find_neighbours(x);
        let step = f64::from(above) - f64::from(below);
        // one element over many steps, and many elements in one step
        let by_step: Vec<u16> = (0..n).map(|s| round_on_cpu(&cpu, &[x], 3, s)[0]).collect();
        let by_element = round_on_cpu(&cpu, &vec![x; n as usize], 1, 7);
        for drawn in [by_step, by_element] {
            let up = drawn.iter().filter(|y| bf16_to_f32(**y) == above).count() as f64 / n as f64;
            assert!(drawn.iter().all(|y| [below, above].contains(&bf16_to_f32(*y))), "{x:e}");
            let variance = share * (1.0 - share);
            assert!((up - share).abs() <= 5.0 * (variance / n as f64).sqrt(), "{x:e}: {up} for {share}");
            // in units of the distance between the neighbours
            let mean = drawn.iter().map(|y| (f64::from(bf16_to_f32(*y)) - f64::from(x)) / step).sum::<f64>()
                / n as f64;
            let spread = drawn.iter().map(|y| ((f64::from(bf16_to_f32(*y)) - f64::from(x)) / step).powi(2));
            let spread = spread.sum::<f64>() / n as f64;
            assert!(mean.abs() <= 5.0 * (variance / n as f64).sqrt(), "{x:e}: {mean}");
            assert!(spread <= 0.25 + 0.02 && (spread - variance).abs() < 0.02, "{x:e}: {spread}");
        }
    }
}

#[test]
fn bf16_values_are_not_changed() {
    let codes: Vec<u16> = (0..=u16::MAX).collect();
    let x: Vec<f32> = codes.iter().map(|b| bf16_to_f32(*b)).collect();
    for cpu in Cpu::new_for_all_instruction_sets(2) {
        for step in 1..20 {
            for (x, y) in codes.iter().zip(round_on_cpu(&cpu, &x, 5, step)) {
                match bf16_to_f32(*x).is_nan() {
                    true => assert!(bf16_to_f32(y).is_nan() && x & 0x8000 == y & 0x8000, "{x:#x} {y:#x}"),
                    false => assert_eq!(*x, y),
                }
            }
        }
    }
}

#[test]
fn finite_values_stay_finite_and_nan_stays_nan() {
    let largest = bf16_to_f32(0x7f7f);
    let beyond = [f32::MAX, f32::from_bits(0x7f7f_0001), -f32::MAX];
    let nan = [f32::from_bits(0x7fff_ffff), f32::from_bits(0xffff_ffff), f32::from_bits(0x7f80_0001)];
    for cpu in Cpu::new_for_all_instruction_sets(1) {
        for step in 1..200 {
            for (x, y) in beyond.iter().zip(round_on_cpu(&cpu, &beyond, 0, step)) {
                assert_eq!(bf16_to_f32(y), largest.copysign(*x));
            }
            assert!(round_on_cpu(&cpu, &nan, 0, step).iter().all(|y| bf16_to_f32(*y).is_nan()));
        }
    }
}

/// Checks that draws of different elements or steps are independent: if half of the draws round up,
/// half of the pairs of draws agree.
#[test]
fn draws_are_independent() {
    let n = 40_000;
    let x = vec![1.0 + 1.0 / 256.0; n + 64];
    let cpu = Cpu::new(2);
    let ups =
        |first, step| round_on_cpu(&cpu, &x, first, step).iter().map(|y| *y & 1 == 1).collect::<Vec<bool>>();
    let base = ups(0, 9);
    let agree =
        |a: &[bool], b: &[bool]| a.iter().zip(b).take(n).filter(|(a, b)| a == b).count() as f64 / n as f64;
    let error = 5.0 * (0.25 / n as f64).sqrt();
    for shift in [1, 2, 4, 16, 64] {
        assert!((agree(&base, &base[shift..]) - 0.5).abs() < error, "shifted by {shift}");
    }
    assert!((agree(&base, &ups(0, 10)) - 0.5).abs() < error, "the next step");
    assert_eq!(agree(&base[64..], &ups(64, 9)), 1.0, "the same elements");
}

#[test]
#[should_panic(expected = "round_stochastically: the result is F16, not Bf16")]
fn only_bf16_results_are_accepted() {
    let mut y = Buf::zeroed_as(Dtype::F16, 1);
    let draw = StochasticRounding { key: KEY, first_element: 0, step: 1 };
    Cpu::new(1).round_stochastically(y.view_mut(), View::from(&[1.0f32][..]), &draw);
}

proptest! {
    #[test]
    fn any_split_and_number_of_threads_gives_the_same_bits(
        len in 1usize..3000,
        split in 0usize..3000,
        first in prop_oneof![Just(0u64), 0u64..5000, Just((1u64 << 34) - 3)],
        step in 1u64..1 << 41,
    ) {
        let x = TestRng::new(len as u64).draw_vec(len);
        let split = split.min(len);
        let whole = round_on_cpu(&Cpu::new(3), &x, first, step);
        let parts = [
            round_on_cpu(&Cpu::new(1), &x[..split], first, step),
            round_on_cpu(&Cpu::new(2), &x[split..], first + split as u64, step),
        ];
        prop_assert_eq!(parts.concat(), whole);
    }
}
