//! Tests runs in which agents pass on the control connections of other agents, and which lose such
//! agents or their controller.
use super::random_kills::check_attempts;
use super::{BackgroundRun, RunHosts, TINY_JOB, check_undisturbed_journal, wait_until};
use crate::support::{simulated_hosts::list_processes_of_host, slowed_worker::SlowedWorker};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

/// The hosts of the large tree. With a fanout of 4, the agents of the first four are connected with
/// the controller.
const TREE_HOSTS: [&str; 9] = ["h0", "h1", "h2", "h3", "h4", "h5", "h6", "h7", "h8"];

/// Finds the process of the agent on a host, which is not that of the watchdog.
fn find_agent(hosts: &RunHosts, host: &str) -> Option<Pid> {
    let processes = list_processes_of_host(&hosts.hosts.host_directory(host));
    let is_agent = |pid: &i32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "launch-agent")
    };
    processes.into_iter().map(|(pid, _)| pid).find(is_agent).map(Pid::from_raw)
}

/// Counts the TCP connections of a process to SSH servers.
fn count_ssh_connections(pid: i32) -> usize {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let inodes: Vec<String> = entries
        .filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?.display().to_string();
            Some(target.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let mut sockets: Vec<String> = fs::read_to_string("/proc/net/tcp")
        .unwrap_or_default()
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_ssh = fields.get(2)?.ends_with(":0016") && *fields.get(3)? == "01";
            is_ssh.then(|| fields.get(9).map(|inode| (*inode).to_owned())).flatten()
        })
        .filter(|inode| inodes.contains(inode))
        .collect();
    sockets.sort();
    sockets.dedup();
    sockets.len()
}

/// Returns the hosts that have lost their agents, according to the restarts and notices of a run.
fn list_lost_hosts(run: &BackgroundRun<'_>) -> Vec<String> {
    let journal = run.read_journal();
    let restarts = journal.events_named("restart");
    restarts.iter().filter_map(|event| event["host"].as_str().map(str::to_owned)).collect()
}

/// Kills the agent of one host, freezes that of another one, and isolates a third host from the
/// controller, but not from the other hosts. Agents on other hosts are connected through each of
/// them.
#[test]
fn a_lost_inner_agent_costs_the_agents_below_it_a_reconnection() {
    let test = "takeovers::agent_tree::a_lost_inner_agent_costs_the_agents_below_it_a_reconnection";
    let Some(hosts) = RunHosts::start(test, 9, false) else { return };
    let steps = 500;
    let undisturbed = hosts.train_undisturbed(steps);
    let count = format!("train.steps={steps}");
    let set = [
        count.as_str(),
        "cluster.workers_per_host=1",
        "cluster.ssh.fanout=4",
        "cluster.use_hosts=5",
        "run.min_hosts=5",
        "run.restarts=3",
        // The lost agents end when they find that they have no controller.
        "run.on_controller_loss=stop",
        "run.controller_lease=10s",
        // On a busy machine, a reconnection takes seconds.
        "run.host_lease=10s",
        "checkpoint.every=20",
        "checkpoint.dir=saved",
    ];
    let run = hosts.start_run_on(&TREE_HOSTS, "training", TINY_JOB, &set);
    let slowed = SlowedWorker::start(&hosts.hosts, "h4");
    wait_until("the journal has steps", || run.last_step() >= 25);
    let controller = run.controller.expect("a controller");
    wait_until("the controller is connected with four agents", || count_ssh_connections(controller) == 4);
    let agents = || -> BTreeMap<&str, Option<Pid>> {
        TREE_HOSTS[4..].iter().map(|host| (*host, find_agent(&hosts, host))).collect()
    };
    // The run does not wait for the hosts that it does not use.
    wait_until("all hosts have agents", || TREE_HOSTS.iter().all(|host| find_agent(&hosts, host).is_some()));
    let before = agents();
    for host in TREE_HOSTS {
        // No incomplete copy is left.
        let cache = hosts.hosts.run_shell(host, "ls -A /root/.cache/launch/bin | wc -l");
        assert_eq!(cache, "1\n", "executables in the cache of {host}");
    }
    let frozen = find_agent(&hosts, "h1").expect("an agent");
    let faults: [(&str, &dyn Fn()); 3] = [
        ("h0", &|| kill(find_agent(&hosts, "h0").expect("an agent"), Signal::SIGKILL).unwrap()),
        ("h1", &|| kill(frozen, Signal::SIGSTOP).unwrap()),
        ("h3", &|| hosts.hosts.run_hosts_command(&["isolate", "h3"])),
    ];
    for (index, (host, inject)) in faults.into_iter().enumerate() {
        inject();
        wait_until("the run restarts", || list_lost_hosts(&run).len() > index);
        let lost = list_lost_hosts(&run);
        assert_eq!(lost[index], host, "{lost:?}");
        let resumed = run.read_journal().events.len();
        wait_until("the run saves again", || {
            run.read_journal().events[resumed..].iter().any(|event| event["event"] == "checkpoint")
        });
        assert_eq!(agents(), before, "the agents below {host} are the same");
    }
    drop(slowed);
    let ran = run.wait_for_end();
    assert_eq!(ran.code, 0, "{:?}", ran.notice_messages());
    check_attempts(&ran, &undisturbed);
    hosts.check_weights("saved", steps);
    kill(frozen, Signal::SIGCONT).unwrap();
    hosts.hosts.run_hosts_command(&["rejoin", "h3"]);
    hosts.wait_for_no_process_on(&TREE_HOSTS);
}

/// Kills the controller of a run whose agents form a chain, and takes the run over.
#[test]
fn a_tree_of_agents_outlives_its_controller() {
    let test = "takeovers::agent_tree::a_tree_of_agents_outlives_its_controller";
    let Some(hosts) = RunHosts::start(test, 3, false) else { return };
    let steps = 300;
    let undisturbed = hosts.train_undisturbed(steps);
    let set = ["cluster.ssh.fanout=1", "checkpoint.dir=saved", "checkpoint.every=never"];
    let mut run = hosts.start_training("training", steps, &set);
    let slowed = SlowedWorker::start(&hosts.hosts, "h2");
    wait_until("the journal has steps", || run.last_step() >= 3);
    for takeovers in 1..=2 {
        run.signal_controller(Signal::SIGKILL);
        let (code, text) = run.attach_in_background();
        assert_eq!(code, 0, "takeover {takeovers}: {text}");
        let before = run.last_step();
        wait_until("the journal has later steps", || run.last_step() > before + 5);
        let controller = run.controller.expect("a controller");
        wait_until("the controller is connected with one agent", || count_ssh_connections(controller) == 1);
    }
    assert!(run.last_step() < steps, "the training is not over before the last takeover");
    drop(slowed);
    let ran = run.wait_for_end();
    check_undisturbed_journal(&ran, &undisturbed, 2);
    hosts.check_weights("saved", steps);
    hosts.wait_for_no_process();
}

/// Kills the controller of a run that does not outlive it.
#[test]
fn a_tree_of_agents_ends_with_its_controller_if_the_job_asks_for_it() {
    let test = "takeovers::agent_tree::a_tree_of_agents_ends_with_its_controller_if_the_job_asks_for_it";
    let Some(hosts) = RunHosts::start(test, 3, false) else { return };
    let set = ["run.on_controller_loss=stop", "cluster.ssh.fanout=1"];
    let run = hosts.start_training("training", 1_000_000, &set);
    let slowed = SlowedWorker::start(&hosts.hosts, "h1");
    wait_until("the journal has steps", || run.last_step() >= 3);
    let began = Instant::now();
    run.signal_controller(Signal::SIGKILL);
    drop(slowed);
    hosts.wait_for_no_process();
    let elapsed = began.elapsed();
    println!("no process after {elapsed:.2?}");
    assert!(elapsed < Duration::from_secs(12), "{elapsed:?}");
}
