//! [`CommError`]: why a collective ended without a result.
use crate::{abort_reason::AbortReason, call::CollectiveKind, nccl::NcclError};
use device::{cuda::CudaError, storage::DeviceError};
use diagnostic::{Code, Diagnostic, codes::collective as codes};
use std::{net::SocketAddr, time::Duration};

/// Why a collective ended without a result.
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
        /// The argument that is wrong.
        error: ArgumentError,
    },
    /// The ranks called different collectives, or sizes that do not fit each other: a bug.
    #[error("ranks disagree about a collective: {0}")]
    Mismatch(CallMismatch),
    /// Peers did not enter a collective in time.
    #[error(
        "rank {rank} waited {} in {collective} (call {call_number}) for {}, which did not enter it",
        format_seconds(*timeout),
        format_ranks(missing, *world)
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// Number of ranks of the job.
        world: usize,
        /// The collective that the rank called.
        collective: CollectiveKind,
        /// Number of collectives that the rank had called before.
        call_number: u64,
        /// The limit.
        timeout: Duration,
        /// The ranks that did not enter the collective, ascending.
        missing: Vec<usize>,
    },
    /// Peers did not join the group in time.
    #[error(
        "rank {rank} waited {} for {} to join the group{}",
        format_seconds(*timeout),
        format_ranks(missing, *world),
        last_failure.as_ref().map_or_else(String::new, |f| format!("; last attempt: {f}"))
    )]
    JoinTimeout {
        /// The rank that waited.
        rank: usize,
        /// Number of ranks of the job.
        world: usize,
        /// The limit.
        timeout: Duration,
        /// The ranks that did not join, ascending.
        missing: Vec<usize>,
        /// Why the last attempt to connect to a peer failed, if this rank connects.
        last_failure: Option<Box<ConnectFailure>>,
    },
    /// The description of the group is wrong.
    #[error(transparent)]
    InvalidGroup(#[from] GroupError),
    /// Shared memory of the ranks of a host cannot be used.
    #[error(transparent)]
    SharedMemory(#[from] SharedMemoryError),
    /// A peer rejected the connection of this rank, and would reject it again.
    #[error("rank {peer} rejected the connection of rank {rank}: {reason}")]
    Rejected {
        /// The rank that connected.
        rank: usize,
        /// The rank that rejected it.
        peer: usize,
        /// The peer's answer.
        reason: RejectReason,
    },
    /// The operating system failed to set up the transport.
    #[error("cannot {operation}: {error}")]
    Transport {
        /// What was attempted, such as `accept connections`.
        operation: &'static str,
        /// The operating system's message.
        error: String,
    },
    /// A step of a collective needs a connection that does not exist: a bug.
    #[error("rank {rank} has no connection to rank {peer}")]
    NotConnected {
        /// The rank that called the collective.
        rank: usize,
        /// The rank on another host.
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

/// The result of a collective.
pub type Result<T> = std::result::Result<T, CommError>;

/// Which argument of a collective is wrong, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgumentError {
    /// Two buffers have elements of different sizes.
    #[error("{collective}: elements of send have {send_bytes} bytes, those of recv {recv_bytes}")]
    ElementSize {
        /// The collective.
        collective: CollectiveKind,
        /// Bytes of an element of `send`.
        send_bytes: usize,
        /// Bytes of an element of `recv`.
        recv_bytes: usize,
    },
    /// A list of counts does not have one entry for each rank.
    #[error("{collective}: {counts} has {len} entries, but the group has {world} ranks")]
    CountsLength {
        /// The collective.
        collective: CollectiveKind,
        /// The name of the argument.
        counts: &'static str,
        /// Number of entries of the list.
        len: usize,
        /// Number of ranks.
        world: usize,
    },
    /// The sum of a list of counts does not fit the address space.
    #[error("{collective}: the sum of {counts} overflows")]
    CountsOverflow {
        /// The collective.
        collective: CollectiveKind,
        /// The name of the argument.
        counts: &'static str,
    },
    /// A buffer is not as long as the counts require.
    #[error("{collective}: {buffer} has {len} elements, but {required} is {expected}")]
    BufferLength {
        /// The collective.
        collective: CollectiveKind,
        /// The name of the argument.
        buffer: &'static str,
        /// Number of elements of the buffer.
        len: usize,
        /// What the length must equal, such as `counts[rank]`.
        required: &'static str,
        /// The required number of elements.
        expected: usize,
    },
    /// The root is not a rank of the group.
    #[error("{collective}: root is {root}, but the group has {world} ranks")]
    RootOutOfRange {
        /// The collective.
        collective: CollectiveKind,
        /// The root that was given.
        root: usize,
        /// Number of ranks.
        world: usize,
    },
    /// The number of elements that a rank sends to itself differs from the number that it expects
    /// from itself.
    #[error("{collective}: the rank sends {sent} elements to itself, but expects {expected}")]
    SelfTransfer {
        /// The collective.
        collective: CollectiveKind,
        /// The rank's own entry of `send_counts`.
        sent: u64,
        /// The rank's own entry of `recv_counts`.
        expected: u64,
    },
    /// A rank gathers more bytes than [`crate::MAX_GATHER_BYTES`].
    #[error("{collective}: {bytes} bytes exceed the limit of {limit} per rank")]
    TooManyBytes {
        /// The collective.
        collective: CollectiveKind,
        /// Bytes that were given.
        bytes: usize,
        /// The limit.
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
        /// This rank.
        rank: usize,
        /// The call of this rank.
        call: CallSummary,
        /// The other rank.
        peer: usize,
        /// The other rank's call.
        peer_call: CallSummary,
    },
    /// A rank sends more or less to a peer than the peer expects.
    #[error("rank {from} sends {sent} {unit} to rank {to}, which expects {expected}")]
    Transfer {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// The amount that the sender sends.
        sent: u64,
        /// The amount that the receiver expects.
        expected: u64,
        /// The unit of both amounts.
        unit: TransferUnit,
    },
    /// A rank gathers more bytes than [`crate::MAX_GATHER_BYTES`].
    #[error("rank {rank} gives {bytes} bytes to all_gather_bytes; the limit is {limit}")]
    TooManyBytes {
        /// The rank.
        rank: usize,
        /// Bytes that the rank announced.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A rank passes more partial vectors than an ordered reduce-scatter accepts.
    #[error("rank {rank} gives {partials} partials to reduce_scatter_ordered; the limit is {limit}")]
    TooManyPartials {
        /// The rank.
        rank: usize,
        /// Partials that the rank announced.
        partials: u64,
        /// The limit.
        limit: u64,
    },
    /// A rank did not announce how many partial vectors it passes.
    #[error("reduce_scatter_ordered: {announced} of {world} ranks announced their number of partials")]
    PartialCountMissing {
        /// Ranks whose announcement is valid.
        announced: usize,
        /// Number of ranks.
        world: usize,
    },
    /// A message on a connection has an unexpected number.
    #[error("rank {rank} received message {number} from rank {peer} instead of message {expected}")]
    MessageNumber {
        /// The receiver.
        rank: usize,
        /// The sender.
        peer: usize,
        /// The number in the message.
        number: u64,
        /// The number that comes next on this connection.
        expected: u64,
    },
}

/// The collective that a rank called, as its peers know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSummary {
    /// The collective; `None` if the peer sent an unknown number.
    pub collective: Option<CollectiveKind>,
    /// Number of collectives that the rank had called before.
    pub call_number: u64,
    /// Number of elements that all ranks must agree about; 0 if they may differ.
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
    /// Elements of the collective's type.
    Elements,
    /// Bytes.
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
        /// The requested number of ranks.
        world: usize,
        /// The largest number.
        limit: usize,
    },
    /// The rank is not one of the group.
    #[error("rank {rank} does not exist in a group of {world} ranks")]
    RankOutOfRange {
        /// The rank that was given.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// The staging memory is too small or too large for the number of ranks.
    #[error(
        "{bytes} bytes of staging memory are not possible with {world} ranks: {min} to {max} are required"
    )]
    StagingSize {
        /// Bytes that were given.
        bytes: usize,
        /// Number of ranks.
        world: usize,
        /// The smallest number of bytes.
        min: usize,
        /// The largest number of bytes.
        max: usize,
    },
    /// Several ranks are on one host, but this rank was given no shared memory.
    #[error("{} are on one host, but rank {rank} was given no shared memory", format_ranks(local_ranks, *world))]
    NoSharedMemory {
        /// The rank without shared memory.
        rank: usize,
        /// Number of ranks of the job.
        world: usize,
        /// The ranks of the host.
        local_ranks: Vec<usize>,
    },
    /// Another process joined as this rank.
    #[error("rank {rank} has joined already, as process {joined_pid}; this is process {pid}")]
    AlreadyJoined {
        /// The rank.
        rank: usize,
        /// The process that joined.
        joined_pid: u32,
        /// This process.
        pid: u32,
    },
}

/// Why shared memory cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedMemoryError {
    /// The operating system failed to inspect, resize or map the file.
    #[error("cannot {operation} the shared memory ({bytes} bytes): {}", errno.desc())]
    Os {
        /// What was attempted: `inspect`, `resize` or `map`.
        operation: &'static str,
        /// Number of bytes that were requested; 0 for `inspect`.
        bytes: usize,
        /// The operating system's error.
        errno: nix::errno::Errno,
    },
    /// The header was written by another program, or for another group.
    #[error("the {field} of the shared memory is {found:#x}, but this rank has {expected:#x}")]
    HeaderMismatch {
        /// The field of the header.
        field: &'static str,
        /// The value in the shared memory.
        found: u64,
        /// The value of this rank.
        expected: u64,
    },
    /// The file does not have the size that the number of ranks and the staging size require.
    #[error("the shared memory has {found} bytes, but {expected} are required")]
    FileSize {
        /// Bytes of the file.
        found: usize,
        /// The required number of bytes.
        expected: usize,
    },
    /// A shared window does not fit the address space.
    #[error("a shared window of {bytes} bytes does not fit the address space")]
    WindowTooLarge {
        /// Size of the window in bytes.
        bytes: usize,
    },
}

/// Why an attempt to connect to a peer failed. The next attempt may succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {peer}{}: {error}", address.map_or_else(String::new, |a| format!(" at {a}")))]
pub struct ConnectFailure {
    /// The rank to connect to.
    pub peer: usize,
    /// The last address that was tried; `None` if the rank has none.
    pub address: Option<SocketAddr>,
    /// What went wrong.
    pub error: ConnectError,
}

/// What went wrong while connecting to one address of a peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The peer announced no address.
    #[error("no address is known")]
    NoAddress,
    /// The operating system failed to connect, read or write.
    #[error("{0}")]
    Os(String),
    /// The listener does not speak this protocol.
    #[error("the listener is not a rank of this job")]
    NotAPeer,
    /// The listener could not prove that it knows the job's key.
    #[error("the listener does not know the job's key")]
    WrongKey,
    /// The listener closed the connection during the handshake, for instance over a wrong key.
    #[error("the listener closed the connection during the handshake")]
    Closed,
    /// The listener did not answer in time.
    #[error("the listener did not answer in the handshake")]
    NoAnswer,
}

/// Why a peer rejects a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// The two ranks run different builds of `launch`.
    #[error("it speaks another version of the protocol")]
    OtherVersion,
    /// The two ranks belong to different attempts of the run.
    #[error("it belongs to another attempt of the run")]
    OtherAttempt,
    /// The ranks belong to different runs, or do not connect in this direction.
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

    /// Returns a function that converts an I/O error of `operation` to [`CommError::Transport`].
    pub(crate) fn from_failed_operation(operation: &'static str) -> impl Fn(std::io::Error) -> CommError {
        move |error| CommError::Transport { operation, error: error.to_string() }
    }

    /// Returns the reason with which `rank` aborts its group because of this error.
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
    /// Returns `diagnostic` with the fields of this mismatch added.
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
