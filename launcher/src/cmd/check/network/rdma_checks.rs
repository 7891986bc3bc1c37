//! [`check_rdma`]: checks the InfiniBand, RoCE and EFA devices of a host.
use crate::cmd::check::check_report::CheckResult;
use diagnostic::{
    codes::host as codes,
    quantity::{format_bytes, format_count},
};
use protocol::network_probe::{NetworkInspection, RdmaDevice, RdmaPort, RdmaReport};

/// The name of the check of RDMA devices in the report of `launch check`.
const CHECK_NAME: &str = "rdma";

/// Checks the RDMA devices of a host: their number, state, rate and errors, and that programs can
/// use them. `known` are the inspections of all hosts with the names `names`. Returns no check if
/// no host has such devices.
pub(super) fn check_rdma(
    report: &RdmaReport,
    known: &[Option<&NetworkInspection>],
    names: &[String],
) -> Vec<CheckResult> {
    let others = || names.iter().zip(known).filter_map(|(name, i)| Some((name, &i.as_ref()?.rdma)));
    let Some((most_host, most)) = others().max_by_key(|(_, other)| other.devices.len()) else {
        return Vec::new();
    };
    if most.devices.is_empty() {
        return Vec::new();
    }
    let mut problems: Vec<(String, &str)> = Vec::new();
    if report.devices.len() < most.devices.len() {
        let found = match report.devices.len() {
            0 => "no device".to_owned(),
            count => format!("only {}", format_count(count, "device")),
        };
        let found = format!("{found}, {most_host} has {}", most.devices.len());
        problems.push((found, "look for a missing device with `lspci`, and load its driver"));
    }
    for device in &report.devices {
        for port in &device.ports {
            let name = format!("{} port {}", device.name, port.number);
            problems
                .extend(find_port_problem(device, port).map(|(text, help)| (format!("{name} {text}"), help)));
            let same = |other: &RdmaReport| {
                let other = other.devices.iter().find(|other| other.name == device.name)?;
                let other = other.ports.iter().find(|other| other.number == port.number)?;
                (parse_rate(&port.rate)? < parse_rate(&other.rate)?).then(|| other.rate.clone())
            };
            if let Some((other, rate)) = others().find_map(|(name, other)| Some((name, same(other)?))) {
                let text = format!("{name} runs at {}, that of {other} at {rate}", port.rate);
                problems.push((text, "check the cable and the port of the switch"));
            }
        }
    }
    problems.extend(find_access_problems(report));
    if problems.is_empty() {
        return vec![CheckResult::ok(CHECK_NAME, describe_devices(&report.devices))];
    }
    let warn = |(found, help)| CheckResult::warn(CHECK_NAME, codes::RDMA_UNUSABLE, found, help);
    problems.into_iter().map(warn).collect()
}

/// Returns the name of the network that a port of an RDMA device belongs to, such as `InfiniBand`,
/// `RoCE` or `EFA`.
fn describe_port_kind(device: &RdmaDevice, port: &RdmaPort) -> String {
    match (device.driver.as_deref(), port.link_layer.as_str()) {
        (Some("efa"), _) => "EFA".to_owned(),
        (_, "Ethernet") => "RoCE".to_owned(),
        (_, other) => other.to_owned(),
    }
}

/// Describes the RDMA devices of a host by number, kind and rate, such as `8 InfiniBand 200 Gb/sec
/// (4X HDR)`.
fn describe_devices(devices: &[RdmaDevice]) -> String {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for (device, port) in
        devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)))
    {
        let kind = format!("{} {}", describe_port_kind(device, port), port.rate);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect::<Vec<_>>().join(", ")
}

/// Returns the number at the beginning of a rate such as `200 Gb/sec (4X HDR)`.
fn parse_rate(rate: &str) -> Option<f64> {
    rate.split_whitespace().next()?.parse().ok()
}

/// Returns the most important problem of a port of an RDMA device with its remedy, or `None` if
/// there is none.
fn find_port_problem(device: &RdmaDevice, port: &RdmaPort) -> Option<(String, &'static str)> {
    let kind = describe_port_kind(device, port);
    if port.state != "ACTIVE" {
        let help = match kind.as_str() {
            "InfiniBand" if port.physical_state == "LinkUp" => "start the subnet manager of the fabric",
            _ => "check the cable and the port of the switch",
        };
        return Some((format!("({kind}) is {}, {}", port.state, port.physical_state), help));
    }
    if kind == "RoCE" && !port.gid_types.contains_key("RoCE v2") {
        return Some((
            "has no address (GID) of RoCE v2".to_owned(),
            "give the network interface an IP address",
        ));
    }
    let errors: Vec<String> =
        port.error_counters.iter().map(|(name, count)| format!("{name} {count}")).collect();
    let help = "check the cable; `perfquery -R` resets the counters";
    (!errors.is_empty()).then(|| (format!("counts errors: {}", errors.join(", ")), help))
}

/// Returns each problem because of which programs cannot use the RDMA devices of a host, together
/// with the advice to the user.
fn find_access_problems(report: &RdmaReport) -> Vec<(String, &'static str)> {
    let mut problems = Vec::new();
    if report.devices.is_empty() {
        return problems;
    }
    if report.verbs_nodes == 0 {
        let help = "load the kernel module `ib_uverbs`, or pass /dev/infiniband into the container";
        problems.push(("/dev/infiniband has no device node `uverbs`".to_owned(), help));
    }
    if let Some(denied) = &report.denied_node {
        let help = "let the user open the device nodes in /dev/infiniband";
        problems.push((denied.clone(), help));
    }
    if let Some(limit) = report.locked_memory {
        let help = "set `memlock unlimited` in /etc/security/limits.conf";
        problems.push((format!("locked memory is limited to {}", format_bytes(limit)), help));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::check::check_report::CheckLevel;

    /// Returns the report of a host with one device of 200 Gb/s, changed by `change`.
    fn report(change: impl FnOnce(&mut RdmaReport)) -> RdmaReport {
        let port = RdmaPort {
            number: 1,
            state: "ACTIVE".into(),
            physical_state: "LinkUp".into(),
            rate: "200 Gb/sec (4X HDR)".into(),
            link_layer: "InfiniBand".into(),
            ..RdmaPort::default()
        };
        let device = RdmaDevice { name: "mlx5_0".into(), driver: None, ports: vec![port] };
        let mut report = RdmaReport { devices: vec![device], verbs_nodes: 1, ..RdmaReport::default() };
        change(&mut report);
        report
    }

    /// Returns the checks of a changed host next to an unchanged one.
    fn check(change: impl FnOnce(&mut RdmaReport)) -> Vec<(CheckLevel, String)> {
        let inspection = |rdma| NetworkInspection { rdma, ..NetworkInspection::default() };
        let (healthy, changed) = (inspection(report(|_| ())), inspection(report(change)));
        let names = ["h0".to_owned(), "h1".to_owned()];
        let checks = check_rdma(&changed.rdma, &[Some(&healthy), Some(&changed)], &names);
        checks.into_iter().map(|check| (check.level, check.found)).collect()
    }

    #[test]
    fn each_problem_of_rdma_devices_is_a_warning() {
        type Change = fn(&mut RdmaReport);
        let cases: [(Change, &str); 9] = [
            (|r| r.devices.clear(), "no device, h0 has 1"),
            (|r| r.devices[0].ports[0].state = "INIT".into(), "mlx5_0 port 1 (InfiniBand) is INIT, LinkUp"),
            (
                |r| r.devices[0].ports[0].rate = "10 Gb/sec (4X SDR)".into(),
                "mlx5_0 port 1 runs at 10 Gb/sec (4X SDR), that of h0 at 200 Gb/sec (4X HDR)",
            ),
            (
                |r| r.devices[0].ports[0].link_layer = "Ethernet".into(),
                "mlx5_0 port 1 has no address (GID) of RoCE v2",
            ),
            (
                |r| _ = r.devices[0].ports[0].error_counters.insert("symbol_error".into(), 7),
                "mlx5_0 port 1 counts errors: symbol_error 7",
            ),
            (|r| r.verbs_nodes = 0, "/dev/infiniband has no device node `uverbs`"),
            (
                |r| r.denied_node = Some("/dev/infiniband/uverbs0: denied".into()),
                "/dev/infiniband/uverbs0: denied",
            ),
            (|r| r.locked_memory = Some(64 << 10), "locked memory is limited to 64.0 KiB"),
            (
                |r| {
                    r.devices[0].driver = Some("efa".into());
                    r.devices[0].ports[0].state = "DOWN".into();
                },
                "mlx5_0 port 1 (EFA) is DOWN, LinkUp",
            ),
        ];
        for (change, expected) in cases {
            assert_eq!(check(change), [(CheckLevel::Warn, expected.to_owned())]);
        }
    }

    #[test]
    fn working_devices_pass_and_hosts_without_devices_have_no_check() {
        assert_eq!(check(|_| ()), [(CheckLevel::Ok, "1 InfiniBand 200 Gb/sec (4X HDR)".to_owned())]);
        let nothing = NetworkInspection::default();
        assert!(check_rdma(&nothing.rdma, &[Some(&nothing)], &["h0".to_owned()]).is_empty());
    }
}
