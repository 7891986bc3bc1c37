//! The rendezvous port of a job (`MASTER_PORT`): found free and held until just before the workers start.
use contract::{env, job::MasterPort};
use std::net::{Ipv4Addr, TcpListener};

/// A port that is ours for now.
#[derive(Debug)]
pub(super) struct Port {
    held: TcpListener,
    number: u16,
}

impl Port {
    /// Takes the asked-for port, or any free one; the error says why it can't be had.
    pub(super) fn reserve(wanted: MasterPort) -> Result<Port, String> {
        let (address, number) = match wanted {
            MasterPort::Auto => (Ipv4Addr::LOCALHOST, 0),
            MasterPort::Fixed(number) => (Ipv4Addr::UNSPECIFIED, number),
        };
        let held = TcpListener::bind((address, number));
        let taken = held.and_then(|held| Ok(Port { number: held.local_addr()?.port(), held }));
        taken.map_err(|error| match wanted {
            MasterPort::Fixed(number) => {
                format!("cluster.master_port {number} can't be had: {error} (see `ss -ltnp`, or use `auto`)")
            }
            MasterPort::Auto => format!("no free TCP port can be had: {error}"),
        })
    }

    /// Lets go of it, for rank 0 to bind.
    pub(super) fn release(self) -> u16 {
        drop(self.held);
        self.number
    }
}

/// Puts the port into a worker's environment where the plan left it open; a port that the job's own `run.env` names stays.
pub(super) fn set(environment: &mut [(String, String)], port: u16) {
    let open = |(name, value): &&mut (String, String)| name == env::MASTER_PORT && value == "auto";
    for (_, value) in environment.iter_mut().filter(open) {
        *value = port.to_string();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_port_is_refused_to_others_and_free_afterwards() {
        let port = Port::reserve(MasterPort::Auto).unwrap();
        let number = port.number;
        let error = Port::reserve(MasterPort::Fixed(number)).unwrap_err();
        assert!(error.contains(&number.to_string()), "{error}");
        assert_eq!(port.release(), number);
    }

    #[test]
    fn only_an_open_port_is_filled_in() {
        let pair = |value: &str| (env::MASTER_PORT.to_owned(), value.to_owned());
        let mut environment = [pair("auto"), pair("29500")];
        set(&mut environment, 7);
        assert_eq!(environment, [pair("7"), pair("29500")]);
    }
}
