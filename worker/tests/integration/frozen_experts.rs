//! Tests of models with frozen experts: patterns freeze experts and assign them to parameter
//! groups. Gradients equal those of full training, the bits of losses do not depend on workers or
//! placement, and runs resume with another placement.
use crate::common::*;
use ckpt::{Checkpoint, TensorRole};
use jobspec::*;
use std::collections::BTreeMap;
use worker::{train::step::RankStepReport, trainer_stages::ResolvedSpec};

/// Creates the `train` section of a model of two layers with six experts, two per token. No
/// parameter is frozen.
fn create_moe_spec(stage: u8) -> TrainSpec {
    let model = ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(6),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(19),
        num_hidden_layers: 2,
        vocab_size: 67,
        ..create_odd_sized_model()
    };
    let mut s = create_train_spec(model, stage, 8, 1, 11);
    (s.experts.aux_loss, s.experts.z_loss) = (Some(0.1), 0.01);
    s
}

/// Converts texts to owned strings.
fn to_strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|t| (*t).into()).collect()
}

/// Creates the `train` section of a model with about half of its parameters frozen: an expert,
/// parts of experts, a router and the query projections. Some experts have a lower learning rate.
fn create_half_frozen_spec(stage: u8) -> TrainSpec {
    let mut s = create_moe_spec(stage);
    s.freeze =
        to_strings(&["*.experts.0.*", "*.1.mlp.experts.3.down_proj.*", "*.0.mlp.gate.*", "*.q_proj.*"]);
    let slow_experts = ParamGroupSpec {
        r#match: to_strings(&["*.experts.[13].*"]),
        lr_scale: Some(0.5),
        ..ParamGroupSpec::default()
    };
    s.optimizer.groups = vec![slow_experts];
    s
}

/// Creates a placement with expert i on rank `ranks[i]` of each expert-parallel group.
fn place_experts(ranks: &[u32]) -> ExpertPlacement {
    ExpertPlacement::Experts((0..).zip(ranks.iter().copied()).collect())
}

/// Lists the test cases: a world size, an expert-parallel size and a placement of experts each. In
/// some placements a rank has only frozen experts.
fn list_placements() -> Vec<(usize, u32, ExpertPlacement)> {
    vec![
        (1, 1, ExpertPlacement::Balanced),
        (3, 1, ExpertPlacement::Balanced),
        (2, 2, ExpertPlacement::Balanced),
        (4, 2, place_experts(&[0, 1, 1, 1, 1, 1])),
        (3, 3, place_experts(&[2, 0, 0, 0, 2, 2])),
        (6, 3, ExpertPlacement::Balanced),
    ]
}

#[test]
fn losses_with_frozen_experts_have_the_same_bits_for_every_world_size_stage_and_placement() {
    let only = |stage, only: &str| TrainSpec { train_only: to_strings(&[only]), ..create_moe_spec(stage) };
    let frozen = |stage| TrainSpec { freeze: to_strings(&["*.experts.*"]), ..create_moe_spec(stage) };
    let makes: [(&str, &dyn Fn(u8) -> TrainSpec); 7] = [
        ("half of the model", &create_half_frozen_spec),
        ("all experts frozen", &frozen),
        ("one expert", &|stage| only(stage, "model.layers.1.mlp.experts.2.*")),
        ("experts of layer 0", &|stage| only(stage, "model.layers.0.mlp.experts.*")),
        ("one matrix of every expert", &|stage| only(stage, "*.experts.*.up_proj.weight")),
        ("one router", &|stage| only(stage, "*.1.mlp.gate.weight")),
        ("head", &|stage| only(stage, "lm_head.*")),
    ];
    for (name, make) in makes {
        let expected = train_new_run(&make(0), 1, 1, 3);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "{name}: the steps must change something");
        for (i, (world, parallel, placement)) in list_placements().into_iter().enumerate() {
            for stage in [i as u8 % 4, (i as u8 + 2) % 4] {
                let mut s = make(stage);
                (s.experts.expert_parallel_size, s.experts.placement) = (parallel, placement.clone());
                s.recompute = if (i + stage as usize).is_multiple_of(2) {
                    RecomputeMode::Block
                } else {
                    RecomputeMode::None
                };
                let losses = train_new_run(&s, world, 1, 3);
                assert_eq!(losses, expected, "{name}: world {world}, groups of {parallel}, stage {stage}");
            }
        }
    }
}

/// Computes the gradients of the first step on one rank. Returns their bits by parameter name.
fn compute_first_gradients(spec: &TrainSpec) -> BTreeMap<String, Vec<u32>> {
    let alone = create_single_rank_comm();
    let mut running = build_trainer(spec, alone, 1).start_with_random_params();
    running
        .trainer
        .compute_global_batch_gradients(
            &SyntheticSamples { vocab: spec.model.vocab_size },
            0,
            RankStepReport::default(),
        )
        .unwrap();
    let mut gradients = BTreeMap::new();
    for u in 0..running.trainer.engine.shards.len() {
        let sum = running.trainer.engine.finish_gradient(u).unwrap().owned;
        let mut rest = sum.host_slice();
        for p in running.trainer.engine.shards[u].unit.list_trained_params() {
            let (gradient, after) = rest.split_at(p.len());
            rest = after;
            gradients.insert(p.name.clone(), gradient.iter().map(|x| x.to_bits()).collect());
        }
        assert!(rest.is_empty());
    }
    gradients
}

#[test]
fn gradients_with_frozen_experts_equal_those_of_full_training() {
    let full = compute_first_gradients(&create_moe_spec(3));
    let only = |pattern: &str| TrainSpec { train_only: to_strings(&[pattern]), ..create_moe_spec(3) };
    for (spec, count) in [
        (create_half_frozen_spec(3), full.len() - 2 * 3 - 1 - 1 - 2),
        (only("*.experts.*"), 2 * 6 * 3),
        (only("*.1.mlp.experts.[24].*"), 2 * 3),
        (only("*.mlp.gate.weight"), 2),
        (only("*input_layernorm*"), 2),
    ] {
        let partial = compute_first_gradients(&spec);
        assert_eq!(partial.len(), count);
        for (name, gradient) in &partial {
            assert_eq!(gradient, &full[name], "{name}");
            assert!(gradient.iter().any(|x| *x != 0), "{name}: the gradient is zero");
        }
    }
}

#[test]
fn frozen_experts_do_not_change_and_a_resume_with_another_placement_has_the_same_bits() {
    let placed = |stage, parallel, placement| {
        let mut s = create_half_frozen_spec(stage);
        (s.experts.expert_parallel_size, s.experts.placement) = (parallel, placement);
        s
    };
    let whole = train_new_run(&create_half_frozen_spec(0), 1, 1, 5);
    let dir = tempfile::tempdir().unwrap();
    let first = placed(2, 2, place_experts(&[0, 1, 1, 1, 1, 1]));
    run_on_ranks(4, |c| {
        let mut running = build_trainer(&first, c, 1).start_with_random_params();
        assert_eq!(train_steps(&mut running, 3), whole[..3]);
        save_checkpoint(&mut running, &first, dir.path());
    });
    let checkpoint = Checkpoint::open(&dir.path().join("step-00000003")).unwrap();
    let count = |role| checkpoint.tensors().filter(|t| t.role == role).count();
    let frozen = &checkpoint.run_facts().model.frozen;
    assert_eq!(frozen.len(), 2 * 3 + 1 + 1 + 2);
    assert_eq!(count(TensorRole::ExpAvg) + frozen.len(), count(TensorRole::Weight));
    let initial_weights = {
        let alone = create_single_rank_comm();
        let mut weights = BTreeMap::new();
        golden::visit_params(
            &build_trainer(&create_half_frozen_spec(0), alone, 1).start_with_random_params(),
            |name, v| drop(weights.insert(name.to_owned(), v.to_vec())),
        );
        weights
    };
    for (name, initial) in &initial_weights {
        let mut saved = vec![0.0; initial.len()];
        checkpoint.read_f32(name, TensorRole::Weight, 0..initial.len() as u64, &mut saved).unwrap();
        assert_eq!(saved == *initial, frozen.contains(name), "{name}");
    }
    for (world, next) in [
        (1, placed(0, 1, ExpertPlacement::Balanced)),
        (3, placed(3, 3, place_experts(&[2, 0, 0, 0, 2, 2]))),
        (2, placed(1, 2, ExpertPlacement::Balanced)),
        (2, placed(0, 2, ExpertPlacement::Balanced)),
    ] {
        let (losses, notices) = expect_equal_on_all_ranks(run_on_ranks(world, |c| {
            let (mut running, notices) = resume_newest_checkpoint(&next, c, dir.path());
            (train_steps(&mut running, 2), notices)
        }));
        assert_eq!(losses, whole[3..], "world {world}");
        let size = next.experts.expert_parallel_size;
        assert_notices_match_snapshot(
            &format!("frozen_experts_{world}_ranks_size_{size}"),
            &notices,
            dir.path(),
        );
    }
}

#[test]
fn a_pattern_that_matches_no_expert_is_rejected() {
    let code = |freeze: &str| {
        let s = TrainSpec { freeze: to_strings(&[freeze]), ..create_moe_spec(3) };
        let model = ResolvedSpec::new(&s, s.model.vocab_size).unwrap().build_model();
        model.err().map(|e| (e.code().name(), e.diagnostic().subject().unwrap_or_default().to_owned()))
    };
    assert_eq!(code("*.experts.6.*"), Some(("parameter-pattern-unmatched", "train.freeze".to_owned())));
    assert_eq!(code("*"), Some(("no-trained-parameters", "train.freeze".to_owned())));
    assert_eq!(code("*.experts.*"), None);
}
