//! [`NcclError`]: errors of opening NCCL, of its calls, and of work on the GPU.
use crate::abort_reason::AbortReason;
use cudarc::nccl::sys::ncclResult_t;
use device::cuda::CudaError;
use diagnostic::{Code, Diagnostic, codes::collective as codes, quantity::format_seconds};
use std::{path::PathBuf, time::Duration};

/// Why NCCL could not be opened, or why a call of NCCL or the work that it enqueued failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NcclError {
    /// No file of the NCCL library could be opened.
    #[error("NCCL (libnccl.so.2) was not found; tried {}", attempts.join(", "))]
    LibraryNotFound {
        /// The dynamic loader's message for each file that was tried.
        attempts: Vec<String>,
    },
    /// The NCCL library is older than this program supports.
    #[error("{} is {found}, but NCCL 2.18 is required", path.display())]
    LibraryTooOld {
        /// The file of the library.
        path: PathBuf,
        /// The version of the library, or the function that it lacks.
        found: String,
    },
    /// A function of NCCL failed, or the communicator reported an asynchronous error later.
    #[error("{function} failed: {message} ({status})")]
    Call {
        /// The function that failed, or the operation during which the communicator failed.
        function: String,
        /// NCCL's status code.
        status: i32,
        /// NCCL's message.
        message: String,
    },
    /// A peer did not join the group, or work on the GPU did not end, within the timeout.
    #[error("{operation} did not end within {}", format_seconds(*timeout))]
    Timeout {
        /// The operation that did not end.
        operation: String,
        /// The timeout that expired.
        timeout: Duration,
    },
    /// The group was aborted. The value is the first reason that was given.
    #[error("collective aborted: {0}")]
    Aborted(AbortReason),
    /// Another rank could not create its communicator.
    #[error("rank {rank} cannot create an NCCL communicator: {message}")]
    PeerFailed {
        /// The rank that failed.
        rank: usize,
        /// The message of the failed rank's error.
        message: String,
    },
    /// An exchange names a peer that is not a rank of the group: a bug of the caller.
    #[error("rank {peer} does not exist in a group of {world} ranks")]
    PeerOutOfRange {
        /// The peer that the exchange names.
        peer: usize,
        /// Number of ranks in the group.
        world: usize,
    },
    /// The transport between host memories, through which the ranks exchange NCCL's unique id,
    /// failed.
    #[error("the ranks cannot connect with NCCL: {}", .0.message())]
    HostComm(Box<Diagnostic>),
    /// The GPU of this rank cannot be used.
    #[error(transparent)]
    Device(Box<CudaError>),
}

/// Result of an NCCL call: a value, or an [`NcclError`].
pub type Result<T> = std::result::Result<T, NcclError>;

impl NcclError {
    /// Returns true if NCCL has lost the connection to a peer, whose process may have ended.
    pub(crate) fn is_connection_failure(&self) -> bool {
        let failures = [ncclResult_t::ncclSystemError, ncclResult_t::ncclRemoteError];
        matches!(self, NcclError::Call { status, .. } if failures.iter().any(|f| *f as i32 == *status))
    }

    /// Returns the stable code of this error, which `launch explain` documents.
    pub fn code(&self) -> Code {
        match self {
            NcclError::LibraryNotFound { .. } => codes::NCCL_LIBRARY_MISSING,
            NcclError::LibraryTooOld { .. } => codes::NCCL_LIBRARY_TOO_OLD,
            NcclError::Call { .. } => codes::NCCL_CALL_FAILED,
            NcclError::Timeout { .. } => codes::NCCL_TIMEOUT,
            NcclError::Aborted(reason) => reason.code(),
            NcclError::PeerFailed { .. } => codes::NCCL_SETUP_FAILED,
            NcclError::PeerOutOfRange { .. } => codes::COLLECTIVE_ARGUMENTS_INVALID,
            NcclError::HostComm(error) => error.code(),
            NcclError::Device(error) => error.code(),
        }
    }
}

impl From<CudaError> for NcclError {
    fn from(error: CudaError) -> Self {
        NcclError::Device(Box::new(error))
    }
}

impl From<NcclError> for Diagnostic {
    fn from(error: NcclError) -> Self {
        let diagnostic = Diagnostic::error(error.code(), error.to_string());
        match error {
            NcclError::LibraryNotFound { attempts } => {
                diagnostic.with_subject("libnccl.so.2").with_field("attempts", attempts).with_help(
                    "install NCCL or `pip install nvidia-nccl-cu13`, or add its directory to LD_LIBRARY_PATH",
                )
            }
            NcclError::LibraryTooOld { path, found } => diagnostic
                .with_subject(path.display().to_string())
                .with_field("found", found)
                .with_field("required", "2.18"),
            NcclError::Call { function, status, message } => diagnostic
                .with_subject(function)
                .with_field("status", status)
                .with_field("library_message", message),
            NcclError::Timeout { operation, timeout } => diagnostic
                .with_field("operation", operation)
                .with_field("timeout_s", timeout.as_secs_f64())
                .with_help("check that every rank runs and that its host can be reached"),
            NcclError::Aborted(reason) => reason.add_fields(diagnostic),
            NcclError::PeerFailed { rank, .. } => diagnostic.with_field("peer", rank),
            NcclError::PeerOutOfRange { peer, world } => {
                diagnostic.with_field("peer", peer).with_field("world_size", world)
            }
            NcclError::HostComm(error) => error.with_message(diagnostic.message()),
            NcclError::Device(error) => Diagnostic::from(*error),
        }
    }
}
