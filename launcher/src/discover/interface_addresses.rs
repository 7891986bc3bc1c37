//! Lists the IP addresses of the network interfaces of this machine.
use nix::{ifaddrs, net::if_::InterfaceFlags};
use protocol::control::InterfaceAddress;
use std::net::IpAddr;

/// Returns the IP addresses of the network interfaces that are up, in the kernel's order.
pub(crate) fn list_interface_addresses() -> Vec<InterfaceAddress> {
    let Ok(interfaces) = ifaddrs::getifaddrs() else { return Vec::new() };
    let up = interfaces.filter(|i| i.flags.contains(InterfaceFlags::IFF_UP));
    let address = |i: ifaddrs::InterfaceAddress| {
        let storage = i.address?;
        let ip = match (storage.as_sockaddr_in(), storage.as_sockaddr_in6()) {
            (Some(v4), _) => IpAddr::V4(v4.ip()),
            (_, Some(v6)) => IpAddr::V6(v6.ip()),
            _ => return None,
        };
        Some(InterfaceAddress { interface: i.interface_name, address: ip })
    };
    up.filter_map(address).collect()
}
