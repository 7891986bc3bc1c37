//! Layers with experts: the same bits for every number of workers, stage, expert-parallel size and placement; weights and
//! states follow a changed placement; whatever the routing is, nothing hangs and gradients are those of all experts on one rank.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::{ExpertPlacement, ExpertsSpec, ModelSpec, Precision, Recompute, TrainSpec};
use std::collections::BTreeMap;
use worker::{
    expert_layout::ExpertLayout,
    model::{Batch, Model, build},
    resume::{CheckpointDirs, resume},
    stages::RunningTrainer,
    storage_layout::StorageLayout,
    train::step::{SampleSource, StepReport},
};

/// Two experts of five, or of what is asked for.
fn mixture(family: &str, experts: u32, per_token: u32) -> ModelSpec {
    ModelSpec {
        family: family.into(),
        num_experts: Some(experts),
        num_experts_per_tok: Some(per_token),
        moe_intermediate_size: (family == "qwen3_moe").then_some(19),
        num_hidden_layers: 2,
        intermediate_size: 23,
        vocab_size: 67,
        ..odd_model()
    }
}

fn spec(experts: u32, parallel: u32, placement: ExpertPlacement, stage: u8) -> TrainSpec {
    let mut s = train_spec(mixture("qwen3_moe", experts, 2), stage, 8, 1, 11);
    s.experts = ExpertsSpec { expert_parallel_size: parallel, placement, aux_loss: Some(0.1), z_loss: 0.01 };
    s
}

/// Expert → rank, in the order of experts.
fn ranks(ranks: &[u32]) -> BTreeMap<u32, u32> {
    (0..).zip(ranks.iter().copied()).collect()
}

#[test]
fn any_world_and_stage() {
    for family in ["mixtral", "qwen3_moe"] {
        let make = |stage, recompute| {
            let mut s = train_spec(mixture(family, 5, 2), stage, 8, 1, 11);
            s.experts.z_loss = 0.01;
            s.recompute = recompute;
            s
        };
        let expected = fresh_run(&make(0, Recompute::None), 1, 1, 3);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
        for stage in 0..=3 {
            for world in [1, 2, 3, 4, 8] {
                let recompute = if world % 2 == 0 { Recompute::Block } else { Recompute::None };
                let got = fresh_run(&make(stage, recompute), world, 1 + world % 2, 3);
                assert_eq!(got, expected, "{family}: world {world}, stage {stage}");
            }
        }
    }
}

#[test]
fn any_size_of_groups_and_placement() {
    let balanced = || ExpertPlacement::Balanced;
    let expected = fresh_run(&spec(6, 1, balanced(), 0), 1, 1, 3);
    let uneven = ExpertPlacement::Experts(ranks(&[1, 1, 0, 1, 1, 0]));
    let one_sided = ExpertPlacement::Layers(BTreeMap::from([(1, ranks(&[1; 6]))]));
    let three = ExpertPlacement::Layers(BTreeMap::from([
        (0, ranks(&[2, 0, 1, 2, 0, 1])),
        (1, ranks(&[0, 0, 2, 0, 2, 0])),
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
            let mut s = spec(6, parallel, placement.clone(), stage);
            s.recompute = if stage % 2 == 0 { Recompute::Block } else { Recompute::None };
            let got = fresh_run(&s, world, 1, 3);
            assert_eq!(got, expected, "world {world}, groups of {parallel}, {placement:?}, stage {stage}");
        }
    }
}

/// Gradients added up as they come, of experts on their own ranks too: the tree's but for the last places.
#[test]
fn sums_in_the_order_of_slots() {
    let make = |parallel, stage, deterministic| TrainSpec {
        deterministic,
        ..spec(4, parallel, ExpertPlacement::Balanced, stage)
    };
    let tree = fresh_run(&make(1, 0, true), 1, 1, 3);
    for (parallel, stage, world) in [(1, 0, 1), (1, 3, 2), (2, 0, 2), (2, 3, 4), (4, 2, 4)] {
        let found = fresh_run(&make(parallel, stage, false), world, 1, 3);
        for (a, b) in found.iter().zip(&tree).flat_map(|(a, b)| [(a.0, b.0), (a.1, b.1)]) {
            let (a, b) = (f64::from_bits(a), f64::from_bits(b));
            assert!(
                (a - b).abs() <= 1e-5 * b.abs(),
                "parallel {parallel}, stage {stage}, {world} ranks: {a}, {b}"
            );
        }
    }
}

#[test]
fn slots_that_do_not_divide_and_ranks_without_any() {
    for global in [3, 5, 14] {
        let make = |parallel, stage| {
            let mut s = spec(6, parallel, ExpertPlacement::Balanced, stage);
            (s.batch.global, s.zero.prefetch) = (global, 3);
            s
        };
        let expected = fresh_run(&make(1, 0), 1, 1, 2);
        for (world, parallel, stage) in [(2, 2, 3), (4, 2, 2), (6, 3, 1), (6, 2, 3), (8, 2, 0)] {
            let got = fresh_run(&make(parallel, stage), world, 1, 2);
            assert_eq!(got, expected, "{global} slots, world {world}, groups of {parallel}, stage {stage}");
        }
    }
}

#[test]
fn groups_within_and_across_hosts() {
    let expected = fresh_run(&spec(6, 1, ExpertPlacement::Balanced, 3), 1, 1, 3);
    for hosts in [&[0, 0, 0, 0][..], &[0, 0, 1, 1], &[0, 1, 2, 3], &[0, 1, 1, 1]] {
        let s = spec(6, 2, ExpertPlacement::Experts(ranks(&[1, 0, 0, 1, 0, 1])), 3);
        let all = on_hosts(hosts, |c| steps(&mut build_run(&s, c), 3));
        assert!(all.iter().all(|r| *r == expected), "hosts {hosts:?}");
    }
}

#[test]
fn evaluations_have_no_part_of_the_routers_losses_and_the_same_bits() {
    let run = |s: &TrainSpec, world: usize| {
        let source = MadeUp { vocab: s.model.vocab_size };
        let all = on_ranks(world, |c| {
            let mut running = build_run(s, c);
            let evaluated = running.trainer.evaluate(&source, 40, 5).unwrap().loss;
            (
                evaluated.to_bits(),
                steps(&mut running, 2),
                running.trainer.evaluate(&source, 40, 5).unwrap().loss,
            )
        });
        assert!(all.iter().all(|r| *r == all[0]), "ranks disagree");
        all.into_iter().next().unwrap()
    };
    let alone = spec(6, 1, ExpertPlacement::Balanced, 0);
    let expected = run(&alone, 1);
    for (world, parallel, stage) in [(2, 2, 3), (4, 2, 2), (6, 3, 1)] {
        let s = spec(6, parallel, ExpertPlacement::Balanced, stage);
        assert_eq!(run(&s, world), expected, "world {world}, groups of {parallel}, stage {stage}");
    }
    let mut without = alone;
    (without.experts.aux_loss, without.experts.z_loss) = (Some(0.0), 0.0);
    let plain = run(&without, 1);
    assert_eq!(plain.0, expected.0);
    assert_ne!(plain.1, expected.1);
}

fn build_run(s: &TrainSpec, comm: std::sync::Arc<dyn comm::Comm>) -> RunningTrainer {
    common::build(s, comm, 1).start_fresh()
}

#[test]
fn weights_and_states_follow_another_placement() {
    let whole = fresh_run(&spec(6, 1, ExpertPlacement::Balanced, 3), 1, 1, 6);
    let first = spec(6, 2, ExpertPlacement::Experts(ranks(&[1, 1, 0, 1, 1, 0])), 3);
    let second =
        |stage| spec(6, 3, ExpertPlacement::Layers(BTreeMap::from([(0, ranks(&[2, 0, 1, 2, 0, 1]))])), stage);
    for stage in [0, 1, 3] {
        let dir = tempfile::tempdir().unwrap();
        let save = |running: &mut RunningTrainer, spec: &TrainSpec| {
            let mut saver = saver(running, &job(spec, dir.path(), false), dir.path());
            saver.begin(running).unwrap();
            saver.finish(running).unwrap();
        };
        on_ranks(4, |c| {
            let mut running = build_run(&first, c);
            assert_eq!(steps(&mut running, 3), whole[..3]);
            save(&mut running, &first);
        });
        for (world, next) in [(6, second(stage)), (1, spec(6, 1, ExpertPlacement::Balanced, stage))] {
            let told = std::sync::Mutex::new(Vec::new());
            let after = on_ranks(world, |c| {
                let leader = c.rank() == 0;
                let mut bound = common::build(&next, c, 1);
                let layout = StorageLayout::shared(world);
                let place = CheckpointDirs { root: dir.path(), workdir: dir.path(), layout: &layout };
                let job = job(&next, dir.path(), false);
                let resumed = resume(&mut bound, &job, &place, "made up", &mut |event| {
                    if leader {
                        told.lock().unwrap().push(format!("{event:?}"));
                    }
                    Ok(())
                });
                steps(&mut bound.start_at(resumed.unwrap().unwrap().cursor), 3)
            });
            assert!(after.iter().all(|a| *a == whole[3..]), "stage {stage}, world {world}");
            let told = told.into_inner().unwrap();
            assert_eq!(told.iter().filter(|t| t.contains("experts")).count(), 1, "{told:?}");
            assert!(!told.iter().any(|t| t.contains("parameter group")), "{told:?}");
        }
    }
}

/// Samples whose tokens all have a router's favourite: what is routed where is decided by the weights set below.
struct Tokens(Vec<u32>);

impl SampleSource for Tokens {
    fn fill(&self, first: u64, batch: &mut Batch) -> worker::error::Result<()> {
        let n = batch.rows();
        let at = first as usize / batch.b * n;
        batch.tokens.copy_from_slice(&self.0[at..at + n]);
        batch.labels.copy_from_slice(&self.0[at..at + n]);
        batch.starts.fill(0);
        Ok(())
    }
}

/// A number below `n` from a seed.
fn below(seed: &mut u64, n: usize) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 20) as usize % n
}

const EXPERTS: usize = 6;
const WORDS: usize = 12;

/// Each word's row of the embedding points at some experts' rows of the routers, which tell words apart.
fn steer(running: &mut RunningTrainer, favourites: &[usize]) {
    let engine = &running.trainer.engine;
    for (u, shard) in engine.shards.iter().enumerate() {
        let base = engine.resident_range(u).start;
        for seg in shard.unit.segments(engine.resident_range(u)) {
            let name = &shard.unit.params[seg.param].name;
            let (router, words) = (name.ends_with("mlp.gate.weight"), name == "model.embed_tokens.weight");
            if !router && !words {
                continue;
            }
            let d = running.trainer.model.hidden();
            engine.with_resident(u, |buf| {
                for (i, x) in
                    buf.host_mut()[seg.flat.start - base..seg.flat.end - base].iter_mut().enumerate()
                {
                    let (row, column) = ((seg.elements.start + i) / d, (seg.elements.start + i) % d);
                    let points = if router { row } else { favourites[row % WORDS] };
                    *x += if column == points { 3.0 } else { 0.0 };
                }
            });
        }
    }
}

/// Losses, norms and weights after two steps from one routing.
fn routed(
    spec: &TrainSpec,
    comm: std::sync::Arc<dyn comm::Comm>,
    seed: u64,
) -> (Vec<(u64, u64)>, Vec<Vec<u64>>) {
    let mut seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    // All to one expert, all to two of them, or anything: some get none.
    let kinds = [1, 2, EXPERTS][below(&mut seed, 3)];
    let first = below(&mut seed, EXPERTS);
    let favourites: Vec<usize> = (0..WORDS).map(|_| (first + below(&mut seed, kinds)) % EXPERTS).collect();
    let tokens = (0..2 * 4 * 5).map(|_| below(&mut seed, WORDS) as u32).collect();
    let mut running = build_run(spec, comm);
    steer(&mut running, &favourites);
    let source = Tokens(tokens);
    let outcomes = (0..2).map(|_| running.step(&source, StepReport::default()).unwrap().0);
    let outcomes = outcomes.map(|o| (o.loss.to_bits(), o.grad_norm.to_bits())).collect();
    (outcomes, running.trainer.experts.as_ref().unwrap().expert_counts())
}

/// A tiny model: two layers of six experts, of which each token goes to one or two.
fn tiny(seed: u64, parallel: u32) -> TrainSpec {
    let mut s = spec(EXPERTS as u32, parallel, ExpertPlacement::Balanced, 3);
    s.model = ModelSpec {
        vocab_size: WORDS as u32,
        hidden_size: 8,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 4,
        moe_intermediate_size: Some(4),
        ..mixture("qwen3_moe", EXPERTS as u32, 1 + (seed % 2) as u32)
    };
    (s.batch.global, s.batch.micro, s.data.seq_len, s.seed) = (4, 1, 5, seed);
    let mut random = seed | 1;
    if parallel == 4 || (parallel > 1 && !seed.is_multiple_of(3)) {
        let place: Vec<u32> = (0..EXPERTS).map(|_| below(&mut random, parallel as usize) as u32).collect();
        s.experts.placement = ExpertPlacement::Experts(ranks(&place));
    }
    s
}

#[test]
fn a_thousand_routings_on_four_ranks() {
    let (mut expected, mut all, mut none, mut several) = (Vec::new(), 0, 0, 0);
    for seed in 0..1000 {
        let alone = std::sync::Arc::new(comm::local::group(1).remove(0));
        let (outcomes, chosen) = routed(&tiny(seed, 1), alone, seed);
        expected.push(outcomes);
        // Of the last of four slots, which has five tokens.
        all += chosen.iter().filter(|layer| layer.contains(&5)).count();
        none += chosen.iter().filter(|layer| layer.contains(&0)).count();
        several += chosen.iter().filter(|layer| layer.iter().filter(|n| **n > 0).count() > 3).count();
    }
    assert!(
        all > 100 && none > 1000 && several > 100,
        "of 2,000: {all} with all to one, {none} with an idle one"
    );
    let got = on_ranks(4, |c| {
        let parallel = |seed| [2, 4][seed as usize % 2];
        (0..1000).map(|seed| routed(&tiny(seed, parallel(seed)), c.clone(), seed).0).collect::<Vec<_>>()
    });
    for rank in &got {
        for (seed, (got, expected)) in rank.iter().zip(&expected).enumerate() {
            assert_eq!(got, expected, "routing {seed}");
        }
    }
}

/// With every expert chosen for every token the loss has no jumps.
#[test]
fn the_gradient_of_the_whole_loss_is_that_of_finite_differences() {
    let mut spec = spec(3, 1, ExpertPlacement::Balanced, 3);
    spec.model = mixture("qwen3_moe", 3, 3);
    (spec.experts.z_loss, spec.batch.global, spec.seed) = (0.5, 2, 3);
    let source = MadeUp { vocab: spec.model.vocab_size };
    let alone = std::sync::Arc::new(comm::local::group(1).remove(0));
    let mut running = build_run(&spec, alone);
    let outcome = running.trainer.accumulate(&source, 0, StepReport::default()).unwrap();
    let mean = f64::from(2 * spec.data.seq_len) / outcome.targets as f64;
    let (mut grads, mut names) = (Vec::new(), Vec::new());
    for u in 0..running.trainer.engine.shards.len() {
        grads.push(running.trainer.engine.finish_gradient(u).unwrap());
        let unit = &running.trainer.engine.shards[u].unit;
        let found = (0..unit.params.len()).filter(|&i| {
            let name = &unit.params[i].name;
            ["mlp.gate.weight", "experts.1.up_proj.weight", "experts.2.down_proj.weight"]
                .iter()
                .any(|n| name.ends_with(n))
        });
        names.extend(found.map(|i| (u, unit.params[i].name.clone(), unit.range(i))));
    }
    assert_eq!(names.len(), 6);
    for (u, name, range) in names {
        let of = &grads[u].host()[range.clone()];
        // The largest element: finite differences of a loss in f32 see no small ones.
        let (i, largest) =
            (0..of.len()).map(|i| (i, of[i])).max_by(|a, b| a.1.abs().total_cmp(&b.1.abs())).unwrap();
        let mut loss = |by: f32| {
            running.trainer.engine.with_resident(u, |p| p.host_mut()[range.start + i] += by);
            let loss = running.trainer.accumulate(&source, 0, StepReport::default()).unwrap().loss;
            running.trainer.engine.with_resident(u, |p| p.host_mut()[range.start + i] -= by);
            for u in 0..running.trainer.engine.shards.len() {
                let spent = running.trainer.engine.finish_gradient(u).unwrap();
                running.trainer.engine.recycle(u, spent);
            }
            loss
        };
        const H: f32 = 0.02;
        let (want, got) = ((loss(H) - loss(-H)) / f64::from(2.0 * H), f64::from(largest) * mean);
        assert!((want - got).abs() <= 0.02 * want.abs() + 2e-5, "{name}: {got:e}, differences say {want:e}");
    }
}

#[test]
fn routings_over_shared_memory() {
    let alone = |seed| routed(&tiny(seed, 1), std::sync::Arc::new(comm::local::group(1).remove(0)), seed).0;
    let expected: Vec<_> = (0..40).map(alone).collect();
    let got = on_hosts(&[0, 0, 0, 0], |c| {
        (0..40).map(|seed| routed(&tiny(seed, 2), c.clone(), seed).0).collect::<Vec<_>>()
    });
    assert!(got.iter().all(|g| *g == expected));
}

/// The code and key of the error of a placement; `None` if it is valid.
fn placement_error(
    model: &dyn Model,
    parallel: u32,
    placement: ExpertPlacement,
    world: usize,
) -> Option<(&'static str, String)> {
    let spec = ExpertsSpec { expert_parallel_size: parallel, placement, ..ExpertsSpec::default() };
    let error = ExpertLayout::new(&spec, model, 2, world).err()?;
    Some((error.code().name(), error.subject().unwrap_or_default().to_owned()))
}

#[test]
fn an_invalid_placement_is_rejected_by_its_key() {
    const SIZE: (&str, &str) = ("expert-parallel-size-invalid", "train.experts.expert_parallel_size");
    const PLACEMENT: (&str, &str) = ("expert-placement-invalid", "train.experts.placement");
    let balanced = || ExpertPlacement::Balanced;
    let model = build(&ModelSpec { max_position_embeddings: 8, ..mixture("mixtral", 6, 2) }, 8).unwrap();
    let error = |parallel, placement, world| placement_error(model.as_ref(), parallel, placement, world);
    let is = |error: Option<(&'static str, String)>, (code, key): (&str, &str)| {
        assert_eq!(error.as_ref().map(|(code, key)| (*code, key.as_str())), Some((code, key)));
    };
    assert_eq!(error(2, balanced(), 4), None);
    is(error(2, balanced(), 3), SIZE);
    is(error(4, balanced(), 4), SIZE);
    assert_eq!(error(4, ExpertPlacement::Experts(ranks(&[0, 1, 2, 3, 0, 0])), 4), None);
    // Expert 5 has no rank; expert 6 does not exist; there is no rank 2; layer 2 has no experts.
    is(error(2, ExpertPlacement::Experts(ranks(&[0, 1, 0, 1, 0])), 2), PLACEMENT);
    is(error(2, ExpertPlacement::Experts(ranks(&[0, 1, 0, 1, 0, 1, 1])), 2), PLACEMENT);
    let layers = |layer, experts| ExpertPlacement::Layers(BTreeMap::from([(layer, ranks(experts))]));
    is(error(2, layers(1, &[0, 1, 2, 0, 0, 0]), 2), PLACEMENT);
    is(error(2, layers(2, &[0; 6]), 2), ("experts-not-in-model", "train.experts.placement"));
    let dense = build(&ModelSpec { max_position_embeddings: 8, ..odd_model() }, 8).unwrap();
    is(placement_error(dense.as_ref(), 2, balanced(), 2), ("experts-not-in-model", "train.experts"));
    let keys = build(&ModelSpec { num_experts: Some(4), ..odd_model() }, 8).err().unwrap();
    assert_eq!(keys, "`num_experts` has no effect in the family `llama`: remove it");
}

#[test]
fn sixteen_bits_for_any_size_of_groups_and_placement() {
    let balanced = || ExpertPlacement::Balanced;
    for precision in [Precision::Bf16, Precision::Fp16] {
        let make = |parallel, placement, stage| {
            let mut s = spec(6, parallel, placement, stage);
            (s.precision, s.loss_scale.initial_scale_power) = (precision, 12);
            s
        };
        let expected = fresh_run(&make(1, balanced(), 0), 1, 1, 3);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
        assert_ne!(expected, fresh_run(&spec(6, 1, balanced(), 0), 1, 1, 3));
        let uneven = ExpertPlacement::Experts(ranks(&[1, 1, 0, 1, 1, 0]));
        let one_sided = ExpertPlacement::Layers(BTreeMap::from([(1, ranks(&[1; 6]))]));
        for (world, parallel, placement, stage) in [
            (3, 1, balanced(), 3),
            (2, 2, balanced(), 0),
            (2, 2, one_sided, 1),
            (4, 2, uneven, 2),
            (6, 3, balanced(), 3),
            (3, 3, balanced(), 1),
        ] {
            let mut s = make(parallel, placement, stage);
            s.recompute = if stage % 2 == 0 { Recompute::Block } else { Recompute::None };
            let got = fresh_run(&s, world, 1, 3);
            assert_eq!(got, expected, "{precision:?}: world {world}, groups of {parallel}, stage {stage}");
        }
    }
}

/// Rows travel in 16 bits, between hosts too.
#[test]
fn sixteen_bits_across_hosts() {
    let make = |parallel| {
        let mut s = spec(6, parallel, ExpertPlacement::Balanced, 3);
        s.precision = Precision::Bf16;
        s
    };
    let expected = fresh_run(&make(1), 1, 1, 2);
    for hosts in [&[0, 0, 1, 1][..], &[0, 1]] {
        let all = on_hosts(hosts, |c| steps(&mut build_run(&make(2), c), 2));
        assert!(all.iter().all(|r| *r == expected), "hosts {hosts:?}");
    }
}
