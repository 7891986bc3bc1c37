//! [`CkptError`]: why a checkpoint cannot be written, read or converted, or its full weights cannot
//! be gathered from the shards.
use super::damage::{Damage, DamageReason};
use super::diagnosis::Diagnosis;
use super::missing_part::{MissingPart, RemoteShard, format_remote_shards};
use super::options::{OptionProblem, OutputProblem};
use super::save_problem::SaveProblem;
use super::unsupported_feature::UnsupportedFeature;
use crate::tensor::{TensorRole, tensor_label};
use diagnostic::quantity::{format_bytes, format_count};
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's operations: a value, or a [`CkptError`].
pub type Result<T> = std::result::Result<T, CkptError>;

/// Why a checkpoint cannot be written, read or converted, or its full weights cannot be gathered
/// from the shards.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CkptError {
    /// No file or directory exists at the path.
    #[error("checkpoint {} does not exist", .path.display())]
    NotFound {
        /// The path that the caller gave.
        path: PathBuf,
    },
    /// The path exists, but no checkpoint that can be opened is there.
    #[error("{} is not a checkpoint: {diagnosis}", .path.display())]
    NotACheckpoint {
        /// The path that the caller gave.
        path: PathBuf,
        /// What the path probably is instead of a checkpoint.
        diagnosis: Diagnosis,
    },
    /// The stored bytes differ from the saved bytes, or contradict each other.
    #[error("checkpoint {} is damaged: {damage}", .path.display())]
    Damaged {
        /// The checkpoint directory.
        path: PathBuf,
        /// The damaged file, the block and the reason.
        damage: Box<Damage>,
    },
    /// A file or tensor that belongs to the checkpoint does not exist.
    #[error("checkpoint {} is incomplete: missing {part}", .path.display())]
    Missing {
        /// The checkpoint directory.
        path: PathBuf,
        /// The missing file, tensor or other part.
        part: MissingPart,
    },
    /// Some shards are in the checkpoint directories of other hosts.
    #[error("checkpoint {} has {} on other hosts: {}", .path.display(), format_count(shards.len(), "shard"), format_remote_shards(shards))]
    ShardsOnOtherHosts {
        /// The checkpoint directory on this host.
        path: PathBuf,
        /// The shards that this host lacks.
        shards: Vec<RemoteShard>,
    },
    /// Blocks on another host cannot be fetched, or fail verification after the transfer.
    #[error("cannot read checkpoint {} from the hosts that store it: {source}", .path.display())]
    FetchFailed {
        /// The checkpoint directory on this host.
        path: PathBuf,
        /// Why the transfer failed.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The checkpoint belongs to a model with other tensors.
    #[error("checkpoint {} is of another model: tensor {tensor}: expected {expected}, found {found}", .path.display())]
    ModelMismatch {
        /// The checkpoint directory.
        path: PathBuf,
        /// The first tensor that differs.
        tensor: String,
        /// Name and shape in the model that reads the checkpoint.
        expected: String,
        /// Name and shape in the checkpoint.
        found: String,
    },
    /// The checkpoint stores no tensor of this name and role.
    #[error("checkpoint {} has no tensor {tensor}", .path.display())]
    NoSuchTensor {
        /// The checkpoint directory.
        path: PathBuf,
        /// `role/name` of the requested tensor.
        tensor: String,
    },
    /// A request reaches beyond the end of a tensor.
    #[error("checkpoint {}: {tensor} has {elements} elements, fewer than the {requested} requested", .path.display())]
    RangeOutsideTensor {
        /// The checkpoint directory.
        path: PathBuf,
        /// `role/name` of the tensor.
        tensor: String,
        /// Number of elements of the tensor.
        elements: u64,
        /// Index after the last requested element.
        requested: u64,
    },
    /// The checkpoint is intact, but this operation does not support its form or contents.
    #[error("checkpoint {} is not supported: {feature}", .path.display())]
    Unsupported {
        /// The checkpoint directory.
        path: PathBuf,
        /// The property of the checkpoint that is not supported.
        feature: UnsupportedFeature,
    },
    /// The file system has too little free space. The check runs before anything is written.
    #[error("not enough space in {}: {} needed, {} free", .path.display(), format_bytes(*needed), format_bytes(*free))]
    InsufficientSpace {
        /// The directory to write to.
        path: PathBuf,
        /// Bytes that the output needs.
        needed: u64,
        /// Bytes that the file system has free for this user.
        free: u64,
    },
    /// A directory has more files than a scan checks.
    #[error("directory {} has more than {limit} files to check", .path.display())]
    TooManyFiles {
        /// The scanned directory.
        path: PathBuf,
        /// The largest number of files that a scan checks.
        limit: usize,
    },
    /// Another process holds the exclusive lock of the directory in which checkpoints are saved.
    #[error("another process is writing checkpoints to {}", .path.display())]
    DirectoryBusy {
        /// The locked directory.
        path: PathBuf,
    },
    /// The data given to a save is not one complete checkpoint.
    #[error("cannot save the checkpoint: {0}")]
    InvalidSave(SaveProblem),
    /// An option of a conversion or gather is invalid, or does not apply to the checkpoint.
    #[error("{problem}")]
    InvalidOption {
        /// The option, and why it is rejected.
        problem: OptionProblem,
    },
    /// A state that the code considers impossible, such as a thread that ended early.
    #[error("internal error: {what}")]
    Internal {
        /// Describes the unexpected state, such as `a reader thread ended early`.
        what: &'static str,
    },
    /// The output path cannot be used.
    #[error("cannot write to {}: {problem}", .path.display())]
    OutputRejected {
        /// The output path.
        path: PathBuf,
        /// Why the path is rejected.
        problem: OutputProblem,
    },
    /// A finite value does not fit the narrower dtype to which it is converted.
    #[error("{tensor}, element {element}: {value:e} is outside of the range of {dtype}")]
    ValueOverflow {
        /// The tensor's name.
        tensor: String,
        /// Index of the element in the tensor.
        element: u64,
        /// The value before the conversion.
        value: f32,
        /// PyTorch's name of the dtype that cannot represent the value.
        dtype: &'static str,
    },
    /// A system call failed.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// The attempted action, such as `open`. Completes the sentence "cannot … PATH".
        action: &'static str,
        /// The file or directory on which the system call failed.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl CkptError {
    /// Returns a function that wraps an I/O error in [`CkptError::Io`], for use with `map_err`.
    /// `action` completes the sentence "cannot … PATH".
    pub(crate) fn io<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> CkptError {
        let path = path.to_owned();
        move |error| CkptError::Io { action, path, source: error.into() }
    }

    /// Creates the error that a checkpoint was not saved because the data or arguments from the
    /// caller are invalid, for the reason `problem`.
    pub(crate) fn invalid_save(problem: impl Into<SaveProblem>) -> CkptError {
        CkptError::InvalidSave(problem.into())
    }

    /// Creates the error that an operation on a checkpoint rejects one of its options because of
    /// `problem`.
    pub(crate) fn invalid_option(problem: OptionProblem) -> CkptError {
        CkptError::InvalidOption { problem }
    }

    /// Creates the error [`CkptError::Internal`], which states that this crate has reached a state
    /// that only a bug can cause. `what` describes the unexpected state.
    pub(crate) fn internal(what: &'static str) -> CkptError {
        CkptError::Internal { what }
    }

    /// Creates the error [`CkptError::Damaged`] for the file `file` of the checkpoint at `path`,
    /// without naming a block or tensors.
    pub(crate) fn damaged(
        path: &Path,
        file: impl Into<String>,
        reason: impl Into<DamageReason>,
    ) -> CkptError {
        CkptError::from_damage(path, Damage::for_file(file, reason))
    }

    /// Creates the error [`CkptError::Damaged`] from `damage`, the description of a damaged file of
    /// the checkpoint at `path`.
    pub(crate) fn from_damage(path: &Path, damage: Damage) -> CkptError {
        CkptError::Damaged { path: path.to_owned(), damage: Box::new(damage) }
    }

    /// Creates the error that the checkpoint at `path` has no tensor `name` with the role `role`.
    pub(crate) fn no_such_tensor(path: &Path, role: TensorRole, name: &str) -> CkptError {
        CkptError::NoSuchTensor { path: path.to_owned(), tensor: tensor_label(role, name) }
    }

    /// Creates the error that a read requests elements up to the index `requested` from `tensor`,
    /// which has only `elements` elements. `tensor` is `role/name`.
    pub(crate) fn range_outside_tensor(
        path: &Path,
        tensor: String,
        elements: u64,
        requested: u64,
    ) -> CkptError {
        CkptError::RangeOutsideTensor { path: path.to_owned(), tensor, elements, requested }
    }

    /// Creates the error that the part `part` of the checkpoint at `path`, such as a file, is
    /// missing.
    pub(crate) fn missing(path: &Path, part: impl Into<MissingPart>) -> CkptError {
        CkptError::Missing { path: path.to_owned(), part: part.into() }
    }

    /// Creates the error that an operation cannot use the checkpoint at `path` because of its
    /// unsupported property `feature`, such as a dtype or a format.
    pub(crate) fn unsupported(path: &Path, feature: impl Into<UnsupportedFeature>) -> CkptError {
        CkptError::Unsupported { path: path.to_owned(), feature: feature.into() }
    }

    /// Creates the error that the directory at `path` is not a checkpoint that can be read.
    pub(crate) fn not_a_checkpoint(path: &Path, diagnosis: Diagnosis) -> CkptError {
        CkptError::NotACheckpoint { path: path.to_owned(), diagnosis }
    }

    /// Creates the error that the output path `path` cannot be used.
    pub(crate) fn output_rejected(path: &Path, problem: OutputProblem) -> CkptError {
        CkptError::OutputRejected { path: path.to_owned(), problem }
    }

    /// Returns true if the checkpoint itself is the cause of the error, such as a damaged file, and
    /// not the caller, the disk or the output.
    pub fn is_checkpoint_at_fault(&self) -> bool {
        use CkptError::*;
        match self {
            NotFound { .. }
            | NotACheckpoint { .. }
            | Damaged { .. }
            | Missing { .. }
            | ShardsOnOtherHosts { .. }
            | FetchFailed { .. }
            | ModelMismatch { .. }
            | NoSuchTensor { .. }
            | RangeOutsideTensor { .. }
            | Unsupported { .. } => true,
            InsufficientSpace { .. }
            | TooManyFiles { .. }
            | DirectoryBusy { .. }
            | InvalidSave(_)
            | InvalidOption { .. }
            | Internal { .. }
            | OutputRejected { .. }
            | ValueOverflow { .. }
            | Io { .. } => false,
        }
    }
}
