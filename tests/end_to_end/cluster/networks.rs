//! Tests `cluster.interface` and `cluster.ports` on hosts that are connected by two networks.
use super::*;
use std::{collections::BTreeMap, ops::RangeInclusive};

/// The address of the second network, without the number of the host.
const DATA_NETWORK: &str = "10.99.7";
/// The settings that select the second network and a range of ports.
const SETTINGS: [&str; 2] = ["cluster.interface=10.99.7.0/24", "cluster.ports=21000-21020"];
const PORTS: RangeInclusive<u16> = 21_000..=21_020;

/// Checks that the variables of programs name the selected network, that traffic of the built-in
/// training takes it, and that all ports are in the range.
#[test]
fn traffic_takes_the_selected_network() {
    let test = "cluster::networks::traffic_takes_the_selected_network";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    hosts.run_hosts_command(&["link", "h0", "h1", DATA_NETWORK]);
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
            .split_once(&format!("on {DATA_NETWORK}."))
            .and_then(|(_, rest)| rest.split_once(':')?.1.split(' ').next()?.parse::<u16>().ok());
        assert!(port.is_some_and(|port| PORTS.contains(&port)), "{line}");
    }
    assert_nothing_left(&hosts, &["h0", "h1"]);
}
