//! Helpers that train on the emulated GPU: every rank is a thread, and all ranks share the GPU.
use crate::{common::*, emulated_gpu, emulated_nccl};
use comm::{
    Comm,
    nccl::{NcclComm, NcclLibrary},
    staged::StagedComm,
};
use device::{Cpu, Cuda, Ops, cuda::LibrarySearchPaths};
use jobspec::*;
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use worker::checkpoint::{
    resume::{CheckpointLocations, resume_from_checkpoint},
    storage_topology::StorageTopology,
};

/// The losses of a run: the bits of the loss and the gradient norm of each step.
pub(crate) type LossCurve = Vec<(u64, u64)>;

/// Whether GPUs that [`open_emulated_gpu`] opens use CUDA graphs.
pub(crate) static USE_CUDA_GRAPHS: AtomicBool = AtomicBool::new(false);

/// Opens the emulated GPU, with CUDA graphs if [`USE_CUDA_GRAPHS`] is set.
pub(crate) fn open_emulated_gpu() -> Arc<Cuda> {
    let paths = LibrarySearchPaths {
        configured: vec![emulated_gpu::library_directory().to_owned()],
        ..LibrarySearchPaths::default()
    };
    let cuda = Cuda::open(&paths, 0, None).unwrap();
    cuda.set_graphs_enabled(USE_CUDA_GRAPHS.load(Relaxed));
    Arc::new(cuda)
}

/// Creates the `train.model` section of a Llama that is small enough for the emulated GPU.
pub(crate) fn create_small_llama_model() -> ModelSpec {
    ModelSpec {
        vocab_size: 37,
        hidden_size: 12,
        intermediate_size: 19,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        head_dim: 6,
        ..create_odd_sized_model()
    }
}

/// Creates the `train` section of the small Llama for a ZeRO stage and a precision.
pub(crate) fn create_llama_train_spec(stage: u8, precision: Precision) -> TrainSpec {
    TrainSpec { precision, ..create_train_spec(create_small_llama_model(), stage, 4, 1, 7) }
}

/// Creates the `train` section of a small model with four experts, of which each token uses two.
pub(crate) fn create_moe_train_spec() -> TrainSpec {
    let model = ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(4),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(9),
        ..create_small_llama_model()
    };
    create_train_spec(model, 3, 4, 1, 7)
}

/// Runs `f` on `world` ranks that share the emulated GPU and communicate through host memory.
pub(crate) fn run_on_shared_gpu<T: Send>(
    world: usize,
    f: impl Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync,
) -> Vec<T> {
    run_on_ranks(world, |c| {
        let cuda = open_emulated_gpu();
        f(Arc::new(StagedComm::new(c, cuda.clone())), cuda)
    })
}

/// Trains a new run of `world` ranks on the shared emulated GPU for `steps` steps. Asserts that all
/// ranks compute equal losses.
pub(crate) fn train_on_emulated_gpu(spec: &TrainSpec, world: usize, steps: u64) -> LossCurve {
    expect_equal_on_all_ranks(run_on_shared_gpu(world, |comm, ops| {
        train_steps(&mut build_trainer_on(spec, comm, ops).start_with_random_params(), steps)
    }))
}

/// Computes the largest relative difference between two curves, over all losses and gradient norms.
pub(crate) fn compute_max_relative_difference(a: &LossCurve, b: &LossCurve) -> f64 {
    assert_eq!(a.len(), b.len());
    let values = |c: &LossCurve| c.iter().flat_map(|&(l, n)| [l, n]).map(f64::from_bits).collect::<Vec<_>>();
    let pairs = values(a).into_iter().zip(values(b));
    pairs.map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max)
}

/// Asserts that the largest relative difference between two curves is at most `limit`.
#[track_caller]
pub(crate) fn assert_curves_near(gpu: &LossCurve, cpu: &LossCurve, limit: f64, what: &str) {
    let difference = compute_max_relative_difference(gpu, cpu);
    assert!(difference <= limit, "{what}: relative difference {difference:e}");
}

/// Trains a new run of `world` ranks for `steps` steps on emulated GPUs that communicate through
/// the emulated NCCL. Asserts that all ranks compute equal losses.
pub(crate) fn train_over_emulated_nccl(spec: &TrainSpec, world: usize, steps: u64) -> LossCurve {
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    expect_equal_on_all_ranks(run_on_ranks(world, |hosts| {
        let cuda = open_emulated_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
        train_steps(&mut build_trainer_on(spec, Arc::new(comm), cuda).start_with_random_params(), steps)
    }))
}

/// A function that calls another function on every rank: [`run_on_shared_gpu`] or
/// [`run_on_cpu_ranks`].
pub(crate) type RunOnRanksFn<'a, T> =
    &'a dyn Fn(usize, &(dyn Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync)) -> Vec<T>;

/// Runs `f` on `world` ranks that compute on the CPU.
pub(crate) fn run_on_cpu_ranks<T: Send>(
    world: usize,
    f: &(dyn Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync),
) -> Vec<T> {
    run_on_ranks(world, |c| f(c, Arc::new(Cpu::new(1))))
}

/// Number of steps that [`train_and_save`] trains before the checkpoint.
pub(crate) const STEPS_BEFORE_SAVE: u64 = 2;
/// Number of steps that [`resume_and_train`] trains.
pub(crate) const STEPS_AFTER_RESUME: u64 = 2;

/// Trains a new run for [`STEPS_BEFORE_SAVE`] steps and saves a checkpoint under `root`. If
/// `asynchronous` is set, saves in the background during the next step.
pub(crate) fn train_and_save(
    on: RunOnRanksFn<()>,
    spec: &TrainSpec,
    world: usize,
    root: &Path,
    asynchronous: bool,
) {
    let job = create_job_spec(spec, root, asynchronous);
    on(world, &|comm, ops| {
        let mut running = build_trainer_on(spec, comm, ops).start_with_random_params();
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

/// Resumes from the checkpoint under `root` and trains for [`STEPS_AFTER_RESUME`] steps.
pub(crate) fn resume_and_train(
    on: RunOnRanksFn<LossCurve>,
    spec: &TrainSpec,
    world: usize,
    root: &Path,
) -> LossCurve {
    let job = create_job_spec(spec, root, false);
    expect_equal_on_all_ranks(on(world, &|comm, ops| {
        let mut ready = build_trainer_on(spec, comm, ops);
        let dirs = CheckpointLocations {
            root,
            workdir: root,
            layout: &StorageTopology::for_shared_directory(world),
            memory: None,
        };
        let resumed =
            resume_from_checkpoint(&mut ready, &job, &dirs, None, SYNTHETIC_DATA_DIGEST, &mut |_| Ok(()))
                .unwrap();
        train_steps(&mut ready.start_at_position(resumed.unwrap().cursor), STEPS_AFTER_RESUME)
    }))
}
