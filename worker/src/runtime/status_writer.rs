//! [`StatusWriter`]: writes what this rank does to shared memory, which the agent (launch's process
//! on the host) reads if the rank hangs.
//!
//! The agent finds out where a rank is that neither runs nor answers. Each write is one system call
//! on a memfd, which takes about a microsecond, so a rank that is stopped leaves the state of this
//! moment.
use crate::{error::Result, model::MicroBatch, train::step::SampleSource};
use comm::{CallObserver, CollectiveKind};
use protocol::{
    control::WorkerInit,
    event::WorkerPhase,
    worker_status::{STATUS_BYTES, WorkerStatus},
};
use std::{
    fs::File,
    os::{fd::OwnedFd, unix::fs::FileExt},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Writes what this rank does (phase, step, collectives) to shared memory, which the agent
/// (launch's process on the host) reads to find out where a rank hangs.
#[derive(Default)]
pub(super) struct StatusWriter(Mutex<RankStatusSlot>);

/// This rank's newest status (such as step and collectives), and the position in shared memory to
/// which the status is written for the agent.
#[derive(Default)]
struct RankStatusSlot {
    /// The memory; `None` if the process inherited none.
    memory: Option<File>,
    /// The position of this rank's status in the memory.
    offset: u64,
    /// Whether collectives may run after their calls have returned.
    is_asynchronous: bool,
    status: WorkerStatus,
}

impl RankStatusSlot {
    /// Writes the status of this rank to the shared memory from which the agent (launch's process
    /// on the host) reads it if the rank hangs. Without it, the agent has less evidence about a
    /// hang.
    fn write(&self) {
        if let Some(memory) = &self.memory {
            _ = memory.write_all_at(&self.status.encode(), self.offset);
        }
    }
}

impl StatusWriter {
    /// Creates a writer of what this rank does to `memory`, shared memory that the agent (launch's
    /// process on the host) reads. With `None`, the status is not written.
    pub(super) fn new(memory: Option<OwnedFd>) -> Self {
        StatusWriter(Mutex::new(RankStatusSlot {
            memory: memory.map(File::from),
            ..RankStatusSlot::default()
        }))
    }

    /// Locks the mutex of this rank's status, which the agent (launch's process on the host) can
    /// read.
    fn lock_status(&self) -> MutexGuard<'_, RankStatusSlot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resets the status of this rank, such as the collective counters, at the start of an attempt
    /// (start of all workers).
    pub(super) fn begin_attempt(&self, init: &WorkerInit) {
        let mut slot = self.lock_status();
        slot.offset = u64::from(init.local_rank) * STATUS_BYTES as u64;
        slot.is_asynchronous = init.job.cluster.trains_on_gpus();
        slot.status = WorkerStatus {
            attempt: init.attempt,
            completed: (!slot.is_asynchronous).then_some(0),
            task: describe_phase(WorkerPhase::Starting).into(),
            ..WorkerStatus::default()
        };
        slot.write();
    }

    /// Records in the status of this rank what the training thread does now, as a phrase such as
    /// `reading samples`.
    pub(super) fn set_task(&self, task: &'static str) {
        let mut slot = self.lock_status();
        slot.status.task = task.into();
        slot.write();
    }

    /// Writes the phase of the training thread, such as saving a checkpoint, to the status that the
    /// agent reads from shared memory if this rank hangs.
    pub(super) fn set_phase(&self, phase: WorkerPhase) {
        self.set_task(describe_phase(phase));
    }

    /// Sets the number of completed optimizer steps in the status of this rank.
    pub(super) fn set_step(&self, step: u64) {
        let mut slot = self.lock_status();
        slot.status.step = step;
        slot.write();
    }
}

/// Returns a phrase for what a rank does in a phase, such as `saving a checkpoint` for saving.
fn describe_phase(phase: WorkerPhase) -> &'static str {
    match phase {
        WorkerPhase::Starting => "starting",
        WorkerPhase::Resuming => "initializing the training state",
        WorkerPhase::Training => "training",
        WorkerPhase::Evaluating => "evaluating",
        WorkerPhase::Saving => "saving a checkpoint",
        WorkerPhase::Gathering => "gathering the weights",
        WorkerPhase::Ending => "ending",
    }
}

impl CallObserver for StatusWriter {
    fn on_enter(&self, kind: CollectiveKind) {
        let mut slot = self.lock_status();
        slot.status.entered += 1;
        slot.status.collective = kind.name().into();
        slot.write();
    }

    fn on_return(&self) {
        let mut slot = self.lock_status();
        if !slot.is_asynchronous {
            slot.status.completed = Some(slot.status.entered);
            slot.write();
        }
    }
}

/// A source of samples that reports in the status of this rank when it is reading samples.
pub(super) struct StatusReportingSamples<'a> {
    /// The samples.
    pub(super) source: &'a dyn SampleSource,
    /// The status of the rank.
    pub(super) status: &'a StatusWriter,
    /// The number of steps after which the rank never returns from reading samples, for tests.
    pub(super) loops_after: Option<u64>,
}

impl SampleSource for StatusReportingSamples<'_> {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> Result<()> {
        self.status.set_task("reading samples");
        while self.loops_after.is_some_and(|steps| self.status.lock_status().status.step == steps) {
            std::hint::spin_loop();
        }
        let result = self.source.fill(first, batch);
        self.status.set_phase(WorkerPhase::Training);
        result
    }
}
