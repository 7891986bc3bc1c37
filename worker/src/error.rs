//! [`Error`]: the reason why a rank of the built-in training ended.
use ckpt::CkptError;
use comm::CommError;
use device::storage::DeviceError;
use diagnostic::{Category, Code, Diagnostic, codes};
use protocol::exit::WorkerExit;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The reason why a rank of launch's built-in training ended: a [`Diagnostic`], and whether this
/// rank or another one is at fault.
///
/// Ranks exchange their errors (see [`crate::consensus`]), so this type is serializable.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Error {
    diagnostic: Diagnostic,
    /// Whether another rank or the agent ended the job. This error is then never the root cause.
    aborted: bool,
}

/// The result of an operation of the built-in training: a value or an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an error that occurred on this rank. See [`Diagnostic::error`] for the form of the
    /// message.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Diagnostic::error(code, message).into()
    }

    /// Creates the error of a rank that ends only because another rank or the agent (launch's
    /// process on the host) ended the job.
    pub fn new_aborted(diagnostic: Diagnostic) -> Self {
        Error { diagnostic, aborted: true }
    }

    /// Converts the error that ended rank number `rank` to an error for the other ranks, whose
    /// message begins with `rank N:`. The result is marked as aborted and therefore never a root
    /// cause.
    pub fn into_peer_error(self, rank: usize) -> Self {
        let message = format!("rank {rank}: {}", self.diagnostic.message());
        Error::new_aborted(self.diagnostic.with_message(message).with_field("rank", rank))
    }

    /// Returns the diagnostic (message, code and help) that describes the error in events, logs and
    /// JSON.
    pub fn diagnostic(&self) -> &Diagnostic {
        &self.diagnostic
    }

    /// Returns the error's code, which is stable between versions of launch.
    pub fn code(&self) -> Code {
        self.diagnostic.code()
    }

    /// Returns the exit status with which a worker process that fails with this error ends.
    pub fn to_worker_exit(&self) -> WorkerExit {
        if self.aborted {
            return WorkerExit::Aborted;
        }
        match self.diagnostic.category() {
            Category::Usage | Category::Job => WorkerExit::BadJob,
            Category::Cluster => WorkerExit::Cluster,
            Category::Checkpoint => WorkerExit::Checkpoint,
            Category::Failed => WorkerExit::Failed,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.diagnostic.fmt(f)
    }
}

impl std::error::Error for Error {}

impl From<Diagnostic> for Error {
    fn from(diagnostic: Diagnostic) -> Self {
        Error { diagnostic, aborted: false }
    }
}

impl From<Error> for Diagnostic {
    fn from(error: Error) -> Self {
        error.diagnostic
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        // A failure of the device ends a rank with exit code 1.
        Diagnostic::from(error).with_category(Category::Failed).into()
    }
}

impl From<CommError> for Error {
    fn from(error: CommError) -> Self {
        let aborted = matches!(error, CommError::Aborted(_));
        // A collective ends a rank with exit code 1, also if the cause is its GPU.
        let diagnostic = Diagnostic::from(error).with_category(Category::Failed);
        Error { diagnostic, aborted }
    }
}

/// Builds an error that names the checkpoint at `path` as the object that is affected.
pub(crate) fn build_checkpoint_error(code: Code, path: &Path, message: String) -> Diagnostic {
    Diagnostic::error(code, message).with_subject(path.display().to_string())
}

/// Converts an error of reading a checkpoint to the error with which this rank ends. The result
/// always has the category `Checkpoint` (exit code 4), because every cause makes this checkpoint
/// unusable.
pub(crate) fn to_unreadable_checkpoint_error(error: CkptError) -> Error {
    Diagnostic::from(error).with_category(Category::Checkpoint).into()
}

/// Converts an error of writing to the checkpoint directory to the error with which this rank ends.
/// The result always has the category `Cluster` (exit code 3), because the storage is at fault and
/// not a checkpoint.
pub(crate) fn to_unwritable_checkpoint_error(error: CkptError) -> Error {
    Diagnostic::from(error).with_category(Category::Cluster).into()
}

/// Combines all errors that were found in the job's `train` section into one error. Several
/// mistakes become details of a summary.
pub(crate) fn combine_train_section_errors(mut mistakes: Vec<Diagnostic>) -> Error {
    if mistakes.len() == 1 {
        return mistakes.remove(0).into();
    }
    let message = format!("the train section has {} mistakes", mistakes.len());
    let summary = Diagnostic::error(codes::training::TRAIN_INVALID, message);
    mistakes.into_iter().fold(summary, Diagnostic::with_detail_diagnostic).into()
}

/// Converts an error of reading pretrained LoRA adapters to a diagnostic that names `key`, the key
/// of job.yaml for the adapters. The result always has the category `Job` (exit code 2), because
/// the job names the directory.
pub(crate) fn to_unreadable_adapters_error(error: CkptError, key: &str) -> Diagnostic {
    Diagnostic::from(error).with_category(Category::Job).with_subject(key)
}

/// Builds the error which reports that the operating system could not start a thread, and names the
/// thread by its purpose.
pub(crate) fn build_thread_start_error(purpose: &str, error: &std::io::Error) -> Error {
    let message = format!("cannot start the {purpose} thread");
    let diagnostic = Diagnostic::error(codes::training::WORKER_THREAD_FAILED, message);
    diagnostic.with_field("thread", purpose).with_cause(error).into()
}
