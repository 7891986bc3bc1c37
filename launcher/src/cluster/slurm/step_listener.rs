//! Accepts the TCP connections of the agents that a Slurm step (`srun`) has started, one agent for
//! each node. Accepts one agent for each node, and only agents that hold the key of the step's
//! invitation.
use super::srun_process::SrunProcess;
use crate::{
    cluster::{
        pending_agent::{AgentConnection, AgentConnectionSlot},
        unauthenticated_connections::UnauthenticatedConnections,
    },
    connection::{
        handshake::{HANDSHAKE_TIMEOUT, HandshakeError, HandshakeKey, authenticate_agent},
        listeners::accept_next,
    },
    warning_limit::WarningLimit,
};
use diagnostic::quantity::format_count;
use protocol::control::MAX_ADDRESSES;
use std::{
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

/// The pause before the listener repeats a failed accept, and between two checks for nodes on which
/// the agent's task has failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Accepts the TCP connections of the agents in a Slurm step, until each agent has connected or has
/// failed on its node. Closes the slots of nodes whose task has failed and, at the end, all slots
/// that are not filled.
pub(super) async fn accept_agents(
    mut listeners: Vec<TcpListener>,
    key: HandshakeKey,
    slots: Vec<AgentConnectionSlot>,
    step: Arc<SrunProcess>,
) {
    let mut handshakes = UnauthenticatedConnections::new(slots.len());
    let slots = Arc::new(slots);
    let warnings = Arc::new(RejectionWarnings { step: step.clone(), limit: Mutex::default() });
    let mut step_exit = step.exit_receiver();
    while slots.iter().any(AgentConnectionSlot::is_waiting) {
        let accepted = tokio::select! {
            accepted = accept_next(&mut listeners) => accepted,
            _ = step_exit.wait_for(Option::is_some) => break,
            // A slot may have been filled meanwhile, and agents that failed never connect.
            () = sleep(RETRY_INTERVAL) => {
                let failed = |slot: &&AgentConnectionSlot| slot.is_waiting() && step.has_task_failed_on(&slot.name);
                slots.iter().filter(failed).for_each(AgentConnectionSlot::stop_waiting);
                continue;
            }
        };
        let Ok((stream, peer)) = accepted else {
            sleep(RETRY_INTERVAL).await;
            continue;
        };
        if let Some(closed) = handshakes.close_one_if_full(peer.ip()) {
            warnings
                .warn_about_rejected_peer(closed, "too many connections from there have not proved the key");
        }
        let (key, slots, warnings) = (key.clone(), slots.clone(), warnings.clone());
        let handshake = tokio::spawn(async move {
            let accepted =
                timeout(HANDSHAKE_TIMEOUT, authenticate_and_connect_agent(stream, &key, &slots)).await;
            match accepted.unwrap_or(Err(HandshakeError::Timeout)) {
                // An agent tries several addresses, and closes all connections but one.
                Ok(()) | Err(HandshakeError::Io(_)) => {}
                Err(error) => warnings.warn_about_rejected_peer(peer.ip(), &error.to_string()),
            }
        });
        handshakes.add_connection(peer.ip(), handshake.abort_handle());
    }
    slots.iter().for_each(AgentConnectionSlot::stop_waiting);
}

/// Warns the user about connections that were closed because they do not come from an agent of the
/// Slurm step.
struct RejectionWarnings {
    step: Arc<SrunProcess>,
    limit: Mutex<WarningLimit>,
}

impl RejectionWarnings {
    /// Warns the user about a rejected connection from the address `peer`, at most once a minute
    /// for each address.
    fn warn_about_rejected_peer(&self, peer: IpAddr, reason: &str) {
        let mut limit = self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        let text = format!("launch: closed a connection from {peer} to the port of the agents: {reason}");
        match limit.admit_warning(peer, Instant::now()) {
            None => {}
            Some(0) => self.step.add_warning_to_output(text),
            Some(n) => {
                self.step.add_warning_to_output(format!(
                    "{text} ({} omitted)",
                    format_count(n, "similar message")
                ));
            }
        }
    }
}

/// Authenticates an agent of the Slurm step that has opened a TCP connection, and hands the
/// connection to the controller. Drops the connection if no slot waits for the agent. Fails if the
/// handshake fails.
async fn authenticate_and_connect_agent(
    stream: TcpStream,
    key: &HandshakeKey,
    slots: &[AgentConnectionSlot],
) -> Result<(), HandshakeError> {
    stream.set_nodelay(true)?;
    let (stream, name) = authenticate_agent(stream, key).await?;
    if let Some(slot) = slots.iter().find(|slot| slot.name == name) {
        slot.connect(AgentConnection::new(stream)?);
    }
    Ok(())
}

/// Formats a warning that agents do not try the addresses `omitted` of this machine, because the
/// machine has more addresses than agents try.
pub(super) fn format_omitted_addresses_warning(omitted: &[IpAddr]) -> String {
    let list: Vec<String> = omitted.iter().map(IpAddr::to_string).collect();
    format!(
        "launch: this machine has {} addresses; agents try {MAX_ADDRESSES} of them, and do not try {}\n",
        MAX_ADDRESSES + omitted.len(),
        list.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_names_the_addresses_that_agents_do_not_try() {
        let link_local: Vec<IpAddr> = vec!["169.254.3.4".parse().expect("an address")];
        insta::assert_snapshot!("omitted_addresses", format_omitted_addresses_warning(&link_local));
    }
}
