//! What happens to hosts, and what a job makes of it: faults of every kind on hosts with a real sshd. Whatever happens, no process
//! of the job stays anywhere, and the one cause that is told is the true one.
//!
//! `cargo test --test faults_ssh -- --ignored --nocapture` measures every fault at every position (scripts/bench/faults).
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use support::hosts::Hosts;

const HOSTS: [&str; 4] = ["h0", "h1", "h2", "h3"];
/// First, middle and last.
const POSITIONS: [usize; 3] = [0, 1, 3];
/// Longest wait for anything that has no limit of its own.
const LIMIT: Duration = Duration::from_secs(60);

/// A rank: it fails on request, and leaves a grandchild in a session of its own that ignores SIGTERM and holds the output open.
const RANK: &str = r#"#!/bin/sh
trap 'exit 1' USR1
trap 'exec tail /dev/zero' USR2
trap 'cat /dev/zero > /scratch/big || exit 28' HUP
setsid sh -c 'trap "" TERM; while :; do sleep 1000; done' &
echo $$ > "$READY.$RANK"
while :; do sleep 1000 & wait $!; done
"#;

/// A library that sets the clock of a process wrong.
const SKEW: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hosts/skew.c");

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    WorkerExits,
    WorkerKilled,
    Grandchild,
    OutOfMemory,
    DiskFull,
    ClockSkewed,
    WorkerStopped,
    AgentKilled,
    SessionKilled,
    ControllerKilled,
    HostHalted,
    HostCrashed,
    CableCut,
    Partition,
    HostFrozen,
    SshdStopped,
}

use Fault::*;

/// What a kernel that lives reports at once.
const SEEN: [Fault; 10] = [
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
/// What is only noticed because nothing is heard any more, for a lease of 5 s or a `hang_timeout` of 2 s.
const SILENT: [Fault; 5] = [WorkerStopped, HostCrashed, CableCut, Partition, HostFrozen];

impl Fault {
    /// What the cause must say, and whether it is a rank's.
    fn expected(self) -> (bool, Value) {
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

/// A job of 4 hosts and 8 ranks that would never end.
struct Job<'a> {
    hosts: &'a Hosts,
    name: String,
    dir: tempfile::TempDir,
    child: Child,
}

/// How it ended.
struct Ended {
    /// From the fault to the end of the controller, and to that of the last process on any host that has power and isn't frozen.
    told: Duration,
    gone: Duration,
    code: Option<i32>,
    failure: Option<Value>,
}

impl Job<'_> {
    fn start<'a>(hosts: &'a Hosts, name: &str) -> Job<'a> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("home")).unwrap();
        let text = format!(
            "name: {name}\ncluster: {{hosts: [\"h[0-3]\"], workers_per_host: 2, ssh: {{config: {}}}}}\n\
             run: {{command: [/root/rank], workdir: /root, env: {{READY: /shared/{name}}}, grace_period: 3s, hang_timeout: 2s, progress_pattern: tick, logs: {{dir: '/scratch/{name}'}}}}\n",
            hosts.config().display()
        );
        fs::write(dir.path().join("job.yaml"), text).unwrap();
        for rank in 0..8 {
            _ = fs::remove_file(hosts.file(&format!("shared/{name}.{rank}")));
        }
        let child = launch(&dir, &["job.yaml", "--json"]);
        let mut job = Job { hosts, name: name.to_owned(), dir, child };
        let began = Instant::now();
        while (0..8).any(|rank| job.ready(rank).is_none()) {
            assert!(job.child.try_wait().unwrap().is_none(), "{}", job.said());
            assert!(began.elapsed() < LIMIT, "not all ranks started: {}", job.said());
            thread::sleep(Duration::from_millis(20));
        }
        job
    }

    fn said(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
        format!("{}{}", read("out"), read("err"))
    }

    /// What the rank wrote when it had started: its pid, as its host numbers it.
    fn ready(&self, rank: usize) -> Option<String> {
        let text = fs::read_to_string(self.hosts.file(&format!("shared/{}.{rank}", self.name))).ok()?;
        text.ends_with('\n').then(|| text.trim().to_owned())
    }

    /// The rank's own process.
    fn rank(&self, rank: usize) -> Pid {
        let inside = self.ready(rank).unwrap();
        let all = self.hosts.processes(HOSTS[rank / 2]);
        let own = all.iter().find(|(pid, _)| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
            numbers.split_whitespace().last() == Some(&inside)
        });
        Pid::from_raw(own.unwrap_or_else(|| panic!("no {inside} in {all:?}")).0)
    }

    /// The agent of a host.
    fn agent(&self, host: usize) -> Pid {
        let status = fs::read_to_string(format!("/proc/{}/status", self.rank(host * 2))).unwrap();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
        Pid::from_raw(parent.trim().parse().unwrap())
    }

    /// Waits for the end, first of the controller or first of the processes.
    fn end(mut self, since: Instant, dark: Option<usize>) -> Ended {
        let mut told = None;
        let mut gone = None;
        let mut status = None;
        while told.is_none() || gone.is_none() {
            if told.is_none()
                && let Some(ended) = self.child.try_wait().unwrap()
            {
                (told, status) = (Some(since.elapsed()), Some(ended));
            }
            let all = (0..4).filter(|host| Some(*host) != dark);
            let left: Vec<_> = all.flat_map(|host| ours(self.hosts, host)).collect();
            match left.is_empty() {
                true => gone = gone.or(Some(since.elapsed())),
                false => gone = None,
            }
            assert!(since.elapsed() < LIMIT, "still there: {left:?}\n{}", self.said());
            thread::sleep(Duration::from_millis(10));
        }
        let out = fs::read_to_string(self.dir.path().join("out")).unwrap();
        let mut failures: Vec<Value> = out.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
        failures.retain(|e| e["event"] == "failure");
        assert!(failures.len() <= 1, "one root cause: {failures:?}");
        Ended {
            told: told.unwrap(),
            gone: gone.unwrap(),
            code: status.unwrap().code(),
            failure: failures.pop(),
        }
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn launch(dir: &tempfile::TempDir, args: &[&str]) -> Child {
    let file = |name: &str| File::create(dir.path().join(name)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
    command.args(args).current_dir(dir.path()).env("HOME", dir.path().join("home"));
    command.env("XDG_STATE_HOME", dir.path().join(".state"));
    command.env_remove("SSH_AUTH_SOCK").stdin(Stdio::null()).stdout(file("out")).stderr(file("err"));
    command.spawn().unwrap()
}

/// What a job has on a host: everything but the sessions of sshd.
fn ours(hosts: &Hosts, host: usize) -> Vec<(i32, String)> {
    let mut all = hosts.processes(HOSTS[host]);
    all.retain(|(_, line)| !line.starts_with("sshd: "));
    all
}

fn up(test: &str) -> Option<Hosts> {
    let hosts = Hosts::up(test, 4)?;
    let library = hosts.file("shared/skew.so");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(library).arg(SKEW);
    assert!(cc.status().unwrap().success());
    for host in HOSTS {
        hosts.shell(host, &format!("cat > /root/rank <<'END'\n{RANK}END\nchmod 755 /root/rank; echo /shared/skew.so > /etc/ld.so.preload"));
    }
    Some(hosts)
}

/// Strikes: when it was, and the host that can't be looked at afterwards.
fn strike(job: &Job<'_>, fault: Fault, host: usize) -> (Instant, Option<usize>) {
    let (hosts, name) = (job.hosts, HOSTS[host]);
    // A rank that is neither the first of its host nor of the job, as far as there is one.
    let rank = || job.rank(host * 2 + 1);
    let signal = |pid: Pid, signal| {
        let now = Instant::now();
        kill(pid, signal).unwrap();
        (now, None)
    };
    let script = |args: &[&str], dark| {
        let now = Instant::now();
        hosts.command(args);
        (now, dark)
    };
    match fault {
        WorkerExits | Grandchild => signal(rank(), Signal::SIGUSR1),
        WorkerKilled => signal(rank(), Signal::SIGKILL),
        OutOfMemory => {
            let pid = rank();
            hosts.command(&["mem", name, "300000000"]);
            signal(pid, Signal::SIGUSR2)
        }
        DiskFull => signal(rank(), Signal::SIGHUP),
        ClockSkewed => {
            let ahead = if host == 0 { "-7200" } else { "7200" };
            hosts.shell(
                name,
                &format!("echo {ahead} > /scratch/.skew; mv /scratch/.skew /scratch/skew; date >&2"),
            );
            signal(rank(), Signal::SIGUSR1)
        }
        WorkerStopped => signal(rank(), Signal::SIGSTOP),
        AgentKilled => signal(job.agent(host), Signal::SIGKILL),
        SessionKilled => {
            let all = hosts.processes(name);
            let session = all.iter().find(|(_, line)| line.starts_with("sshd: root"));
            signal(Pid::from_raw(session.unwrap_or_else(|| panic!("{all:?}")).0), Signal::SIGKILL)
        }
        ControllerKilled => signal(Pid::from_raw(job.child.id() as i32), Signal::SIGKILL),
        HostHalted => script(&["halt", name], Some(host)),
        HostCrashed => script(&["crash", name], Some(host)),
        CableCut => script(&["cut", name], None),
        Partition => script(&["blackhole", name], None),
        HostFrozen => script(&["freeze", name], Some(host)),
        SshdStopped => {
            hosts.command(&["sshd-stop", name]);
            signal(rank(), Signal::SIGUSR1)
        }
    }
}

/// The host as it was before.
fn heal(hosts: &Hosts, fault: Fault, host: usize) {
    let name = HOSTS[host];
    match fault {
        OutOfMemory => hosts.command(&["mem", name, "-1"]),
        DiskFull => _ = hosts.shell(name, "rm -f /scratch/big"),
        ClockSkewed => _ = hosts.shell(name, "rm -f /scratch/skew"),
        HostHalted | HostCrashed => {
            hosts.command(&["boot", name]);
        }
        CableCut => hosts.command(&["heal", name]),
        Partition => hosts.command(&["unblackhole", name]),
        HostFrozen => hosts.command(&["thaw", name]),
        SshdStopped => hosts.command(&["sshd-start", name]),
        _ => {}
    }
}

/// One fault on one host: the times, once everything was as it must be.
fn case(hosts: &Hosts, fault: Fault, host: usize) -> (Duration, Duration) {
    let what = format!("{fault:?} on {}", HOSTS[host]);
    let name = format!("{fault:?}-{host}").to_lowercase();
    let job = Job::start(hosts, &name);
    let (since, dark) = strike(&job, fault, host);
    let ended = job.end(since, dark);
    heal(hosts, fault, host);
    if fault != ControllerKilled {
        let failure = ended.failure.unwrap_or_else(|| panic!("{what}: no cause"));
        let (of_rank, reason) = fault.expected();
        let rank = of_rank.then_some(host as u64 * 2 + 1);
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
        assert!(ended.code == Some(1), "{what}: {:?}", ended.code);
        if fault == DiskFull {
            assert!(failure["tail"].to_string().contains("No space left"), "{what}: {failure}");
        }
    }
    nothing_stays(hosts, &what);
    (ended.told, ended.gone)
}

/// No process of a job, no session, no shared memory, no temporary file on any host.
fn nothing_stays(hosts: &Hosts, what: &str) {
    let began = Instant::now();
    loop {
        let left: Vec<_> = HOSTS.iter().flat_map(|host| hosts.processes(host)).collect();
        if left.is_empty() {
            break;
        }
        assert!(began.elapsed() < LIMIT, "{what}: still there: {left:?}");
        thread::sleep(Duration::from_millis(10));
    }
    for host in HOSTS {
        let files = hosts.shell(host, "ls -A /dev/shm /tmp; ls -A /root/.cache/launch/bin | wc -l");
        assert_eq!(files, "/dev/shm:\n\n/tmp:\n1\n", "{what}: files on {host}");
    }
}

/// Each fault at one position, another one for each.
fn one_position_each(test: &str, faults: &[Fault], limit: Duration) {
    let Some(hosts) = up(test) else { return };
    for (i, fault) in faults.iter().enumerate() {
        let (told, gone) = case(&hosts, *fault, POSITIONS[i % 3]);
        println!("{fault:?}: told after {told:.2?}, gone after {gone:.2?}");
        assert!(told < limit && gone < limit, "{fault:?}: told after {told:?}, gone after {gone:?}");
    }
}

#[test]
fn what_a_living_kernel_reports_ends_the_job_everywhere_at_once() {
    let test = "faults_ssh::what_a_living_kernel_reports_ends_the_job_everywhere_at_once";
    one_position_each(test, &SEEN[..5], Duration::from_secs(5));
}

#[test]
fn lost_connections_and_processes_of_launch_end_the_job_everywhere_at_once() {
    let test = "faults_ssh::lost_connections_and_processes_of_launch_end_the_job_everywhere_at_once";
    one_position_each(test, &SEEN[5..], Duration::from_secs(5));
}

#[test]
fn silence_ends_the_job_everywhere_within_the_lease() {
    let test = "faults_ssh::silence_ends_the_job_everywhere_within_the_lease";
    one_position_each(test, &SILENT, Duration::from_secs(15));
}

#[test]
fn a_job_outlives_its_sshd() {
    one_position_each("faults_ssh::a_job_outlives_its_sshd", &[SshdStopped], Duration::from_secs(5));
}

#[test]
#[ignore = "takes minutes: scripts/bench/faults"]
fn the_whole_table() {
    let Some(hosts) = up("faults_ssh::the_whole_table") else { return };
    println!("| fault | first host | middle host | last host |\n|---|---|---|---|");
    for fault in SEEN.into_iter().chain(SILENT).chain([SshdStopped]) {
        let cells = POSITIONS.map(|host| {
            let (told, gone) = case(&hosts, fault, host);
            format!("{:.2} / {:.2}", told.as_secs_f64(), gone.as_secs_f64())
        });
        println!("| {fault:?} | {} |", cells.join(" | "));
    }
}
