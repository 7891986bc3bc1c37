//! A part of a mixture trained: experts are frozen and grouped by pattern like any other parameter. Gradients are those of
//! the whole model, the bits those of any number of workers, and checkpoints follow another placement.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use ckpt::{Checkpoint, TensorRole};
use common::*;
use contract::job::*;
use std::{collections::BTreeMap, sync::Arc};
use worker::{
    resume::{CheckpointDirs, resume},
    stages::ResolvedSpec,
    storage_layout::StorageLayout,
    train::step::StepReport,
};

/// Two layers of six experts, two for each token.
fn spec(stage: u8) -> TrainSpec {
    let model = ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(6),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(19),
        num_hidden_layers: 2,
        vocab_size: 67,
        ..odd_model()
    };
    let mut s = train_spec(model, stage, 8, 1, 11);
    (s.experts.aux_loss, s.experts.z_loss) = (Some(0.1), 0.01);
    s
}

fn texts(of: &[&str]) -> Vec<String> {
    of.iter().map(|t| (*t).into()).collect()
}

/// Parts of experts' units, a whole expert, a router, parts of other units; some experts with numbers of their own.
fn half(stage: u8) -> TrainSpec {
    let mut s = spec(stage);
    s.freeze = texts(&["*.experts.0.*", "*.1.mlp.experts.3.down_proj.*", "*.0.mlp.gate.*", "*.q_proj.*"]);
    let of_experts =
        GroupSpec { r#match: texts(&["*.experts.[13].*"]), lr_scale: Some(0.5), ..GroupSpec::default() };
    s.optimizer.groups = vec![of_experts];
    s
}

/// Expert → rank, in the order of experts.
fn ranks(ranks: &[u32]) -> ExpertPlacement {
    ExpertPlacement::Experts((0..).zip(ranks.iter().copied()).collect())
}

/// All that is frozen lies alone on one rank of each group, or beside others.
fn placements() -> Vec<(usize, u32, ExpertPlacement)> {
    vec![
        (1, 1, ExpertPlacement::Balanced),
        (3, 1, ExpertPlacement::Balanced),
        (2, 2, ExpertPlacement::Balanced),
        (4, 2, ranks(&[0, 1, 1, 1, 1, 1])),
        (3, 3, ranks(&[2, 0, 0, 0, 2, 2])),
        (6, 3, ExpertPlacement::Balanced),
    ]
}

#[test]
fn any_world_stage_and_placement() {
    let only = |stage, only: &str| TrainSpec { train_only: texts(&[only]), ..spec(stage) };
    let frozen = |stage| TrainSpec { freeze: texts(&["*.experts.*"]), ..spec(stage) };
    let makes: [(&str, &dyn Fn(u8) -> TrainSpec); 7] = [
        ("half", &half),
        ("all experts frozen", &frozen),
        ("one expert", &|stage| only(stage, "model.layers.1.mlp.experts.2.*")),
        ("experts of the lower layer", &|stage| only(stage, "model.layers.0.mlp.experts.*")),
        ("a matrix of every expert", &|stage| only(stage, "*.experts.*.up_proj.weight")),
        ("one router", &|stage| only(stage, "*.1.mlp.gate.weight")),
        ("head", &|stage| only(stage, "lm_head.*")),
    ];
    for (what, make) in makes {
        let expected = fresh_run(&make(0), 1, 1, 3);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "{what}: the steps must change something");
        for (i, (world, parallel, placement)) in placements().into_iter().enumerate() {
            for stage in [i as u8 % 4, (i as u8 + 2) % 4] {
                let mut s = make(stage);
                (s.experts.expert_parallel_size, s.experts.placement) = (parallel, placement.clone());
                s.recompute =
                    if (i + stage as usize).is_multiple_of(2) { Recompute::Block } else { Recompute::None };
                let got = fresh_run(&s, world, 1, 3);
                assert_eq!(got, expected, "{what}: world {world}, groups of {parallel}, stage {stage}");
            }
        }
    }
}

/// Every gradient of the first step by name; on one rank.
fn gradients(spec: &TrainSpec) -> BTreeMap<String, Vec<u32>> {
    let alone = Arc::new(comm::local::group(1).remove(0));
    let mut running = build(spec, alone, 1).start_fresh();
    running.trainer.accumulate(&MadeUp { vocab: spec.model.vocab_size }, 0, StepReport::default()).unwrap();
    let mut all = BTreeMap::new();
    for u in 0..running.trainer.engine.shards.len() {
        let sum = running.trainer.engine.finish_gradient(u).unwrap();
        let mut rest = sum.host();
        for p in running.trainer.engine.shards[u].unit.trained_params() {
            let (own, after) = rest.split_at(p.len());
            rest = after;
            all.insert(p.name.clone(), own.iter().map(|x| x.to_bits()).collect());
        }
        assert!(rest.is_empty());
    }
    all
}

#[test]
fn gradients_are_those_of_the_whole_model() {
    let whole = gradients(&spec(3));
    let only = |pattern: &str| TrainSpec { train_only: texts(&[pattern]), ..spec(3) };
    for (spec, count) in [
        (half(3), whole.len() - 2 * 3 - 1 - 1 - 2),
        (only("*.experts.*"), 2 * 6 * 3),
        (only("*.1.mlp.experts.[24].*"), 2 * 3),
        (only("*.mlp.gate.weight"), 2),
        (only("*input_layernorm*"), 2),
    ] {
        let part = gradients(&spec);
        assert_eq!(part.len(), count);
        for (name, got) in &part {
            assert_eq!(got, &whole[name], "{name}");
            assert!(got.iter().any(|x| *x != 0), "{name}: no gradient");
        }
    }
}

#[test]
fn frozen_experts_stay_as_they_were_and_checkpoints_follow_another_placement() {
    let placed = |stage, parallel, placement| {
        let mut s = half(stage);
        (s.experts.expert_parallel_size, s.experts.placement) = (parallel, placement);
        s
    };
    let whole = fresh_run(&half(0), 1, 1, 5);
    let dir = tempfile::tempdir().unwrap();
    let first = placed(2, 2, ranks(&[0, 1, 1, 1, 1, 1]));
    on_ranks(4, |c| {
        let mut running = build(&first, c, 1).start_fresh();
        assert_eq!(steps(&mut running, 3), whole[..3]);
        let mut saver = saver(&running, &job(&first, dir.path(), false), dir.path());
        saver.begin(&mut running).unwrap();
        saver.finish(&running).unwrap();
    });
    let checkpoint = Checkpoint::open(&dir.path().join("step-00000003")).unwrap();
    let count = |role| checkpoint.tensors().filter(|t| t.role == role).count();
    let frozen = &checkpoint.facts().model.frozen;
    assert_eq!(frozen.len(), 2 * 3 + 1 + 1 + 2);
    assert_eq!(count(TensorRole::ExpAvg) + frozen.len(), count(TensorRole::Weight));
    let fresh = {
        let alone = Arc::new(comm::local::group(1).remove(0));
        let mut all = BTreeMap::new();
        golden::params(&build(&half(0), alone, 1).start_fresh(), |name, v| {
            drop(all.insert(name.to_owned(), v.to_vec()))
        });
        all
    };
    for (name, begun) in &fresh {
        let mut now = vec![0.0; begun.len()];
        checkpoint.read_f32(name, TensorRole::Weight, 0..begun.len() as u64, &mut now).unwrap();
        assert_eq!(now == *begun, frozen.contains(name), "{name}");
    }
    for (world, next) in [
        (1, placed(0, 1, ExpertPlacement::Balanced)),
        (3, placed(3, 3, ranks(&[2, 0, 0, 0, 2, 2]))),
        (2, placed(1, 2, ExpertPlacement::Balanced)),
        (2, placed(0, 2, ExpertPlacement::Balanced)),
    ] {
        let after = on_ranks(world, |c| {
            let mut bound = build(&next, c, 1);
            let layout = StorageLayout::shared(world);
            let place = CheckpointDirs { root: dir.path(), workdir: dir.path(), layout: &layout };
            let job = job(&next, dir.path(), false);
            let mut told = Vec::new();
            let resumed = resume(&mut bound, &job, &place, "made up", &mut |event| {
                told.push(format!("{event:?}"));
                Ok(())
            });
            let cursor = resumed.unwrap().expect("a checkpoint to resume from").cursor;
            assert!(!told.iter().any(|t| t.contains("parameter group") || t.contains("frozen")), "{told:?}");
            steps(&mut bound.start_at(cursor), 2)
        });
        assert!(after.iter().all(|a| *a == whole[3..]), "world {world}");
    }
}

#[test]
fn a_pattern_that_matches_no_expert_is_rejected() {
    let code = |freeze: &str| {
        let s = TrainSpec { freeze: texts(&[freeze]), ..spec(3) };
        let model = ResolvedSpec::new(&s, s.model.vocab_size).unwrap().build_model();
        model.err().map(|e| (e.code().name(), e.diagnostic().subject().unwrap_or_default().to_owned()))
    };
    assert_eq!(code("*.experts.6.*"), Some(("parameter-pattern-unmatched", "train.freeze".to_owned())));
    assert_eq!(code("*"), Some(("no-trained-parameters", "train.freeze".to_owned())));
    assert_eq!(code("*.experts.*"), None);
}
