//! Why a rank can't go on, and what that means for the job's exit code.
use comm::CommError;
use contract::exit::WorkerExit;
use std::fmt;

/// A rank's failure: what it means and one clear line.
#[derive(Clone, Debug)]
pub struct Error {
    /// What the process exits with.
    pub exit: WorkerExit,
    /// What, where, why, what to do.
    pub message: String,
}

/// Result of the runtime.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The training itself failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Error { exit: WorkerExit::Failed, message: message.into() }
    }

    /// job.yaml asks for what can't be had.
    pub fn job(message: impl Into<String>) -> Self {
        Error { exit: WorkerExit::BadJob, message: message.into() }
    }

    /// Storage, memory or another means is missing.
    pub fn cluster(message: impl Into<String>) -> Self {
        Error { exit: WorkerExit::Cluster, message: message.into() }
    }

    /// The checkpoint can't be used.
    pub fn checkpoint(message: impl Into<String>) -> Self {
        Error { exit: WorkerExit::Checkpoint, message: message.into() }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<CommError> for Error {
    fn from(e: CommError) -> Self {
        let exit = match e {
            CommError::Aborted(_) => WorkerExit::Aborted,
            CommError::Mismatch(_) | CommError::Io(_) => WorkerExit::Failed,
        };
        Error { exit, message: e.to_string() }
    }
}

/// Something that a key asks for and can't be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The key.
    pub key: &'static str,
    /// Why.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.message)
    }
}

/// All of them as one error of the job.
pub fn of_job(faults: &[Fault]) -> Error {
    let all: Vec<String> = faults.iter().map(Fault::to_string).collect();
    Error::job(all.join("; "))
}
