use super::*;
use crate::cmd::check::check_report::{CheckLevel, HostReport};
use diagnostic::Diagnostic;
use protocol::network_probe::{Measurement, Transfer};

/// Returns the measurement of a host that reached its peer, with these rates in Mb/s. A rate of 0
/// stands for large packets that vanish.
fn measure(sent: u64, received: u64) -> Measurement {
    let transfer = |mbps: u64| Transfer {
        bytes: mbps * 125_000,
        seconds: 1.0,
        retransmits: Some(0),
        segments: Some(1000),
        small_segments_arrive: (mbps == 0).then_some(true),
    };
    Measurement {
        connections: vec![Ok(0.1)],
        round_trip_ms: Some(0.1),
        sent: Some(transfer(sent)),
        received: Some(transfer(received)),
    }
}

/// Returns the inspection of a host whose interface has this speed.
fn inspect(speed_mbps: u32, mtu: u32) -> NetworkInspection {
    let interface = NetworkInterface {
        name: "eth0".into(),
        address: [10, 0, 0, 1].into(),
        mtu: Some(mtu),
        speed_mbps: Some(speed_mbps),
        duplex: Some("full".into()),
        driver: None,
        error_counters: [].into(),
    };
    NetworkInspection { interface: Some(interface), ..NetworkInspection::default() }
}

/// Returns the checks that failed or warned, as `HOST CHECK: FOUND`; without a host for checks of
/// the whole job.
fn evaluate(network: &NetworkReport) -> Vec<String> {
    let host = |index: usize| HostReport {
        name: format!("h{index}"),
        inspection: None,
        clock_skew_s: None,
        checks: Vec::new(),
    };
    let hosts = (0..network.inspections.len()).map(host).collect();
    let mut report = CheckReport { name: "job".into(), hosts, checks: Vec::new(), network: None };
    add_network_checks(&mut report, network);
    let of_hosts =
        report.hosts.iter().flat_map(|h| h.checks.iter().map(move |c| (format!("{} ", h.name), c)));
    let checks = of_hosts.chain(report.checks.iter().map(|check| (String::new(), check)));
    let bad = checks.filter(|(_, check)| check.level != CheckLevel::Ok);
    bad.map(|(host, check)| format!("{host}{}: {}", check.name, check.found)).collect()
}

/// Returns a report of hosts with the measured pairs (host, host, sent and received Mb/s), each
/// tested twice.
fn report(hosts: usize, pairs: &[(usize, usize, u64, u64)]) -> NetworkReport {
    let inspections = vec![Some(inspect(10_000, 1500)); hosts];
    let mut network = NetworkReport { inspections, rounds: 1, ..NetworkReport::default() };
    for (a, b, sent, received) in pairs {
        for _ in 0..2 {
            network.pairs.add(*a, *b, &measure(*sent, *received));
            let reached = Measurement { connections: vec![Ok(0.1)], ..Measurement::default() };
            network.pairs.add(*b, *a, &reached);
        }
    }
    network
}

#[test]
fn equal_hosts_pass() {
    let network = report(3, &[(0, 1, 9400, 9300), (0, 2, 9200, 9100), (1, 2, 9000, 9500)]);
    assert_eq!(evaluate(&network), [""; 0]);
}

#[test]
fn a_slow_host_is_named_with_what_was_measured() {
    let pairs =
        [(0, 1, 9400, 9300), (0, 2, 9200, 94), (1, 2, 9000, 94), (0, 3, 9400, 9400), (2, 3, 94, 9400)];
    let expected = "h2 bandwidth: sends 94 Mb/s to 3 of 3 hosts, median of the others 9.4 Gb/s";
    assert_eq!(evaluate(&report(4, &pairs)), [expected]);
    let both = [(0, 1, 9400, 9300), (0, 2, 80, 94), (1, 2, 80, 94)];
    let expected = [
        "h2 bandwidth: sends 94 Mb/s to 2 of 2 hosts, median of the others 9.4 Gb/s",
        "h2 bandwidth: receives 80 Mb/s from 2 of 2 hosts, median of the others 9.4 Gb/s",
    ];
    assert_eq!(evaluate(&report(3, &both)), expected);
}

#[test]
fn two_hosts_are_not_distinguished_unless_their_interfaces_differ() {
    let mut network = report(2, &[(0, 1, 9400, 94)]);
    let expected = "network: h1 to h0: 94 Mb/s, in the other direction 9.4 Gb/s; the measurements do not \
                    show which of the two hosts is at fault";
    assert_eq!(evaluate(&network), [expected]);
    network.inspections[1] = Some(inspect(100, 1500));
    let found = evaluate(&network);
    assert_eq!(
        found[0],
        "h1 interface: eth0 10.0.0.1, MTU 1500, 100 Mb/s, full duplex; that of h0 runs at 10 Gb/s"
    );
    assert!(found[1].ends_with("; the interface of h1 runs at only 100 Mb/s"), "{}", found[1]);
}

#[test]
fn vanishing_large_packets_are_named() {
    let network = report(3, &[(0, 1, 9400, 9300), (0, 2, 9000, 0), (1, 2, 9000, 0)]);
    let expected = "h2 large packets: large packets to 2 of 2 hosts vanish, small ones arrive";
    assert_eq!(evaluate(&network), [expected]);
}

#[test]
fn unreachable_hosts_and_ports_are_named() {
    let error = || Diagnostic::error(codes::PEER_UNREACHABLE, "no answer");
    let mut network = report(3, &[]);
    let unreachable = Measurement { connections: vec![Err(error())], ..Measurement::default() };
    for host in [0, 1] {
        network.pairs.add(host, 2, &unreachable);
        network.pairs.add(2, host, &measure(9000, 9000));
        network.pairs.add(host, 1 - host, &measure(9000, 9000));
    }
    let found = evaluate(&network);
    let expected = "h2 reachability: no connections to it from 2 of 2 hosts: no answer";
    assert_eq!(found, [expected]);
    let mut network = report(2, &[(0, 1, 9400, 9300)]);
    network.pairs = PairMeasurements::default();
    let partly = Measurement { connections: vec![Ok(0.1), Err(error())], ..measure(9000, 9000) };
    network.pairs.add(0, 1, &partly);
    network.pairs.add(1, 0, &measure(9000, 9000));
    let expected = "h1 reachability: 1 of 1 host reached only some of its ports; from h0: \
                    no answer";
    assert_eq!(evaluate(&network), [expected]);
}

#[test]
fn retransmits_and_different_packet_sizes_are_warnings() {
    let mut network = report(2, &[(0, 1, 9400, 9400)]);
    network.inspections[1] = Some(inspect(10_000, 9000));
    let mut lossy = measure(9500, 9400);
    lossy.sent = lossy.sent.map(|sent| Transfer { retransmits: Some(50), ..sent });
    network.pairs.add(0, 1, &lossy);
    let found = evaluate(&network);
    assert_eq!(
        found,
        [
            "h0 interface: eth0 10.0.0.1, MTU 1500, 10 Gb/s, full duplex; h1 has MTU 9000",
            "h0 packet loss: 5.0 % of the 1000 segments that it sent were lost",
        ]
    );
}
