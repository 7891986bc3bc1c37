//! The wire format of torch's `TCPStore`: parses bytes as [`StoreRequest`] and encodes
//! [`StoreReply`].
//!
//! Integers are little-endian (torch uses the host's byte order). A key or value is a u64 length
//! and its bytes. Requests have no outer frame, so the parser compares each length with a limit
//! before the connection waits for that many bytes.
use super::{
    error::{RequestLengthField, StoreClientError},
    limits::{MAX_KEY_BYTES, MAX_KEYS_PER_REQUEST, MAX_MESSAGE_BYTES, MAX_VALUE_BYTES},
};

/// The number that a client of torch 2.4 or later sends in its first request, the handshake.
const HANDSHAKE_MAGIC: u32 = 0x3C85_F7CE;

/// A key of the rendezvous store: any sequence of bytes.
pub(super) type StoreKey = Vec<u8>;
/// A value in the rendezvous store: any sequence of bytes.
pub(super) type StoreValue = Vec<u8>;

/// A request of a client of the rendezvous store, such as SET, GET or WAIT of torch's `TCPStore`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StoreRequest {
    /// The handshake, which must be the first request.
    Validate,
    Set(StoreKey, StoreValue),
    /// Sets the key to the second value if the present value of the key equals the first value.
    CompareSet(StoreKey, StoreValue, StoreValue),
    Get(StoreKey),
    /// Adds the number to the value of the key.
    Add(StoreKey, i64),
    /// Asks whether all of these keys exist, without waiting for them.
    Check(Vec<StoreKey>),
    /// Waits until all of these keys exist.
    Wait(Vec<StoreKey>),
    CountKeys,
    Delete(StoreKey),
    Append(StoreKey, StoreValue),
    GetMany(Vec<StoreKey>),
    SetMany(Vec<(StoreKey, StoreValue)>),
    CancelWait,
    Ping(u32),
    /// Appends an item to the queue of this key.
    Push(StoreKey, StoreValue),
    /// Removes the first item from the queue of this key.
    Pop(StoreKey),
    QueueLength(StoreKey),
    ListKeys,
    /// Waits at the barrier that the key names until the given number of clients has arrived.
    Barrier(StoreKey, i64),
}

/// A reply of the rendezvous store to a client, such as a value or a list of keys.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StoreReply {
    Byte(u8),
    Nonce(u32),
    Number(i64),
    Value(StoreValue),
    Values(Vec<StoreValue>),
    /// The length of the queue before the pop, and the item.
    Popped(i64, StoreValue),
    Keys(Vec<StoreKey>),
}

/// The result of parsing the first request in the input of a connection to the rendezvous store: a
/// request, too few bytes, or an error.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RequestParseOutcome {
    /// A complete request, and the number of its bytes.
    Complete(StoreRequest, usize),
    /// Part of a request. The request has at least this many bytes, including the present ones.
    Incomplete(usize),
    /// Bytes that are not a valid request.
    Malformed(StoreClientError),
}

/// Parses the request at the start of `bytes`, the data that one client of the rendezvous store has
/// sent. Bytes after the request are ignored.
pub(super) fn parse_request(bytes: &[u8]) -> RequestParseOutcome {
    // A long request that arrives in pieces is parsed often. So nothing is copied before the
    // request is complete.
    let checked = RequestParser { bytes, offset: 0, copies: false }.parse_request();
    let mut parser = RequestParser { bytes, offset: 0, copies: true };
    match checked.and_then(|_| parser.parse_request()) {
        Ok(request) => RequestParseOutcome::Complete(request, parser.offset),
        Err(RequestParseStop::Incomplete(needed)) if needed > MAX_MESSAGE_BYTES => {
            RequestParseOutcome::Malformed(StoreClientError::RequestTooLong)
        }
        Err(RequestParseStop::Incomplete(needed)) => RequestParseOutcome::Incomplete(needed),
        Err(RequestParseStop::Malformed(error)) => RequestParseOutcome::Malformed(error),
    }
}

/// Why the parser of a request to the rendezvous store stopped early: the request's end has not
/// arrived yet, or the request is invalid.
enum RequestParseStop {
    /// The request continues after the present bytes. It has at least this many bytes, including
    /// the present ones.
    Incomplete(usize),
    Malformed(StoreClientError),
}

/// A parser of one request to the rendezvous store, with its position in the bytes.
struct RequestParser<'b> {
    bytes: &'b [u8],
    offset: usize,
    /// Whether keys, values and lists are copied into the parsed request. Otherwise they stay empty
    /// there.
    copies: bool,
}

impl RequestParser<'_> {
    /// Parses one request to the rendezvous store, whose first byte names the operation.
    fn parse_request(&mut self) -> Result<StoreRequest, RequestParseStop> {
        Ok(match self.read_array::<1>()?[0] {
            0 => self.read_handshake_magic()?,
            1 => StoreRequest::Set(self.read_key()?, self.read_value()?),
            2 => StoreRequest::CompareSet(self.read_key()?, self.read_value()?, self.read_value()?),
            3 => StoreRequest::Get(self.read_key()?),
            4 => StoreRequest::Add(self.read_key()?, self.read_number()?),
            5 => StoreRequest::Check(self.read_keys()?),
            6 => StoreRequest::Wait(self.read_keys()?),
            7 => StoreRequest::CountKeys,
            8 => StoreRequest::Delete(self.read_key()?),
            9 => StoreRequest::Append(self.read_key()?, self.read_value()?),
            10 => StoreRequest::GetMany(self.read_keys()?),
            11 => StoreRequest::SetMany(
                self.read_list(16, |parser| Ok((parser.read_key()?, parser.read_value()?)))?,
            ),
            12 => StoreRequest::CancelWait,
            13 => StoreRequest::Ping(u32::from_le_bytes(self.read_array()?)),
            14 => StoreRequest::Push(self.read_key()?, self.read_value()?),
            15 => StoreRequest::Pop(self.read_key()?),
            16 => StoreRequest::QueueLength(self.read_key()?),
            17 => StoreRequest::ListKeys,
            18 => StoreRequest::Barrier(self.read_key()?, self.read_number()?),
            other => return Err(RequestParseStop::Malformed(StoreClientError::UnknownOperation(other))),
        })
    }

    /// Parses the handshake of a store client, which has to contain [`HANDSHAKE_MAGIC`].
    fn read_handshake_magic(&mut self) -> Result<StoreRequest, RequestParseStop> {
        match u32::from_le_bytes(self.read_array()?) {
            HANDSHAKE_MAGIC => Ok(StoreRequest::Validate),
            other => Err(RequestParseStop::Malformed(StoreClientError::WrongMagic(other))),
        }
    }

    /// Consumes the next `length` bytes of a request to the store and returns them. Fails with
    /// [`RequestParseStop::Incomplete`] if fewer bytes are left.
    fn take_bytes(&mut self, length: usize) -> Result<&[u8], RequestParseStop> {
        let end = self.offset.saturating_add(length);
        let taken = self.bytes.get(self.offset..end).ok_or(RequestParseStop::Incomplete(end))?;
        self.offset = end;
        Ok(taken)
    }

    /// Consumes the next `N` bytes of a request to the store and returns them as an array.
    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], RequestParseStop> {
        let mut array = [0; N];
        array.copy_from_slice(self.take_bytes(N)?);
        Ok(array)
    }

    /// Parses a signed 64-bit integer of a request to the store.
    fn read_number(&mut self) -> Result<i64, RequestParseStop> {
        Ok(i64::from_le_bytes(self.read_array()?))
    }

    /// Parses a length, an unsigned 64-bit integer of at most `limit`, in a request to the
    /// rendezvous store. Fails if the length is above `limit`. `field` names the length in the
    /// error.
    fn read_length(&mut self, field: RequestLengthField, limit: u64) -> Result<usize, RequestParseStop> {
        let length = u64::from_le_bytes(self.read_array()?);
        if length > limit {
            return Err(RequestParseStop::Malformed(StoreClientError::LengthAboveLimit {
                field,
                length,
                limit,
            }));
        }
        Ok(length as usize)
    }

    /// Parses a key of the store: its length, then its bytes. Fails if the key is longer than
    /// [`MAX_KEY_BYTES`].
    fn read_key(&mut self) -> Result<StoreKey, RequestParseStop> {
        let length = self.read_length(RequestLengthField::Key, MAX_KEY_BYTES)?;
        self.read_bytes(length)
    }

    /// Parses a value of the store: its length, then its bytes. Fails if the value is longer than
    /// [`MAX_VALUE_BYTES`].
    fn read_value(&mut self) -> Result<StoreValue, RequestParseStop> {
        let length = self.read_length(RequestLengthField::Value, MAX_VALUE_BYTES)?;
        self.read_bytes(length)
    }

    /// Consumes the next `length` bytes of a request to the store. Returns a copy of them if
    /// `copies` is set, and an empty vector if not, to measure a request without storing it.
    fn read_bytes(&mut self, length: usize) -> Result<Vec<u8>, RequestParseStop> {
        let copies = self.copies;
        let bytes = self.take_bytes(length)?;
        Ok(if copies { bytes.to_vec() } else { Vec::new() })
    }

    /// Parses a list of keys in a request to the rendezvous store: the number of keys, and then
    /// each key. Fails if the list has more than [`MAX_KEYS_PER_REQUEST`] keys.
    fn read_keys(&mut self) -> Result<Vec<StoreKey>, RequestParseStop> {
        self.read_list(8, Self::read_key)
    }

    /// Parses a list, such as a list of keys, in a request to the store: first its length, then
    /// each item by calling `item`. An item must be at least `min_bytes` bytes long. Fails if the
    /// list has more than [`MAX_KEYS_PER_REQUEST`] items. Returns an empty list if `copies` is not
    /// set.
    fn read_list<T>(
        &mut self,
        min_bytes: usize,
        item: impl Fn(&mut Self) -> Result<T, RequestParseStop>,
    ) -> Result<Vec<T>, RequestParseStop> {
        let count = self.read_length(RequestLengthField::KeyCount, MAX_KEYS_PER_REQUEST)?;
        let mut items = Vec::new();
        for left in (1..=count).rev() {
            // Nothing is parsed or allocated before the rest of the list can be complete.
            let end = self.offset + left * min_bytes;
            if end > self.bytes.len() {
                return Err(RequestParseStop::Incomplete(end));
            }
            let item = item(self)?;
            if self.copies {
                items.push(item);
            }
        }
        Ok(items)
    }
}

/// Encodes a reply of the store in the format that torch's client expects, and appends the bytes to
/// `out`.
pub(super) fn encode_reply(reply: &StoreReply, out: &mut Vec<u8>) {
    let bytes = |out: &mut Vec<u8>, bytes: &[u8]| {
        out.extend((bytes.len() as u64).to_le_bytes());
        out.extend_from_slice(bytes);
    };
    match reply {
        StoreReply::Byte(byte) => out.push(*byte),
        StoreReply::Nonce(nonce) => out.extend(nonce.to_le_bytes()),
        StoreReply::Number(number) => out.extend(number.to_le_bytes()),
        StoreReply::Value(value) => bytes(out, value),
        StoreReply::Values(values) => values.iter().for_each(|value| bytes(out, value)),
        StoreReply::Popped(length, value) => {
            out.extend(length.to_le_bytes());
            bytes(out, value);
        }
        StoreReply::Keys(keys) => {
            out.extend((keys.len() as i64).to_le_bytes());
            keys.iter().for_each(|key| bytes(out, key));
        }
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
pub(super) mod tests;
