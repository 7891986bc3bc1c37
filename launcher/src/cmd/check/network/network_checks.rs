//! [`add_network_checks`]: converts the measurements of `launch check --network` to checks of hosts
//! and of the whole job.
use super::{
    fault_search::{TransferFault, TransferRole},
    network_report::NetworkReport,
    pair_measurements::{ConnectionProperty, DirectedMeasurement, PairMeasurements},
    rdma_checks::check_rdma,
};
use crate::cmd::check::check_report::{CheckReport, CheckResult};
use diagnostic::{Code, codes::host as codes, quantity::format_count};
use protocol::network_probe::{NetworkInspection, NetworkInterface};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The share of a host's sent TCP segments above which retransmissions count as packet loss.
const MAX_RETRANSMIT_SHARE: f64 = 0.01;
/// The number of retransmitted TCP segments of a host that `launch check --network` always
/// tolerates, even if they are a large share of the sent segments.
const MIN_RETRANSMITS: u64 = 20;
/// The ratio of the interface speeds of two hosts below which the slower interface is reported as
/// the reason for a bad transfer between them.
const MAX_SLOWER_INTERFACE_SPEED_SHARE: f64 = 0.5;
/// The share of the usual transfer rate of the job's hosts below which the network path between two
/// hosts counts as failed. Above it, other load can be the reason, because no second path confirms
/// the measurement.
const MAX_FAILED_PATH_RATE_SHARE: f64 = 0.25;
/// The name of the checks in the report of `launch check --network` that concern several hosts.
const NETWORK_CHECK_NAME: &str = "network";

/// Adds the results of the network measurements to the report of `launch check`: checks of each
/// host, faults between two hosts, and a summary.
pub(in crate::cmd::check) fn add_network_checks(report: &mut CheckReport, network: &NetworkReport) {
    let names: Vec<String> = report.hosts.iter().map(|host| host.name.clone()).collect();
    let known: Vec<Option<&NetworkInspection>> = network.inspections.iter().map(Option::as_ref).collect();
    for (index, host) in report.hosts.iter_mut().enumerate() {
        let Some(Some(inspection)) = known.get(index) else { continue };
        host.checks.push(check_interface(inspection, &known, &names));
        host.checks.extend(check_rdma(&inspection.rdma, &known, &names));
        host.checks.extend(check_listener_ports_reachable(index, &network.pairs, &names));
        host.checks.extend(check_retransmits(index, &network.pairs));
    }
    for property in ConnectionProperty::ALL {
        for fault in network.pairs.create_fault_search(property).find_faults() {
            let comparison =
                PropertyComparison { property, pairs: &network.pairs, names: &names, known: &known };
            match fault {
                TransferFault::Host(host, role) => {
                    let check = comparison.create_host_fault_check(host, role);
                    report.hosts[host].checks.push(check);
                }
                TransferFault::Path(from, to) => {
                    report.checks.push(comparison.create_path_fault_check(from, to))
                }
                TransferFault::Undetermined(from, to) => {
                    report.checks.push(comparison.create_undetermined_fault_check(from, to));
                }
            }
        }
    }
    report.checks.push(create_summary_check(network, &names));
    report.network = Some(measurements_to_json(network, &names));
}

/// Formats a rate in bytes per second in the units of networks: `94 Mb/s`, `9.4 Gb/s`.
fn format_rate(bytes_per_second: f64) -> String {
    let bits = bytes_per_second * 8.0;
    let (value, unit) = match bits {
        bits if bits >= 1e9 => (bits / 1e9, "Gb/s"),
        bits if bits >= 1e6 => (bits / 1e6, "Mb/s"),
        bits => (bits / 1e3, "kb/s"),
    };
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// Returns the median of `values`, or `None` if there are no values.
fn find_median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Checks that the network interface of a host exists, has the largest MTU and speed among all
/// hosts, and is not half-duplex.
fn check_interface(
    inspection: &NetworkInspection,
    known: &[Option<&NetworkInspection>],
    names: &[String],
) -> CheckResult {
    /// The name that the check of a host's network interface has in the report of `launch check`.
    const CHECK_NAME: &str = "interface";
    if let Some(error) = &inspection.error {
        let help = error.help().first().cloned().unwrap_or_else(|| "change `cluster.interface`".to_owned());
        return CheckResult::failed(CHECK_NAME, error.code(), error.to_string(), help);
    }
    let Some(interface) = &inspection.interface else { return CheckResult::skipped(CHECK_NAME) };
    let found = describe_interface(interface);
    let others =
        || names.iter().zip(known).filter_map(|(name, i)| Some((name, i.as_ref()?.interface.as_ref()?)));
    let warn =
        |text: String, help: &str| CheckResult::warn(CHECK_NAME, codes::NETWORK_LINK_UNSUITABLE, text, help);
    // Compared with the largest value: one host with another value is at fault either way.
    let largest_mtu = others().filter_map(|(name, other)| Some((other.mtu?, name))).max();
    let fastest = others().filter_map(|(name, other)| Some((other.speed_mbps?, name))).max();
    let result = match (largest_mtu, fastest) {
        (Some((mtu, name)), _) if interface.mtu.is_some_and(|own| own < mtu) => warn(
            format!("{found}; {name} has MTU {mtu}"),
            "set the same MTU on all hosts and on the switches between them",
        ),
        (_, Some((speed, name))) if interface.speed_mbps.is_some_and(|own| own < speed) => {
            let rate = format_rate(f64::from(speed) * 1e6 / 8.0);
            warn(format!("{found}; that of {name} runs at {rate}"), "check the cable, the port and `ethtool`")
        }
        _ if interface.duplex.as_deref() == Some("half") => {
            warn(found, "enable autonegotiation on both ends of the cable")
        }
        _ => CheckResult::ok(CHECK_NAME, found),
    };
    let result = result.with_field("interface", interface.name.as_str());
    result.with_field("address", interface.address.to_string())
}

/// Describes a network interface as text: `eth0 10.0.0.1, MTU 9000, 100 Gb/s, full duplex, 3
/// rx_errors`.
fn describe_interface(interface: &NetworkInterface) -> String {
    let mtu = interface.mtu.map(|mtu| format!(", MTU {mtu}"));
    let speed = interface.speed_mbps.map(|speed| format!(", {}", format_rate(f64::from(speed) * 1e6 / 8.0)));
    let duplex = interface.duplex.as_ref().map(|duplex| format!(", {duplex} duplex"));
    let errors = interface.error_counters.iter().map(|(name, count)| format!(", {count} {name}"));
    let parts = [mtu, speed, duplex].into_iter().flatten().chain(errors);
    format!("{} {}{}", interface.name, interface.address, parts.collect::<String>())
}

/// Checks that other hosts can connect to all ports on which the agent of the host `host` listens
/// for test connections. Hosts that reach no port are not considered.
fn check_listener_ports_reachable(
    host: usize,
    pairs: &PairMeasurements,
    names: &[String],
) -> Option<CheckResult> {
    let is_partial =
        |direction: &DirectedMeasurement| direction.is_reached == Some(true) && !direction.errors.is_empty();
    let partial: Vec<_> =
        pairs.iter().filter(|((_, to), direction)| *to == host && is_partial(direction)).collect();
    let ((from, _), first) = partial.first()?;
    let error = first.errors.first()?;
    let found = format!(
        "{} of {} reached only some of its ports; from {}: {error}",
        partial.len(),
        format_count(pairs.iter().filter(|((_, to), _)| *to == host).count(), "host"),
        names[*from],
    );
    let help = "open all ports of `cluster.ports` between the hosts (firewall)";
    Some(CheckResult::failed("reachability", error.code(), found, help))
}

/// Warns if a host had to retransmit many of the TCP segments that it sent.
fn check_retransmits(host: usize, pairs: &PairMeasurements) -> Option<CheckResult> {
    let sent = pairs.iter().filter(|((from, _), _)| *from == host);
    let (retransmits, segments) = sent
        .filter_map(|(_, direction)| Some((direction.transfer?.retransmits?, direction.transfer?.segments?)))
        .fold((0, 0), |sum, transfer| (sum.0 + transfer.0, sum.1 + transfer.1));
    let share = retransmits as f64 / (segments.max(1)) as f64;
    (retransmits >= MIN_RETRANSMITS && share > MAX_RETRANSMIT_SHARE).then(|| {
        let found = format!("{:.1} % of the {segments} segments that it sent were lost", share * 100.0);
        let help = "look for errors in `ip -s link` and `ethtool -S`, and in the counters of the switch";
        CheckResult::warn("packet loss", codes::PACKETS_LOST, found, help)
            .with_field("retransmits", retransmits)
            .with_field("segments", segments)
    })
}

/// The measured values of one property of the connections, such as the transfer rate, for all pairs
/// of hosts, with the names and inspections of the hosts.
struct PropertyComparison<'a> {
    property: ConnectionProperty,
    pairs: &'a PairMeasurements,
    names: &'a [String],
    known: &'a [Option<&'a NetworkInspection>],
}

impl PropertyComparison<'_> {
    /// Returns the values of the compared property, such as the rate, for all measured transfers
    /// from or to `host`, as `role` selects.
    fn list_values_of_host(&self, host: usize, role: TransferRole) -> Vec<((usize, usize), f64)> {
        let mut values = self.pairs.list_values_of_property(self.property);
        values.retain(|((from, to), _)| host == if role == TransferRole::Sender { *from } else { *to });
        values
    }

    /// Returns the median of the compared property, such as the rate, over all measured pairs
    /// without a host of the list `hosts`.
    fn find_median_of_others(&self, hosts: &[usize]) -> Option<f64> {
        let values = self.pairs.list_values_of_property(self.property).into_iter();
        let others = values.filter(|((from, to), _)| !hosts.contains(from) && !hosts.contains(to));
        find_median(others.map(|(_, value)| value).collect())
    }

    /// Returns whether small packets from the first to the second host of `pair` arrive but large
    /// packets are lost, as with a wrong MTU.
    fn loses_large_packets(&self, pair: (usize, usize)) -> bool {
        let transfer = self.pairs.get(pair).and_then(|direction| direction.transfer);
        transfer.is_some_and(|transfer| transfer.bytes == 0 && transfer.small_segments_arrive == Some(true))
    }

    /// Creates the check result of a host that is at fault as sender or receiver.
    fn create_host_fault_check(&self, host: usize, role: TransferRole) -> CheckResult {
        let values = self.list_values_of_host(host, role);
        let count = values.len();
        let median = find_median(values.iter().map(|(_, value)| *value).collect()).unwrap_or(0.0);
        let others = self.find_median_of_others(&[host]).unwrap_or(0.0);
        let direction = if role == TransferRole::Sender { "to" } else { "from" };
        match self.property {
            ConnectionProperty::Reachability => {
                let error = values.iter().find_map(|(pair, _)| self.pairs.get(*pair)?.errors.first());
                let subject = if role == TransferRole::Sender {
                    "no connections from it to"
                } else {
                    "no connections to it from"
                };
                let error = error.map_or_else(String::new, |error| format!(": {error}"));
                let found = format!("{subject} {count} of {}{error}", format_count(count, "host"));
                CheckResult::failed("reachability", codes::PEER_UNREACHABLE, found, UNREACHABLE_HELP)
            }
            ConnectionProperty::Rate if values.iter().all(|(pair, _)| self.loses_large_packets(*pair)) => {
                let found = format!(
                    "large packets {direction} {count} of {} vanish, small ones arrive",
                    format_count(count, "host")
                );
                self.create_lost_packets_check(found)
            }
            ConnectionProperty::Rate => {
                let verb = if role == TransferRole::Sender { "sends" } else { "receives" };
                let found = format!(
                    "{verb} {} {direction} {count} of {}, median of the others {}",
                    format_rate(median),
                    format_count(count, "host"),
                    format_rate(others)
                );
                CheckResult::failed("bandwidth", codes::NETWORK_SLOW, found, SLOW_HELP)
                    .with_field("direction", verb)
                    .with_field("hosts", count)
                    .with_field("bytes_per_second", median)
                    .with_field("median_of_others", others)
            }
            ConnectionProperty::RoundTrip => {
                let found = format!(
                    "{median:.2} ms {direction} {count} of {}, median of the others {others:.2} ms",
                    format_count(count, "host")
                );
                CheckResult::warn("latency", codes::NETWORK_LATENCY_HIGH, found, LATENCY_HELP)
            }
        }
    }

    /// Creates the check result of a network path that is at fault, because both of its hosts have
    /// good connections to other hosts.
    fn create_path_fault_check(&self, from: usize, to: usize) -> CheckResult {
        let reason = "both hosts work with other hosts, so the path between them is at fault";
        self.create_bad_transfer_check((from, to), reason)
    }

    /// Creates the check result of a bad transfer between two hosts if the measurements do not show
    /// which host is at fault.
    fn create_undetermined_fault_check(&self, from: usize, to: usize) -> CheckResult {
        let speed = |host: usize| Some(f64::from(self.known[host]?.interface.as_ref()?.speed_mbps?));
        let slower = match (speed(from), speed(to)) {
            (Some(first), Some(second)) if first < MAX_SLOWER_INTERFACE_SPEED_SHARE * second => {
                Some((from, first))
            }
            (Some(first), Some(second)) if second < MAX_SLOWER_INTERFACE_SPEED_SHARE * first => {
                Some((to, second))
            }
            _ => None,
        };
        let reason = match slower {
            Some((host, speed)) => {
                let rate = format_rate(speed * 1e6 / 8.0);
                format!("the interface of {} runs at only {rate}", self.names[host])
            }
            None => "the measurements do not show which of the two hosts is at fault".to_owned(),
        };
        self.create_bad_transfer_check((from, to), &reason)
    }

    /// Creates the check result of a bad transfer from one host to another, with `reason` as the
    /// explanation of why neither host alone is blamed.
    fn create_bad_transfer_check(&self, pair: (usize, usize), reason: &str) -> CheckResult {
        let (from, to) = (&self.names[pair.0], &self.names[pair.1]);
        let direction = self.pairs.get(pair);
        let value = |pair| match self.property {
            ConnectionProperty::Rate => format_rate(
                self.pairs.get(pair).and_then(|d| d.transfer).map_or(0.0, |t| t.bytes_per_second()),
            ),
            _ => format!("{:.2} ms", self.pairs.get(pair).and_then(|d| d.round_trip_ms).unwrap_or(0.0)),
        };
        let compared = match self.find_median_of_others(&[pair.0, pair.1]) {
            Some(_) if self.property == ConnectionProperty::Reachability => String::new(),
            Some(others) if self.property == ConnectionProperty::Rate => {
                format!(", median of the others {}", format_rate(others))
            }
            Some(others) => format!(", median of the others {others:.2} ms"),
            None => format!(", in the other direction {}", value((pair.1, pair.0))),
        };
        let result = match self.property {
            ConnectionProperty::Reachability => {
                let error = direction.and_then(|direction| direction.errors.first());
                let error = error.map_or_else(String::new, |error| format!(": {error}"));
                let found = format!("{from} cannot connect to {to}{error}; {reason}");
                CheckResult::failed(NETWORK_CHECK_NAME, codes::PEER_UNREACHABLE, found, UNREACHABLE_HELP)
            }
            ConnectionProperty::Rate if self.loses_large_packets(pair) => {
                let found = format!("large packets from {from} to {to} vanish, small ones arrive; {reason}");
                self.create_lost_packets_check(found)
            }
            ConnectionProperty::Rate => {
                let found = format!("{from} to {to}: {}{compared}; {reason}", value(pair));
                let rate =
                    direction.and_then(|d| d.transfer).map_or(0.0, |transfer| transfer.bytes_per_second());
                let usual = self.pairs.find_usual_value(ConnectionProperty::Rate).unwrap_or(0.0);
                match rate < MAX_FAILED_PATH_RATE_SHARE * usual || rate == 0.0 {
                    true => CheckResult::failed(NETWORK_CHECK_NAME, codes::NETWORK_SLOW, found, SLOW_HELP),
                    false => CheckResult::warn(NETWORK_CHECK_NAME, codes::NETWORK_SLOW, found, SLOW_HELP),
                }
            }
            ConnectionProperty::RoundTrip => {
                let found = format!("{from} to {to}: {}{compared}; {reason}", value(pair));
                CheckResult::warn(NETWORK_CHECK_NAME, codes::NETWORK_LATENCY_HIGH, found, LATENCY_HELP)
            }
        };
        result.with_field("from", from.as_str()).with_field("to", to.as_str())
    }

    /// Creates the check result of a host or path that loses large packets.
    fn create_lost_packets_check(&self, found: String) -> CheckResult {
        let code: Code = codes::LARGE_PACKETS_LOST;
        let help = "set the same MTU on both hosts and all switches between them, and let ICMP pass";
        CheckResult::failed("large packets", code, found, help)
    }
}

/// The help text of `launch check --network` for a host that other hosts cannot connect to.
const UNREACHABLE_HELP: &str = "open the ports between the hosts (firewall), or correct the route";
/// The help text of `launch check --network` for a host or network path with a low transfer rate.
const SLOW_HELP: &str =
    "check the cable, the port and the switch; look for errors in `ip -s link` and `ethtool -S`";
/// The help text of `launch check --network` for a host or network path with long round-trip times.
const LATENCY_HELP: &str = "check the route to the host, and whether its network is busy";

/// Creates the check result that summarizes the number of measured pairs and rounds, the usual
/// transfer rate and the usual round-trip time.
fn create_summary_check(network: &NetworkReport, names: &[String]) -> CheckResult {
    let pairs: BTreeSet<(usize, usize)> =
        network.pairs.iter().map(|((a, b), _)| (a.min(b), a.max(b))).collect();
    let pairs = format_count(pairs.len(), "pair");
    let usual = |property| network.pairs.find_usual_value(property);
    let values = match (usual(ConnectionProperty::Rate), usual(ConnectionProperty::RoundTrip)) {
        (Some(rate), Some(ms)) => format!(": usually {}, round trip {ms:.2} ms", format_rate(rate)),
        _ => String::new(),
    };
    let rounds = format_count(network.rounds, "round");
    let found = format!("{pairs} of {} in {rounds}{values}", format_count(names.len(), "host"));
    match network.is_incomplete {
        true => {
            let found = format!("{found}; the time limit ended the measurements");
            let help = "run the check on fewer hosts";
            CheckResult::warn(NETWORK_CHECK_NAME, codes::NETWORK_CHECK_INCOMPLETE, found, help)
        }
        false => CheckResult::ok(NETWORK_CHECK_NAME, found),
    }
}

/// Returns all measurements of `launch check --network` as JSON.
fn measurements_to_json(network: &NetworkReport, names: &[String]) -> Value {
    let hosts = names.iter().zip(&network.inspections).map(|(name, inspection)| {
        json!({
            "host": name,
            "interface": inspection.as_ref().and_then(|i| i.interface.as_ref()),
            "rdma": inspection.as_ref().map(|i| &i.rdma),
        })
    });
    json!({
        "rounds": network.rounds,
        "complete": !network.is_incomplete,
        "usual_bytes_per_second": network.pairs.find_usual_value(ConnectionProperty::Rate),
        "usual_round_trip_ms": network.pairs.find_usual_value(ConnectionProperty::RoundTrip),
        "hosts": hosts.collect::<Vec<_>>(),
        "directions": network.pairs.to_json(names),
    })
}

#[cfg(test)]
#[path = "network_checks_tests.rs"]
mod tests;
