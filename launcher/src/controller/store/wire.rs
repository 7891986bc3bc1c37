//! Bytes ↔ [`Request`] and [`Reply`]. Integers are little-endian (torch sends the host's order, and its hosts are);
//! a text or value is a u64 length and its bytes. Requests have no outer frame, so each length is checked against a cap
//! before its bytes are waited for.

/// Longest key, bytes.
pub(super) const MAX_KEY: u64 = 8 << 10;
/// Longest value, bytes.
pub(super) const MAX_VALUE: u64 = 8 << 20;
/// Most keys in one request.
pub(super) const MAX_KEYS: u64 = 128 << 10;
/// Longest request or reply, bytes.
pub(super) const MAX_MESSAGE: usize = 64 << 20;
/// What a client begins with: it shows that torch's newer protocol is spoken.
const MAGIC: u32 = 0x3C85_F7CE;

/// A key, as the client sent it.
pub(super) type Key = Vec<u8>;
/// A value.
pub(super) type Value = Vec<u8>;

/// What a client asks for.
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
    /// Key, number of clients that shall arrive.
    Barrier(Key, i64),
}

/// What a client is answered.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Reply {
    Byte(u8),
    Nonce(u32),
    Number(i64),
    Value(Value),
    Values(Vec<Value>),
    /// Length of the queue before, and the item.
    Popped(i64, Value),
    Keys(Vec<Key>),
}

/// What the first bytes of a connection's input are.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Parsed {
    /// A request, and the number of its bytes.
    Whole(Request, usize),
    /// At least this many bytes in all are needed to say more.
    Part(usize),
    /// Not the protocol; why.
    Malformed(String),
}

/// Reads the request that `bytes` begin with.
pub(super) fn parse(bytes: &[u8]) -> Parsed {
    // A long request that arrives piece by piece is looked at often: nothing is copied before it is whole.
    let whole = Input { bytes, at: 0, copies: false }.request();
    let mut input = Input { bytes, at: 0, copies: true };
    match whole.and_then(|_| input.request()) {
        Ok(request) => Parsed::Whole(request, input.at),
        Err(Stop::Part(need)) if need > MAX_MESSAGE => {
            Parsed::Malformed(format!("a request is longer than {MAX_MESSAGE} bytes"))
        }
        Err(Stop::Part(need)) => Parsed::Part(need),
        Err(Stop::Malformed(why)) => Parsed::Malformed(why),
    }
}

enum Stop {
    Part(usize),
    Malformed(String),
}

struct Input<'b> {
    bytes: &'b [u8],
    at: usize,
    /// Keys, values and lists are made; else they stay empty.
    copies: bool,
}

impl Input<'_> {
    fn request(&mut self) -> Result<Request, Stop> {
        Ok(match self.array::<1>()?[0] {
            0 => self.validate()?,
            1 => Request::Set(self.key()?, self.value()?),
            2 => Request::CompareSet(self.key()?, self.value()?, self.value()?),
            3 => Request::Get(self.key()?),
            4 => Request::Add(self.key()?, self.number()?),
            5 => Request::Check(self.keys()?),
            6 => Request::Wait(self.keys()?),
            7 => Request::CountKeys,
            8 => Request::Delete(self.key()?),
            9 => Request::Append(self.key()?, self.value()?),
            10 => Request::GetMany(self.keys()?),
            11 => Request::SetMany(self.list(16, |input| Ok((input.key()?, input.value()?)))?),
            12 => Request::CancelWait,
            13 => Request::Ping(u32::from_le_bytes(self.array()?)),
            14 => Request::Push(self.key()?, self.value()?),
            15 => Request::Pop(self.key()?),
            16 => Request::QueueLength(self.key()?),
            17 => Request::ListKeys,
            18 => Request::Barrier(self.key()?, self.number()?),
            other => return Err(Stop::Malformed(format!("there is no operation {other}"))),
        })
    }

    fn validate(&mut self) -> Result<Request, Stop> {
        match u32::from_le_bytes(self.array()?) {
            MAGIC => Ok(Request::Validate),
            other => Err(Stop::Malformed(format!("the connection began with {other:#x}"))),
        }
    }

    /// The next `length` bytes.
    fn take(&mut self, length: usize) -> Result<&[u8], Stop> {
        let end = self.at.saturating_add(length);
        let taken = self.bytes.get(self.at..end).ok_or(Stop::Part(end))?;
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn number(&mut self) -> Result<i64, Stop> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    /// A length, at most `most`.
    fn length(&mut self, what: &str, most: u64) -> Result<usize, Stop> {
        let length = u64::from_le_bytes(self.array()?);
        if length > most {
            return Err(Stop::Malformed(format!("{what} of {length} is more than {most}")));
        }
        Ok(length as usize)
    }

    fn key(&mut self) -> Result<Key, Stop> {
        let length = self.length("a key's length", MAX_KEY)?;
        self.text(length)
    }

    fn value(&mut self) -> Result<Value, Stop> {
        let length = self.length("a value's length", MAX_VALUE)?;
        self.text(length)
    }

    fn text(&mut self, length: usize) -> Result<Vec<u8>, Stop> {
        let copies = self.copies;
        let bytes = self.take(length)?;
        Ok(if copies { bytes.to_vec() } else { Vec::new() })
    }

    fn keys(&mut self) -> Result<Vec<Key>, Stop> {
        self.list(8, Self::key)
    }

    /// A counted list whose items have at least `least` bytes each.
    fn list<T>(&mut self, least: usize, item: impl Fn(&mut Self) -> Result<T, Stop>) -> Result<Vec<T>, Stop> {
        let count = self.length("a number of keys", MAX_KEYS)?;
        let mut items = Vec::new();
        for left in (1..=count).rev() {
            // Nothing is read, or made, before all that is left can be there.
            let end = self.at + left * least;
            if end > self.bytes.len() {
                return Err(Stop::Part(end));
            }
            let item = item(self)?;
            if self.copies {
                items.push(item);
            }
        }
        Ok(items)
    }
}

/// Appends a reply to what a client gets.
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
