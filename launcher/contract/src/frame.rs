//! Frames of control connections: a little-endian u32 length, then a MessagePack body.
//!
//! Both sides write frames with [`encode`]. A reader takes [`HEADER`] bytes, passes them to
//! [`body_length`], reads the body and passes it to [`decode`]. A reader allocates no memory for
//! bytes that have not arrived.
use crate::control::MAX_FRAME;
use diagnostic::{Code, Diagnostic, codes};
use serde::{Serialize, de::DeserializeOwned};
use std::io;

/// Bytes of the length in front of each body.
pub const HEADER: usize = 4;

/// Why a control connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Reading from or writing to the stream failed.
    #[error("the control connection failed")]
    Io(#[source] io::Error),
    /// The body is longer than [`MAX_FRAME`].
    #[error("a control message has {bytes} bytes; the limit is {MAX_FRAME}")]
    TooLong {
        /// The length that was announced or that is needed, in bytes.
        bytes: u64,
    },
    /// The stream ended inside a frame.
    #[error("the control connection ended in the middle of a message")]
    Truncated,
    /// The message cannot be written as MessagePack.
    #[error("a control message could not be encoded")]
    Encode(#[source] rmp_serde::encode::Error),
    /// The body is not a message of this connection.
    #[error("a control message could not be decoded")]
    Decode(#[source] rmp_serde::decode::Error),
    /// The body holds more than one message.
    #[error("{bytes} bytes follow a control message in its frame")]
    TrailingBytes {
        /// The bytes after the message.
        bytes: usize,
    },
}

impl FrameError {
    /// The diagnostic code of this error.
    pub fn code(&self) -> Code {
        match self {
            FrameError::Io(_) | FrameError::Truncated => codes::host::CONTROL_CONNECTION_LOST,
            FrameError::TooLong { .. } => codes::host::CONTROL_MESSAGE_TOO_LONG,
            FrameError::Encode(_) | FrameError::Decode(_) | FrameError::TrailingBytes { .. } => {
                codes::host::CONTROL_MESSAGE_INVALID
            }
        }
    }
}

impl From<FrameError> for Diagnostic {
    fn from(error: FrameError) -> Self {
        let diagnostic = Diagnostic::error(error.code(), error.to_string());
        match &error {
            FrameError::Io(source) => diagnostic.with_cause(source),
            FrameError::Encode(source) => diagnostic.with_cause(source),
            FrameError::Decode(source) => diagnostic.with_cause(source),
            FrameError::TooLong { bytes } => {
                diagnostic.with_field("bytes", *bytes).with_field("limit_bytes", MAX_FRAME)
            }
            FrameError::TrailingBytes { bytes } => diagnostic.with_field("bytes", *bytes),
            FrameError::Truncated => diagnostic,
        }
    }
}

/// Encodes `message` as a whole frame: header and body.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let body = rmp_serde::to_vec_named(message).map_err(FrameError::Encode)?;
    let length = u32::try_from(body.len()).ok().filter(|n| *n <= MAX_FRAME);
    let Some(length) = length else { return Err(FrameError::TooLong { bytes: body.len() as u64 }) };
    let mut frame = Vec::with_capacity(HEADER + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// Returns the length of the body that a header announces, at most [`MAX_FRAME`].
pub fn body_length(header: [u8; HEADER]) -> Result<u32, FrameError> {
    match u32::from_le_bytes(header) {
        n if n > MAX_FRAME => Err(FrameError::TooLong { bytes: u64::from(n) }),
        n => Ok(n),
    }
}

/// Decodes the body of a frame, which must hold exactly one message.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    let mut rest = body;
    let message = rmp_serde::from_read::<_, T>(&mut rest).map_err(FrameError::Decode)?;
    match rest.len() {
        0 => Ok(message),
        bytes => Err(FrameError::TrailingBytes { bytes }),
    }
}
