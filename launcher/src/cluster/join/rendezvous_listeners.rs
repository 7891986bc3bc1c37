//! Determines whether the rendezvous address (the address of node 0) belongs to this machine, and
//! opens the listeners of node 0.
use super::node_0_connection::{JoinAttemptError, JoinTarget, try_join_once};
use crate::{connection::handshake::HandshakeKey, discover::list_interface_addresses};
use diagnostic::{Diagnostic, codes::host};
use jobspec::hosts::RendezvousAddress;
use protocol::control::{JobSettingHash, JoinRequest, PROTOCOL_VERSION};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _},
    time::Duration,
};

/// How long this process waits for another process, which already uses the rendezvous address of
/// node 0, to answer which job it runs.
const OTHER_JOB_QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Resolves the host name of the rendezvous address, at which node 0 listens, and returns the
/// resulting addresses that belong to this machine. Blocks for the resolution of the name. A name
/// that cannot be resolved has no addresses.
pub(super) fn find_own_addresses(address: &RendezvousAddress) -> Vec<SocketAddr> {
    let known: Vec<IpAddr> =
        list_interface_addresses().into_iter().map(|interface| interface.address).collect();
    let resolved = (address.host.as_str(), address.port).to_socket_addrs().into_iter().flatten();
    let mut found = Vec::new();
    for candidate in
        resolved.filter(|candidate| candidate.ip().is_loopback() || known.contains(&candidate.ip()))
    {
        if !found.contains(&candidate) {
            found.push(candidate);
        }
    }
    found
}

/// Opens the TCP listeners of node 0 at the rendezvous addresses of this machine or, if other nodes
/// cannot reach these, at all addresses. Fails if the port is in use. The error names the job that
/// uses the port if it has the same key. `(nodes, job)` are the number of nodes and the keys of the
/// job.
pub(super) fn open_node_0_listeners(
    address: &RendezvousAddress,
    key: &HandshakeKey,
    (nodes, job): (u32, &[JobSettingHash]),
) -> diagnostic::Result<Vec<TcpListener>> {
    let local = find_own_addresses(address);
    let probe = || {
        let request = JoinRequest {
            version: PROTOCOL_VERSION,
            node_rank: Some(0),
            nodes,
            host: protocol::host_name::read_host_name(),
            pid: std::process::id(),
            job: job.to_vec(),
        };
        find_job_at_rendezvous_address(&JoinTarget { address: address.clone(), key: key.clone(), request })
    };
    if local.is_empty()
        && let Some(other) = probe()
    {
        return Err(other);
    }
    let opened = match needs_every_address(&address.host, &local) {
        true => open_at_every_address(address.port).map(|listener| vec![listener]),
        false => local.iter().map(TcpListener::bind).collect(),
    };
    let listeners = opened.map_err(|error| {
        let other = if error.kind() == io::ErrorKind::AddrInUse { probe() } else { None };
        other.unwrap_or_else(|| {
            let message = format!("node 0 cannot listen at the rendezvous address {address}");
            Diagnostic::error(host::JOIN_ADDRESS_IN_USE, message)
                .with_subject(address.to_string())
                .with_cause(&error)
                .with_remedy()
        })
    })?;
    for listener in &listeners {
        listener.set_nonblocking(true).map_err(|error| {
            let message = format!("node 0 cannot listen at the rendezvous address {address}");
            Diagnostic::error(host::JOIN_ADDRESS_IN_USE, message).with_cause(&error)
        })?;
    }
    Ok(listeners)
}

/// Returns whether node 0 must listen at all addresses of its machine, because other nodes cannot
/// reach any address in `local`, its rendezvous addresses. `local` are the addresses of the
/// rendezvous host `host` that belong to the machine.
///
/// This is the case if the machine has no such address, as with the address of a load balancer. It
/// is also the case if only this machine resolves its name to the loopback interface, as Debian's
/// /etc/hosts does with 127.0.1.1.
fn needs_every_address(host: &str, local: &[SocketAddr]) -> bool {
    let is_name = host.parse::<IpAddr>().is_err() && !host.eq_ignore_ascii_case("localhost");
    local.is_empty() || (is_name && local.iter().all(|address| address.ip().is_loopback()))
}

/// Opens a TCP listener at every IPv6 and IPv4 address of this machine or, without IPv6, at every
/// IPv4 address.
fn open_at_every_address(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        }
        result => result,
    }
}

/// Asks the process that already listens at the rendezvous address (that of node 0) whether it is
/// node 0 of another job of launch. Returns the error that names the other job, or `None` if no job
/// of launch answers.
fn find_job_at_rendezvous_address(target: &JoinTarget) -> Option<Diagnostic> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let dial = runtime
        .block_on(async { tokio::time::timeout(OTHER_JOB_QUERY_TIMEOUT, try_join_once(target)).await });
    match dial {
        Ok(Err(JoinAttemptError::Rejected(error))) => {
            let message = format!("another job uses the rendezvous address {}", target.address);
            Some(
                Diagnostic::error(host::JOIN_ADDRESS_IN_USE, message)
                    .with_subject(target.address.to_string())
                    .with_cause(&error)
                    .with_remedy(),
            )
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_only_this_machine_resolves_to_loopback_needs_every_address() {
        let [debian, localhost, network] = ["127.0.1.1:1", "127.0.0.1:1", "10.0.0.1:1"]
            .map(|address| address.parse::<SocketAddr>().expect("an address"));
        for (host, local, expected) in [
            ("node-a", &[debian][..], true),
            ("node-a", &[debian, network], false),
            ("node-a", &[network], false),
            ("node-a", &[], true),
            ("10.0.0.9", &[], true),
            ("localhost", &[localhost], false),
            ("127.0.0.1", &[localhost], false),
        ] {
            assert_eq!(needs_every_address(host, local), expected, "{host} {local:?}");
        }
    }
}
