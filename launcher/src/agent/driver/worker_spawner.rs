//! [`WorkerSpawner`]: starts the processes of workers on a separate thread.
//!
//! The start of a process blocks while the file system of its program or of its working directory
//! stalls. Meanwhile the agent must send heartbeats.
use crate::{
    agent::process::{self, HostMemory, OpenFileLimits, SpawnedWorker},
    background_thread::BackgroundThread,
};
use diagnostic::{Diagnostic, codes};
use protocol::control::WorkerPlan;
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};
use tokio::sync::mpsc;

/// The process of a worker that was started, or the error of the start.
pub(super) struct SpawnResult {
    /// The attempt of the worker.
    pub(super) attempt: u32,
    /// The index of the worker in the plan of the host.
    pub(super) index: usize,
    pub(super) spawned: diagnostic::Result<SpawnedWorker>,
}

/// The worker to start, with what its process inherits.
pub(super) struct SpawnRequest {
    pub(super) attempt: u32,
    pub(super) index: usize,
    pub(super) worker: WorkerPlan,
    /// The variables of the agent that the worker does not inherit.
    pub(super) hidden: Vec<String>,
    /// The memory that the built-in workers of the host share.
    pub(super) shm: Option<Arc<OwnedFd>>,
    /// The memory for copies of the workers' states (`checkpoint.memory`).
    pub(super) copy_memory: Option<Arc<OwnedFd>>,
    pub(super) file_limit: OpenFileLimits,
}

/// Starts one worker after the other.
pub(super) struct WorkerSpawner {
    /// The thread, which ends with this value. The kernel then kills the workers.
    thread: BackgroundThread,
    results: (mpsc::Sender<SpawnResult>, mpsc::Receiver<SpawnResult>),
    is_busy: bool,
}

impl WorkerSpawner {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<WorkerSpawner> {
        let thread = BackgroundThread::start("start-workers", 0)?;
        Ok(WorkerSpawner { thread, results: mpsc::channel(1), is_busy: false })
    }

    /// Begins to start a worker. The earlier start must have ended. Does not block.
    pub(super) fn begin(&mut self, request: SpawnRequest) {
        self.is_busy = true;
        let results = self.results.0.clone();
        self.thread.run(0, move || {
            let SpawnRequest { attempt, index, worker, hidden, shm, copy_memory, file_limit } = request;
            let memory = HostMemory {
                shm: shm.as_deref().map(AsFd::as_fd),
                copies: copy_memory.as_deref().map(AsFd::as_fd),
            };
            let start = || process::spawn_worker_process(&worker, &hidden, memory, file_limit);
            // A panic would otherwise end the thread, and the agent would wait for the result
            // forever.
            let spawned = catch_unwind(AssertUnwindSafe(start)).unwrap_or_else(|_| {
                Err(Diagnostic::error(codes::run::INTERNAL, "the start of the worker panicked"))
            });
            // An error means that the agent has ended.
            _ = results.blocking_send(SpawnResult { attempt, index, spawned });
        });
    }

    /// Waits for the result of a start. Waits forever if no worker is being started.
    pub(super) async fn receive_result(&mut self) -> SpawnResult {
        match self.results.1.recv().await {
            Some(result) => {
                self.is_busy = false;
                result
            }
            // This value has a sender, so the channel is open.
            None => std::future::pending().await,
        }
    }

    /// Returns whether a worker is being started. Only the thread may then reap children that the
    /// agent does not know.
    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }
}
