//! Low-rank adapters: against real PEFT (tests/golden/lora/README.md), the same bits for any number of workers, gradients
//! against differences of the loss, and what is read and gathered.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use ckpt::{Checkpoint, GatherOptions, peft::AdapterConfig};
use comm::Comm;
use common::{
    golden::{self, Case, case, json},
    *,
};
use contract::job::*;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};
use worker::{
    resume::{CheckpointDirs, PretrainedModel, check_adapters, resume, start_from_model},
    stages::RunningTrainer,
    storage_layout::StorageLayout,
};

const CASES: [&str; 7] = ["q_v", "all_linear", "rslora", "one_module", "gemma", "gpt2", "experts"];

fn folder(kind: &str, name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(kind).join(name)
}

fn new(rank: u32, dropout: f64) -> LoraSpec {
    let targets = LoraTargets::AllLinear;
    LoraSpec {
        from: None,
        rank,
        alpha: 2.0 * f64::from(rank),
        dropout: Some(dropout),
        rslora: false,
        targets,
    }
}

fn from_adapter(adapter: PathBuf) -> LoraSpec {
    LoraSpec { from: Some(adapter), dropout: None, ..new(1, 0.0) }
}

/// The folder of a family.
fn base(family: &str) -> ModelSpec {
    ModelSpec { from: Some(folder("families", family)), rms_norm_eps: 1e-5, vocab_size: 0, ..odd_model() }
}

fn load(name: &str) -> Case {
    let dir = folder("lora", name);
    let about = json(&dir.join("case.json"));
    let model = base(about["family"].as_str().unwrap());
    let mut case = case(&about, model, &std::fs::read(dir.join("answers.safetensors")).unwrap());
    case.spec.lora = Some(from_adapter(dir.join("adapter")));
    case
}

fn started(spec: &TrainSpec, comm: Arc<dyn Comm>) -> RunningTrainer {
    let mut origin = PretrainedModel::open(spec.model.from.as_deref(), comm.as_ref()).unwrap();
    start_from_model(build(spec, comm, 1), origin.as_mut(), &mut |event| panic!("{event:?}")).unwrap()
}

fn alone() -> Arc<dyn Comm> {
    Arc::new(comm::local::group(1).remove(0))
}

#[test]
fn logits_gradients_and_steps() {
    for name in CASES {
        println!("{name}");
        golden::check(&load(name), |case| started(&case.spec, alone()));
    }
}

/// Saves the run of every rank as it begins, and gathers it in both ways: adapters alone, merged.
fn gathered(spec: &TrainSpec, world: usize, dir: &Path) -> [PathBuf; 2] {
    on_ranks(world, |c| save(&mut started(spec, c), spec, dir));
    let checkpoint = Checkpoint::open(&dir.join("step-00000000")).unwrap();
    [false, true].map(|merge_lora| {
        let out = dir.join(if merge_lora { "merged" } else { "adapter" });
        // a tiny limit: PEFT knows one file only
        let max_shard_size = if merge_lora { 5_000_000 } else { 10 };
        let options = GatherOptions { merge_lora, max_shard_size, ..GatherOptions::default() };
        assert!(ckpt::gather(&checkpoint, &out, &options, |_, _| {}).unwrap().config);
        out
    })
}

fn save(running: &mut RunningTrainer, spec: &TrainSpec, dir: &Path) -> PathBuf {
    let mut saver = saver(running, &job(spec, dir, false), dir);
    saver.begin(running).unwrap();
    saver.finish(running).unwrap().unwrap().path
}

fn weights(file: PathBuf) -> BTreeMap<String, Vec<f32>> {
    golden::tensors(&std::fs::read(file).unwrap())
}

#[test]
fn adapters_come_out_as_they_went_in_and_merged_as_peft_merges() {
    for (name, world) in CASES.into_iter().zip([1, 3, 2, 4, 1, 2, 3]) {
        let (case, dir) = (load(name), tempfile::tempdir().unwrap());
        let [adapter, merged] = gathered(&case.spec, world, dir.path());
        let theirs = folder("lora", name).join("adapter");
        let file = "adapter_model.safetensors";
        assert_eq!(weights(adapter.join(file)), weights(theirs.join(file)), "{name}");
        let (a, b) = (AdapterConfig::read(&adapter).unwrap(), AdapterConfig::read(&theirs).unwrap());
        let numbers = |c: &AdapterConfig| AdapterConfig { targets: Vec::new(), ..c.clone() };
        assert_eq!(numbers(&a), numbers(&b), "{name}");
        let config = json(&adapter.join("adapter_config.json"));
        assert!(config["base_model_name_or_path"].as_str().unwrap().contains("families"), "{config}");

        let before = weights(case.spec.model.from.as_ref().unwrap().join("model.safetensors"));
        let after = weights(merged.join("model.safetensors"));
        assert!(before.keys().eq(after.keys()), "{name}");
        let mut changed = 0;
        for (weight, ours) in &after {
            match case.tensors.get(&format!("merged/{weight}")) {
                None => assert_eq!(ours, &before[weight], "{name}: {weight} has no adapter"),
                Some(theirs) => {
                    changed += 1;
                    let size = theirs.iter().fold(0f32, |m, x| m.max(x.abs()));
                    let far = ours.iter().zip(theirs).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                    assert!(far <= 1e-6 * size, "{name}: {weight}: {far} of {size}");
                }
            }
        }
        assert_eq!(changed, case.tensors.keys().filter(|k| k.starts_with("merged/")).count(), "{name}");
        assert!(changed > 0 && !merged.join("adapter_config.json").exists());
    }
}

#[test]
fn a_checkpoint_without_adapters_has_none_to_merge() {
    let (spec, dir) = (train_spec(odd_model(), 0, 2, 1, 11), tempfile::tempdir().unwrap());
    let mut running = build(&spec, alone(), 1).start_fresh();
    let path = save(&mut running, &spec, dir.path());
    let options = GatherOptions { merge_lora: true, ..GatherOptions::default() };
    let out = dir.path().join("out");
    let e = ckpt::gather(&Checkpoint::open(&path).unwrap(), &out, &options, |_, _| {}).unwrap_err();
    assert!(e.to_string().contains("no low-rank adapters to merge"), "{e}");
    assert!(!out.exists());
}

fn adapted(model: ModelSpec, stage: u8) -> TrainSpec {
    TrainSpec { lora: Some(new(3, 0.25)), ..train_spec(model, stage, 8, 1, 11) }
}

#[test]
fn any_world_stage_and_recomputation_with_dropout() {
    let expected = fresh_run(&adapted(odd_model(), 0), 1, 1, 3);
    assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
    for stage in 0..=3 {
        for world in [1, 2, 3, 4, 8] {
            let mut spec = adapted(odd_model(), stage);
            if (stage as usize + world).is_multiple_of(2) {
                spec.recompute = Recompute::Block;
            }
            assert_eq!(fresh_run(&spec, world, 1, 3), expected, "world {world}, stage {stage}");
        }
    }
    let mut other = adapted(odd_model(), 0);
    other.lora = Some(new(3, 0.0));
    assert_ne!(fresh_run(&other, 1, 1, 3), expected, "dropout changes the losses");
}

#[test]
fn any_size_of_expert_groups() {
    let spec = |stage, parallel| {
        let mut spec = adapted(base("mixtral"), stage);
        spec.experts.expert_parallel_size = parallel;
        spec
    };
    let run = |stage, parallel, world| {
        let all = on_ranks(world, |c| steps(&mut started(&spec(stage, parallel), c), 3));
        assert!(all.iter().all(|r| *r == all[0]), "ranks disagree");
        all.into_iter().next().unwrap()
    };
    let expected = run(0, 1, 1);
    for (stage, parallel, world) in [(0, 2, 2), (3, 1, 3), (2, 4, 4), (3, 2, 4), (1, 2, 8)] {
        assert_eq!(run(stage, parallel, world), expected, "{parallel} of {world}, stage {stage}");
    }
}

/// Adapters, new ones and beside a folder's weights, in 16 bits.
#[test]
fn sixteen_bits_for_any_world_and_stage() {
    for (name, precision) in
        [("qwen2", Precision::Bf16), ("gpt2", Precision::Bf16), ("mixtral", Precision::Fp16)]
    {
        let spec = |stage, parallel| {
            let mut spec = adapted(base(name), stage);
            (spec.precision, spec.experts.expert_parallel_size) = (precision, parallel);
            spec.loss_scale.initial_scale_power = 12;
            spec
        };
        let run = |spec: &TrainSpec, world| {
            let all = on_ranks(world, |c| steps(&mut started(spec, c), 3));
            assert!(all.iter().all(|r| *r == all[0]), "ranks disagree");
            all.into_iter().next().unwrap()
        };
        let expected = run(&spec(0, 1), 1);
        assert_ne!(expected, run(&adapted(base(name), 0), 1), "{name}: 16 bits are not 32");
        for (stage, world) in [(0, 2), (1, 3), (2, 4), (3, 2), (3, 8)] {
            let mut spec = spec(stage, if name == "mixtral" && world % 2 == 0 { 2 } else { 1 });
            spec.recompute = if stage == 2 { Recompute::Block } else { Recompute::None };
            assert_eq!(run(&spec, world), expected, "{name}: world {world}, stage {stage}");
        }
    }
}

/// Goes on from the newest checkpoint under `root`.
fn go_on(spec: &TrainSpec, comm: Arc<dyn Comm>, root: &Path) -> RunningTrainer {
    let world = comm.world();
    let mut bound = build(spec, comm, 1);
    let place = CheckpointDirs { root, workdir: root, layout: &StorageLayout::shared(world) };
    let resumed = resume(&mut bound, &job(spec, root, false), &place, "made up", &mut |_| Ok(()));
    let cursor = resumed.unwrap().expect("a checkpoint to resume from").cursor;
    bound.start_at(cursor)
}

#[test]
fn a_run_with_adapters_goes_on_with_the_same_bits() {
    let expected = fresh_run(&adapted(odd_model(), 0), 1, 1, 5).split_off(3);
    for (from, n, to, m) in [(3, 3, 1, 2), (0, 2, 3, 4)] {
        let dir = tempfile::tempdir().unwrap();
        on_ranks(n, |c| {
            let spec = adapted(odd_model(), from);
            let mut running = build(&spec, c, 1).start_fresh();
            steps(&mut running, 3);
            save(&mut running, &spec, dir.path());
        });
        let after = on_ranks(m, |c| steps(&mut go_on(&adapted(odd_model(), to), c, dir.path()), 2));
        assert!(after.iter().all(|a| *a == expected), "{n} workers at stage {from} to {m} at stage {to}");
    }
}

#[test]
fn the_loss_changes_as_the_gradient_says_with_dropout() {
    for (family, targets) in [("llama", LoraTargets::AllLinear), ("gpt2", LoraTargets::AllLinear)] {
        let mut spec = adapted(ModelSpec { family: family.into(), ..odd_model() }, 0);
        if family == "gpt2" {
            (spec.model.num_key_value_heads, spec.model.intermediate_size) = (3, 168);
            spec.model.tie_word_embeddings = true;
        }
        spec.lora = Some(LoraSpec { targets, alpha: 12.0, ..new(3, 0.25) });
        let mut running = build(&spec, alone(), 1).start_fresh();
        // away from the beginning, where A has no gradient
        steps(&mut running, 4);
        let (slope, norm) = slope_and_norm(&mut running, 0.02);
        assert!(
            (slope - norm).abs() < 0.01 * norm,
            "{family}: {slope} by differences, {norm} by the backward"
        );
    }
}

#[test]
fn evaluation_drops_nothing() {
    let source = MadeUp { vocab: 131 };
    let loss = |dropout| {
        let spec = TrainSpec { lora: Some(new(3, dropout)), ..train_spec(odd_model(), 0, 8, 1, 11) };
        let mut running = build(&spec, alone(), 1).start_fresh();
        // B is no longer zero, and the same in both
        for u in 0..running.trainer.engine.shards.len() {
            let unit = running.trainer.engine.shards[u].unit.clone();
            running.trainer.engine.with_resident(u, |params| {
                for s in unit.trained_segments(0..unit.len()) {
                    params.host_mut()[s.flat].fill(0.01);
                }
            });
        }
        running.trainer.evaluate(&source, 0, 3).unwrap().loss
    };
    assert_eq!(loss(0.5).to_bits(), loss(0.0).to_bits());
}

#[test]
fn adapters_of_another_model_are_rejected_with_the_tensors_that_differ() {
    let check = |adapter: &str, family: &str, targets: LoraTargets| {
        let mut spec = train_spec(base(family), 3, 2, 1, 11);
        spec.lora = Some(LoraSpec { targets, ..new(3, 0.0) });
        let running = started(&spec, alone());
        let units: Vec<_> = running.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
        check_adapters(&folder("lora", adapter).join("adapter"), &units).map(drop)
    };
    let names = |names: &[&str]| LoraTargets::Names(names.iter().map(|n| (*n).to_owned()).collect());
    assert_eq!(check("q_v", "llama_linear", names(&["q_proj", "v_proj"])), Ok(()));
    for (result, field) in [
        (check("q_v", "llama_linear", names(&["q_proj"])), "extra"),
        (check("q_v", "llama_linear", LoraTargets::AllLinear), "missing"),
        (check("q_v", "qwen3", names(&["q_proj", "v_proj"])), "shapes"),
        (check("gpt2", "llama_linear", names(&["q_proj"])), "missing"),
    ] {
        let error = result.unwrap_err();
        assert_eq!(error.code().name(), "adapter-model-mismatch");
        let tensors = error.field(field).unwrap().as_array().unwrap();
        assert!(tensors.iter().all(|name| name.as_str().unwrap().contains("lora_")), "{tensors:?}");
        assert!(!tensors.is_empty(), "{field}: {error}");
    }
}
