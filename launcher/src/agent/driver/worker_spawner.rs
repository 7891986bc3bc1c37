//! [`WorkerSpawner`]: the thread of an agent that activates environments (`run.activate`) and
//! starts processes of workers.
//!
//! The start of a process blocks while the file system of its program or of its working directory
//! stalls. Meanwhile the agent must send heartbeats.
use crate::{
    agent::{
        environment_activation::activate_environments,
        environment_changes::EnvironmentChanges,
        hang::StatusMemory,
        process::{self, InheritedEnvironment, SpawnedWorker, WorkerMemoryFiles},
    },
    background_thread::BackgroundThread,
    open_file_limit::OpenFileLimits,
};
use diagnostic::{Diagnostic, codes};
use protocol::control::{ExecId, HostPlan, WorkerPlan};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};
use tokio::sync::mpsc;

/// The time limit of the command that removes the container of a killed worker.
const CONTAINER_REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The result of starting a worker: its process, or the error that prevented the start.
pub(super) struct SpawnResult {
    /// The attempt of the worker.
    pub(super) attempt: u32,
    /// The index of the worker in the plan of the host.
    pub(super) index: usize,
    pub(super) spawned: diagnostic::Result<SpawnedWorker>,
}

/// The result of one task of the thread that starts processes: a started worker or command, an
/// activated environment, or a removed container.
pub(super) enum SpawnerResult {
    /// A worker was started, or could not be started.
    Worker(SpawnResult),
    /// A command of `launch exec` was started, or could not be started.
    Exec(ExecSpawnResult),
    /// The environments of `run.activate` were activated for this attempt, or could not be
    /// activated.
    Activation(u32, diagnostic::Result<EnvironmentChanges>),
    /// The command that ends a container has ended, or its time limit has passed.
    ContainerRemoved,
}

/// The request to start a worker, with the shared memory, environment variables and file limits
/// that the worker's process inherits.
pub(super) struct SpawnRequest {
    pub(super) attempt: u32,
    pub(super) index: usize,
    pub(super) worker: WorkerPlan,
    /// The environment of the worker without the variables of its plan.
    pub(super) environment: InheritedEnvironment,
    /// The memory that the built-in workers of the host share.
    pub(super) shm: Option<Arc<OwnedFd>>,
    /// The memory for copies of the workers' states (`checkpoint.memory`).
    pub(super) copy_memory: Option<Arc<OwnedFd>>,
    /// The memory to which the worker writes its status.
    pub(super) status_memory: Option<Arc<StatusMemory>>,
    pub(super) file_limit: OpenFileLimits,
    /// Whether the worker gets the terminal (`run.terminal`).
    pub(super) uses_terminal: bool,
}

/// The request to start a `launch exec` command next to a worker: the command, and the environment
/// that its process gets.
pub(super) struct ExecSpawnRequest {
    pub(super) id: ExecId,
    /// The plan of the rank's worker, with the command instead of the worker's program.
    pub(super) worker: WorkerPlan,
    pub(super) environment: InheritedEnvironment,
    pub(super) file_limit: OpenFileLimits,
}

/// The result of starting a `launch exec` command: its process, or the error that prevented the
/// start.
pub(super) struct ExecSpawnResult {
    pub(super) id: ExecId,
    pub(super) spawned: diagnostic::Result<SpawnedWorker>,
}

/// Starts the processes of workers and of `launch exec` commands on a separate thread, one after
/// another.
pub(super) struct WorkerSpawner {
    /// The thread, which ends with this value. The kernel then kills the workers.
    thread: BackgroundThread,
    results: (mpsc::Sender<SpawnerResult>, mpsc::Receiver<SpawnerResult>),
    /// The number of results that were not received yet.
    pending: usize,
}

impl WorkerSpawner {
    /// Starts the thread that starts worker processes, so that a slow start does not block the
    /// agent's event loop.
    pub(super) fn start() -> io::Result<WorkerSpawner> {
        let thread = BackgroundThread::start("start-workers", 0)?;
        Ok(WorkerSpawner { thread, results: mpsc::channel(1), pending: 0 })
    }

    /// Begins to start a worker's process on this spawner's separate thread, without waiting for
    /// the result. The earlier start must have ended. Does not block.
    pub(super) fn begin_worker_start(&mut self, request: SpawnRequest) {
        self.run_on_thread(move || {
            let SpawnRequest {
                attempt,
                index,
                worker,
                environment,
                shm,
                copy_memory,
                status_memory,
                file_limit,
                uses_terminal,
            } = request;
            let memory = WorkerMemoryFiles {
                shm: shm.as_deref().map(AsFd::as_fd),
                copies: copy_memory.as_deref().map(AsFd::as_fd),
                status: status_memory.as_deref().map(AsFd::as_fd),
            };
            let start =
                || process::spawn_worker_process(&worker, &environment, memory, file_limit, uses_terminal);
            let spawned = catch_panic(start, "the start of the worker panicked");
            SpawnerResult::Worker(SpawnResult { attempt, index, spawned })
        });
    }

    /// Begins to activate the environments of `run.activate` on this spawner's separate thread,
    /// without waiting for the result. `hidden` are the variables that workers do not inherit. Does
    /// not block.
    pub(super) fn begin_activation(&mut self, plan: &HostPlan, hidden: Vec<String>) {
        let (attempt, run, host) = (plan.attempt, plan.job.run.clone(), plan.host.clone());
        self.run_on_thread(move || {
            let evaluate = || activate_environments(&run, &host, &hidden);
            SpawnerResult::Activation(attempt, catch_panic(evaluate, "the activation panicked"))
        });
    }

    /// Begins to run `words`, the command that removes the container of a killed process, on the
    /// separate thread of this spawner. Does not block.
    pub(super) fn begin_container_removal(&mut self, words: Vec<String>) {
        self.run_on_thread(move || {
            let remove = || {
                process::run_container_removal(&words, CONTAINER_REMOVAL_TIMEOUT);
                Ok(())
            };
            // A container that cannot be removed does not prevent the end of the attempt.
            _ = catch_panic(remove, "the removal of a container panicked");
            SpawnerResult::ContainerRemoved
        });
    }

    /// Begins to start a `launch exec` command on this spawner's separate thread, without waiting
    /// for the result. Does not block.
    pub(super) fn begin_exec_command_start(&mut self, request: ExecSpawnRequest) {
        self.run_on_thread(move || {
            let ExecSpawnRequest { id, worker, environment, file_limit } = request;
            let start = || {
                process::spawn_worker_process(
                    &worker,
                    &environment,
                    WorkerMemoryFiles::default(),
                    file_limit,
                    false,
                )
            };
            let spawned = catch_panic(start, "the start of the command panicked");
            SpawnerResult::Exec(ExecSpawnResult { id, spawned })
        });
    }

    /// Calls the function `work` on the thread that starts processes, and sends the result of
    /// `work` to the agent's event loop.
    fn run_on_thread(&mut self, work: impl FnOnce() -> SpawnerResult + Send + 'static) {
        self.pending += 1;
        let results = self.results.0.clone();
        self.thread.enqueue_job(0, move || {
            // An error means that the agent has ended.
            _ = results.blocking_send(work());
        });
    }

    /// Waits until the thread that starts processes has finished its next task, and returns the
    /// result: a started worker or command, an activated environment, or a removed container. Waits
    /// forever if the thread has nothing to do.
    pub(super) async fn receive_result(&mut self) -> SpawnerResult {
        match self.results.1.recv().await {
            Some(result) => {
                self.pending = self.pending.saturating_sub(1);
                result
            }
            // This value has a sender, so the channel is open.
            None => std::future::pending().await,
        }
    }

    /// Returns whether the thread that starts processes still has requests to finish, such as
    /// starting a worker or activating an environment. Only the thread may then reap children that
    /// the agent does not know.
    pub(super) fn is_busy(&self) -> bool {
        self.pending > 0
    }
}

/// Calls the function `work` and returns its result, or an error with `message` if `work` panics. A
/// panic would otherwise end the thread, and the agent would wait for the result forever.
fn catch_panic<T>(work: impl FnOnce() -> diagnostic::Result<T>, message: &str) -> diagnostic::Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Diagnostic::error(codes::run::INTERNAL, message)))
}
