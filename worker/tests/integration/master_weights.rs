//! Tests of bf16 weights without fp32 master weights: small updates are not lost, and losses have
//! the same bits for any number of workers and after a resume. Checkpoints convert to and from runs
//! with master weights.
use crate::common::*;
use ckpt::{Checkpoint, GatherOptions, TensorRole, TensorSource as _, gather_weights};
use device::{Dtype, ops::VectorOps};
use jobspec::*;
use protocol::preflight::Preflight;
use std::{collections::BTreeMap, path::Path};
use worker::train::{running_trainer::RunningTrainer, step::RankStepReport};

/// The number of steps that each run trains before it saves a checkpoint.
const STEPS_BEFORE_SAVE: u64 = 3;
/// The number of steps that each run trains after it resumes from a checkpoint.
const STEPS_AFTER_RESUME: u64 = 2;

/// Creates the `train` section of a bf16 run without master weights.
fn create_spec_without_masters(stage: u8) -> TrainSpec {
    TrainSpec {
        precision: Precision::Bf16,
        master_weights: false,
        ..create_train_spec(create_odd_sized_model(), stage, 8, 1, 11)
    }
}

/// Creates the `train` section of a bf16 run with master weights.
fn create_spec_with_masters(stage: u8) -> TrainSpec {
    TrainSpec { master_weights: true, ..create_spec_without_masters(stage) }
}

/// Returns the `train` section `spec` with the optimizer `name`.
fn set_optimizer(mut spec: TrainSpec, name: OptimizerName) -> TrainSpec {
    spec.optimizer.name = name;
    spec.optimizer.momentum = if name == OptimizerName::Adamw { 0.0 } else { 0.9 };
    spec
}

#[test]
fn losses_without_master_weights_do_not_depend_on_world_size_stage_threads_and_recomputation() {
    let expected = train_new_run(&create_spec_without_masters(0), 1, 1, 4);
    assert_ne!(expected, train_new_run(&create_spec_with_masters(0), 1, 1, 4), "weights are rounded");
    for stage in 0..=3 {
        for world in [1, 2, 3, 4] {
            let got = train_new_run(&create_spec_without_masters(stage), world, 1 + world % 2, 4);
            assert_eq!(got, expected, "world {world}, stage {stage}");
        }
    }
    for stage in [1, 3] {
        let losses = expect_equal_on_all_ranks(run_on_hosts(&[0, 0, 1], |c| {
            train_steps(
                &mut build_trainer(&create_spec_without_masters(stage), c, 1).start_with_random_params(),
                4,
            )
        }));
        assert_eq!(losses, expected, "two hosts, stage {stage}");
    }
    let recomputed = TrainSpec { recompute: RecomputeMode::Block, ..create_spec_without_masters(3) };
    assert_eq!(train_new_run(&recomputed, 2, 1, 4), expected, "recomputed");
    let other_seed = TrainSpec { seed: 8, ..create_spec_without_masters(0) };
    assert_ne!(train_new_run(&other_seed, 1, 1, 4), expected);
}

#[test]
fn losses_without_master_weights_have_the_same_bits_for_every_optimizer_and_offload() {
    let dir = tempfile::tempdir().unwrap();
    for name in [OptimizerName::Sgd, OptimizerName::Lion, OptimizerName::Muon, OptimizerName::Adafactor] {
        let spec = |stage| set_optimizer(create_spec_without_masters(stage), name);
        let expected = train_new_run(&spec(0), 1, 1, 4);
        assert_ne!(
            expected,
            train_new_run(&set_optimizer(create_spec_with_masters(0), name), 1, 1, 4),
            "{name:?}"
        );
        for (stage, world) in [(0, 2), (1, 3), (2, 4), (3, 2)] {
            assert_eq!(
                train_new_run(&spec(stage), world, 1, 4),
                expected,
                "{name:?}: world {world}, stage {stage}"
            );
        }
    }
    let expected = train_new_run(&create_spec_without_masters(0), 1, 1, 4);
    for (stage, world) in [(1, 3), (3, 2)] {
        let mut spec = create_spec_without_masters(stage);
        spec.zero.offload = Some(OffloadTarget::Files(dir.path().into()));
        assert_eq!(train_new_run(&spec, world, 1, 4), expected, "states in files, stage {stage}");
    }
}

#[test]
fn bf16_weights_with_adapters_frozen_parts_fp8_and_experts_have_the_same_bits() {
    let adapters = |stage| {
        let targets = LoraTargets::AllLinear;
        let lora = LoraSpec { from: None, rank: 2, alpha: 4.0, dropout: Some(0.1), rslora: false, targets };
        TrainSpec { lora: Some(lora), ..create_spec_without_masters(stage) }
    };
    let frozen = |stage| TrainSpec {
        freeze: vec!["*.1.*".into(), "*embed*".into()],
        ..create_spec_without_masters(stage)
    };
    let fp8 = |stage| {
        let (hidden_size, intermediate_size, num_attention_heads, head_dim) = (32, 48, 2, 16);
        let model = ModelSpec {
            hidden_size,
            intermediate_size,
            num_attention_heads,
            head_dim,
            ..create_odd_sized_model()
        };
        TrainSpec { model, precision: Precision::Fp8, ..create_spec_without_masters(stage) }
    };
    let experts = |stage| {
        let (family, num_experts, num_experts_per_tok) = ("mixtral".into(), Some(4), Some(2));
        let model = ModelSpec { family, num_experts, num_experts_per_tok, ..create_odd_sized_model() };
        TrainSpec { model, ..create_spec_without_masters(stage) }
    };
    let cases: [(&str, &dyn Fn(u8) -> TrainSpec); 4] =
        [("adapters", &adapters), ("frozen", &frozen), ("fp8", &fp8), ("experts", &experts)];
    for (what, spec) in cases {
        let expected = train_new_run(&spec(0), 1, 1, 3);
        for (stage, world) in [(1, 2), (2, 4), (3, 3)] {
            let losses = train_new_run(&spec(stage), world, 1, 3);
            assert_eq!(losses, expected, "{what}: world {world}, stage {stage}");
        }
    }
    let expected = train_new_run(&experts(0), 1, 1, 3);
    for (stage, world) in [(1, 2), (3, 4)] {
        let mut spec = experts(stage);
        spec.experts.expert_parallel_size = 2;
        assert_eq!(
            train_new_run(&spec, world, 1, 3),
            expected,
            "expert-parallel groups of two ranks, stage {stage}"
        );
    }
}

/// Trains a new run for [`STEPS_BEFORE_SAVE`] steps and saves a checkpoint under `root`, in the
/// background during the next step if `asynchronous` is set.
fn train_and_save(spec: &TrainSpec, world: usize, root: &Path, asynchronous: bool) {
    let job = create_job_spec(spec, root, asynchronous);
    run_on_ranks(world, |c| {
        let mut running = build_trainer(spec, c, 1).start_with_random_params();
        train_steps(&mut running, STEPS_BEFORE_SAVE);
        let mut saver = create_checkpoint_saver(&running, &job, root);
        saver.begin_save(&mut running).unwrap();
        if asynchronous {
            train_steps(&mut running, 1);
        }
        saver.finish_and_commit_save(&running).unwrap();
    });
}

/// Resumes from the newest checkpoint under `root` and trains for [`STEPS_AFTER_RESUME`] steps.
/// Returns the bits of losses and gradient norms, and the notices.
fn resume_and_train(spec: &TrainSpec, world: usize, root: &Path) -> (Vec<(u64, u64)>, Vec<String>) {
    expect_equal_on_all_ranks(run_on_ranks(world, |c| {
        let (mut running, notices) = resume_newest_checkpoint(spec, c, root);
        (train_steps(&mut running, STEPS_AFTER_RESUME), notices)
    }))
}

#[test]
fn a_run_without_master_weights_resumes_on_any_number_of_workers_with_the_same_bits() {
    let expected =
        train_new_run(&create_spec_without_masters(0), 1, 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME)
            .split_off(STEPS_BEFORE_SAVE as usize);
    for (from_stage, n, asynchronous) in [(0, 1, false), (3, 2, true), (1, 4, true), (2, 3, false)] {
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&create_spec_without_masters(from_stage), n, dir.path(), asynchronous);
        for (to_stage, m) in [(0, 2), (1, 1), (2, 4), (3, 3)] {
            let (losses, notices) = resume_and_train(&create_spec_without_masters(to_stage), m, dir.path());
            assert_eq!(losses, expected, "{n} workers at stage {from_stage} to {m} at stage {to_stage}");
            assert!(notices.is_empty(), "{notices:?}");
        }
    }
}

/// Returns the weights that the optimizer updates, of a run of one rank, converted to f32.
fn collect_updated_weights(running: &RunningTrainer) -> Vec<f32> {
    let engine = &running.trainer.engine;
    (0..engine.shards.len())
        .flat_map(|u| {
            let params = engine.lock_resident_params(u);
            let mut wide = device::Buf::zeroed(params.len());
            running.trainer.ops.cast(wide.view_mut(), params.view());
            wide.host_slice().to_vec()
        })
        .collect()
}

/// Rounds each value to the nearest bf16.
fn round_to_bf16(values: &[f32]) -> Vec<f32> {
    let cpu = device::Cpu::new(1);
    let mut half = device::Buf::zeroed_as(Dtype::Bf16, values.len());
    let mut wide = device::Buf::zeroed(values.len());
    cpu.cast(half.view_mut(), values.into());
    cpu.cast(wide.view_mut(), half.view());
    wide.host_slice().to_vec()
}

#[test]
fn checkpoints_convert_to_runs_with_masters_and_back_with_a_notice() {
    let (bf16_dir, masters_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train_and_save(&create_spec_without_masters(2), 3, bf16_dir.path(), false);
    train_and_save(&create_spec_with_masters(1), 2, masters_dir.path(), false);
    let resume_weights = |spec: &TrainSpec, root: &Path| {
        let (running, notices) = resume_newest_checkpoint(spec, create_single_rank_comm(), root);
        (collect_updated_weights(&running), notices)
    };
    let (bf16, notices) = resume_weights(&create_spec_without_masters(0), bf16_dir.path());
    assert!(notices.is_empty(), "{notices:?}");
    assert_eq!(bf16, round_to_bf16(&bf16));
    let fp32 =
        TrainSpec { precision: Precision::Fp32, master_weights: true, ..create_spec_without_masters(0) };
    for (spec, name) in [(create_spec_with_masters(0), "to_masters"), (fp32, "to_fp32")] {
        let (weights, notices) = resume_weights(&spec, bf16_dir.path());
        assert_eq!(weights, bf16, "{name}");
        assert_notices_match_snapshot(&format!("master_weights_{name}"), &notices, bf16_dir.path());
    }
    let (masters, notices) = resume_weights(&create_spec_with_masters(0), masters_dir.path());
    assert!(notices.is_empty(), "{notices:?}");
    let (rounded, notices) = resume_weights(&create_spec_without_masters(0), masters_dir.path());
    assert_eq!(rounded, round_to_bf16(&masters));
    assert!(masters != rounded);
    assert_notices_match_snapshot("master_weights_to_bf16", &notices, masters_dir.path());
    // The converted runs have the same bits on any number of workers.
    for (spec, root) in [
        (&create_spec_without_masters as &dyn Fn(u8) -> TrainSpec, &masters_dir),
        (&create_spec_with_masters, &bf16_dir),
    ] {
        let expected = resume_and_train(&spec(0), 1, root.path()).0;
        assert_eq!(resume_and_train(&spec(3), 3, root.path()).0, expected);
    }
}

#[test]
fn a_checkpoint_stores_bf16_weights_and_gathers_them_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&create_spec_without_masters(3), 2, &dir.path().join("bf16"), false);
    train_and_save(&create_spec_with_masters(3), 2, &dir.path().join("masters"), false);
    let open = |name: &str| Checkpoint::open(&dir.path().join(name).join("step-00000003")).unwrap();
    let (checkpoint, create_spec_with_masters) = (open("bf16"), open("masters"));
    let weights = checkpoint.tensors().filter(|t| t.role == TensorRole::Weight);
    let elements: u64 = weights.map(|t| t.element_count()).sum();
    assert!(checkpoint.tensors().all(|t| (t.role == TensorRole::Weight) == (t.dtype == ckpt::Dtype::BF16)));
    let saved = create_spec_with_masters.total_shard_bytes() - checkpoint.total_shard_bytes();
    assert!((2 * elements).abs_diff(saved) < 4096, "{saved} bytes less, expected 2 × {elements}");
    assert!(ckpt::verify_checkpoints(&dir.path().join("bf16")).unwrap().is_sound());
    let out = dir.path().join("out");
    let report = gather_weights(&checkpoint, &out, &GatherOptions::default(), |_, _| ()).unwrap();
    assert_eq!((report.dtype, report.bytes), (ckpt::Dtype::BF16, 2 * elements));
    let ckpt::OpenedCheckpoint::External(gathered) = ckpt::open_checkpoint(&out).unwrap() else {
        panic!("gathered weights are an external checkpoint")
    };
    for t in checkpoint.tensors().filter(|t| t.role == TensorRole::Weight) {
        let (mut a, mut b) = (vec![0.0; t.element_count() as usize], vec![1.0; t.element_count() as usize]);
        checkpoint.read_f32(&t.name, t.role, 0..t.element_count(), &mut a).unwrap();
        let request = ckpt::F32ReadRequest { name: &t.name, role: t.role, start_element: 0, out: &mut b };
        gathered.read_verified(&mut [request]).unwrap();
        assert_eq!(a, b, "{}", t.name);
    }
}

/// Checks the memory plan of a bf16 run without fp32 master weights. One worker needs 14 bytes per
/// parameter (weights 2, AdamW states 8, gradients 4) instead of 18, and an fp32 copy of the tensor
/// that is being updated.
#[test]
fn the_memory_plan_of_a_run_without_master_weights_has_none() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("corpus.txt"), "the quick brown fox ".repeat(500)).unwrap();
    let parts = |train: &str, world: u32| {
        let text = format!(
            "run: {{workdir: {:?}}}\ncheckpoint: {{async: true}}\ntrain:\n  precision: bf16\n{train}  data: {{files: [corpus.txt], seq_len: 16}}\n  batch: {{global: 8, micro: 8}}\n",
            dir.path()
        );
        let loaded = jobspec::load_job(jobspec::JobSource::Text { name: "test".into(), text }, &[]);
        let job = loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0;
        let report = worker::TrainPreflight.check_job(&job, world, 1);
        assert!(report.errors.is_empty(), "{:?}", report.errors);
        let parts: BTreeMap<String, u64> = report.memory[0].parts.iter().cloned().collect();
        (report.parameters, parts)
    };
    let sum = |parts: &BTreeMap<String, u64>| -> u64 {
        let each = ["parameters", "master weights", "optimizer states", "gradients"];
        each.iter().filter_map(|name| parts.get(*name)).sum()
    };
    let (n, masters) = parts("", 1);
    let (n_bf16, bf16) = parts("  master_weights: false\n", 1);
    assert_eq!((n, sum(&masters), sum(&bf16)), (n_bf16, 18 * n, 14 * n));
    assert!(!bf16.contains_key("master weights"), "{bf16:?}");
    // The largest tensor is an MLP matrix of the default model.
    assert_eq!(bf16["fp32 copy of updated weights"], 4 * 256 * 688);
    assert_eq!(masters["checkpoint copy (async)"] - bf16["checkpoint copy (async)"], 2 * n);
    // At stage 1 each of four workers has all weights and updates a fourth of them.
    let (_, sharded) = parts("  master_weights: false\n  zero: {stage: 1}\n", 4);
    assert_eq!(sharded["parameters"], 2 * n);
    assert!(sharded["fp32 copy of updated weights"] <= bf16["fp32 copy of updated weights"]);
}

/// Trains a new run on learnable samples, and returns the losses. If `round_masters` is set, rounds
/// the master weights to the nearest bf16 before each step.
fn train_learnable_losses(spec: &TrainSpec, round_masters: bool, steps: u64) -> Vec<f64> {
    let mut running = build_trainer(spec, create_single_rank_comm(), 2).start_with_random_params();
    let source = LearnableSamples { vocab: spec.model.vocab_size, ignored: None };
    let round = |running: &mut RunningTrainer| {
        for u in 0..running.trainer.engine.shards.len() {
            running.trainer.engine.with_resident_params(u, |p| {
                let rounded = round_to_bf16(p.host_slice());
                p.host_slice_mut().copy_from_slice(&rounded);
            });
        }
    };
    (0..steps)
        .map(|_| {
            if round_masters {
                round(&mut running);
            }
            running.run_step(&source, RankStepReport::default()).unwrap().0.loss
        })
        .collect()
}

/// Checks that stochastic rounding does not lose small updates. Most updates are smaller than half
/// the distance of two bf16 values. Rounding to the nearest bf16 loses these updates. With
/// stochastic rounding the loss falls as with master weights.
#[test]
fn stochastic_rounding_keeps_small_updates() {
    let slow = |mut spec: TrainSpec| {
        (spec.model.initializer_range, spec.steps) = (0.3, 400);
        (spec.optimizer.lr, spec.optimizer.weight_decay) = (1e-4, 0.0);
        (spec.schedule.name, spec.schedule.warmup_steps) = (ScheduleName::Constant, 0);
        spec.batch = BatchSpec { global: 4, micro: 4 };
        spec
    };
    const STEPS: u64 = 300;
    let masters = train_learnable_losses(&slow(create_spec_with_masters(0)), false, STEPS);
    let stochastic = train_learnable_losses(&slow(create_spec_without_masters(0)), false, STEPS);
    let nearest = train_learnable_losses(&slow(create_spec_with_masters(0)), true, STEPS);
    let end = |curve: &[f64]| curve[curve.len() - 20..].iter().sum::<f64>() / 20.0;
    let decrease = |curve: &[f64]| 1.0 - end(curve) / curve[0];
    println!(
        "relative decrease: masters {:.4}, stochastic {:.4}, nearest {:.4}",
        decrease(&masters),
        decrease(&stochastic),
        decrease(&nearest)
    );
    // Measured: 0.284, 0.282, 0.006.
    assert!(decrease(&masters) > 0.2 && decrease(&nearest) < 0.05, "rounding to nearest stalls");
    let difference = masters.iter().zip(&stochastic).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max);
    println!("largest relative difference {difference:.4}");
    assert!(difference < 0.05, "{difference}: {stochastic:?}, with masters {masters:?}");
}
