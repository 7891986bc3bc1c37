//! [`Error`]: why a rank of the training runtime ended.
use crate::data::DataError;
use ckpt::CkptError;
use comm::CommError;
use contract::exit::WorkerExit;
use diagnostic::{Category, Code, Diagnostic, codes};
use serde::{Deserialize, Serialize};

/// Why a rank ended: a [`Diagnostic`], and whether this rank or another one is at fault.
///
/// Serializable, because ranks exchange their errors (see [`crate::consensus`]).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Error {
    diagnostic: Diagnostic,
    /// Another rank or the agent ended the job, so this error is never its root cause.
    aborted: bool,
}

/// Result of the training runtime.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of this rank; see [`Diagnostic::error`] for the form of the message.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Diagnostic::error(code, message).into()
    }

    /// The end of this rank because another rank or the agent ended the job.
    pub fn aborted(diagnostic: Diagnostic) -> Self {
        Error { diagnostic, aborted: true }
    }

    /// Converts the error of `rank` to what the other ranks report: `rank 3: …`, never a root
    /// cause.
    pub fn into_peer_error(self, rank: usize) -> Self {
        let message = format!("rank {rank}: {}", self.diagnostic.message());
        Error::aborted(self.diagnostic.with_message(message).with_field("rank", rank))
    }

    /// What happened, for events, logs and `--json`.
    pub fn diagnostic(&self) -> &Diagnostic {
        &self.diagnostic
    }

    /// The stable name of what happened.
    pub fn code(&self) -> Code {
        self.diagnostic.code()
    }

    /// How the worker process ends because of this error.
    pub fn exit(&self) -> WorkerExit {
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

impl From<CommError> for Error {
    fn from(error: CommError) -> Self {
        let aborted = matches!(error, CommError::Aborted(_));
        // A collective ends a rank with exit code 1, also if the cause is its GPU.
        let diagnostic = Diagnostic::from(error).with_category(Category::Failed);
        Error { diagnostic, aborted }
    }
}

/// Converts an error of reading a checkpoint. Its category is always `Checkpoint` (exit code 4),
/// because every cause makes this checkpoint unusable.
pub(crate) fn unreadable_checkpoint(error: CkptError) -> Error {
    Diagnostic::from(error).with_category(Category::Checkpoint).into()
}

/// Converts an error of writing to the checkpoint directory. Its category is always `Cluster` (exit
/// code 3), because the storage is at fault and no checkpoint.
pub(crate) fn unwritable_checkpoint(error: CkptError) -> Error {
    Diagnostic::from(error).with_category(Category::Cluster).into()
}

/// One error for all mistakes of the `train` section; several become details of a summary.
pub(crate) fn invalid_train_section(mut mistakes: Vec<Diagnostic>) -> Error {
    if mistakes.len() == 1 {
        return mistakes.remove(0).into();
    }
    let message = format!("the train section has {} mistakes", mistakes.len());
    let summary = Diagnostic::error(codes::training::TRAIN_INVALID, message);
    mistakes.into_iter().fold(summary, Diagnostic::with_detail).into()
}

impl From<DataError> for Error {
    fn from(error: DataError) -> Self {
        Diagnostic::from(error).into()
    }
}

/// Converts an error of reading the pretrained adapters that `key` names. Its category is always
/// `Job` (exit code 2), because the job names the directory.
pub(crate) fn unreadable_adapters(error: CkptError, key: &str) -> Diagnostic {
    Diagnostic::from(error).with_category(Category::Job).with_subject(key)
}

/// The error that the thread for `purpose` could not be started.
pub(crate) fn thread_start_error(purpose: &str, error: &std::io::Error) -> Error {
    let message = format!("cannot start the {purpose} thread");
    let diagnostic = Diagnostic::error(codes::training::WORKER_THREAD_FAILED, message);
    diagnostic.with_field("thread", purpose).with_cause(error).into()
}
