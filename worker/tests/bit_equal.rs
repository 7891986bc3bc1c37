//! The rule of docs/numerics.md: losses and gradient norms have the same bits for any number of workers, any ZeRO stage,
//! any number of threads, with and without recomputation, at sizes that nothing divides.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::{Precision, Recompute, TrainSpec};

const STEPS: u64 = 4;

fn check(change: impl Fn(&mut TrainSpec)) {
    let make = |stage| {
        let mut s = train_spec(odd_model(), stage, 8, 1, 11);
        change(&mut s);
        s
    };
    let expected = fresh_run(&make(0), 1, 1, STEPS);
    assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
    for stage in 0..=3 {
        for world in [1, 2, 3, 4, 8] {
            let got = fresh_run(&make(stage), world, 1 + world % 2, STEPS);
            assert_eq!(got, expected, "world {world}, stage {stage}");
        }
    }
}

#[test]
fn any_world_and_stage() {
    check(|_| {});
}

#[test]
fn recomputed_blocks() {
    check(|s| s.recompute = Recompute::Block);
    let plain = train_spec(odd_model(), 3, 8, 1, 11);
    let again = TrainSpec { recompute: Recompute::Block, ..plain.clone() };
    assert_eq!(fresh_run(&plain, 2, 1, STEPS), fresh_run(&again, 3, 1, STEPS));
}

#[test]
fn tied_head_and_slots_that_are_no_power_of_two() {
    check(|s| {
        s.model.tie_word_embeddings = true;
        s.batch.global = 14;
        s.batch.micro = 2;
    });
}

#[test]
fn more_ranks_than_slots_and_deep_prefetch() {
    check(|s| {
        s.batch.global = 3;
        s.zero.prefetch = 4;
    });
}

#[test]
fn no_prefetch_and_sgd() {
    check(|s| {
        s.zero.prefetch = 0;
        s.optimizer.name = contract::job::OptimizerName::Sgd;
        s.optimizer.momentum = 0.9;
        s.clip_norm = None;
    });
}

/// Gathered parameters that stay, all or some, over several slots of a rank.
#[test]
fn parameters_that_stay() {
    for live in [700, u64::MAX] {
        let spec = |stage| {
            let mut s = train_spec(odd_model(), stage, 8, 1, 11);
            (s.zero.max_live_parameters, s.zero.prefetch) = (live, 2);
            s.model.tie_word_embeddings = live == 700;
            s.precision = if live == 700 { Precision::Fp32 } else { Precision::Bf16 };
            s
        };
        let expected = fresh_run(&spec(0), 1, 1, STEPS);
        for world in [2, 3] {
            assert_eq!(fresh_run(&spec(3), world, 1, STEPS), expected, "world {world}, {live} stay");
        }
    }
}

#[test]
fn sixteen_ranks() {
    let spec = |stage| train_spec(odd_model(), stage, 16, 1, 7);
    let expected = fresh_run(&spec(0), 1, 1, 2);
    for stage in [1, 3] {
        assert_eq!(fresh_run(&spec(stage), 16, 1, 2), expected, "stage {stage}");
    }
}

#[test]
fn bf16_any_world_and_stage() {
    check(|s| s.precision = Precision::Bf16);
}

#[test]
fn bf16_recomputed_and_tied() {
    let change = |s: &mut TrainSpec| {
        s.precision = Precision::Bf16;
        s.model.tie_word_embeddings = true;
    };
    check(|s| {
        change(s);
        s.recompute = Recompute::Block;
    });
    let mut plain = train_spec(odd_model(), 3, 8, 1, 11);
    change(&mut plain);
    let again = TrainSpec { recompute: Recompute::Block, ..plain.clone() };
    let losses = fresh_run(&plain, 2, 1, STEPS);
    assert_eq!(losses, fresh_run(&again, 3, 1, STEPS));
    plain.precision = Precision::Fp32;
    assert_ne!(losses, fresh_run(&plain, 2, 1, STEPS), "16 bits are not 32");
}

/// The first scales are too large: the same steps are skipped everywhere, and samples go on.
#[test]
fn fp16_any_world_and_stage_with_overflows() {
    let spec = |stage| {
        let mut s = train_spec(odd_model(), stage, 8, 1, 11);
        s.precision = Precision::Fp16;
        s.loss_scale.initial_scale_power = 32;
        s.loss_scale.loss_scale_window = 3;
        s
    };
    let run = |stage, world| {
        let all = on_ranks(world, |c| {
            let mut running = build(&spec(stage), c, 1).start_fresh();
            let source = MadeUp { vocab: spec(stage).model.vocab_size };
            let outcomes: Vec<_> = (0..30)
                .map(|_| {
                    let (o, _) = running.step(&source, Default::default()).unwrap();
                    assert_eq!(o.skipped, !o.grad_norm.is_finite());
                    (o.skipped, o.loss.to_bits(), o.grad_norm.to_bits())
                })
                .collect();
            let state = running.trainer.loss_scale.state().unwrap();
            let skipped = outcomes.iter().filter(|o| o.0).count() as u64;
            assert_eq!(state.skipped, skipped);
            assert_eq!((running.position.step, running.position.consumed_samples), (30 - skipped, 30 * 8));
            (outcomes, state)
        });
        assert!(all.iter().all(|r| *r == all[0]), "ranks disagree");
        all.into_iter().next().unwrap()
    };
    let expected = run(0, 1);
    let skipped = expected.1.skipped;
    assert!((2..25).contains(&skipped) && !expected.0[29].0, "{skipped} of 30 skipped");
    for (stage, world) in [(0, 3), (1, 2), (2, 8), (3, 4)] {
        assert_eq!(run(stage, world), expected, "world {world}, stage {stage}");
    }
}

#[test]
fn fp16_at_the_smallest_scale_is_a_norm_that_is_not_finite() {
    let mut spec = train_spec(odd_model(), 3, 8, 1, 11);
    spec.precision = Precision::Fp16;
    spec.loss_scale.initial_scale_power = 32;
    spec.loss_scale.min_loss_scale = 2f64.powi(31);
    on_ranks(2, |c| {
        let mut running = build(&spec, c, 1).start_fresh();
        let source = MadeUp { vocab: spec.model.vocab_size };
        let first = running.step(&source, Default::default()).unwrap().0;
        assert!(first.skipped && running.position.consumed_samples == 8);
        let second = running.step(&source, Default::default()).unwrap().0;
        assert!(!second.skipped && !second.grad_norm.is_finite() && second.loss.is_finite());
        assert_eq!((running.position.step, running.position.consumed_samples), (0, 8));
    });
}

#[test]
fn any_split_over_hosts() {
    let spec = |stage| train_spec(odd_model(), stage, 8, 1, 11);
    let expected = fresh_run(&spec(0), 1, 1, STEPS);
    for hosts in [&[0, 0, 1, 1][..], &[0, 1], &[0, 0, 0, 1], &[0, 1, 2, 3], &[0, 1, 0]] {
        for stage in 0..=3 {
            let all = on_hosts(hosts, |c| steps(&mut build(&spec(stage), c, 1).start_fresh(), STEPS));
            assert!(all.iter().all(|r| *r == expected), "hosts {hosts:?}, stage {stage}");
        }
    }
    let half = |stage| TrainSpec { precision: Precision::Bf16, ..spec(stage) };
    let expected = fresh_run(&half(0), 1, 1, STEPS);
    for stage in [1, 3] {
        let all = on_hosts(&[0, 0, 1], |c| steps(&mut build(&half(stage), c, 1).start_fresh(), STEPS));
        assert!(all.iter().all(|r| *r == expected), "bf16, stage {stage}");
    }
}

#[test]
fn a_loss_that_is_not_finite_changes_nothing() {
    let mut spec = train_spec(odd_model(), 3, 4, 1, 11);
    spec.optimizer.lr = 1e30;
    spec.schedule.name = contract::job::ScheduleName::Constant;
    spec.schedule.warmup_steps = 0;
    spec.clip_norm = None;
    on_ranks(2, |c| {
        let mut running = build(&spec, c, 1).start_fresh();
        let source = MadeUp { vocab: spec.model.vocab_size };
        let ended = (0..5).find_map(|_| {
            let before = (running.position, running.trainer.engine.params(1).host().to_vec());
            let (o, _) = running.step(&source, Default::default()).unwrap();
            (!(o.loss.is_finite() && o.grad_norm.is_finite())).then_some(before)
        });
        let (at, params) = ended.expect("a learning rate of 1e30 diverges");
        assert_eq!(running.position, at);
        assert!(
            running
                .trainer
                .engine
                .params(1)
                .host()
                .iter()
                .zip(&params)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
    });
}

/// Gradients added up as they come: one sum for any number of slots, the same bits for any number of workers where each round is
/// reduced (stages 2 and 3), and numbers that differ from the tree's in the last places elsewhere.
#[test]
fn sums_in_the_order_of_slots() {
    for tied in [false, true] {
        let make = |stage, deterministic| {
            let mut s = train_spec(odd_model(), stage, 7, 1, 11);
            s.model.tie_word_embeddings = tied;
            s.freeze = if tied { vec!["*.0.mlp.*".into()] } else { Vec::new() };
            TrainSpec { deterministic, ..s }
        };
        let tree = fresh_run(&make(0, true), 1, 1, STEPS);
        let expected = fresh_run(&make(0, false), 1, 1, STEPS);
        let near = |found: &[(u64, u64)], what: &str| {
            for (a, b) in found.iter().zip(&tree).flat_map(|(a, b)| [(a.0, b.0), (a.1, b.1)]) {
                let (a, b) = (f64::from_bits(a), f64::from_bits(b));
                assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a}, {b}");
            }
        };
        near(&expected, "1 worker");
        assert_ne!(expected, tree, "sums of seven slots in another order have other bits");
        for (stage, world) in [(1, 1), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 3), (3, 8)] {
            assert_eq!(fresh_run(&make(stage, false), world, 1, STEPS), expected, "{stage}, {world}");
        }
        for (stage, world) in [(0, 2), (0, 3), (1, 2), (1, 4), (1, 8)] {
            near(&fresh_run(&make(stage, false), world, 1, STEPS), &format!("{stage}, {world}"));
        }
    }
}
