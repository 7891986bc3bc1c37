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

    /// Converts the error of `rank` to what the other ranks report: `rank 3: …`, never a root cause.
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
        Error { diagnostic: comm_diagnostic(&error), aborted }
    }
}

fn comm_diagnostic(error: &CommError) -> Diagnostic {
    Diagnostic::error(codes::collective::COLLECTIVE_ABORTED, error.to_string())
}

/// An error of reading a checkpoint (exit code 4), whatever went wrong.
pub(crate) fn unreadable_checkpoint(error: CkptError) -> Error {
    Diagnostic::from(error).with_category(Category::Checkpoint).into()
}

/// An error of writing to the checkpoint directory (exit code 3), whatever went wrong.
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

/// An error of the data; the subject is the key.
pub(crate) fn data_diagnostic(error: &DataError) -> Diagnostic {
    let category = match error.exit() {
        WorkerExit::Cluster => Category::Cluster,
        _ => Category::Job,
    };
    let diagnostic = Diagnostic::error(codes::data::DATA_FILE_UNREADABLE, error.to_string());
    let diagnostic = diagnostic.with_subject(error.key()).with_category(category);
    match error.hint() {
        Some(hint) => diagnostic.with_help(hint),
        None => diagnostic,
    }
}

impl From<DataError> for Error {
    fn from(error: DataError) -> Self {
        data_diagnostic(&error).into()
    }
}

/// An error of reading adapters that `key` names.
pub(crate) fn adapter_diagnostic(error: CkptError, key: &str) -> Diagnostic {
    Diagnostic::from(error).with_category(Category::Job).with_subject(key)
}

/// A thread of this worker, named for its purpose, could not be started.
pub(crate) fn no_thread(purpose: &str, error: &std::io::Error) -> Error {
    let message = format!("cannot start the {purpose} thread");
    let diagnostic = Diagnostic::error(codes::training::WORKER_THREAD_FAILED, message);
    diagnostic.with_field("thread", purpose).with_cause(error).into()
}
