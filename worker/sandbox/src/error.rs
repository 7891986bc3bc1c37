//! [`SandboxError`]: why a sandbox process returned no result for a request.
use std::{io, time::Duration};

/// The reason why a sandbox process returned no result for a request.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The process did not start.
    #[error("the sandbox process did not start")]
    NotStarted(#[source] io::Error),
    /// The work needs more memory than the limit.
    #[error("the work needs more than {} MiB of memory", .limit_bytes >> 20)]
    OutOfMemory {
        /// Memory that the process may use, in bytes.
        limit_bytes: u64,
    },
    /// The work needs more CPU time than the limit.
    #[error("the work needs more than {limit_s} s of CPU time")]
    OutOfCpuTime {
        /// Limit of CPU time, in seconds.
        limit_s: u64,
    },
    /// The process did not answer within the longest wait, although it had not used up its CPU
    /// time.
    #[error("the sandbox process did not answer for {} s", .limit.as_secs())]
    TimedOut {
        /// The longest wait for a reply, which has passed.
        limit: Duration,
    },
    /// The result has more bytes than the limit.
    #[error("the result has {bytes} bytes, more than {limit_bytes}")]
    ReplyTooLong {
        /// Size of the result in bytes.
        bytes: u64,
        /// Limit on the size of a result in bytes.
        limit_bytes: u64,
    },
    /// The stack of the process overflowed, or the process accessed invalid memory.
    #[error("the values or expressions are nested too deeply for a stack of {} MiB", .stack_bytes >> 20)]
    StackOverflow {
        /// Stack size of each thread, in bytes.
        stack_bytes: u64,
    },
    /// The library panicked.
    #[error("the library failed: {message}")]
    Panicked {
        /// The message and the source location of the panic.
        message: String,
    },
    /// The process ended for another reason.
    #[error("the sandbox process ended: {0}")]
    Ended(String),
    /// The process sent bytes that are not a valid reply.
    #[error("the sandbox process sent an invalid reply")]
    InvalidReply,
}

/// Why a request to a sandbox process failed, and the number of the step (such as loading a
/// tokenizer) that the process was performing.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct SandboxFailure {
    /// The number of the step that the handler reported most recently for this request, or 0 if it
    /// reported none.
    pub step: u64,
    /// The reason of the failure.
    #[source]
    pub error: SandboxError,
}

impl SandboxError {
    /// Returns the name and the value of the limit (such as CPU time) that the request exceeded,
    /// for the error message to the user. Returns `None` for errors of another kind.
    pub fn exceeded_limit(&self) -> Option<(&'static str, u64)> {
        match *self {
            SandboxError::OutOfMemory { limit_bytes } => Some(("memory_limit_bytes", limit_bytes)),
            SandboxError::OutOfCpuTime { limit_s } => Some(("cpu_limit_s", limit_s)),
            SandboxError::TimedOut { limit } => Some(("wait_limit_s", limit.as_secs())),
            SandboxError::ReplyTooLong { limit_bytes, .. } => Some(("result_limit_bytes", limit_bytes)),
            SandboxError::StackOverflow { stack_bytes } => Some(("stack_limit_bytes", stack_bytes)),
            _ => None,
        }
    }

    /// Adds `step`, the number of the step that the sandbox process reported last (such as loading
    /// a tokenizer), to this error.
    pub(crate) fn into_failure_at_step(self, step: u64) -> SandboxFailure {
        SandboxFailure { step, error: self }
    }
}
