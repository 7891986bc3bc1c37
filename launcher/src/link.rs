//! Control connections: framed messages over any byte stream, one reader task and one writer task for each.
//!
//! A frame is a little-endian u32 length and a MessagePack body; `contract::control` says what is in it. Whatever the
//! other side sends, reading allocates at most the cap and never panics.
mod clock;
mod frame;
pub(crate) mod join;
mod tasks;

pub(crate) use clock::Clock;
pub(crate) use frame::{LinkError, encode};
pub(crate) use tasks::{Outbox, Priority, read_into, write_from};
