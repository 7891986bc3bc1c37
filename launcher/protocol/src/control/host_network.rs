//! [`select_host_address`]: selects the network interface through which a host exchanges data with
//! other hosts. The controller and the workers use the same function, so that they agree.
use super::InterfaceAddress;
use jobspec::InterfaceSelector;
use std::net::IpAddr;

/// Selects, from all IP addresses of a host, the one at which other hosts connect to its workers.
///
/// Link-local addresses are never selected, because they are valid only together with an interface,
/// or belong to a management controller. IPv4 addresses are preferred to IPv6 addresses. With
/// [`InterfaceSelector::Auto`], the address `reached` is selected if it is one of `addresses`. It
/// is the address at which the controller reached the host. Returns `None` if no address is
/// suitable; loopback addresses are suitable only if the selector names them.
pub fn select_host_address<'a>(
    selector: &InterfaceSelector,
    reached: Option<IpAddr>,
    addresses: &'a [InterfaceAddress],
) -> Option<&'a InterfaceAddress> {
    let is_named = matches!(selector, InterfaceSelector::Named(_));
    let is_usable = |a: &&InterfaceAddress| {
        is_routable(a.address)
            && (is_named || !a.address.is_loopback())
            && selector.allows_address(&a.interface, a.address)
    };
    let candidates = || addresses.iter().filter(is_usable);
    let at_reached = candidates().find(|a| !is_named && Some(a.address) == reached);
    at_reached.or_else(|| candidates().min_by_key(|a| a.address.is_ipv6()))
}

/// Returns whether other hosts can use an IP address to connect to this host: false for unspecified
/// and link-local addresses.
pub fn is_routable(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_unspecified() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_unspecified() && !v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the name and the address that are selected, separated by a space; empty if none is.
    fn select(selector: &str, reached: Option<&str>, addresses: &[(&str, &str)]) -> String {
        let selector = match selector {
            "auto" => InterfaceSelector::Auto,
            name => InterfaceSelector::Named(name.to_owned()),
        };
        let addresses: Vec<InterfaceAddress> = addresses
            .iter()
            .map(|(interface, ip)| InterfaceAddress {
                interface: (*interface).to_owned(),
                address: ip.parse().expect("an address"),
            })
            .collect();
        let reached = reached.map(|ip| ip.parse().expect("an address"));
        select_host_address(&selector, reached, &addresses)
            .map_or_else(String::new, |a| format!("{} {}", a.interface, a.address))
    }

    #[test]
    fn link_local_addresses_are_never_selected() {
        let addresses = [
            ("lo", "127.0.0.1"),
            ("usb0", "169.254.3.1"),
            ("eth0", "fe80::1"),
            ("eth0", "2001:db8::5"),
            ("eth1", "192.0.2.5"),
            ("ib0", "10.1.2.3"),
        ];
        assert_eq!(select("auto", None, &addresses), "eth1 192.0.2.5");
        assert_eq!(select("auto", Some("10.1.2.3"), &addresses), "ib0 10.1.2.3");
        assert_eq!(select("auto", Some("198.51.100.1"), &addresses), "eth1 192.0.2.5", "behind a NAT");
        assert_eq!(select("auto", None, &addresses[..4]), "eth0 2001:db8::5", "IPv6 only");
        assert_eq!(select("auto", None, &addresses[..3]), "");
        assert_eq!(select("auto", Some("169.254.3.1"), &addresses[..3]), "");
        assert_eq!(select("usb0", None, &addresses), "");
        assert_eq!(select("eth0", Some("10.1.2.3"), &addresses), "eth0 2001:db8::5");
        assert_eq!(select("10.1.0.0/16", None, &addresses), "ib0 10.1.2.3");
        assert_eq!(select("lo", None, &addresses), "lo 127.0.0.1");
        assert_eq!(select("eth7", None, &addresses), "");
    }
}
