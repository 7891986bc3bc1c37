//! Getting an agent running on a host. What comes back is the same for every way: a process of ours that carries the
//! control stream (the agent itself, later an ssh client), and its byte streams.
mod local;

pub(crate) use local::Local;

use std::io;
use tokio::net::unix::pipe;

/// A way to get an agent running on one host.
pub(crate) trait Transport {
    /// Starts an agent there. Returns as soon as its process exists; whether an agent answers is for its hello to say.
    fn start(&self) -> io::Result<AgentProcess>;
}

/// The process that carries an agent's control stream. Whoever reaps this process' children learns of its end.
#[derive(Debug)]
pub(crate) struct AgentProcess {
    pub(crate) pid: u32,
    /// To the agent.
    pub(crate) input: pipe::Sender,
    /// From the agent.
    pub(crate) output: pipe::Receiver,
    /// What it says outside the control stream: panics, warnings of libraries.
    pub(crate) talk: pipe::Receiver,
}
