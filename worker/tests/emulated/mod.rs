//! Ranks whose threads share an emulated card, or CPUs, and what they do in tests.
#![allow(dead_code)] // not every file of tests uses all of it
#[path = "../../device/tests/emulated_gpu/mod.rs"]
pub(crate) mod emulated_gpu;
#[path = "../../comm/tests/nccl/stand_in.rs"]
pub(crate) mod stand_in;

use crate::common::*;
use comm::{
    Comm,
    nccl::{Nccl, NcclComm},
    staged::Staged,
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

/// Losses and norms of some steps, as bits.
pub(crate) type Curve = Vec<(u64, u64)>;

/// Are cards asked for their work by graphs?
pub(crate) static GRAPHS: AtomicBool = AtomicBool::new(false);

pub(crate) fn cuda() -> Arc<Cuda> {
    let places = LibraryPaths {
        configured: vec![emulated_gpu::library_directory().to_owned()],
        ..LibraryPaths::default()
    };
    let cuda = Cuda::open(&places, 0, None).unwrap();
    cuda.set_graphs_enabled(GRAPHS.load(Relaxed));
    Arc::new(cuda)
}

/// Small enough for a card that is emulated.
pub(crate) fn llama() -> ModelSpec {
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

pub(crate) fn spec(stage: u8, precision: Precision) -> TrainSpec {
    TrainSpec { precision, ..train_spec(llama(), stage, 4, 1, 7) }
}

/// The same with experts.
pub(crate) fn mixture() -> TrainSpec {
    let model = ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(4),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(9),
        ..llama()
    };
    train_spec(model, 3, 4, 1, 7)
}

/// Runs `f` on ranks that share the card.
pub(crate) fn on_card<T: Send>(world: usize, f: impl Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync) -> Vec<T> {
    on_ranks(world, |c| {
        let cuda = cuda();
        f(Arc::new(Staged::new(c, cuda.clone())), cuda)
    })
}

pub(crate) fn run(spec: &TrainSpec, world: usize, n: u64) -> Curve {
    let all = on_card(world, |comm, ops| steps(&mut build_on(spec, comm, ops).start_fresh(), n));
    assert!(all.iter().all(|curve| *curve == all[0]), "ranks disagree");
    all.into_iter().next().unwrap()
}

/// The largest difference of two curves, relative.
pub(crate) fn apart(a: &Curve, b: &Curve) -> f64 {
    assert_eq!(a.len(), b.len());
    let values = |c: &Curve| c.iter().flat_map(|&(l, n)| [l, n]).map(f64::from_bits).collect::<Vec<_>>();
    let pairs = values(a).into_iter().zip(values(b));
    pairs.map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max)
}

#[track_caller]
pub(crate) fn assert_near(card: &Curve, cpu: &Curve, limit: f64, what: &str) {
    let apart = apart(card, cpu);
    assert!(apart <= limit, "{what}: {apart:e} apart");
}

/// As [`run`], over NCCL as far as a stand-in goes.
pub(crate) fn run_over_nccl(spec: &TrainSpec, world: usize, n: u64) -> Curve {
    let nccl = Nccl::open(&[stand_in::folder().to_owned()]).unwrap();
    let all = on_ranks(world, |hosts| {
        let cuda = cuda();
        let comm = NcclComm::meet(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
        steps(&mut build_on(spec, Arc::new(comm), cuda).start_fresh(), n)
    });
    assert!(all.iter().all(|curve| *curve == all[0]), "ranks disagree");
    all.into_iter().next().unwrap()
}

/// What ranks on one kind of device do, as [`on_card`].
pub(crate) type On<'a, T> = &'a dyn Fn(usize, &(dyn Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync)) -> Vec<T>;

pub(crate) fn on_cpu<T: Send>(world: usize, f: &(dyn Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync)) -> Vec<T> {
    on_ranks(world, |c| f(c, Arc::new(Cpu::new(1))))
}

pub(crate) const BEFORE: u64 = 2;
pub(crate) const AFTER: u64 = 2;

pub(crate) fn train_and_save(on: On<()>, spec: &TrainSpec, world: usize, root: &Path, asynchronous: bool) {
    let job = job(spec, root, asynchronous);
    on(world, &|comm, ops| {
        let mut running = build_on(spec, comm, ops).start_fresh();
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

pub(crate) fn resume_and_train(on: On<Curve>, spec: &TrainSpec, world: usize, root: &Path) -> Curve {
    let job = job(spec, root, false);
    let all = on(world, &|comm, ops| {
        let mut bound = build_on(spec, comm, ops);
        let place = CheckpointDirs { root, workdir: root, layout: &StorageLayout::shared(world) };
        let resumed = resume(&mut bound, &job, &place, "made up", &mut |_| Ok(())).unwrap();
        steps(&mut bound.start_at(resumed.unwrap().cursor), AFTER)
    });
    all.into_iter().next().unwrap()
}
