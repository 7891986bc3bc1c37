//! Tests of resuming: a run that stopped on N workers resumes on M workers at any ZeRO stage with
//! the same bits. Notices report the settings that differ from the checkpoint.
use crate::common::*;
use device::Cpu;
use jobspec::*;
use std::{path::Path, sync::Arc};
use worker::checkpoint::{
    resume::{CheckpointLocations, resume_from_checkpoint},
    storage_topology::StorageTopology,
};

/// Number of steps before the checkpoint.
const STEPS_BEFORE_SAVE: u64 = 3;
/// Number of steps after the resume.
const STEPS_AFTER_RESUME: u64 = 2;

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
            // A further step must not change the state that is being saved.
            train_steps(&mut running, 1);
        }
        assert_eq!(saver.finish_and_commit_save(&running).unwrap().unwrap().step, STEPS_BEFORE_SAVE);
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

/// Creates the `train` section of the model for a ZeRO stage.
fn create_resume_spec(stage: u8) -> TrainSpec {
    create_train_spec(create_odd_sized_model(), stage, 8, 1, 11)
}

#[test]
fn a_run_resumes_on_any_number_of_workers_with_the_same_bits() {
    let expected = train_new_run(&create_resume_spec(0), 1, 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME)
        .split_off(STEPS_BEFORE_SAVE as usize);
    for (i, n) in [1, 2, 3, 4, 8].into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let from_stage = (i % 4) as u8;
        train_and_save(&create_resume_spec(from_stage), n, dir.path(), n % 2 == 0);
        for (j, m) in [1, 2, 3, 4, 8].into_iter().enumerate() {
            let to_stage = ((i + j + 3) % 4) as u8;
            let (losses, notices) = resume_and_train(&create_resume_spec(to_stage), m, dir.path());
            assert_eq!(losses, expected, "{n} workers at stage {from_stage} to {m} at stage {to_stage}");
            assert!(notices.is_empty(), "{notices:?}");
        }
    }
}

/// Checks that a run can resume in another precision, because a checkpoint stores the fp32 master
/// weights.
#[test]
fn a_bf16_run_resumes_on_any_instruction_set_with_the_same_bits() {
    let spec = TrainSpec { precision: Precision::Bf16, ..create_resume_spec(2) };
    let expected = train_new_run(&spec, 1, 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME)
        .split_off(STEPS_BEFORE_SAVE as usize);
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&spec, 2, dir.path(), false);
    for level in 0..Cpu::new_for_all_instruction_sets(1).len() {
        let curves = run_on_ranks(1, |c| {
            let cpu = Arc::new(Cpu::new_for_all_instruction_sets(1).remove(level));
            let (mut running, _) = try_resume_newest_checkpoint_on(&spec, c, dir.path(), cpu).unwrap();
            train_steps(&mut running, STEPS_AFTER_RESUME)
        });
        assert_eq!(curves[0], expected, "level {level}");
    }
}

#[test]
fn bf16_resumes_with_the_same_bits_and_from_fp32_with_a_notice() {
    let bf16 = |stage| TrainSpec { precision: Precision::Bf16, ..create_resume_spec(stage) };
    let expected = train_new_run(&bf16(0), 1, 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME)
        .split_off(STEPS_BEFORE_SAVE as usize);
    let (bf16_dir, fp32_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train_and_save(&bf16(2), 3, bf16_dir.path(), true);
    for (stage, world) in [(0, 2), (1, 4), (3, 1)] {
        let (losses, notices) = resume_and_train(&bf16(stage), world, bf16_dir.path());
        assert_eq!(losses, expected, "3 workers at stage 2 to {world} at stage {stage}");
        assert!(notices.is_empty(), "{notices:?}");
    }
    train_and_save(&create_resume_spec(1), 2, fp32_dir.path(), false);
    let (to_bf16, notices) = resume_and_train(&bf16(3), 3, fp32_dir.path());
    assert_notices_match_snapshot("resume_bf16_from_fp32", &notices, fp32_dir.path());
    assert_eq!(resume_and_train(&bf16(0), 1, fp32_dir.path()).0, to_bf16);
    let (to_fp32, notices) = resume_and_train(&create_resume_spec(0), 1, bf16_dir.path());
    assert_notices_match_snapshot("resume_fp32_from_bf16", &notices, bf16_dir.path());
    assert!(to_fp32 != expected && to_bf16 != expected, "the precisions differ");
}

#[test]
fn fp8_resumes_from_bf16_with_a_notice() {
    let spec_in = |stage, precision| {
        let (hidden_size, intermediate_size, num_attention_heads, head_dim) = (32, 48, 2, 16);
        let sizes = ModelSpec {
            hidden_size,
            intermediate_size,
            num_attention_heads,
            head_dim,
            ..create_odd_sized_model()
        };
        TrainSpec { model: sizes, precision, ..create_resume_spec(stage) }
    };
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&spec_in(2, Precision::Bf16), 3, dir.path(), false);
    let (losses, notices) = resume_and_train(&spec_in(0, Precision::Fp8), 1, dir.path());
    assert_notices_match_snapshot("resume_fp8_from_bf16", &notices, dir.path());
    assert_eq!(resume_and_train(&spec_in(3, Precision::Fp8), 2, dir.path()).0, losses);
    assert_ne!(resume_and_train(&spec_in(3, Precision::Bf16), 2, dir.path()).0, losses);
}

/// Checks that a checkpoint stores and restores the loss scale and the number of skipped steps.
#[test]
fn fp16_resumes_with_its_loss_scale() {
    let mut fp16 = create_resume_spec(3);
    fp16.precision = Precision::Fp16;
    fp16.loss_scale.loss_scale_window = 2;
    let expected = train_new_run(&fp16, 1, 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME)
        .split_off(STEPS_BEFORE_SAVE as usize);
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&fp16, 2, dir.path(), false);
    let manifest = std::fs::read_to_string(dir.path().join("step-00000003/manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let state = &manifest["facts"]["cursor"]["loss_scale"];
    let state = if state.is_null() { &manifest["cursor"]["loss_scale"] } else { state };
    assert_eq!(state["scale"], 131_072.0, "2^16, doubled after two steps: {state}");
    let (losses, _) = resume_and_train(&fp16, 3, dir.path());
    assert_eq!(losses, expected);
}

#[test]
fn a_damaged_checkpoint_is_skipped_with_a_notice() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&create_resume_spec(3), 2, dir.path(), false);
    let newer = dir.path().join("step-00000009");
    std::fs::create_dir(&newer).unwrap();
    for f in std::fs::read_dir(dir.path().join("step-00000003")).unwrap() {
        let f = f.unwrap();
        std::fs::copy(f.path(), newer.join(f.file_name())).unwrap();
    }
    let shard = newer.join("shard-00001-of-00002.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let expected = train_new_run(&create_resume_spec(0), 1, 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME)
        .split_off(STEPS_BEFORE_SAVE as usize);
    let (losses, notices) = resume_and_train(&create_resume_spec(3), 3, dir.path());
    assert_eq!(losses, expected);
    assert_notices_match_snapshot("resume_skipped_damaged", &notices, dir.path());
}

#[test]
fn a_checkpoint_of_another_model_or_optimizer_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&create_resume_spec(2), 2, dir.path(), false);
    let resume_error = |other: &TrainSpec| {
        let job = create_job_spec(other, dir.path(), false);
        let errors = run_on_ranks(2, |c| {
            let mut ready = build_trainer(other, c, 1);
            let dirs = CheckpointLocations {
                root: dir.path(),
                workdir: dir.path(),
                layout: &StorageTopology::for_shared_directory(2),
                memory: None,
            };
            resume_from_checkpoint(&mut ready, &job, &dirs, None, SYNTHETIC_DATA_DIGEST, &mut |_| Ok(()))
                .err()
                .unwrap()
        });
        assert_eq!(errors[0].to_worker_exit(), protocol::exit::WorkerExit::Checkpoint);
        errors.into_iter().next().unwrap()
    };
    let mut wider = create_resume_spec(2);
    wider.model.intermediate_size = 58;
    assert_eq!(resume_error(&wider).code().name(), "checkpoint-model-mismatch");
    let mut sgd = create_resume_spec(2);
    sgd.optimizer.name = OptimizerName::Sgd;
    sgd.optimizer.momentum = 0.9;
    let error = resume_error(&sgd);
    assert_eq!(error.code().name(), "resume-optimizer-mismatch");
    assert_eq!(*error.diagnostic().field("role").unwrap(), serde_json::json!("momentum"));
}

#[test]
fn changed_settings_are_reported_as_notices() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&create_resume_spec(1), 1, dir.path(), false);
    let mut changed = create_resume_spec(1);
    changed.optimizer.weight_decay = 0.2;
    changed.seed = 8;
    changed.steps = 30;
    let (_, notices) = resume_and_train(&changed, 2, dir.path());
    assert_notices_match_snapshot("resume_changed_settings", &notices, dir.path());
}
