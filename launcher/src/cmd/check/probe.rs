//! [`probe_hosts`]: sends the probes to the agents of all hosts at once and collects the answers.
use super::StartedAgent;
use crate::{
    connection::{FrameError, Outbox, Priority, read_frames, write_frames},
    transport::{AgentHandle, RemoteConnection, ssh::ConnectionStage},
};
use contract::{
    control::{FromAgent, ToAgent, VERSION},
    probe::{HostInspection, MAX_PEERS, PeerListener, Probe, ProbeAnswer},
};
use diagnostic::{Diagnostic, codes};
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

/// How long a running agent may take for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Most text of an agent's stderr that is kept, bytes.
const MAX_STDERR_BYTES: u64 = 4 << 10;
/// How many of the next hosts each host connects to, in addition to the first.
const NEIGHBOURS: usize = 4;
/// Up to this many hosts, each connects to all others.
const MAX_FULL_MESH: usize = 16;

/// What each host inspects.
#[derive(Clone, Debug)]
pub(super) struct ProbeTargets {
    /// The directories that the job writes to, absolute.
    pub(super) dirs: Vec<PathBuf>,
    /// For training on GPUs: the directories of the job in which CUDA libraries are searched first.
    pub(super) cuda: Option<Vec<PathBuf>>,
}

/// The answers of one host.
#[derive(Debug)]
pub(super) struct HostProbe {
    pub(super) name: String,
    /// The last stage of the connection that was begun.
    pub(super) stage: ConnectionStage,
    /// Why there is no inspection, or no answer about the peers.
    pub(super) error: Option<Diagnostic>,
    pub(super) inspection: Option<HostInspection>,
    /// How far its clock is ahead of this machine's, and the uncertainty, seconds.
    pub(super) clock_skew_s: Option<(f64, f64)>,
    /// The time to connect to each peer, milliseconds, or why it failed.
    pub(super) peers: Vec<(String, diagnostic::Result<f64>)>,
    /// For each directory, the nonces that the host sees in it.
    pub(super) nonces: Vec<Vec<String>>,
    /// The nonce of this host.
    pub(super) nonce: String,
    /// The text that its login shell prints.
    pub(super) shell_output: String,
}

/// Probes all hosts and returns their answers in the order of the hosts. Must run in a `LocalSet`.
pub(super) async fn probe_hosts(
    agents: Vec<StartedAgent>,
    targets: &ProbeTargets,
    nonce: &str,
    connect_timeout_ms: u64,
) -> Vec<HostProbe> {
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
    let listeners: Vec<Option<PeerListener>> = sessions.iter().map(|s| listener_of(&s.probe)).collect();
    let connections: Vec<_> = sessions
        .into_iter()
        .enumerate()
        .map(|(index, session)| {
            let peers = neighbours(index, &listeners);
            spawn_local(connect_peers(session, peers, nonces.clone(), connect_timeout_ms))
        })
        .collect();
    let mut sessions = Vec::new();
    for connection in connections {
        sessions.extend(connection.await.ok());
    }
    // Dropping the sessions ends the agents, which close their ports and remove their nonce files.
    sessions.into_iter().map(|session| session.probe).collect()
}

/// A host that is being probed.
struct ProbeSession {
    probe: HostProbe,
    host: StartedAgent,
    connection: Option<AgentConnection>,
}

/// The control connection to an agent.
struct AgentConnection {
    outbox: Outbox<ToAgent>,
    inbox: mpsc::Receiver<((), Result<Option<FromAgent>, FrameError>)>,
}

impl AgentConnection {
    /// Waits for a message that `select` accepts. Fails when the agent ends, fails, or does not
    /// answer within `limit`.
    async fn wait<T>(
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

/// Connects to the agent of a host and has it inspect the host.
async fn inspect_host(mut host: StartedAgent, targets: ProbeTargets, nonce: String) -> ProbeSession {
    let mut probe = HostProbe {
        name: host.name.clone(),
        stage: ConnectionStage::Agent,
        error: None,
        inspection: None,
        clock_skew_s: None,
        peers: Vec::new(),
        nonces: Vec::new(),
        nonce: nonce.clone(),
        shell_output: String::new(),
    };
    let mut connection = None;
    let mut stderr = None;
    if let Ok(agent) = &mut host.agent {
        let (outbox, outgoing) = Outbox::new();
        let (sender, inbox) = mpsc::channel(16);
        // The tasks own the streams; `agent` keeps only the handle of the process.
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
        Err(error) => probe.error = Some(root_error(&host, error, stderr).await),
    }
    if let Some(progress) = &host.progress {
        (probe.stage, probe.shell_output) = (progress.stage(), progress.shell_output());
    }
    ProbeSession { probe, host, connection }
}

/// The error to report for a host: that of its connection or its start, else `error` with the text
/// of the agent's stderr.
async fn root_error(
    host: &StartedAgent,
    error: Diagnostic,
    stderr: Option<JoinHandle<String>>,
) -> Diagnostic {
    if let Some(failure) = host.progress.as_ref().and_then(|p| p.connection_failure()) {
        return failure;
    }
    if let Some(AgentHandle::Connection(connection)) = host.agent.as_ref().ok().map(|a| &a.handle) {
        if let Some(failure) = connection.failure() {
            return failure;
        }
        RemoteConnection::abort(connection.as_ref());
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

/// Requests an inspection; returns it with the clock skew and its uncertainty, seconds.
async fn request_inspection(
    connection: &mut AgentConnection,
    ProbeTargets { dirs, cuda }: ProbeTargets,
    nonce: String,
) -> diagnostic::Result<(HostInspection, (f64, f64))> {
    connection.outbox.send(Priority::Critical, ToAgent::Hello { version: VERSION });
    // The transport limits the time to connect, and ends the stream on failure.
    let version = connection.wait(None, |m| match m {
        FromAgent::Hello { version, .. } => Some(version),
        _ => None,
    });
    let version = version.await?;
    if version != VERSION {
        let message =
            format!("the agent speaks version {version} of the control protocol; expected {VERSION}");
        return Err(Diagnostic::error(codes::run::AGENT_VERSION_MISMATCH, message)
            .with_help("install the same build of launch on every host"));
    }
    connection.outbox.send(Priority::Critical, ToAgent::Probe(Probe::Inspect { nonce, dirs, cuda }));
    let sent = unix_seconds();
    let inspection = connection.wait(Some(ANSWER_TIMEOUT), |m| match m {
        FromAgent::Probed(ProbeAnswer::Inspect(inspection)) => Some(inspection),
        _ => None,
    });
    let inspection = inspection.await?;
    let (elapsed, remote) = (unix_seconds() - sent, inspection.unix_time_ns as f64 / 1e9);
    // The agent reads its clock last, so the answer was in transit for less than the elapsed time.
    let skew = remote - (sent + elapsed);
    Ok((*inspection, (skew, elapsed)))
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Where the agent of a host accepts its peers.
fn listener_of(probe: &HostProbe) -> Option<PeerListener> {
    let inspection = probe.inspection.as_ref()?;
    let port = inspection.port?;
    let addresses = inspection.interfaces.iter().map(|(_, ip)| SocketAddr::new(*ip, port)).collect();
    Some(PeerListener { name: probe.name.clone(), addresses, greeting: inspection.greeting.clone() })
}

/// The hosts that host `index` connects to: all others, or, of more than [`MAX_FULL_MESH`] hosts,
/// the first and the next [`NEIGHBOURS`].
fn neighbours(index: usize, listeners: &[Option<PeerListener>]) -> Vec<PeerListener> {
    let count = listeners.len();
    let is_near = |other: usize| other == 0 || (1..=NEIGHBOURS).contains(&((other + count - index) % count));
    let others = (0..count).filter(|other| *other != index && (count <= MAX_FULL_MESH || is_near(*other)));
    others.filter_map(|other| listeners.get(other)?.clone()).take(MAX_PEERS).collect()
}

/// Has a host connect to its peers and look for their nonce files.
async fn connect_peers(
    mut session: ProbeSession,
    peers: Vec<PeerListener>,
    nonces: Vec<String>,
    timeout_ms: u64,
) -> ProbeSession {
    if session.probe.inspection.is_none() {
        return session;
    }
    let Some(connection) = &mut session.connection else { return session };
    connection.outbox.send(Priority::Critical, ToAgent::Probe(Probe::Connect { peers, nonces, timeout_ms }));
    let limit = ANSWER_TIMEOUT + Duration::from_millis(timeout_ms * 8);
    let answer = connection.wait(Some(limit), |m| match m {
        FromAgent::Probed(ProbeAnswer::Connect { peers, nonces }) => Some((peers, nonces)),
        _ => None,
    });
    match answer.await {
        Ok((peers, nonces)) => (session.probe.peers, session.probe.nonces) = (peers, nonces),
        Err(error) => session.probe.error = Some(root_error(&session.host, error, None).await),
    }
    session
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_many_hosts_connects_to_the_first_and_the_next() {
        let listener = |i: usize| {
            Some(PeerListener { name: i.to_string(), addresses: Vec::new(), greeting: String::new() })
        };
        let names = |index, count| -> Vec<String> {
            let listeners = (0..count).map(listener).collect::<Vec<_>>();
            neighbours(index, &listeners).into_iter().map(|p| p.name).collect()
        };
        assert_eq!(names(1, 3), ["0", "2"]);
        assert_eq!(names(20, 100), ["0", "21", "22", "23", "24"]);
        assert_eq!(names(98, 100), ["0", "1", "2", "99"]);
        assert_eq!(names(0, 1), [""; 0]);
    }
}
