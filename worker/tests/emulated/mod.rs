//! Trains on the emulated GPU: every rank is a thread, and all of them share the GPU.
#![allow(dead_code)] // each test file uses a part of this module
#[path = "../../device/tests/emulated_gpu/mod.rs"]
pub(crate) mod emulated_gpu;
#[path = "../../comm/tests/nccl/emulated_nccl.rs"]
pub(crate) mod emulated_nccl;

use crate::common::*;
use comm::{
    Comm,
    nccl::{NcclComm, NcclLibrary},
    staged::StagedComm,
};
use contract::job::*;
use device::{Cpu, Cuda, Ops, cuda::LibraryPaths};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use worker::{
    resume::{CheckpointDirs, resume},
    storage_layout::StorageLayout,
};

/// The bits of the loss and the gradient norm of each step.
pub(crate) type Curve = Vec<(u64, u64)>;

/// Whether GPUs that [`open_gpu`] opens use CUDA graphs.
pub(crate) static USE_GRAPHS: AtomicBool = AtomicBool::new(false);

/// Opens the emulated GPU.
pub(crate) fn open_gpu() -> Arc<Cuda> {
    let paths = LibraryPaths {
        configured: vec![emulated_gpu::library_directory().to_owned()],
        ..LibraryPaths::default()
    };
    let cuda = Cuda::open(&paths, 0, None).unwrap();
    cuda.set_graphs_enabled(USE_GRAPHS.load(Relaxed));
    Arc::new(cuda)
}

/// A Llama that is small enough for the emulated GPU.
pub(crate) fn llama_model() -> ModelSpec {
    ModelSpec {
        vocab_size: 37,
        hidden_size: 12,
        intermediate_size: 19,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        head_dim: 6,
        ..odd_model()
    }
}

/// The `train` section of [`llama_model`] for a ZeRO stage and a precision.
pub(crate) fn llama_spec(stage: u8, precision: Precision) -> TrainSpec {
    TrainSpec { precision, ..train_spec(llama_model(), stage, 4, 1, 7) }
}

/// The `train` section of a model with four experts of which each token uses two.
pub(crate) fn mixture_spec() -> TrainSpec {
    let model = ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(4),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(9),
        ..llama_model()
    };
    train_spec(model, 3, 4, 1, 7)
}

/// Runs `f` on `world` ranks that share the emulated GPU and communicate through host memory.
pub(crate) fn on_shared_gpu<T: Send>(
    world: usize,
    f: impl Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync,
) -> Vec<T> {
    on_ranks(world, |c| {
        let cuda = open_gpu();
        f(Arc::new(StagedComm::new(c, cuda.clone())), cuda)
    })
}

/// Trains a new run of `world` ranks on the shared emulated GPU for `steps` steps.
pub(crate) fn train_on_gpu(spec: &TrainSpec, world: usize, steps: u64) -> Curve {
    equal_on_all_ranks(on_shared_gpu(world, |comm, ops| {
        train_steps(&mut build_trainer_on(spec, comm, ops).start_fresh(), steps)
    }))
}

/// The largest relative difference between two curves, over all losses and gradient norms.
pub(crate) fn max_relative_difference(a: &Curve, b: &Curve) -> f64 {
    assert_eq!(a.len(), b.len());
    let values = |c: &Curve| c.iter().flat_map(|&(l, n)| [l, n]).map(f64::from_bits).collect::<Vec<_>>();
    let pairs = values(a).into_iter().zip(values(b));
    pairs.map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max)
}

/// Panics if the relative difference between two curves is above `limit` anywhere.
#[track_caller]
pub(crate) fn assert_near(gpu: &Curve, cpu: &Curve, limit: f64, what: &str) {
    let difference = max_relative_difference(gpu, cpu);
    assert!(difference <= limit, "{what}: relative difference {difference:e}");
}

/// Trains a new run of `world` ranks for `steps` steps; ranks communicate through an NCCL that the
/// tests emulate.
pub(crate) fn train_over_nccl(spec: &TrainSpec, world: usize, steps: u64) -> Curve {
    let nccl = NcclLibrary::open(&[emulated_nccl::library_directory().to_owned()]).unwrap();
    equal_on_all_ranks(on_ranks(world, |hosts| {
        let cuda = open_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
        train_steps(&mut build_trainer_on(spec, Arc::new(comm), cuda).start_fresh(), steps)
    }))
}

/// A function that runs another one on every rank: [`on_shared_gpu`] or [`on_cpu_ranks`].
pub(crate) type RunRanks<'a, T> =
    &'a dyn Fn(usize, &(dyn Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync)) -> Vec<T>;

/// Runs `f` on `world` ranks that compute on the CPU.
pub(crate) fn on_cpu_ranks<T: Send>(
    world: usize,
    f: &(dyn Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync),
) -> Vec<T> {
    on_ranks(world, |c| f(c, Arc::new(Cpu::new(1))))
}

/// Steps that [`train_and_save`] trains before it saves.
pub(crate) const BEFORE: u64 = 2;
/// Steps that [`resume_and_train`] trains.
pub(crate) const AFTER: u64 = 2;

/// Trains a new run for [`BEFORE`] steps and saves a checkpoint under `root`, in the background
/// during the next step if `asynchronous`.
pub(crate) fn train_and_save(
    on: RunRanks<()>,
    spec: &TrainSpec,
    world: usize,
    root: &Path,
    asynchronous: bool,
) {
    let job = job_spec(spec, root, asynchronous);
    on(world, &|comm, ops| {
        let mut running = build_trainer_on(spec, comm, ops).start_fresh();
        train_steps(&mut running, BEFORE);
        let mut saver = checkpoint_saver(&running, &job, root);
        saver.begin(&mut running).unwrap();
        if asynchronous {
            // A further step must not change the state that is being saved.
            train_steps(&mut running, 1);
        }
        assert_eq!(saver.finish(&running).unwrap().unwrap().step, BEFORE);
    });
}

/// Resumes from the checkpoint under `root` and trains for [`AFTER`] steps.
pub(crate) fn resume_and_train(on: RunRanks<Curve>, spec: &TrainSpec, world: usize, root: &Path) -> Curve {
    let job = job_spec(spec, root, false);
    equal_on_all_ranks(on(world, &|comm, ops| {
        let mut ready = build_trainer_on(spec, comm, ops);
        let dirs = CheckpointDirs { root, workdir: root, layout: &StorageLayout::shared(world) };
        let resumed = resume(&mut ready, &job, &dirs, DATA_DIGEST, &mut |_| Ok(())).unwrap();
        train_steps(&mut ready.start_at(resumed.unwrap().cursor), AFTER)
    }))
}
