//! Tests of interruptions: evaluations and generations that end early on all ranks, and cancelled
//! saves. The training that follows has the same bits as without interruption.
use crate::common::*;
use comm::Comm;
use jobspec::*;
use std::{cell::Cell, sync::Arc};
use worker::train::{generation::GenerationRequest, running_trainer::RunningTrainer};

/// The number of micro-batches of an evaluation.
const EVAL_MICRO_BATCHES: usize = 7;

/// Creates the `train` section of a model with or without experts. Each pass prefetches units and
/// retains some of them.
fn create_spec(stage: u8, family: &str) -> TrainSpec {
    let mut spec = create_train_spec(create_odd_sized_model(), stage, 6, 1, 11);
    (spec.zero.prefetch, spec.zero.max_live_parameters) = (2, 3000);
    if family == "mixtral" {
        (spec.model.num_experts, spec.model.num_experts_per_tok) = (Some(4), Some(2));
    }
    spec.model.family = family.into();
    spec
}

/// Interrupts an evaluation and a generation by a stop request, which `rank` reports at the
/// `calls`-th check for one. Asserts that every rank ends after the same number of checks.
fn interrupt_eval_and_generation(running: &mut RunningTrainer, rank: usize, calls: usize) {
    let source = SyntheticSamples { vocab: running.train_spec().model.vocab_size };
    let is_asked = running.trainer.engine.rank() == rank;
    let count = Cell::new(0);
    let is_stopping = || {
        count.set(count.get() + 1);
        is_asked && count.get() == calls
    };
    let evaluated = running.trainer.evaluate(&source, 3, EVAL_MICRO_BATCHES, &is_stopping).unwrap();
    assert_eq!((evaluated, count.replace(0)), (None, calls));
    let request = GenerationRequest::new(vec![1, 2], 5, 0.0, 7);
    let generated = request.generate(&mut running.trainer, 1, &is_stopping).unwrap();
    assert_eq!((generated, count.get()), (None, calls));
}

/// Trains two steps with an evaluation between them. Returns the losses and the evaluated loss.
fn train_and_evaluate(
    spec: &TrainSpec,
    comm: Arc<dyn Comm>,
    interruptions: &[(usize, usize)],
) -> (Vec<(u64, u64)>, u64) {
    let source = SyntheticSamples { vocab: spec.model.vocab_size };
    let mut running = build_trainer(spec, comm, 1).start_with_random_params();
    let mut losses = train_steps(&mut running, 1);
    for &(rank, calls) in interruptions {
        interrupt_eval_and_generation(&mut running, rank, calls);
    }
    let evaluated = running.trainer.evaluate(&source, 3, EVAL_MICRO_BATCHES, &|| false);
    let loss = evaluated.unwrap().unwrap().loss.to_bits();
    losses.extend(train_steps(&mut running, 1));
    (losses, loss)
}

#[test]
fn interrupted_evaluations_and_generations_do_not_change_later_steps() {
    for family in ["llama", "mixtral"] {
        let expected = train_and_evaluate(&create_spec(0, family), create_single_rank_comm(), &[]);
        for (stage, hosts) in
            [(0, &[0][..]), (3, &[0]), (1, &[0, 1]), (3, &[0, 0]), (2, &[0, 0, 1]), (3, &[0, 0, 1])]
        {
            let mut spec = create_spec(stage, family);
            if family == "mixtral" && hosts.len() == 2 {
                spec.experts.expert_parallel_size = 2;
            }
            let last = hosts.len() - 1;
            let interruptions = [(0, 1), (last, 1), (last, 2), (0, 3)];
            let results = run_on_hosts(hosts, |c| train_and_evaluate(&spec, c, &interruptions));
            assert_eq!(
                expect_equal_on_all_ranks(results),
                expected,
                "{family}, stage {stage}, hosts {hosts:?}"
            );
        }
    }
}

/// Cancels the second of three saves when the writer of a large shard has just begun. Checks that
/// this save leaves no checkpoint, and that the next one is complete.
#[test]
fn a_cancelled_save_leaves_no_checkpoint_and_the_next_save_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = create_train_spec(create_odd_sized_model(), 1, 4, 1, 11);
    spec.model.vocab_size = 400_000;
    let job = create_job_spec(&spec, dir.path(), true);
    let losses = expect_equal_on_all_ranks(run_on_ranks(2, |c| {
        let mut running = build_trainer(&spec, c, 1).start_with_random_params();
        let mut saver = create_checkpoint_saver(&running, &job, dir.path());
        let mut save = |running: &mut RunningTrainer, cancels: bool| {
            saver.begin_save(running).unwrap();
            if cancels {
                return saver.cancel_mostly_unwritten_save(running).unwrap();
            }
            saver.finish_and_commit_save(running).unwrap().map(|saved| saved.step)
        };
        train_steps(&mut running, 1);
        assert_eq!(save(&mut running, false), Some(1));
        train_steps(&mut running, 1);
        assert_eq!(save(&mut running, true), Some(2));
        train_steps(&mut running, 1);
        assert_eq!(save(&mut running, false), Some(3));
        train_steps(&mut running, 1)
    }));
    let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["latest", "step-00000001", "step-00000003"]);
    let (mut resumed, _) = resume_newest_checkpoint(&spec, create_single_rank_comm(), dir.path());
    assert_eq!(train_steps(&mut resumed, 1), losses);
}

/// Checks that the first save of a run is not cancelled, because the run has no other checkpoint.
#[test]
fn the_first_save_is_not_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let spec = create_spec(0, "llama");
    let job = create_job_spec(&spec, dir.path(), true);
    let mut running = build_trainer(&spec, create_single_rank_comm(), 1).start_with_random_params();
    let mut saver = create_checkpoint_saver(&running, &job, dir.path());
    assert_eq!(saver.cancel_mostly_unwritten_save(&running).unwrap(), None);
    saver.begin_save(&mut running).unwrap();
    assert_eq!(saver.cancel_mostly_unwritten_save(&running).unwrap(), None);
    assert_eq!(saver.finish_and_commit_save(&running).unwrap().map(|saved| saved.step), Some(0));
}
