//! Tests of optimizer states in files (`train.zero.offload`): losses have the same bits as with
//! states in memory, also after a resume, and the files are removed at the end.
use crate::common::*;
use jobspec::*;
use std::path::Path;
use worker::trainer_stages::ResolvedSpec;

/// Creates the `train` section with optimizer states in files below `directory`, or in memory if
/// `directory` is `None`. Some parameters are frozen.
fn create_offload_spec(stage: u8, name: OptimizerName, directory: Option<&Path>) -> TrainSpec {
    let mut spec = create_train_spec(create_odd_sized_model(), stage, 8, 1, 11);
    spec.freeze = vec!["*.1.mlp.*".into()];
    spec.optimizer.name = name;
    if name != OptimizerName::Adamw {
        (spec.optimizer.momentum, spec.optimizer.beta1) = (0.9, Some(0.9));
    }
    spec.zero.offload = directory.map(|directory| OffloadTarget::Files(directory.into()));
    spec
}

#[test]
fn losses_with_optimizer_states_in_files_have_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    for name in [OptimizerName::Adamw, OptimizerName::Sgd, OptimizerName::Muon, OptimizerName::Adafactor] {
        let expected = train_new_run(&create_offload_spec(0, name, None), 1, 1, 4);
        for (stage, world) in [(0, 2), (1, 3), (2, 4), (3, 3), (3, 1)] {
            let losses = train_new_run(&create_offload_spec(stage, name, Some(dir.path())), world, 1, 4);
            assert_eq!(losses, expected, "{name:?}: world {world}, stage {stage}");
        }
    }
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "files are left");
}

/// Checks bf16 training with fp32 master weights in memory and optimizer states in files.
#[test]
fn bf16_losses_with_optimizer_states_in_files_have_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let create_offload_spec = |stage, directory| {
        let spec = create_offload_spec(stage, OptimizerName::Adamw, directory);
        TrainSpec { precision: Precision::Bf16, ..spec }
    };
    let expected = train_new_run(&create_offload_spec(0, None), 1, 1, 4);
    for (stage, world) in [(1, 3), (3, 2)] {
        assert_eq!(
            train_new_run(&create_offload_spec(stage, Some(dir.path())), world, 1, 4),
            expected,
            "world {world}, stage {stage}"
        );
    }
}

#[test]
fn checkpoints_store_and_restore_optimizer_states_in_files() {
    let (states, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let adamw = |stage, offload: bool| {
        create_offload_spec(stage, OptimizerName::Adamw, offload.then_some(states.path()))
    };
    let expected = train_new_run(&adamw(0, false), 1, 1, 5).split_off(3);
    run_on_ranks(3, |c| {
        let spec = adamw(3, true);
        let mut running = build_trainer(&spec, c, 1).start_with_random_params();
        train_steps(&mut running, 3);
        // States in files are saved synchronously, although the job sets `checkpoint.async`.
        let mut saver =
            create_checkpoint_saver(&running, &create_job_spec(&spec, dir.path(), true), dir.path());
        saver.begin_save(&mut running).unwrap();
        assert!(!saver.is_writing_in_background());
        saver.finish_and_commit_save(&running).unwrap();
    });
    for (stage, offload, world) in [(0, true, 2), (2, false, 2), (1, true, 4)] {
        let after = run_on_ranks(world, |c| {
            let (mut running, _) = resume_newest_checkpoint(&adamw(stage, offload), c, dir.path());
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
    let spec = create_offload_spec(3, OptimizerName::Adamw, Some(&file));
    let ops: std::sync::Arc<dyn device::Ops> = std::sync::Arc::new(device::Cpu::new(1));
    let model = ResolvedSpec::new(&spec, spec.model.vocab_size).unwrap().build_model().unwrap();
    let error = model
        .shard_model(create_single_rank_comm(), ops)
        .unwrap()
        .into_uninitialized_trainer()
        .err()
        .unwrap();
    assert_eq!(error.code().name(), "offload-storage-unusable");
    assert_eq!(error.diagnostic().subject(), Some("train.zero.offload"));
}
