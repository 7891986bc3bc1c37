//! [`TwoRankTraining`]: training with two ranks that share one GPU and exchange data with NCCL, as
//! part of `launch gpu-check`. Each is a process, because two ranks in one CUDA context can block
//! each other: a kernel of NCCL waits for the other rank, whose next call waits until the context
//! is idle.
use super::{
    check_job::GpuOpener,
    curve_training::{TrainingCurve, require_equal_curves, train_rank_for_curve},
    memory_file::{MemoryFile, open_memory_file},
    message::{PartMessage, PartOutput},
    part_filter::PartFilter,
    part_process::{PartCommand, PartOutcome, run_part_process},
};
use comm::{
    Comm,
    nccl::NcclLibrary,
    shm::{ShmComm, ShmLimits, abort_group},
};
use diagnostic::{Diagnostic, codes};
use jobspec::TrainSpec;
use serde_json::json;
use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// The time after which the process of rank 1 of the two-rank training is killed if it has not
/// ended.
const RANK_TIMEOUT: Duration = Duration::from_secs(60);
/// The size in bytes of each staging buffer in shared memory through which the two ranks of the
/// NCCL check exchange data.
const STAGING_BYTES: usize = 1 << 20;
/// The name of the message with the losses of rank 1, which the process of rank 1 sends to that of
/// rank 0.
const RANK_ONE_CURVE_NAME: &str = "curve of rank 1";

/// Trains with two ranks that share a GPU, each in a separate process.
pub(super) struct TwoRankTraining<'a> {
    /// The name of the part.
    pub(super) part: &'a str,
    pub(super) device: usize,
    pub(super) filter: PartFilter,
    /// The memory that rank 0 shares with this process. `None` in the process of rank 0.
    pub(super) memory: Option<&'a Path>,
}

impl TwoRankTraining<'_> {
    /// Starts a process for rank 1, trains as rank 0 together with rank 1, and returns the losses
    /// of all steps. Fails if the ranks have different losses.
    pub(super) fn train_as_rank_zero(
        &self,
        spec: &TrainSpec,
        open: GpuOpener,
        nccl: Option<&NcclLibrary>,
        steps: usize,
    ) -> diagnostic::Result<TrainingCurve> {
        let memory = MemoryFile::create().map_err(to_shared_memory_error)?;
        let mut command = PartCommand::new(self.part, self.device, self.filter);
        command.arguments.extend(["--rank-memory".into(), memory.path().into()]);
        let (fd, joined) = (memory.duplicate().map_err(to_shared_memory_error)?, memory.duplicate());
        let joined = joined.map_err(to_shared_memory_error)?;
        let connected: Mutex<Option<Arc<dyn Comm>>> = Mutex::default();
        let lock_connected = || connected.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                run_rank_one_process(&command).inspect_err(|error| {
                    // An error means that the group does not exist yet. Joining it then times out.
                    let _ = abort_group(fd.as_fd(), &error.to_string());
                    if let Some(comm) = &*lock_connected() {
                        comm.abort(&error.to_string());
                    }
                })
            });
            let first = join_ranks(joined, 0).and_then(|hosts| {
                train_rank_for_curve(spec, open, nccl, hosts, steps, |comm| *lock_connected() = Some(comm))
            });
            let internal = |_| Diagnostic::error(codes::run::INTERNAL, "the thread of rank 1 panicked");
            let other = other.join().map_err(internal)?;
            // The failure of rank 1 is the reason why rank 0 was aborted.
            let curves = other.and_then(|other| Ok(vec![first?, other]))?;
            require_equal_curves(curves)
        })
    }

    /// Trains as rank 1 together with rank 0, and sends the losses to the process of rank 0, which
    /// compares them.
    pub(super) fn train_as_rank_one(
        &self,
        output: &PartOutput,
        spec: &TrainSpec,
        open: GpuOpener,
        nccl: Option<&NcclLibrary>,
        steps: usize,
    ) -> diagnostic::Result<()> {
        let memory =
            open_memory_file(self.memory.unwrap_or(Path::new(""))).map_err(to_shared_memory_error)?;
        let hosts = join_ranks(memory.into(), 1)?;
        let curve = train_rank_for_curve(spec, open, nccl, hosts, steps, drop)?;
        output.send_details(RANK_ONE_CURVE_NAME, json!(curve));
        Ok(())
    }
}

/// Connects this process, which is rank 0 or 1 of the two-rank training, with the other rank
/// through shared memory, and returns their communicator.
fn join_ranks(memory: OwnedFd, rank: usize) -> diagnostic::Result<Arc<dyn Comm>> {
    let limits = ShmLimits { staging_bytes: STAGING_BYTES, ..ShmLimits::default() };
    Ok(Arc::new(ShmComm::join(memory, rank, 2, limits)?))
}

/// Runs the process of rank 1 of the two-rank training until it ends, and returns the losses that
/// it has reported.
fn run_rank_one_process(command: &PartCommand) -> diagnostic::Result<TrainingCurve> {
    let (mut curve, mut failure) = (None, None);
    let PartOutcome { end, output, .. } = run_part_process(command, RANK_TIMEOUT, |message| match message {
        PartMessage::Details { name, value } if name == RANK_ONE_CURVE_NAME => {
            curve = serde_json::from_value(value).ok()
        }
        PartMessage::Failed { error } => failure = Some(*error),
        PartMessage::Details { .. } | PartMessage::Row(_) | PartMessage::Done => {}
    });
    match (curve, failure) {
        (Some(curve), None) => Ok(curve),
        (_, Some(error)) => {
            let message = format!("rank 1: {}", error.message());
            Err(error.with_message(message))
        }
        (None, None) => {
            let last =
                output.last().map_or_else(String::new, |line| format!("; its output ends with: {line}"));
            Err(Diagnostic::error(codes::run::INTERNAL, format!("rank 1: {}{last}", end.describe())))
        }
    }
}

/// Converts an error of creating or opening shared memory to a diagnostic.
fn to_shared_memory_error(error: std::io::Error) -> Diagnostic {
    Diagnostic::error(codes::training::SHARED_MEMORY_MISSING, format!("the ranks share no memory: {error}"))
}
