//! The rendezvous of a job (`MASTER_PORT`): the store that launch hosts for programs, or else a port that is held until
//! just before the workers start.
use super::store::Server;
use contract::{
    control::NodePlan,
    env,
    job::{MasterPort, StoreHost},
};
use std::{
    io,
    net::{Ipv4Addr, TcpListener},
};
use tokio::sync::mpsc;

/// A port that is ours.
#[derive(Debug)]
pub(super) enum Rendezvous {
    /// For rank 0 to bind.
    Port(TcpListener, u16),
    /// Bound to the end.
    Store(Server),
}

impl Rendezvous {
    /// Takes the asked-for port, or any free one; the error says why it can't be had. `talk` gets what the store has to
    /// say to a person.
    pub(super) fn open(node: &NodePlan, talk: &mpsc::Sender<String>) -> Result<Rendezvous, String> {
        let (cluster, programs) = (&node.job.cluster, node.job.run.command.is_some());
        let taken = match cluster.store {
            StoreHost::Agent if programs => {
                let number = if let MasterPort::Fixed(number) = cluster.master_port { number } else { 0 };
                Server::start(number, talk.clone()).map(Rendezvous::Store)
            }
            _ => hold(cluster.master_port),
        };
        taken.map_err(|error| match cluster.master_port {
            MasterPort::Fixed(number) => {
                format!("cluster.master_port {number} can't be had: {error} (see `ss -ltnp`, or use `auto`)")
            }
            MasterPort::Auto => format!("no free TCP port can be had: {error}"),
        })
    }

    /// The number to tell the workers, whose agents run already; a port that rank 0 shall bind is let go of, a store is
    /// kept.
    pub(super) fn ready(self) -> (u16, Option<Server>) {
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

fn hold(wanted: MasterPort) -> io::Result<Rendezvous> {
    let held = match wanted {
        MasterPort::Auto => TcpListener::bind((Ipv4Addr::LOCALHOST, 0)),
        MasterPort::Fixed(number) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)),
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

    fn open(port: MasterPort, store: StoreHost) -> Result<Rendezvous, String> {
        let mut job = crate::testing::job();
        (job.cluster.master_port, job.cluster.store) = (port, store);
        let (run, run_dir) = ("R".to_owned(), "/r".into());
        let node = NodePlan { job, run, run_dir, epoch: 0, world: 1, workers: Vec::new(), grace_ms: 0 };
        Rendezvous::open(&node, &mpsc::channel(1).0)
    }

    #[test]
    fn a_held_port_is_refused_to_others_and_free_for_rank_0() {
        for store in [StoreHost::Rank0, StoreHost::Agent] {
            let first = open(MasterPort::Auto, store).expect("a port");
            let number = match &first {
                Rendezvous::Port(_, number) => *number,
                Rendezvous::Store(server) => server.port(),
            };
            for other in [StoreHost::Rank0, StoreHost::Agent] {
                let error = open(MasterPort::Fixed(number), other).expect_err("taken");
                assert!(error.contains(&format!("cluster.master_port {number} can't be had")), "{error}");
            }
            let (told, kept) = first.ready();
            assert_eq!((told, kept.is_some()), (number, store == StoreHost::Agent));
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
