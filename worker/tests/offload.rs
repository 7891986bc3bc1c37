//! Optimizer states in files (`train.zero.offload`): the same bits as in memory, also across
//! checkpoints, and no file is left at the end.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::*;
use std::path::Path;
use worker::stages::ResolvedSpec;

fn spec(stage: u8, name: OptimizerName, directory: Option<&Path>) -> TrainSpec {
    let mut spec = train_spec(odd_model(), stage, 8, 1, 11);
    spec.freeze = vec!["*.1.mlp.*".into()];
    spec.optimizer.name = name;
    if name != OptimizerName::Adamw {
        spec.optimizer.momentum = 0.9;
    }
    spec.zero.offload = directory.map(|directory| Offload::Files(directory.into()));
    spec
}

#[test]
fn states_in_files_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    for name in [OptimizerName::Adamw, OptimizerName::Sgd, OptimizerName::Muon] {
        let expected = train_fresh(&spec(0, name, None), 1, 1, 4);
        for (stage, world) in [(0, 2), (1, 3), (2, 4), (3, 3), (3, 1)] {
            let losses = train_fresh(&spec(stage, name, Some(dir.path())), world, 1, 4);
            assert_eq!(losses, expected, "{name:?}: world {world}, stage {stage}");
        }
    }
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "files are left");
}

/// The fp32 master weights stay in memory; the optimizer states are in files.
#[test]
fn states_in_files_give_the_same_bits_in_bf16() {
    let dir = tempfile::tempdir().unwrap();
    let spec = |stage, directory| {
        let spec = spec(stage, OptimizerName::Adamw, directory);
        TrainSpec { precision: Precision::Bf16, ..spec }
    };
    let expected = train_fresh(&spec(0, None), 1, 1, 4);
    for (stage, world) in [(1, 3), (3, 2)] {
        assert_eq!(
            train_fresh(&spec(stage, Some(dir.path())), world, 1, 4),
            expected,
            "world {world}, stage {stage}"
        );
    }
}

#[test]
fn checkpoints_store_and_restore_states_in_files() {
    let (states, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let adamw = |stage, offload: bool| spec(stage, OptimizerName::Adamw, offload.then_some(states.path()));
    let expected = train_fresh(&adamw(0, false), 1, 1, 5).split_off(3);
    on_ranks(3, |c| {
        let spec = adamw(3, true);
        let mut running = build_trainer(&spec, c, 1).start_fresh();
        train_steps(&mut running, 3);
        // States in files are saved synchronously, although the job sets `checkpoint.async`.
        let mut saver = checkpoint_saver(&running, &job_spec(&spec, dir.path(), true), dir.path());
        saver.begin(&mut running).unwrap();
        assert!(!saver.is_writing());
        saver.finish(&running).unwrap();
    });
    for (stage, offload, world) in [(0, true, 2), (2, false, 2), (1, true, 4)] {
        let after = on_ranks(world, |c| {
            let (mut running, _) = resume_newest(&adamw(stage, offload), c, dir.path());
            train_steps(&mut running, 2)
        });
        assert!(after.iter().all(|a| *a == expected), "stage {stage}, {world} workers, in files: {offload}");
    }
}

#[test]
fn an_unusable_offload_directory_is_reported_by_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let spec = spec(3, OptimizerName::Adamw, Some(&file));
    let ops: std::sync::Arc<dyn device::Ops> = std::sync::Arc::new(device::Cpu::new(1));
    let model = ResolvedSpec::new(&spec, spec.model.vocab_size).unwrap().build_model().unwrap();
    let error = model.shard(single_rank(), ops).unwrap().create_optimizer().err().unwrap();
    assert_eq!(error.code().name(), "offload-storage-unusable");
    assert_eq!(error.diagnostic().subject(), Some("train.zero.offload"));
}
