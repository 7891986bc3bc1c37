//! Connects an agent of the tree to another one, which passes on its stream.
use super::neighbour_link::NeighbourLink;
use crate::connection::{
    FrameError,
    handshake::{HANDSHAKE_TIMEOUT, HandshakeError, HandshakeKey, authenticate_controller},
    read_short_frame,
    tree::{MAX_TREE_FRAME_BYTES, StreamId, TreeFrame, TreeParent, TreeSetup},
};
use diagnostic::{Diagnostic, codes::host};
use std::{io, net::SocketAddr, time::Duration};
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

/// The delay between the starts of connection attempts to two agents, or to two addresses of one
/// agent (RFC 8305).
const ATTEMPT_DELAY: Duration = Duration::from_millis(200);
/// The time limit of one attempt to connect to an agent.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before all agents are tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Connects an agent to the first of its possible neighbours that accepts it. Fails if none
/// does.
pub(super) async fn connect_to_parent(setup: &TreeSetup) -> diagnostic::Result<NeighbourLink> {
    try_parents(setup).await.map_err(|failures| build_error(setup, &failures))
}

/// Connects an agent whose link has ended to one of its possible neighbours. Tries them repeatedly,
/// for the time that the controller has set.
pub(super) async fn reconnect(setup: &TreeSetup) -> diagnostic::Result<NeighbourLink> {
    let limit = Duration::from_millis(setup.reconnect_ms);
    let deadline = Instant::now() + limit;
    let mut failures = vec!["no answer".to_owned()];
    while let Some(remaining) = deadline.checked_duration_since(Instant::now()) {
        match timeout(remaining, try_parents(setup)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(found)) => failures = found,
            Err(_) => break,
        }
        sleep(RETRY_PAUSE).await;
    }
    Err(build_error(setup, &failures))
}

/// Tries to connect to all possible neighbours, each a bit later than the one before. Returns the
/// first connection that is accepted. Fails with one text for each failure.
async fn try_parents(setup: &TreeSetup) -> Result<NeighbourLink, Vec<String>> {
    let mut attempts = JoinSet::new();
    let mut delay = Duration::ZERO;
    for TreeParent { stream, addresses } in &setup.parents {
        for address in addresses {
            let (stream, address) = (*stream, *address);
            let (key, name) = (HandshakeKey::from_job_key(&setup.key), setup.host.clone());
            attempts.spawn(async move {
                sleep(delay).await;
                let attempt = timeout(ATTEMPT_TIMEOUT, try_address(stream, address, &key, &name)).await;
                attempt.unwrap_or(Err(HandshakeError::Timeout)).map_err(|error| format!("{address}: {error}"))
            });
            delay += ATTEMPT_DELAY;
        }
    }
    let mut failures = Vec::new();
    while let Some(finished) = attempts.join_next().await {
        match finished {
            // The other attempts end when the set is dropped.
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(failure)) => failures.push(failure),
            Err(error) => failures.push(error.to_string()),
        }
    }
    Err(failures)
}

/// Connects to the agent at the end of a stream. Fails if another process answers, or if the agent
/// does not accept the connection.
async fn try_address(
    stream: StreamId,
    address: SocketAddr,
    key: &HandshakeKey,
    name: &str,
) -> Result<NeighbourLink, HandshakeError> {
    let socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    let verified = timeout(HANDSHAKE_TIMEOUT, authenticate_controller(socket, key, name))
        .await
        .unwrap_or(Err(HandshakeError::Timeout))?;
    let (mut input, output) = verified.confirm().await?.into_halves(TcpStream::into_split);
    let first: Result<Option<TreeFrame>, FrameError> =
        read_short_frame(&mut input, MAX_TREE_FRAME_BYTES).await;
    match first.map_err(io::Error::other)? {
        Some(TreeFrame::Welcome { stream: other }) if other == stream => Ok(NeighbourLink { input, output }),
        Some(TreeFrame::Welcome { .. }) => {
            Err(io::Error::other("another agent of the job answers at this address").into())
        }
        _ => Err(io::Error::other("the agent is about to end or has too many neighbours").into()),
    }
}

/// Builds the error of an agent that no other agent accepts.
fn build_error(setup: &TreeSetup, failures: &[String]) -> Diagnostic {
    let name = &setup.host;
    Diagnostic::error(
        host::TREE_PARENT_UNREACHABLE,
        format!("host {name} cannot connect to another host of the job ({})", failures.join("; ")),
    )
    .with_subject(name)
    .with_field(
        "addresses",
        setup
            .parents
            .iter()
            .flat_map(|parent| &parent.addresses)
            .map(ToString::to_string)
            .collect::<Vec<_>>(),
    )
    .with_remedy()
}
