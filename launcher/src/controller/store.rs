//! The rendezvous store: a server for torch's `TCPStore` protocol (libuv backend, torch 2.4 and
//! later).
//!
//! The controller or an agent serves it, so that no rank has to bind a port that others were
//! already given. `wire` parses and encodes bytes, `core` holds the state, `server` does I/O on its
//! own thread.
mod core;
mod error;
mod server;
pub(crate) mod untrusted;
mod wire;

pub(crate) use error::ClientError;
pub(crate) use server::StoreServer;
