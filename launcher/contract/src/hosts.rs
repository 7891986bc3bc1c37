//! Hosts as people write them: `user@node-[01-16]:22`, hostfiles of DeepSpeed and Open MPI, DeepSpeed's filters.
//!
//! Pure: text in, hosts or the place of the mistake out. Every expansion has a cap.
mod file;
mod filter;
mod range;

pub use file::{FileHost, LineFault, MAX_HOSTFILE, parse_hostfile};
pub use filter::{FilterFault, Filtered, Slots, filter};
pub use range::expand;

use serde::{Deserialize, Serialize};
use std::fmt;

/// Most hosts of a job, however they are written.
pub const MAX_HOSTS: usize = 16_384;
/// Longest name of a host, bytes (DNS has 253).
pub const MAX_NAME: usize = 255;

/// A host and how it is reached, as far as that was written.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Host {
    pub user: Option<String>,
    /// A name, an alias of the SSH configuration, or an address; IPv6 without brackets.
    pub host: String,
    pub port: Option<u16>,
}

impl Host {
    /// What the host is called in plans, logs and filters: without its user, with its port where one was written.
    pub fn name(&self) -> String {
        match self.port {
            None => self.host.clone(),
            Some(port) if self.host.contains(':') => format!("[{}]:{port}", self.host),
            Some(port) => format!("{}:{port}", self.host),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.user {
            Some(user) => write!(f, "{user}@{}", self.name()),
            None => f.write_str(&self.name()),
        }
    }
}

/// What is wrong with a text that should name hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFault {
    /// Where in the text, bytes from its start.
    pub at: usize,
    /// One line without a full stop, without the text itself.
    pub message: String,
}

impl HostFault {
    fn at(at: usize, message: impl Into<String>) -> Self {
        HostFault { at, message: message.into() }
    }
}

/// Hosts of one text: `[user@]name[:port]`, where the name may have Slurm's ranges (`n[01-03,07]`), several separated by commas.
pub fn parse_hosts(text: &str) -> Result<Vec<Host>, HostFault> {
    let mut hosts = Vec::new();
    let mut at = 0;
    for part in range::split(text)? {
        let (user, name_at) = match part.rfind('@') {
            Some(i) => (Some(&part[..i]), i + 1),
            None => (None, 0),
        };
        if let Some(user) = user {
            check_user(user).map_err(|m| HostFault::at(at, m))?;
        }
        let (name, port) = split_port(&part[name_at..]).map_err(|f| shift(f, at + name_at))?;
        let names = match name.contains(':') {
            true => vec![name.to_owned()],
            false => expand(name).map_err(|f| shift(f, at + name_at))?,
        };
        for name in names {
            check_name(&name).map_err(|m| HostFault::at(at + name_at, m))?;
            hosts.push(Host { user: user.map(str::to_owned), host: name, port });
        }
        if hosts.len() > MAX_HOSTS {
            return Err(HostFault::at(at, format!("names more than {MAX_HOSTS} hosts")));
        }
        at += part.len() + 1;
    }
    Ok(hosts)
}

fn shift(fault: HostFault, by: usize) -> HostFault {
    HostFault { at: fault.at + by, ..fault }
}

/// `name`, `name:22`, `[::1]`, `[::1]:22`, `::1`.
fn split_port(text: &str) -> Result<(&str, Option<u16>), HostFault> {
    let inside = text.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    if let Some((address, rest)) = inside.filter(|(address, _)| address.contains(':')) {
        let port_at = address.len() + 3;
        return match rest.strip_prefix(':') {
            Some(port) => Ok((address, Some(port_number(port, port_at)?))),
            None if rest.is_empty() => Ok((address, None)),
            None => Err(HostFault::at(port_at - 1, "has something other than `:PORT` after the address")),
        };
    }
    match (text.find(':'), text.rfind(':')) {
        (Some(first), Some(last)) if first == last => {
            Ok((&text[..first], Some(port_number(&text[first + 1..], first + 1)?)))
        }
        // two colons or more: an IPv6 address without a port
        _ => Ok((text, None)),
    }
}

fn port_number(text: &str, at: usize) -> Result<u16, HostFault> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let port = text.parse::<u16>().ok().filter(|port| digits && *port > 0);
    port.ok_or_else(|| HostFault::at(at, "needs a port from 1 to 65535 after the colon"))
}

/// What ssh and shells can't mistake for anything else.
fn check_user(user: &str) -> Result<(), String> {
    let fits = |c: char| c.is_alphanumeric() || "._-\\$+".contains(c);
    match () {
        () if user.is_empty() => Err("has no user before the `@`".to_owned()),
        () if user.len() > MAX_NAME => Err(format!("has a user of more than {MAX_NAME} bytes")),
        () if user.starts_with('-') || !user.chars().all(fits) => {
            Err("has a user with characters other than letters, digits, `.`, `_`, `-`".to_owned())
        }
        () => Ok(()),
    }
}

fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("names no host".to_owned());
    }
    if name.len() > MAX_NAME {
        return Err(format!("has a name of more than {MAX_NAME} bytes"));
    }
    if name.contains(':') {
        // an address may say which interface: fe80::1%eth0
        let address = name.split('%').next().unwrap_or(name);
        return match address.parse::<std::net::Ipv6Addr>() {
            Ok(_) => Ok(()),
            Err(_) => Err("is neither `name:port` nor an IPv6 address".to_owned()),
        };
    }
    let wrong = name.chars().find(|c| !(c.is_alphanumeric() || "._-%".contains(*c)));
    match wrong {
        Some(c) => Err(format!("has `{}` in a host's name", c.escape_default())),
        None if name.starts_with(['-', '.', '%']) => {
            Err("begins with something other than a letter or digit".to_owned())
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(user: Option<&str>, host: &str, port: Option<u16>) -> Host {
        Host { user: user.map(str::to_owned), host: host.to_owned(), port }
    }

    #[test]
    fn hosts_as_people_write_them() {
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
    fn mistakes_have_places() {
        for (text, at, part) in [
            ("", 0, "names no host"),
            ("a,,b", 2, "names no host"),
            ("@a", 0, "no user"),
            ("a:b", 2, "port from 1 to 65535"),
            ("a:0", 2, "port"),
            ("a:70000", 2, "port"),
            ("a:+5", 2, "port"),
            ("x,u@b:", 6, "port"),
            ("-oProxyCommand=x", 0, "`=`"),
            ("-a", 0, "begins"),
            ("a b", 0, "` `"),
            ("$(x)", 0, "`$`"),
            ("-l@a", 0, "user"),
            ("[::1]x", 5, "after the address"),
            ("1:2:3", 0, "IPv6"),
            ("n[1-", 1, "never closed"),
        ] {
            let fault = parse_hosts(text).expect_err(text);
            assert!(fault.message.contains(part) && fault.at == at, "{text}: {fault:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_read_or_refused(text in "[a-c0-3@:,\\[\\]\\-. %]{0,40}") {
            if let Ok(hosts) = parse_hosts(&text) {
                prop_assert!(!hosts.is_empty() && hosts.len() <= MAX_HOSTS);
                for host in hosts {
                    // what is printed is read again as the same host
                    prop_assert_eq!(parse_hosts(&host.to_string()), Ok(vec![host]));
                }
            }
        }

        #[test]
        fn any_bytes_do_no_harm(text in "\\PC{0,80}") {
            if let Err(fault) = parse_hosts(&text) {
                prop_assert!(fault.at <= text.len());
            }
        }
    }
}
