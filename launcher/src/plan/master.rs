//! `MASTER_ADDR`: a numeric address of the first host, so that no worker has to look up a name.
use super::Host;
use contract::{control::Address, job::Interface, preflight::Finding};
use core::net::{IpAddr, Ipv4Addr};

/// The address at which every worker reaches rank 0's host. All on the controller's machine: loopback. `None`: the
/// host's addresses aren't known yet.
pub(super) fn address(hosts: &[Host], interface: &Interface) -> Result<Option<IpAddr>, Finding> {
    let Some(first) = hosts.first() else { return Ok(None) };
    if hosts.iter().all(|host| host.local) {
        return Ok(Some(Ipv4Addr::LOCALHOST.into()));
    }
    let known = &first.facts.addresses;
    if known.is_empty() {
        return Ok(None);
    }
    let chosen = |a: &&Address| interface.admits(&a.interface, a.address);
    let candidates = known.iter().filter(chosen).map(|a| a.address);
    // IPv4 first: every torch version and every library can use it.
    let best = candidates.filter(|ip| reachable(*ip)).min_by_key(IpAddr::is_ipv6);
    best.map(Some).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|a| a.interface.as_str()).collect();
        let wanted = match interface {
            Interface::Auto => String::new(),
            Interface::Named(name) => format!(" on the interface {name}"),
        };
        Finding {
            path: "cluster.hosts".to_owned(),
            message: format!(
                "{} has no address{wanted} that other hosts could reach (its interfaces: {})",
                first.name,
                names.join(", ")
            ),
            hint: Some("give it an address, or choose another interface".to_owned()),
        }
    })
}

/// Could another host reach it? Link-local IPv6 addresses need a zone that differs on every host.
fn reachable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unspecified() && !v6.is_unicast_link_local(),
    }
}
