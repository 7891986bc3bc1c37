//! The rendezvous store: a server for torch's `TCPStore` protocol (libuv backend, torch 2.4 and
//! later).
//!
//! The controller or an agent runs the server, so that no rank has to bind a port that its peers
//! were already given. `wire` parses requests and encodes replies, `core` holds the state, and
//! `server` does the I/O on a separate thread. `admission` decides which clients may connect.
mod admission;
mod core;
mod error;
mod limits;
mod server;
mod socket_owner;
pub(crate) mod untrusted;
mod wire;

pub(crate) use error::StoreClientError;
pub(crate) use server::StoreServer;
pub(crate) use socket_owner::parse_answer;
