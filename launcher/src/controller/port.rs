//! The rendezvous of a job (`MASTER_ADDR`:`MASTER_PORT`): the store that launch hosts for programs, or else a port that
//! is held until just before the workers start. The controller binds it, or the agent of rank 0's node.
use super::store::Server;
use contract::{control::Bind, env};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, TcpListener},
};
use tokio::sync::mpsc;

/// A port that is ours.
#[derive(Debug)]
pub(crate) enum Rendezvous {
    /// For rank 0 to bind.
    Port(TcpListener, u16),
    /// Bound to the end.
    Store(Server),
}

impl Rendezvous {
    /// Takes the asked-for port, or any free one; the error says why it can't be had. `talk` gets what the store has to
    /// say to a person.
    pub(crate) fn open(bind: &Bind, talk: &mpsc::Sender<String>) -> Result<Rendezvous, String> {
        if bind.store {
            Server::has_room(bind.clients)?;
        }
        let taken = if bind.store {
            Server::start(bind.address, bind.port, &bind.allowed, talk.clone()).map(Rendezvous::Store)
        } else {
            hold(bind.address, bind.port)
        };
        taken.map_err(|error| match bind.port {
            0 => format!("no free TCP port can be had on {}: {error}", bind.address),
            number => {
                format!("cluster.master_port {number} can't be had: {error} (see `ss -ltnp`, or use `auto`)")
            }
        })
    }

    /// The number to tell the workers.
    pub(crate) fn port(&self) -> u16 {
        match self {
            Rendezvous::Port(_, number) => *number,
            Rendezvous::Store(server) => server.port(),
        }
    }

    /// When the workers, whose agents run already, are about to start: a port that rank 0 shall bind is let go of, a
    /// store is kept.
    pub(crate) fn ready(self) -> (u16, Option<Server>) {
        match self {
            Rendezvous::Port(held, number) => {
                drop(held);
                (number, None)
            }
            Rendezvous::Store(server) => {
                Server::make_room();
                (server.port(), Some(server))
            }
        }
    }
}

fn hold(address: IpAddr, wanted: u16) -> io::Result<Rendezvous> {
    let held = match wanted {
        0 => TcpListener::bind((address, 0)),
        number => TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)),
    }?;
    let number = held.local_addr()?.port();
    Ok(Rendezvous::Port(held, number))
}

/// Puts the port into a worker's environment where the plan left it open.
pub(super) fn set(environment: &mut [(String, String)], port: u16) {
    let open = |(name, value): &&mut (String, String)| name == env::MASTER_PORT && value == "auto";
    for (_, value) in environment.iter_mut().filter(open) {
        *value = port.to_string();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(port: u16, store: bool) -> Result<Rendezvous, String> {
        open_for(1, port, store)
    }

    fn open_for(clients: u32, port: u16, store: bool) -> Result<Rendezvous, String> {
        let address = Ipv4Addr::LOCALHOST.into();
        let bind = Bind { epoch: 0, address, port, store, clients, allowed: Vec::new() };
        Rendezvous::open(&bind, &mpsc::channel(1).0)
    }

    #[test]
    fn more_clients_than_the_store_can_have_are_refused_before_anything_starts() {
        let error = open_for(100_000, 0, true).expect_err("too many");
        assert!(error.contains("100000 ranks") && error.contains("cluster.store: rank0"), "{error}");
        assert!(open_for(100_000, 0, false).is_ok());
    }

    #[test]
    fn a_held_port_is_refused_to_others_and_free_for_rank_0() {
        for store in [false, true] {
            let first = open(0, store).expect("a port");
            let number = first.port();
            for other in [false, true] {
                let error = open(number, other).expect_err("taken");
                assert!(error.contains(&format!("cluster.master_port {number} can't be had")), "{error}");
            }
            let (told, kept) = first.ready();
            assert_eq!((told, kept.is_some()), (number, store));
            assert_eq!(TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_err(), kept.is_some());
        }
    }

    #[test]
    fn only_an_open_port_is_filled_in() {
        let pair = |value: &str| (env::MASTER_PORT.to_owned(), value.to_owned());
        let mut environment = [pair("auto"), pair("29500")];
        set(&mut environment, 7);
        assert_eq!(environment, [pair("7"), pair("29500")]);
    }
}
