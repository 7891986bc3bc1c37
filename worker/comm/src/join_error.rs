//! [`GroupError`], [`SharedMemoryError`] and [`ConnectFailure`]: why a rank cannot join a group.
use crate::message_text::format_ranks;
use std::net::SocketAddr;

/// Error: a rank cannot join its group of ranks, because the number of ranks, the rank or another
/// setting of the group is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The number of ranks is 0 or above [`crate::MAX_WORLD_SIZE`].
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

/// Error of the memory through which the ranks of one host communicate (shared memory).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedMemoryError {
    /// The operating system failed to inspect, resize or map the file.
    #[error("cannot {operation} the shared memory ({bytes} bytes): {}", errno.desc())]
    Os {
        /// The operation that failed: `inspect`, `resize`, `seal` or `map`.
        operation: &'static str,
        /// Number of bytes that were requested; 0 for `inspect` and `seal`.
        bytes: usize,
        /// The operating system's error.
        errno: nix::errno::Errno,
    },
    /// The shared memory belongs to another user.
    #[error("the shared memory belongs to the user {uid}, but this process to the user {expected}")]
    OtherOwner {
        /// The user id of the owner.
        uid: u32,
        /// The user id of this process.
        expected: u32,
    },
    /// Another program, or a rank of another group, wrote the header of the shared memory.
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

/// Why a rank could not connect to a peer: the peer, the last address that was tried, and the error
/// at that address. The next attempt may succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {peer}{}: {error}", address.map_or_else(String::new, |a| format!(" at {a}")))]
pub struct ConnectFailure {
    /// The rank to which this rank tried to connect.
    pub peer: usize,
    /// The last address that was tried; `None` if the peer announced no address.
    pub address: Option<SocketAddr>,
    /// The error at that address.
    pub error: ConnectFailureReason,
}

/// Why connecting to a peer at one of its addresses failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectFailureReason {
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

/// Why a peer rejects the connection of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// The two ranks run different builds of `launch`.
    #[error("the peer speaks another version of the protocol")]
    OtherVersion,
    /// The two ranks belong to different attempts of the run.
    #[error("the peer belongs to another attempt of the run")]
    OtherAttempt,
    /// The ranks belong to different runs, or the wrong one of the two ranks opened the connection.
    #[error("the peer does not expect a connection from this rank")]
    UnexpectedRank,
}
