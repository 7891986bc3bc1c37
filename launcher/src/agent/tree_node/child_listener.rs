//! [`ChildListener`]: accepts the connections of agents that are to be below this agent in the tree
//! of agents.
use super::{executable_server, neighbour_link::NeighbourLink};
use crate::{
    connection::{
        encode_frame,
        handshake::{HANDSHAKE_TIMEOUT, HandshakeError, HandshakeKey, authenticate_agent},
        listeners::{accept_next, open_listeners},
        tree::{TreeFrame, TreeSetup},
    },
    discover::{find_reachable_addresses, list_interface_addresses, sort_and_limit_addresses},
};
use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
    time::{sleep, timeout},
};

/// The largest number of incoming connections that are served at the same time, each of which
/// authenticates an agent or sends launch's executable to a host. Further ones wait.
const MAX_HANDSHAKES: usize = 64;
/// The pause after the agent has failed to accept a connection, for example because no file
/// descriptor is free.
const FAILED_ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts the connections of agents that want to reach the controller through this agent, below it
/// in the tree of agents. The task ends with the runtime.
pub(super) struct ChildListener {
    addresses: Vec<SocketAddr>,
    state: Arc<ListenerState>,
}

/// The values from which this agent decides whether another agent may reach the controller through
/// it, such as the number of agents that already do so.
struct ListenerState {
    /// Whether the node has a way to the controller and accepts agents.
    is_connected: AtomicBool,
    /// The number of agents that are connected with the node.
    children: AtomicUsize,
    max_children: usize,
    key: HandshakeKey,
    fetch_token: String,
}

impl ChildListener {
    /// Opens a port at the addresses of this host, and starts to accept agents that have the key of
    /// the job and want to reach the controller through this agent. Sends their connections to
    /// `accepted`.
    pub(super) fn open(
        setup: &TreeSetup,
        accepted: mpsc::Sender<NeighbourLink>,
    ) -> io::Result<ChildListener> {
        let (mut ips, _) =
            sort_and_limit_addresses(find_reachable_addresses(&setup.interface, list_interface_addresses()));
        if ips.iter().any(|ip| !ip.is_loopback()) {
            // On another host, a loopback address would be that of another agent.
            ips.retain(|ip| !ip.is_loopback());
        }
        let (listeners, addresses) = open_listeners(&ips, setup.ports, setup.max_children as usize)?;
        let state = Arc::new(ListenerState {
            is_connected: AtomicBool::new(false),
            children: AtomicUsize::new(0),
            max_children: setup.max_children as usize,
            key: HandshakeKey::from_job_key(&setup.key),
            fetch_token: setup.fetch_token.clone(),
        });
        tokio::spawn(accept_children(listeners, state.clone(), accepted));
        Ok(ChildListener { addresses, state })
    }

    /// Returns the addresses of this agent at which other agents can connect in order to reach the
    /// controller through it.
    pub(super) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Records whether this agent can reach the controller, which is the condition for accepting
    /// agents that want to reach the controller through it.
    pub(super) fn set_connected(&self, is_connected: bool) {
        self.state.is_connected.store(is_connected, Ordering::Relaxed);
    }

    /// Sets how many agents are connected below this one in the tree, because the agent accepts
    /// only a limited number.
    pub(super) fn set_child_count(&self, count: usize) {
        self.state.children.store(count, Ordering::Relaxed);
    }
}

/// Accepts, in an endless loop, connections of agents that want to reach the controller through
/// this agent and of hosts that request launch's executable.
async fn accept_children(
    mut listeners: Vec<TcpListener>,
    state: Arc<ListenerState>,
    accepted: mpsc::Sender<NeighbourLink>,
) {
    let limit = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let Ok(permit) = limit.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = accept_next(&mut listeners).await else {
            sleep(FAILED_ACCEPT_PAUSE).await;
            continue;
        };
        let (state, accepted) = (state.clone(), accepted.clone());
        tokio::spawn(async move {
            match timeout(HANDSHAKE_TIMEOUT, executable_server::is_fetch_request(&stream)).await {
                Ok(Ok(true)) => executable_server::send_executable(stream, &state.fetch_token).await,
                Ok(Ok(false)) => {
                    let handshake = timeout(HANDSHAKE_TIMEOUT, accept_child(stream, &state)).await;
                    if let Ok(Ok(Some(link))) = handshake {
                        // An error means that the node ends.
                        _ = accepted.send(link).await;
                    }
                }
                // The other side has closed the connection, or sends nothing.
                Ok(Err(_)) | Err(_) => {}
            }
            drop(permit);
        });
    }
}

/// Authenticates an agent that wants to reach the controller through this agent, and decides
/// whether to accept it. Returns `None` if the node accepts no agents, after the agent was
/// informed.
async fn accept_child(
    stream: TcpStream,
    state: &ListenerState,
) -> Result<Option<NeighbourLink>, HandshakeError> {
    stream.set_nodelay(true)?;
    let (stream, name) = authenticate_agent(stream, &state.key).await?;
    let (input, mut output) = stream.into_halves(TcpStream::into_split);
    let has_space = state.children.load(Ordering::Relaxed) < state.max_children;
    if !state.is_connected.load(Ordering::Relaxed) || !has_space {
        tracing::debug!(target: "tree", name, "rejected an agent");
        let frame = encode_frame(&TreeFrame::Leave).map_err(io::Error::other)?;
        output.write_all(&frame).await?;
        output.shutdown().await?;
        return Ok(None);
    }
    tracing::debug!(target: "tree", name, "accepted an agent");
    state.children.fetch_add(1, Ordering::Relaxed);
    Ok(Some(NeighbourLink { input, output }))
}
