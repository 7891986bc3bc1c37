//! Accepts the nodes that connect to node 0, checks their requests to join the run, and passes the
//! connections of accepted nodes to the controller.
use super::{
    job_hashes::find_differing_job_keys,
    node_table::{ConnectionNumber, JoinCandidate, JoinDecision, NodeTable},
};
use crate::{
    cluster::{
        pending_agent::{AgentConnection, AgentConnectionSlot},
        unauthenticated_connections::UnauthenticatedConnections,
    },
    connection::{
        encode_frame,
        handshake::{HANDSHAKE_TIMEOUT, HandshakeError, HandshakeKey, authenticate_node},
        listeners::accept_next,
        read_frame, set_control_options,
    },
    warning_limit::WarningLimit,
};
use diagnostic::{Diagnostic, codes::host, quantity::format_count};
use protocol::control::{JobSettingHash, JoinAnswer, JoinRequest, PROTOCOL_VERSION};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{sleep, timeout},
};

/// The interval at which node 0 checks again whether a waiting node may join the run, and whether
/// the time limit for missing nodes has passed. Also the pause after a failed accept.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// How long node 0 waits for nodes before it first shows the user which ones are missing.
const FIRST_REPORT_DELAY: Duration = Duration::from_secs(10);
/// The interval at which node 0 shows the user again which nodes are missing.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// The largest number of keys of job.yaml that a message lists if the job of a node differs from
/// that of node 0.
const MAX_NAMED_KEYS: usize = 5;

/// What the tasks that serve joining nodes share: the key of the nodes, the settings of node 0's
/// job, and the table of nodes.
pub(super) struct JoinContext {
    pub(super) key: HandshakeKey,
    pub(super) nodes: u32,
    /// The keys of the job of node 0, each with a hash of its value.
    pub(super) job: Vec<JobSettingHash>,
    pub(super) table: Mutex<NodeTable>,
    /// Carries lines for the user. Lines that do not fit are dropped.
    pub(super) lines: mpsc::Sender<String>,
    pub(super) limit: Mutex<WarningLimit>,
}

impl JoinContext {
    /// Locks the table in which node 0 records which nodes have joined the run.
    pub(super) fn lock_table(&self) -> MutexGuard<'_, NodeTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows a message about joining nodes to the user of node 0. Never blocks.
    fn show_line(&self, text: String) {
        // If many lines wait, the reader does not read.
        _ = self.lines.try_send(text);
    }

    /// Warns the user that node 0 has rejected or closed a connection from the address `peer`, at
    /// most once a minute for each address.
    fn warn_about_peer(&self, peer: IpAddr, reason: &str) {
        let mut limit = self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        let text = format_rejection_warning(peer, reason);
        match limit.admit_warning(peer, Instant::now()) {
            None => {}
            Some(0) => self.show_line(text),
            Some(n) => self.show_line(format!("{text} ({} omitted)", format_count(n, "similar message"))),
        }
    }

    /// Checks whether a node that asks to join has the same job, number of nodes and version of
    /// launch as this run. Fails if the node cannot join this run.
    fn check_join_request(&self, request: &JoinRequest) -> diagnostic::Result<()> {
        let rejected = |message: String| Err(Diagnostic::error(host::JOIN_REJECTED, message));
        let (nodes, node) = (self.nodes, &request.host);
        if request.version != PROTOCOL_VERSION {
            return rejected(format!("{node} runs another version of launch than node 0"));
        }
        let different = find_differing_job_keys(&self.job, &request.job);
        if !different.is_empty() {
            let more = different.len().saturating_sub(MAX_NAMED_KEYS);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let named: Vec<String> =
                different.iter().take(MAX_NAMED_KEYS).map(|key| format!("`{key}`")).collect();
            let message =
                format!("the job of {node} differs from that of node 0 in {}{more}", named.join(", "));
            return Err(Diagnostic::error(host::JOIN_REJECTED, message)
                .with_field("keys", different)
                .with_help("start every node with the same job, or choose another rendezvous address for another job"));
        }
        if request.nodes != nodes {
            return rejected(format!(
                "{node} expects {}, and node 0 expects {nodes}",
                format_count(request.nodes, "node")
            ));
        }
        match request.node_rank {
            Some(0) => rejected(format!("{node} has the node rank 0, but another process is node 0")),
            Some(rank) if rank >= nodes => rejected(format!(
                "{node} has the node rank {rank}, but the ranks of {nodes} nodes are below {nodes}"
            )),
            _ => Ok(()),
        }
    }
}

/// Formats the warning for the user that node 0 has rejected a node that connected from the address
/// `peer`, because of `reason`.
fn format_rejection_warning(peer: IpAddr, reason: &str) -> String {
    format!("launch: rejected a node that connected from {peer}: {reason}")
}

/// Accepts connections of nodes that want to join the run, in a loop that ends only with the async
/// runtime.
pub(super) async fn accept_nodes(mut listeners: Vec<TcpListener>, context: Arc<JoinContext>) {
    let mut handshakes = UnauthenticatedConnections::new(context.nodes as usize);
    let mut number: ConnectionNumber = 0;
    let mut report_at = Instant::now() + FIRST_REPORT_DELAY;
    loop {
        context.lock_table().close_slots_of_missing_nodes(Instant::now());
        report_missing_nodes(&context, &mut report_at);
        let accepted = tokio::select! {
            accepted = accept_next(&mut listeners) => accepted,
            () = sleep(RETRY_INTERVAL) => continue,
        };
        let Ok((stream, peer)) = accepted else {
            sleep(RETRY_INTERVAL).await;
            continue;
        };
        if let Some(closed) = handshakes.close_one_if_full(peer.ip()) {
            context.warn_about_peer(closed, "too many connections from there wait");
        }
        number += 1;
        let task = tokio::spawn(authenticate_and_admit_node(stream, peer, number, context.clone()));
        handshakes.add_connection(peer.ip(), task.abort_handle());
    }
}

/// Shows the user which nodes have not joined the run yet if the time `report_at` has come, and
/// sets `report_at` to the time of the next message.
fn report_missing_nodes(context: &JoinContext, report_at: &mut Instant) {
    let awaited = context.lock_table().list_awaited_ranks();
    let now = Instant::now();
    if awaited.is_empty() {
        *report_at = now + FIRST_REPORT_DELAY;
    } else if now >= *report_at {
        *report_at = now + REPORT_INTERVAL;
        let ranks: Vec<String> = awaited.iter().map(u32::to_string).collect();
        let nodes = format_count(awaited.len(), "node");
        context.show_line(format!("launch: waiting for {nodes} of {}: {}", context.nodes, ranks.join(", ")));
    }
}

/// Authenticates a node that has connected to node 0, and passes the node's connection to the
/// controller once the node may join the run. Warns the user about a node that cannot join.
async fn authenticate_and_admit_node(
    stream: TcpStream,
    peer: SocketAddr,
    number: ConnectionNumber,
    context: Arc<JoinContext>,
) {
    let received = timeout(HANDSHAKE_TIMEOUT, authenticate_and_read_request(stream, &context.key)).await;
    let (connection, request) = match received.unwrap_or(Err(HandshakeError::Timeout)) {
        Ok(received) => received,
        // A node tries several addresses, and port scanners send nothing.
        Err(HandshakeError::Io(_)) => return,
        Err(error) => return context.warn_about_peer(peer.ip(), &error.to_string()),
    };
    let mut claims = SlotClaimGuard { number, context: &context };
    if let Err(error) = context.check_join_request(&request) {
        return claims.reject_node(connection, peer, error).await;
    }
    let mut candidate = JoinCandidate::new(number, request.node_rank, Instant::now());
    claims.wait_for_slot_and_join(connection, peer, &mut candidate, &request).await;
}

/// Authenticates a node that has connected to node 0 by the key that all nodes share, and reads the
/// node's request to join the run.
async fn authenticate_and_read_request(
    stream: TcpStream,
    key: &HandshakeKey,
) -> Result<(AgentConnection, JoinRequest), HandshakeError> {
    set_control_options(&stream)?;
    let (stream, _) = authenticate_node(stream, key).await?;
    let mut connection = AgentConnection::new(stream)?;
    match read_frame(&mut connection.reader).await {
        Ok(Some(request)) => Ok((connection, request)),
        // The node has chosen another address of node 0.
        Ok(None) => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        Err(_) => Err(HandshakeError::WrongProtocol),
    }
}

/// The reservation of a node rank in the run for one connection of a joining node, which ends when
/// this value is dropped.
struct SlotClaimGuard<'a> {
    number: ConnectionNumber,
    context: &'a JoinContext,
}

impl Drop for SlotClaimGuard<'_> {
    fn drop(&mut self) {
        self.context.lock_table().release_claims(self.number, None);
    }
}

impl SlotClaimGuard<'_> {
    /// Waits until node 0 accepts a node that asks to join the run, and then passes the node's
    /// connection to the controller. Rejects the node if it cannot get a place.
    async fn wait_for_slot_and_join(
        &mut self,
        mut connection: AgentConnection,
        peer: SocketAddr,
        candidate: &mut JoinCandidate,
        request: &JoinRequest,
    ) {
        loop {
            let decision = self.context.lock_table().decide_join(candidate, Instant::now());
            let message = match decision {
                JoinDecision::Take(slot, rank) => {
                    return self.fill_slot(connection, &slot, rank, &request.host).await;
                }
                JoinDecision::Wait => {
                    if wait_until_closed_or_retry(&mut connection).await {
                        return;
                    }
                    continue;
                }
                JoinDecision::Duplicate(rank, other) => {
                    format!("{} has the node rank {rank}, with which {other}", request.host)
                }
                JoinDecision::Full => {
                    format!("{} comes too late: all {} nodes have joined", request.host, self.context.nodes)
                }
            };
            let error = Diagnostic::error(host::JOIN_REJECTED, message).with_remedy();
            return self.reject_node(connection, peer, error).await;
        }
    }

    /// Accepts a node into the run with the node rank `node_rank`, informs the node, and passes its
    /// connection to the controller.
    async fn fill_slot(
        &mut self,
        mut connection: AgentConnection,
        slot: &AgentConnectionSlot,
        node_rank: u32,
        node: &str,
    ) {
        if send_answer(&mut connection, &JoinAnswer::Accepted { node_rank }).await && slot.connect(connection)
        {
            self.context.lock_table().release_claims(self.number, Some(node));
        }
    }

    /// Informs a node that it cannot join the run, and warns the user of node 0.
    async fn reject_node(&mut self, mut connection: AgentConnection, peer: SocketAddr, error: Diagnostic) {
        // Nodes with the key are few, so that their warnings need no limit.
        self.context.show_line(format_rejection_warning(peer.ip(), error.message()));
        send_answer(&mut connection, &JoinAnswer::Rejected(error)).await;
    }
}

/// Sends node 0's answer (accepted or rejected) to a node that has asked to join the run. Returns
/// whether the connection is alive.
async fn send_answer(connection: &mut AgentConnection, answer: &JoinAnswer) -> bool {
    let Ok(frame) = encode_frame(answer) else { return false };
    let send = async {
        connection.writer.write_all(&frame).await?;
        connection.writer.flush().await
    };
    matches!(timeout(HANDSHAKE_TIMEOUT, send).await, Ok(Ok(())))
}

/// Waits for [`RETRY_INTERVAL`], and returns `true` early if the joining node closes its connection
/// or sends data before.
async fn wait_until_closed_or_retry(connection: &mut AgentConnection) -> bool {
    let mut byte = [0];
    tokio::select! {
        _ = connection.reader.transport_mut().peek(&mut byte) => true,
        () = sleep(RETRY_INTERVAL) => false,
    }
}
