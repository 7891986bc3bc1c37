//! Accepts the TCP connections of the agents of a Slurm step. Accepts one agent for each node, and
//! only agents that hold the key of the step's invitation.
use super::{pending_agent::AgentConnectionSlot, step::SlurmStep};
use crate::connection::handshake::{HANDSHAKE_TIMEOUT, HandshakeError, HandshakeKey, authenticate_agent};
use protocol::control::MAX_ADDRESSES;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};

/// The largest number of simultaneous unauthenticated connections, in addition to one for each
/// host. Further connections are closed immediately.
const MAX_UNAUTHENTICATED_CONNECTIONS: usize = 64;
/// The largest number of connections that the kernel queues until this process accepts them.
const MAX_BACKLOG: u32 = 4096;
/// The pause after a failed accept (for example because no file descriptor is free). Also the
/// interval at which nodes are checked for failed tasks.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Opens a TCP listener at all IPv4 addresses of this machine and any free port. `agents` is the
/// number of agents that will connect. Returns the listener and its port.
pub(super) fn open_listener(agents: usize) -> io::Result<(TcpListener, u16)> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))?;
    let listener = socket.listen(MAX_BACKLOG.min(128 + agents as u32))?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Accepts connections of agents until every slot is filled or closed, or srun has ended. Closes
/// the slots of nodes whose task has failed and, at the end, all slots that are not filled.
pub(super) async fn accept_agents(
    listener: TcpListener,
    key: HandshakeKey,
    slots: Vec<AgentConnectionSlot>,
    step: Arc<SlurmStep>,
) {
    let permits = Arc::new(Semaphore::new(slots.len() + MAX_UNAUTHENTICATED_CONNECTIONS));
    let slots = Arc::new(slots);
    let mut step_exit = step.watch_exit();
    while slots.iter().any(AgentConnectionSlot::is_waiting) {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = step_exit.wait_for(Option::is_some) => break,
            // A slot may have been filled meanwhile, and agents that failed never connect.
            () = sleep(RETRY_INTERVAL) => {
                let failed = |slot: &&AgentConnectionSlot| slot.is_waiting() && step.has_failed_on(&slot.name);
                slots.iter().filter(failed).for_each(AgentConnectionSlot::close);
                continue;
            }
        };
        let (Ok((stream, _)), Ok(permit)) = (accepted, permits.clone().try_acquire_owned()) else {
            sleep(RETRY_INTERVAL).await;
            continue;
        };
        let (key, slots) = (key.clone(), slots.clone());
        tokio::spawn(async move {
            // A connection that fails is closed without a message. The agent reports the failure.
            _ = timeout(HANDSHAKE_TIMEOUT, accept_agent(stream, &key, &slots)).await;
            drop(permit);
        });
    }
    slots.iter().for_each(AgentConnectionSlot::close);
}

/// Authenticates an agent and fills the slot of its node with the connection. Drops the connection
/// if no slot waits for the agent. Fails if the handshake fails.
async fn accept_agent(
    mut stream: TcpStream,
    key: &HandshakeKey,
    slots: &[AgentConnectionSlot],
) -> Result<(), HandshakeError> {
    stream.set_nodelay(true)?;
    let name = authenticate_agent(&mut stream, key).await?;
    if let Some(slot) = slots.iter().find(|slot| slot.name == name) {
        slot.fill(stream)?;
    }
    Ok(())
}

/// Sorts addresses of this machine by how likely agents on other nodes reach them, and removes
/// duplicates: first global and private addresses, then link-local ones, then loopback. IPv4 comes
/// before IPv6.
///
/// Returns the first [`MAX_ADDRESSES`] addresses, which fit into an invitation, and the others.
pub(super) fn select_addresses(addresses: Vec<IpAddr>) -> (Vec<IpAddr>, Vec<IpAddr>) {
    let mut selected: Vec<IpAddr> = Vec::new();
    for address in addresses {
        if !selected.contains(&address) {
            selected.push(address);
        }
    }
    let is_link_local = |address: &IpAddr| match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    selected.sort_by_key(|address| (address.is_loopback(), is_link_local(address), address.is_ipv6()));
    let omitted = selected.split_off(selected.len().min(MAX_ADDRESSES));
    (selected, omitted)
}

/// Formats the warning that the agents do not try the addresses `omitted`.
pub(super) fn format_omitted_addresses(omitted: &[IpAddr]) -> String {
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
    fn addresses_that_other_nodes_reach_come_first() {
        let parse = |texts: &[&str]| -> Vec<IpAddr> {
            texts.iter().map(|text| text.parse().expect("an address")).collect()
        };
        let addresses = parse(&["127.0.0.1", "fe80::1", "169.254.3.4", "fd00::1", "10.0.0.1", "10.0.0.1"]);
        let sorted = parse(&["10.0.0.1", "fd00::1", "169.254.3.4", "fe80::1", "127.0.0.1"]);
        assert_eq!(select_addresses(addresses), (sorted, Vec::new()));
        let link_local = parse(&["169.254.3.4"]);
        let global: Vec<IpAddr> = (1..=MAX_ADDRESSES as u8).map(|i| IpAddr::from([10, 0, 0, i])).collect();
        let addresses = [link_local.clone(), global.clone()].concat();
        assert_eq!(select_addresses(addresses), (global, link_local.clone()));
        insta::assert_snapshot!("omitted_addresses", format_omitted_addresses(&link_local));
    }
}
