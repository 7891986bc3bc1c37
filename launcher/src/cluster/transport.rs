//! [`Transport`]: starts agents on the hosts of a job, for example over SSH.
//!
//! For each agent, a transport returns an [`AgentProcess`]: the byte streams of the control
//! connection, and a handle of the agent's process.
use crate::leases::{HELLO_TIMEOUT, LOST_HOST_QUARANTINE};
use diagnostic::Diagnostic;
use jobspec::hosts::HostAddress;
use protocol::control::ExitStatus;
use std::{fmt, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
};

/// The stream on which the controller writes to an agent.
pub(crate) type AgentInput = Box<dyn AsyncWrite + Send + Unpin>;
/// A stream from an agent to the controller, which carries either the agent's control messages or
/// its standard error.
pub(crate) type AgentOutput = Box<dyn AsyncRead + Send + Unpin>;

/// The number of file descriptors that the controller needs for its connection with one agent.
/// These are the SSH connection, and both ends of the control stream and of the stream for stderr,
/// with one in reserve.
pub(crate) const DESCRIPTORS_PER_CONNECTION: u64 = 6;

/// The way in which the agents of a job are started on its hosts, such as over SSH or with `srun`.
pub(crate) trait Transport {
    /// Begins to start one agent on each of the named hosts of the job, and returns immediately,
    /// before the agents run.
    ///
    /// Returns one result for each host, in the order of `hosts`, and does not wait until the
    /// agents run. Only the hello of an agent proves that it runs. If an agent on another host ends
    /// without a hello, [`RemoteAgentConnection::failure`] returns the reason.
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>>;

    /// Returns the time limits for an agent's first message and for avoiding a lost host, and the
    /// number of retries after a host is lost.
    fn arrival_limits(&self) -> ArrivalLimits {
        ArrivalLimits::default()
    }

    /// Informs the transport that the job's host list has changed during the run, and passes the
    /// addresses of all hosts in the new list. `_hosts` holds all hosts of the new list. Hosts that
    /// are not in the list keep their addresses. A transport that finds hosts without addresses
    /// ignores the call.
    fn update_hosts(&mut self, _hosts: &[HostAddress]) {}

    /// Informs the transport, when this controller takes over a run of a lost controller, of the
    /// names of the hosts in that run. The environment of this process may describe only some of
    /// them. A transport that finds hosts by the job ignores the call.
    fn add_adopted_hosts(&mut self, _names: &[String]) {}

    /// Returns how many file descriptors the controller needs for its connections with the agents
    /// of `hosts` other hosts.
    fn count_descriptors(&self, hosts: usize) -> u64 {
        DESCRIPTORS_PER_CONNECTION * hosts as u64
    }

    /// Returns the pids of the running child processes through which the transport has started
    /// agents on other hosts, such as `srun`. Agents themselves are not included.
    ///
    /// These processes end by themselves after their agents, so the controller does not kill them
    /// when it cleans up after an agent.
    fn child_processes(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Returns the pids of the child processes, such as `ssh`, whose process group the controller
    /// must kill after the child has ended. `srun` is not among them, because its second process
    /// ends the tasks of a killed `srun`.
    fn children_with_killed_groups(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Informs the transport that its child process `_pid`, such as `srun` or `ssh`, has ended with
    /// the status `_status`. The caller has reaped the process.
    fn record_child_exit(&mut self, _pid: u32, _status: ExitStatus) {}
}

/// The limits for agents that are slow or lost: the time until the first message, the time for
/// which a lost host is avoided, and the number of retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ArrivalLimits {
    /// The time limit from the request for an agent to its hello, which is its first message.
    pub(crate) hello_timeout: Duration,
    /// The time for which a host is not used again after it was lost.
    pub(crate) quarantine: Duration,
    /// The largest number of times that an agent is awaited again after its host was lost before an
    /// attempt began.
    pub(crate) max_returns: u32,
    /// Whether lost hosts are reached again while the job runs, so that they become spare hosts.
    pub(crate) reconnects_while_running: bool,
}

impl Default for ArrivalLimits {
    /// Returns the limits for agents that launch starts itself, for example over SSH, rather than
    /// agents that the user starts on each node.
    fn default() -> ArrivalLimits {
        ArrivalLimits {
            hello_timeout: HELLO_TIMEOUT,
            quarantine: LOST_HOST_QUARANTINE,
            max_returns: 0,
            reconnects_while_running: false,
        }
    }
}

/// An agent that is being started or runs: the streams to and from the agent, its standard error,
/// and a handle to end it.
pub(crate) struct AgentProcess {
    pub(crate) handle: AgentHandle,
    /// The control stream to the agent. When the stream is closed, the agent ends its workers and
    /// exits.
    pub(crate) input: AgentInput,
    /// The control stream from the agent. It ends when the agent or the connection to it ends.
    pub(crate) output: AgentOutput,
    /// The agent's standard error, which carries panics and warnings of libraries.
    pub(crate) stderr: AgentOutput,
    /// Delivers the steps of the start that change the time limit of the agent's first message.
    /// `None` if the limit counts from the call that started the agent.
    pub(crate) start_steps: Option<mpsc::Receiver<AgentStartStep>>,
}

/// A progress report during the start of an agent, such as "executable copied", after which the
/// controller adjusts its time limit for the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AgentStartStep {
    /// The start waits for its turn, because too many other agents are being started. The wait has
    /// no time limit.
    Waiting,
    /// The agent is no longer waiting for its turn, or the executable was copied to its host. The
    /// usual time limit counts from now.
    Started,
    /// The executable is copied to the host. The first message is due within this time from now.
    Copying(Duration),
}

/// The means by which the controller kills or releases a started agent: the pid of a local process,
/// or the connection to another host.
pub(crate) enum AgentHandle {
    /// The pid of a child process. The controller reaps it and the orphans that it leaves.
    Child(u32),
    /// The connection to an agent on another host.
    Connection(Box<dyn RemoteAgentConnection>),
}

/// The controller's handle of a connection to an agent on another host, which can close the
/// connection and report its state.
pub(crate) trait RemoteAgentConnection: Send + fmt::Debug {
    /// Closes the connection to the agent immediately, so that the streams end on both sides and
    /// the agent ends its workers.
    fn abort(&self);

    /// Returns the error that ended the connection to the agent, or `None` if no error is known.
    /// The error message names the host. The caller must wait until the agent's streams have ended;
    /// an earlier result is not final.
    fn failure(&self) -> Option<Diagnostic>;

    /// Returns the exit status of the agent's process, or `None` if the transport does not know the
    /// status. The caller must wait until the agent's streams have ended; an earlier result is not
    /// final.
    fn exit_status(&self) -> Option<ExitStatus>;

    /// Returns the stage of the connection to the agent's host, such as authentication, that was
    /// reached last or has failed.
    fn stage(&self) -> ConnectionStage {
        ConnectionStage::Agent
    }

    /// Returns what the login shell of the host printed before the agent answered, such as messages
    /// of startup files.
    fn shell_output(&self) -> String {
        String::new()
    }

    /// Describes the external SSH client (OpenSSH) that carries the connection, and why that client
    /// was chosen. Returns `None` without such a program.
    fn external_client_description(&self) -> Option<String> {
        None
    }

    /// Returns which agents forward the messages between the controller and this agent, if the job
    /// uses a tree of agents. Returns `None` if there is no tree.
    fn tree_route(&self) -> Option<TreeRoute> {
        None
    }
}

/// The two ends of the path that an agent's messages take through other agents: the agent, and the
/// agent that is connected to the controller directly. Agents are identified by the numbers of
/// their streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TreeRoute {
    /// The agent at the end of the connection.
    pub(crate) agent: u64,
    /// The first agent on the way, which is connected with the controller: the same one if it is at
    /// the end, and 0 before there was a way.
    pub(crate) first: u64,
}

/// The stages of connecting to a host and starting its agent, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ConnectionStage {
    /// Evaluation of the job and of the configuration of the connection.
    #[default]
    Config,
    /// Resolution of the host's name.
    Name,
    /// Opening of the TCP connection to the host.
    Tcp,
    /// Handshake and check of the host's key.
    HostKey,
    /// Login of the user.
    Authentication,
    /// Start of a shell and of the executable on the host.
    Exec,
    /// The agent runs.
    Agent,
}
