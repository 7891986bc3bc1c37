//! Injects faults of every kind on hosts with a real sshd. After each fault, no process of the job
//! may be left on any host, and the reported root cause must be the injected fault.
//!
//! `cargo test --test end_to_end -- --ignored --nocapture faults_ssh::` measures every fault at
//! every position (scripts/bench/faults).
use crate::support::{
    environment::{TestDirectory, clean_command, create_test_directory, launch_command},
    poll_pauses::PollPauses,
    simulated_hosts::SimulatedHosts,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    process::Child,
    thread,
    time::{Duration, Instant},
};

/// The names of the simulated hosts.
const HOSTS: [&str; 4] = ["h0", "h1", "h2", "h3"];
/// The indices of the hosts on which faults are injected: the first, a middle and the last host.
const FAULTY_HOSTS: [usize; 3] = [0, 1, 3];
/// How long a test waits for a condition that has no separate time limit. After that, the test
/// fails.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// The shell script that each rank runs. A signal makes the program exit (USR1), exhaust memory
/// (USR2) or fill the disk (HUP). The program starts a grandchild in a separate session that
/// ignores SIGTERM and keeps stdout open.
const RANK_SCRIPT: &str = r#"#!/bin/sh
trap 'exit 1' USR1
trap 'exec tail /dev/zero' USR2
trap 'cat /dev/zero > /scratch/big || exit 28' HUP
setsid sh -c 'trap "" TERM; while :; do sleep 1000; done' &
echo $$ > "$READY.$RANK"
while :; do sleep 1000 & wait $!; done
"#;

/// The path of the C source of a library that skews the clock of a process.
const SKEW_LIBRARY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hosts/skew.c");

/// A failure of a worker, a process of launch, a host or the network that the test causes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum InjectedFault {
    /// A worker exits with code 1.
    WorkerExits,
    /// SIGKILL ends a worker.
    WorkerKilled,
    /// A worker exits with code 1 and leaves a grandchild that ignores SIGTERM.
    Grandchild,
    /// A worker uses more memory than its host allows.
    OutOfMemory,
    /// A worker fills the disk of its host and exits with code 28.
    DiskFull,
    /// The clock of a host is wrong by two hours, and a worker exits with code 1.
    ClockSkewed,
    /// SIGSTOP suspends a worker.
    WorkerStopped,
    /// SIGKILL ends the agent of a host.
    AgentKilled,
    /// SIGKILL ends the sshd session of an agent.
    SessionKilled,
    /// SIGKILL ends the controller.
    ControllerKilled,
    /// A host ends, and its peers receive a TCP reset.
    HostHalted,
    /// A host ends, and its peers receive no packet.
    HostCrashed,
    /// The network link of a host is down.
    CableCut,
    /// A host drops every IP packet while its link is up.
    Partition,
    /// All processes of a host are suspended while its kernel acknowledges TCP.
    HostFrozen,
    /// The sshd of a host ends, and a worker exits with code 1.
    SshdStopped,
}

use InjectedFault::*;

/// Faults that processes of launch notice immediately, because the kernel of a running host reports
/// them.
const REPORTED_FAULTS: [InjectedFault; 10] = [
    WorkerExits,
    WorkerKilled,
    Grandchild,
    OutOfMemory,
    DiskFull,
    ClockSkewed,
    AgentKilled,
    SessionKilled,
    ControllerKilled,
    HostHalted,
];
/// Faults that only show as silence. Controller and agents detect them when a lease of 5 s or a
/// `hang_timeout` of 2 s expires.
const SILENT_FAULTS: [InjectedFault; 5] = [WorkerStopped, HostCrashed, CableCut, Partition, HostFrozen];

impl InjectedFault {
    /// Returns what the controller must report for the fault: whether the failure is that of a
    /// rank, and the fields of its reason.
    fn expected_reason(self) -> (bool, Value) {
        match self {
            WorkerExits | Grandchild | ClockSkewed | SshdStopped => {
                (true, json!({"kind": "exit", "code": 1}))
            }
            WorkerKilled => (true, json!({"kind": "signal", "name": "SIGKILL"})),
            OutOfMemory => (true, json!({"kind": "oom"})),
            DiskFull => (true, json!({"kind": "exit", "code": 28})),
            WorkerStopped => (true, json!({"kind": "suspended"})),
            AgentKilled | SessionKilled | HostHalted => {
                (false, json!({"kind": "host_lost", "silent_s": null}))
            }
            HostCrashed | CableCut | Partition | HostFrozen => (false, json!({"kind": "host_lost"})),
            ControllerKilled => (false, Value::Null),
        }
    }
}

/// A running job with 8 ranks on 4 hosts that ends only when a fault is injected. Dropping the
/// value kills the controller.
struct FourHostJob<'a> {
    hosts: &'a SimulatedHosts,
    name: String,
    dir: TestDirectory,
    child: Child,
}

/// How a job ended after an injected fault, and how long its controller and its processes took to
/// end.
struct FaultOutcome {
    /// Time from the fault to the end of the controller.
    reported: Duration,
    /// Time from the fault to the end of the last process on any reachable host.
    cleaned: Duration,
    code: Option<i32>,
    failure: Option<Value>,
}

impl FourHostJob<'_> {
    /// Starts the job and waits until all ranks have started.
    fn start<'a>(hosts: &'a SimulatedHosts, name: &str) -> FourHostJob<'a> {
        let dir = create_test_directory();
        fs::create_dir(dir.path().join("home")).unwrap();
        let text = format!(
            "name: {name}\ncluster: {{hosts: [\"h[0-3]\"], workers_per_host: 2, ssh: {{config: {}}}}}\n\
             run: {{command: [/root/rank], workdir: /root, env: {{READY: /shared/{name}}}, grace_period: 3s, hang_timeout: 2s, controller_lease: 5s, progress_pattern: tick, logs: {{dir: '/scratch/{name}'}}}}\n",
            hosts.ssh_config_path().display()
        );
        fs::write(dir.path().join("job.yaml"), text).unwrap();
        for rank in 0..8 {
            _ = fs::remove_file(hosts.file_path(&format!("shared/{name}.{rank}")));
        }
        let child = start_controller(&dir, &["job.yaml", "--json"]);
        let mut job = FourHostJob { hosts, name: name.to_owned(), dir, child };
        let began = Instant::now();
        while (0..8).any(|rank| job.read_rank_pid(rank).is_none()) {
            assert!(job.child.try_wait().unwrap().is_none(), "{}", job.read_output());
            assert!(began.elapsed() < WAIT_LIMIT, "not all ranks started: {}", job.read_output());
            thread::sleep(Duration::from_millis(20));
        }
        job
    }

    /// Reads the standard output and standard error of the controller so far.
    fn read_output(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
        format!("{}{}", read("out"), read("err"))
    }

    /// Returns the pid of a rank in the PID namespace of its host, or `None` if the rank has not
    /// started.
    fn read_rank_pid(&self, rank: usize) -> Option<String> {
        let text = fs::read_to_string(self.hosts.file_path(&format!("shared/{}.{rank}", self.name))).ok()?;
        text.ends_with('\n').then(|| text.trim().to_owned())
    }

    /// Returns the pid of a rank outside of the PID namespace of its host, by which the test can
    /// signal the rank.
    fn find_rank_pid(&self, rank: usize) -> Pid {
        let pid_on_host = self.read_rank_pid(rank).unwrap();
        let processes = self.hosts.list_processes(HOSTS[rank / 2]);
        let process = processes.iter().find(|(pid, _)| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
            numbers.split_whitespace().last() == Some(&pid_on_host)
        });
        Pid::from_raw(process.unwrap_or_else(|| panic!("no {pid_on_host} in {processes:?}")).0)
    }

    /// Returns the pid of a host's agent outside of the PID namespace of the host, by which the
    /// test can signal the agent.
    fn find_agent_pid(&self, host: usize) -> Pid {
        let status = fs::read_to_string(format!("/proc/{}/status", self.find_rank_pid(host * 2))).unwrap();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
        Pid::from_raw(parent.trim().parse().unwrap())
    }

    /// Waits for the end of the controller and of all processes of the job on the hosts other than
    /// `unreachable`. `since` is the time of the fault. Panics if this takes longer than
    /// [`WAIT_LIMIT`], or if the controller reports more than one failure.
    fn wait_for_end(mut self, since: Instant, unreachable: Option<usize>) -> FaultOutcome {
        let mut reported = None;
        let mut cleaned = None;
        let mut status = None;
        let mut pauses = PollPauses::new();
        while reported.is_none() || cleaned.is_none() {
            if reported.is_none()
                && let Some(ended) = self.child.try_wait().unwrap()
            {
                (reported, status) = (Some(since.elapsed()), Some(ended));
            }
            let reachable = (0..4).filter(|host| Some(*host) != unreachable);
            let left: Vec<_> = reachable.flat_map(|host| list_job_processes(self.hosts, host)).collect();
            match left.is_empty() {
                true => cleaned = cleaned.or(Some(since.elapsed())),
                false => cleaned = None,
            }
            assert!(since.elapsed() < WAIT_LIMIT, "processes are left: {left:?}\n{}", self.read_output());
            pauses.pause();
        }
        let out = fs::read_to_string(self.dir.path().join("out")).unwrap();
        let mut failures: Vec<Value> = out.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
        failures.retain(|e| e["event"] == "failure");
        assert!(failures.len() <= 1, "one root cause: {failures:?}");
        FaultOutcome {
            reported: reported.unwrap(),
            cleaned: cleaned.unwrap(),
            code: status.unwrap().code(),
            failure: failures.pop(),
        }
    }
}

impl Drop for FourHostJob<'_> {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// Starts `launch` with its output in the files `out` and `err` of the directory.
fn start_controller(dir: &TestDirectory, args: &[&str]) -> Child {
    let file = |name: &str| File::create(dir.path().join(name)).unwrap();
    let mut command = launch_command(dir.path(), args);
    command.env("HOME", dir.path().join("home")).stdout(file("out")).stderr(file("err"));
    command.spawn().unwrap()
}

/// Lists the processes of a host by pid and command line, without the sessions of sshd.
fn list_job_processes(hosts: &SimulatedHosts, host: usize) -> Vec<(i32, String)> {
    let mut processes = hosts.list_processes(HOSTS[host]);
    processes.retain(|(_, line)| !is_sshd_session(line));
    processes
}

/// Returns whether a command line is that of an sshd session.
fn is_sshd_session(command_line: &str) -> bool {
    command_line.split(' ').next() == Some("sshd:")
}

/// Starts four simulated hosts. Installs on each host the program that the ranks run, and the
/// library that skews the clocks of processes. Returns `None` if the test is skipped.
fn start_hosts(test: &str) -> Option<SimulatedHosts> {
    let hosts = SimulatedHosts::start(test, 4)?;
    let library = hosts.file_path("shared/skew.so");
    let mut cc = clean_command("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(library).arg(SKEW_LIBRARY);
    assert!(cc.status().unwrap().success());
    for host in HOSTS {
        hosts.run_shell(host, &format!("cat > /root/rank <<'END'\n{RANK_SCRIPT}END\nchmod 755 /root/rank; echo /shared/skew.so > /etc/ld.so.preload"));
    }
    Some(hosts)
}

/// Injects a fault on a host. Returns the time of the fault, and the host if the fault makes it
/// unreachable.
fn inject_fault(job: &FourHostJob<'_>, fault: InjectedFault, host: usize) -> (Instant, Option<usize>) {
    let (hosts, name) = (job.hosts, HOSTS[host]);
    // a rank that is not the first one of its host
    let rank = || job.find_rank_pid(host * 2 + 1);
    let signal = |pid: Pid, signal| {
        let now = Instant::now();
        kill(pid, signal).unwrap();
        (now, None)
    };
    let script = |args: &[&str], unreachable| {
        let now = Instant::now();
        hosts.run_hosts_command(args);
        (now, unreachable)
    };
    match fault {
        WorkerExits | Grandchild => signal(rank(), Signal::SIGUSR1),
        WorkerKilled => signal(rank(), Signal::SIGKILL),
        OutOfMemory => {
            let pid = rank();
            hosts.run_hosts_command(&["mem", name, "300000000"]);
            signal(pid, Signal::SIGUSR2)
        }
        DiskFull => signal(rank(), Signal::SIGHUP),
        ClockSkewed => {
            let ahead = if host == 0 { "-7200" } else { "7200" };
            hosts.run_shell(
                name,
                &format!("echo {ahead} > /scratch/.skew; mv /scratch/.skew /scratch/skew; date >&2"),
            );
            signal(rank(), Signal::SIGUSR1)
        }
        WorkerStopped => signal(rank(), Signal::SIGSTOP),
        AgentKilled => signal(job.find_agent_pid(host), Signal::SIGKILL),
        SessionKilled => {
            let processes = hosts.list_processes(name);
            let is_session = |line: &str| line.strip_prefix("sshd: ").is_some_and(|u| u.starts_with("root"));
            let session = processes.iter().find(|(_, line)| is_session(line));
            signal(Pid::from_raw(session.unwrap_or_else(|| panic!("{processes:?}")).0), Signal::SIGKILL)
        }
        ControllerKilled => signal(Pid::from_raw(job.child.id() as i32), Signal::SIGKILL),
        HostHalted => script(&["halt", name], Some(host)),
        HostCrashed => script(&["crash", name], Some(host)),
        CableCut => script(&["cut", name], None),
        Partition => script(&["blackhole", name], None),
        HostFrozen => script(&["freeze", name], Some(host)),
        SshdStopped => {
            hosts.run_hosts_command(&["sshd-stop", name]);
            signal(rank(), Signal::SIGUSR1)
        }
    }
}

/// Undoes a fault on a host, so that the next fault can be injected on the same host.
fn undo_fault(hosts: &SimulatedHosts, fault: InjectedFault, host: usize) {
    let name = HOSTS[host];
    match fault {
        OutOfMemory => hosts.run_hosts_command(&["mem", name, "-1"]),
        DiskFull => _ = hosts.run_shell(name, "rm -f /scratch/big"),
        ClockSkewed => _ = hosts.run_shell(name, "rm -f /scratch/skew"),
        HostHalted | HostCrashed => {
            hosts.run_hosts_command(&["boot", name]);
        }
        CableCut => hosts.run_hosts_command(&["heal", name]),
        Partition => hosts.run_hosts_command(&["unblackhole", name]),
        HostFrozen => hosts.run_hosts_command(&["thaw", name]),
        SshdStopped => hosts.run_hosts_command(&["sshd-start", name]),
        _ => {}
    }
}

/// Injects one fault on one host and checks the reported failure and the cleanup. Returns the times
/// from the fault to the end of the controller and to the end of the last process.
fn run_fault_case(hosts: &SimulatedHosts, fault: InjectedFault, host: usize) -> (Duration, Duration) {
    let what = format!("{fault:?} on {}", HOSTS[host]);
    let name = format!("{fault:?}-{host}").to_lowercase();
    let job = FourHostJob::start(hosts, &name);
    let (since, unreachable) = inject_fault(&job, fault, host);
    let end = job.wait_for_end(since, unreachable);
    undo_fault(hosts, fault, host);
    if fault != ControllerKilled {
        let failure = end.failure.unwrap_or_else(|| panic!("{what}: no failure event"));
        let (is_of_rank, reason) = fault.expected_reason();
        let rank = is_of_rank.then_some(host as u64 * 2 + 1);
        assert_eq!(
            (failure["rank"].as_u64(), failure["host"].as_str()),
            (rank, Some(HOSTS[host])),
            "{what}: {failure}"
        );
        for (field, value) in reason.as_object().unwrap() {
            assert_eq!(&failure["reason"][field], value, "{what}: {failure}");
        }
        let is_silent = matches!(fault, HostCrashed | CableCut | Partition | HostFrozen);
        assert_eq!(failure["reason"]["silent_s"].is_u64(), is_silent, "{what}: {failure}");
        assert!(end.code == Some(1), "{what}: {:?}", end.code);
        if fault == DiskFull {
            assert!(failure["tail"].to_string().contains("No space left"), "{what}: {failure}");
        }
    }
    assert_nothing_left(hosts, &what);
    (end.reported, end.cleaned)
}

/// Waits until every host has neither processes of the job nor SSH sessions. Then checks on every
/// host that shared memory and the temporary directory are empty, and that the executable is the
/// only file in launch's cache. Panics with the text `what` after [`WAIT_LIMIT`] or if a check
/// fails.
fn assert_nothing_left(hosts: &SimulatedHosts, what: &str) {
    let began = Instant::now();
    let mut pauses = PollPauses::new();
    loop {
        let left: Vec<_> = HOSTS.iter().flat_map(|host| hosts.list_processes(host)).collect();
        if left.is_empty() {
            break;
        }
        assert!(began.elapsed() < WAIT_LIMIT, "{what}: processes are left: {left:?}");
        pauses.pause();
    }
    for host in HOSTS {
        let files = hosts.run_shell(host, "ls -A /dev/shm /tmp; ls -A /root/.cache/launch/bin | wc -l");
        assert_eq!(files, "/dev/shm:\n\n/tmp:\n1\n", "{what}: files on {host}");
    }
}

/// Injects each fault on one host and checks that the job ends within `limit`. Successive faults
/// use different hosts.
fn run_faults_at_one_position(test: &str, faults: &[InjectedFault], limit: Duration) {
    let Some(hosts) = start_hosts(test) else { return };
    for (i, fault) in faults.iter().enumerate() {
        let (reported, cleaned) = run_fault_case(&hosts, *fault, FAULTY_HOSTS[i % 3]);
        let times = format!("{fault:?}: reported after {reported:.2?}, cleaned up after {cleaned:.2?}");
        println!("{times}");
        assert!(reported < limit && cleaned < limit, "{times}");
    }
}

#[test]
fn faults_of_workers_end_the_job_on_every_host_at_once() {
    let test = "faults_ssh::faults_of_workers_end_the_job_on_every_host_at_once";
    run_faults_at_one_position(test, &REPORTED_FAULTS[..5], Duration::from_secs(5));
}

#[test]
fn lost_connections_and_processes_of_launch_end_the_job_on_every_host_at_once() {
    let test = "faults_ssh::lost_connections_and_processes_of_launch_end_the_job_on_every_host_at_once";
    run_faults_at_one_position(test, &REPORTED_FAULTS[5..], Duration::from_secs(5));
}

#[test]
fn silence_ends_the_job_on_every_host_within_the_lease() {
    let test = "faults_ssh::silence_ends_the_job_on_every_host_within_the_lease";
    run_faults_at_one_position(test, &SILENT_FAULTS, Duration::from_secs(15));
}

#[test]
fn a_job_outlives_its_sshd() {
    run_faults_at_one_position("faults_ssh::a_job_outlives_its_sshd", &[SshdStopped], Duration::from_secs(5));
}

#[test]
#[ignore = "takes minutes: scripts/bench/faults"]
fn every_fault_at_every_position_ends_the_job() {
    let Some(hosts) = start_hosts("faults_ssh::every_fault_at_every_position") else { return };
    println!("| fault | first host | middle host | last host |\n|---|---|---|---|");
    for fault in REPORTED_FAULTS.into_iter().chain(SILENT_FAULTS).chain([SshdStopped]) {
        let cells = FAULTY_HOSTS.map(|host| {
            let (reported, cleaned) = run_fault_case(&hosts, fault, host);
            format!("{:.2} / {:.2}", reported.as_secs_f64(), cleaned.as_secs_f64())
        });
        println!("| {fault:?} | {} |", cells.join(" | "));
    }
}
