//! The rule of docs/numerics.md: losses and gradient norms have the same bits for any number of workers, any ZeRO stage,
//! any number of threads, with and without recomputation, at sizes that nothing divides.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::Recompute;

const STEPS: u64 = 4;

fn check(change: impl Fn(&mut contract::job::TrainSpec)) {
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
    let again = contract::job::TrainSpec { recompute: Recompute::Block, ..plain.clone() };
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

#[test]
fn sixteen_ranks() {
    let spec = |stage| train_spec(odd_model(), stage, 16, 1, 7);
    let expected = fresh_run(&spec(0), 1, 1, 2);
    for stage in [1, 3] {
        assert_eq!(fresh_run(&spec(stage), 16, 1, 2), expected, "stage {stage}");
    }
}

#[test]
fn any_split_over_hosts() {
    let spec = |stage| train_spec(odd_model(), stage, 8, 1, 11);
    let expected = fresh_run(&spec(0), 1, 1, STEPS);
    for hosts in [&[0, 0, 1, 1][..], &[0, 1], &[0, 0, 0, 1], &[0, 1, 2, 3], &[0, 1, 0]] {
        for stage in 0..=3 {
            let all = on_hosts(hosts, |c| steps(&mut build(&spec(stage), c, 1).fresh(), STEPS));
            assert!(all.iter().all(|r| *r == expected), "hosts {hosts:?}, stage {stage}");
        }
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
        let mut running = build(&spec, c, 1).fresh();
        let source = MadeUp { vocab: spec.model.vocab_size };
        let ended = (0..5).find_map(|_| {
            let before = (running.at, running.trainer.engine.params(1).host().to_vec());
            let (o, _) = running.step(&source, Default::default()).unwrap();
            (!(o.loss.is_finite() && o.grad_norm.is_finite())).then_some(before)
        });
        let (at, params) = ended.expect("a learning rate of 1e30 diverges");
        assert_eq!(running.at, at);
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
