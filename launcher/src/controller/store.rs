//! The rendezvous store of a job's programs: a server that speaks the wire protocol of torch's `TCPStore` (libuv
//! backend, torch 2.4 and later), hosted by the controller so that no rank has to bind a port that others were told of.
//!
//! `wire` reads and writes bytes, `core` decides, `server` does the I/O on a thread of its own.
mod core;
pub(crate) mod hostile;
mod server;
mod wire;

pub(crate) use server::Server;
