//! [`RendezvousAddress`]: the address at which node 0 of a job listens, and to which the other
//! nodes connect.
use std::{fmt, net::Ipv6Addr, str::FromStr};

/// The port that is used if a rendezvous address (where node 0 listens for the other nodes) is
/// written without a port.
const DEFAULT_PORT: u16 = 29400;
/// The length of the longest host name that a rendezvous address may contain, in bytes.
const MAX_NAME_BYTES: usize = 255;

/// The host and port at which node 0 listens for the other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousAddress {
    /// A host name or an IP address, without brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

/// The error for a text that is not a valid rendezvous address (the host and port at which node 0
/// listens for the other nodes). The message describes the expected form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidRendezvousAddress;

impl fmt::Display for InvalidRendezvousAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected `HOST:PORT`, such as `node-0.example.org:29400` or `[fd00::1]:29400`")
    }
}

impl std::error::Error for InvalidRendezvousAddress {}

impl RendezvousAddress {
    /// Creates the rendezvous address (where node 0 listens for the other nodes) of the host `host`
    /// with the default port.
    pub fn with_default_port(host: &str) -> RendezvousAddress {
        RendezvousAddress { host: host.to_owned(), port: DEFAULT_PORT }
    }
}

impl fmt::Display for RendezvousAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl FromStr for RendezvousAddress {
    type Err = InvalidRendezvousAddress;

    /// Parses `HOST`, `HOST:PORT`, `[IPV6]:PORT` or an IPv6 address without a port. A missing port,
    /// or port 0, stands for the default port.
    fn from_str(text: &str) -> Result<Self, InvalidRendezvousAddress> {
        let is_ipv6 = |host: &str| host.parse::<Ipv6Addr>().is_ok();
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) =
                    rest.split_once(']').filter(|(host, _)| is_ipv6(host)).ok_or(InvalidRendezvousAddress)?;
                (
                    host,
                    if port.is_empty() {
                        None
                    } else {
                        Some(port.strip_prefix(':').ok_or(InvalidRendezvousAddress)?)
                    },
                )
            }
            None if is_ipv6(text) => (text, None),
            None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
        };
        let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        let is_valid = is_ipv6(host)
            || (1..=MAX_NAME_BYTES).contains(&host.len())
                && !host.starts_with('-')
                && host.bytes().all(is_name);
        let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
        let port = match port {
            None => DEFAULT_PORT,
            Some(text) if digits(text) => text.parse().map_err(|_| InvalidRendezvousAddress)?,
            Some(_) => return Err(InvalidRendezvousAddress),
        };
        let port = if port == 0 { DEFAULT_PORT } else { port };
        is_valid.then(|| RendezvousAddress { host: host.to_owned(), port }).ok_or(InvalidRendezvousAddress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_names_or_ip_addresses_and_optional_ports() {
        for (text, host, port, shown) in [
            ("h0", "h0", 29400, "h0:29400"),
            ("node-0.svc:7000", "node-0.svc", 7000, "node-0.svc:7000"),
            ("10.0.0.1:0", "10.0.0.1", 29400, "10.0.0.1:29400"),
            ("[fd00::1]:7", "fd00::1", 7, "[fd00::1]:7"),
            ("fd00::1", "fd00::1", 29400, "[fd00::1]:29400"),
            ("[fd00::1]", "fd00::1", 29400, "[fd00::1]:29400"),
        ] {
            let address: RendezvousAddress = text.parse().expect(text);
            assert_eq!((address.host.as_str(), address.port), (host, port), "{text}");
            assert_eq!(address.to_string(), shown);
        }
        for text in
            ["", ":7", "a:", "a:+7", "a:70000", "a b:7", "[a]:7", "[fd00::1]7", "-a", "a:7:8", "tcp://a:7"]
        {
            assert_eq!(text.parse::<RendezvousAddress>(), Err(InvalidRendezvousAddress), "{text}");
        }
    }
}
