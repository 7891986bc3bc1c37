//! Frames of every control connection: a little-endian length, then a MessagePack body.
//!
//! Both sides write with [`encode`]; a reader takes [`HEADER`] bytes, asks [`body_length`], reads the body, and gives it to
//! [`decode`]. Nothing is allocated for a length that the peer merely claims.
use crate::control::MAX_FRAME;
use serde::{Serialize, de::DeserializeOwned};
use std::{fmt, io};

/// Bytes of the length before each body.
pub const HEADER: usize = 4;

/// Why a control connection can't go on.
#[derive(Debug)]
pub enum LinkError {
    /// The stream failed.
    Io(io::Error),
    /// The announced or needed length is over [`MAX_FRAME`].
    TooLong(u64),
    /// The stream ended inside a frame.
    Truncated,
    /// The body is not a message of this connection.
    Malformed(String),
}

impl fmt::Display for LinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkError::Io(error) => write!(f, "the control connection failed: {error}"),
            LinkError::TooLong(n) => write!(
                f,
                "a control message of {n} bytes is over the limit of {MAX_FRAME} bytes (is the other side `launch`?)"
            ),
            LinkError::Truncated => write!(f, "the control connection ended in the middle of a message"),
            LinkError::Malformed(why) => write!(f, "a control message could not be read: {why}"),
        }
    }
}

impl std::error::Error for LinkError {}

/// The whole frame of `message`.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, LinkError> {
    let body = rmp_serde::to_vec_named(message).map_err(|e| LinkError::Malformed(e.to_string()))?;
    let length = u32::try_from(body.len()).ok().filter(|n| *n <= MAX_FRAME);
    let Some(length) = length else { return Err(LinkError::TooLong(body.len() as u64)) };
    let mut frame = Vec::with_capacity(HEADER + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// The length of the body that a header announces.
pub fn body_length(header: [u8; HEADER]) -> Result<u32, LinkError> {
    match u32::from_le_bytes(header) {
        n if n > MAX_FRAME => Err(LinkError::TooLong(u64::from(n))),
        n => Ok(n),
    }
}

/// The message in a frame's body; the body must hold it and nothing else.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, LinkError> {
    let mut rest = body;
    let message = rmp_serde::from_read::<_, T>(&mut rest).map_err(|e| LinkError::Malformed(e.to_string()))?;
    match rest.len() {
        0 => Ok(message),
        n => Err(LinkError::Malformed(format!("{n} bytes follow the message"))),
    }
}
