//! [`Rendezvous`]: the address `MASTER_ADDR`:`MASTER_PORT` at which the workers of a job meet.
//!
//! It is the store that launch serves for programs, or else a port that is held until just before
//! the workers start. The controller binds it, or the agent on the host of rank 0.
use super::store::StoreServer;
use contract::{control::BindRendezvous, env};
use diagnostic::{Diagnostic, codes::run};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, TcpListener},
};
use tokio::sync::mpsc;

/// A rendezvous whose address is bound.
#[derive(Debug)]
pub(crate) enum Rendezvous {
    /// A port that rank 0 will bind, with its number.
    Port(TcpListener, u16),
    /// A store that serves until the next attempt or the end of the run.
    Store(StoreServer),
}

impl Rendezvous {
    /// Binds the requested port, or any free one. The store sends its messages for the user to
    /// `messages`.
    pub(crate) fn open(
        bind: &BindRendezvous,
        messages: &mpsc::Sender<String>,
    ) -> diagnostic::Result<Rendezvous> {
        if bind.store {
            StoreServer::check_capacity(bind.clients)?;
        }
        let bound = if bind.store {
            StoreServer::start(bind.address, bind.port, &bind.allowed, messages.clone())
                .map(Rendezvous::Store)
        } else {
            hold_port(bind.address, bind.port)
        };
        bound.map_err(|error| port_unavailable(bind, &error))
    }

    /// The port's number, for the workers.
    pub(crate) fn port(&self) -> u16 {
        match self {
            Rendezvous::Port(_, number) => *number,
            Rendezvous::Store(server) => server.port(),
        }
    }

    /// Hands the rendezvous over to workers that are about to start: frees a port that rank 0 will
    /// bind, and returns the store, which has to be kept.
    pub(crate) fn hand_over(self) -> (u16, Option<StoreServer>) {
        match self {
            Rendezvous::Port(listener, number) => {
                drop(listener);
                (number, None)
            }
            Rendezvous::Store(server) => {
                StoreServer::raise_file_limit();
                (server.port(), Some(server))
            }
        }
    }
}

fn port_unavailable(bind: &BindRendezvous, error: &io::Error) -> Diagnostic {
    let address = bind.address;
    let diagnostic = match bind.port {
        0 => Diagnostic::error(
            run::RENDEZVOUS_PORT_UNAVAILABLE,
            format!("cannot bind any TCP port on {address} for the rendezvous"),
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

fn hold_port(address: IpAddr, port: u16) -> io::Result<Rendezvous> {
    let listener = match port {
        0 => TcpListener::bind((address, 0)),
        number => TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)),
    }?;
    let number = listener.local_addr()?.port();
    Ok(Rendezvous::Port(listener, number))
}

/// Inserts the port into a worker's environment where the plan has a placeholder.
pub(super) fn fill_in_port(environment: &mut [(String, String)], port: u16) {
    let is_open = |(name, value): &&mut (String, String)| name == env::MASTER_PORT && value == "auto";
    for (_, value) in environment.iter_mut().filter(is_open) {
        *value = port.to_string();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(port: u16, store: bool) -> diagnostic::Result<Rendezvous> {
        open_for(1, port, store)
    }

    fn open_for(clients: u32, port: u16, store: bool) -> diagnostic::Result<Rendezvous> {
        let address = Ipv4Addr::LOCALHOST.into();
        let bind = BindRendezvous { attempt: 0, address, port, store, clients, allowed: Vec::new() };
        Rendezvous::open(&bind, &mpsc::channel(1).0)
    }

    #[test]
    fn too_many_clients_for_the_store_are_rejected_before_anything_starts() {
        let error = open_for(100_000, 0, true).expect_err("too many");
        assert_eq!(error.code(), run::RENDEZVOUS_TOO_MANY_RANKS);
        assert_eq!(error.field("ranks"), Some(&100_000.into()));
        assert!(open_for(100_000, 0, false).is_ok());
    }

    #[test]
    fn a_held_port_is_not_available_to_others_and_free_for_rank_0() {
        for store in [false, true] {
            let first = open(0, store).expect("a port");
            let number = first.port();
            for other in [false, true] {
                let error = open(number, other).expect_err("taken");
                assert_eq!(error.code(), run::RENDEZVOUS_PORT_UNAVAILABLE);
                assert_eq!(error.field("port"), Some(&number.into()));
            }
            let (port, server) = first.hand_over();
            assert_eq!((port, server.is_some()), (number, store));
            assert_eq!(TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_err(), server.is_some());
        }
    }

    #[test]
    fn only_an_open_port_is_filled_in() {
        let pair = |value: &str| (env::MASTER_PORT.to_owned(), value.to_owned());
        let mut environment = [pair("auto"), pair("29500")];
        fill_in_port(&mut environment, 7);
        assert_eq!(environment, [pair("7"), pair("29500")]);
    }
}
