//! Tests that dropout drops elements with the requested probability, and that the choice depends
//! only on the numbers of the sample and of the position in it.

use crate::reference::TestRng;
use device::ops::{AttentionDropout, AttentionOps, AttentionShape, SampleDropout, VectorOps};
use device::{Buf, Cpu, Dtype, View};

/// Returns the factors by which dropout multiplies attention's probabilities, `[b, heads, t, t]`.
/// The factor is 0 for dropped keys, and for later keys, to which a query does not attend.
fn compute_dropout_factors(
    cpu: &Cpu,
    b: usize,
    t: usize,
    heads: usize,
    kv_heads: usize,
    d: AttentionDropout,
) -> Vec<f32> {
    // All scores are 0 and the values of the keys are unit vectors, so a query's output is the
    // vector of its probabilities.
    let shape = AttentionShape { dropout: Some(d), ..AttentionShape::new(b, t, heads, kv_heads, t) };
    let width = (heads + 2 * kv_heads) * t;
    let mut qkv = vec![0.0; b * t * width];
    for (i, row) in qkv.chunks_exact_mut(width).enumerate() {
        row[(heads + kv_heads) * t..].iter_mut().skip(i % t).step_by(t).for_each(|x| *x = 1.0);
    }
    let (mut o, mut lse) = (vec![0.0; b * t * heads * t], vec![0.0; b * heads * t]);
    let starts = vec![0; b * t];
    cpu.attention_forward((&mut o[..]).into(), (&mut lse[..]).into(), (&qkv[..]).into(), &starts, shape);
    let mut factors = Vec::with_capacity(o.len());
    for seq in 0..b {
        for h in 0..heads {
            for q in 0..t {
                let row = &o[((seq * t + q) * heads + h) * t..][..t];
                factors.extend(row.iter().map(|p| p * (q + 1) as f32));
            }
        }
    }
    factors
}

/// Creates the settings of dropout in attention, for sequences that are numbered from `first`.
fn make_dropout(probability: f64, first: u64) -> AttentionDropout {
    AttentionDropout { key: [3, 5], probability, first_sequence: first }
}

/// Returns the share of `visible` elements for which two dropout masks agree.
fn compute_agreement(a: &[f32], b: &[f32], visible: &[bool]) -> f64 {
    let both = a.iter().zip(b).zip(visible).filter(|(_, visible)| **visible);
    let same = both.clone().filter(|((a, b), _)| (**a == 0.0) == (**b == 0.0)).count();
    same as f64 / both.count() as f64
}

#[test]
fn elements_are_dropped_with_the_probability_and_the_rest_is_scaled() {
    let (b, t, heads) = (2, 150, 2);
    let visible: Vec<bool> = (0..b * heads * t * t).map(|i| i % t <= i / t % t).collect();
    for cpu in Cpu::new_for_all_instruction_sets(2) {
        for probability in [0.0, 0.1, 0.5, 0.99] {
            let factors = compute_dropout_factors(&cpu, b, t, heads, 1, make_dropout(probability, 9));
            let scale = 1.0 / (1.0 - probability);
            let (mut dropped, mut total) = (0.0, 0.0);
            for (factor, visible) in factors.iter().zip(&visible) {
                let (f, is_kept) = (f64::from(*factor), *factor != 0.0);
                assert!(!is_kept || (*visible && (f - scale).abs() < 1e-5 * scale), "{f} for {probability}");
                dropped += f64::from(u8::from(*visible && !is_kept));
                total += f64::from(u8::from(*visible));
            }
            // four standard errors
            let error = 4.0 * (probability * (1.0 - probability) / total).sqrt();
            let observed = dropped / total;
            assert!(
                (observed - probability).abs() <= error,
                "{observed} of {total} elements for {probability}"
            );
        }
    }
}

#[test]
fn masks_of_heads_queries_and_samples_are_independent() {
    let (b, t, heads) = (2, 150, 3);
    let factors = compute_dropout_factors(&Cpu::new(2), b, t, heads, 1, make_dropout(0.5, 9));
    let mask_len = t * t;
    let visible: Vec<bool> = (0..mask_len).map(|i| i % t <= i / t).collect();
    let mask = |seq: usize, h: usize| &factors[(seq * heads + h) * mask_len..][..mask_len];
    let error = 4.0 * (0.25 / (mask_len as f64 / 2.0)).sqrt();
    let pairs = [((0, 0), (0, 1)), ((0, 1), (0, 2)), ((0, 0), (1, 0)), ((0, 1), (1, 0)), ((1, 1), (1, 2))];
    for ((a, h), (b, i)) in pairs {
        let same = compute_agreement(mask(a, h), mask(b, i), &visible);
        assert!((same - 0.5).abs() < error, "sequence {a}, head {h} and {b}, {i}: {same}");
    }
    // A query and the next one, and a key and the keys 1, 16 and 64 after it.
    for shift in [t, 1, 16, 64, t + 1] {
        let both_visible: Vec<bool> = (0..mask_len - shift)
            .map(|i| visible[i] && visible[i + shift] && i % t + shift % t < t)
            .collect();
        let same = compute_agreement(&mask(0, 0)[..mask_len - shift], &mask(0, 0)[shift..], &both_visible);
        assert!((same - 0.5).abs() < 1.5 * error, "shifted by {shift}: {same}");
    }
}

#[test]
fn a_mask_depends_only_on_the_number_of_its_sample() {
    let cpu = Cpu::new(2);
    let (t, heads) = (130, 2);
    let masks =
        |b, t, heads, kv, first| compute_dropout_factors(&cpu, b, t, heads, kv, make_dropout(0.3, first));
    let batch = masks(3, t, heads, 1, 40);
    assert_eq!(batch, [masks(1, t, heads, 1, 40), masks(2, t, heads, 1, 41)].concat(), "other batches");
    assert_eq!(batch, masks(3, t, heads, 2, 40), "other groups of heads");
    assert_ne!(batch[..t * t], batch[t * t..2 * t * t]);
    // A shorter sequence has the same mask up to its end, although its last tiles are smaller.
    let short = 77;
    let shorter = masks(1, short, heads, 1, 40);
    for h in 0..heads {
        for q in 0..short {
            let row = &batch[(h * t + q) * t..][..short];
            let other = &shorter[(h * short + q) * short..][..short];
            assert_eq!(
                row.iter().map(|x| *x == 0.0).collect::<Vec<_>>(),
                other.iter().map(|x| *x == 0.0).collect::<Vec<_>>(),
                "head {h}, query {q}"
            );
        }
    }
}

/// Checks that dropout drops the same elements of 16-bit and f32 vectors, and rounds the other
/// elements once.
#[test]
fn vectors_of_any_type_lose_the_same_elements() {
    let mut r = TestRng::new(1);
    let x = r.draw_vec(3 * 35_001);
    let d = SampleDropout { key: [1, 2], probability: 0.4, sample_len: 35_001, first_sample: 77 };
    for cpu in Cpu::new_for_all_instruction_sets(3) {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let (mut narrow, mut wide) = (Buf::zeroed_as(dtype, x.len()), Buf::zeroed(x.len()));
            cpu.cast(narrow.view_mut(), View::from(&x[..]));
            cpu.cast(wide.view_mut(), narrow.view());
            cpu.dropout(narrow.view_mut(), &d);
            cpu.dropout(wide.view_mut(), &d);
            let dropped = wide.host_slice().iter().filter(|x| **x == 0.0).count() as f64 / x.len() as f64;
            assert!((dropped - 0.4).abs() < 0.01, "{dropped}");
            let mut rounded = Buf::zeroed_as(dtype, x.len());
            cpu.cast(rounded.view_mut(), wide.view());
            assert!(narrow.view_mut().half_bits() == rounded.view_mut().half_bits(), "{dtype:?}");
        }
    }
}

#[test]
#[should_panic(expected = "attention_forward: the dropout probability is 1, not in 0..1")]
fn a_dropout_probability_of_1_is_rejected() {
    compute_dropout_factors(&Cpu::new(1), 1, 2, 1, 1, make_dropout(1.0, 0));
}
