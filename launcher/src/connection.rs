//! Control connections between controller, agents and workers, which carry messages over byte
//! streams such as TCP connections and pipes.
//!
//! A connection inside SSH or through a pipe carries unencrypted frames. Any other connection
//! begins with the [`handshake`] and is encrypted.
//!
//! Each connection has one task that reads and one that writes. A frame is a little-endian u32
//! length and a MessagePack body. `protocol::control` declares the messages. Reading untrusted
//! input allocates at most `protocol::control::MAX_FRAME_BYTES` bytes and never panics.
mod encrypted_stream;
mod frame;
mod frame_tasks;
pub(crate) mod handshake;
pub(crate) mod listeners;
mod socket_options;
pub(crate) mod tree;

pub(crate) use encrypted_stream::{EncryptedReader, EncryptedStream, EncryptedWriter};
pub(crate) use frame::{FrameError, encode_frame, read_frame, read_short_frame};
pub(crate) use frame_tasks::{MessagePriority, Outbox, read_frames, write_frames};
pub(crate) use socket_options::set_control_options;
