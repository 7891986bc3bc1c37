//! Meeting the peers: each rank listens, the higher rank of a pair connects, and both prove who they are.
use super::{
    handshake::{self as hs, CHALLENGE, HELLO, Hello, Identity, Lane, SECRET, Side, Verdict},
    topology::Topology,
    watch::{Shared, poll_limit},
};
use crate::{CommError, Result, call};
use nix::poll::{PollFd, PollFlags, poll};
use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd},
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::{Duration, Instant},
};

/// Connections that have not proved who they are; one more drops the oldest.
const PENDING: usize = 256;
/// How long one may take to prove it.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long one attempt to connect may take.
const CONNECT: Duration = Duration::from_millis(900);
/// Between two attempts to reach the same rank.
const RETRY: Duration = Duration::from_millis(50);
/// How often a wait looks whether the group was aborted.
const GLANCE: Duration = Duration::from_millis(100);

/// Connections by lane and rank.
pub(super) type Streams = Vec<(u32, Lane, TcpStream)>;

/// One side's way to its peers.
pub(super) struct Meeting<'a> {
    pub(super) id: &'a Identity,
    pub(super) topology: &'a Topology,
    /// By rank.
    pub(super) addresses: &'a [Vec<SocketAddr>],
    pub(super) shared: &'a Shared,
    pub(super) limit: Duration,
    /// As TCP_USER_TIMEOUT: how long sent bytes may stay unacknowledged.
    pub(super) silence: Duration,
}

impl Meeting<'_> {
    /// Both connections to every rank on another host, non-blocking.
    pub(super) fn meet(&self, listener: &TcpListener) -> Result<Streams> {
        let deadline = Instant::now() + self.limit;
        let stop = AtomicBool::new(false);
        let (accepted, connected) = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| self.accept(listener, deadline, &stop));
            let connected = self.connect(deadline);
            stop.store(connected.is_err(), SeqCst);
            let accepted = accepting.join();
            (
                accepted.unwrap_or_else(|_| Err(CommError::Io("the accepting thread panicked".into()))),
                connected,
            )
        });
        let mut all = connected?;
        all.extend(accepted?);
        for (_, _, stream) in &all {
            self.prepare(stream).map_err(|e| CommError::Io(format!("a connection's options: {e}")))?;
        }
        Ok(all)
    }

    fn prepare(&self, stream: &TcpStream) -> std::io::Result<()> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        user_timeout(stream, self.silence)
    }

    fn late(&self, missing: &[usize], why: Option<&String>) -> CommError {
        let missing = call::ranks(missing, self.topology.world());
        let why = why.map_or_else(String::new, |w| format!(" (last: {w})"));
        CommError::Io(format!(
            "rank {} waited {:?} in join for {missing}, which did not come{why}",
            self.topology.rank, self.limit
        ))
    }

    // ---- the lower ranks ----

    fn connect(&self, deadline: Instant) -> Result<Streams> {
        let lower = self.topology.remote().filter(|r| *r < self.topology.rank);
        let mut todo: VecDeque<(usize, Lane)> = lower.flat_map(|r| Lane::ALL.map(|l| (r, l))).collect();
        let mut done = Vec::new();
        let mut why = None;
        while let Some((rank, lane)) = todo.pop_front() {
            if let Some(reason) = self.shared.reason() {
                return Err(CommError::Aborted(reason));
            }
            if Instant::now() >= deadline {
                todo.push_back((rank, lane));
                let mut missing: Vec<usize> = todo.iter().map(|(r, _)| *r).collect();
                missing.sort_unstable();
                missing.dedup();
                return Err(self.late(&missing, why.as_ref()));
            }
            match self.reach(rank, lane) {
                Ok(stream) => done.push((rank as u32, lane, stream)),
                Err(Unreached::Refused(verdict)) => {
                    let (me, reason) = (self.topology.rank, verdict.reason());
                    return Err(CommError::Io(format!("rank {rank} refused rank {me}: {reason}")));
                }
                Err(Unreached::Failed(what)) => {
                    why = Some(format!("rank {rank}: {what}"));
                    todo.push_back((rank, lane));
                    std::thread::sleep(RETRY);
                }
            }
        }
        Ok(done)
    }

    /// One attempt over all addresses of a rank.
    fn reach(&self, rank: usize, lane: Lane) -> std::result::Result<TcpStream, Unreached> {
        let mut last = Unreached::Failed("it has no address".into());
        for address in &self.addresses[rank] {
            match TcpStream::connect_timeout(address, CONNECT) {
                Ok(stream) => match self.prove(stream, rank as u32, lane) {
                    Err(Unreached::Failed(e)) => last = Unreached::Failed(format!("{address}: {e}")),
                    other => return other,
                },
                Err(e) => last = Unreached::Failed(format!("{address}: {e}")),
            }
        }
        Err(last)
    }

    fn prove(&self, mut stream: TcpStream, to: u32, lane: Lane) -> std::result::Result<TcpStream, Unreached> {
        let until = Instant::now() + HANDSHAKE;
        stream.set_read_timeout(Some(GLANCE))?;
        stream.set_write_timeout(Some(HANDSHAKE))?;
        stream.set_nodelay(true)?;
        let hello = hs::hello(self.id, to, lane, &hs::nonce()?);
        stream.write_all(&hello)?;
        let mut challenge = [0; CHALLENGE];
        self.read(&mut stream, &mut challenge, until)?;
        match hs::read_challenge(&challenge) {
            Some(Verdict::GoOn) => {}
            Some(verdict) => return Err(Unreached::Refused(verdict)),
            None => return Err(Unreached::Failed("what answers there is no rank of this job".into())),
        }
        stream.write_all(hs::mac(self.id, Side::Connector, &hello, &challenge).as_bytes())?;
        let mut welcome = [0; SECRET];
        self.read(&mut stream, &mut welcome, until)?;
        match hs::mac(self.id, Side::Acceptor, &hello, &challenge) == welcome {
            true => Ok(stream),
            false => Err(Unreached::Failed("what answers there does not know the job's key".into())),
        }
    }

    /// Fills `to`; looks at times whether the group was aborted.
    fn read(
        &self,
        stream: &mut TcpStream,
        to: &mut [u8],
        until: Instant,
    ) -> std::result::Result<(), Unreached> {
        let mut filled = 0;
        while filled < to.len() {
            match stream.read(&mut to[filled..]) {
                Ok(0) => {
                    return Err(Unreached::Failed(
                        "closed during the handshake (has it another key?)".into(),
                    ));
                }
                Ok(n) => filled += n,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= until || self.shared.reason().is_some() {
                        return Err(Unreached::Failed("no answer in the handshake".into()));
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    // ---- the higher ranks ----

    fn accept(&self, listener: &TcpListener, deadline: Instant, stop: &AtomicBool) -> Result<Streams> {
        let failed = |e: std::io::Error| CommError::Io(format!("the listener of collectives: {e}"));
        listener.set_nonblocking(true).map_err(failed)?;
        let mut missing: Vec<(u32, Lane)> = self
            .topology
            .remote()
            .filter(|r| *r > self.topology.rank)
            .flat_map(|r| Lane::ALL.map(|l| (r as u32, l)))
            .collect();
        let mut done: Streams = Vec::new();
        let mut pending: VecDeque<Pending> = VecDeque::new();
        while !missing.is_empty() && !stop.load(SeqCst) {
            if let Some(reason) = self.shared.reason() {
                return Err(CommError::Aborted(reason));
            }
            if Instant::now() >= deadline {
                let mut ranks: Vec<usize> = missing.iter().map(|(r, _)| *r as usize).collect();
                ranks.sort_unstable();
                ranks.dedup();
                return Err(self.late(&ranks, None));
            }
            self.sleep(listener, &pending);
            take_in(listener, &mut pending);
            let now = Instant::now();
            for _ in 0..pending.len() {
                let Some(mut one) = pending.pop_front() else { break };
                match one.go_on(self.id) {
                    Next::Proved(hello) => {
                        // A peer that didn't see its welcome comes again; the last one is the one it uses.
                        missing.retain(|m| *m != (hello.from, hello.lane));
                        done.retain(|(r, l, _)| (*r, *l) != (hello.from, hello.lane));
                        done.push((hello.from, hello.lane, one.stream));
                    }
                    Next::Wait if now < one.deadline => pending.push_back(one),
                    Next::Wait | Next::Drop => {}
                }
            }
        }
        Ok(done)
    }

    fn sleep(&self, listener: &TcpListener, pending: &VecDeque<Pending>) {
        let mut fds = vec![self.shared.wake_fd(), PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        fds.extend(pending.iter().map(|p| PollFd::new(p.stream.as_fd(), PollFlags::POLLIN)));
        _ = poll(&mut fds, poll_limit(GLANCE));
    }
}

/// The kernel gives a connection up when what was sent is not acknowledged for `limit`.
fn user_timeout(stream: &TcpStream, limit: Duration) -> std::io::Result<()> {
    let ms = libc::c_uint::try_from(limit.as_millis()).unwrap_or(libc::c_uint::MAX);
    let size = size_of_val(&ms) as libc::socklen_t;
    // SAFETY: the descriptor is open and the value has the size that is given.
    let done = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_USER_TIMEOUT,
            std::ptr::from_ref(&ms).cast(),
            size,
        )
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Accepts what waits at the listener.
fn take_in(listener: &TcpListener, pending: &mut VecDeque<Pending>) {
    for _ in 0..PENDING {
        let Ok((stream, _)) = listener.accept() else { return };
        if stream.set_nonblocking(true).is_err() || stream.set_nodelay(true).is_err() {
            continue;
        }
        if pending.len() >= PENDING {
            pending.pop_front();
        }
        pending.push_back(Pending {
            stream,
            deadline: Instant::now() + HANDSHAKE,
            hello: [0; HELLO],
            proof: [0; SECRET],
            filled: 0,
            expected: None,
        });
    }
}

enum Unreached {
    /// Its answer; trying again won't help.
    Refused(Verdict),
    Failed(String),
}

impl From<std::io::Error> for Unreached {
    fn from(e: std::io::Error) -> Self {
        Unreached::Failed(e.to_string())
    }
}

/// A connection that has not proved who it is.
struct Pending {
    stream: TcpStream,
    deadline: Instant,
    hello: [u8; HELLO],
    proof: [u8; SECRET],
    filled: usize,
    /// After the challenge: who it says it is, the right proof, and the answer to it.
    expected: Option<(Hello, blake3::Hash, blake3::Hash)>,
}

enum Next {
    Wait,
    Drop,
    Proved(Hello),
}

impl Pending {
    fn go_on(&mut self, id: &Identity) -> Next {
        loop {
            let to = match self.expected {
                None => &mut self.hello[self.filled..],
                Some(_) => &mut self.proof[self.filled..],
            };
            match self.stream.read(to) {
                Ok(0) => return Next::Drop,
                Ok(n) => self.filled += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Next::Wait,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Next::Drop,
            }
            if let Some((hello, proof, welcome)) = self.expected {
                if self.filled == SECRET {
                    let right = proof == self.proof && self.stream.write_all(welcome.as_bytes()).is_ok();
                    return if right { Next::Proved(hello) } else { Next::Drop };
                }
            } else if self.filled == HELLO && !self.challenge(id) {
                return Next::Drop;
            }
        }
    }

    /// Answers a HELLO; false: it is not wanted.
    fn challenge(&mut self, id: &Identity) -> bool {
        let Some(judged) = hs::judge(id, &self.hello) else { return false };
        let Ok(nonce) = hs::nonce() else { return false };
        let verdict = judged.err().unwrap_or(Verdict::GoOn);
        let challenge = hs::challenge(verdict, &nonce);
        // Fits into the empty buffer of a new connection.
        let (Ok(()), Ok(hello)) = (self.stream.write_all(&challenge), judged) else { return false };
        let mac = |side| hs::mac(id, side, &self.hello, &challenge);
        self.expected = Some((hello, mac(Side::Connector), mac(Side::Acceptor)));
        self.filled = 0;
        true
    }
}
