//! Starts agents on hosts: as a child process, over SSH, or in a Slurm step.
//!
//! Every transport returns an [`AgentProcess`]: byte streams for the control connection, and a
//! handle of the agent's process.
pub(crate) mod detached;
mod local;
mod slurm;
pub(crate) mod ssh;

pub(crate) use local::LocalTransport;
pub(crate) use slurm::{SlurmTransport, requeue_job, submit_job};

use contract::{control::ExitStatus, hosts::HostAddress};
use diagnostic::Diagnostic;
use std::fmt;
use tokio::io::{AsyncRead, AsyncWrite};

/// Bytes to an agent.
pub(crate) type AgentInput = Box<dyn AsyncWrite + Send + Unpin>;
/// Bytes from an agent.
pub(crate) type AgentOutput = Box<dyn AsyncRead + Send + Unpin>;

/// A way to start agents on hosts.
pub(crate) trait Transport {
    /// Starts one agent on each of these hosts, given by their names in the job.
    ///
    /// Returns at once, with one result for each host in the same order. An agent runs when its
    /// hello arrives; [`RemoteConnection::failure`] explains why it does not.
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>>;

    /// Adds hosts, or changes how hosts are reached, after the list of hosts has changed.
    fn update_hosts(&mut self, _hosts: &[HostAddress]) {}

    /// Child processes of the controller that hold agents on other hosts, such as `srun`.
    ///
    /// They end by themselves after their agents, so the controller does not kill them when it
    /// cleans up after an agent.
    fn helper_pids(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Called when a child process that is not an agent has ended and was reaped.
    fn on_child_exit(&mut self, _pid: u32, _status: ExitStatus) {}
}

/// An agent that is being started or runs.
pub(crate) struct AgentProcess {
    pub(crate) handle: AgentHandle,
    /// The control stream to the agent. When it is closed, the agent ends its workers and exits.
    pub(crate) input: AgentInput,
    /// The control stream from the agent. Ends when the agent or the connection to it ends.
    pub(crate) output: AgentOutput,
    /// The agent's standard error: panics and warnings of libraries.
    pub(crate) stderr: AgentOutput,
}

/// The process of an agent, or the connection to it.
pub(crate) enum AgentHandle {
    /// The pid of a child process. The controller reaps it and the orphans that it leaves.
    Child(u32),
    /// The agent runs on another host.
    Connection(Box<dyn RemoteConnection>),
}

/// The connection to an agent on another host.
pub(crate) trait RemoteConnection: Send + fmt::Debug {
    /// Closes the connection at once. Its streams end on both sides, and the agent ends its
    /// workers.
    fn abort(&self);

    /// After the streams have ended: why, if this side knows the reason. The message names the
    /// host.
    fn failure(&self) -> Option<Diagnostic>;

    /// After the streams have ended: the exit status of the agent, if the transport reports it.
    fn exit_status(&self) -> Option<ExitStatus>;
}
