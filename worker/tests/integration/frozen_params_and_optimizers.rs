//! Tests of frozen parameters, parameter groups and the optimizers Lion, Muon and Adafactor.
//! Results match PyTorch (tests/golden/tuned/README.md), and losses have the same bits for any
//! number of workers and after a resume.
use crate::common::{
    golden::{self, GoldenCase, parse_golden_case, read_json},
    *,
};
use ckpt::{Checkpoint, ConvertOptions, ConvertTarget, TensorRole, convert_checkpoint};
use jobspec::*;
use protocol::preflight::Preflight as _;
use serde_json::Value;
use std::{collections::BTreeMap, path::Path, sync::Arc};
use worker::{
    train::{running_trainer::RunningTrainer, step::RankStepReport},
    trainer_stages::ResolvedSpec,
};

/// The directory names of the golden cases in tests/golden/tuned, which PyTorch computed.
const TUNED_CASES: [&str; 10] = [
    "frozen_prefix",
    "frozen_tied",
    "train_only",
    "head_alone",
    "groups",
    "lion",
    "muon",
    "muon_gpt2",
    "adafactor",
    "adafactor_beta1",
];

/// Parses a JSON list of strings.
fn parse_strings(v: &Value) -> Vec<String> {
    v.as_array().unwrap().iter().map(|t| t.as_str().unwrap().to_owned()).collect()
}

/// Converts a parameter group in the JSON description of a golden case to an item of
/// `train.optimizer.groups`.
fn parse_param_group(v: &Value) -> ParamGroupSpec {
    let betas = v["betas"].as_array().map(|b| (b[0].as_f64().unwrap(), b[1].as_f64().unwrap()));
    ParamGroupSpec {
        r#match: parse_strings(&v["match"]),
        lr: v["lr"].as_f64(),
        lr_scale: v["lr_scale"].as_f64(),
        weight_decay: v["weight_decay"].as_f64(),
        betas,
        ..ParamGroupSpec::default()
    }
}

/// Reads the golden case `name` in tests/golden/tuned.
fn load_tuned_case(name: &str) -> GoldenCase {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tuned").join(name);
    let about = read_json(&dir.join("case.json"));
    let model = families::create_pretrained_model_spec(&families::golden_model_directory(
        about["family"].as_str().unwrap(),
    ));
    let mut case = parse_golden_case(&about, model, &std::fs::read(dir.join("answers.safetensors")).unwrap());
    case.spec.freeze = parse_strings(&about["freeze"]);
    case.spec.train_only = parse_strings(&about["train_only"]);
    case.spec.optimizer.groups = about["groups"].as_array().unwrap().iter().map(parse_param_group).collect();
    case
}

#[test]
fn logits_gradients_and_steps_match_pytorch() {
    for name in TUNED_CASES {
        println!("{name}");
        golden::assert_golden_case(&load_tuned_case(name), |case| {
            families::start_from_pretrained(&case.spec, create_single_rank_comm())
        });
    }
}

/// Creates the `train` section of a model with about half of its parameters frozen: a whole unit,
/// parts of other units, and some of the matrices that one matmul computes together. These are q of
/// the matmul for q, k and v, and up of the matmul for gate and up.
fn create_half_frozen_spec(stage: u8) -> TrainSpec {
    let mut s = create_train_spec(create_odd_sized_model(), stage, 8, 1, 11);
    s.freeze = ["model.embed_tokens.*", "*.0.*", "*.q_proj.*", "*.2.mlp.up_proj.*", "*post_attention*"]
        .map(Into::into)
        .into();
    s.optimizer.groups = vec![ParamGroupSpec {
        r#match: vec!["*.1.*".into()],
        lr_scale: Some(0.5),
        ..ParamGroupSpec::default()
    }];
    s
}

#[test]
fn losses_with_frozen_parts_do_not_depend_on_world_size_stage_and_recomputation() {
    let expected = train_new_run(&create_half_frozen_spec(0), 1, 1, 3);
    assert!(expected.windows(2).all(|w| w[0] != w[1]), "the steps must change something");
    for stage in 0..=3 {
        for world in [1, 2, 3, 4, 8] {
            let mut spec = create_half_frozen_spec(stage);
            if (stage as usize + world).is_multiple_of(2) {
                spec.recompute = RecomputeMode::Block;
            }
            assert_eq!(train_new_run(&spec, world, 1, 3), expected, "world {world}, stage {stage}");
        }
    }
    for only in ["lm_head.*", "model.embed_tokens.*", "*.2.self_attn.o_proj.*"] {
        let spec = |stage| TrainSpec {
            train_only: vec![only.into()],
            freeze: Vec::new(),
            optimizer: OptimizerSpec { groups: Vec::new(), ..create_half_frozen_spec(0).optimizer },
            ..create_half_frozen_spec(stage)
        };
        let expected = train_new_run(&spec(0), 1, 1, 3);
        for (stage, world) in [(0, 3), (1, 2), (2, 4), (3, 3)] {
            assert_eq!(
                train_new_run(&spec(stage), world, 1, 3),
                expected,
                "{only}: world {world}, stage {stage}"
            );
        }
    }
}

/// Computes the gradients of the first step on one rank. Returns their bits by parameter name.
fn compute_first_gradients(spec: &TrainSpec) -> BTreeMap<String, Vec<u32>> {
    let mut running = families::start_from_pretrained(spec, create_single_rank_comm());
    running
        .trainer
        .compute_global_batch_gradients(&SyntheticSamples { vocab: 61 }, 0, RankStepReport::default())
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
    }
    gradients
}

/// Checks that freezing some parameters of GPT-2, which has separate layer code, does not change
/// the gradients of the others.
#[test]
fn freezing_parts_of_gpt2_keeps_the_gradients_of_the_others() {
    for name in ["gpt2", "gpt2_packed"] {
        let model = families::create_pretrained_model_spec(&families::golden_model_directory(name));
        let whole = create_train_spec(model, 3, 4, 1, 13);
        let expected = compute_first_gradients(&whole);
        for freeze in [
            &["*.c_attn.weight", "*.0.mlp.c_fc.weight"][..],
            &["*.c_proj.weight", "transformer.wpe.*"],
            &["*.wte.*", "lm_head.*", "*.1.*"],
            &["transformer.h.*.weight", "*.ln_f.*"],
        ] {
            // A tied head has no separate parameter.
            let freeze: Vec<String> = freeze
                .iter()
                .filter(|p| **p != "lm_head.*" || expected.contains_key("lm_head.weight"))
                .map(|p| (*p).into())
                .collect();
            let spec = TrainSpec { freeze: freeze.clone(), ..whole.clone() };
            let gradients = compute_first_gradients(&spec);
            assert!(!gradients.is_empty() && gradients.len() < expected.len());
            for (key, bits) in &gradients {
                assert!(*bits == expected[key], "{name}, {freeze:?}: {key}");
            }
        }
    }
}

/// Checks that losses in bf16 and fp16, with frozen parts and parameter groups, do not depend on
/// world size and stage, also after a resume.
#[test]
fn sixteen_bit_losses_with_frozen_parts_do_not_depend_on_world_size_and_stage() {
    for precision in [Precision::Bf16, Precision::Fp16] {
        let make = |stage| TrainSpec { precision, ..create_half_frozen_spec(stage) };
        let expected = train_new_run(&make(0), 1, 1, 4);
        assert_ne!(
            expected,
            train_new_run(&create_half_frozen_spec(0), 1, 1, 4),
            "{precision:?} and fp32 differ"
        );
        for (stage, world) in [(0, 3), (1, 2), (2, 4), (3, 3), (3, 8)] {
            let mut spec = make(stage);
            spec.recompute = if world % 2 == 0 { RecomputeMode::Block } else { RecomputeMode::None };
            assert_eq!(
                train_new_run(&spec, world, 1, 4),
                expected,
                "{precision:?}: world {world}, stage {stage}"
            );
        }
        let dir = tempfile::tempdir().unwrap();
        run_on_ranks(3, |c| {
            let mut running = build_trainer(&make(1), c, 1).start_with_random_params();
            train_steps(&mut running, 2);
            save_checkpoint(&mut running, &make(1), dir.path());
        });
        for (stage, world) in [(3, 2), (0, 1)] {
            let after = run_on_ranks(world, |c| {
                let (mut running, notices) = resume_newest_checkpoint(&make(stage), c, dir.path());
                assert!(notices.is_empty(), "{notices:?}");
                train_steps(&mut running, 2)
            });
            assert!(after.iter().all(|a| *a == expected[2..]), "to {world} at stage {stage}");
        }
    }
}

/// Changes the optimizer of a `train` section to Muon or Adafactor (`name`), with settings under
/// which this optimizer keeps every kind of state that it can have.
fn set_tensor_optimizer(spec: &mut TrainSpec, name: OptimizerName) {
    (spec.optimizer.name, spec.optimizer.momentum) = (name, 0.95);
    spec.optimizer.beta1 = Some(0.9);
}

#[test]
fn updates_of_whole_tensors_do_not_depend_on_world_size_and_stage() {
    let cases = [("llama", OptimizerName::Muon), ("mixtral", OptimizerName::Muon)];
    let adafactor = cases.map(|(family, _)| (family, OptimizerName::Adafactor));
    for (family, name) in cases.into_iter().chain(adafactor) {
        let spec = |stage| {
            let mut spec = create_half_frozen_spec(stage);
            spec.model.family = family.into();
            set_tensor_optimizer(&mut spec, name);
            spec.freeze.retain(|p| family == "llama" || !p.contains("mlp"));
            spec
        };
        let expected = train_new_run(&spec(0), 1, 1, 3);
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
            let losses = train_new_run(&spec, world, 1, 3);
            assert_eq!(losses, expected, "{family}, {name:?}: world {world}, stage {stage}");
        }
    }
}

#[test]
fn runs_that_update_whole_tensors_resume_with_the_same_bits() {
    for name in [OptimizerName::Muon, OptimizerName::Adafactor] {
        let spec = |stage| {
            let mut spec = create_half_frozen_spec(stage);
            set_tensor_optimizer(&mut spec, name);
            spec
        };
        assert_resumes_with_the_same_bits(&spec, &[(3, 3, 0, 2), (0, 2, 3, 4)]);
    }
}

/// Asserts that the losses after a resume have the bits of an undisturbed run. Each item of `cases`
/// is the stage and the number of workers before the resume, and those after the resume.
fn assert_resumes_with_the_same_bits(spec: &dyn Fn(u8) -> TrainSpec, cases: &[(u8, usize, u8, usize)]) {
    let expected = train_new_run(&spec(0), 1, 1, 5).split_off(3);
    for &(from, n, to, m) in cases {
        let (before, after) = (spec(from), spec(to));
        let dir = tempfile::tempdir().unwrap();
        run_on_ranks(n, |c| {
            let mut running = build_trainer(&before, c, 1).start_with_random_params();
            train_steps(&mut running, 3);
            save_checkpoint(&mut running, &before, dir.path());
        });
        let after = run_on_ranks(m, |c| {
            let (mut running, notices) = resume_newest_checkpoint(&after, c, dir.path());
            assert!(notices.is_empty(), "{notices:?}");
            train_steps(&mut running, 2)
        });
        assert!(after.iter().all(|a| *a == expected), "{n} workers at stage {from} to {m} at stage {to}");
    }
}

/// Checks that a run that trains only matrices with Adafactor resumes. Its checkpoint is complete,
/// although it has no optimizer states of vectors.
#[test]
fn an_adafactor_run_of_matrices_only_resumes_with_the_same_bits() {
    let spec = |stage| {
        let mut spec = create_half_frozen_spec(stage);
        set_tensor_optimizer(&mut spec, OptimizerName::Adafactor);
        (spec.optimizer.beta1, spec.optimizer.groups) = (None, Vec::new());
        TrainSpec { freeze: Vec::new(), train_only: vec!["*_proj.*".into()], ..spec }
    };
    assert_resumes_with_the_same_bits(&spec, &[(2, 3, 3, 2)]);
}

/// Checks that the memory plan counts the optimizer states that each rank allocates. The means of
/// Adafactor are on every rank that updates a part of their matrix.
#[test]
fn the_memory_plan_counts_the_states_of_every_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("unused"), "the quick brown fox ".repeat(500)).unwrap();
    for (name, label) in [
        (OptimizerName::Adamw, None),
        (OptimizerName::Lion, None),
        (OptimizerName::Muon, Some("Muon matrices")),
        (OptimizerName::Adafactor, Some("Adafactor updates")),
    ] {
        for (stage, world) in [(0, 2), (1, 3), (3, 4)] {
            let mut spec = create_half_frozen_spec(stage);
            spec.model.vocab_size = 300;
            set_tensor_optimizer(&mut spec, name);
            let job = create_job_spec(&spec, dir.path(), false);
            let report = worker::TrainPreflight.check_job(&job, world as u32, 1);
            assert!(report.errors.is_empty(), "{:?}", report.errors);
            let allocated = run_on_ranks(world, |c| {
                let trainer = build_trainer(&spec, c, 1).trainer;
                let units = 0..trainer.engine.shards.len();
                let states = units.flat_map(|u| trainer.optimizer.states(u).states_by_role());
                states.map(|s| 4 * s.view().len() as u64).sum::<u64>()
            });
            for (estimate, allocated) in report.memory.iter().zip(allocated) {
                let part = |name: &str| estimate.parts.iter().find(|p| p.0 == name).map(|p| p.1);
                assert_eq!(part("optimizer states"), Some(allocated), "{name:?}, stage {stage}");
                assert!(label.is_none_or(|label| part(label).is_some()), "{:?}", estimate.parts);
            }
        }
    }
}

/// Checks the checkpoints of Adafactor, whose states are means of rows and columns of matrices, and
/// full second moments of vectors. Conversions to other formats must fail.
#[test]
fn checkpoints_of_adafactor_have_factored_states_and_do_not_convert_to_other_formats() {
    let mut spec = create_train_spec(create_odd_sized_model(), 3, 8, 1, 11);
    spec.optimizer.name = OptimizerName::Adafactor;
    let dir = tempfile::tempdir().unwrap();
    run_on_ranks(3, |c| {
        let mut running = build_trainer(&spec, c, 1).start_with_random_params();
        train_steps(&mut running, 1);
        save_checkpoint(&mut running, &spec, dir.path());
    });
    let path = dir.path().join("step-00000001");
    let checkpoint = Checkpoint::open(&path).unwrap();
    let shapes: BTreeMap<(TensorRole, String), Vec<u64>> =
        checkpoint.tensors().map(|t| ((t.role, t.name), t.shape)).collect();
    let shape = |role, name: &str| shapes.get(&(role, name.to_owned())).cloned();
    let (matrix, vector) = ("model.layers.1.mlp.down_proj.weight", "model.norm.weight");
    let weight = shape(TensorRole::Weight, matrix).unwrap();
    assert_eq!(shape(TensorRole::ExpAvgSqRow, matrix), Some(vec![weight[0]]));
    assert_eq!(shape(TensorRole::ExpAvgSqCol, matrix), Some(vec![weight[1]]));
    assert_eq!(shape(TensorRole::ExpAvgSqVector, matrix), None);
    assert_eq!(shape(TensorRole::ExpAvgSqVector, vector), shape(TensorRole::Weight, vector));
    assert_eq!(shape(TensorRole::ExpAvgSqRow, vector), None);
    let weights = shapes.keys().filter(|(role, _)| *role == TensorRole::Weight).count();
    let vectors = shapes.keys().filter(|(role, _)| *role == TensorRole::ExpAvgSqVector).count();
    assert_eq!(shapes.len(), weights + vectors + 2 * (weights - vectors));
    for target in [ConvertTarget::DeepSpeed, ConvertTarget::Universal] {
        let out = dir.path().join("converted");
        let options = ConvertOptions::new(target);
        let error = convert_checkpoint(&checkpoint, &out, &options, &mut |_, _| {}).unwrap_err();
        assert_eq!(diagnostic::Diagnostic::from(error).code().name(), "convert-state-unsupported");
        assert!(!out.exists());
    }
    let mut adamw = spec.clone();
    adamw.optimizer.name = OptimizerName::Adamw;
    let error = try_resume_newest_checkpoint(&adamw, create_single_rank_comm(), dir.path()).err().unwrap();
    assert_eq!(error.code().name(), "resume-optimizer-mismatch");
}

#[test]
fn a_run_with_frozen_parts_resumes_with_the_same_bits() {
    let expected = train_new_run(&create_half_frozen_spec(0), 1, 1, 5).split_off(3);
    for (from, n, to, m) in [(3, 3, 1, 2), (0, 2, 3, 4), (2, 4, 0, 1), (1, 1, 2, 3)] {
        let dir = tempfile::tempdir().unwrap();
        run_on_ranks(n, |c| {
            let mut running = build_trainer(&create_half_frozen_spec(from), c, 1).start_with_random_params();
            train_steps(&mut running, 3);
            save_checkpoint(&mut running, &create_half_frozen_spec(from), dir.path());
        });
        let checkpoint = Checkpoint::open(&dir.path().join("step-00000003")).unwrap();
        let frozen = &checkpoint.run_facts().model.frozen;
        assert!(frozen.contains(&"model.layers.0.mlp.down_proj.weight".to_owned()), "{frozen:?}");
        let states = checkpoint.tensors().filter(|t| t.role == TensorRole::ExpAvg).count();
        let weights = checkpoint.tensors().filter(|t| t.role == TensorRole::Weight).count();
        assert_eq!(states + frozen.len(), weights);
        let after = run_on_ranks(m, |c| {
            let (mut running, notices) =
                resume_newest_checkpoint(&create_half_frozen_spec(to), c, dir.path());
            assert!(notices.is_empty(), "{notices:?}");
            train_steps(&mut running, 2)
        });
        assert!(after.iter().all(|a| *a == expected), "{n} workers at stage {from} to {m} at stage {to}");
    }
}

/// Returns the parameters of a run of one rank by name.
fn collect_params_by_name(running: &RunningTrainer) -> BTreeMap<String, Vec<f32>> {
    let mut params = BTreeMap::new();
    golden::visit_params(running, |name, v| drop(params.insert(name.to_owned(), v.to_vec())));
    params
}

/// Checks that freezing a parameter between two runs keeps the optimizer states of the others.
/// Unfreezing the parameter must reset its states and its update count.
#[test]
fn freezing_keeps_other_optimizer_states_and_unfreezing_resets_them() {
    const FROZEN: &str = "model.layers.1.mlp.gate_proj.weight";
    let whole = |stage| {
        let mut spec = create_train_spec(create_odd_sized_model(), stage, 8, 1, 11);
        spec.clip_norm = None;
        spec.optimizer.weight_decay = 0.0;
        spec.schedule.name = ScheduleName::Constant;
        spec.schedule.warmup_steps = 0;
        spec
    };
    let frozen = |stage| TrainSpec { freeze: vec![FROZEN.into()], ..whole(stage) };
    let dir = tempfile::tempdir().unwrap();
    run_on_ranks(2, |c| {
        let mut running = build_trainer(&whole(3), c, 1).start_with_random_params();
        train_steps(&mut running, 3);
        save_checkpoint(&mut running, &whole(3), dir.path());
    });
    // Frozen: the states of the other parameters are those of the checkpoint.
    let (running, notices) = resume_newest_checkpoint(&frozen(0), create_single_rank_comm(), dir.path());
    assert_notices_match_snapshot("tuned_newly_frozen_parameter", &notices, dir.path());
    let checkpoint = Checkpoint::open(&dir.path().join("step-00000003")).unwrap();
    for (u, shard) in running.trainer.engine.shards.iter().enumerate() {
        let mut rest = running.trainer.optimizer.states(u).states_by_role()[0].view().host_slice();
        for p in shard.unit.list_trained_params() {
            let mut stored = vec![0.0; p.len()];
            checkpoint.read_f32(&p.name, TensorRole::ExpAvg, 0..p.len() as u64, &mut stored).unwrap();
            let (ours, after) = rest.split_at(p.len());
            rest = after;
            assert_eq!(ours, stored, "{}", p.name);
        }
        assert!(rest.is_empty());
    }
    let before = collect_params_by_name(&running);
    expect_equal_on_all_ranks(run_on_ranks(3, |c| {
        let (mut running, _) = resume_newest_checkpoint(&frozen(2), c, dir.path());
        let losses = train_steps(&mut running, 2);
        save_checkpoint(&mut running, &frozen(2), dir.path());
        losses
    }));
    // The newest checkpoint is now the one of step 5.
    let (mut still_frozen, _) = resume_newest_checkpoint(&frozen(1), create_single_rank_comm(), dir.path());
    assert_eq!(collect_params_by_name(&still_frozen)[FROZEN], before[FROZEN], "frozen weights are unchanged");
    let expected = train_steps(&mut still_frozen, 1);
    // Unfrozen: the first update is that of Adam's first step, ±lr in every element with a
    // gradient.
    let (mut running, notices) = resume_newest_checkpoint(&whole(0), create_single_rank_comm(), dir.path());
    assert_notices_match_snapshot("tuned_unfrozen_parameter", &notices, dir.path());
    let before = collect_params_by_name(&running);
    assert_eq!(train_steps(&mut running, 1)[0].0, expected[0].0, "equal weights have an equal loss");
    let (after, lr) = (collect_params_by_name(&running), running.train_spec().optimizer.lr as f32);
    let updates: Vec<f32> = after[FROZEN].iter().zip(&before[FROZEN]).map(|(a, b)| (a - b).abs()).collect();
    assert!(updates.iter().all(|update| *update <= lr * 1.001), "more than a first step");
    let firsts = updates.iter().filter(|update| **update >= lr * 0.98).count();
    assert!(firsts * 10 >= updates.len() * 9, "{firsts} of {} updates are ±lr", updates.len());
    // The checkpoint records that the parameter is five updates behind.
    save_checkpoint(&mut running, &whole(0), dir.path());
    let checkpoint = Checkpoint::open(&dir.path().join("step-00000006")).unwrap();
    assert_eq!(checkpoint.run_facts().cursor["late"], serde_json::json!({ FROZEN: 5 }));
}

/// Returns the code and key of the error that a changed `train` section causes when a trainer is
/// built, or `None` if there is no error. `change` modifies the spec.
fn find_build_error(change: impl Fn(&mut TrainSpec)) -> Option<(&'static str, String)> {
    let mut spec = create_train_spec(create_odd_sized_model(), 3, 2, 1, 11);
    change(&mut spec);
    let ops: Arc<dyn device::Ops> = Arc::new(device::Cpu::new(1));
    let model = ResolvedSpec::new(&spec, spec.model.vocab_size).unwrap().build_model();
    let error = model
        .and_then(|m| m.shard_model(create_single_rank_comm(), ops)?.into_uninitialized_trainer())
        .err()?;
    Some((error.code().name(), error.diagnostic().subject().unwrap_or_default().to_owned()))
}

#[test]
fn patterns_that_match_nothing_are_rejected_by_their_key() {
    let list = |p: &str| vec![p.to_owned()];
    let groups = |p: &str| vec![ParamGroupSpec { r#match: list(p), ..ParamGroupSpec::default() }];
    let (unmatched, invalid) = ("parameter-pattern-unmatched", "parameter-pattern-invalid");
    for (error, code, key) in [
        (find_build_error(|s| s.freeze = list("*.9.*")), unmatched, "train.freeze"),
        (find_build_error(|s| s.freeze = list("*")), "no-trained-parameters", "train.freeze"),
        (find_build_error(|s| s.freeze = list("[")), invalid, "train.freeze"),
        (find_build_error(|s| s.train_only = list("transformer.*")), unmatched, "train.train_only"),
        (find_build_error(|s| s.optimizer.groups = groups("*.bias")), unmatched, "train.optimizer.groups"),
        (find_build_error(|s| s.optimizer.no_decay = list("{")), invalid, "train.optimizer.no_decay"),
    ] {
        assert_eq!(error, Some((code, key.to_owned())));
    }
    let frozen =
        find_build_error(|s| (s.freeze, s.optimizer.groups) = (list("*.0.*"), groups("*.layers.0.*")));
    let expected = Some((unmatched, "train.optimizer.groups".to_owned()));
    assert_eq!(frozen, expected, "the pattern matches only frozen parameters");
    // A pattern may name a tied matrix by its second name.
    let tied = find_build_error(|s| {
        s.model.tie_word_embeddings = true;
        s.freeze = list("lm_head.weight");
    });
    assert_eq!(tied, None);
}
