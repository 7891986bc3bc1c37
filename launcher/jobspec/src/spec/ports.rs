//! [`PortSelection`]: the TCP ports on which launch and the built-in workers listen
//! (`cluster.ports`).
use crate::keys::{
    text::read_text,
    value_type::{ValueType, wrong_format_error},
};
use crate::yaml::tree::YamlNode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io;

/// `cluster.ports`: the TCP ports on which launch and the built-in workers listen for other hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PortSelection {
    /// Any free port, which the operating system selects.
    #[default]
    Any,
    /// A free port from the first to the last number. The first is at least 1 and at most the last.
    Range(u16, u16),
}

impl PortSelection {
    /// Parses a range of ports such as `20000-20100`. Returns `None` if the text has another form,
    /// or if the range contains no port or port 0.
    pub fn parse_range(text: &str) -> Option<PortSelection> {
        let (first, last) = text.split_once('-')?;
        let parse = |number: &str| {
            let is_plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            number.parse::<u16>().ok().filter(|_| is_plain)
        };
        let (first, last) = (parse(first)?, parse(last)?);
        (1..=last).contains(&first).then_some(PortSelection::Range(first, last))
    }

    /// Returns whether `cluster.ports` allows launch to listen on the port `port`.
    pub fn contains(self, port: u16) -> bool {
        match self {
            PortSelection::Any => true,
            PortSelection::Range(first, last) => (first..=last).contains(&port),
        }
    }

    /// Splits the allowed range of ports into at most `parts` ranges of about equal length, which
    /// together contain the same ports. Any port is a single part.
    pub fn split(self, parts: usize) -> Vec<PortSelection> {
        let PortSelection::Range(first, last) = self else { return vec![self] };
        let (first, count) = (usize::from(first), usize::from(last - first) + 1);
        let parts = parts.clamp(1, count);
        let bound = |part: usize| first + part * count / parts;
        (0..parts)
            .map(|part| PortSelection::Range(bound(part) as u16, (bound(part + 1) - 1) as u16))
            .collect()
    }

    /// Returns the ports that a process tries to bind, in their order: every port of the range, or
    /// 0 if any port is allowed. Processes with different process ids begin at different ports.
    pub fn candidate_ports(self) -> Vec<u16> {
        match self {
            PortSelection::Any => vec![0],
            PortSelection::Range(first, last) => {
                let mut ports: Vec<u16> = (first..=last).collect();
                let start = std::process::id() as usize % ports.len();
                ports.rotate_left(start);
                ports
            }
        }
    }

    /// Calls `bind` with one allowed port after another until a port is not in use, and returns the
    /// result of this call. Port 0 stands for any port. Fails if `bind` fails for another reason,
    /// or if all ports of the range are in use.
    pub fn bind_first_free_port<T>(self, mut bind: impl FnMut(u16) -> io::Result<T>) -> io::Result<T> {
        for port in self.candidate_ports() {
            match bind(port) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && self != PortSelection::Any => {}
                result => return result,
            }
        }
        let message = format!("every port of `cluster.ports: {}` is in use", self.format());
        Err(io::Error::new(io::ErrorKind::AddrInUse, message))
    }

    /// Formats the allowed ports as in job.yaml: `any` or a range.
    fn format(self) -> String {
        match self {
            PortSelection::Any => "any".to_owned(),
            PortSelection::Range(first, last) => format!("{first}-{last}"),
        }
    }
}

/// Returns the parser and printer ([`ValueType`]) for `cluster.ports`: `any` or a range of port
/// numbers.
pub(crate) fn ports_type() -> ValueType<PortSelection> {
    const EXPECTED: &str = "`any` or range of ports such as `20000-20100`";
    let schema = json!({"type": "string", "pattern": "^(any|[0-9]{1,5}-[0-9]{1,5})$"});
    let read = |node: &YamlNode| {
        let text = read_text(node)?;
        match text.as_str() {
            "any" => Ok(PortSelection::Any),
            range => PortSelection::parse_range(range).ok_or_else(|| wrong_format_error(EXPECTED, node)),
        }
    };
    ValueType::new_single_line(EXPECTED, schema, read, |ports| ports.format())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn ranges_are_parsed() {
        assert_eq!(PortSelection::parse_range("1-65535"), Some(PortSelection::Range(1, 65_535)));
        assert_eq!(PortSelection::parse_range("7-7"), Some(PortSelection::Range(7, 7)));
        for wrong in ["", "7", "0-5", "9-8", "1-65536", "+1-2", "1-2-3", " 1-2", "a-b"] {
            assert_eq!(PortSelection::parse_range(wrong), None, "{wrong}");
        }
        let range = PortSelection::Range(10, 12);
        assert!(range.contains(10) && range.contains(12) && !range.contains(13) && !range.contains(9));
    }

    #[test]
    fn a_range_is_split_into_parts() {
        let split = |first, last, parts| -> Vec<(u16, u16)> {
            let parts = PortSelection::Range(first, last).split(parts);
            parts
                .into_iter()
                .map(|part| match part {
                    PortSelection::Range(first, last) => (first, last),
                    PortSelection::Any => panic!("a range"),
                })
                .collect()
        };
        assert_eq!(split(10, 19, 3), [(10, 12), (13, 15), (16, 19)]);
        assert_eq!(split(7, 8, 4), [(7, 7), (8, 8)]);
        assert_eq!(split(1, u16::MAX, 1), [(1, u16::MAX)]);
        assert_eq!(PortSelection::Any.split(4), [PortSelection::Any]);
    }

    #[test]
    fn the_first_free_port_of_a_range_is_bound() {
        let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let taken = bind(0).expect("a port");
        let port = taken.local_addr().expect("an address").port();
        let error = PortSelection::Range(port, port).bind_first_free_port(bind).expect_err("taken");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains(&format!("`cluster.ports: {port}-{port}`")), "{error}");
        assert!(PortSelection::Any.bind_first_free_port(bind).is_ok());
        let mut tried = Vec::new();
        let bound = PortSelection::Range(20, 24).bind_first_free_port(|port| {
            tried.push(port);
            if tried.len() < 3 { Err(io::ErrorKind::AddrInUse.into()) } else { Ok(port) }
        });
        assert_eq!(bound.ok(), tried.last().copied());
        assert!(tried.iter().all(|port| (20..=24).contains(port)) && tried.len() == 3);
        let denied = PortSelection::Range(1, 5)
            .bind_first_free_port(|_| Err::<(), _>(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(denied.expect_err("denied").kind(), io::ErrorKind::PermissionDenied);
        let mut candidates = PortSelection::Range(65_530, 65_535).candidate_ports();
        candidates.sort_unstable();
        assert_eq!(candidates, (65_530..=65_535).collect::<Vec<u16>>());
    }
}
