//! [`StoreClientError`]: the reasons for which the rendezvous store closes the connection of a
//! client.
use super::limits::{MAX_MESSAGE_BYTES, MAX_STORE_BYTES, MAX_VALUE_BYTES};

/// A reason for which the rendezvous store closes the connection of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StoreClientError {
    #[error("unknown operation {0}; the client does not speak torch's TCPStore protocol")]
    UnknownOperation(u8),
    #[error("unknown start of connection {0:#x}; the client does not speak torch's TCPStore protocol")]
    WrongMagic(u32),
    #[error(
        "no handshake before the first request, as of torch before 2.4 \
         (`cluster.store: rank0` lets rank 0 serve the store)"
    )]
    NotValidated,
    #[error("the client did not send the handshake of torch's TCPStore protocol in time")]
    HandshakeTimeout,
    #[error("{field} of {length} is above the limit of {limit}")]
    LengthAboveLimit { field: RequestLengthField, length: u64, limit: u64 },
    #[error("a request is longer than {MAX_MESSAGE_BYTES} bytes")]
    RequestTooLong,
    #[error("requested {0} bytes at once; the limit is {MAX_MESSAGE_BYTES}")]
    ReplyTooLong(usize),
    #[error("a value would be longer than {MAX_VALUE_BYTES} bytes")]
    ValueTooLong,
    #[error("added to a value that is not a number, or beyond 64 bits")]
    InvalidSum,
    #[error("waits for two things at once")]
    SecondWait,
    #[error("the store is full: it holds at most {MAX_STORE_BYTES} bytes")]
    StoreFull,
    #[error("unfinished requests and unread replies fill the memory of the store")]
    BuffersFull,
}

/// Which length in a request to the rendezvous store exceeded its limit, such as the length of a
/// key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestLengthField {
    Key,
    Value,
    KeyCount,
}

impl std::fmt::Display for RequestLengthField {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            RequestLengthField::Key => "a key length",
            RequestLengthField::Value => "a value length",
            RequestLengthField::KeyCount => "a number of keys",
        })
    }
}
