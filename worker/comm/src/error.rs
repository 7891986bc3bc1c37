//! [`CommError`]: errors of collectives and of joining a group, with their codes and diagnostics.
use crate::{abort_reason::AbortReason, call::CollectiveKind, nccl::NcclError};
use device::{cuda::CudaError, storage::DeviceError};
use diagnostic::{Code, Diagnostic, codes::collective as codes};
use std::{net::SocketAddr, time::Duration};

/// Error of a collective, or of an attempt to join a group.
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
    /// The group cannot be joined as described, for example because the number of ranks is out of
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
    /// A step of a collective needs a connection that does not exist: a bug.
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

/// Result of a collective: a value, or a [`CommError`].
pub type Result<T> = std::result::Result<T, CommError>;

/// An argument of a collective that contradicts the other arguments or the group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgumentError {
    /// The `send` and the `recv` buffer have elements of different sizes.
    #[error("{collective}: elements of send have {send_bytes} bytes, those of recv {recv_bytes}")]
    ElementSize {
        /// The collective that was called.
        collective: CollectiveKind,
        /// Size of an element of `send` in bytes.
        send_bytes: usize,
        /// Size of an element of `recv` in bytes.
        recv_bytes: usize,
    },
    /// A list of counts does not have one entry for each rank.
    #[error("{collective}: {counts} has {len} entries, but the group has {world} ranks")]
    CountsLength {
        /// The collective that was called.
        collective: CollectiveKind,
        /// Name of the list of counts, such as `send_counts`.
        counts: &'static str,
        /// Number of entries that the list has.
        len: usize,
        /// Number of ranks in the group.
        world: usize,
    },
    /// The sum of a list of counts does not fit the address space.
    #[error("{collective}: the sum of {counts} overflows")]
    CountsOverflow {
        /// The collective that was called.
        collective: CollectiveKind,
        /// Name of the list of counts, such as `send_counts`.
        counts: &'static str,
    },
    /// A buffer is not as long as the counts require.
    #[error("{collective}: {buffer} has {len} elements, but {required} is {expected}")]
    BufferLength {
        /// The collective that was called.
        collective: CollectiveKind,
        /// Name of the buffer, such as `recv`.
        buffer: &'static str,
        /// Number of elements that the buffer has.
        len: usize,
        /// Name of the required length, such as `counts[rank]`.
        required: &'static str,
        /// Number of elements that the buffer must have.
        expected: usize,
    },
    /// The root is not a rank of the group.
    #[error("{collective}: root is {root}, but the group has {world} ranks")]
    RootOutOfRange {
        /// The collective that was called.
        collective: CollectiveKind,
        /// The `root` argument of the call.
        root: usize,
        /// Number of ranks in the group.
        world: usize,
    },
    /// The number of elements that a rank sends to itself differs from the number that it expects
    /// from itself.
    #[error("{collective}: the rank sends {sent} elements to itself, but expects {expected}")]
    SelfTransfer {
        /// The collective that was called.
        collective: CollectiveKind,
        /// The entry of `send_counts` for the rank itself.
        sent: u64,
        /// The entry of `recv_counts` for the rank itself.
        expected: u64,
    },
    /// A rank gathers more bytes than [`crate::MAX_GATHER_BYTES`].
    #[error("{collective}: {bytes} bytes exceed the limit of {limit} per rank")]
    TooManyBytes {
        /// The collective that was called.
        collective: CollectiveKind,
        /// Number of bytes that the caller passed.
        bytes: usize,
        /// The largest number of bytes that a rank may pass.
        limit: usize,
    },
}

/// How the calls of two ranks differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallMismatch {
    /// Two ranks called different collectives, or one collective with different arguments.
    #[error(
        "rank {rank} calls {call}, rank {peer} calls {peer_call}{}",
        if call == peer_call { " (the counts, the root or the element type differ)" } else { "" }
    )]
    Call {
        /// The rank that detected the difference.
        rank: usize,
        /// The call of the rank that detected the difference.
        call: CallSummary,
        /// The rank with the different call.
        peer: usize,
        /// The call of the rank `peer`.
        peer_call: CallSummary,
    },
    /// A rank sends more or less to a peer than the peer expects.
    #[error("rank {from} sends {sent} {unit} to rank {to}, which expects {expected}")]
    Transfer {
        /// The rank that sends.
        from: usize,
        /// The rank that receives.
        to: usize,
        /// The amount that `from` sends, in `unit`.
        sent: u64,
        /// The amount that `to` expects, in `unit`.
        expected: u64,
        /// The unit of `sent` and `expected`.
        unit: TransferUnit,
    },
    /// A rank gathers more bytes than [`crate::MAX_GATHER_BYTES`].
    #[error("rank {rank} gives {bytes} bytes to all_gather_bytes; the limit is {limit}")]
    TooManyBytes {
        /// The rank that passes too many bytes.
        rank: usize,
        /// Number of bytes that the rank announced.
        bytes: u64,
        /// The largest number of bytes that a rank may pass.
        limit: u64,
    },
    /// A rank passes more partial vectors than an ordered reduce-scatter accepts.
    #[error("rank {rank} gives {partials} partials to reduce_scatter_ordered; the limit is {limit}")]
    TooManyPartials {
        /// The rank that passes too many partial vectors.
        rank: usize,
        /// Number of partial vectors that the rank announced.
        partials: u64,
        /// The largest number of partial vectors that a rank may pass.
        limit: u64,
    },
    /// A rank did not announce how many partial vectors it passes.
    #[error("reduce_scatter_ordered: {announced} of {world} ranks announced their number of partials")]
    PartialCountMissing {
        /// Number of ranks that announced a number of partial vectors.
        announced: usize,
        /// Number of ranks in the group.
        world: usize,
    },
    /// A message on a connection between two ranks does not have the next sequence number.
    #[error("rank {rank} received message {number} from rank {peer} instead of message {expected}")]
    MessageNumber {
        /// The rank that received the message.
        rank: usize,
        /// The rank that sent the message.
        peer: usize,
        /// The sequence number in the message.
        number: u64,
        /// The sequence number that comes next on this connection.
        expected: u64,
    },
}

/// The call of a rank, as the rank announced it to its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSummary {
    /// The collective that was called; `None` if the peer sent an unknown number.
    pub collective: Option<CollectiveKind>,
    /// Call number: how many collectives the rank had called before.
    pub call_number: u64,
    /// Element count that must be equal on all ranks; 0 for collectives in which ranks may pass
    /// different counts.
    pub elements: u64,
}

impl std::fmt::Display for CallSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.collective.map_or("an unknown collective", CollectiveKind::name);
        write!(f, "{name} (call {}, {} elements)", self.call_number, self.elements)
    }
}

/// The unit of the amounts in [`CallMismatch::Transfer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferUnit {
    /// The amounts are numbers of elements.
    Elements,
    /// The amounts are numbers of bytes.
    Bytes,
}

impl std::fmt::Display for TransferUnit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TransferUnit::Elements => "elements",
            TransferUnit::Bytes => "bytes",
        })
    }
}

/// Why a group cannot be joined as described.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The number of ranks is 0 or above [`crate::MAX_WORLD`].
    #[error("a group has 1 to {limit} ranks, not {world}")]
    WorldSize {
        /// The number of ranks that the caller requested.
        world: usize,
        /// The largest supported number of ranks.
        limit: usize,
    },
    /// The rank is not below the number of ranks in the group.
    #[error("rank {rank} does not exist in a group of {world} ranks")]
    RankOutOfRange {
        /// The rank that the caller requested.
        rank: usize,
        /// Number of ranks in the group.
        world: usize,
    },
    /// The staging memory is too small or too large for the number of ranks.
    #[error(
        "{bytes} bytes of staging memory are not possible with {world} ranks: {min} to {max} are required"
    )]
    StagingSize {
        /// The requested size of the staging memory, in bytes.
        bytes: usize,
        /// Number of ranks in the group.
        world: usize,
        /// The smallest allowed size in bytes.
        min: usize,
        /// The largest allowed size in bytes.
        max: usize,
    },
    /// Several ranks are on one host, but this rank was given no shared memory.
    #[error("{} are on one host, but rank {rank} was given no shared memory", format_ranks(local_ranks, *world))]
    NoSharedMemory {
        /// The rank without shared memory.
        rank: usize,
        /// Number of ranks in the job.
        world: usize,
        /// All ranks on the host.
        local_ranks: Vec<usize>,
    },
    /// Another process has already joined the group as this rank.
    #[error("rank {rank} has joined already, as process {joined_pid}; this is process {pid}")]
    AlreadyJoined {
        /// The rank as which both processes join.
        rank: usize,
        /// Process id of the process that joined first.
        joined_pid: u32,
        /// Process id of this process.
        pid: u32,
    },
}

/// Error of the shared memory through which the ranks of a host communicate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedMemoryError {
    /// The operating system failed to inspect, resize or map the file.
    #[error("cannot {operation} the shared memory ({bytes} bytes): {}", errno.desc())]
    Os {
        /// The operation that failed: `inspect`, `resize` or `map`.
        operation: &'static str,
        /// Number of bytes that were requested; 0 for `inspect`.
        bytes: usize,
        /// The operating system's error.
        errno: nix::errno::Errno,
    },
    /// The header of the shared memory was written by another program, or for another group.
    #[error("the {field} of the shared memory is {found:#x}, but this rank has {expected:#x}")]
    HeaderMismatch {
        /// The header field that differs.
        field: &'static str,
        /// The value of the field in the shared memory.
        found: u64,
        /// The value of the field that this rank requires.
        expected: u64,
    },
    /// The shared memory file does not have the size that follows from the number of ranks and the
    /// staging size.
    #[error("the shared memory has {found} bytes, but {expected} are required")]
    FileSize {
        /// Size of the file in bytes.
        found: usize,
        /// The required size in bytes.
        expected: usize,
    },
    /// A shared window does not fit the address space.
    #[error("a shared window of {bytes} bytes does not fit the address space")]
    WindowTooLarge {
        /// Size of the window in bytes.
        bytes: usize,
    },
}

/// A failed attempt to connect to a peer. The next attempt may succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {peer}{}: {error}", address.map_or_else(String::new, |a| format!(" at {a}")))]
pub struct ConnectFailure {
    /// The rank to which this rank tried to connect.
    pub peer: usize,
    /// The last address that was tried; `None` if the peer announced no address.
    pub address: Option<SocketAddr>,
    /// The error at that address.
    pub error: ConnectError,
}

/// Error of connecting to one address of a peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The peer announced no address.
    #[error("no address is known")]
    NoAddress,
    /// The operating system failed to connect, read or write. The value is the system's message.
    #[error("{0}")]
    Os(String),
    /// The program that listens at the address does not speak this protocol.
    #[error("the listener is not a rank of this job")]
    NotAPeer,
    /// The program that listens at the address could not prove that it knows the job's key.
    #[error("the listener does not know the job's key")]
    WrongKey,
    /// The peer closed the connection during the handshake, for example because this rank has the
    /// wrong key.
    #[error("the listener closed the connection during the handshake")]
    Closed,
    /// The peer did not answer within the time limit of the handshake.
    #[error("the listener did not answer in the handshake")]
    NoAnswer,
}

/// Reason why a peer rejects a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// The two ranks run different builds of `launch`.
    #[error("it speaks another version of the protocol")]
    OtherVersion,
    /// The two ranks belong to different attempts of the run.
    #[error("it belongs to another attempt of the run")]
    OtherAttempt,
    /// The ranks belong to different runs, or the wrong one of the two ranks opened the connection.
    #[error("it does not expect a connection from this rank")]
    UnexpectedRank,
}

impl CommError {
    /// Returns the stable error code of this error.
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

    /// Returns a function for `map_err` that wraps an I/O error in [`CommError::Transport`].
    /// `operation` names the failed operation.
    pub(crate) fn from_failed_operation(operation: &'static str) -> impl Fn(std::io::Error) -> CommError {
        move |error| CommError::Transport { operation, error: error.to_string() }
    }

    /// Returns the abort reason with which `rank` informs its peers of this error.
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

impl CallMismatch {
    /// Returns `diagnostic` with the ranks, calls and amounts of this mismatch added as fields.
    fn add_fields(&self, diagnostic: Diagnostic) -> Diagnostic {
        match self {
            CallMismatch::Call { rank, call, peer, peer_call } => diagnostic
                .with_field("rank", *rank)
                .with_field("call", call.to_string())
                .with_field("peer", *peer)
                .with_field("peer_call", peer_call.to_string()),
            CallMismatch::Transfer { from, to, sent, expected, unit } => diagnostic
                .with_field("from_rank", *from)
                .with_field("to_rank", *to)
                .with_field("sent", *sent)
                .with_field("expected", *expected)
                .with_field("unit", unit.to_string()),
            CallMismatch::TooManyBytes { rank, .. } | CallMismatch::TooManyPartials { rank, .. } => {
                diagnostic.with_field("rank", *rank)
            }
            CallMismatch::PartialCountMissing { .. } => diagnostic,
            CallMismatch::MessageNumber { rank, peer, .. } => {
                diagnostic.with_field("rank", *rank).with_field("peer", *peer)
            }
        }
    }
}

/// Formats a duration in seconds, such as `0.05 s`.
pub(crate) fn format_seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

/// Formats ranks for a message, such as `ranks 1, 3 of 4`.
pub(crate) fn format_ranks(ranks: &[usize], world: usize) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {} of {world}", numbers.join(", "))
}
