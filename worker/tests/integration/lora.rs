//! Tests of LoRA adapters: results match PEFT (tests/golden/lora/README.md), losses have the same
//! bits for every number of workers, gradients match finite differences, and adapters are loaded,
//! merged and gathered.
use crate::common::{
    golden::{self, GoldenCase, parse_golden_case, read_json},
    *,
};
use ckpt::{Checkpoint, CkptError, GatherOptions, OptionProblem, peft::AdapterConfig};
use comm::Comm;
use jobspec::*;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};
use worker::{
    checkpoint::resume::{PretrainedModel, open_matching_adapters, start_without_checkpoint},
    train::running_trainer::RunningTrainer,
};

/// The directories of the golden cases of LoRA.
const LORA_CASES: [&str; 7] = ["q_v", "all_linear", "rslora", "one_module", "gemma", "gpt2", "experts"];

/// Returns the directory of the golden model or adapter `name`. `kind` is `families` for models and
/// `lora` for adapters.
fn golden_lora_path(kind: &str, name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(kind).join(name)
}

/// Creates the `train.lora` section for new adapters on all linear modules, with α = 2·rank.
fn create_adapter_spec(rank: u32, dropout: f64) -> LoraSpec {
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

/// Creates the `train.lora` section of a job that trains the existing adapters in the directory
/// `adapter`.
fn create_pretrained_adapter_spec(adapter: PathBuf) -> LoraSpec {
    LoraSpec { from: Some(adapter), dropout: None, ..create_adapter_spec(1, 0.0) }
}

/// Creates the `train.model` section for the golden model of a family.
fn create_base_model_spec(family: &str) -> ModelSpec {
    ModelSpec {
        from: Some(golden_lora_path("families", family)),
        rms_norm_eps: 1e-5,
        vocab_size: 0,
        ..create_odd_sized_model()
    }
}

/// Reads the golden case `name` of LoRA, which PEFT computed.
fn load_lora_case(name: &str) -> GoldenCase {
    let dir = golden_lora_path("lora", name);
    let about = read_json(&dir.join("case.json"));
    let model = create_base_model_spec(about["family"].as_str().unwrap());
    let mut case = parse_golden_case(&about, model, &std::fs::read(dir.join("answers.safetensors")).unwrap());
    case.spec.lora = Some(create_pretrained_adapter_spec(dir.join("adapter")));
    case
}

/// Starts a run of one rank at step 0 with the weights and adapters that the spec names.
fn start_lora_run(spec: &TrainSpec, comm: Arc<dyn Comm>) -> RunningTrainer {
    let mut pretrained = PretrainedModel::open(spec.model.from.as_deref(), comm.as_ref()).unwrap();
    start_without_checkpoint(build_trainer(spec, comm, 1), pretrained.as_mut(), &mut |event| {
        panic!("{event:?}")
    })
    .unwrap()
}

#[test]
fn logits_gradients_and_steps_match_peft() {
    for name in LORA_CASES {
        println!("{name}");
        golden::assert_golden_case(&load_lora_case(name), |case| {
            start_lora_run(&case.spec, create_single_rank_comm())
        });
    }
}

/// Saves a checkpoint of a new run and gathers its adapters and the merged model. Returns the
/// directories of the adapters and of the merged model.
fn gather_adapters_and_merged_model(spec: &TrainSpec, world: usize, dir: &Path) -> [PathBuf; 2] {
    run_on_ranks(world, |c| save_checkpoint(&mut start_lora_run(spec, c), spec, dir));
    let checkpoint = Checkpoint::open(&dir.join("step-00000000")).unwrap();
    [false, true].map(|merge_lora| {
        let out = dir.join(if merge_lora { "merged" } else { "adapter" });
        // The small limit must not split adapters, of which PEFT reads one file only.
        let max_shard_size = if merge_lora { 5_000_000 } else { 10 };
        let options = GatherOptions { merge_lora, max_shard_size, ..GatherOptions::default() };
        assert!(ckpt::gather_weights(&checkpoint, &out, &options, |_, _| {}).unwrap().config);
        out
    })
}

/// Reads the tensors of a safetensors file.
fn read_weights(file: PathBuf) -> BTreeMap<String, Vec<f32>> {
    golden::parse_safetensors(&std::fs::read(file).unwrap())
}

#[test]
fn adapters_are_gathered_unchanged_and_merged_like_peft_merges_them() {
    for (name, world) in LORA_CASES.into_iter().zip([1, 3, 2, 4, 1, 2, 3]) {
        let (case, dir) = (load_lora_case(name), tempfile::tempdir().unwrap());
        let [adapter, merged] = gather_adapters_and_merged_model(&case.spec, world, dir.path());
        let theirs = golden_lora_path("lora", name).join("adapter");
        let file = "adapter_model.safetensors";
        assert_eq!(read_weights(adapter.join(file)), read_weights(theirs.join(file)), "{name}");
        let (a, b) = (AdapterConfig::read(&adapter).unwrap(), AdapterConfig::read(&theirs).unwrap());
        let without_targets = |c: &AdapterConfig| AdapterConfig { targets: Vec::new(), ..c.clone() };
        assert_eq!(without_targets(&a), without_targets(&b), "{name}");
        let config = read_json(&adapter.join("adapter_config.json"));
        assert!(config["base_model_name_or_path"].as_str().unwrap().contains("families"), "{config}");

        let before = read_weights(case.spec.model.from.as_ref().unwrap().join("model.safetensors"));
        let after = read_weights(merged.join("model.safetensors"));
        assert!(before.keys().eq(after.keys()), "{name}");
        let mut changed = 0;
        for (weight, ours) in &after {
            match case.tensors.get(&format!("merged/{weight}")) {
                None => assert_eq!(ours, &before[weight], "{name}: {weight} has no adapter"),
                Some(theirs) => {
                    changed += 1;
                    let size = theirs.iter().fold(0f32, |m, x| m.max(x.abs()));
                    let error = ours.iter().zip(theirs).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                    assert!(error <= 1e-6 * size, "{name}: {weight}: error {error}, largest element {size}");
                }
            }
        }
        assert_eq!(changed, case.tensors.keys().filter(|k| k.starts_with("merged/")).count(), "{name}");
        assert!(changed > 0 && !merged.join("adapter_config.json").exists());
    }
}

#[test]
fn a_checkpoint_without_adapters_has_none_to_merge() {
    let (spec, dir) =
        (create_train_spec(create_odd_sized_model(), 0, 2, 1, 11), tempfile::tempdir().unwrap());
    let mut running = build_trainer(&spec, create_single_rank_comm(), 1).start_with_random_params();
    save_checkpoint(&mut running, &spec, dir.path());
    let path = dir.path().join("step-00000000");
    let options = GatherOptions { merge_lora: true, ..GatherOptions::default() };
    let out = dir.path().join("out");
    let error =
        ckpt::gather_weights(&Checkpoint::open(&path).unwrap(), &out, &options, |_, _| {}).unwrap_err();
    let problem = match &error {
        CkptError::InvalidOption { problem } => problem,
        _ => panic!("{error}"),
    };
    assert!(matches!(problem, OptionProblem::NoAdapters { .. }), "{error}");
    assert!(!out.exists());
}

/// Creates the `train` section of a job that trains new LoRA adapters with dropout.
fn create_lora_train_spec(model: ModelSpec, stage: u8) -> TrainSpec {
    TrainSpec { lora: Some(create_adapter_spec(3, 0.25)), ..create_train_spec(model, stage, 8, 1, 11) }
}

#[test]
fn lora_losses_with_dropout_have_the_same_bits_for_every_world_size_stage_and_recomputation() {
    let expected = train_new_run(&create_lora_train_spec(create_odd_sized_model(), 0), 1, 1, 3);
    assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
    for stage in 0..=3 {
        for world in [1, 2, 3, 4, 8] {
            let mut spec = create_lora_train_spec(create_odd_sized_model(), stage);
            if (stage as usize + world).is_multiple_of(2) {
                spec.recompute = RecomputeMode::Block;
            }
            assert_eq!(train_new_run(&spec, world, 1, 3), expected, "world {world}, stage {stage}");
        }
    }
    let mut other = create_lora_train_spec(create_odd_sized_model(), 0);
    other.lora = Some(create_adapter_spec(3, 0.0));
    assert_ne!(train_new_run(&other, 1, 1, 3), expected, "dropout changes the losses");
}

#[test]
fn lora_losses_have_the_same_bits_for_every_expert_parallel_size() {
    let spec = |stage, parallel| {
        let mut spec = create_lora_train_spec(create_base_model_spec("mixtral"), stage);
        spec.experts.expert_parallel_size = parallel;
        spec
    };
    let run = |stage, parallel, world| {
        expect_equal_on_all_ranks(run_on_ranks(world, |c| {
            train_steps(&mut start_lora_run(&spec(stage, parallel), c), 3)
        }))
    };
    let expected = run(0, 1, 1);
    for (stage, parallel, world) in [(0, 2, 2), (3, 1, 3), (2, 4, 4), (3, 2, 4), (1, 2, 8)] {
        assert_eq!(run(stage, parallel, world), expected, "{parallel} of {world}, stage {stage}");
    }
}

/// Checks that training new adapters of pretrained weights in 16 bits gives the same bits for
/// several world sizes and stages.
#[test]
fn sixteen_bit_lora_training_has_the_same_bits_on_every_world_size_and_stage() {
    for (name, precision) in
        [("qwen2", Precision::Bf16), ("gpt2", Precision::Bf16), ("mixtral", Precision::Fp16)]
    {
        let spec = |stage, parallel| {
            let mut spec = create_lora_train_spec(create_base_model_spec(name), stage);
            (spec.precision, spec.experts.expert_parallel_size) = (precision, parallel);
            spec.loss_scale.initial_scale_power = 12;
            spec
        };
        let run = |spec: &TrainSpec, world| {
            expect_equal_on_all_ranks(run_on_ranks(world, |c| train_steps(&mut start_lora_run(spec, c), 3)))
        };
        let expected = run(&spec(0, 1), 1);
        assert_ne!(
            expected,
            run(&create_lora_train_spec(create_base_model_spec(name), 0), 1),
            "{name}: 16-bit training differs from fp32"
        );
        for (stage, world) in [(0, 2), (1, 3), (2, 4), (3, 2), (3, 8)] {
            let mut spec = spec(stage, if name == "mixtral" && world % 2 == 0 { 2 } else { 1 });
            spec.recompute = if stage == 2 { RecomputeMode::Block } else { RecomputeMode::None };
            assert_eq!(run(&spec, world), expected, "{name}: world {world}, stage {stage}");
        }
    }
}

#[test]
fn a_run_with_adapters_resumes_with_the_same_bits() {
    let expected = train_new_run(&create_lora_train_spec(create_odd_sized_model(), 0), 1, 1, 5).split_off(3);
    for (from, n, to, m) in [(3, 3, 1, 2), (0, 2, 3, 4)] {
        let dir = tempfile::tempdir().unwrap();
        run_on_ranks(n, |c| {
            let spec = create_lora_train_spec(create_odd_sized_model(), from);
            let mut running = build_trainer(&spec, c, 1).start_with_random_params();
            train_steps(&mut running, 3);
            save_checkpoint(&mut running, &spec, dir.path());
        });
        let after = run_on_ranks(m, |c| {
            train_steps(
                &mut resume_newest_checkpoint(
                    &create_lora_train_spec(create_odd_sized_model(), to),
                    c,
                    dir.path(),
                )
                .0,
                2,
            )
        });
        assert!(after.iter().all(|a| *a == expected), "{n} workers at stage {from} to {m} at stage {to}");
    }
}

#[test]
fn gradients_with_dropout_equal_finite_differences() {
    for (family, targets) in [("llama", LoraTargets::AllLinear), ("gpt2", LoraTargets::AllLinear)] {
        let mut spec =
            create_lora_train_spec(ModelSpec { family: family.into(), ..create_odd_sized_model() }, 0);
        if family == "gpt2" {
            (spec.model.num_key_value_heads, spec.model.intermediate_size) = (3, 168);
            spec.model.tie_word_embeddings = true;
        }
        spec.lora = Some(LoraSpec { targets, alpha: 12.0, ..create_adapter_spec(3, 0.25) });
        let mut running = build_trainer(&spec, create_single_rank_comm(), 1).start_with_random_params();
        // A has no gradient at first, because B is zero.
        train_steps(&mut running, 4);
        let (slope, norm) = measure_slope_and_gradient_norm(&mut running, 0.02);
        assert!(
            (slope - norm).abs() < 0.01 * norm,
            "{family}: finite difference {slope}, norm of the gradient {norm}"
        );
    }
}

#[test]
fn evaluation_of_adapters_has_no_dropout() {
    let source = SyntheticSamples { vocab: 131 };
    let loss = |dropout| {
        let spec = TrainSpec {
            lora: Some(create_adapter_spec(3, dropout)),
            ..create_train_spec(create_odd_sized_model(), 0, 8, 1, 11)
        };
        let mut running = build_trainer(&spec, create_single_rank_comm(), 1).start_with_random_params();
        // The output of adapters is zero as long as B is zero.
        for u in 0..running.trainer.engine.shards.len() {
            let unit = running.trainer.engine.shards[u].unit.clone();
            running.trainer.engine.with_resident_params(u, |params| {
                for s in unit.list_trained_segments(0..unit.len()) {
                    params.host_slice_mut()[s.flat].fill(0.01);
                }
            });
        }
        running.trainer.evaluate(&source, 0, 3, &|| false).unwrap().unwrap().loss
    };
    assert_eq!(loss(0.5).to_bits(), loss(0.0).to_bits());
}

#[test]
fn adapters_of_another_model_are_rejected_with_the_tensors_that_differ() {
    let check = |adapter: &str, family: &str, targets: LoraTargets| {
        let mut spec = create_train_spec(create_base_model_spec(family), 3, 2, 1, 11);
        spec.lora = Some(LoraSpec { targets, ..create_adapter_spec(3, 0.0) });
        let running = start_lora_run(&spec, create_single_rank_comm());
        let units = running.trainer.engine.clone_units();
        open_matching_adapters(&golden_lora_path("lora", adapter).join("adapter"), &units).map(drop)
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
