//! The exit codes of the command `launch` (docs/cli.md lists them), and those of the workers of the
//! built-in training.
use serde::{Deserialize, Serialize};

/// The exit code of `launch` for a run that succeeded.
pub const DONE: u8 = 0;
/// The exit code of `launch` for a run that failed. The root cause was reported.
pub const FAILED: u8 = 1;
/// The exit code of `launch` for a command line or a job file that is not valid.
pub const USAGE: u8 = 2;
/// The exit code of `launch` for a run that cannot start or continue, because a host, device,
/// storage or port is not available.
pub const CLUSTER: u8 = 3;
/// The exit code of `launch` for a run or command whose checkpoint is not usable.
pub const CHECKPOINT: u8 = 4;
/// The exit code of `launch` for a run that SIGINT stopped after saving a checkpoint.
pub const INTERRUPTED: u8 = 130;
/// The exit code of `launch` for a run that SIGTERM stopped after saving a checkpoint.
pub const TERMINATED: u8 = 143;

/// The reason why a worker of the built-in training exits. The exit code of its process is
/// [`WorkerExit::exit_code`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerExit {
    /// Training is complete: all steps are done.
    Done,
    /// A stop was requested, and a checkpoint was saved at the step boundary.
    Stopped,
    /// Training failed, for example because the loss is NaN or the disk is full.
    Failed,
    /// The job file does not fit the data or the model.
    BadJob,
    /// The cluster, a device or storage is not available.
    Cluster,
    /// The checkpoint is not usable.
    Checkpoint,
    /// Another rank failed, or the agent aborted the job. This exit is never a root cause.
    Aborted,
}

impl WorkerExit {
    /// Returns the exit code with which a worker's process ends for this reason.
    pub fn exit_code(self) -> u8 {
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

    /// Returns the reason for which a worker of the built-in training exits with the exit code
    /// `code`. Returns `None` for a code that no reason has, such as the code of a panic.
    pub fn from_exit_code(code: u8) -> Option<Self> {
        use WorkerExit::*;
        [Done, Stopped, Failed, BadJob, Cluster, Checkpoint, Aborted]
            .into_iter()
            .find(|e| e.exit_code() == code)
    }
}
