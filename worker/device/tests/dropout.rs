//! What dropout drops: the share that was asked for, by the numbers of samples and places alone.
mod reference;

use device::ops::{AttentionDropout, AttentionShape, Dropout};
use device::{Buf, Cpu, Dtype, Ops, View};
use reference::Random;

/// What attention multiplies the probability of each key by, `[b, heads, t, t]`; 0 for keys that a query doesn't see.
fn factors(cpu: &Cpu, b: usize, t: usize, heads: usize, kv_heads: usize, d: AttentionDropout) -> Vec<f32> {
    // All scores are 0, and the value of a key is a vector of its own: a query's output is its probabilities.
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

fn dropout(share: f64, first: u64) -> AttentionDropout {
    AttentionDropout { key: [3, 5], share, first }
}

/// Share of equal fates among the keys that queries of two masks see.
fn agreement(a: &[f32], b: &[f32], seen: &[bool]) -> f64 {
    let both = a.iter().zip(b).zip(seen).filter(|(_, seen)| **seen);
    let same = both.clone().filter(|((a, b), _)| (**a == 0.0) == (**b == 0.0)).count();
    same as f64 / both.count() as f64
}

#[test]
fn probabilities_are_dropped_by_the_share_and_the_rest_is_scaled() {
    let (b, t, heads) = (2, 150, 2);
    let seen: Vec<bool> = (0..b * heads * t * t).map(|i| i % t <= i / t % t).collect();
    for cpu in Cpu::each_level(2) {
        for share in [0.0, 0.1, 0.5, 0.99] {
            let all = factors(&cpu, b, t, heads, 1, dropout(share, 9));
            let keep = 1.0 / (1.0 - share);
            let (mut dropped, mut of) = (0.0, 0.0);
            for (factor, seen) in all.iter().zip(&seen) {
                let (f, kept) = (f64::from(*factor), *factor != 0.0);
                assert!(!kept || (*seen && (f - keep).abs() < 1e-5 * keep), "{f} for {share}");
                dropped += f64::from(u8::from(*seen && !kept));
                of += f64::from(u8::from(*seen));
            }
            // four standard errors
            let error = 4.0 * (share * (1.0 - share) / of).sqrt();
            assert!((dropped / of - share).abs() <= error, "{} of {of} for {share}", dropped / of);
        }
    }
}

#[test]
fn heads_queries_and_samples_have_masks_of_their_own() {
    let (b, t, heads) = (2, 150, 3);
    let all = factors(&Cpu::new(2), b, t, heads, 1, dropout(0.5, 9));
    let one = t * t;
    let seen: Vec<bool> = (0..one).map(|i| i % t <= i / t).collect();
    let mask = |seq: usize, h: usize| &all[(seq * heads + h) * one..][..one];
    let error = 4.0 * (0.25 / (one as f64 / 2.0)).sqrt();
    let pairs = [((0, 0), (0, 1)), ((0, 1), (0, 2)), ((0, 0), (1, 0)), ((0, 1), (1, 0)), ((1, 1), (1, 2))];
    for ((a, h), (b, i)) in pairs {
        let same = agreement(mask(a, h), mask(b, i), &seen);
        assert!((same - 0.5).abs() < error, "sequence {a}, head {h} and {b}, {i}: {same}");
    }
    // A query and the next, a key and the next, a key and that 16 and 64 further on.
    for shift in [t, 1, 16, 64, t + 1] {
        let of_both: Vec<bool> =
            (0..one - shift).map(|i| seen[i] && seen[i + shift] && i % t + shift % t < t).collect();
        let same = agreement(&mask(0, 0)[..one - shift], &mask(0, 0)[shift..], &of_both);
        assert!((same - 0.5).abs() < 1.5 * error, "shifted by {shift}: {same}");
    }
}

#[test]
fn a_mask_depends_on_the_samples_number_alone() {
    let cpu = Cpu::new(2);
    let (t, heads) = (130, 2);
    let of = |b, t, heads, kv, first| factors(&cpu, b, t, heads, kv, dropout(0.3, first));
    let all = of(3, t, heads, 1, 40);
    assert_eq!(all, [of(1, t, heads, 1, 40), of(2, t, heads, 1, 41)].concat(), "other batches");
    assert_eq!(all, of(3, t, heads, 2, 40), "other groups of heads");
    assert_ne!(all[..t * t], all[t * t..2 * t * t]);
    // Of a shorter sequence: the same, as far as it goes. The smaller tiles of its end aren't seen.
    let short = 77;
    let begins = of(1, short, heads, 1, 40);
    for h in 0..heads {
        for q in 0..short {
            let row = &all[(h * t + q) * t..][..short];
            let other = &begins[(h * short + q) * short..][..short];
            assert_eq!(
                row.iter().map(|x| *x == 0.0).collect::<Vec<_>>(),
                other.iter().map(|x| *x == 0.0).collect::<Vec<_>>(),
                "head {h}, query {q}"
            );
        }
    }
}

/// 16-bit vectors lose the same elements, and what is kept is rounded once.
#[test]
fn vectors_of_any_type_lose_the_same() {
    let mut r = Random::new(1);
    let x = r.vec(3 * 35_001);
    let d = Dropout { key: [1, 2], share: 0.4, sample: 35_001, first: 77 };
    for cpu in Cpu::each_level(3) {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let (mut narrow, mut wide) = (Buf::zeroed_as(dtype, x.len()), Buf::zeroed(x.len()));
            cpu.cast(narrow.view_mut(), View::from(&x[..]));
            cpu.cast(wide.view_mut(), narrow.view());
            cpu.dropout(narrow.view_mut(), &d);
            cpu.dropout(wide.view_mut(), &d);
            let dropped = wide.host().iter().filter(|x| **x == 0.0).count() as f64 / x.len() as f64;
            assert!((dropped - 0.4).abs() < 0.01, "{dropped}");
            let mut rounded = Buf::zeroed_as(dtype, x.len());
            cpu.cast(rounded.view_mut(), wide.view());
            assert!(narrow.view_mut().halves() == rounded.view_mut().halves(), "{dtype:?}");
        }
    }
}

#[test]
#[should_panic(expected = "attention_forward: a share of 1 is dropped")]
fn not_everything_can_be_dropped() {
    factors(&Cpu::new(1), 1, 2, 1, 1, dropout(1.0, 0));
}
