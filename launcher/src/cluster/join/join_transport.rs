//! [`JoinTransport`]: starts the agent of node 0 as a child process, and waits until the agents of
//! the other nodes connect.
use super::{
    job_hashes::hash_job_settings,
    join_key::read_join_key,
    node_listener::{JoinContext, accept_nodes},
    node_name::parse_node_name,
    node_table::NodeTable,
    rendezvous_listeners::open_node_0_listeners,
};
use crate::{
    cluster::{
        local::start_local_agent,
        pending_agent::{AgentConnectionSlot, PendingAgent},
        provider::ClusterError,
        transport::{
            AgentHandle, AgentOutput, AgentProcess, ArrivalLimits, RemoteAgentConnection, Transport,
        },
    },
    leases::HELLO_TIMEOUT,
};
use diagnostic::{Diagnostic, codes::host};
use jobspec::{JobSpec, MinHosts, hosts::RendezvousAddress};
use protocol::control::ExitStatus;
use std::{
    fmt,
    net::TcpListener as StdListener,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncWriteExt as _, DuplexStream},
    net::TcpListener,
    sync::mpsc,
};

/// How many times a node that was lost may join its run again before the next attempt (start of all
/// workers) begins.
const MAX_REJOINS: u32 = 10;
/// The number of messages about joining nodes that may wait on node 0 until they are shown to the
/// user. Further lines are dropped.
const USER_LINE_QUEUE_CAPACITY: usize = 16;
/// The size, in bytes, of the buffer through which node 0 passes messages about joining nodes to
/// the controller, which shows them to the user.
const USER_LINE_BUFFER_BYTES: usize = 16 << 10;

/// Starts the agent of node 0, and provides the connections to the agents of the other nodes, on
/// which the user starts launch separately.
pub(super) struct JoinTransport {
    context: Arc<JoinContext>,
    timeout: Duration,
    /// The listeners for nodes, and the receiver of the lines for the user. `None` after the first
    /// agents were requested.
    start: Option<(Vec<StdListener>, mpsc::Receiver<String>)>,
}

impl JoinTransport {
    /// Opens the TCP listeners of node 0 at the rendezvous address, at which the other nodes will
    /// connect, without accepting nodes yet. Fails if the job has no key, or if the port is not
    /// available.
    pub(super) fn new(job: &JobSpec, address: &RendezvousAddress) -> Result<JoinTransport, ClusterError> {
        let join = &job.cluster.join;
        let key = read_join_key(join)?;
        let nodes = join.nodes.unwrap_or(1);
        let min_nodes = match job.run.min_hosts {
            MinHosts::All => nodes,
            MinHosts::AtLeast(n) => n.min(nodes),
        };
        let job = hash_job_settings(job);
        let (timeout, last_call) = (join.timeout_ms, join.last_call_ms);
        let (timeout, last_call) = (Duration::from_millis(timeout), Duration::from_millis(last_call));
        let listeners = open_node_0_listeners(address, &key, (nodes, &job))?;
        let (lines, received) = mpsc::channel(USER_LINE_QUEUE_CAPACITY);
        let context = JoinContext {
            key,
            nodes,
            job,
            table: Mutex::new(NodeTable::new(nodes, min_nodes, timeout, last_call)),
            lines,
            limit: Mutex::default(),
        };
        Ok(JoinTransport { context: Arc::new(context), timeout, start: Some((listeners, received)) })
    }

    /// Starts to accept the connections of nodes that want to join the run, unless an earlier call
    /// has done so. Returns the stream of lines for the user in the first call, and `None`
    /// afterwards.
    fn start_accepting(&mut self) -> diagnostic::Result<Option<DuplexStream>> {
        let Some((listeners, lines)) = self.start.take() else { return Ok(None) };
        let listeners: std::io::Result<Vec<TcpListener>> =
            listeners.into_iter().map(TcpListener::from_std).collect();
        let listeners = listeners.map_err(|error| {
            let message = "cannot listen at the rendezvous address";
            Diagnostic::error(host::JOIN_ADDRESS_IN_USE, message).with_cause(&error)
        })?;
        tokio::spawn(accept_nodes(listeners, self.context.clone()));
        let (near, far) = tokio::io::duplex(USER_LINE_BUFFER_BYTES);
        tokio::spawn(write_user_lines(lines, near));
        Ok(Some(far))
    }

    /// Permits the node with the node rank `rank` to join the run, and returns the byte streams
    /// between the controller and that node's agent. The streams end if the node does not join in
    /// time.
    fn open_node_slot(&self, rank: u32, name: &str, stderr: AgentOutput) -> AgentProcess {
        let PendingAgent { input, output, slot } = PendingAgent::new(name);
        let expired = self.context.lock_table().open_slot(rank, slot.clone(), Instant::now());
        let connection = PendingNodeConnection { slot, expired };
        AgentProcess {
            handle: AgentHandle::Connection(Box::new(connection)),
            input: Box::new(input),
            output: Box::new(output),
            stderr,
            start_steps: None,
        }
    }
}

/// Copies the messages about joining nodes, one per line, from a queue to the stream whose content
/// the controller shows to the user.
async fn write_user_lines(mut lines: mpsc::Receiver<String>, mut stream: DuplexStream) {
    while let Some(line) = lines.recv().await {
        // An error means that the controller has ended.
        _ = stream.write_all(format!("{line}\n").as_bytes()).await;
    }
}

impl Transport for JoinTransport {
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>> {
        let mut lines = match self.start_accepting() {
            Ok(lines) => lines,
            Err(error) => return hosts.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut start = |name: &String| match parse_node_name(name) {
            Some(0) => start_local_agent().map_err(|error| {
                let message = format!("cannot start the agent of {name} on this machine");
                Diagnostic::error(host::AGENT_START_FAILED, message).with_subject(name).with_cause(&error)
            }),
            rank => {
                let stderr: AgentOutput = match lines.take() {
                    Some(lines) => Box::new(lines),
                    None => Box::new(tokio::io::empty()),
                };
                Ok(self.open_node_slot(rank.unwrap_or(u32::MAX), name, stderr))
            }
        };
        hosts.iter().map(&mut start).collect()
    }

    fn arrival_limits(&self) -> ArrivalLimits {
        // A node that is lost may be started again at once, and evicts its predecessor.
        ArrivalLimits {
            hello_timeout: self.timeout + HELLO_TIMEOUT,
            quarantine: Duration::ZERO,
            max_returns: MAX_REJOINS,
            reconnects_while_running: false,
        }
    }
}

/// The handle by which the controller closes the connection to one node's agent, or learns that the
/// node did not join in time.
struct PendingNodeConnection {
    slot: AgentConnectionSlot,
    /// Whether the slot was closed because the node did not join in time.
    expired: Arc<AtomicBool>,
}

impl fmt::Debug for PendingNodeConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeConnection").field("name", &self.slot.name).finish_non_exhaustive()
    }
}

impl RemoteAgentConnection for PendingNodeConnection {
    fn abort(&self) {
        self.slot.abort();
    }

    fn failure(&self) -> Option<Diagnostic> {
        let name = &self.slot.name;
        let message =
            format!("{name} did not join in time (`cluster.join.timeout`, `cluster.join.last_call`)");
        let error = || Diagnostic::error(host::JOIN_TIMEOUT, message).with_subject(name).with_remedy();
        self.expired.load(Ordering::Relaxed).then(error)
    }

    fn exit_status(&self) -> Option<ExitStatus> {
        None
    }
}
