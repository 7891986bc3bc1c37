//! Determines the IP addresses of this machine through which agents, launch's processes on other
//! hosts, can reach a process of this machine.
use jobspec::InterfaceSelector;
use protocol::control::{InterfaceAddress, MAX_ADDRESSES, is_routable};
use std::net::{IpAddr, Ipv4Addr};

/// Returns the IP addresses of this machine through which agents (launch's processes on other
/// hosts) can reach a process of this machine. These are the addresses that `interface` selects or,
/// if it selects no address, all addresses. `known` are the addresses of this machine. Link-local
/// addresses are left out.
pub(crate) fn find_reachable_addresses(
    interface: &InterfaceSelector,
    known: Vec<InterfaceAddress>,
) -> Vec<IpAddr> {
    let is_usable = |a: &&InterfaceAddress| !a.address.is_loopback() && is_routable(a.address);
    if let InterfaceSelector::Named(_) = interface {
        let selected =
            known.iter().filter(is_usable).filter(|a| interface.allows_address(&a.interface, a.address));
        let selected: Vec<IpAddr> = selected.map(|a| a.address).collect();
        if !selected.is_empty() {
            return selected;
        }
    }
    let found: Vec<IpAddr> = known.iter().filter(is_usable).map(|a| a.address).collect();
    // A cluster of one machine may have no other address than that of the loopback.
    let loopbacks = known.iter().map(|a| a.address).filter(IpAddr::is_loopback);
    let loopback = loopbacks.min_by_key(IpAddr::is_ipv6).unwrap_or(Ipv4Addr::LOCALHOST.into());
    found.into_iter().chain([loopback]).collect()
}

/// Sorts IP addresses of this machine so that those that other hosts can most likely reach come
/// first, and removes duplicates. Global and private addresses come first, then link-local ones,
/// then loopback. IPv4 comes before IPv6.
///
/// Returns the first [`MAX_ADDRESSES`] addresses, which fit into an invitation, and the others.
pub(crate) fn sort_and_limit_addresses(addresses: Vec<IpAddr>) -> (Vec<IpAddr>, Vec<IpAddr>) {
    let mut selected: Vec<IpAddr> = Vec::new();
    for address in addresses {
        if !selected.contains(&address) {
            selected.push(address);
        }
    }
    let is_link_local = |address: &IpAddr| match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    selected.sort_by_key(|address| (address.is_loopback(), is_link_local(address), address.is_ipv6()));
    let omitted = selected.split_off(selected.len().min(MAX_ADDRESSES));
    (selected, omitted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv6Addr;

    #[test]
    fn agents_connect_to_the_selected_network_or_to_every_address() {
        let known = || -> Vec<InterfaceAddress> {
            [("lo", "127.0.0.1"), ("eth0", "192.0.2.4"), ("ib0", "10.1.0.4"), ("ib0", "fe80::4")]
                .map(|(interface, ip)| InterfaceAddress {
                    interface: interface.to_owned(),
                    address: ip.parse().expect("an address"),
                })
                .into()
        };
        for (name, expected) in [
            ("ib0", &["10.1.0.4"][..]),
            ("10.1.0.0/16", &["10.1.0.4"]),
            ("eth7", &["192.0.2.4", "10.1.0.4", "127.0.0.1"]),
        ] {
            let found = find_reachable_addresses(&InterfaceSelector::Named(name.to_owned()), known());
            assert_eq!(found.iter().map(IpAddr::to_string).collect::<Vec<_>>(), expected, "{name}");
        }
        assert_eq!(find_reachable_addresses(&InterfaceSelector::Auto, known()).len(), 3);
        let v6_only = known().into_iter().filter(|a| a.address.is_ipv6()).chain([
            InterfaceAddress { interface: "lo".to_owned(), address: Ipv6Addr::LOCALHOST.into() },
            InterfaceAddress { interface: "ib0".to_owned(), address: "fd00::4".parse().expect("an address") },
            InterfaceAddress { interface: "usb0".to_owned(), address: "169.254.1.2".parse().expect("one") },
        ]);
        let found = find_reachable_addresses(&InterfaceSelector::Auto, v6_only.collect());
        assert_eq!(found.iter().map(IpAddr::to_string).collect::<Vec<_>>(), ["fd00::4", "::1"]);
    }

    #[test]
    fn addresses_that_other_nodes_reach_come_first() {
        let parse = |texts: &[&str]| -> Vec<IpAddr> {
            texts.iter().map(|text| text.parse().expect("an address")).collect()
        };
        let addresses = parse(&["127.0.0.1", "fe80::1", "169.254.3.4", "fd00::1", "10.0.0.1", "10.0.0.1"]);
        let sorted = parse(&["10.0.0.1", "fd00::1", "169.254.3.4", "fe80::1", "127.0.0.1"]);
        assert_eq!(sort_and_limit_addresses(addresses), (sorted, Vec::new()));
        let link_local = parse(&["169.254.3.4"]);
        let global: Vec<IpAddr> = (1..=MAX_ADDRESSES as u8).map(|i| IpAddr::from([10, 0, 0, i])).collect();
        let addresses = [link_local.clone(), global.clone()].concat();
        assert_eq!(sort_and_limit_addresses(addresses), (global, link_local.clone()));
    }
}
