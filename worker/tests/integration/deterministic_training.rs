//! Tests of deterministic training (docs/numerics.md): losses and gradient norms have the same bits
//! for any number of workers, ZeRO stage and number of threads, with and without recomputation.
use crate::common::*;
use device::Cpu;
use jobspec::{Precision, RecomputeMode, TrainSpec};
use std::sync::Arc;

/// The number of training steps of each run whose losses are compared.
const STEPS: u64 = 4;

/// Asserts that losses have the same bits for every world size and stage. `change` modifies the
/// spec of all runs.
fn assert_bits_equal_for_worlds_and_stages(change: impl Fn(&mut TrainSpec)) {
    let make = |stage| {
        let mut s = create_train_spec(create_odd_sized_model(), stage, 8, 1, 11);
        change(&mut s);
        s
    };
    let expected = train_new_run(&make(0), 1, 1, STEPS);
    assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
    for stage in 0..=3 {
        for world in [1, 2, 3, 4, 8] {
            let got = train_new_run(&make(stage), world, 1 + world % 2, STEPS);
            assert_eq!(got, expected, "world {world}, stage {stage}");
        }
    }
}

#[test]
fn losses_do_not_depend_on_world_size_and_stage() {
    assert_bits_equal_for_worlds_and_stages(|_| {});
}

#[test]
fn recomputation_does_not_change_losses() {
    assert_bits_equal_for_worlds_and_stages(|s| s.recompute = RecomputeMode::Block);
    let plain = create_train_spec(create_odd_sized_model(), 3, 8, 1, 11);
    let recomputed = TrainSpec { recompute: RecomputeMode::Block, ..plain.clone() };
    assert_eq!(train_new_run(&plain, 2, 1, STEPS), train_new_run(&recomputed, 3, 1, STEPS));
}

#[test]
fn losses_are_equal_with_tied_embeddings_and_seven_micro_batches() {
    assert_bits_equal_for_worlds_and_stages(|s| {
        s.model.tie_word_embeddings = true;
        s.batch.global = 14;
        s.batch.micro = 2;
    });
}

#[test]
fn losses_are_equal_with_more_ranks_than_samples_and_deep_prefetch() {
    assert_bits_equal_for_worlds_and_stages(|s| {
        s.batch.global = 3;
        s.zero.prefetch = 4;
    });
}

#[test]
fn losses_are_equal_with_sgd_and_without_prefetch() {
    assert_bits_equal_for_worlds_and_stages(|s| {
        s.zero.prefetch = 0;
        s.optimizer.name = jobspec::OptimizerName::Sgd;
        s.optimizer.momentum = 0.9;
        s.clip_norm = None;
    });
}

/// Checks that losses do not change if gathered parameters stay gathered between micro-batches. The
/// reference is a run of one rank at stage 0.
#[test]
fn retaining_gathered_parameters_does_not_change_losses() {
    for live in [700, u64::MAX] {
        let spec = |stage| {
            let mut s = create_train_spec(create_odd_sized_model(), stage, 8, 1, 11);
            (s.zero.max_live_parameters, s.zero.prefetch) = (live, 2);
            s.model.tie_word_embeddings = live == 700;
            s.precision = if live == 700 { Precision::Fp32 } else { Precision::Bf16 };
            s
        };
        let expected = train_new_run(&spec(0), 1, 1, STEPS);
        for world in [2, 3] {
            let losses = train_new_run(&spec(3), world, 1, STEPS);
            assert_eq!(losses, expected, "world {world}, max_live_parameters {live}");
        }
    }
}

#[test]
fn losses_are_equal_on_sixteen_ranks() {
    let spec = |stage| create_train_spec(create_odd_sized_model(), stage, 16, 1, 7);
    let expected = train_new_run(&spec(0), 1, 1, 2);
    for stage in [1, 3] {
        assert_eq!(train_new_run(&spec(stage), 16, 1, 2), expected, "stage {stage}");
    }
}

#[test]
fn bf16_losses_do_not_depend_on_world_size_and_stage() {
    assert_bits_equal_for_worlds_and_stages(|s| s.precision = Precision::Bf16);
}

#[test]
fn losses_are_equal_on_every_instruction_set() {
    for precision in [Precision::Fp32, Precision::Bf16, Precision::Fp16] {
        let mut spec = create_train_spec(create_odd_sized_model(), 2, 8, 1, 11);
        spec.precision = precision;
        let expected = train_new_run(&spec, 1, 1, STEPS);
        for level in 0..Cpu::new_for_all_instruction_sets(1).len() {
            for world in [1, 2] {
                let curves = run_on_ranks(world, |c| {
                    let cpu = Cpu::new_for_all_instruction_sets(1).remove(level);
                    let trainer = build_trainer_on(&spec, c, Arc::new(cpu));
                    train_steps(&mut trainer.start_with_random_params(), STEPS)
                });
                let name = Cpu::new_for_all_instruction_sets(1)[level].describe();
                assert!(
                    curves.iter().all(|curve| *curve == expected),
                    "{precision:?}, {world} ranks, {name}"
                );
            }
        }
    }
}

#[test]
fn bf16_losses_are_equal_with_recomputation_and_tied_embeddings() {
    let change = |s: &mut TrainSpec| {
        s.precision = Precision::Bf16;
        s.model.tie_word_embeddings = true;
    };
    assert_bits_equal_for_worlds_and_stages(|s| {
        change(s);
        s.recompute = RecomputeMode::Block;
    });
    let mut plain = create_train_spec(create_odd_sized_model(), 3, 8, 1, 11);
    change(&mut plain);
    let recomputed = TrainSpec { recompute: RecomputeMode::Block, ..plain.clone() };
    let losses = train_new_run(&plain, 2, 1, STEPS);
    assert_eq!(losses, train_new_run(&recomputed, 3, 1, STEPS));
    plain.precision = Precision::Fp32;
    assert_ne!(losses, train_new_run(&plain, 2, 1, STEPS), "bf16 and fp32 round differently");
}

/// Checks fp16 training whose first loss scales overflow. All ranks must skip the same steps, and
/// consume the samples of the skipped steps.
#[test]
fn fp16_losses_and_skipped_steps_do_not_depend_on_world_size_and_stage() {
    let spec = |stage| {
        let mut s = create_train_spec(create_odd_sized_model(), stage, 8, 1, 11);
        s.precision = Precision::Fp16;
        s.loss_scale.initial_scale_power = 32;
        s.loss_scale.loss_scale_window = 3;
        s
    };
    let run = |stage, world| {
        expect_equal_on_all_ranks(run_on_ranks(world, |c| {
            let mut running = build_trainer(&spec(stage), c, 1).start_with_random_params();
            let source = SyntheticSamples { vocab: spec(stage).model.vocab_size };
            let outcomes: Vec<_> = (0..30)
                .map(|_| {
                    let (o, _) = running.run_step(&source, Default::default()).unwrap();
                    assert_eq!(o.skipped, !o.grad_norm.is_finite());
                    (o.skipped, o.loss.to_bits(), o.grad_norm.to_bits())
                })
                .collect();
            let state = running.trainer.loss_scale.checkpoint_state().unwrap();
            let skipped = outcomes.iter().filter(|o| o.0).count() as u64;
            assert_eq!(state.skipped, skipped);
            assert_eq!((running.position.step, running.position.consumed_samples), (30 - skipped, 30 * 8));
            (outcomes, state)
        }))
    };
    let expected = run(0, 1);
    let skipped = expected.1.skipped;
    assert!((2..25).contains(&skipped) && !expected.0[29].0, "{skipped} of 30 skipped");
    for (stage, world) in [(0, 3), (1, 2), (2, 8), (3, 4)] {
        assert_eq!(run(stage, world), expected, "world {world}, stage {stage}");
    }
}

#[test]
fn fp16_overflow_at_the_smallest_loss_scale_is_reported_as_an_infinite_norm() {
    let mut spec = create_train_spec(create_odd_sized_model(), 3, 8, 1, 11);
    spec.precision = Precision::Fp16;
    spec.loss_scale.initial_scale_power = 32;
    spec.loss_scale.min_loss_scale = 2f64.powi(31);
    run_on_ranks(2, |c| {
        let mut running = build_trainer(&spec, c, 1).start_with_random_params();
        let source = SyntheticSamples { vocab: spec.model.vocab_size };
        let first = running.run_step(&source, Default::default()).unwrap().0;
        assert!(first.skipped && running.position.consumed_samples == 8);
        let second = running.run_step(&source, Default::default()).unwrap().0;
        assert!(!second.skipped && !second.grad_norm.is_finite() && second.loss.is_finite());
        assert_eq!((running.position.step, running.position.consumed_samples), (0, 8));
    });
}

#[test]
fn losses_do_not_depend_on_the_distribution_over_hosts() {
    let spec = |stage| create_train_spec(create_odd_sized_model(), stage, 8, 1, 11);
    let expected = train_new_run(&spec(0), 1, 1, STEPS);
    for hosts in [&[0, 0, 1, 1][..], &[0, 1], &[0, 0, 0, 1], &[0, 1, 2, 3], &[0, 1, 0]] {
        for stage in 0..=3 {
            let curves = run_on_hosts(hosts, |c| {
                train_steps(&mut build_trainer(&spec(stage), c, 1).start_with_random_params(), STEPS)
            });
            assert!(curves.iter().all(|r| *r == expected), "hosts {hosts:?}, stage {stage}");
        }
    }
    let bf16 = |stage| TrainSpec { precision: Precision::Bf16, ..spec(stage) };
    let expected = train_new_run(&bf16(0), 1, 1, STEPS);
    for stage in [1, 3] {
        let curves = run_on_hosts(&[0, 0, 1], |c| {
            train_steps(&mut build_trainer(&bf16(stage), c, 1).start_with_random_params(), STEPS)
        });
        assert!(curves.iter().all(|r| *r == expected), "bf16, stage {stage}");
    }
}

#[test]
fn a_step_with_an_infinite_loss_changes_no_parameter_and_no_position() {
    let mut spec = create_train_spec(create_odd_sized_model(), 3, 4, 1, 11);
    spec.optimizer.lr = 1e30;
    spec.schedule.name = jobspec::ScheduleName::Constant;
    spec.schedule.warmup_steps = 0;
    spec.clip_norm = None;
    run_on_ranks(2, |c| {
        let mut running = build_trainer(&spec, c, 1).start_with_random_params();
        let source = SyntheticSamples { vocab: spec.model.vocab_size };
        let diverged = (0..5).find_map(|_| {
            let before =
                (running.position, running.trainer.engine.lock_resident_params(1).host_slice().to_vec());
            let (o, _) = running.run_step(&source, Default::default()).unwrap();
            (!(o.loss.is_finite() && o.grad_norm.is_finite())).then_some(before)
        });
        let (position, params) = diverged.expect("a learning rate of 1e30 diverges");
        assert_eq!(running.position, position);
        let after = running.trainer.engine.lock_resident_params(1);
        assert!(after.host_slice().iter().zip(&params).all(|(a, b)| a.to_bits() == b.to_bits()));
    });
}

/// Compares training with `deterministic: false` with fixed-order sums. Without fixed order,
/// gradients are summed in the order of micro-batches. Stages 2 and 3 reduce each round, so the
/// bits don't depend on the number of workers. Stages 0 and 1 differ from the fixed-order tree by
/// rounding errors.
#[test]
fn non_deterministic_sums_differ_from_the_fixed_order_only_by_rounding() {
    for tied in [false, true] {
        let make = |stage, deterministic| {
            let mut s = create_train_spec(create_odd_sized_model(), stage, 7, 1, 11);
            s.model.tie_word_embeddings = tied;
            s.freeze = if tied { vec!["*.0.mlp.*".into()] } else { Vec::new() };
            TrainSpec { deterministic, ..s }
        };
        let tree = train_new_run(&make(0, true), 1, 1, STEPS);
        let expected = train_new_run(&make(0, false), 1, 1, STEPS);
        let assert_near_tree = |curve: &[(u64, u64)], what: &str| {
            for (a, b) in curve.iter().zip(&tree).flat_map(|(a, b)| [(a.0, b.0), (a.1, b.1)]) {
                let (a, b) = (f64::from_bits(a), f64::from_bits(b));
                assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a}, {b}");
            }
        };
        assert_near_tree(&expected, "1 worker");
        assert_ne!(expected, tree, "sums of seven micro-batches in another order have other bits");
        for (stage, world) in [(1, 1), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 3), (3, 8)] {
            assert_eq!(train_new_run(&make(stage, false), world, 1, STEPS), expected, "{stage}, {world}");
        }
        for (stage, world) in [(0, 2), (0, 3), (1, 2), (1, 4), (1, 8)] {
            assert_near_tree(
                &train_new_run(&make(stage, false), world, 1, STEPS),
                &format!("{stage}, {world}"),
            );
        }
    }
}
