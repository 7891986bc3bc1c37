//! Tests of mixture-of-experts training: losses and gradient norms have the same bits for every
//! number of workers, ZeRO stage, expert-parallel size, placement and routing. A resume with
//! another placement redistributes weights and optimizer states.
use crate::common::*;
use jobspec::{ExpertPlacement, ExpertsSpec, ModelSpec, Precision, RecomputeMode, TrainSpec};
use std::collections::BTreeMap;
use worker::{
    expert_layout::ExpertLayout,
    model::{MicroBatch, Model, ModelError, build_model},
    train::{
        running_trainer::RunningTrainer,
        step::{RankStepReport, SampleSource},
    },
};

/// Creates the `train.model` section of a small model with `experts` experts in each layer, of
/// which each token uses `per_token`.
fn create_moe_model_spec(family: &str, experts: u32, per_token: u32) -> ModelSpec {
    ModelSpec {
        family: family.into(),
        num_experts: Some(experts),
        num_experts_per_tok: Some(per_token),
        moe_intermediate_size: (family == "qwen3_moe").then_some(19),
        num_hidden_layers: 2,
        intermediate_size: 23,
        vocab_size: 67,
        ..create_odd_sized_model()
    }
}

/// Creates the `train` section of a Qwen 3 model with `experts` experts, two per token, and both
/// router losses.
fn create_moe_spec(experts: u32, parallel: u32, placement: ExpertPlacement, stage: u8) -> TrainSpec {
    let mut s = create_train_spec(create_moe_model_spec("qwen3_moe", experts, 2), stage, 8, 1, 11);
    s.experts = ExpertsSpec { expert_parallel_size: parallel, placement, aux_loss: Some(0.1), z_loss: 0.01 };
    s
}

/// Converts the list of each expert's rank to a map from expert to rank.
fn map_experts_to_ranks(ranks: &[u32]) -> BTreeMap<u32, u32> {
    (0..).zip(ranks.iter().copied()).collect()
}

#[test]
fn moe_losses_have_the_same_bits_for_every_world_size_stage_and_recomputation() {
    for family in ["mixtral", "qwen3_moe"] {
        let make = |stage, recompute| {
            let mut s = create_train_spec(create_moe_model_spec(family, 5, 2), stage, 8, 1, 11);
            s.experts.z_loss = 0.01;
            s.recompute = recompute;
            s
        };
        let expected = train_new_run(&make(0, RecomputeMode::None), 1, 1, 3);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
        for stage in 0..=3 {
            for world in [1, 2, 3, 4, 8] {
                let recompute = if world % 2 == 0 { RecomputeMode::Block } else { RecomputeMode::None };
                let losses = train_new_run(&make(stage, recompute), world, 1 + world % 2, 3);
                assert_eq!(losses, expected, "{family}: world {world}, stage {stage}");
            }
        }
    }
}

#[test]
fn moe_losses_have_the_same_bits_for_every_expert_parallel_size_and_placement() {
    let balanced = || ExpertPlacement::Balanced;
    let expected = train_new_run(&create_moe_spec(6, 1, balanced(), 0), 1, 1, 3);
    let uneven = ExpertPlacement::Experts(map_experts_to_ranks(&[1, 1, 0, 1, 1, 0]));
    let one_sided = ExpertPlacement::Layers(BTreeMap::from([(1, map_experts_to_ranks(&[1; 6]))]));
    let three = ExpertPlacement::Layers(BTreeMap::from([
        (0, map_experts_to_ranks(&[2, 0, 1, 2, 0, 1])),
        (1, map_experts_to_ranks(&[0, 0, 2, 0, 2, 0])),
    ]));
    for (world, parallel, placement) in [
        (2, 2, balanced()),
        (4, 2, balanced()),
        (8, 2, uneven.clone()),
        (2, 2, one_sided.clone()),
        (4, 2, one_sided),
        (3, 3, three.clone()),
        (6, 3, three),
        (6, 6, balanced()),
        (6, 2, uneven),
    ] {
        for stage in 0..=3 {
            let mut s = create_moe_spec(6, parallel, placement.clone(), stage);
            s.recompute = if stage % 2 == 0 { RecomputeMode::Block } else { RecomputeMode::None };
            let losses = train_new_run(&s, world, 1, 3);
            assert_eq!(losses, expected, "world {world}, groups of {parallel}, {placement:?}, stage {stage}");
        }
    }
}

/// Checks that losses without fixed-order sums differ from the deterministic ones only by rounding.
#[test]
fn moe_losses_with_sums_in_any_order_are_close_to_those_with_fixed_order_sums() {
    let make = |parallel, stage, deterministic| TrainSpec {
        deterministic,
        ..create_moe_spec(4, parallel, ExpertPlacement::Balanced, stage)
    };
    let fixed_order = train_new_run(&make(1, 0, true), 1, 1, 3);
    for (parallel, stage, world) in [(1, 0, 1), (1, 3, 2), (2, 0, 2), (2, 3, 4), (4, 2, 4)] {
        let found = train_new_run(&make(parallel, stage, false), world, 1, 3);
        for (a, b) in found.iter().zip(&fixed_order).flat_map(|(a, b)| [(a.0, b.0), (a.1, b.1)]) {
            let (a, b) = (f64::from_bits(a), f64::from_bits(b));
            assert!(
                (a - b).abs() <= 1e-5 * b.abs(),
                "parallel {parallel}, stage {stage}, {world} ranks: {a}, {b}"
            );
        }
    }
}

#[test]
fn uneven_micro_batches_and_ranks_without_one_give_the_same_bits() {
    for global in [3, 5, 14] {
        let make = |parallel, stage| {
            let mut s = create_moe_spec(6, parallel, ExpertPlacement::Balanced, stage);
            (s.batch.global, s.zero.prefetch) = (global, 3);
            s
        };
        let expected = train_new_run(&make(1, 0), 1, 1, 2);
        for (world, parallel, stage) in [(2, 2, 3), (4, 2, 2), (6, 3, 1), (6, 2, 3), (8, 2, 0)] {
            let losses = train_new_run(&make(parallel, stage), world, 1, 2);
            assert_eq!(
                losses, expected,
                "{global} micro-batches, world {world}, groups of {parallel}, stage {stage}"
            );
        }
    }
}

#[test]
fn expert_groups_within_and_across_hosts_give_the_same_bits() {
    let expected = train_new_run(&create_moe_spec(6, 1, ExpertPlacement::Balanced, 3), 1, 1, 3);
    for hosts in [&[0, 0, 0, 0][..], &[0, 0, 1, 1], &[0, 1, 2, 3], &[0, 1, 1, 1]] {
        let s = create_moe_spec(6, 2, ExpertPlacement::Experts(map_experts_to_ranks(&[1, 0, 0, 1, 0, 1])), 3);
        let losses =
            expect_equal_on_all_ranks(run_on_hosts(hosts, |c| train_steps(&mut start_new_run(&s, c), 3)));
        assert_eq!(losses, expected, "hosts {hosts:?}");
    }
}

#[test]
fn the_eval_loss_excludes_router_losses_and_has_the_same_bits() {
    let run = |s: &TrainSpec, world: usize| {
        let source = SyntheticSamples { vocab: s.model.vocab_size };
        expect_equal_on_all_ranks(run_on_ranks(world, |c| {
            let mut running = start_new_run(s, c);
            let evaluated = running.trainer.evaluate(&source, 40, 5, &|| false).unwrap().unwrap().loss;
            (
                evaluated.to_bits(),
                train_steps(&mut running, 2),
                running.trainer.evaluate(&source, 40, 5, &|| false).unwrap().unwrap().loss,
            )
        }))
    };
    let one_rank = create_moe_spec(6, 1, ExpertPlacement::Balanced, 0);
    let expected = run(&one_rank, 1);
    for (world, parallel, stage) in [(2, 2, 3), (4, 2, 2), (6, 3, 1)] {
        let s = create_moe_spec(6, parallel, ExpertPlacement::Balanced, stage);
        assert_eq!(run(&s, world), expected, "world {world}, groups of {parallel}, stage {stage}");
    }
    let mut without = one_rank;
    (without.experts.aux_loss, without.experts.z_loss) = (Some(0.0), 0.0);
    let plain = run(&without, 1);
    assert_eq!(plain.0, expected.0);
    assert_ne!(plain.1, expected.1);
}

/// Starts a new run of one rank.
fn start_new_run(s: &TrainSpec, comm: std::sync::Arc<dyn comm::Comm>) -> RunningTrainer {
    build_trainer(s, comm, 1).start_with_random_params()
}

#[test]
fn a_resume_with_another_placement_has_the_same_bits() {
    let whole = train_new_run(&create_moe_spec(6, 1, ExpertPlacement::Balanced, 3), 1, 1, 6);
    let first = create_moe_spec(6, 2, ExpertPlacement::Experts(map_experts_to_ranks(&[1, 1, 0, 1, 1, 0])), 3);
    let second = |stage| {
        create_moe_spec(
            6,
            3,
            ExpertPlacement::Layers(BTreeMap::from([(0, map_experts_to_ranks(&[2, 0, 1, 2, 0, 1]))])),
            stage,
        )
    };
    for stage in [0, 1, 3] {
        let dir = tempfile::tempdir().unwrap();
        run_on_ranks(4, |c| {
            let mut running = start_new_run(&first, c);
            assert_eq!(train_steps(&mut running, 3), whole[..3]);
            save_checkpoint(&mut running, &first, dir.path());
        });
        for (world, next) in
            [(6, second(stage)), (1, create_moe_spec(6, 1, ExpertPlacement::Balanced, stage))]
        {
            let (losses, notices) = expect_equal_on_all_ranks(run_on_ranks(world, |c| {
                let (mut running, notices) = resume_newest_checkpoint(&next, c, dir.path());
                (train_steps(&mut running, 3), notices)
            }));
            assert_eq!(losses, whole[3..], "stage {stage}, world {world}");
            assert_notices_match_snapshot(&format!("experts_placement_{world}_ranks"), &notices, dir.path());
        }
    }
}

/// A source of samples with fixed tokens, which are also the labels.
struct FixedTokenSamples(Vec<u32>);

impl SampleSource for FixedTokenSamples {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> worker::error::Result<()> {
        let n = batch.row_count();
        let at = first as usize / batch.sequences * n;
        batch.tokens.copy_from_slice(&self.0[at..at + n]);
        batch.labels.copy_from_slice(&self.0[at..at + n]);
        batch.starts.fill(0);
        Ok(())
    }
}

/// Returns a pseudo-random number below `n`, and advances `seed` (xorshift).
fn draw_random_below(seed: &mut u64, n: usize) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 20) as usize % n
}

/// Number of experts of each layer of the tiny model.
const EXPERT_COUNT: usize = 6;
/// Number of tokens in the vocabulary of the tiny model.
const VOCAB_SIZE: usize = 12;

/// Changes the weights of embedding and routers, so that routers select expert
/// `preferred_experts[i]` for token `i`.
fn steer_routing(running: &mut RunningTrainer, preferred_experts: &[usize]) {
    let engine = &running.trainer.engine;
    for (u, shard) in engine.shards.iter().enumerate() {
        let base = engine.resident_range(u).start;
        for seg in shard.unit.list_segments(engine.resident_range(u)) {
            let name = &shard.unit.params[seg.param].name;
            let is_router = name.ends_with("mlp.gate.weight");
            if !is_router && name != "model.embed_tokens.weight" {
                continue;
            }
            let d = running.trainer.model.sizes().hidden;
            engine.with_resident_params(u, |buf| {
                for (i, x) in
                    buf.host_slice_mut()[seg.flat.start - base..seg.flat.end - base].iter_mut().enumerate()
                {
                    let (row, column) = ((seg.elements.start + i) / d, (seg.elements.start + i) % d);
                    let direction = if is_router { row } else { preferred_experts[row % VOCAB_SIZE] };
                    *x += if column == direction { 3.0 } else { 0.0 };
                }
            });
        }
    }
}

/// Trains for two steps with a routing that depends on `seed`. Returns the bits of losses and
/// gradient norms, and how often each expert was selected in each layer.
fn train_with_routing(
    spec: &TrainSpec,
    comm: std::sync::Arc<dyn comm::Comm>,
    seed: u64,
) -> (Vec<(u64, u64)>, Vec<Vec<u64>>) {
    let mut seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    // All tokens prefer one expert, two experts, or any expert, so that some experts get no rows.
    let count = [1, 2, EXPERT_COUNT][draw_random_below(&mut seed, 3)];
    let first = draw_random_below(&mut seed, EXPERT_COUNT);
    let preferred_experts: Vec<usize> =
        (0..VOCAB_SIZE).map(|_| (first + draw_random_below(&mut seed, count)) % EXPERT_COUNT).collect();
    let tokens = (0..2 * 4 * 5).map(|_| draw_random_below(&mut seed, VOCAB_SIZE) as u32).collect();
    let mut running = start_new_run(spec, comm);
    steer_routing(&mut running, &preferred_experts);
    let source = FixedTokenSamples(tokens);
    let outcomes = (0..2).map(|_| running.run_step(&source, RankStepReport::default()).unwrap().0);
    let outcomes = outcomes.map(|o| (o.loss.to_bits(), o.grad_norm.to_bits())).collect();
    (outcomes, running.trainer.experts.as_ref().unwrap().expert_selection_counts())
}

/// Creates the `train` section of a tiny model with [`EXPERT_COUNT`] experts in each of two layers.
/// `seed` selects one or two experts per token, and the placement.
fn create_tiny_moe_spec(seed: u64, parallel: u32) -> TrainSpec {
    let mut s = create_moe_spec(EXPERT_COUNT as u32, parallel, ExpertPlacement::Balanced, 3);
    s.model = ModelSpec {
        vocab_size: VOCAB_SIZE as u32,
        hidden_size: 8,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 4,
        moe_intermediate_size: Some(4),
        ..create_moe_model_spec("qwen3_moe", EXPERT_COUNT as u32, 1 + (seed % 2) as u32)
    };
    (s.batch.global, s.batch.micro, s.data.seq_len, s.seed) = (4, 1, 5, seed);
    let mut random = seed | 1;
    if parallel == 4 || (parallel > 1 && !seed.is_multiple_of(3)) {
        let ranks: Vec<u32> =
            (0..EXPERT_COUNT).map(|_| draw_random_below(&mut random, parallel as usize) as u32).collect();
        s.experts.placement = ExpertPlacement::Experts(map_experts_to_ranks(&ranks));
    }
    s
}

#[test]
fn a_thousand_routings_on_four_ranks_have_the_bits_of_one_rank() {
    let (mut expected, mut one_for_all, mut idle, mut spread) = (Vec::new(), 0, 0, 0);
    for seed in 0..1000 {
        let alone = create_single_rank_comm();
        let (outcomes, counts) = train_with_routing(&create_tiny_moe_spec(seed, 1), alone, seed);
        expected.push(outcomes);
        // The counts are those of the last micro-batch, which has five tokens.
        one_for_all += counts.iter().filter(|layer| layer.contains(&5)).count();
        idle += counts.iter().filter(|layer| layer.contains(&0)).count();
        spread += counts.iter().filter(|layer| layer.iter().filter(|n| **n > 0).count() > 3).count();
    }
    assert!(
        one_for_all > 100 && idle > 1000 && spread > 100,
        "of 2,000 layers: {one_for_all} with an expert for all tokens, {idle} with an idle expert, \
         {spread} with more than 3 used experts"
    );
    let got = run_on_ranks(4, |c| {
        let parallel = |seed| [2, 4][seed as usize % 2];
        (0..1000)
            .map(|seed| train_with_routing(&create_tiny_moe_spec(seed, parallel(seed)), c.clone(), seed).0)
            .collect::<Vec<_>>()
    });
    for rank in &got {
        for (seed, (got, expected)) in rank.iter().zip(&expected).enumerate() {
            assert_eq!(got, expected, "routing {seed}");
        }
    }
}

/// Compares gradients of a mixture of experts with finite differences of the loss. Every token uses
/// every expert, so that the loss is continuous in the weights of routers.
#[test]
fn moe_gradients_equal_finite_differences_of_the_loss() {
    let mut spec = create_moe_spec(3, 1, ExpertPlacement::Balanced, 3);
    spec.model = create_moe_model_spec("qwen3_moe", 3, 3);
    (spec.experts.z_loss, spec.batch.global, spec.seed) = (0.5, 2, 3);
    let source = SyntheticSamples { vocab: spec.model.vocab_size };
    let alone = create_single_rank_comm();
    let mut running = start_new_run(&spec, alone);
    let outcome =
        running.trainer.compute_global_batch_gradients(&source, 0, RankStepReport::default()).unwrap();
    let mean = f64::from(2 * spec.data.seq_len) / outcome.targets as f64;
    let (mut grads, mut names) = (Vec::new(), Vec::new());
    for u in 0..running.trainer.engine.shards.len() {
        grads.push(running.trainer.engine.finish_gradient(u).unwrap().owned);
        let unit = &running.trainer.engine.shards[u].unit;
        let checked = (0..unit.params.len()).filter(|&i| {
            let name = &unit.params[i].name;
            ["mlp.gate.weight", "experts.1.up_proj.weight", "experts.2.down_proj.weight"]
                .iter()
                .any(|n| name.ends_with(n))
        });
        names.extend(checked.map(|i| (u, unit.params[i].name.clone(), unit.tensor_range(i))));
    }
    assert_eq!(names.len(), 6);
    for (u, name, range) in names {
        let gradient = &grads[u].host_slice()[range.clone()];
        // Finite differences of a loss in f32 are only exact enough for the largest element.
        let (i, largest) = (0..gradient.len())
            .map(|i| (i, gradient[i]))
            .max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))
            .unwrap();
        let mut loss = |by: f32| {
            running.trainer.engine.with_resident_params(u, |p| p.host_slice_mut()[range.start + i] += by);
            let loss = running
                .trainer
                .compute_global_batch_gradients(&source, 0, RankStepReport::default())
                .unwrap()
                .loss;
            running.trainer.engine.with_resident_params(u, |p| p.host_slice_mut()[range.start + i] -= by);
            for u in 0..running.trainer.engine.shards.len() {
                let spent = running.trainer.engine.finish_gradient(u).unwrap();
                running.trainer.engine.recycle_gradient(u, spent);
            }
            loss
        };
        const H: f32 = 0.02;
        let (slope, gradient) = ((loss(H) - loss(-H)) / f64::from(2.0 * H), f64::from(largest) * mean);
        assert!(
            (slope - gradient).abs() <= 0.02 * slope.abs() + 2e-5,
            "{name}: gradient {gradient:e}, finite difference {slope:e}"
        );
    }
}

#[test]
fn routings_over_shared_memory_have_the_bits_of_one_rank() {
    let alone = |seed| train_with_routing(&create_tiny_moe_spec(seed, 1), create_single_rank_comm(), seed).0;
    let expected: Vec<_> = (0..40).map(alone).collect();
    let got = run_on_hosts(&[0, 0, 0, 0], |c| {
        (0..40)
            .map(|seed| train_with_routing(&create_tiny_moe_spec(seed, 2), c.clone(), seed).0)
            .collect::<Vec<_>>()
    });
    assert!(got.iter().all(|g| *g == expected));
}

/// Returns the code and key of the error that `placement` causes for a model, or `None` if the
/// placement is valid.
fn find_placement_error(
    model: &Model,
    parallel: u32,
    placement: ExpertPlacement,
    world: usize,
) -> Option<(&'static str, String)> {
    let spec = ExpertsSpec { expert_parallel_size: parallel, placement, ..ExpertsSpec::default() };
    let error = ExpertLayout::new(&spec, model, world).err()?;
    Some((error.code().name(), error.subject().unwrap_or_default().to_owned()))
}

#[test]
fn an_invalid_placement_is_rejected_by_its_key() {
    const SIZE: (&str, &str) = ("expert-parallel-size-invalid", "train.experts.expert_parallel_size");
    const PLACEMENT: (&str, &str) = ("expert-placement-invalid", "train.experts.placement");
    let balanced = || ExpertPlacement::Balanced;
    let model =
        build_model(&ModelSpec { max_position_embeddings: 8, ..create_moe_model_spec("mixtral", 6, 2) }, 8)
            .unwrap();
    let error = |parallel, placement, world| find_placement_error(&model, parallel, placement, world);
    let assert_error = |error: Option<(&'static str, String)>, (code, key): (&str, &str)| {
        assert_eq!(error.as_ref().map(|(code, key)| (*code, key.as_str())), Some((code, key)));
    };
    assert_eq!(error(2, balanced(), 4), None);
    assert_error(error(2, balanced(), 3), SIZE);
    assert_error(error(4, balanced(), 4), SIZE);
    assert_eq!(error(4, ExpertPlacement::Experts(map_experts_to_ranks(&[0, 1, 2, 3, 0, 0])), 4), None);
    // Expert 5 has no rank; expert 6, rank 2 and layer 2 do not exist.
    assert_error(error(2, ExpertPlacement::Experts(map_experts_to_ranks(&[0, 1, 0, 1, 0])), 2), PLACEMENT);
    assert_error(
        error(2, ExpertPlacement::Experts(map_experts_to_ranks(&[0, 1, 0, 1, 0, 1, 1])), 2),
        PLACEMENT,
    );
    let layers =
        |layer, experts| ExpertPlacement::Layers(BTreeMap::from([(layer, map_experts_to_ranks(experts))]));
    assert_error(error(2, layers(1, &[0, 1, 2, 0, 0, 0]), 2), PLACEMENT);
    assert_error(error(2, layers(2, &[0; 6]), 2), ("experts-not-in-model", "train.experts.placement"));
    let dense =
        build_model(&ModelSpec { max_position_embeddings: 8, ..create_odd_sized_model() }, 8).unwrap();
    assert_error(find_placement_error(&dense, 2, balanced(), 2), ("experts-not-in-model", "train.experts"));
    let error =
        build_model(&ModelSpec { num_experts: Some(4), ..create_odd_sized_model() }, 8).err().unwrap();
    assert!(matches!(error, ModelError::KeyWithoutEffect { key: "num_experts", family: "llama" }), "{error}");
}

#[test]
fn sixteen_bit_training_has_the_same_bits_for_every_placement() {
    let balanced = || ExpertPlacement::Balanced;
    for precision in [Precision::Bf16, Precision::Fp16] {
        let make = |parallel, placement, stage| {
            let mut s = create_moe_spec(6, parallel, placement, stage);
            (s.precision, s.loss_scale.initial_scale_power) = (precision, 12);
            s
        };
        let expected = train_new_run(&make(1, balanced(), 0), 1, 1, 3);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
        assert_ne!(expected, train_new_run(&create_moe_spec(6, 1, balanced(), 0), 1, 1, 3));
        let uneven = ExpertPlacement::Experts(map_experts_to_ranks(&[1, 1, 0, 1, 1, 0]));
        let one_sided = ExpertPlacement::Layers(BTreeMap::from([(1, map_experts_to_ranks(&[1; 6]))]));
        for (world, parallel, placement, stage) in [
            (3, 1, balanced(), 3),
            (2, 2, balanced(), 0),
            (2, 2, one_sided, 1),
            (4, 2, uneven, 2),
            (6, 3, balanced(), 3),
            (3, 3, balanced(), 1),
        ] {
            let mut s = make(parallel, placement, stage);
            s.recompute = if stage % 2 == 0 { RecomputeMode::Block } else { RecomputeMode::None };
            let losses = train_new_run(&s, world, 1, 3);
            assert_eq!(losses, expected, "{precision:?}: world {world}, groups of {parallel}, stage {stage}");
        }
    }
}

/// Checks that training in 16 bits has the same bits on several hosts as on one rank. Token
/// dispatch then sends bf16 rows within and between hosts.
#[test]
fn sixteen_bit_training_across_hosts_has_the_same_bits() {
    let make = |parallel| {
        let mut s = create_moe_spec(6, parallel, ExpertPlacement::Balanced, 3);
        s.precision = Precision::Bf16;
        s
    };
    let expected = train_new_run(&make(1), 1, 1, 2);
    for hosts in [&[0, 0, 1, 1][..], &[0, 1]] {
        let losses = expect_equal_on_all_ranks(run_on_hosts(hosts, |c| {
            train_steps(&mut start_new_run(&make(2), c), 2)
        }));
        assert_eq!(losses, expected, "hosts {hosts:?}");
    }
}
