//! Encodes and decodes frames, the messages between a controller and an agent: a little-endian u32
//! length, then a MessagePack body.
//!
//! Both sides write frames with [`encode_frame`]. A reader first takes [`HEADER_BYTES`] bytes, and
//! passes them to [`decode_body_length`]. It then reads a body of that length, and passes the body
//! to [`decode_body`]. A reader allocates no memory for bytes that have not arrived.
use crate::{
    control::MAX_FRAME_BYTES,
    message_pack::{DecodeError, decode_prefix},
};
use diagnostic::{Code, Diagnostic, codes};
use serde::{Serialize, de::DeserializeOwned};
use std::io;

/// The size in bytes of the header of a frame (a message between a controller and an agent). The
/// header is the length of the body.
pub const HEADER_BYTES: usize = 4;

/// An error in the messages (frames) between a controller and an agent, after which their
/// connection cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Reading from or writing to the stream failed.
    #[error("the control connection failed")]
    Io(#[source] io::Error),
    /// The body is longer than [`MAX_FRAME_BYTES`].
    #[error("a control message has {bytes} bytes; the limit is {MAX_FRAME_BYTES}")]
    TooLong {
        /// The length of the body in bytes, as the header announces it or as the message to send
        /// requires it.
        bytes: u64,
    },
    /// The stream ended in the middle of a frame.
    #[error("the control connection ended in the middle of a message")]
    Truncated,
    /// The message cannot be written as MessagePack.
    #[error("a control message could not be encoded")]
    Encode(#[source] rmp_serde::encode::Error),
    /// The body cannot be decoded as a message of the expected type.
    #[error("a control message could not be decoded")]
    Decode(#[source] DecodeError),
    /// The body holds more than one message.
    #[error("{bytes} bytes follow a control message in its frame")]
    TrailingBytes {
        /// The number of bytes after the message.
        bytes: usize,
    },
}

impl FrameError {
    /// Returns the diagnostic code of this error.
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
                diagnostic.with_field("bytes", *bytes).with_field("limit_bytes", MAX_FRAME_BYTES)
            }
            FrameError::TrailingBytes { bytes } => diagnostic.with_field("bytes", *bytes),
            FrameError::Truncated => diagnostic,
        }
    }
}

/// Encodes `message` as a frame: a header with the length, and a MessagePack body. Fails if the
/// body is longer than [`MAX_FRAME_BYTES`].
pub fn encode_frame<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let body = rmp_serde::to_vec_named(message).map_err(FrameError::Encode)?;
    let length = u32::try_from(body.len()).ok().filter(|n| *n <= MAX_FRAME_BYTES);
    let Some(length) = length else { return Err(FrameError::TooLong { bytes: body.len() as u64 }) };
    let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// Decodes the header of a frame, which contains the length of the body in bytes. Fails if the
/// length is above [`MAX_FRAME_BYTES`].
pub fn decode_body_length(header: [u8; HEADER_BYTES]) -> Result<u32, FrameError> {
    match u32::from_le_bytes(header) {
        n if n > MAX_FRAME_BYTES => Err(FrameError::TooLong { bytes: u64::from(n) }),
        n => Ok(n),
    }
}

/// Decodes the MessagePack body of a frame as a message of type `T`. Fails if the body is not
/// exactly one such message.
pub fn decode_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    let (message, rest) = decode_prefix::<T>(body).map_err(FrameError::Decode)?;
    match rest.len() {
        0 => Ok(message),
        bytes => Err(FrameError::TrailingBytes { bytes }),
    }
}
