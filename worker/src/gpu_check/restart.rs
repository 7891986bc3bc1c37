//! Checks, for `launch gpu-check`, that a process whose training was abandoned can train again on
//! its GPU, as workers do that keep their process when another rank fails.
use super::{
    check_job::{
        GpuOpener, build_check_job, build_trainer, require_train_section, run_check, train_one_step,
    },
    curve_cases::select_curve_cases,
    curve_training::{TrainingCurve, connect_gpu},
    message::{PartOutput, ResultRow, RowResult},
};
use crate::gpu::collect_library_search_paths;
use comm::{Comm, nccl::NcclLibrary, thread_comm};
use device::{Cuda, cuda::CudaLibrary};
use diagnostic::{Diagnostic, codes};
use jobspec::TrainSpec;
use protocol::exit::WorkerExit;
use serde_json::json;
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// The losses of a training that was then aborted, and how long its parts took.
struct AbandonedTraining {
    curve: TrainingCurve,
    /// From the beginning to the connected communicator.
    connect_time: Duration,
    /// From the abort to a GPU that is ready for other work.
    reset_time: Duration,
}

/// Trains with one rank and CUDA graphs, over NCCL if the machine has it, aborts the communicator,
/// resets the GPU, and does the same again. Reports whether the losses are equal, and how long the
/// reset takes.
pub(super) fn check_restart(output: &PartOutput, open: GpuOpener, tiny: bool) -> diagnostic::Result<()> {
    let case = &select_curve_cases(tiny)[0];
    let directories = collect_library_search_paths(&[], Path::new("")).list_directories(CudaLibrary::Nccl);
    let nccl = NcclLibrary::open(&directories).ok();
    let spec = format!("{} precision=bf16 zero.stage=3 optimizer.lr=1e-3", case.rest);
    let job = build_check_job(case.model, &spec)?;
    let (spec, cuda) = (require_train_section(&job)?, open()?);
    let steps = if tiny { 2 } else { 10 };
    let first = train_and_abandon(spec, &cuda, nccl.as_ref(), steps)?;
    let second = train_and_abandon(spec, &cuda, nccl.as_ref(), steps)?;
    let is_equal = first.curve == second.curve;
    let seconds = [second.reset_time, second.connect_time].map(|time| time.as_secs_f64());
    output.send_row(ResultRow {
        subject: format!("{}, after an abort{}", case.name, if nccl.is_some() { ", NCCL" } else { "" }),
        values: format!("reset {:.2} s, connected {:.2} s", seconds[0], seconds[1]),
        result: if is_equal { RowResult::Ok } else { RowResult::Failed },
        cause: (!is_equal).then(|| "the losses are not bit-equal to those before the abort".to_owned()),
        data: json!({
            "reset_s": seconds[0], "connect_s": seconds[1], "first": first.curve, "second": second.curve
        }),
    });
    Ok(())
}

/// Trains one rank on `cuda` for `steps` steps, aborts its communicator, checks that the next step
/// fails because of it, and resets the GPU.
fn train_and_abandon(
    spec: &TrainSpec,
    cuda: &Arc<Cuda>,
    nccl: Option<&NcclLibrary>,
    steps: usize,
) -> diagnostic::Result<AbandonedTraining> {
    let began = Instant::now();
    let hosts: Arc<dyn Comm> = Arc::new(thread_comm::create_thread_group(1).remove(0));
    let comm = connect_gpu(nccl, cuda, hosts)?;
    let connect_time = began.elapsed();
    cuda.set_graphs_enabled(true);
    let (curve, aborted_at) = run_check(|| {
        let mut running = build_trainer(spec, comm.clone(), cuda.clone())?.start_with_random_params();
        let curve = (0..steps).map(|_| Ok(train_one_step(&mut running)?));
        let curve = curve.collect::<diagnostic::Result<TrainingCurve>>()?;
        let aborted_at = Instant::now();
        comm.abort("the training is abandoned");
        match train_one_step(&mut running) {
            Err(error) if error.to_worker_exit() == WorkerExit::Aborted => Ok((curve, aborted_at)),
            Err(error) => Err(error.into()),
            Ok(_) => Err(Diagnostic::error(codes::run::INTERNAL, "a step succeeds after the abort")),
        }
    })?;
    drop(comm);
    cuda.reset()?;
    Ok(AbandonedTraining { curve, connect_time, reset_time: aborted_at.elapsed() })
}
