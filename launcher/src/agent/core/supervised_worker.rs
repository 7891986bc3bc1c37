//! [`SupervisedWorker`]: what an agent knows about one of the workers that it supervises.
use crate::agent::progress::WorkerProgress;
use protocol::{
    control::{ExitStatus, ToWorker, WorkerInit},
    failure::GpuFault,
    hang::RankEvidence,
};
use std::time::Duration;

/// What the agent's state machine knows about one worker of the current attempt (one start of all
/// workers).
#[derive(Debug)]
pub(super) struct SupervisedWorker {
    /// Whether the worker runs the built-in runtime instead of a program.
    pub(super) builtin: bool,
    /// The worker's pid; `None` if the process was never started.
    pub(super) pid: Option<u32>,
    /// The first message to a built-in worker. `None` after the message was sent, which happens
    /// when the worker's hello arrives, and for a program.
    pub(super) init: Option<Box<WorkerInit>>,
    /// Messages to a built-in worker that are held back until `init` was sent.
    pub(super) after_init: Vec<ToWorker>,
    pub(super) last_message_at: Duration,
    /// Whether the agent has reported that the worker sent no message for `WORKER_LEASE`.
    pub(super) silence_reported: bool,
    pub(super) connection_open: bool,
    pub(super) status: Option<ExitStatus>,
    pub(super) ended_at: Duration,
    pub(super) tail: Option<Vec<String>>,
    pub(super) error: Option<String>,
    /// What the ended worker leaves about its collectives, if torch has detected a hang.
    pub(super) timeout: Option<Box<RankEvidence>>,
    pub(super) oom: bool,
    pub(super) gpu: Option<GpuFault>,
    pub(super) progress: WorkerProgress,
    /// Whether the worker has left the attempt, so that its process waits for the next attempt.
    pub(super) has_left: bool,
    /// Whether the worker runs a program that was asked to stop by `run.stop_signal`, and has not
    /// got SIGTERM yet.
    pub(super) awaits_sigterm: bool,
}

impl SupervisedWorker {
    /// Returns whether the worker's process was started, has not been reaped, and takes part in the
    /// current attempt (one start of all workers).
    pub(super) fn is_alive(&self) -> bool {
        self.pid.is_some() && self.status.is_none() && !self.has_left
    }

    /// Returns whether the worker has left the current attempt (one start of all workers) and its
    /// process waits for the next one.
    pub(super) fn is_waiting_for_next_attempt(&self) -> bool {
        self.status.is_none() && self.has_left
    }
}
