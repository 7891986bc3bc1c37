//! The wire format of torch's `TCPStore`: bytes to [`Request`] and [`Reply`] to bytes.
//!
//! Integers are little-endian (torch uses the host's byte order); a key or value is a u64 length
//! and its bytes. Requests have no outer frame, so each length is compared with a limit before its
//! bytes are awaited.
use super::error::{ClientError, LengthField};

/// Longest key, bytes.
pub(super) const MAX_KEY: u64 = 8 << 10;
/// Longest value, bytes.
pub(super) const MAX_VALUE: u64 = 8 << 20;
/// Most keys in one request.
pub(super) const MAX_KEYS: u64 = 128 << 10;
/// Longest request or reply, bytes.
pub(super) const MAX_MESSAGE: usize = 64 << 20;
/// The first number that a client sends, from torch 2.4 on.
const MAGIC: u32 = 0x3C85_F7CE;

/// A key, in the bytes that the client sent.
pub(super) type Key = Vec<u8>;
/// A value.
pub(super) type Value = Vec<u8>;

/// A request of a client.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Request {
    Validate,
    Set(Key, Value),
    /// Key, expected value, new value.
    CompareSet(Key, Value, Value),
    Get(Key),
    Add(Key, i64),
    Check(Vec<Key>),
    Wait(Vec<Key>),
    CountKeys,
    Delete(Key),
    Append(Key, Value),
    GetMany(Vec<Key>),
    SetMany(Vec<(Key, Value)>),
    CancelWait,
    Ping(u32),
    Push(Key, Value),
    Pop(Key),
    QueueLength(Key),
    ListKeys,
    /// Key, number of clients that must arrive.
    Barrier(Key, i64),
}

/// A reply to a client.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Reply {
    Byte(u8),
    Nonce(u32),
    Number(i64),
    Value(Value),
    Values(Vec<Value>),
    /// Length of the queue before the pop, and the item.
    Popped(i64, Value),
    Keys(Vec<Key>),
}

/// What the input of a connection starts with.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Parsed {
    /// A request, and the number of its bytes.
    Complete(Request, usize),
    /// Part of a request; parsing needs at least this many bytes in total.
    Incomplete(usize),
    /// Bytes that are not a valid request.
    Malformed(ClientError),
}

/// Parses the request that `bytes` starts with.
pub(super) fn parse(bytes: &[u8]) -> Parsed {
    // A long request that arrives in pieces is parsed often: nothing is copied before it is
    // complete.
    let checked = RequestParser { bytes, at: 0, copies: false }.parse_request();
    let mut parser = RequestParser { bytes, at: 0, copies: true };
    match checked.and_then(|_| parser.parse_request()) {
        Ok(request) => Parsed::Complete(request, parser.at),
        Err(ParseStop::Incomplete(needed)) if needed > MAX_MESSAGE => {
            Parsed::Malformed(ClientError::RequestTooLong)
        }
        Err(ParseStop::Incomplete(needed)) => Parsed::Incomplete(needed),
        Err(ParseStop::Malformed(error)) => Parsed::Malformed(error),
    }
}

/// Why parsing stopped before the end of a request.
enum ParseStop {
    Incomplete(usize),
    Malformed(ClientError),
}

struct RequestParser<'b> {
    bytes: &'b [u8],
    at: usize,
    /// Whether keys, values and lists are copied; otherwise they stay empty.
    copies: bool,
}

impl RequestParser<'_> {
    fn parse_request(&mut self) -> Result<Request, ParseStop> {
        Ok(match self.read_array::<1>()?[0] {
            0 => self.parse_validate()?,
            1 => Request::Set(self.read_key()?, self.read_value()?),
            2 => Request::CompareSet(self.read_key()?, self.read_value()?, self.read_value()?),
            3 => Request::Get(self.read_key()?),
            4 => Request::Add(self.read_key()?, self.read_number()?),
            5 => Request::Check(self.read_keys()?),
            6 => Request::Wait(self.read_keys()?),
            7 => Request::CountKeys,
            8 => Request::Delete(self.read_key()?),
            9 => Request::Append(self.read_key()?, self.read_value()?),
            10 => Request::GetMany(self.read_keys()?),
            11 => Request::SetMany(self.list(16, |parser| Ok((parser.read_key()?, parser.read_value()?)))?),
            12 => Request::CancelWait,
            13 => Request::Ping(u32::from_le_bytes(self.read_array()?)),
            14 => Request::Push(self.read_key()?, self.read_value()?),
            15 => Request::Pop(self.read_key()?),
            16 => Request::QueueLength(self.read_key()?),
            17 => Request::ListKeys,
            18 => Request::Barrier(self.read_key()?, self.read_number()?),
            other => return Err(ParseStop::Malformed(ClientError::UnknownOperation(other))),
        })
    }

    fn parse_validate(&mut self) -> Result<Request, ParseStop> {
        match u32::from_le_bytes(self.read_array()?) {
            MAGIC => Ok(Request::Validate),
            other => Err(ParseStop::Malformed(ClientError::WrongMagic(other))),
        }
    }

    /// Consumes the next `length` bytes.
    fn take(&mut self, length: usize) -> Result<&[u8], ParseStop> {
        let end = self.at.saturating_add(length);
        let taken = self.bytes.get(self.at..end).ok_or(ParseStop::Incomplete(end))?;
        self.at = end;
        Ok(taken)
    }

    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], ParseStop> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn read_number(&mut self) -> Result<i64, ParseStop> {
        Ok(i64::from_le_bytes(self.read_array()?))
    }

    /// Parses a length. A length above `limit` is an error.
    fn length(&mut self, field: LengthField, limit: u64) -> Result<usize, ParseStop> {
        let length = u64::from_le_bytes(self.read_array()?);
        if length > limit {
            return Err(ParseStop::Malformed(ClientError::LengthAboveLimit { field, length, limit }));
        }
        Ok(length as usize)
    }

    fn read_key(&mut self) -> Result<Key, ParseStop> {
        let length = self.length(LengthField::Key, MAX_KEY)?;
        self.bytes_of(length)
    }

    fn read_value(&mut self) -> Result<Value, ParseStop> {
        let length = self.length(LengthField::Value, MAX_VALUE)?;
        self.bytes_of(length)
    }

    /// Consumes the next `length` bytes, and returns a copy if `copies` is set.
    fn bytes_of(&mut self, length: usize) -> Result<Vec<u8>, ParseStop> {
        let copies = self.copies;
        let bytes = self.take(length)?;
        Ok(if copies { bytes.to_vec() } else { Vec::new() })
    }

    fn read_keys(&mut self) -> Result<Vec<Key>, ParseStop> {
        self.list(8, Self::read_key)
    }

    /// Parses a list: the number of its items, then the items, each at least `min_bytes` bytes
    /// long.
    fn list<T>(
        &mut self,
        min_bytes: usize,
        item: impl Fn(&mut Self) -> Result<T, ParseStop>,
    ) -> Result<Vec<T>, ParseStop> {
        let count = self.length(LengthField::KeyCount, MAX_KEYS)?;
        let mut items = Vec::new();
        for left in (1..=count).rev() {
            // Nothing is parsed or allocated before the rest of the list can be complete.
            let end = self.at + left * min_bytes;
            if end > self.bytes.len() {
                return Err(ParseStop::Incomplete(end));
            }
            let item = item(self)?;
            if self.copies {
                items.push(item);
            }
        }
        Ok(items)
    }
}

/// Appends the bytes of a reply.
pub(super) fn encode(reply: &Reply, out: &mut Vec<u8>) {
    let bytes = |out: &mut Vec<u8>, bytes: &[u8]| {
        out.extend((bytes.len() as u64).to_le_bytes());
        out.extend_from_slice(bytes);
    };
    match reply {
        Reply::Byte(byte) => out.push(*byte),
        Reply::Nonce(nonce) => out.extend(nonce.to_le_bytes()),
        Reply::Number(number) => out.extend(number.to_le_bytes()),
        Reply::Value(value) => bytes(out, value),
        Reply::Values(values) => values.iter().for_each(|value| bytes(out, value)),
        Reply::Popped(length, value) => {
            out.extend(length.to_le_bytes());
            bytes(out, value);
        }
        Reply::Keys(keys) => {
            out.extend((keys.len() as i64).to_le_bytes());
            keys.iter().for_each(|key| bytes(out, key));
        }
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
pub(super) mod tests;
