//! The process transport: every rank is a process, made by running this test executable again.
use crate::checks;
use comm::{
    Comm, CommError,
    shm::{self, Limits, ShmComm},
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

/// After this long a rank that hangs is killed by its own alarm.
const ALARM: u32 = 60;

/// A rank in its own process. Killed when dropped.
struct Rank {
    process: Child,
    stderr: BufReader<ChildStderr>,
}

impl Rank {
    fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.process.id() as i32)
    }

    /// Waits for a line on which the rank says `text`.
    fn hear(&mut self, text: &str) {
        let mut line = String::new();
        while self.stderr.read_line(&mut line).expect("readable") > 0 {
            if line.contains(text) {
                return;
            }
            line.clear();
        }
        panic!("the rank ended without saying {text:?}");
    }

    /// Fails unless the rank ends in order.
    fn succeed(mut self) {
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).expect("readable");
        let status = self.process.wait().expect("a child");
        assert!(status.success(), "a rank ended with {status}: {said}");
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A group of processes that all play `case`.
struct Group {
    fd: OwnedFd,
    world: usize,
    case: String,
}

impl Group {
    fn new(case: &str, world: usize) -> Self {
        // inheritable: no close-on-exec
        let fd = memfd_create("comm-test", MFdFlags::MFD_ALLOW_SEALING).expect("a memfd");
        Group { fd, world, case: case.into() }
    }

    fn rank(&self, rank: usize) -> Rank {
        let mut process = Command::new(std::env::current_exe().expect("a path"))
            .args(["shm::child", "--exact", "--ignored", "--nocapture"])
            .env("COMM_TEST_CASE", format!("{} {rank} {} {}", self.case, self.world, self.fd.as_raw_fd()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process");
        let stderr = BufReader::new(process.stderr.take().expect("piped"));
        Rank { process, stderr }
    }

    fn all(&self) -> Vec<Rank> {
        (0..self.world).map(|r| self.rank(r)).collect()
    }
}

fn limits(case: &str) -> Limits {
    let staging = if case.starts_with("small") { 4096 } else { Limits::default().staging };
    let join = if case == "absent" { Duration::from_millis(300) } else { Duration::from_secs(50) };
    Limits { join, wait: Duration::from_secs(50), staging }
}

/// The child's side of the tests below; does nothing when run by hand.
#[test]
#[ignore = "run by the other tests"]
fn child() {
    let Ok(told) = std::env::var("COMM_TEST_CASE") else { return };
    // SAFETY: only sets a timer and asks for a signal at the parent's death.
    unsafe { libc::alarm(ALARM) };
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).expect("a signal");
    let told: Vec<&str> = told.split(' ').collect();
    let number = |i: usize| told[i].parse::<usize>().expect("a number");
    // SAFETY: the parent left this descriptor open for us.
    let fd = unsafe { OwnedFd::from_raw_fd(number(3) as i32) };
    let joined = ShmComm::join(fd, number(1), number(2), limits(told[0]));
    match play(told[0], number(1), joined) {
        Ok(()) => std::process::exit(0),
        Err(e) => {
            eprintln!("rank {}: {e}", told[1]);
            std::process::exit(1)
        }
    }
}

fn play(case: &str, rank: usize, joined: comm::Result<ShmComm>) -> Result<(), String> {
    if case == "absent" {
        let error = joined.err().ok_or("joined without a peer")?.to_string();
        let right = error.contains("in join for ranks 0, 2 of 3, which did not come");
        return if right { Ok(()) } else { Err(error) };
    }
    let comm = joined.map_err(|e| e.to_string())?;
    match case {
        "small" => (0..3).try_for_each(|seed| checks::run(&comm, seed, 24, 700)),
        "default" => checks::run(&comm, 7, 24, 9000),
        "large" => large(&comm),
        "killed" => expect(until_error(&comm, |c| faulty(c, Signal::SIGKILL)), "rank 1 was killed"),
        "anywhere" => expect(until_error(&comm, anything), "rank 1 was killed"),
        "stopped" => stopped(&comm, rank),
        "mismatch" => mismatch(&comm, rank),
        "leaves" => leaves(&comm, rank),
        other => Err(format!("no case {other}")),
    }
}

/// Sizes beyond staging in every streaming collective, and partials that need one and several windows.
fn large(comm: &ShmComm) -> Result<(), String> {
    let world = comm.world();
    let counts: Vec<usize> = (0..world).map(|r| 1_000_003 * (r % 3)).collect();
    checks::all_gather(comm, 1, &counts)?;
    checks::reduce_scatter(comm, 2, &counts)?;
    checks::all_reduce(comm, 3, 1_500_001)?;
    checks::broadcast(comm, 4, 1_500_001, world - 1)?;
    checks::reduce_scatter_fold(comm, 5, &counts, &[1; 3][..world])?;
    checks::reduce_scatter_fold(comm, 6, &[900_001, 500_001, 0][..world], &[3, 2, 4][..world])?;
    let matrix: Vec<Vec<usize>> =
        (0..world).map(|f| (0..world).map(|t| 300_007 * ((f + t) % 3)).collect()).collect();
    checks::all_to_all(comm, 7, &matrix)?;
    checks::all_gather_bytes(comm, 8, &[3_000_001, 0, comm::MAX_GATHER_BYTES / 8][..world])
}

fn until_error(comm: &ShmComm, mut step: impl FnMut(&ShmComm) -> Result<(), CommError>) -> CommError {
    loop {
        if let Err(e) = step(comm) {
            return e;
        }
    }
}

fn expect(error: CommError, reason: &str) -> Result<(), String> {
    match error {
        CommError::Aborted(r) if r == reason => Ok(()),
        other => Err(format!("got: {other}")),
    }
}

/// A collective in whose middle rank 1 is struck by `signal`.
fn faulty(comm: &ShmComm, signal: Signal) -> Result<(), CommError> {
    let partial = Buf::zeroed(30_000);
    comm.reduce_scatter_fold(&[partial.view()], &[10_000; 3], &mut |from, _, _| {
        if comm.rank() == 1 && from == 1 {
            raise(signal).expect("a signal");
        }
    })
}

fn anything(comm: &ShmComm) -> Result<(), CommError> {
    let mut x = Buf::zeroed(70_000);
    comm.all_reduce(x.view_mut())?;
    comm.broadcast(x.view_mut(), 1)?;
    comm.all_gather_bytes(&[0; 100])?;
    if comm.rank() == 1 {
        eprintln!("under way");
    }
    comm.barrier()
}

fn stopped(comm: &ShmComm, rank: usize) -> Result<(), String> {
    std::thread::scope(|s| {
        if rank == 0 {
            s.spawn(|| {
                let mut line = String::new();
                let heard = std::io::stdin().read_line(&mut line);
                comm.abort(if heard.is_ok() { line.trim() } else { "no line" });
            });
        }
        expect(until_error(comm, |c| faulty(c, Signal::SIGSTOP)), "rank 1 is stopped")
    })
}

fn mismatch(comm: &ShmComm, rank: usize) -> Result<(), String> {
    comm.barrier().map_err(|e| e.to_string())?;
    let called = match rank {
        1 => comm.barrier(),
        _ => comm.all_reduce(Buf::zeroed(5).view_mut()),
    };
    let sides = ["rank 1 calls barrier (call 1", "calls all_reduce (call 1, 5 elements)"];
    match called {
        Err(CommError::Mismatch(text)) if sides.iter().all(|s| text.contains(s)) => (),
        other => return Err(format!("{other:?}")),
    }
    match comm.barrier() {
        Err(CommError::Aborted(_)) => Ok(()),
        other => Err(format!("after a mismatch: {other:?}")),
    }
}

fn leaves(comm: &ShmComm, rank: usize) -> Result<(), String> {
    comm.barrier().map_err(|e| e.to_string())?; // all have joined
    if rank == 1 {
        return Ok(()); // dropped by the caller, in order
    }
    expect(
        comm.barrier().err().unwrap_or(CommError::Io("passed".into())),
        "rank 1 left the group before barrier (call 1)",
    )
}

fn conforms(case: &str, worlds: &[usize]) {
    for &world in worlds {
        Group::new(case, world).all().into_iter().for_each(Rank::succeed);
    }
}

#[test]
fn conforms_with_tiny_staging() {
    conforms("small", &[1, 2, 3, 4, 5, 8]);
}

#[test]
fn conforms_with_default_staging() {
    conforms("default", &[1, 2, 3, 4, 5, 8]);
}

#[test]
fn conforms_for_many_megabytes() {
    conforms("large", &[1, 2, 3]);
}

#[test]
fn a_killed_rank_frees_the_others_once_the_parent_aborts() {
    let group = Group::new("killed", 3);
    let mut ranks = group.all();
    let mut dead = ranks.remove(1);
    dead.process.wait().expect("a child");
    shm::abort(group.fd.as_fd(), "rank 1 was killed").expect("a segment");
    ranks.into_iter().for_each(Rank::succeed);
}

#[test]
fn a_rank_killed_anywhere_frees_the_others_once_the_parent_aborts() {
    for _ in 0..8 {
        let group = Group::new("anywhere", 3);
        let mut ranks = group.all();
        let mut dead = ranks.remove(1);
        dead.hear("under way");
        drop(dead);
        shm::abort(group.fd.as_fd(), "rank 1 was killed").expect("a segment");
        ranks.into_iter().for_each(Rank::succeed);
    }
}

#[test]
fn a_stopped_rank_frees_the_others_once_a_survivor_aborts() {
    let group = Group::new("stopped", 3);
    let mut ranks = group.all();
    let asleep = ranks.remove(1);
    let status = waitpid(asleep.pid(), Some(WaitPidFlag::WUNTRACED)).expect("a child");
    assert!(matches!(status, WaitStatus::Stopped(_, Signal::SIGSTOP)), "{status:?}");
    ranks[0].process.stdin.take().expect("piped").write_all(b"rank 1 is stopped\n").expect("a pipe");
    ranks.into_iter().for_each(Rank::succeed);
    kill(asleep.pid(), Signal::SIGKILL).expect("a signal");
}

#[test]
fn a_rank_that_never_joins_is_named() {
    Group::new("absent", 3).rank(1).succeed();
}

#[test]
fn disagreement_is_named_by_everybody() {
    conforms("mismatch", &[3]);
}

#[test]
fn a_rank_that_leaves_frees_the_others() {
    conforms("leaves", &[3]);
}
