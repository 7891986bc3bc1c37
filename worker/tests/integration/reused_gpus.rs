//! Tests that GPUs on which training was abandoned, because another rank failed, train again in the
//! same process, with the losses of GPUs that were just opened.
use crate::{common::*, emulated::*, emulated_nccl};
use comm::{
    Comm,
    nccl::{NcclComm, NcclLibrary},
};
use device::{Cuda, Dtype, Storage};
use jobspec::{Precision, TrainSpec};
use protocol::exit::WorkerExit;
use std::{sync::Arc, time::Duration};
use worker::train::step::RankStepReport;

/// Number of ranks and of emulated GPUs.
const WORLD: usize = 3;
/// Number of steps of the run whose losses are compared.
const STEPS: u64 = 5;

/// Trains on the GPU of each rank, with a new communicator, until the rank `failing` aborts
/// the group after `steps` steps. Checks that every other rank ends because of this abort.
fn abandon_training(spec: &TrainSpec, gpus: &[Arc<Cuda>], failing: usize, steps: u64) {
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    run_on_ranks(WORLD, |hosts| {
        let cuda = gpus[hosts.rank()].clone();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
        let comm = Arc::new(comm);
        let mut running = build_trainer_on(spec, comm.clone(), cuda).start_with_random_params();
        train_steps(&mut running, steps);
        if comm.rank() == failing {
            return comm.abort("intended");
        }
        let source = SyntheticSamples { vocab: spec.model.vocab_size };
        let error = running.run_step(&source, RankStepReport::default()).unwrap_err();
        assert_eq!(error.to_worker_exit(), WorkerExit::Aborted, "{error}");
    });
}

#[test]
fn gpus_of_abandoned_training_train_again_with_the_same_losses() {
    for (stage, graphs) in [(3, false), (1, true)] {
        let spec = create_llama_train_spec(stage, Precision::Fp32);
        let expected = train_over_emulated_nccl(&spec, WORLD, STEPS);
        let gpus: Vec<Arc<Cuda>> = (0..WORLD).map(|_| open_emulated_gpu()).collect();
        let mut free_bytes = Vec::new();
        for attempt in 0..WORLD {
            gpus.iter().for_each(|cuda| cuda.set_graphs_enabled(graphs));
            // with CUDA graphs, later attempts replace graphs that have been launched
            abandon_training(&spec, &gpus, attempt, 1 + 3 * attempt as u64);
            gpus.iter().for_each(|cuda| cuda.reset().unwrap());
            assert!(gpus.iter().all(|cuda| cuda.graph_stats().cached_graphs == 0));
            free_bytes.push(gpus[0].query_memory_info().unwrap().0);
        }
        assert!(free_bytes.iter().all(|free| *free == free_bytes[0]), "{free_bytes:?}");
        let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
        let losses = expect_equal_on_all_ranks(run_on_ranks(WORLD, |hosts| {
            let cuda = gpus[hosts.rank()].clone();
            cuda.set_graphs_enabled(graphs);
            let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
            train_steps(&mut build_trainer_on(&spec, Arc::new(comm), cuda).start_with_random_params(), STEPS)
        }));
        assert_eq!(losses, expected, "stage {stage}");
    }
}

#[test]
fn a_gpu_that_has_failed_cannot_be_reset() {
    let cuda = open_emulated_gpu();
    drop(cuda.zeroed(Dtype::F32, usize::MAX / 8));
    let error = cuda.reset().unwrap_err();
    assert_eq!(diagnostic::Diagnostic::from(error).code(), diagnostic::codes::device::GPU_OUT_OF_MEMORY);
}
