//! A part of a model trained, groups of the optimizer: against real torch (tests/golden/tuned/README.md), the same bits for
//! any number of workers, and freezing and unfreezing between runs.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use ckpt::{Checkpoint, TensorRole};
use common::{
    golden::{self, Case, case, json},
    *,
};
use contract::job::*;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};
use worker::{
    resume::{CheckpointDirs, PretrainedModel, resume},
    stages::{Cursor, ResolvedSpec, RunningTrainer},
    storage_layout::StorageLayout,
    train::step::StepReport,
};

const CASES: [&str; 8] =
    ["frozen_prefix", "frozen_tied", "train_only", "head_alone", "groups", "lion", "muon", "muon_gpt2"];

fn golden_folder(kind: &str, name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(kind).join(name)
}

fn texts(v: &Value) -> Vec<String> {
    v.as_array().unwrap().iter().map(|t| t.as_str().unwrap().to_owned()).collect()
}

fn group(v: &Value) -> GroupSpec {
    let betas = v["betas"].as_array().map(|b| (b[0].as_f64().unwrap(), b[1].as_f64().unwrap()));
    GroupSpec {
        r#match: texts(&v["match"]),
        lr: v["lr"].as_f64(),
        lr_scale: v["lr_scale"].as_f64(),
        weight_decay: v["weight_decay"].as_f64(),
        betas,
        ..GroupSpec::default()
    }
}

fn load(name: &str) -> Case {
    let dir = golden_folder("tuned", name);
    let about = json(&dir.join("case.json"));
    let from = golden_folder("families", about["family"].as_str().unwrap());
    let model = ModelSpec { from: Some(from), rms_norm_eps: 1e-5, vocab_size: 0, ..odd_model() };
    let mut case = case(&about, model, &std::fs::read(dir.join("answers.safetensors")).unwrap());
    (case.spec.freeze, case.spec.train_only) = (texts(&about["freeze"]), texts(&about["train_only"]));
    case.spec.optimizer.groups = about["groups"].as_array().unwrap().iter().map(group).collect();
    case
}

fn started(spec: &TrainSpec, comm: Arc<dyn comm::Comm>) -> RunningTrainer {
    let mut origin = PretrainedModel::open(spec.model.from.as_deref(), comm.as_ref()).unwrap().unwrap();
    let mut bound = build(spec, comm, 1);
    origin.load(&mut bound, &mut |event| panic!("{event:?}")).unwrap();
    bound.start_at(Cursor::default())
}

#[test]
fn logits_gradients_and_steps() {
    for name in CASES {
        println!("{name}");
        golden::check(&load(name), |case| started(&case.spec, Arc::new(comm::local::group(1).remove(0))));
    }
}

/// The odd model with half of it frozen: a whole unit, parts of others, parts of what is multiplied as one.
fn half(stage: u8) -> TrainSpec {
    let mut s = train_spec(odd_model(), stage, 8, 1, 11);
    s.freeze = ["model.embed_tokens.*", "*.0.*", "*.q_proj.*", "*.2.mlp.up_proj.*", "*post_attention*"]
        .map(Into::into)
        .into();
    s.optimizer.groups =
        vec![GroupSpec { r#match: vec!["*.1.*".into()], lr_scale: Some(0.5), ..GroupSpec::default() }];
    s
}

#[test]
fn any_world_stage_and_recomputation() {
    let expected = fresh_run(&half(0), 1, 1, 3);
    assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
    for stage in 0..=3 {
        for world in [1, 2, 3, 4, 8] {
            let mut spec = half(stage);
            if (stage as usize + world).is_multiple_of(2) {
                spec.recompute = Recompute::Block;
            }
            assert_eq!(fresh_run(&spec, world, 1, 3), expected, "world {world}, stage {stage}");
        }
    }
    for only in ["lm_head.*", "model.embed_tokens.*", "*.2.self_attn.o_proj.*"] {
        let spec = |stage| TrainSpec {
            train_only: vec![only.into()],
            freeze: Vec::new(),
            optimizer: OptimizerSpec { groups: Vec::new(), ..half(0).optimizer },
            ..half(stage)
        };
        let expected = fresh_run(&spec(0), 1, 1, 3);
        for (stage, world) in [(0, 3), (1, 2), (2, 4), (3, 3)] {
            assert_eq!(
                fresh_run(&spec(stage), world, 1, 3),
                expected,
                "{only}: world {world}, stage {stage}"
            );
        }
    }
}

/// Every gradient of the first step by name, as bits; on one rank.
fn gradients(spec: &TrainSpec) -> BTreeMap<String, Vec<u32>> {
    let mut running = started(spec, Arc::new(comm::local::group(1).remove(0)));
    running.trainer.accumulate(&MadeUp { vocab: 61 }, 0, StepReport::default()).unwrap();
    let mut all = BTreeMap::new();
    for u in 0..running.trainer.engine.shards.len() {
        let sum = running.trainer.engine.finish_gradient(u).unwrap();
        let mut rest = sum.host();
        for p in running.trainer.engine.shards[u].unit.trained_params() {
            let (own, after) = rest.split_at(p.len());
            rest = after;
            all.insert(p.name.clone(), own.iter().map(|x| x.to_bits()).collect());
        }
    }
    all
}

/// GPT-2's layers are their own: what is trained of them has the gradients that it has in the whole model.
#[test]
fn parts_of_gpt2_have_the_gradients_of_the_whole() {
    for name in ["gpt2", "gpt2_packed"] {
        let from = golden_folder("families", name);
        let model = ModelSpec { from: Some(from), vocab_size: 0, ..odd_model() };
        let whole = train_spec(model, 3, 4, 1, 13);
        let all = gradients(&whole);
        for freeze in [
            &["*.c_attn.weight", "*.0.mlp.c_fc.weight"][..],
            &["*.c_proj.weight", "transformer.wpe.*"],
            &["*.wte.*", "lm_head.*", "*.1.*"],
            &["transformer.h.*.weight", "*.ln_f.*"],
        ] {
            // A tied head has no name of its own.
            let freeze: Vec<String> = freeze
                .iter()
                .filter(|p| **p != "lm_head.*" || all.contains_key("lm_head.weight"))
                .map(|p| (*p).into())
                .collect();
            let spec = TrainSpec { freeze: freeze.clone(), ..whole.clone() };
            let part = gradients(&spec);
            assert!(!part.is_empty() && part.len() < all.len());
            part.iter().for_each(|(key, bits)| assert!(*bits == all[key], "{name}, {freeze:?}: {key}"));
        }
    }
}

/// Frozen parts and groups in 16 bits: any world and stage, and across a resume.
#[test]
fn sixteen_bits_with_frozen_parts() {
    for precision in [Precision::Bf16, Precision::Fp16] {
        let make = |stage| TrainSpec { precision, ..half(stage) };
        let expected = fresh_run(&make(0), 1, 1, 4);
        assert_ne!(expected, fresh_run(&half(0), 1, 1, 4), "16 bits are not 32");
        for (stage, world) in [(0, 3), (1, 2), (2, 4), (3, 3), (3, 8)] {
            let mut spec = make(stage);
            spec.recompute = if world % 2 == 0 { Recompute::Block } else { Recompute::None };
            assert_eq!(
                fresh_run(&spec, world, 1, 4),
                expected,
                "{precision:?}: world {world}, stage {stage}"
            );
        }
        let dir = tempfile::tempdir().unwrap();
        on_ranks(3, |c| {
            let mut running = build(&make(1), c, 1).start_fresh();
            steps(&mut running, 2);
            save(&mut running, &make(1), dir.path());
        });
        for (stage, world) in [(3, 2), (0, 1)] {
            let after = on_ranks(world, |c| {
                let (mut running, told) = go_on(&make(stage), c, dir.path());
                assert_eq!(told.len(), 1, "nothing but the resume to tell: {told:?}");
                steps(&mut running, 2)
            });
            assert!(after.iter().all(|a| *a == expected[2..]), "to {world} at stage {stage}");
        }
    }
}

#[test]
fn whole_matrices_move_alike_in_any_world_and_stage() {
    for family in ["llama", "mixtral"] {
        let spec = |stage| {
            let mut spec = half(stage);
            spec.model.family = family.into();
            (spec.optimizer.name, spec.optimizer.momentum) = (OptimizerName::Muon, 0.95);
            spec.freeze.retain(|p| family == "llama" || !p.contains("mlp"));
            spec
        };
        let expected = fresh_run(&spec(0), 1, 1, 3);
        assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
        for (stage, world, parallel) in [
            (0, 2, 1),
            (0, 3, 1),
            (1, 3, 1),
            (1, 4, 2),
            (2, 2, 2),
            (2, 8, 1),
            (3, 3, 1),
            (3, 4, 4),
            (3, 8, 2),
        ] {
            let mut spec = spec(stage);
            if family == "mixtral" {
                spec.experts.expert_parallel_size = parallel;
            }
            assert_eq!(fresh_run(&spec, world, 1, 3), expected, "{family}: world {world}, stage {stage}");
        }
    }
}

#[test]
fn a_run_with_whole_matrices_goes_on_with_the_same_bits() {
    let muon = |stage| {
        let mut spec = half(stage);
        (spec.optimizer.name, spec.optimizer.momentum) = (OptimizerName::Muon, 0.95);
        spec
    };
    let expected = fresh_run(&muon(0), 1, 1, 5).split_off(3);
    for (from, n, to, m) in [(3, 3, 0, 2), (0, 2, 3, 4)] {
        let dir = tempfile::tempdir().unwrap();
        on_ranks(n, |c| {
            let mut running = build(&muon(from), c, 1).start_fresh();
            steps(&mut running, 3);
            save(&mut running, &muon(from), dir.path());
        });
        let after = on_ranks(m, |c| steps(&mut go_on(&muon(to), c, dir.path()).0, 2));
        assert!(after.iter().all(|a| *a == expected), "{n} workers at stage {from} to {m} at stage {to}");
    }
}

fn save(running: &mut RunningTrainer, spec: &TrainSpec, root: &Path) {
    let mut saver = saver(running, &job(spec, root, false), root);
    saver.begin(running).unwrap();
    saver.finish(running).unwrap();
}

/// Goes on from the newest checkpoint under `root`; also what was told.
fn go_on(spec: &TrainSpec, comm: Arc<dyn comm::Comm>, root: &Path) -> (RunningTrainer, Vec<String>) {
    let world = comm.world();
    let mut bound = build(spec, comm, 1);
    let mut told = Vec::new();
    let place = CheckpointDirs { root, workdir: root, layout: &StorageLayout::shared(world) };
    let resumed = resume(&mut bound, &job(spec, root, false), &place, "made up", &mut |e| {
        told.push(format!("{e:?}"));
        Ok(())
    });
    let cursor = resumed.unwrap().expect("a checkpoint to resume from").cursor;
    (bound.start_at(cursor), told)
}

#[test]
fn a_run_with_frozen_parts_goes_on_with_the_same_bits() {
    let expected = fresh_run(&half(0), 1, 1, 5).split_off(3);
    for (from, n, to, m) in [(3, 3, 1, 2), (0, 2, 3, 4), (2, 4, 0, 1), (1, 1, 2, 3)] {
        let dir = tempfile::tempdir().unwrap();
        on_ranks(n, |c| {
            let mut running = build(&half(from), c, 1).start_fresh();
            steps(&mut running, 3);
            save(&mut running, &half(from), dir.path());
        });
        let checkpoint = Checkpoint::open(&dir.path().join("step-00000003")).unwrap();
        let frozen = &checkpoint.facts().model.frozen;
        assert!(frozen.contains(&"model.layers.0.mlp.down_proj.weight".to_owned()), "{frozen:?}");
        let states = checkpoint.tensors().filter(|t| t.role == TensorRole::ExpAvg).count();
        let weights = checkpoint.tensors().filter(|t| t.role == TensorRole::Weight).count();
        assert_eq!(states + frozen.len(), weights);
        let after = on_ranks(m, |c| {
            let (mut running, told) = go_on(&half(to), c, dir.path());
            assert_eq!(told.len(), 1, "nothing but the resume to tell: {told:?}");
            steps(&mut running, 2)
        });
        assert!(after.iter().all(|a| *a == expected), "{n} workers at stage {from} to {m} at stage {to}");
    }
}

/// All parameters by name, of a run with one rank.
fn values(running: &RunningTrainer) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    golden::params(running, |name, v| drop(all.insert(name.to_owned(), v.to_vec())));
    all
}

#[test]
fn freezing_keeps_the_states_that_apply_and_unfreezing_begins_anew() {
    const FROZEN: &str = "model.layers.1.mlp.gate_proj.weight";
    let whole = |stage| {
        let mut spec = train_spec(odd_model(), stage, 8, 1, 11);
        spec.clip_norm = None;
        spec.optimizer.weight_decay = 0.0;
        spec.schedule.name = ScheduleName::Constant;
        spec.schedule.warmup_steps = 0;
        spec
    };
    let frozen = |stage| TrainSpec { freeze: vec![FROZEN.into()], ..whole(stage) };
    let dir = tempfile::tempdir().unwrap();
    on_ranks(2, |c| {
        let mut running = build(&whole(3), c, 1).start_fresh();
        steps(&mut running, 3);
        save(&mut running, &whole(3), dir.path());
    });
    // frozen: the others' states are the checkpoint's
    let one = || Arc::new(comm::local::group(1).remove(0));
    let (running, told) = go_on(&frozen(0), one(), dir.path());
    assert!(told.iter().any(|t| t.contains("are frozen but were trained") && t.contains(FROZEN)), "{told:?}");
    let checkpoint = Checkpoint::open(&dir.path().join("step-00000003")).unwrap();
    for (u, shard) in running.trainer.engine.shards.iter().enumerate() {
        let mut rest = running.trainer.optimizer.states(u).first.view().host();
        for p in shard.unit.trained_params() {
            let mut kept = vec![0.0; p.len()];
            checkpoint.read_f32(&p.name, TensorRole::ExpAvg, 0..p.len() as u64, &mut kept).unwrap();
            let (ours, after) = rest.split_at(p.len());
            rest = after;
            assert_eq!(ours, kept, "{}", p.name);
        }
        assert!(rest.is_empty());
    }
    let before = values(&running);
    let losses = on_ranks(3, |c| {
        let (mut running, _) = go_on(&frozen(2), c, dir.path());
        let losses = steps(&mut running, 2);
        save(&mut running, &frozen(2), dir.path());
        losses
    });
    let (mut alone, _) = {
        // the newest is now the one at step 5
        let (running, told) = go_on(&frozen(1), one(), dir.path());
        assert_eq!(values(&running)[FROZEN], before[FROZEN], "frozen weights stay as they were");
        (running, told)
    };
    assert!(losses.iter().all(|l| *l == losses[0]));
    let expected = steps(&mut alone, 1);
    // unfrozen: its first update is Adam's first, lr in every element with a gradient
    let (mut running, told) = go_on(&whole(0), one(), dir.path());
    assert!(told.iter().any(|t| t.contains("start at zero") && t.contains(FROZEN)), "{told:?}");
    let before = values(&running);
    assert_eq!(steps(&mut running, 1)[0].0, expected[0].0, "the same weights, the same loss");
    let (after, lr) = (values(&running), running.train().optimizer.lr as f32);
    let moved: Vec<f32> = after[FROZEN].iter().zip(&before[FROZEN]).map(|(a, b)| (a - b).abs()).collect();
    assert!(moved.iter().all(|m| *m <= lr * 1.001), "more than a first step");
    let firsts = moved.iter().filter(|m| **m >= lr * 0.98).count();
    assert!(firsts * 10 >= moved.len() * 9, "{firsts} of {} moved by lr", moved.len());
    // its own count is kept
    save(&mut running, &whole(0), dir.path());
    let checkpoint = Checkpoint::open(&dir.path().join("step-00000006")).unwrap();
    assert_eq!(checkpoint.facts().cursor["late"], serde_json::json!({ FROZEN: 5 }));
}

/// The code and key of the error of building the job; `None` if it can be built.
fn build_error(change: impl Fn(&mut TrainSpec)) -> Option<(&'static str, String)> {
    let mut spec = train_spec(odd_model(), 3, 2, 1, 11);
    change(&mut spec);
    let comm: Arc<dyn comm::Comm> = Arc::new(comm::local::group(1).remove(0));
    let ops: Arc<dyn device::Ops> = Arc::new(device::Cpu::new(1));
    let model = ResolvedSpec::new(&spec, spec.model.vocab_size).unwrap().build_model();
    let error = model.and_then(|m| m.shard(comm, ops)?.create_optimizer()).err()?;
    Some((error.code().name(), error.diagnostic().subject().unwrap_or_default().to_owned()))
}

#[test]
fn patterns_that_match_nothing_are_rejected_by_their_key() {
    let list = |p: &str| vec![p.to_owned()];
    let of = |p: &str| vec![GroupSpec { r#match: list(p), ..GroupSpec::default() }];
    let (unmatched, invalid) = ("parameter-pattern-unmatched", "parameter-pattern-invalid");
    for (error, code, key) in [
        (build_error(|s| s.freeze = list("*.9.*")), unmatched, "train.freeze"),
        (build_error(|s| s.freeze = list("*")), "no-trained-parameters", "train.freeze"),
        (build_error(|s| s.freeze = list("[")), invalid, "train.freeze"),
        (build_error(|s| s.train_only = list("transformer.*")), unmatched, "train.train_only"),
        (build_error(|s| s.optimizer.groups = of("*.bias")), unmatched, "train.optimizer.groups"),
        (build_error(|s| s.optimizer.no_decay = list("{")), invalid, "train.optimizer.no_decay"),
    ] {
        assert_eq!(error, Some((code, key.to_owned())));
    }
    let frozen = build_error(|s| (s.freeze, s.optimizer.groups) = (list("*.0.*"), of("*.layers.0.*")));
    assert_eq!(frozen, Some((unmatched, "train.optimizer.groups".to_owned())), "it matches only frozen ones");
    // A pattern may name a tied matrix by its second name.
    let tied = build_error(|s| {
        s.model.tie_word_embeddings = true;
        s.freeze = list("lm_head.weight");
    });
    assert_eq!(tied, None);
}
