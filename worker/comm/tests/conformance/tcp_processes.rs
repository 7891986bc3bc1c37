//! The network transport between processes that die, stop and fall silent.
use crate::{checks, tcp::limits};
use comm::{
    Comm, CommError,
    tcp::{Endpoint, Group, Member, Stopper, TcpComm},
};
use device::Buf;
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

/// After this long a rank that hangs is killed by its own alarm.
const ALARM: u32 = 60;

/// A rank in its own process. Killed when dropped.
struct Rank {
    process: Child,
    stderr: BufReader<ChildStderr>,
}

impl Rank {
    /// The rest of the line on which the rank says `text`.
    fn hear(&mut self, text: &str) -> String {
        let mut line = String::new();
        while self.stderr.read_line(&mut line).expect("readable") > 0 {
            if let Some((_, rest)) = line.split_once(text) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the rank ended without saying {text:?}");
    }

    fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.process.id() as i32)
    }

    /// What it says until its end; fails unless it ends in order.
    fn succeed(mut self) -> String {
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).expect("readable");
        let status = self.process.wait().expect("a child");
        assert!(status.success(), "a rank ended with {status}: {said}");
        said
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a process for each rank; all have joined when this returns.
fn group(case: &str, hosts: &[usize]) -> Vec<Rank> {
    let names: Vec<String> = hosts.iter().map(usize::to_string).collect();
    let most = hosts.iter().max().expect("a host");
    // inheritable: no close-on-exec
    let memory: Vec<OwnedFd> = (0..=*most)
        .map(|_| memfd_create("comm-test", MFdFlags::MFD_ALLOW_SEALING).expect("a memfd"))
        .collect();
    let start = |(rank, host): (usize, &usize)| {
        let told = format!("{case} {rank} {} {}", memory[*host].as_raw_fd(), names.join(","));
        let mut process = Command::new(std::env::current_exe().expect("a path"))
            .args(["tcp_processes::child", "--exact", "--ignored", "--nocapture"])
            .env("COMM_TEST_CASE", told)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process");
        let stderr = BufReader::new(process.stderr.take().expect("piped"));
        Rank { process, stderr }
    };
    let mut ranks: Vec<Rank> = hosts.iter().enumerate().map(start).collect();
    let addresses: Vec<String> = ranks.iter_mut().map(|r| r.hear("listens at ")).collect();
    for rank in &mut ranks {
        let mut stdin = rank.process.stdin.take().expect("piped");
        writeln!(stdin, "{}", addresses.join(" ")).expect("a pipe");
    }
    ranks.iter_mut().for_each(|r| drop(r.hear("joined")));
    ranks
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
    let rank: usize = told[1].parse().expect("a rank");
    // SAFETY: the parent left this descriptor open for us.
    let memory = unsafe { OwnedFd::from_raw_fd(told[2].parse().expect("a descriptor")) };
    let endpoint = Endpoint::bind([127, 0, 0, 1].into()).expect("a port");
    eprintln!("listens at {}", endpoint.address().expect("an address"));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("addresses");
    let hosts = told[3].split(',').map(|h| h.parse().expect("a host"));
    let members: Vec<Member> = hosts
        .zip(line.split_whitespace())
        .map(|(host, a)| Member { host, addresses: vec![a.parse().expect("an address")] })
        .collect();
    let stopper = Stopper::new(rank, members.len()).expect("events");
    let group = Group { rank, members, run: "test".into(), attempt: 0, key: [5; 32] };
    let mut limits = limits();
    limits.silence = Duration::from_secs(1);
    let comm = endpoint.join(&group, Some(memory), limits, &stopper).expect("joined");
    eprintln!("joined");
    match play(told[0], &comm) {
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

fn play(case: &str, comm: &TcpComm) -> Result<(), String> {
    match case {
        "conforms" => (0..2).try_for_each(|seed| checks::run(comm, seed, 24, 9000)),
        "until-error" => {
            eprintln!("under way");
            let error = loop {
                if let Err(e) = anything(comm) {
                    break e;
                }
            };
            eprintln!("error: {error}");
            Ok(())
        }
        other => Err(format!("no case {other}")),
    }
}

fn anything(comm: &TcpComm) -> Result<(), CommError> {
    let mut x = Buf::zeroed(70_000);
    comm.all_reduce(x.view_mut())?;
    comm.broadcast(x.view_mut(), 1)?;
    comm.all_gather_bytes(&[0; 100])?;
    let mut all = Buf::zeroed(2000 * comm.world());
    comm.all_gather(all.view_mut(), x.view().slice(0..2000), &vec![2000; comm.world()])?;
    comm.reduce_scatter_fold(&[all.view()], &vec![2000; comm.world()], &mut |_, _, _| ())?;
    comm.barrier()
}

#[test]
fn processes_conform() {
    for hosts in [&[0, 1][..], &[0, 0, 0, 1], &[0, 1, 2, 3], &[0, 0, 0, 0, 1, 1, 1, 1]] {
        group("conforms", hosts).into_iter().for_each(|r| drop(r.succeed()));
    }
}

/// The survivors of the victim's end all name it; how long the last one took.
fn end(ranks: Vec<Rank>, victim: usize, how: Signal, words: &str) -> Duration {
    let mut ranks: Vec<Option<Rank>> = ranks.into_iter().map(Some).collect();
    ranks.iter_mut().flatten().for_each(|r| drop(r.hear("under way")));
    let dead = ranks[victim].take().expect("a rank");
    // somewhere in the middle of a collective
    std::thread::sleep(Duration::from_micros(u64::from(dead.process.id()) % 7 * 1100));
    let began = Instant::now();
    kill(dead.pid(), how).expect("a signal");
    for rank in ranks.into_iter().flatten() {
        let said = rank.succeed();
        assert!(said.contains(&format!("rank {victim} {words}")), "{said}");
    }
    began.elapsed()
}

#[test]
fn a_rank_killed_anywhere_is_named_by_all_within_a_second() {
    // A host's own ranks learn of it from their peers on other hosts: here nobody else tells them.
    for hosts in [&[0, 1, 2][..], &[0, 0, 1, 1], &[0, 1, 1]] {
        for victim in 0..hosts.len() {
            let took = end(group("until-error", hosts), victim, Signal::SIGKILL, "is gone");
            assert!(took < Duration::from_secs(1), "{took:?}");
        }
    }
}

#[test]
fn a_rank_that_falls_silent_is_named_after_the_limit() {
    for hosts in [&[0, 1, 2][..], &[0, 0, 1]] {
        let took = end(group("until-error", hosts), 1, Signal::SIGSTOP, "is silent");
        assert!(took > Duration::from_millis(500) && took < Duration::from_secs(3), "{took:?}");
    }
}
