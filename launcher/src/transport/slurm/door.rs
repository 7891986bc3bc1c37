//! Where agents connect: a listener that lets in who has the key, one for each host.
use super::{step::Step, stream::Taker};
use crate::link::join::{EXCHANGE, Key, admit};
use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};
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

/// Connections that have not shown the key, beyond one for each host; more are closed at once.
const STRANGERS: usize = 64;
/// Longest queue of connections that are not yet accepted.
const BACKLOG: u32 = 4096;
/// After an error of accept (no descriptors left) before the next.
const PAUSE: Duration = Duration::from_millis(50);

/// A listener for this many agents, and its port.
pub(super) fn listen(agents: usize) -> io::Result<(TcpListener, u16)> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))?;
    let listener = socket.listen(BACKLOG.min(128 + agents as u32))?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Lets agents in until each host's is here, or srun has ended.
pub(super) async fn keep(listener: TcpListener, key: Key, takers: Vec<Taker>, step: Arc<Step>) {
    let strangers = Arc::new(Semaphore::new(takers.len() + STRANGERS));
    let takers = Arc::new(takers);
    let mut fate = step.fate();
    while takers.iter().any(Taker::free) {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = fate.wait_for(Option::is_some) => break,
            // Somebody may have been let in meanwhile, and others won't come.
            () = sleep(PAUSE) => {
                takers.iter().filter(|taker| taker.free() && step.is_over(&taker.name)).for_each(Taker::close);
                continue;
            }
        };
        let (Ok((stream, _)), Ok(permit)) = (stream, strangers.clone().try_acquire_owned()) else {
            sleep(PAUSE).await;
            continue;
        };
        let (key, takers) = (key.clone(), takers.clone());
        tokio::spawn(async move {
            // Whoever fails is closed without a word: an agent tells its own side of it.
            _ = timeout(EXCHANGE, welcome(stream, &key, &takers)).await;
            drop(permit);
        });
    }
    takers.iter().for_each(Taker::close);
}

async fn welcome(mut stream: TcpStream, key: &Key, takers: &[Taker]) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let name = admit(&mut stream, key).await?;
    if let Some(taker) = takers.iter().find(|taker| taker.name == name) {
        taker.take(stream)?;
    }
    Ok(())
}

/// The numeric IPv4 addresses of this machine that others may reach.
pub(super) fn own_addresses() -> Vec<IpAddr> {
    let up = |flags: InterfaceFlags| {
        flags.contains(InterfaceFlags::IFF_UP) && !flags.contains(InterfaceFlags::IFF_LOOPBACK)
    };
    let interfaces = getifaddrs().into_iter().flatten().filter(|i| up(i.flags));
    let mut addresses: Vec<IpAddr> =
        interfaces.filter_map(|i| Some(IpAddr::V4(i.address?.as_sockaddr_in()?.ip()))).collect();
    addresses.dedup();
    addresses
}
