//! Control connections: framed messages over any byte stream.
//!
//! Each connection has one task that reads and one that writes. A frame is a little-endian u32
//! length and a MessagePack body; `contract::control` declares the messages. Reading untrusted
//! input allocates at most `contract::control::MAX_FRAME` bytes and never panics.
mod clock;
mod frame;
pub(crate) mod handshake;
mod tasks;

pub(crate) use clock::RunningClock;
pub(crate) use frame::{FrameError, encode};
pub(crate) use tasks::{Outbox, Priority, read_frames, write_frames};
