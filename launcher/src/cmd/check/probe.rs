//! [`probe_hosts`]: sends the requests of `launch check` (probes) to the agents of all hosts in
//! parallel and collects the answers.
use super::agents::StartedAgent;
use crate::{
    cluster::ConnectionStage,
    connection::{FrameError, MessagePriority, Outbox, read_frames, write_frames},
};
use diagnostic::{Diagnostic, codes};
use jobspec::PortSelection;
use protocol::{
    control::{FromAgent, PROTOCOL_VERSION, ToAgent},
    probe::{HostInspection, MAX_PEERS, PeerListener, ProbeAnswer, ProbeRequest},
};
use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    io::AsyncReadExt,
    sync::mpsc,
    task::{JoinHandle, spawn_local},
    time::timeout,
};

/// How long `launch check` waits for an agent's answer to an inspection request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long node 0 waits at the end of `launch check` until the agents of the nodes that joined
/// have ended.
const JOINED_AGENT_END_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of bytes from the start of an agent's stderr that launch quotes in an error message
/// about the agent. Further bytes are ignored.
const MAX_STDERR_BYTES: u64 = 4 << 10;
/// The number of hosts after a host in the host list to which this host opens test connections, if
/// the job has more than 16 hosts.
const NEIGHBOURS_PER_HOST: usize = 4;
/// The largest number of hosts for which every host opens test connections to all other hosts.
const MAX_FULL_MESH_HOSTS: usize = 16;

/// What the agent of each host uses for `launch check`: the directories to inspect, the CUDA
/// library paths, and the ports for test connections.
#[derive(Clone, Debug)]
pub(super) struct ProbeTargets {
    /// The absolute paths of the directories that the job writes to: working, log and, for built-in
    /// training, checkpoint directory.
    pub(super) dirs: Vec<PathBuf>,
    /// The directories in which CUDA libraries are searched before the default directories; `None`
    /// if the job does not train on GPUs.
    pub(super) cuda: Option<Vec<PathBuf>>,
    /// The ports of which each agent takes one to listen for its peers.
    pub(super) ports: PortSelection,
}

/// The answers of one host's agent to the requests (probes) of `launch check`, or the error because
/// of which the answers are missing.
#[derive(Debug)]
pub(super) struct ProbeResult {
    pub(super) name: String,
    /// The stage that the connection to the host reached. If the connection failed, it failed in
    /// this stage.
    pub(super) stage: ConnectionStage,
    /// The error that prevented the inspection of the host or its connections to peers. `None` if
    /// the agent of the host answered both requests.
    pub(super) error: Option<Diagnostic>,
    pub(super) inspection: Option<HostInspection>,
    /// The time by which the host's clock is ahead of this machine's clock, and the uncertainty of
    /// this time, both in seconds. `None` if the host was not inspected.
    pub(super) clock_skew_s: Option<(f64, f64)>,
    /// Each peer that the host connected to, with the duration of connecting in milliseconds or the
    /// error of the connection.
    pub(super) peers: Vec<(String, diagnostic::Result<f64>)>,
    /// For each directory of [`ProbeTargets::dirs`], the nonces whose files the host sees there.
    pub(super) nonces: Vec<Vec<String>>,
    /// The unique part of the name of this host's nonce file. Each host has a different nonce.
    pub(super) nonce: String,
    /// The text that the login shell of the host prints before the agent starts; usually empty.
    pub(super) shell_output: String,
    /// The external program that carries the connection, and why; `None` if there is none.
    pub(super) client: Option<String>,
}

/// Sends the requests of `launch check` (probes) to all `agents` in parallel, and returns their
/// answers and connections in the order of `agents`. Dropping a session ends its agent.
///
/// `nonce` is the beginning of the nonces of all hosts. `connect_timeout_ms` limits each TCP
/// connection between two hosts, in milliseconds. The caller must run in a
/// [`tokio::task::LocalSet`].
pub(super) async fn probe_hosts(
    agents: Vec<StartedAgent>,
    targets: &ProbeTargets,
    nonce: &str,
    connect_timeout_ms: u64,
) -> Vec<ProbeSession> {
    let mut inspections = Vec::new();
    for (index, host) in agents.into_iter().enumerate() {
        let nonce = format!("{nonce}-{index}");
        inspections.push(spawn_local(inspect_host(host, targets.clone(), nonce)));
    }
    let mut sessions = Vec::new();
    for inspection in inspections {
        // A task that panicked counts as a host without an answer.
        sessions.extend(inspection.await.ok());
    }
    let nonces: Vec<String> = sessions.iter().map(|s| s.probe.nonce.clone()).collect();
    let listeners: Vec<Option<PeerListener>> =
        sessions.iter().map(|s| find_peer_listener(&s.probe)).collect();
    let connections: Vec<_> = sessions
        .into_iter()
        .enumerate()
        .map(|(index, session)| {
            let peers = select_neighbours(index, &listeners);
            spawn_local(request_peer_connections(session, peers, nonces.clone(), connect_timeout_ms))
        })
        .collect();
    let mut sessions = Vec::new();
    for connection in connections {
        sessions.extend(connection.await.ok());
    }
    sessions
}

/// A host that `launch check` inspects: the results so far, the agent on the host and the control
/// connection to the agent.
pub(super) struct ProbeSession {
    pub(super) probe: ProbeResult,
    pub(super) host: StartedAgent,
    pub(super) connection: Option<AgentConnection>,
}

impl ProbeSession {
    /// Returns the number of CPUs of the host; 0 if it was not inspected.
    pub(super) fn count_cpus(&self) -> u32 {
        self.probe.inspection.as_ref().map_or(0, |inspection| inspection.cpus)
    }
}

/// An agent that has answered the requests of `launch check`, with its control connection. Dropping
/// it ends the agent.
pub(super) type ProbedAgent = (StartedAgent, Option<AgentConnection>);

/// Splits the sessions of `launch check` with the hosts into two lists: the result of each host,
/// and the agents with their control connections.
pub(super) fn separate_results_from_agents(
    sessions: Vec<ProbeSession>,
) -> (Vec<ProbeResult>, Vec<ProbedAgent>) {
    sessions.into_iter().map(|session| (session.probe, (session.host, session.connection))).unzip()
}

/// Sends all agents the end of `launch check` with the exit code `exit_code`, and waits for a
/// limited time until the agents have ended.
pub(super) async fn end_probed_agents(mut agents: Vec<ProbedAgent>, exit_code: u8) {
    for (_, connection) in &mut agents {
        if let Some(connection) = connection {
            connection.send(ToAgent::End { exit_code: Some(exit_code) });
        }
    }
    let deadline = tokio::time::Instant::now() + JOINED_AGENT_END_TIMEOUT;
    for (_, connection) in &mut agents {
        if let Some(connection) = connection {
            let limit = deadline.saturating_duration_since(tokio::time::Instant::now());
            // An error is the expected end of the connection.
            _ = connection.wait_for_message(Some(limit), |_| None::<()>).await;
        }
    }
}

/// The control connection to an agent during `launch check`, with a queue for outgoing messages and
/// a queue for received messages.
pub(super) struct AgentConnection {
    outbox: Outbox<ToAgent>,
    inbox: mpsc::Receiver<((), Result<Option<FromAgent>, FrameError>)>,
}

impl AgentConnection {
    /// Queues a message to the agent. A closed connection shows when the answer is awaited.
    pub(super) fn send(&mut self, message: ToAgent) {
        self.outbox.send_message(MessagePriority::Critical, message);
    }

    /// Waits for the first message of the agent that the function `select` accepts, and returns the
    /// value that `select` extracts from this message. Other messages are dropped.
    ///
    /// Fails if the agent reports an error, if the connection ends, or if no such message arrives
    /// within `limit`. With `None`, the time is not limited.
    pub(super) async fn wait_for_message<T>(
        &mut self,
        limit: Option<Duration>,
        select: impl Fn(FromAgent) -> Option<T>,
    ) -> diagnostic::Result<T> {
        let next = async {
            loop {
                match self.inbox.recv().await {
                    Some(((), Ok(Some(FromAgent::Failed { diagnostic, .. })))) => return Err(diagnostic),
                    Some(((), Ok(Some(message)))) => {
                        if let Some(value) = select(message) {
                            return Ok(value);
                        }
                    }
                    Some(((), Err(error))) => return Err(error.into()),
                    Some(((), Ok(None))) | None => {
                        let message = "the agent ended";
                        return Err(Diagnostic::error(codes::host::CONTROL_CONNECTION_LOST, message));
                    }
                }
            }
        };
        match limit {
            None => next.await,
            Some(limit) => timeout(limit, next).await.unwrap_or_else(|_| {
                let message = format!("the agent did not answer within {} s", limit.as_secs());
                Err(Diagnostic::error(codes::host::PROBE_FAILED, message))
            }),
        }
    }
}

/// Requests that the agent of a host inspect the host, and waits for the answer. Stores the
/// inspection, or the error if the request fails, in the probe result of the returned session.
async fn inspect_host(mut host: StartedAgent, targets: ProbeTargets, nonce: String) -> ProbeSession {
    let mut probe = ProbeResult {
        name: host.name.clone(),
        stage: ConnectionStage::Agent,
        error: None,
        inspection: None,
        clock_skew_s: None,
        peers: Vec::new(),
        nonces: Vec::new(),
        nonce: nonce.clone(),
        shell_output: String::new(),
        client: None,
    };
    let mut connection = None;
    let mut stderr = None;
    if let Ok(agent) = &mut host.agent {
        let (outbox, outgoing) = Outbox::channel();
        let (sender, inbox) = mpsc::channel(16);
        // The tasks own the agent's streams, and `agent` keeps only the handle of the process.
        let input = std::mem::replace(&mut agent.input, Box::new(tokio::io::sink()));
        let output = std::mem::replace(&mut agent.output, Box::new(tokio::io::empty()));
        let errors = std::mem::replace(&mut agent.stderr, Box::new(tokio::io::empty()));
        tokio::spawn(read_frames((), output, sender));
        tokio::spawn(write_frames(input, outgoing));
        stderr = Some(tokio::spawn(async move {
            let mut text = Vec::new();
            _ = errors.take(MAX_STDERR_BYTES).read_to_end(&mut text).await;
            String::from_utf8_lossy(&text).trim().to_owned()
        }));
        connection = Some(AgentConnection { outbox, inbox });
    }
    let result = match &mut connection {
        Some(connection) => request_inspection(connection, targets, nonce).await,
        None => Err(Diagnostic::error(codes::host::AGENT_START_FAILED, "the agent could not be started")),
    };
    match result {
        Ok((inspection, skew)) => (probe.inspection, probe.clock_skew_s) = (Some(inspection), Some(skew)),
        Err(error) => probe.error = Some(choose_error_of_silent_agent(&host, error, stderr).await),
    }
    if let Some(connection) = host.remote_connection() {
        (probe.stage, probe.shell_output) = (connection.stage(), connection.shell_output());
        probe.client = connection.external_client_description();
    }
    ProbeSession { probe, host, connection }
}

/// Chooses the error to report for a host whose agent sent no answer: a connection error first,
/// then a start error, and otherwise `error`.
///
/// Adds the text of the agent's stderr to the message of the latter two. If the connection to a
/// remote host has no error, aborts the connection.
pub(super) async fn choose_error_of_silent_agent(
    host: &StartedAgent,
    error: Diagnostic,
    stderr: Option<JoinHandle<String>>,
) -> Diagnostic {
    if let Some(connection) = host.remote_connection() {
        if let Some(failure) = connection.failure() {
            return failure;
        }
        connection.abort();
    }
    let stderr = match stderr {
        Some(task) => {
            timeout(Duration::from_secs(1), task).await.ok().and_then(Result::ok).unwrap_or_default()
        }
        None => String::new(),
    };
    let error = host.agent.as_ref().err().cloned().unwrap_or(error);
    let stderr = stderr.replace('\n', " / ");
    let suffix = if stderr.is_empty() { String::new() } else { format!("; its stderr: \"{stderr}\"") };
    let message = format!("host {}: {}{suffix}", host.name, error.message());
    error.with_subject(&host.name).with_message(message)
}

/// Requests that an agent inspect its host, and waits for the answer. Returns the inspection, the
/// clock skew in seconds and the uncertainty of the skew in seconds.
async fn request_inspection(
    connection: &mut AgentConnection,
    ProbeTargets { dirs, cuda, ports }: ProbeTargets,
    nonce: String,
) -> diagnostic::Result<(HostInspection, (f64, f64))> {
    let hello = ToAgent::Hello { version: PROTOCOL_VERSION, terms: None };
    connection.outbox.send_message(MessagePriority::Critical, hello);
    // Without a limit: the transport limits the time to connect, and ends the stream on failure.
    let version = connection.wait_for_message(None, |m| match m {
        FromAgent::Hello { version, .. } => Some(version),
        _ => None,
    });
    let version = version.await?;
    if version != PROTOCOL_VERSION {
        let message = format!(
            "the agent speaks version {version} of the control protocol; expected {PROTOCOL_VERSION}"
        );
        return Err(Diagnostic::error(codes::run::AGENT_VERSION_MISMATCH, message)
            .with_help("install the same build of launch on every host"));
    }
    let request = ProbeRequest::Inspect { nonce, dirs, cuda, ports };
    connection.outbox.send_message(MessagePriority::Critical, ToAgent::Probe(request));
    let sent = read_unix_time_s();
    let inspection = connection.wait_for_message(Some(ANSWER_TIMEOUT), |m| match m {
        FromAgent::Probed(ProbeAnswer::Inspect(inspection)) => Some(inspection),
        _ => None,
    });
    let inspection = inspection.await?;
    let (elapsed, remote) = (read_unix_time_s() - sent, inspection.unix_time_ns as f64 / 1e9);
    // The agent reads its clock last, so the answer was in transit for less than the elapsed time.
    let skew = remote - (sent + elapsed);
    Ok((*inspection, (skew, elapsed)))
}

/// Reads the clock of this machine and returns the time in seconds since 1970 (UTC).
fn read_unix_time_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Returns the addresses on which the agent of a host accepts test connections from the agents of
/// other hosts. Returns `None` if the host was not inspected or the agent does not listen.
fn find_peer_listener(probe: &ProbeResult) -> Option<PeerListener> {
    let inspection = probe.inspection.as_ref()?;
    let port = inspection.port?;
    let addresses = inspection.interfaces.iter().map(|(_, ip)| SocketAddr::new(*ip, port)).collect();
    Some(PeerListener { name: probe.name.clone(), addresses, greeting: inspection.greeting.clone() })
}

/// Returns the listening addresses of the other hosts to which host `index` opens test connections:
/// all hosts of a small job, or a few hosts of a large one.
///
/// These are all other hosts or, if the job has more than [`MAX_FULL_MESH_HOSTS`] hosts, the first
/// host and the [`NEIGHBOURS_PER_HOST`] hosts after host `index`. Omits hosts that have no
/// listener.
fn select_neighbours(index: usize, listeners: &[Option<PeerListener>]) -> Vec<PeerListener> {
    let count = listeners.len();
    let is_near =
        |other: usize| other == 0 || (1..=NEIGHBOURS_PER_HOST).contains(&((other + count - index) % count));
    let others =
        (0..count).filter(|other| *other != index && (count <= MAX_FULL_MESH_HOSTS || is_near(*other)));
    others.filter_map(|other| listeners.get(other)?.clone()).take(MAX_PEERS).collect()
}

/// Requests that an agent open test connections to the agents `peers` and report which test files
/// of other hosts it sees. Stores the answer, or the error if the request fails, in the session's
/// probe result.
async fn request_peer_connections(
    mut session: ProbeSession,
    peers: Vec<PeerListener>,
    nonces: Vec<String>,
    timeout_ms: u64,
) -> ProbeSession {
    if session.probe.inspection.is_none() {
        return session;
    }
    let Some(connection) = &mut session.connection else { return session };
    connection.outbox.send_message(
        MessagePriority::Critical,
        ToAgent::Probe(ProbeRequest::Connect { peers, nonces, timeout_ms }),
    );
    let limit = ANSWER_TIMEOUT + Duration::from_millis(timeout_ms * 8);
    let answer = connection.wait_for_message(Some(limit), |m| match m {
        FromAgent::Probed(ProbeAnswer::Connect { peers, nonces }) => Some((peers, nonces)),
        _ => None,
    });
    match answer.await {
        Ok((peers, nonces)) => (session.probe.peers, session.probe.nonces) = (peers, nonces),
        Err(error) => {
            session.probe.error = Some(choose_error_of_silent_agent(&session.host, error, None).await)
        }
    }
    session
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_many_hosts_connects_to_the_first_and_the_following_hosts() {
        let listener = |i: usize| {
            Some(PeerListener { name: i.to_string(), addresses: Vec::new(), greeting: String::new() })
        };
        let names = |index, count| -> Vec<String> {
            let listeners = (0..count).map(listener).collect::<Vec<_>>();
            select_neighbours(index, &listeners).into_iter().map(|p| p.name).collect()
        };
        assert_eq!(names(1, 3), ["0", "2"]);
        assert_eq!(names(20, 100), ["0", "21", "22", "23", "24"]);
        assert_eq!(names(98, 100), ["0", "1", "2", "99"]);
        assert_eq!(names(0, 1), [""; 0]);
    }
}
