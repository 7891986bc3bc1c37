//! [`StopRequest`]: the request of the user or of the batch system that a run save a checkpoint and
//! stop.
use protocol::exit;
use serde::{Deserialize, Serialize};

/// A request to save and stop the run, by the user or the batch system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StopRequest {
    /// The user pressed Ctrl-C: the controller received SIGINT.
    Interrupt,
    /// The controller received SIGTERM or SIGHUP, or a signal for which `run.signals` requests to
    /// save and stop.
    Terminate,
    /// The batch system sent its signal before the time limit of the job.
    TimeLimit,
    /// The batch system sent SIGTERM to the agents, because it is about to end the job.
    BatchSystem,
}

impl StopRequest {
    /// Returns the exit code of `launch` for a run that this request ended.
    pub(super) fn to_exit_code(self) -> u8 {
        match self {
            StopRequest::Interrupt => exit::INTERRUPTED,
            StopRequest::Terminate | StopRequest::TimeLimit | StopRequest::BatchSystem => exit::TERMINATED,
        }
    }
}
