//! [`CommError`]: errors of collectives and of joining a group, with their codes and diagnostics.
use crate::{
    abort_reason::AbortReason,
    call_error::{ArgumentError, CallMismatch},
    collective_kind::CollectiveKind,
    join_error::{ConnectFailure, GroupError, RejectReason, SharedMemoryError},
    message_text::format_ranks,
    nccl_error::NcclError,
};
use device::{cuda::CudaError, storage::DeviceError};
use diagnostic::{Code, Diagnostic, codes::collective as codes, quantity::format_seconds};
use std::time::Duration;

/// Error: a collective failed, or this rank could not join its group.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CommError {
    /// The group was aborted, by this rank or by a peer. An abort is never the root cause of a
    /// failed job.
    #[error("collective aborted: {0}")]
    Aborted(AbortReason),
    /// The arguments of a collective contradict each other or the group: a bug of the caller.
    #[error("rank {rank}: {error}")]
    InvalidArguments {
        /// The rank that made the call.
        rank: usize,
        /// Which argument is wrong, and the numbers that contradict each other.
        error: ArgumentError,
    },
    /// Ranks called different collectives, or passed sizes that do not fit each other: a bug of the
    /// caller.
    #[error("ranks disagree about a collective: {0}")]
    Mismatch(CallMismatch),
    /// Peers did not enter a collective within the timeout.
    #[error(
        "rank {rank} waited {} in {collective} (call {call_number}) for {}, which did not enter it",
        format_seconds(*timeout),
        format_ranks(missing, *world)
    )]
    Timeout {
        /// The rank whose wait timed out.
        rank: usize,
        /// Number of ranks in the job.
        world: usize,
        /// The collective that the rank called.
        collective: CollectiveKind,
        /// Call number: how many collectives the rank had called before.
        call_number: u64,
        /// The timeout that expired.
        timeout: Duration,
        /// The ranks that did not enter the collective, ascending.
        missing: Vec<usize>,
    },
    /// Peers did not join the group within the timeout.
    #[error(
        "rank {rank} waited {} for {} to join the group{}",
        format_seconds(*timeout),
        format_ranks(missing, *world),
        last_failure.as_ref().map_or_else(String::new, |f| format!("; last attempt: {f}"))
    )]
    JoinTimeout {
        /// The rank whose wait timed out.
        rank: usize,
        /// Number of ranks in the job.
        world: usize,
        /// The timeout that expired.
        timeout: Duration,
        /// The ranks that did not join, ascending.
        missing: Vec<usize>,
        /// The last failed attempt to connect to a peer, if there was one.
        last_failure: Option<Box<ConnectFailure>>,
    },
    /// The description of the group is invalid, for example because the number of ranks is out of
    /// range.
    #[error(transparent)]
    InvalidGroup(#[from] GroupError),
    /// The shared memory of a host's ranks cannot be used.
    #[error(transparent)]
    SharedMemory(#[from] SharedMemoryError),
    /// A peer rejected this rank's connection for a reason that another attempt would not change.
    #[error("rank {peer} rejected the connection of rank {rank}: {reason}")]
    Rejected {
        /// The rank that opened the connection.
        rank: usize,
        /// The rank that rejected the connection.
        peer: usize,
        /// The reason that the peer gave.
        reason: RejectReason,
    },
    /// The operating system failed to set up the transport.
    #[error("cannot {operation}: {error}")]
    Transport {
        /// The operation that failed, such as `accept connections`.
        operation: &'static str,
        /// The operating system's message.
        error: String,
    },
    /// A step of a collective needs a connection that does not exist, which is a bug of this crate.
    #[error("rank {rank} has no connection to rank {peer}")]
    NotConnected {
        /// The rank that called the collective.
        rank: usize,
        /// The rank on another host to which no connection exists.
        peer: usize,
    },
    /// The thread that runs the collectives of a rank ended or panicked.
    #[error("the communication thread ended{}", message.as_ref().map_or_else(String::new, |m| format!(": {m}")))]
    ThreadEnded {
        /// The panic message, if the thread panicked.
        message: Option<String>,
    },
    /// The GPU that holds the buffers failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// NCCL failed.
    #[error(transparent)]
    Nccl(Box<NcclError>),
}

/// The result of a collective: a value, or a [`CommError`].
pub type Result<T> = std::result::Result<T, CommError>;

impl CommError {
    /// Returns the stable code of this error, with which `launch explain` documents it.
    pub fn code(&self) -> Code {
        match self {
            CommError::Aborted(reason) => reason.code(),
            CommError::InvalidArguments { .. } => codes::COLLECTIVE_ARGUMENTS_INVALID,
            CommError::Mismatch(_) => codes::COLLECTIVE_MISMATCH,
            CommError::Timeout { .. } => codes::COLLECTIVE_TIMEOUT,
            CommError::JoinTimeout { .. } => codes::COLLECTIVE_JOIN_TIMEOUT,
            CommError::InvalidGroup(_) => codes::COLLECTIVE_GROUP_INVALID,
            CommError::SharedMemory(SharedMemoryError::HeaderMismatch { .. }) => {
                codes::SHARED_MEMORY_MISMATCH
            }
            CommError::SharedMemory(_) => codes::SHARED_MEMORY_UNAVAILABLE,
            CommError::Rejected { .. } => codes::PEER_CONNECTION_REJECTED,
            CommError::Transport { .. } | CommError::NotConnected { .. } => {
                codes::COLLECTIVE_TRANSPORT_FAILED
            }
            CommError::ThreadEnded { .. } => codes::COMMUNICATION_THREAD_FAILED,
            CommError::Device(error) => error.0.code(),
            CommError::Nccl(error) => error.code(),
        }
    }

    /// Returns a function that wraps an I/O error in [`CommError::Transport`], for use with
    /// `map_err`. `operation` names the failed operation.
    pub(crate) fn wrap_io_error(operation: &'static str) -> impl Fn(std::io::Error) -> CommError {
        move |error| CommError::Transport { operation, error: error.to_string() }
    }

    /// Returns the abort reason that `rank` sends to its peers because of this error, when it
    /// aborts their group.
    pub(crate) fn to_abort_reason(&self, rank: usize) -> AbortReason {
        match self {
            CommError::Aborted(reason) => reason.clone(),
            error => AbortReason::RankFailed { rank, message: error.to_string() },
        }
    }
}

impl From<CudaError> for CommError {
    fn from(error: CudaError) -> Self {
        CommError::Device(DeviceError(error.into()))
    }
}

impl From<NcclError> for CommError {
    fn from(error: NcclError) -> Self {
        match error {
            NcclError::Aborted(reason) => CommError::Aborted(reason),
            other => CommError::Nccl(Box::new(other)),
        }
    }
}

impl From<CommError> for NcclError {
    fn from(error: CommError) -> Self {
        match error {
            CommError::Aborted(reason) => NcclError::Aborted(reason),
            other => NcclError::HostComm(Box::new(other.into())),
        }
    }
}

impl From<CommError> for Diagnostic {
    fn from(error: CommError) -> Self {
        let diagnostic = Diagnostic::error(error.code(), error.to_string());
        match error {
            CommError::Aborted(reason) => reason.add_fields(diagnostic),
            CommError::InvalidArguments { rank, .. } => diagnostic.with_field("rank", rank),
            CommError::Mismatch(mismatch) => mismatch.add_fields(diagnostic),
            CommError::Timeout { rank, world, collective, call_number, timeout, missing } => diagnostic
                .with_field("rank", rank)
                .with_field("world_size", world)
                .with_field("collective", collective.name())
                .with_field("call_number", call_number)
                .with_field("timeout_s", timeout.as_secs_f64())
                .with_field("missing_ranks", missing),
            CommError::JoinTimeout { rank, world, timeout, missing, last_failure } => {
                let diagnostic = diagnostic
                    .with_field("rank", rank)
                    .with_field("world_size", world)
                    .with_field("timeout_s", timeout.as_secs_f64())
                    .with_field("missing_ranks", missing);
                let address = last_failure.and_then(|failure| failure.address);
                address.into_iter().fold(diagnostic, |d, a| d.with_field("address", a.to_string()))
            }
            CommError::Rejected { rank, peer, .. } => {
                diagnostic.with_field("rank", rank).with_field("peer", peer)
            }
            CommError::SharedMemory(SharedMemoryError::Os { bytes, errno, .. }) => {
                diagnostic.with_field("bytes", bytes).with_field("errno", errno as i32)
            }
            CommError::Transport { operation, .. } => diagnostic.with_field("operation", operation),
            CommError::NotConnected { rank, peer } => {
                diagnostic.with_field("rank", rank).with_field("peer", peer)
            }
            CommError::Device(error) => error.0,
            CommError::Nccl(error) => Diagnostic::from(*error),
            CommError::InvalidGroup(_) | CommError::SharedMemory(_) | CommError::ThreadEnded { .. } => {
                diagnostic
            }
        }
    }
}
