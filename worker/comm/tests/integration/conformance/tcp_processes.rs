//! Tests of the network transport between processes that die, stop and become silent.
use super::{
    checks::{self, CheckFailure, make_failure},
    tcp::make_tcp_limits,
};
use comm::{
    Comm, Result,
    tcp::{AbortHandle, GroupMember, GroupSpec, RankListener, TcpComm},
};
use device::Buf;
use diagnostic::{Code, Diagnostic, codes::collective as codes};
use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    signal::{Signal, kill},
};
use std::{
    io::{BufRead, BufReader, Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    process::{Child, ChildStderr, Command, Stdio},
    time::{Duration, Instant},
};

/// The number of seconds after which SIGALRM kills the process of a rank that hangs.
const ALARM_SECONDS: u32 = 60;

/// A rank in a separate process. Dropping it kills the process.
struct RankProcess {
    process: Child,
    stderr: BufReader<ChildStderr>,
}

impl RankProcess {
    /// Waits until the rank prints a line that contains `text`, and returns the rest of the line.
    fn wait_for_line(&mut self, text: &str) -> String {
        let mut line = String::new();
        while self.stderr.read_line(&mut line).expect("stderr is readable") > 0 {
            if let Some((_, rest)) = line.split_once(text) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the rank ended without printing {text:?}");
    }

    fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.process.id() as i32)
    }

    /// Waits until the rank's process ends. Panics if the process failed. Returns its remaining
    /// output.
    fn assert_success(mut self) -> String {
        let mut stderr = String::new();
        self.stderr.read_to_string(&mut stderr).expect("stderr is readable");
        let status = self.process.wait().expect("the child can be waited for");
        assert!(status.success(), "a rank ended with {status}: {stderr}");
        stderr
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a process for each rank, with rank r on host `hosts[r]`, and returns when all have
/// joined.
fn start_group(case: &str, hosts: &[usize]) -> Vec<RankProcess> {
    let names: Vec<String> = hosts.iter().map(usize::to_string).collect();
    let last_host = hosts.iter().max().expect("the argument is a host");
    // without close-on-exec, so that the ranks inherit them
    let memory: Vec<OwnedFd> = (0..=*last_host)
        .map(|_| memfd_create("comm-test", MFdFlags::MFD_ALLOW_SEALING).expect("a memfd can be created"))
        .collect();
    let start = |(rank, host): (usize, &usize)| {
        let args = format!("{case} {rank} {} {}", memory[*host].as_raw_fd(), names.join(","));
        let mut process = Command::new(std::env::current_exe().expect("the path of this executable"))
            .args(["conformance::tcp_processes::child_runs_one_rank", "--exact", "--ignored", "--nocapture"])
            .env("COMM_TEST_CASE", args)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the process starts");
        let stderr = BufReader::new(process.stderr.take().expect("the stream is piped"));
        RankProcess { process, stderr }
    };
    let mut ranks: Vec<RankProcess> = hosts.iter().enumerate().map(start).collect();
    let addresses: Vec<String> = ranks.iter_mut().map(|r| r.wait_for_line("listens at ")).collect();
    for rank in &mut ranks {
        let mut stdin = rank.process.stdin.take().expect("the stream is piped");
        writeln!(stdin, "{}", addresses.join(" ")).expect("the pipe is writable");
    }
    ranks.iter_mut().for_each(|r| drop(r.wait_for_line("joined")));
    ranks
}

/// Runs the test case that the parent process selected, as one rank. Does nothing if no case was
/// selected, as in an ordinary test run.
#[test]
#[ignore = "run by the other tests"]
fn child_runs_one_rank() {
    let Ok(args) = std::env::var("COMM_TEST_CASE") else { return };
    // SAFETY: sets a timer only.
    unsafe { libc::alarm(ALARM_SECONDS) };
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("the signal can be set");
    let args: Vec<&str> = args.split(' ').collect();
    let rank: usize = args[1].parse().expect("the argument is a rank");
    // SAFETY: the parent left this descriptor open for us.
    let memory = unsafe { OwnedFd::from_raw_fd(args[2].parse().expect("the argument is a descriptor")) };
    let listener = RankListener::bind([127, 0, 0, 1].into()).expect("a port is free");
    eprintln!("listens at {}", listener.address().expect("the address is valid"));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the parent sends the addresses");
    let hosts = args[3].split(',').map(|h| h.parse().expect("the argument is a host"));
    let members: Vec<GroupMember> = hosts
        .zip(line.split_whitespace())
        .map(|(host, a)| GroupMember { host, addresses: vec![a.parse().expect("the address is valid")] })
        .collect();
    let abort_handle = AbortHandle::new(rank, members.len()).expect("an eventfd can be created");
    let group = GroupSpec { rank, members, run: "test".into(), attempt: 0, key: [5; 32] };
    let mut limits = make_tcp_limits();
    limits.silence_timeout = Duration::from_secs(1);
    let comm = listener.join(&group, Some(memory), limits, &abort_handle).expect("the rank joins");
    eprintln!("joined");
    match run_case(args[0], &comm) {
        Ok(()) => {
            drop(comm);
            std::process::exit(0)
        }
        Err(e) => {
            eprintln!("rank {rank}: {e}");
            std::process::exit(1)
        }
    }
}

/// Runs the test case `case` in the process of a rank. Fails if the outcome differs from the
/// expected one.
fn run_case(case: &str, comm: &TcpComm) -> std::result::Result<(), CheckFailure> {
    match case {
        "conforms" => (0..2).try_for_each(|seed| checks::check_random_collectives(comm, seed, 24, 9000)),
        "until-error" => {
            eprintln!("running");
            let error = loop {
                if let Err(e) = run_mixed_collectives(comm) {
                    break e;
                }
            };
            let diagnostic = Diagnostic::from(error);
            let peer = diagnostic.field("peer").and_then(|p| p.as_u64()).expect("the error names a peer");
            eprintln!("{}", format_error_line(diagnostic.code(), peer as usize));
            Ok(())
        }
        other => Err(make_failure("case", other)),
    }
}

/// Runs several collectives of different kinds, one after the other.
fn run_mixed_collectives(comm: &TcpComm) -> Result<()> {
    let mut x = Buf::zeroed(70_000);
    comm.all_reduce(x.view_mut())?;
    comm.broadcast(x.view_mut(), 1)?;
    comm.all_gather_bytes(&[0; 100])?;
    let mut gathered = Buf::zeroed(2000 * comm.world_size());
    comm.all_gather(gathered.view_mut(), x.view().slice(0..2000), &vec![2000; comm.world_size()])?;
    let (partials, counts) = (vec![1; comm.world_size()], vec![2000; comm.world_size()]);
    comm.reduce_scatter_ordered(&[gathered.view()], &partials, &counts, &mut |_, _, _| ())?;
    comm.barrier()
}

#[test]
fn every_collective_conforms_between_processes() {
    for hosts in [&[0, 1][..], &[0, 0, 0, 1], &[0, 1, 2, 3], &[0, 0, 0, 0, 1, 1, 1, 1]] {
        start_group("conforms", hosts).into_iter().for_each(|r| drop(r.assert_success()));
    }
}

/// Sends `signal` to the rank `victim`, and checks that every other rank reports `code` with the
/// victim as the peer. Returns the time until the last rank ended.
fn signal_rank_and_check_peers(
    ranks: Vec<RankProcess>,
    victim: usize,
    signal: Signal,
    code: Code,
) -> Duration {
    let mut ranks: Vec<Option<RankProcess>> = ranks.into_iter().map(Some).collect();
    ranks.iter_mut().flatten().for_each(|r| drop(r.wait_for_line("running")));
    let victim_process = ranks[victim].take().expect("the victim is a rank");
    // somewhere in the middle of a collective
    std::thread::sleep(Duration::from_micros(u64::from(victim_process.process.id()) % 7 * 1100));
    let began = Instant::now();
    kill(victim_process.pid(), signal).expect("the signal can be sent");
    let expected = format_error_line(code, victim);
    for rank in ranks.into_iter().flatten() {
        let output = rank.assert_success();
        assert!(output.lines().any(|line| line == expected), "{output}");
    }
    began.elapsed()
}

/// Formats the line that a rank prints about an error whose peer is the rank `peer`.
fn format_error_line(code: Code, peer: usize) -> String {
    format!("error: {code} of rank {peer}")
}

#[test]
fn every_rank_reports_a_killed_rank_within_a_second() {
    // The ranks of the victim's host learn of it from their peers on other hosts, because no agent
    // runs here.
    for hosts in [&[0, 1, 2][..], &[0, 0, 1, 1], &[0, 1, 1]] {
        for victim in 0..hosts.len() {
            let ranks = start_group("until-error", hosts);
            let elapsed = signal_rank_and_check_peers(ranks, victim, Signal::SIGKILL, codes::PEER_LOST);
            assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
        }
    }
}

#[test]
fn every_rank_reports_a_silent_rank_after_the_timeout() {
    for hosts in [&[0, 1, 2][..], &[0, 0, 1]] {
        let ranks = start_group("until-error", hosts);
        let elapsed = signal_rank_and_check_peers(ranks, 1, Signal::SIGSTOP, codes::PEER_SILENT);
        assert!(elapsed > Duration::from_millis(500) && elapsed < Duration::from_secs(3), "{elapsed:?}");
    }
}
