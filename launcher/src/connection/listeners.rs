//! Opens the TCP listeners at which a process accepts the control connections of agents.
use jobspec::PortSelection;
use std::{
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr},
    task::Poll,
};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// The largest number of TCP connections that the kernel queues until this process accepts them.
const MAX_BACKLOG: u32 = 4096;

/// Opens a TCP listener for agents at each IP address in `addresses`, on the first free port that
/// `ports` permits. `agents` is the number of agents that will connect. Returns the listeners and
/// their addresses.
pub(crate) fn open_listeners(
    addresses: &[IpAddr],
    ports: PortSelection,
    agents: usize,
) -> io::Result<(Vec<TcpListener>, Vec<SocketAddr>)> {
    let open = |address: &IpAddr| {
        let listener =
            ports.bind_first_free_port(|port| open_listener(SocketAddr::new(*address, port), agents))?;
        let local = listener.local_addr()?;
        Ok((listener, local))
    };
    addresses.iter().map(open).collect()
}

/// Opens a TCP listener at `address`, with a queue large enough for all `agents` agents of the job
/// to connect at the same time. Port 0 stands for any free port. The function must be called within
/// a runtime.
fn open_listener(address: SocketAddr, agents: usize) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if address.port() != 0 {
        // Connections of an earlier run may still be closing.
        socket.set_reuseaddr(true)?;
    }
    socket.bind(address)?;
    socket.listen(MAX_BACKLOG.min(128 + agents as u32))
}

/// Accepts the next connection at any of several TCP listeners. The listeners take turns.
pub(crate) async fn accept_next(listeners: &mut [TcpListener]) -> io::Result<(TcpStream, SocketAddr)> {
    let accepted = poll_fn(|cx| {
        let ready = listeners.iter().map(|listener| listener.poll_accept(cx)).find(Poll::is_ready);
        ready.unwrap_or(Poll::Pending)
    })
    .await;
    listeners.rotate_left(1);
    accepted
}
