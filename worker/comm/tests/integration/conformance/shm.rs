//! Tests of the transport between processes. Every rank is a process that runs this test
//! executable.
use super::checks::{self, CheckFailure, make_failure};
use comm::{
    AbortReason, CallMismatch, CollectiveKind, Comm, CommError,
    shm::{self, ShmComm, ShmLimits},
};
use device::Buf;
use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    signal::{Signal, kill, raise},
    wait::{WaitPidFlag, WaitStatus, waitpid},
};
use std::{
    io::{BufRead, BufReader, Read, Write},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    process::{Child, ChildStderr, Command, Stdio},
    time::Duration,
};

/// The number of seconds after which SIGALRM kills the process of a rank that hangs.
const ALARM_SECONDS: u32 = 60;

/// A rank in a separate process. Dropping it kills the process.
struct RankProcess {
    process: Child,
    stderr: BufReader<ChildStderr>,
}

impl RankProcess {
    fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.process.id() as i32)
    }

    /// Waits until the rank prints a line that contains `text`. Panics if the output ends before
    /// that.
    fn wait_for_line(&mut self, text: &str) {
        let mut line = String::new();
        while self.stderr.read_line(&mut line).expect("stderr is readable") > 0 {
            if line.contains(text) {
                return;
            }
            line.clear();
        }
        panic!("the rank ended without printing {text:?}");
    }

    /// Waits until the rank's process ends. Panics if the process failed.
    fn assert_success(mut self) {
        let mut stderr = String::new();
        self.stderr.read_to_string(&mut stderr).expect("stderr is readable");
        let status = self.process.wait().expect("the child can be waited for");
        assert!(status.success(), "a rank ended with {status}: {stderr}");
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A group whose ranks are processes that all run the test case `case`.
struct ProcessGroup {
    fd: OwnedFd,
    world: usize,
    case: String,
}

impl ProcessGroup {
    fn new(case: &str, world: usize) -> Self {
        // without close-on-exec, so that the ranks inherit it
        let fd = memfd_create("comm-test", MFdFlags::MFD_ALLOW_SEALING).expect("a memfd can be created");
        ProcessGroup { fd, world, case: case.into() }
    }

    fn spawn_rank(&self, rank: usize) -> RankProcess {
        let mut process = Command::new(std::env::current_exe().expect("the path of this executable"))
            .args(["conformance::shm::child_runs_one_rank", "--exact", "--ignored", "--nocapture"])
            .env("COMM_TEST_CASE", format!("{} {rank} {} {}", self.case, self.world, self.fd.as_raw_fd()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the process starts");
        let stderr = BufReader::new(process.stderr.take().expect("the stream is piped"));
        RankProcess { process, stderr }
    }

    fn spawn_all(&self) -> Vec<RankProcess> {
        (0..self.world).map(|r| self.spawn_rank(r)).collect()
    }
}

/// Returns the limits of the shared memory transport, such as timeouts and staging size, for the
/// test case `case`.
fn select_limits(case: &str) -> ShmLimits {
    let staging = if case.starts_with("small") { 4096 } else { ShmLimits::default().staging_bytes };
    let join = if case == "absent" { Duration::from_millis(300) } else { Duration::from_secs(50) };
    ShmLimits { join_timeout: join, collective_timeout: Duration::from_secs(50), staging_bytes: staging }
}

/// Runs the test case that the parent process selected, as one rank. Does nothing if no case was
/// selected, as in an ordinary test run.
#[test]
#[ignore = "run by the other tests"]
fn child_runs_one_rank() {
    let Ok(case) = std::env::var("COMM_TEST_CASE") else { return };
    // SAFETY: sets a timer only.
    unsafe { libc::alarm(ALARM_SECONDS) };
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("the signal can be set or sent");
    let args: Vec<&str> = case.split(' ').collect();
    let number = |i: usize| args[i].parse::<usize>().expect("the argument is a number");
    // SAFETY: the parent left this descriptor open for us.
    let fd = unsafe { OwnedFd::from_raw_fd(number(3) as i32) };
    let joined = ShmComm::join(fd, number(1), number(2), select_limits(args[0]));
    match run_case(args[0], number(1), joined) {
        Ok(()) => std::process::exit(0),
        Err(e) => {
            eprintln!("rank {}: {e}", args[1]);
            std::process::exit(1)
        }
    }
}

/// Runs the test case `case` in the process of rank `rank`. Fails if the outcome differs from the
/// expected one.
fn run_case(case: &str, rank: usize, joined: comm::Result<ShmComm>) -> Result<(), CheckFailure> {
    if case == "absent" {
        return match joined.err() {
            Some(CommError::JoinTimeout { rank: 1, world: 3, missing, .. }) if missing == [0, 2] => Ok(()),
            other => Err(make_failure("absent", format!("{other:?}"))),
        };
    }
    let comm = joined.map_err(|e| make_failure("join", e.to_string()))?;
    match case {
        "small" => (0..3).try_for_each(|seed| checks::check_random_collectives(&comm, seed, 24, 700)),
        "default" => checks::check_random_collectives(&comm, 7, 24, 9000),
        "large" => check_large_buffers(&comm),
        "killed" => {
            let error = run_until_error(&comm, |c| raise_in_rank_1(c, Signal::SIGKILL));
            expect_abort_request(error, "rank 1 was killed")
        }
        "anywhere" => {
            expect_abort_request(run_until_error(&comm, run_mixed_collectives), "rank 1 was killed")
        }
        "stopped" => check_stopped_rank_1(&comm, rank),
        "mismatch" => check_different_collectives(&comm, rank),
        "leaves" => check_early_leave(&comm, rank),
        other => Err(make_failure("case", other)),
    }
}

/// Checks all-gathers, reductions and broadcasts of tensors that are larger than the transport's
/// staging memory, and therefore take several rounds.
fn check_large_buffers(comm: &ShmComm) -> Result<(), CheckFailure> {
    let world = comm.world_size();
    let counts: Vec<usize> = (0..world).map(|r| 1_000_003 * (r % 3)).collect();
    checks::check_all_gather(comm, 1, &counts)?;
    checks::check_reduce_scatter(comm, 2, &counts)?;
    checks::check_all_reduce(comm, 3, 1_500_001)?;
    checks::check_broadcast(comm, 4, 1_500_001, world - 1)?;
    checks::check_reduce_scatter_ordered(comm, 5, &counts, &[1; 3][..world])?;
    checks::check_reduce_scatter_ordered(comm, 6, &[900_001, 500_001, 0][..world], &[3, 2, 4][..world])?;
    let matrix: Vec<Vec<usize>> =
        (0..world).map(|f| (0..world).map(|t| 300_007 * ((f + t) % 3)).collect()).collect();
    checks::check_all_to_all(comm, 7, &matrix)?;
    checks::check_all_gather_bytes(comm, 8, &[3_000_001, 0, comm::MAX_GATHER_BYTES / 8][..world])
}

/// Repeats `step` until it fails, and returns the error.
fn run_until_error(comm: &ShmComm, mut step: impl FnMut(&ShmComm) -> Result<(), CommError>) -> CommError {
    loop {
        if let Err(e) = step(comm) {
            return e;
        }
    }
}

/// Fails unless `error` is an abort for the expected reason.
fn expect_abort(error: Option<CommError>, expected: AbortReason) -> Result<(), CheckFailure> {
    match error {
        Some(CommError::Aborted(reason)) if reason == expected => Ok(()),
        other => Err(make_failure("abort reason", format!("{other:?}"))),
    }
}

/// Fails unless `error` is an abort that was requested with `reason`.
fn expect_abort_request(error: CommError, reason: &str) -> Result<(), CheckFailure> {
    expect_abort(Some(error), AbortReason::Requested { reason: reason.to_owned() })
}

/// Runs an ordered reduce-scatter of three ranks, in which rank 1 raises `signal` in the function
/// that receives its pieces.
fn raise_in_rank_1(comm: &ShmComm, signal: Signal) -> Result<(), CommError> {
    let partial = Buf::zeroed(30_000);
    comm.reduce_scatter_ordered(&[partial.view()], &[1; 3], &[10_000; 3], &mut |from, _, _| {
        if comm.rank() == 1 && from == 1 {
            raise(signal).expect("the signal can be set or sent");
        }
    })
}

/// Runs several collectives of different kinds, one after the other. Rank 1 prints a line before
/// the last one, so that the parent can act then.
fn run_mixed_collectives(comm: &ShmComm) -> Result<(), CommError> {
    let mut x = Buf::zeroed(70_000);
    comm.all_reduce(x.view_mut())?;
    comm.broadcast(x.view_mut(), 1)?;
    comm.all_gather_bytes(&[0; 100])?;
    if comm.rank() == 1 {
        eprintln!("running");
    }
    comm.barrier()
}

/// Checks that a group with a stopped rank can be aborted. Rank 1 stops during a collective. Rank 0
/// aborts the group when its standard input has a line, and every rank must report that abort.
fn check_stopped_rank_1(comm: &ShmComm, rank: usize) -> Result<(), CheckFailure> {
    std::thread::scope(|s| {
        if rank == 0 {
            s.spawn(|| {
                let mut line = String::new();
                let read = std::io::stdin().read_line(&mut line);
                comm.abort(if read.is_ok() { line.trim() } else { "no line" });
            });
        }
        let error = run_until_error(comm, |c| raise_in_rank_1(c, Signal::SIGSTOP));
        expect_abort_request(error, "rank 1 is stopped")
    })
}

/// Lets rank 1 call a different collective than the others, and checks that every rank reports both
/// calls.
fn check_different_collectives(comm: &ShmComm, rank: usize) -> Result<(), CheckFailure> {
    comm.barrier().map_err(|e| make_failure("barrier", e.to_string()))?;
    let called = match rank {
        1 => comm.barrier(),
        _ => comm.all_reduce(Buf::zeroed(5).view_mut()),
    };
    let Err(CommError::Mismatch(CallMismatch::Call { call, peer_call, .. })) = called else {
        return Err(make_failure("mismatch", format!("{called:?}")));
    };
    let (barrier, all_reduce) = if rank == 1 { (call, peer_call) } else { (peer_call, call) };
    if barrier.collective != Some(CollectiveKind::Barrier)
        || all_reduce.collective != Some(CollectiveKind::AllReduce)
        || (barrier.call_number, all_reduce.call_number, all_reduce.elements) != (1, 1, 5)
    {
        return Err(make_failure("mismatch", format!("{call} and {peer_call}")));
    }
    match comm.barrier() {
        Err(CommError::Aborted(_)) => Ok(()),
        other => Err(make_failure("after a mismatch", format!("{other:?}"))),
    }
}

/// Lets rank 1 leave the group, and checks that the other ranks report the leaving rank.
fn check_early_leave(comm: &ShmComm, rank: usize) -> Result<(), CheckFailure> {
    comm.barrier().map_err(|e| make_failure("barrier", e.to_string()))?; // all have joined
    if rank == 1 {
        return Ok(()); // the caller drops the communicator in order
    }
    let collective = "barrier (call 1)".to_owned();
    expect_abort(comm.barrier().err(), AbortReason::PeerLeft { rank: 1, collective })
}

/// Runs the test case `case` in one group for each number of ranks in `worlds`. Panics if a rank
/// fails.
fn assert_group_succeeds(case: &str, worlds: &[usize]) {
    for &world in worlds {
        ProcessGroup::new(case, world).spawn_all().into_iter().for_each(RankProcess::assert_success);
    }
}

#[test]
fn every_collective_conforms_with_tiny_staging() {
    assert_group_succeeds("small", &[1, 2, 3, 4, 5, 8]);
}

#[test]
fn every_collective_conforms_with_default_staging() {
    assert_group_succeeds("default", &[1, 2, 3, 4, 5, 8]);
}

#[test]
fn every_collective_conforms_for_many_megabytes() {
    assert_group_succeeds("large", &[1, 2, 3]);
}

#[test]
fn ranks_with_a_killed_peer_end_once_the_parent_aborts() {
    let group = ProcessGroup::new("killed", 3);
    let mut ranks = group.spawn_all();
    let mut victim = ranks.remove(1);
    victim.process.wait().expect("the child can be waited for");
    shm::abort_group(group.fd.as_fd(), "rank 1 was killed").expect("the segment can be aborted");
    ranks.into_iter().for_each(RankProcess::assert_success);
}

#[test]
fn ranks_with_a_peer_killed_anywhere_end_once_the_parent_aborts() {
    for _ in 0..8 {
        let group = ProcessGroup::new("anywhere", 3);
        let mut ranks = group.spawn_all();
        let mut victim = ranks.remove(1);
        victim.wait_for_line("running");
        drop(victim);
        shm::abort_group(group.fd.as_fd(), "rank 1 was killed").expect("the segment can be aborted");
        ranks.into_iter().for_each(RankProcess::assert_success);
    }
}

#[test]
fn ranks_with_a_stopped_peer_end_once_a_survivor_aborts() {
    let group = ProcessGroup::new("stopped", 3);
    let mut ranks = group.spawn_all();
    let stopped = ranks.remove(1);
    let status = waitpid(stopped.pid(), Some(WaitPidFlag::WUNTRACED)).expect("the child can be waited for");
    assert!(matches!(status, WaitStatus::Stopped(_, Signal::SIGSTOP)), "{status:?}");
    ranks[0]
        .process
        .stdin
        .take()
        .expect("the stream is piped")
        .write_all(b"rank 1 is stopped\n")
        .expect("the pipe is writable");
    ranks.into_iter().for_each(RankProcess::assert_success);
    kill(stopped.pid(), Signal::SIGKILL).expect("the signal can be set or sent");
}

#[test]
fn a_join_timeout_names_the_missing_ranks() {
    ProcessGroup::new("absent", 3).spawn_rank(1).assert_success();
}

#[test]
fn every_rank_reports_a_mismatch() {
    assert_group_succeeds("mismatch", &[3]);
}

#[test]
fn a_rank_that_leaves_unblocks_the_others() {
    assert_group_succeeds("leaves", &[3]);
}
