//! Connects an agent to its controller over TCP.
//!
//! A scheduler may mix the output of all agents, so that the standard streams of an agent cannot
//! carry the control connection.
use crate::{
    cluster,
    connection::{
        EncryptedStream,
        handshake::{
            HANDSHAKE_TIMEOUT, HandshakeError, Invitation, VerifiedControllerStream, authenticate_controller,
        },
    },
};
use diagnostic::{Diagnostic, codes::host};
use std::{fs, io, net::SocketAddr, time::Duration};
use tokio::{net::TcpStream, task::JoinSet, time::sleep, time::timeout};

/// The delay between the starts of the agent's parallel attempts to connect to the addresses of the
/// controller (RFC 8305).
const NEXT_ADDRESS_DELAY: Duration = Duration::from_millis(200);
/// The time limit of the agent's TCP connection attempt to one address of the controller.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects this agent to the controller at the addresses in the invitation, a line that the
/// controller has sent to the agent's stdin. Returns the control connection as soon as the
/// controller has proved at one address that it has the job's key. Fails if no address succeeds.
pub(super) async fn connect_back(invitation: &Invitation) -> diagnostic::Result<EncryptedStream<TcpStream>> {
    race_controller_addresses(invitation, &cluster::read_host_name()).await
}

/// Tries to connect to all addresses of the controller in parallel, with a short delay between the
/// starts, and returns the first connection that succeeds. On this connection, the controller has
/// proved that it has the job's key. Drops the other connections. Fails if no address succeeds.
/// `name` is the name of this host.
async fn race_controller_addresses(
    invitation: &Invitation,
    name: &str,
) -> diagnostic::Result<EncryptedStream<TcpStream>> {
    let mut attempts = JoinSet::new();
    for (i, address) in invitation.addresses.iter().copied().enumerate() {
        let (key, name) = (invitation.key.clone(), name.to_owned());
        attempts.spawn(async move {
            sleep(NEXT_ADDRESS_DELAY * i as u32).await;
            let attempt = async {
                let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(address))
                    .await
                    .map_err(io::Error::from)??;
                stream.set_nodelay(true)?;
                timeout(HANDSHAKE_TIMEOUT, authenticate_controller(stream, &key, &name))
                    .await
                    .unwrap_or(Err(HandshakeError::Timeout))
            };
            attempt.await.map_err(|error| (address, error))
        });
    }
    let mut failures: Vec<(SocketAddr, HandshakeError)> = Vec::new();
    while let Some(finished) = attempts.join_next().await {
        match finished {
            // The other connections are dropped without a confirmation.
            Ok(Ok(verified)) => return Ok(VerifiedControllerStream::send_proof_of_key(verified).await?),
            Ok(Err(failure)) => failures.push(failure),
            Err(error) => {
                return Err(Diagnostic::error(
                    host::AGENT_START_FAILED,
                    "the connection to the controller failed",
                )
                .with_cause(&error));
            }
        }
    }
    let addresses: Vec<String> = failures.iter().map(|(address, _)| address.to_string()).collect();
    let reasons: Vec<String> =
        failures.iter().map(|(address, error)| format!("{address}: {error}")).collect();
    Err(Diagnostic::error(
        host::AGENT_CONTROLLER_UNREACHABLE,
        format!("{name} cannot connect to the controller at any of its addresses ({})", reasons.join("; ")),
    )
    .with_subject(name)
    .with_field("addresses", addresses)
    .with_help("check that no firewall blocks TCP connections between the nodes"))
}

/// Removes the executable file of this process, which was copied to the host only to start this
/// agent. Ignores errors.
///
/// Workers do not need the file, because they are started from `/proc/self/exe`.
pub(super) fn remove_own_executable() {
    if let Ok(file) = fs::read_link("/proc/self/exe") {
        // If the removal fails, the remaining file does no harm.
        _ = fs::remove_file(file);
    }
}
