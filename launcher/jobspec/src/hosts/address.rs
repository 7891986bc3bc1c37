//! [`HostAddress`]: a host that the user writes as `user@name:port`. Also parses lists of such
//! hosts.
use super::{
    error::{HostSyntaxError, HostSyntaxProblem},
    limits::{MAX_HOSTS, MAX_NAME_BYTES},
    range::{self, expand_ranges},
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A host that the user has named: `name`, optionally with a login name and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostAddress {
    /// The login name for SSH; `None` if the text contains none.
    pub user: Option<String>,
    /// A hostname, an alias of the SSH configuration, or an IP address (IPv6 without brackets).
    pub host: String,
    /// The port of sshd; `None` if the text contains none.
    pub port: Option<u16>,
}

impl HostAddress {
    /// Returns the host name without the login name, and with the port if the user has written one,
    /// such as `node-1:22`.
    pub fn name_with_port(&self) -> String {
        match self.port {
            None => self.host.clone(),
            Some(port) if self.host.contains(':') => format!("[{}]:{port}", self.host),
            Some(port) => format!("{}:{port}", self.host),
        }
    }
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.user {
            Some(user) => write!(f, "{user}@{}", self.name_with_port()),
            None => f.write_str(&self.name_with_port()),
        }
    }
}

/// Parses a comma-separated list of hosts, each of the form `[user@]name[:port]`. A name may have
/// Slurm's ranges (`n[01-03,07]`), which are expanded. Fails if the text names no host, or more
/// than [`MAX_HOSTS`].
pub fn parse_hosts(text: &str) -> Result<Vec<HostAddress>, HostSyntaxError> {
    let mut hosts = Vec::new();
    let mut at = 0;
    for part in range::split_outside_brackets(text)? {
        let (user, name_at) = match part.rfind('@') {
            Some(i) => (Some(&part[..i]), i + 1),
            None => (None, 0),
        };
        if let Some(user) = user {
            check_user_name(user).map_err(|problem| HostSyntaxError { at, problem })?;
        }
        let name_at = at + name_at;
        let (name, port) = split_port(&part[name_at - at..]).map_err(|error| error.shift_by(name_at))?;
        let names = match name.contains(':') {
            true => vec![name.to_owned()],
            false => expand_ranges(name).map_err(|error| error.shift_by(name_at))?,
        };
        for name in names {
            check_host_name(&name).map_err(|problem| HostSyntaxError { at: name_at, problem })?;
            hosts.push(HostAddress { user: user.map(str::to_owned), host: name, port });
        }
        if hosts.len() > MAX_HOSTS {
            return Err(HostSyntaxError { at, problem: HostSyntaxProblem::TooManyHosts });
        }
        at += part.len() + 1;
    }
    Ok(hosts)
}

/// Splits `name`, `name:22`, `[::1]`, `[::1]:22` or `::1` into the name, without brackets, and the
/// port.
fn split_port(text: &str) -> Result<(&str, Option<u16>), HostSyntaxError> {
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    if let Some((address, rest)) = bracketed.filter(|(address, _)| address.contains(':')) {
        let port_at = address.len() + 3;
        return match rest.strip_prefix(':') {
            Some(port) => Ok((address, Some(parse_port(port, port_at)?))),
            None if rest.is_empty() => Ok((address, None)),
            None => Err(HostSyntaxError { at: port_at - 1, problem: HostSyntaxProblem::TextAfterAddress }),
        };
    }
    match (text.find(':'), text.rfind(':')) {
        (Some(first), Some(last)) if first == last => {
            Ok((&text[..first], Some(parse_port(&text[first + 1..], first + 1)?)))
        }
        // Two or more colons: an IPv6 address without a port.
        _ => Ok((text, None)),
    }
}

/// Parses a port from 1 to 65535. `at` is the byte offset of `text` in the caller's text, and
/// becomes the position of the error.
fn parse_port(text: &str, at: usize) -> Result<u16, HostSyntaxError> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let port = text.parse::<u16>().ok().filter(|port| digits && *port > 0);
    port.ok_or(HostSyntaxError { at, problem: HostSyntaxProblem::PortInvalid })
}

/// Fails if a login name is empty, is longer than [`MAX_NAME_BYTES`] bytes, or could be
/// misinterpreted by ssh or a shell.
pub(super) fn check_user_name(user: &str) -> Result<(), HostSyntaxProblem> {
    let is_allowed = |c: char| c.is_alphanumeric() || "._-\\$+".contains(c);
    match () {
        () if user.is_empty() => Err(HostSyntaxProblem::UserEmpty),
        () if user.len() > MAX_NAME_BYTES => Err(HostSyntaxProblem::UserTooLong),
        () if user.starts_with('-') || !user.chars().all(is_allowed) => Err(HostSyntaxProblem::UserInvalid),
        () => Ok(()),
    }
}

/// Fails if a host name is empty, is longer than [`MAX_NAME_BYTES`] bytes, or is neither a hostname
/// nor an IPv6 address.
fn check_host_name(name: &str) -> Result<(), HostSyntaxProblem> {
    if name.is_empty() {
        return Err(HostSyntaxProblem::NameEmpty);
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(HostSyntaxProblem::NameTooLong);
    }
    if name.contains(':') {
        // An address may have a zone: fe80::1%eth0.
        let address = name.split('%').next().unwrap_or(name);
        return match address.parse::<std::net::Ipv6Addr>() {
            Ok(_) => Ok(()),
            Err(_) => Err(HostSyntaxProblem::AddressInvalid),
        };
    }
    match name.chars().find(|c| !(c.is_alphanumeric() || "._-%".contains(*c))) {
        Some(c) => Err(HostSyntaxProblem::NameCharacter(c)),
        None if name.starts_with(['-', '.', '%']) => Err(HostSyntaxProblem::NameStart),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{HostSyntaxProblem::*, *};
    use proptest::prelude::*;

    /// Creates a host address from its parts.
    fn host(user: Option<&str>, host: &str, port: Option<u16>) -> HostAddress {
        HostAddress { user: user.map(str::to_owned), host: host.to_owned(), port }
    }

    #[test]
    fn hosts_are_parsed_with_user_port_and_ranges() {
        let cases = [
            ("a", vec![host(None, "a", None)]),
            ("user@b:22", vec![host(Some("user"), "b", Some(22))]),
            ("me@n[1-2]:2222", vec![host(Some("me"), "n1", Some(2222)), host(Some("me"), "n2", Some(2222))]),
            ("[::1]:2222", vec![host(None, "::1", Some(2222))]),
            ("u@[fe80::1%eth0]", vec![host(Some("u"), "fe80::1%eth0", None)]),
            ("fe80::1", vec![host(None, "fe80::1", None)]),
            ("10.0.0.1,b:1", vec![host(None, "10.0.0.1", None), host(None, "b", Some(1))]),
            ("n[1,3],login", vec![host(None, "n1", None), host(None, "n3", None), host(None, "login", None)]),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_hosts(text).as_deref(), Ok(&expected[..]), "{text}");
        }
    }

    #[test]
    fn mistakes_in_hosts_are_reported_with_their_position() {
        for (text, at, problem) in [
            ("", 0, NameEmpty),
            ("a,,b", 2, NameEmpty),
            ("@a", 0, UserEmpty),
            ("a:b", 2, PortInvalid),
            ("a:0", 2, PortInvalid),
            ("a:70000", 2, PortInvalid),
            ("a:+5", 2, PortInvalid),
            ("x,u@b:", 6, PortInvalid),
            ("-oProxyCommand=x", 0, NameCharacter('=')),
            ("-a", 0, NameStart),
            ("a b", 0, NameCharacter(' ')),
            ("$(x)", 0, NameCharacter('$')),
            ("-l@a", 0, UserInvalid),
            ("[::1]x", 5, TextAfterAddress),
            ("1:2:3", 0, AddressInvalid),
            ("n[1-", 1, BracketUnclosed),
        ] {
            assert_eq!(parse_hosts(text), Err(HostSyntaxError { at, problem }), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsed_hosts_print_to_the_text_of_the_same_host(text in "[a-c0-3@:,\\[\\]\\-. %]{0,40}") {
            if let Ok(hosts) = parse_hosts(&text) {
                prop_assert!(!hosts.is_empty() && hosts.len() <= MAX_HOSTS);
                for host in hosts {
                    prop_assert_eq!(parse_hosts(&host.to_string()), Ok(vec![host]));
                }
            }
        }

        #[test]
        fn any_text_is_parsed_or_rejected_within_its_bounds(text in "\\PC{0,80}") {
            if let Err(error) = parse_hosts(&text) {
                prop_assert!(error.at <= text.len());
            }
        }
    }
}
