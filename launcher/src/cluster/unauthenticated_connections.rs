//! [`UnauthenticatedConnections`]: limits the number of connections from peers that have not yet
//! proved that they hold the job's key.
use std::{collections::VecDeque, net::IpAddr};
use tokio::task::AbortHandle;

/// The largest number of simultaneous connections from one address whose other side has not yet
/// proved that it has the job's key. An agent opens fewer.
const MAX_CONNECTIONS_PER_ADDRESS: usize = 2 * protocol::control::MAX_ADDRESSES;
/// The largest number of simultaneous connections whose other side has not yet proved that it has
/// the job's key, in addition to one for each agent.
const MAX_UNAUTHENTICATED_CONNECTIONS: usize = 256;

/// The open connections whose other side has not yet proved that it has the job's key, with the
/// tasks that perform the handshakes.
///
/// A new connection always gets a place. If its address or the listener has no place left, an older
/// connection is closed: the oldest one of the address with the most connections. Idle connections
/// from one address therefore cannot keep out an agent at another address.
pub(super) struct UnauthenticatedConnections {
    /// The addresses and the tasks of the connections, from the oldest to the latest.
    connections: VecDeque<(IpAddr, AbortHandle)>,
    limit: usize,
}

impl UnauthenticatedConnections {
    /// Creates an empty set of unauthenticated connections, with a limit of `agents` plus
    /// [`MAX_UNAUTHENTICATED_CONNECTIONS`] connections.
    pub(super) fn new(agents: usize) -> UnauthenticatedConnections {
        UnauthenticatedConnections {
            connections: VecDeque::new(),
            limit: agents + MAX_UNAUTHENTICATED_CONNECTIONS,
        }
    }

    /// Closes the oldest unauthenticated connection from one address if a new connection from
    /// `peer` would exceed the limit per address or in total. Returns the address of the closed
    /// connection.
    pub(super) fn close_one_if_full(&mut self, peer: IpAddr) -> Option<IpAddr> {
        self.connections.retain(|(_, task)| !task.is_finished());
        let address = if self.count_connections_from(peer) >= MAX_CONNECTIONS_PER_ADDRESS {
            peer
        } else if self.connections.len() >= self.limit {
            self.connections
                .iter()
                .map(|(address, _)| *address)
                .max_by_key(|address| self.count_connections_from(*address))?
        } else {
            return None;
        };
        let oldest = self.connections.iter().position(|(other, _)| *other == address)?;
        self.connections.remove(oldest)?.1.abort();
        Some(address)
    }

    /// Adds an unauthenticated connection from the address `peer`, for which the task `task`
    /// performs the handshake.
    pub(super) fn add_connection(&mut self, peer: IpAddr, task: AbortHandle) {
        self.connections.push_back((peer, task));
    }

    /// Returns the number of unauthenticated connections from an address.
    fn count_connections_from(&self, address: IpAddr) -> usize {
        self.connections.iter().filter(|(other, _)| *other == address).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn idle_connections_do_not_displace_those_of_other_addresses() {
        let mut handshakes = UnauthenticatedConnections::new(1);
        let connect = |handshakes: &mut UnauthenticatedConnections, address: IpAddr| {
            let closed = handshakes.close_one_if_full(address);
            let task = tokio::spawn(std::future::pending::<()>());
            handshakes.add_connection(address, task.abort_handle());
            (closed, task)
        };
        let agent = IpAddr::from([10, 0, 0, 1]);
        let (closed, agent_task) = connect(&mut handshakes, agent);
        assert_eq!(closed, None);
        let idle = IpAddr::from([10, 0, 0, 2]);
        let (_, oldest) = connect(&mut handshakes, idle);
        for count in 2..=3 * MAX_CONNECTIONS_PER_ADDRESS {
            let (closed, _) = connect(&mut handshakes, idle);
            assert_eq!(closed, (count > MAX_CONNECTIONS_PER_ADDRESS).then_some(idle));
            tokio::task::yield_now().await;
        }
        assert!(oldest.is_finished() && !agent_task.is_finished());
        for host in 0..=255 {
            for _ in 0..3 {
                connect(&mut handshakes, IpAddr::from([10, 0, 1, host]));
                tokio::task::yield_now().await;
            }
        }
        assert!(!agent_task.is_finished(), "an agent that connected once keeps its place");
        assert!(handshakes.connections.len() <= handshakes.limit);
    }
}
