//! Getting agents running on hosts. What comes back is the same for every way: two byte streams that carry the control
//! messages, and something that holds the agent's process: a child of ours, or a connection.
pub(crate) mod detached;
mod local;
mod slurm;
pub(crate) mod ssh;

pub(crate) use local::Local;
pub(crate) use slurm::{Slurm, requeue, submit};

use contract::{control::ExitStatus, hosts::Host};
use std::{fmt, io};
use tokio::io::{AsyncRead, AsyncWrite};

/// Bytes to an agent.
pub(crate) type Input = Box<dyn AsyncWrite + Send + Unpin>;
/// Bytes from an agent.
pub(crate) type Output = Box<dyn AsyncRead + Send + Unpin>;

/// A way to get agents running.
pub(crate) trait Transport {
    /// Starts one agent on each of these hosts (by name, as the job has them) and returns at once, in their order.
    /// Whether an agent answers is for its hello to say; why it doesn't, for [`Carrier::Connection`].
    fn start(&mut self, hosts: &[String]) -> Vec<io::Result<AgentProcess>>;

    /// How hosts are reached that the job didn't have when it began, or has in another way now.
    fn learn(&mut self, _hosts: &[Host]) {}

    /// Children of this process that hold agents elsewhere: they end by themselves when their agents have, and aren't
    /// to be ended with what a dead agent leaves behind.
    fn helpers(&self) -> Vec<u32> {
        Vec::new()
    }

    /// A child of this process that is no agent has ended and was reaped.
    fn child_ended(&mut self, _pid: u32, _status: ExitStatus) {}
}

/// An agent that is being started, or runs.
pub(crate) struct AgentProcess {
    pub(crate) carrier: Carrier,
    /// To the agent. Closing it tells the agent to end everything.
    pub(crate) input: Input,
    /// From the agent. Its end is the end of the agent, or of the connection to it.
    pub(crate) output: Output,
    /// What it says outside the control stream: panics, warnings of libraries.
    pub(crate) talk: Output,
}

/// What holds an agent's process.
pub(crate) enum Carrier {
    /// It is a child of this process, which reaps it and whatever is reparented when it dies.
    Child(u32),
    /// It is somewhere else.
    Connection(Box<dyn Connection>),
}

/// A connection to an agent on another host.
pub(crate) trait Connection: Send + fmt::Debug {
    /// Breaks it at once: the streams end, and the agent, which sees the same, ends its workers.
    fn break_off(&self);
    /// After the streams have ended: why, in one line with what to do about it, as far as this side knows.
    fn why(&self) -> Option<Refusal>;
    /// After the streams have ended: how the agent's process ended, where that was said.
    fn status(&self) -> Option<ExitStatus>;
}

/// Why a host can't be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// What was tried and how it failed, naming the host.
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
}
