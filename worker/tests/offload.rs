//! Optimizer states in files: the same bits as in memory, through checkpoints too; and nothing is left behind.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::*;
use std::path::Path;
use worker::{
    resume::{CheckpointDirs, resume},
    stages::ResolvedSpec,
    storage_layout::StorageLayout,
};

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
        let expected = fresh_run(&spec(0, name, None), 1, 1, 4);
        for (stage, world) in [(0, 2), (1, 3), (2, 4), (3, 3), (3, 1)] {
            let found = fresh_run(&spec(stage, name, Some(dir.path())), world, 1, 4);
            assert_eq!(found, expected, "{name:?}: world {world}, stage {stage}");
        }
    }
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "files are left");
}

/// Master weights in fp32 stay in memory, their states lie in files.
#[test]
fn states_in_files_of_a_run_in_bf16() {
    let dir = tempfile::tempdir().unwrap();
    let spec = |stage, directory| {
        let spec = spec(stage, OptimizerName::Adamw, directory);
        TrainSpec { precision: Precision::Bf16, ..spec }
    };
    let expected = fresh_run(&spec(0, None), 1, 1, 4);
    for (stage, world) in [(1, 3), (3, 2)] {
        assert_eq!(
            fresh_run(&spec(stage, Some(dir.path())), world, 1, 4),
            expected,
            "world {world}, stage {stage}"
        );
    }
}

#[test]
fn checkpoints_hold_them_and_fill_them() {
    let (states, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let of = |stage, offload: bool| spec(stage, OptimizerName::Adamw, offload.then_some(states.path()));
    let expected = fresh_run(&of(0, false), 1, 1, 5).split_off(3);
    on_ranks(3, |c| {
        let spec = of(3, true);
        let mut running = build(&spec, c, 1).start_fresh();
        steps(&mut running, 3);
        // asked for in the background: it is not
        let mut saver = saver(&running, &job(&spec, dir.path(), true), dir.path());
        saver.begin(&mut running).unwrap();
        assert!(!saver.is_writing());
        saver.finish(&running).unwrap();
    });
    for (stage, offload, world) in [(0, true, 2), (2, false, 2), (1, true, 4)] {
        let after = on_ranks(world, |c| {
            let spec = of(stage, offload);
            let mut bound = build(&spec, c, 1);
            let place = CheckpointDirs {
                root: dir.path(),
                workdir: dir.path(),
                layout: &StorageLayout::shared(world),
            };
            let job = job(&spec, dir.path(), false);
            let resumed = resume(&mut bound, &job, &place, "made up", &mut |_| Ok(())).unwrap().unwrap();
            steps(&mut bound.start_at(resumed.cursor), 2)
        });
        assert!(after.iter().all(|a| *a == expected), "stage {stage}, {world} workers, in files: {offload}");
    }
}

#[test]
fn a_directory_that_cannot_be_made_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let spec = spec(3, OptimizerName::Adamw, Some(&file));
    let comm: std::sync::Arc<dyn comm::Comm> = std::sync::Arc::new(comm::local::group(1).remove(0));
    let ops: std::sync::Arc<dyn device::Ops> = std::sync::Arc::new(device::Cpu::new(1));
    let parameters = ResolvedSpec::new(&spec, spec.model.vocab_size).unwrap().build_model().unwrap();
    let error = parameters.shard(comm, ops).unwrap().create_optimizer().err().unwrap();
    assert_eq!(error.code().name(), "offload-storage-unusable");
    assert_eq!(error.diagnostic().subject(), Some("train.zero.offload"));
}
