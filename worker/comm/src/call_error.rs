//! [`ArgumentError`] and [`CallMismatch`]: errors about the arguments of collectives, either within
//! one call or between the calls of two ranks.
use crate::collective_kind::CollectiveKind;
use diagnostic::Diagnostic;

/// Error in one call of a collective: an argument contradicts the other arguments or does not fit
/// the group.
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
    /// The caller passes more bytes to [`Comm::all_gather_bytes`](crate::Comm::all_gather_bytes)
    /// than [`crate::MAX_GATHER_BYTES`].
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

/// Error: the calls that two ranks made in one collective differ, for example in the kind of the
/// collective or in the number of elements.
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
    /// A rank passes more bytes to [`Comm::all_gather_bytes`](crate::Comm::all_gather_bytes) than
    /// [`crate::MAX_GATHER_BYTES`].
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
    /// A rank passes bytes to a collective of u64 numbers, and the number of bytes is not a
    /// multiple of 8.
    #[error("rank {rank} gives {bytes} bytes to all_gather_u64, which takes multiples of 8 bytes")]
    IncompleteNumber {
        /// The rank that passes the bytes.
        rank: usize,
        /// Number of bytes that the rank passes.
        bytes: usize,
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

/// One rank's call of a collective in an error message: which collective, how many calls came
/// before, and the number of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSummary {
    /// The collective that was called, or `None` if the peer sent a number that stands for no
    /// collective.
    pub collective: Option<CollectiveKind>,
    /// Call number: how many collectives the rank had called before.
    pub call_number: u64,
    /// Number of elements, which must be equal on all ranks. 0 for collectives in which ranks may
    /// pass different numbers of elements.
    pub elements: u64,
}

impl std::fmt::Display for CallSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.collective.map_or("an unknown collective", CollectiveKind::name);
        write!(f, "{name} (call {}, {} elements)", self.call_number, self.elements)
    }
}

/// Unit of the amounts in an error about two ranks that disagree about the size of a transfer:
/// elements or bytes.
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

impl CallMismatch {
    /// Adds the ranks, calls and amounts of data of this mismatch as fields to the user error
    /// `diagnostic`, and returns the result.
    pub(crate) fn add_fields(&self, diagnostic: Diagnostic) -> Diagnostic {
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
            CallMismatch::TooManyBytes { rank, .. }
            | CallMismatch::TooManyPartials { rank, .. }
            | CallMismatch::IncompleteNumber { rank, .. } => diagnostic.with_field("rank", *rank),
            CallMismatch::MessageNumber { rank, peer, .. } => {
                diagnostic.with_field("rank", *rank).with_field("peer", *peer)
            }
        }
    }
}
