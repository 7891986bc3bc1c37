//! Connects this node to node 0, whose launch process controls the run, and asks to join the run.
use crate::{
    cluster::pending_agent::{AgentReader, AgentWriter},
    connection::{
        encode_frame,
        handshake::{HANDSHAKE_TIMEOUT, HandshakeError, HandshakeKey, authenticate_controller},
        read_frame, set_control_options,
    },
};
use diagnostic::{Diagnostic, codes::host};
use jobspec::hosts::RendezvousAddress;
use protocol::control::{JoinAnswer, JoinRequest};
use std::{io, net::SocketAddr, time::Duration};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpStream, lookup_host},
    time::timeout,
};

/// The time limit for resolving the host name of the rendezvous address, at which node 0 listens.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of one attempt to connect to node 0 over TCP.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// What a node needs to join a run: the address of node 0, the key that all nodes share, and the
/// request to send to node 0.
pub(super) struct JoinTarget {
    pub(super) address: RendezvousAddress,
    pub(super) key: HandshakeKey,
    pub(super) request: JoinRequest,
}

/// The connection of this node to node 0 after node 0 has accepted this node, and the node rank
/// that node 0 has assigned.
pub(super) struct JoinedNode {
    pub(super) node_rank: u32,
    pub(super) reader: AgentReader,
    pub(super) writer: AgentWriter,
}

/// The reason why an attempt to join the run of node 0 failed.
#[derive(Debug)]
pub(super) enum JoinAttemptError {
    /// Node 0 does not accept this node, or has another key. A further attempt would fail again.
    Rejected(Diagnostic),
    /// Node 0 does not answer. A further attempt may succeed.
    Unreachable(String),
}

impl From<io::Error> for JoinAttemptError {
    fn from(error: io::Error) -> JoinAttemptError {
        JoinAttemptError::Unreachable(error.to_string())
    }
}

/// Connects to the first address of node 0 that answers, and asks node 0 to let this node join the
/// run. Waits for the decision of node 0 without a time limit.
pub(super) async fn try_join_once(target: &JoinTarget) -> Result<JoinedNode, JoinAttemptError> {
    let RendezvousAddress { host: name, port } = &target.address;
    let resolved = timeout(RESOLVE_TIMEOUT, lookup_host((name.as_str(), *port))).await;
    let resolved = resolved
        .map_err(|_| JoinAttemptError::Unreachable(format!("no answer to the DNS query for {name}")))?;
    let addresses: Vec<SocketAddr> =
        resolved.map_err(|error| JoinAttemptError::Unreachable(error.to_string()))?.collect();
    let mut last = JoinAttemptError::Unreachable(format!("{name} has no address"));
    for address in addresses {
        match join_at_address(address, target).await {
            Err(JoinAttemptError::Unreachable(reason)) => {
                last = JoinAttemptError::Unreachable(format!("{address}: {reason}"))
            }
            result => return result,
        }
    }
    Err(last)
}

/// Connects to node 0 at `address`, proves that this node has the key that the nodes share, and
/// asks to join the run.
async fn join_at_address(address: SocketAddr, target: &JoinTarget) -> Result<JoinedNode, JoinAttemptError> {
    let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await.map_err(io::Error::from)??;
    set_control_options(&stream)?;
    let name = &target.request.host;
    let handshake =
        async { authenticate_controller(stream, &target.key, name).await?.send_proof_of_key().await };
    let stream = match timeout(HANDSHAKE_TIMEOUT, handshake).await {
        Err(_) => return Err(JoinAttemptError::Unreachable(HandshakeError::Timeout.to_string())),
        Ok(Err(HandshakeError::WrongKey(_))) => {
            let message = format!("node 0 at {} has another key", target.address);
            return Err(JoinAttemptError::Rejected(
                Diagnostic::error(host::JOIN_REJECTED, message)
                    .with_subject(target.address.to_string())
                    .with_help("give all nodes the same key file, or `--insecure`; another job at the address has another key"),
            ));
        }
        Ok(Err(error)) => return Err(JoinAttemptError::Unreachable(error.to_string())),
        Ok(Ok(stream)) => stream,
    };
    let (mut reader, mut writer) = stream.into_halves(TcpStream::into_split);
    let frame =
        encode_frame(&target.request).map_err(|error| JoinAttemptError::Unreachable(error.to_string()))?;
    writer.write_all(&frame).await?;
    writer.flush().await?;
    match read_frame(&mut reader).await {
        Ok(Some(JoinAnswer::Accepted { node_rank })) => Ok(JoinedNode { node_rank, reader, writer }),
        Ok(Some(JoinAnswer::Rejected(error))) => Err(JoinAttemptError::Rejected(error)),
        Ok(None) => Err(JoinAttemptError::Unreachable("node 0 closed the connection".to_owned())),
        Err(error) => Err(JoinAttemptError::Unreachable(error.to_string())),
    }
}
