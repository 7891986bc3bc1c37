//! Trains a model for a few steps with one or several ranks on a GPU or the CPU, to get losses that
//! `launch gpu-check` compares.
use super::check_job::{GpuOpener, build_trainer, run_check, train_one_step};
use crate::gpu::to_unusable_nccl_error;
use comm::{
    Comm,
    nccl::{NcclComm, NcclLibrary},
    staged::StagedComm,
    thread_comm,
};
use device::{Cuda, Ops};
use diagnostic::{Diagnostic, codes};
use jobspec::TrainSpec;
use std::{panic::resume_unwind, sync::Arc, time::Duration};

/// The longest wait until all ranks have joined the NCCL communicator.
const NCCL_TIMEOUT: Duration = Duration::from_secs(60);

/// The results of a short training run, which `launch gpu-check` compares with another one: the
/// loss and the gradient norm of each step.
pub(super) type TrainingCurve = Vec<(f64, f64)>;

/// Trains one rank for `steps` steps from initial weights on the device of `ops`, and returns the
/// loss and the gradient norm of each step.
pub(super) fn train_for_curve(
    train: &TrainSpec,
    comm: Arc<dyn Comm>,
    ops: Arc<dyn Ops>,
    steps: usize,
) -> diagnostic::Result<TrainingCurve> {
    run_check(|| {
        let mut running = build_trainer(train, comm, ops)?.start_with_random_params();
        (0..steps).map(|_| Ok(train_one_step(&mut running)?)).collect()
    })
}

/// Trains on the GPU as one rank, which exchanges data with the other ranks through host memory or
/// with NCCL, and returns the losses. `hosts` connects the ranks. Calls `on_connected` once the
/// ranks are connected.
pub(super) fn train_rank_for_curve(
    train: &TrainSpec,
    open: GpuOpener,
    nccl: Option<&NcclLibrary>,
    hosts: Arc<dyn Comm>,
    steps: usize,
    on_connected: impl FnOnce(Arc<dyn Comm>),
) -> diagnostic::Result<TrainingCurve> {
    let cuda = open()?;
    let comm = connect_gpu(nccl, &cuda, hosts)?;
    on_connected(comm.clone());
    train_for_curve(train, comm, cuda, steps)
}

/// Connects the GPU of this rank with those of the ranks of `hosts`, with NCCL if `nccl` is given
/// and through host memory otherwise.
pub(super) fn connect_gpu(
    nccl: Option<&NcclLibrary>,
    cuda: &Arc<Cuda>,
    hosts: Arc<dyn Comm>,
) -> diagnostic::Result<Arc<dyn Comm>> {
    let Some(nccl) = nccl else { return Ok(Arc::new(StagedComm::new(hosts, cuda.clone()))) };
    let comm = NcclComm::connect(nccl, cuda.clone(), hosts, NCCL_TIMEOUT);
    Ok(Arc::new(comm.map_err(to_unusable_nccl_error)?))
}

/// Trains on the GPU with `world` ranks, which are threads, and returns the loss and the gradient
/// norm of each step. Fails if the ranks have different results.
pub(super) fn train_on_gpu_for_curve(
    train: &TrainSpec,
    open: GpuOpener,
    nccl: Option<&NcclLibrary>,
    world: usize,
    steps: usize,
) -> diagnostic::Result<TrainingCurve> {
    let run_rank = |hosts| train_rank_for_curve(train, open, nccl, hosts, steps, drop);
    let results: Vec<diagnostic::Result<TrainingCurve>> = std::thread::scope(|s| {
        let threads: Vec<_> = thread_comm::create_thread_group(world)
            .into_iter()
            .map(|comm| s.spawn(|| run_rank(Arc::new(comm))))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    require_equal_curves(results.into_iter().collect::<Result<Vec<_>, _>>()?)
}

/// Returns the losses of rank 0 if all ranks report the same losses, and fails otherwise.
pub(super) fn require_equal_curves(mut curves: Vec<TrainingCurve>) -> diagnostic::Result<TrainingCurve> {
    let (world, first) = (curves.len(), curves.swap_remove(0));
    if curves.iter().any(|other| *other != first) {
        let message = format!("the {world} ranks computed different losses");
        return Err(Diagnostic::error(codes::training::RANKS_DISAGREE, message));
    }
    Ok(first)
}
