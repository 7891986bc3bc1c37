//! Tests `cluster.interface`, `cluster.ports` and `launch check --network` on hosts that are
//! connected by two networks.
use super::*;
use std::{collections::BTreeMap, ops::RangeInclusive};

/// The first bytes of the addresses of the second network, without the number of the host.
const DATA_NETWORK_PREFIX: &str = "10.99.7";
/// The settings that select the second network and a range of ports.
const SETTINGS: [&str; 2] = ["cluster.interface=10.99.7.0/24", "cluster.ports=21000-21020"];
const PORTS: RangeInclusive<u16> = 21_000..=21_020;

/// Checks that the variables of programs name the selected network, that traffic of the built-in
/// training takes it, and that all ports are in the range.
#[test]
fn traffic_takes_the_selected_network() {
    let test = "cluster::networks::traffic_takes_the_selected_network";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    hosts.run_hosts_command(&["link", "h0", "h1", DATA_NETWORK_PREFIX]);
    let program = "name: tiny\nrun: {command: [sh, -c, 'env > env.$RANK']}\n";
    let args = write_job(&job_dir, &hosts, "env", program, "[h0, h1]");
    start_run(&job_dir, &args, &SETTINGS).wait_for_end().expect_success();
    for rank in 0..2 {
        let text = fs::read_to_string(job_dir.path(&format!("env.{rank}"))).unwrap();
        let env: BTreeMap<&str, &str> = text.lines().filter_map(|l| l.split_once('=')).collect();
        assert_eq!(env["MASTER_ADDR"], "10.99.7.1");
        let names = ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];
        assert_eq!(names.map(|name| env[name]), ["data0", "data0", "=data0"], "rank {rank}");
        assert!(PORTS.contains(&env["MASTER_PORT"].parse().unwrap()), "{}", env["MASTER_PORT"]);
    }
    // The hosts have the executable now, so only the job needs the first network.
    let sent = |interface: &str| -> u64 {
        let file = format!("cat /sys/class/net/{interface}/statistics/tx_bytes");
        hosts.run_shell("h0", &file).trim().parse().unwrap()
    };
    let before = ["data0", "eth0"].map(sent);
    fs::write(job_dir.path("corpus.txt"), support::generate_corpus()).unwrap();
    let args = write_job(&job_dir, &hosts, "train", TINY_JOB, "[h0, h1]");
    start_run(&job_dir, &args, &SETTINGS).wait_for_end().expect_success();
    let [data, control] = [sent("data0") - before[0], sent("eth0") - before[1]];
    assert!(data > 1_000_000 && data > control, "{data} bytes on data0, {control} bytes on eth0");
    let listening = "grep -h 'accepts connections' /scratch/runs/*/logs/rank-*.log";
    let lines = ["h0", "h1"].map(|host| hosts.run_shell(host, listening)).concat();
    assert_eq!(lines.lines().count(), 4, "{lines}");
    for line in lines.lines() {
        let port = line
            .split_once(&format!("on {DATA_NETWORK_PREFIX}."))
            .and_then(|(_, rest)| rest.split_once(':')?.1.split(' ').next()?.parse::<u16>().ok());
        assert!(port.is_some_and(|port| PORTS.contains(&port)), "{line}");
    }
    assert_nothing_left(&hosts, &["h0", "h1"]);
}

/// Runs `launch check --network` with these settings on the hosts of the YAML list `list`. Checks
/// the exit code. Returns the JSON report, and every check of a host or of the job that did not
/// pass, without those that the test machine can cause. They have the form `HOST CHECK: FOUND`, or
/// `CHECK: FOUND` for a check of the job.
fn run_network_check(
    job_dir: &JobDirectory,
    hosts: &SimulatedHosts,
    (list, settings): (&str, &[&str]),
    exit_code: i32,
) -> (Value, Vec<String>) {
    let job = "name: tiny\ncluster: {ssh: {connect_timeout: 2s}}\nrun: {command: [true]}\n";
    let args = write_job(job_dir, hosts, "checked", job, list);
    let set = settings.iter().flat_map(|setting| ["--set", setting]);
    let args: Vec<&str> =
        ["check", "--network"].into_iter().chain(args.iter().map(String::as_str)).chain(set).collect();
    let output = job_dir.launch_command(&args).env("HOME", job_dir.path("home")).output().unwrap();
    assert_eq!(output.status.code(), Some(exit_code), "{}", support::output_to_text(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let describe = |host: &str, check: &Value| {
        let caused_by_machine =
            ["/dev/shm", "workdir", "logs", "home", "open files", "packet loss", "latency"];
        let name = check["check"].as_str().unwrap();
        let found = check["found"].as_str().unwrap();
        // The tests slow hosts to Mb/s. A busy machine slows some of the hosts to fewer Gb/s.
        let is_slowed_by_machine = name == "network" && check["result"] == "warning"
            || name == "bandwidth" && [" Gb/s to ", " Gb/s from "].iter().any(|rate| found.contains(rate));
        let is_problem = check["result"] == "failed" || check["result"] == "warning";
        let text = format!("{host}{name}: {found}");
        (is_problem && !is_slowed_by_machine && !caused_by_machine.contains(&name)).then_some(text)
    };
    let of_hosts = report["hosts"].as_array().unwrap().iter().flat_map(|host| {
        let name = format!("{} ", host["host"].as_str().unwrap());
        host["checks"].as_array().unwrap().iter().filter_map(move |check| describe(&name, check))
    });
    let of_job = report["checks"].as_array().unwrap().iter().filter_map(|check| describe("", check));
    let problems = of_hosts.chain(of_job).collect();
    (report.clone(), problems)
}

/// Checks that the measurements take the selected network, that a host that sends slowly and a host
/// behind a firewall are named, and that no process remains.
#[test]
fn check_names_the_slow_host_and_the_host_behind_a_firewall() {
    let test = "cluster::networks::check_names_the_slow_host_and_the_host_behind_a_firewall";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    hosts.run_hosts_command(&["network", DATA_NETWORK_PREFIX]);
    hosts.run_shell("h2", "tc qdisc add dev data0 root tbf rate 40mbit burst 64kb latency 50ms");
    hosts.run_shell("h3", "iptables -A INPUT -i data0 -p tcp --dport 21010:21020 -j DROP");
    let sent = |host: &str, interface: &str| -> u64 {
        let file = format!("cat /sys/class/net/{interface}/statistics/tx_bytes");
        hosts.run_shell(host, &file).trim().parse().unwrap()
    };
    let (report, problems) = run_network_check(&job_dir, &hosts, (ALL_HOSTS, &SETTINGS), 3);
    let [slow, firewalled] = &problems[..] else { panic!("{problems:#?}") };
    assert!(
        slow.starts_with("h2 bandwidth: sends ") && slow.contains(" to 3 of 3 hosts, median of the others "),
        "{slow}"
    );
    let expected = "h3 reachability: 3 of 3 hosts reached only some of its ports; from h0: ";
    assert!(firewalled.starts_with(expected), "{firewalled}");
    let network = &report["network"];
    assert_eq!(
        (&network["complete"], network["hosts"][1]["interface"]["name"].as_str()),
        (&true.into(), Some("data0"))
    );
    assert_eq!(network["directions"].as_array().map(Vec::len), Some(12), "all pairs of four hosts");
    let of_slow = |direction: &&Value| direction["from"] == "h2";
    for direction in network["directions"].as_array().unwrap().iter().filter(of_slow) {
        let rate = direction["bytes_per_second"].as_f64().unwrap();
        assert!((1e6..6.5e6).contains(&rate), "40 Mb/s are 5 MB/s: {direction}");
    }
    // The executable was copied to h1 over the first network, but h1 sends only measurements.
    let [data, control] = [sent("h1", "data0"), sent("h1", "eth0")];
    assert!(data > 10 * control, "{data} bytes on data0, {control} bytes on eth0");
    assert_nothing_left(&hosts, &HOSTS);
}

/// Checks hosts with IPv6 addresses only in the selected network: an asymmetric firewall is named,
/// and the transfers take the connections in the other direction. Two hosts cannot be
/// distinguished.
#[test]
fn check_finds_an_asymmetric_firewall_between_ipv6_addresses() {
    let test = "cluster::networks::check_finds_an_asymmetric_firewall_between_ipv6_addresses";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    hosts.run_hosts_command(&["network", "fd00:9::"]);
    // All hosts are equally fast, even if the machine is busy.
    for host in ["h0", "h1", "h2"] {
        hosts.run_shell(host, "tc qdisc add dev data0 root tbf rate 400mbit burst 256kb latency 50ms");
    }
    let interface = ["cluster.interface=data0", "cluster.ssh.connect_timeout=1s"];
    let (report, problems) = run_network_check(&job_dir, &hosts, ("[h0, h1, h2]", &interface), 0);
    assert_eq!((problems, report["ok"].as_bool()), (Vec::new(), Some(true)));
    hosts.run_shell("h1", "ip6tables -A INPUT -i data0 -p tcp --syn -j DROP");
    let (report, problems) = run_network_check(&job_dir, &hosts, ("[h0, h1, h2]", &interface), 3);
    let [problem] = &problems[..] else { panic!("{problems:#?}") };
    assert!(problem.starts_with("h1 reachability: no connections to it from 2 of 2 hosts: "), "{problem}");
    for direction in report["network"]["directions"].as_array().unwrap() {
        assert!(direction["bytes_per_second"].as_f64().is_some_and(|rate| rate > 0.0), "{direction}");
    }
    let (_, problems) = run_network_check(&job_dir, &hosts, ("[h0, h1]", &interface), 3);
    let [problem] = &problems[..] else { panic!("{problems:#?}") };
    let [start, end] = [
        "network: h0 cannot connect to h1: ",
        "; the measurements do not show which of the two hosts is at fault",
    ];
    assert!(problem.starts_with(start) && problem.ends_with(end), "{problem}");
}

/// Checks that `launch check --network` reports a path on which large packets vanish.
#[test]
fn check_finds_vanishing_large_packets() {
    let test = "cluster::networks::check_finds_vanishing_large_packets";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    hosts.run_hosts_command(&["network", DATA_NETWORK_PREFIX]);
    // Without segmentation by the network device, each packet has the size that is sent.
    hosts.run_hosts_command(&["netexec", "h2", "ip", "link", "set", "data0", "gso_max_segs", "1"]);
    hosts.run_shell("h2", "iptables -A OUTPUT -o data0 -m length --length 1000:65535 -j DROP");
    let interface = ["cluster.interface=data0"];
    let (_, problems) = run_network_check(&job_dir, &hosts, ("[h0, h1, h2]", &interface), 3);
    assert_eq!(problems, ["h2 large packets: large packets to 2 of 2 hosts vanish, small ones arrive"]);
}
