//! Exit codes of `launch` (documented in docs/cli.md) and how a process of ours ended.
use serde::{Deserialize, Serialize};

/// Done.
pub const DONE: u8 = 0;
/// The job failed; the root cause is named.
pub const FAILED: u8 = 1;
/// The command line or job.yaml is wrong.
pub const USAGE: u8 = 2;
/// The cluster can't be had: host, device, storage, port.
pub const CLUSTER: u8 = 3;
/// The checkpoint can't be used.
pub const CHECKPOINT: u8 = 4;
/// Stopped by SIGINT after a clean save.
pub const INTERRUPTED: u8 = 130;
/// Stopped by SIGTERM after a clean save.
pub const TERMINATED: u8 = 143;

/// Why a built-in worker ended by itself; its process exit code is [`WorkerExit::code`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerExit {
    /// All steps done.
    Done,
    /// Asked to stop; a checkpoint was saved at the step boundary.
    Stopped,
    /// The training failed (NaN loss, out of disk, …).
    Failed,
    /// job.yaml asks for what can't be had with this data or model.
    BadJob,
    /// The cluster, device or storage can't be had.
    Cluster,
    /// The checkpoint can't be used.
    Checkpoint,
    /// Another rank failed or the agent aborted the job; never a root cause.
    Aborted,
}

impl WorkerExit {
    /// The process exit code that carries this meaning from worker to agent.
    pub fn code(self) -> u8 {
        match self {
            WorkerExit::Done => DONE,
            WorkerExit::Stopped => 75,
            WorkerExit::Failed => FAILED,
            WorkerExit::BadJob => USAGE,
            WorkerExit::Cluster => CLUSTER,
            WorkerExit::Checkpoint => CHECKPOINT,
            WorkerExit::Aborted => 76,
        }
    }

    /// The meaning of a built-in worker's exit code, if it is one of ours.
    pub fn from_code(code: u8) -> Option<Self> {
        use WorkerExit::*;
        [Done, Stopped, Failed, BadJob, Cluster, Checkpoint, Aborted].into_iter().find(|e| e.code() == code)
    }
}
