//! Stop on N workers, resume on M, any stage to any stage: the losses go on with the same bits.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::*;
use std::path::Path;
use worker::{
    resume::{CheckpointDirs, resume},
    storage_layout::StorageLayout,
};

const BEFORE: u64 = 3;
const AFTER: u64 = 2;

/// Trains `BEFORE` steps and saves.
fn train_and_save(spec: &TrainSpec, world: usize, root: &Path, asynchronous: bool) {
    let job = job(spec, root, asynchronous);
    on_ranks(world, |c| {
        let mut running = build(spec, c, 1).start_fresh();
        steps(&mut running, BEFORE);
        let mut saver = saver(&running, &job, root);
        saver.begin(&mut running).unwrap();
        if asynchronous {
            // What is written is the state at `begin`, whatever happens meanwhile.
            steps(&mut running, 1);
        }
        assert_eq!(saver.finish(&running).unwrap().unwrap().step, BEFORE);
    });
}

/// Resumes and takes `AFTER` more steps; also the notices.
fn resume_and_train(spec: &TrainSpec, world: usize, root: &Path) -> (Vec<(u64, u64)>, Vec<String>) {
    let job = job(spec, root, false);
    let all = on_ranks(world, |c| {
        let mut bound = build(spec, c, 1);
        let mut events = Vec::new();
        let place = CheckpointDirs { root, workdir: root, layout: &StorageLayout::shared(world) };
        let resumed = resume(&mut bound, &job, &place, "made up", &mut |e| {
            events.push(format!("{e:?}"));
            Ok(())
        });
        let cursor = resumed.unwrap().expect("a checkpoint to resume from").cursor;
        (steps(&mut bound.start_at(cursor), AFTER), events)
    });
    all.into_iter().next().unwrap()
}

fn spec(stage: u8) -> TrainSpec {
    train_spec(odd_model(), stage, 8, 1, 11)
}

#[test]
fn every_number_of_workers_to_every_other() {
    let expected = fresh_run(&spec(0), 1, 1, BEFORE + AFTER).split_off(BEFORE as usize);
    for (i, n) in [1, 2, 3, 4, 8].into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let from_stage = (i % 4) as u8;
        train_and_save(&spec(from_stage), n, dir.path(), n % 2 == 0);
        for (j, m) in [1, 2, 3, 4, 8].into_iter().enumerate() {
            let to_stage = ((i + j + 3) % 4) as u8;
            let (got, events) = resume_and_train(&spec(to_stage), m, dir.path());
            assert_eq!(got, expected, "{n} workers at stage {from_stage} to {m} at stage {to_stage}");
            assert_eq!(events.len(), 1, "nothing but the resume to tell: {events:?}");
        }
    }
}

/// A checkpoint holds the fp32 master weights: every precision goes on from every other's, and says so.
#[test]
fn bf16_goes_on_with_the_same_bits_and_from_fp32() {
    let half = |stage| TrainSpec { precision: Precision::Bf16, ..spec(stage) };
    let expected = fresh_run(&half(0), 1, 1, BEFORE + AFTER).split_off(BEFORE as usize);
    let (from_half, from_full) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train_and_save(&half(2), 3, from_half.path(), true);
    for (stage, world) in [(0, 2), (1, 4), (3, 1)] {
        let (got, events) = resume_and_train(&half(stage), world, from_half.path());
        assert_eq!(got, expected, "3 workers at stage 2 to {world} at stage {stage}");
        assert_eq!(events.len(), 1, "nothing but the resume to tell: {events:?}");
    }
    train_and_save(&spec(1), 2, from_full.path(), false);
    let (one, events) = resume_and_train(&half(3), 3, from_full.path());
    assert!(events.iter().any(|e| e.contains("train.precision is bf16 (checkpoint: fp32)")), "{events:?}");
    let (other, _) = resume_and_train(&half(0), 1, from_full.path());
    assert_eq!(one, other);
    let (full, events) = resume_and_train(&spec(0), 1, from_half.path());
    assert!(events.iter().any(|e| e.contains("train.precision is fp32 (checkpoint: bf16)")), "{events:?}");
    assert!(full != expected && one != expected, "the precisions differ");
}

#[test]
fn fp8_goes_on_from_bf16_and_says_so() {
    let of = |stage, precision| {
        let (hidden_size, intermediate_size, num_attention_heads, head_dim) = (32, 48, 2, 16);
        let sizes =
            ModelSpec { hidden_size, intermediate_size, num_attention_heads, head_dim, ..odd_model() };
        TrainSpec { model: sizes, precision, ..spec(stage) }
    };
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&of(2, Precision::Bf16), 3, dir.path(), false);
    let (one, events) = resume_and_train(&of(0, Precision::Fp8), 1, dir.path());
    assert!(events.iter().any(|e| e.contains("train.precision is fp8 (checkpoint: bf16)")), "{events:?}");
    assert_eq!(resume_and_train(&of(3, Precision::Fp8), 2, dir.path()).0, one);
    assert_ne!(resume_and_train(&of(3, Precision::Bf16), 2, dir.path()).0, one);
}

/// The loss scale and the count of skipped steps go on, too.
#[test]
fn fp16_goes_on_with_its_loss_scale() {
    let mut half = spec(3);
    half.precision = Precision::Fp16;
    half.loss_scale.loss_scale_window = 2;
    let expected = fresh_run(&half, 1, 1, BEFORE + AFTER).split_off(BEFORE as usize);
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&half, 2, dir.path(), false);
    let manifest = std::fs::read_to_string(dir.path().join("step-00000003/manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let state = &manifest["facts"]["cursor"]["loss_scale"];
    let state = if state.is_null() { &manifest["cursor"]["loss_scale"] } else { state };
    assert_eq!(state["scale"], 131_072.0, "2^16, doubled after two steps: {state}");
    let (got, _) = resume_and_train(&half, 3, dir.path());
    assert_eq!(got, expected);
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_said_so() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&spec(3), 2, dir.path(), false);
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
    let expected = fresh_run(&spec(0), 1, 1, BEFORE + AFTER).split_off(BEFORE as usize);
    let (got, events) = resume_and_train(&spec(3), 3, dir.path());
    assert_eq!(got, expected);
    assert!(
        events.iter().any(|e| e.contains("skipped damaged checkpoint") && e.contains("step-00000009")),
        "{events:?}"
    );
}

#[test]
fn another_model_or_optimizer_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&spec(2), 2, dir.path(), false);
    let refused = |other: &TrainSpec| {
        let job = job(other, dir.path(), false);
        let errors = on_ranks(2, |c| {
            let mut bound = build(other, c, 1);
            let place =
                CheckpointDirs { root: dir.path(), workdir: dir.path(), layout: &StorageLayout::shared(2) };
            resume(&mut bound, &job, &place, "made up", &mut |_| Ok(())).err().unwrap()
        });
        assert_eq!(errors[0].exit(), contract::exit::WorkerExit::Checkpoint);
        errors.into_iter().next().unwrap()
    };
    let mut wider = spec(2);
    wider.model.intermediate_size = 58;
    assert_eq!(refused(&wider).code().name(), "checkpoint-model-mismatch");
    let mut sgd = spec(2);
    sgd.optimizer.name = OptimizerName::Sgd;
    sgd.optimizer.momentum = 0.9;
    let error = refused(&sgd);
    assert_eq!(error.code().name(), "resume-optimizer-mismatch");
    assert_eq!(*error.diagnostic().field("role").unwrap(), serde_json::json!("momentum"));
}

#[test]
fn changed_settings_are_told() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(&spec(1), 1, dir.path(), false);
    let mut changed = spec(1);
    changed.optimizer.weight_decay = 0.2;
    changed.seed = 8;
    changed.steps = 30;
    let (_, events) = resume_and_train(&changed, 2, dir.path());
    assert!(events.iter().any(|e| e.contains("weight_decay 0.2 (checkpoint: 0.1)")), "{events:?}");
    assert!(events.iter().any(|e| e.contains("train.seed is 8 (checkpoint: 7)")), "{events:?}");
    assert!(events.iter().any(|e| e.contains("train.steps is 30 (checkpoint: 20)")), "{events:?}");
}
