//! [`BoundRendezvous`]: the TCP port `MASTER_PORT` at which the workers of a job find each other,
//! bound before the workers start.
//!
//! The rendezvous is a store that launch serves for programs, or a port that is reserved for rank 0
//! until just before the workers start. The controller, or the agent on the host of rank 0, binds
//! the rendezvous.
mod store;

pub(crate) use store::{
    StoreServer, parse_answer as parse_socket_answer, untrusted::serve_untrusted_clients,
};

use crate::open_file_limit::raise_open_file_limit;
use diagnostic::{Diagnostic, codes::run};
use jobspec::PortSelection;
use protocol::control::RendezvousRequest;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener},
};
use tokio::sync::mpsc;

/// The largest number of attempts to find two consecutive free ports, one for the workers'
/// rendezvous and one for JAX's coordinator.
const MAX_PORT_PAIR_ATTEMPTS: usize = 16;

/// The TCP port at which the workers of a job find each other (`MASTER_PORT`), bound before the
/// workers start.
#[derive(Debug)]
pub(crate) struct BoundRendezvous {
    service: RendezvousService,
    /// The reserved port of JAX's coordinator; `None` if it is not requested or not free.
    coordinator: Option<TcpListener>,
}

/// What holds the port `MASTER_PORT`: a socket that reserves the port until rank 0 binds it, or
/// launch's own server for torch's `TCPStore` clients.
#[derive(Debug)]
enum RendezvousService {
    /// A port that is reserved for rank 0, and its number. Rank 0 will bind the port.
    Port(TcpListener, u16),
    /// A rendezvous store, which runs until the workers are started again or the run ends.
    Store(StoreServer),
}

impl RendezvousService {
    /// Binds the port `MASTER_PORT`, either to reserve it for rank 0 or to start launch's own
    /// server for torch's `TCPStore` clients.
    fn bind(bind: &RendezvousRequest, messages: &mpsc::Sender<String>) -> io::Result<RendezvousService> {
        if bind.store {
            let server = StoreServer::start(bind.address, bind.port, &bind.allowed, messages.clone())?;
            Ok(RendezvousService::Store(server))
        } else {
            let (listener, number) = reserve_port(bind.address, bind.port)?;
            Ok(RendezvousService::Port(listener, number))
        }
    }

    /// Returns the number of the bound rendezvous port.
    fn port(&self) -> u16 {
        match self {
            RendezvousService::Port(_, number) => *number,
            RendezvousService::Store(server) => server.port(),
        }
    }
}

impl BoundRendezvous {
    /// Binds the port `MASTER_PORT` before the workers start, to reserve it for rank 0 or to serve
    /// torch's `TCPStore` clients there. Also reserves the port of JAX's coordinator, if `bind`
    /// requests it and the port is free. The store sends lines for the user to `messages`. Fails if
    /// the port is taken, or if the store cannot serve that many clients.
    pub(crate) fn bind(
        bind: &RendezvousRequest,
        messages: &mpsc::Sender<String>,
    ) -> diagnostic::Result<BoundRendezvous> {
        if bind.store {
            StoreServer::check_capacity(bind.clients)?;
        }
        let mut failure = None;
        for bound in Self::bind_candidates(bind, messages) {
            match bound {
                Ok(bound) => return Ok(bound),
                Err(error) => failure = Some(error),
            }
        }
        let error = failure.unwrap_or_else(|| io::ErrorKind::AddrInUse.into());
        Err(build_port_error(bind, &error))
    }

    /// Returns an iterator that tries to bind the possible values of `MASTER_PORT` in turn, first
    /// with the next port for JAX's coordinator, then without. The iterator ends after a failure
    /// for which other ports do not help.
    fn bind_candidates(
        bind: &RendezvousRequest,
        messages: &mpsc::Sender<String>,
    ) -> impl Iterator<Item = io::Result<BoundRendezvous>> {
        let candidates = match (bind.port, bind.ports) {
            (0, PortSelection::Any) => vec![0; MAX_PORT_PAIR_ATTEMPTS],
            (0, range) => range.candidate_ports(),
            (port, _) => vec![port],
        };
        let passes: &[bool] = if bind.coordinator { &[true, false] } else { &[false] };
        let mut has_failed = false;
        let attempts =
            passes.iter().flat_map(move |with| candidates.clone().into_iter().map(move |p| (*with, p)));
        attempts.map_while(move |(with_coordinator, port)| {
            if has_failed {
                return None;
            }
            let bound = Self::bind_port(bind, port, with_coordinator, messages);
            has_failed = bound.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::AddrInUse);
            Some(bound)
        })
    }

    /// Binds the port at which workers find each other, which is `port` or, if `port` is 0, any
    /// free port. Fails if `with_coordinator` is set and the port of JAX's coordinator is not free
    /// or not among the ports of the job.
    fn bind_port(
        bind: &RendezvousRequest,
        port: u16,
        with_coordinator: bool,
        messages: &mpsc::Sender<String>,
    ) -> io::Result<BoundRendezvous> {
        let service = RendezvousService::bind(&RendezvousRequest { port, ..bind.clone() }, messages)?;
        if !with_coordinator {
            return Ok(BoundRendezvous { service, coordinator: None });
        }
        let port = RendezvousRequest::compute_jax_coordinator_port(service.port());
        if !bind.ports.contains(port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (coordinator, _) = reserve_port(bind.address, port).map_err(|_| io::ErrorKind::AddrInUse)?;
        Ok(BoundRendezvous { service, coordinator: Some(coordinator) })
    }

    /// Returns the number of the port to which workers connect (`MASTER_PORT`).
    pub(crate) fn port(&self) -> u16 {
        self.service.port()
    }

    /// Releases the reserved port `MASTER_PORT` just before the workers start, or returns the
    /// running server for torch's `TCPStore` clients at this port.
    ///
    /// Returns the number of the port, and the store if there is one. The caller must keep the
    /// store for as long as the workers run.
    pub(crate) fn hand_over_to_workers(self) -> (u16, Option<StoreServer>) {
        drop(self.coordinator);
        match self.service {
            RendezvousService::Port(listener, number) => {
                drop(listener);
                (number, None)
            }
            RendezvousService::Store(server) => {
                // If the limit stays low, late clients wait to be accepted, and the user is warned.
                _ = raise_open_file_limit();
                (server.port(), Some(server))
            }
        }
    }
}

/// Builds the error which reports that the rendezvous port of the workers cannot be bound.
fn build_port_error(bind: &RendezvousRequest, error: &io::Error) -> Diagnostic {
    let address = bind.address;
    let diagnostic = match bind.port {
        0 => Diagnostic::error(
            run::RENDEZVOUS_PORT_UNAVAILABLE,
            match bind.ports {
                PortSelection::Any => format!("cannot bind any TCP port on {address} for the rendezvous"),
                PortSelection::Range(first, last) => format!(
                    "cannot bind a TCP port from {first} to {last} (`cluster.ports`) on {address} for the rendezvous"
                ),
            },
        ),
        port => Diagnostic::error(
            run::RENDEZVOUS_PORT_UNAVAILABLE,
            format!("cannot bind TCP port {port} on {address} for the rendezvous (`cluster.master_port`)"),
        )
        .with_subject("cluster.master_port")
        .with_field("port", port)
        .with_help(
            "`ss -ltnp` shows which process uses the port; `cluster.master_port: auto` takes a free one",
        ),
    };
    diagnostic.with_field("address", address.to_string()).with_cause(error)
}

/// Reserves a TCP port by binding it without listening, so that no other process takes it before
/// the workers do. Accepts no connections. If `port` is 0, binds any free port at `address`.
/// Otherwise binds `port` at all addresses of this machine of the same family.
fn reserve_port(address: IpAddr, port: u16) -> io::Result<(TcpListener, u16)> {
    let listener = match port {
        0 => TcpListener::bind((address, 0)),
        number if address.is_ipv6() => TcpListener::bind((Ipv6Addr::UNSPECIFIED, number)),
        number => TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)),
    }?;
    let number = listener.local_addr()?.port();
    Ok((listener, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the first of two free ports in a row. They are below the ports that the kernel gives
    /// to other processes, and each test process begins its search elsewhere.
    fn find_free_pair() -> u16 {
        let is_free = |port: u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok();
        let first = 22_000 + (std::process::id() % 4_000) as u16 * 2;
        let mut pairs = (first..32_000).step_by(2).chain((22_000..first).step_by(2));
        pairs.find(|port| is_free(*port) && is_free(port + 1)).expect("two free ports")
    }

    /// Binds a rendezvous for one client at `port` of the loopback address: a store if `store` is
    /// set, and otherwise a reserved port.
    fn bind_for_one_client(port: u16, store: bool) -> diagnostic::Result<BoundRendezvous> {
        bind_for_clients(1, port, store)
    }

    /// Binds a rendezvous for this many clients at `port` of the loopback address: a store if
    /// `store` is set, and otherwise a reserved port.
    fn bind_for_clients(clients: u32, port: u16, store: bool) -> diagnostic::Result<BoundRendezvous> {
        let address = Ipv4Addr::LOCALHOST.into();
        let bind = RendezvousRequest {
            attempt: 0,
            address,
            port,
            store,
            clients,
            allowed: Vec::new(),
            coordinator: true,
            ports: PortSelection::Any,
        };
        BoundRendezvous::bind(&bind, &mpsc::channel(1).0)
    }

    /// Checks that the port of JAX's coordinator is held until the workers start, and that a job
    /// with a fixed port starts if it is taken.
    #[test]
    fn the_port_of_the_coordinator_is_held_for_rank_0() {
        let port = find_free_pair();
        for store in [false, true] {
            let bound = bind_for_one_client(port, store).expect("two ports");
            let is_free = || TcpListener::bind((Ipv4Addr::LOCALHOST, port + 1)).is_ok();
            assert!(!is_free());
            let _store = bound.hand_over_to_workers();
            assert!(is_free());
        }
        let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port + 1)).expect("a free port");
        let bound = bind_for_one_client(port, false).expect("the port of the rendezvous");
        assert!(bound.coordinator.is_none());
        assert_eq!(RendezvousRequest::compute_jax_coordinator_port(65_535), 65_534);
    }

    #[test]
    fn too_many_clients_for_the_store_are_rejected_before_anything_starts() {
        let error = bind_for_clients(100_000, 0, true).expect_err("too many");
        assert_eq!(error.code(), run::RENDEZVOUS_TOO_MANY_RANKS);
        assert_eq!(error.field("ranks"), Some(&100_000.into()));
        assert!(bind_for_clients(100_000, 0, false).is_ok());
    }

    /// Checks that the rendezvous uses ports of a range, prefers two in a row, and fails if all are
    /// taken.
    #[test]
    fn the_rendezvous_uses_the_ports_of_the_job() {
        let bind_in = |first: u16, last: u16| {
            let ports = PortSelection::Range(first, last);
            let request = RendezvousRequest {
                attempt: 0,
                address: Ipv4Addr::LOCALHOST.into(),
                port: 0,
                store: true,
                clients: 1,
                allowed: Vec::new(),
                coordinator: true,
                ports,
            };
            BoundRendezvous::bind(&request, &mpsc::channel(1).0)
        };
        let port = find_free_pair();
        let both = bind_in(port, port + 1).expect("two ports");
        assert_eq!((both.port(), both.coordinator.is_some()), (port, true));
        let error = bind_in(port, port + 1).expect_err("both are taken");
        assert_eq!(error.code(), run::RENDEZVOUS_PORT_UNAVAILABLE);
        assert!(error.to_string().contains(&format!("from {port} to {}", port + 1)), "{error}");
        drop(both);
        let one = bind_in(port, port).expect("one port");
        assert_eq!((one.port(), one.coordinator.is_some()), (port, false));
    }

    #[test]
    fn a_held_port_is_not_available_to_others_and_free_for_rank_0() {
        for store in [false, true] {
            let first = bind_for_one_client(0, store).expect("a port");
            let number = first.port();
            for other in [false, true] {
                let error = bind_for_one_client(number, other).expect_err("taken");
                assert_eq!(error.code(), run::RENDEZVOUS_PORT_UNAVAILABLE);
                assert_eq!(error.field("port"), Some(&number.into()));
            }
            let (port, server) = first.hand_over_to_workers();
            assert_eq!((port, server.is_some()), (number, store));
            assert_eq!(TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_err(), server.is_some());
        }
    }
}
