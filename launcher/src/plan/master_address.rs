//! [`choose_master_address`]: chooses `MASTER_ADDR` as an IP address, so that no worker has to
//! resolve a hostname.
use super::{job_host::JobHost, key_error::key_error};
use core::net::{IpAddr, Ipv4Addr};
use diagnostic::{Diagnostic, codes::host};
use jobspec::{ClusterSpec, InterfaceSelector};
use protocol::control::select_host_address;

/// Chooses the IP address at which every worker reaches the host of rank 0, for `MASTER_ADDR`. The
/// address is the loopback if all hosts are the controller's machine. Returns `None` if the
/// addresses of the host are not known yet. Fails if the host has no suitable address.
pub(super) fn choose_master_address(
    hosts: &[JobHost],
    cluster: &ClusterSpec,
) -> diagnostic::Result<Option<IpAddr>> {
    let interface = &cluster.interface;
    let Some(first) = hosts.first() else { return Ok(None) };
    if hosts.iter().all(|host| host.local) {
        return Ok(Some(Ipv4Addr::LOCALHOST.into()));
    }
    let addresses = &first.inventory.addresses;
    if addresses.is_empty() {
        return Ok(None);
    }
    let best = select_host_address(interface, first.reached_address(&cluster.hosts), addresses);
    let reachable = best.map(|a| a.address).filter(|ip| !ip.is_loopback());
    reachable.map(Some).ok_or_else(|| no_address_error(first, interface))
}

/// Creates the error of a job whose first host has no address that other hosts can reach.
fn no_address_error(first: &JobHost, interface: &InterfaceSelector) -> Diagnostic {
    let names: Vec<&str> = first.inventory.addresses.iter().map(|a| a.interface.as_str()).collect();
    let on_interface = match interface {
        InterfaceSelector::Auto => String::new(),
        InterfaceSelector::Named(name) => format!(" on the interface {name}"),
    };
    let message = format!("{} has no address{on_interface} that other hosts can reach", first.name);
    key_error(host::ADDRESS_UNREACHABLE, "cluster.hosts", message)
        .with_field("host", first.name.as_str())
        .with_field("interfaces", names.as_slice())
        .with_help(format!(
            "give the host an address, or choose another interface (it has {})",
            names.join(", ")
        ))
}
