//! Moving a step of a collective over all data connections at once: the calling thread sends and receives in turns, straight
//! from and to the caller's memory, whatever is ready next.
//!
//! Each message has a header: its number on this connection, the call it belongs to (three words), its length. The receiver
//! knows all of it beforehand and compares; so nothing is ever allocated for what a peer says, and ranks that disagree about a
//! collective find out here. The kernel's socket buffers are the only ones.
use super::{
    topology::Topology,
    watch::{Shared, poll_limit},
};
use crate::{
    CommError, Result,
    call::{self, Call},
    shm::{Outgoing, fits},
};
use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::socket::{MsgFlags, sendmsg},
};
use std::{
    io::{ErrorKind, IoSlice, Read},
    net::TcpStream,
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};

/// Bytes of a header: five words.
const HEADER: usize = 40;
/// The most bytes that one connection moves before the others get their turn.
const TURN: usize = 1 << 20;
/// How often a wait looks at its limit.
const GLANCE: Duration = Duration::from_millis(500);

/// The data connection to one rank.
pub(super) struct Conn {
    pub(super) stream: TcpStream,
    /// Messages begun in each direction.
    sent: u64,
    got: u64,
}

impl Conn {
    /// `stream` is non-blocking.
    pub(super) fn new(stream: TcpStream) -> Self {
        Conn { stream, sent: 0, got: 0 }
    }
}

/// Where a message's bytes come from.
pub(super) enum Source<'a> {
    /// A part of the buffer that also receives; the parts don't overlap.
    Buffer(Range<usize>),
    Parts(Outgoing<'a>),
}

impl Source<'_> {
    fn len(&self) -> usize {
        match self {
            Source::Buffer(range) => range.len(),
            Source::Parts(out) => out.len(),
        }
    }
}

/// What one connection has to do in a step.
pub(super) struct Job<'a> {
    pub(super) peer: usize,
    /// What to send, if anything.
    pub(super) out: Option<Source<'a>>,
    /// Where in the buffer to put what comes, if anything comes.
    pub(super) room: Option<Range<usize>>,
    head_out: [u8; HEADER],
    head_in: [u8; HEADER],
    /// Bytes moved, headers included.
    written: usize,
    read: usize,
}

impl<'a> Job<'a> {
    pub(super) fn new(peer: usize, out: Option<Source<'a>>, room: Option<Range<usize>>) -> Self {
        Job { peer, out, room, head_out: [0; HEADER], head_in: [0; HEADER], written: 0, read: 0 }
    }

    fn writes(&self) -> bool {
        self.out.as_ref().is_some_and(|out| self.written < HEADER + out.len())
    }

    fn reads(&self) -> bool {
        self.room.as_ref().is_some_and(|room| self.read < HEADER + room.len())
    }
}

/// Why a connection can't go on.
enum Broken {
    /// The peer closed it or it failed.
    Ended,
    Disagree(String),
}

/// A step under way.
pub(super) struct Step<'a> {
    pub(super) topology: &'a Topology,
    pub(super) shared: &'a Shared,
    pub(super) call: &'a Call,
    /// How long nothing may move.
    pub(super) wait: Duration,
}

impl Step<'_> {
    /// Moves everything. The errors are not yet told to anybody.
    pub(super) fn run(&self, conns: &mut [Option<Conn>], buf: &mut [u8], jobs: &mut [Job]) -> Result<()> {
        for job in jobs.iter_mut() {
            let conn = connection(conns, job.peer)?;
            if let Some(out) = &job.out {
                job.head_out = header(conn.sent, self.call, out.len());
                conn.sent += 1;
            }
            conn.got += u64::from(job.room.is_some());
        }
        let mut moved_at = Instant::now();
        loop {
            let mut moved = 0;
            for job in jobs.iter_mut() {
                moved += self.progress(connection(conns, job.peer)?, buf, job)?;
            }
            if !jobs.iter().any(|j| j.writes() || j.reads()) {
                return Ok(());
            }
            if let Some(reason) = self.shared.reason() {
                return Err(CommError::Aborted(reason));
            }
            match moved {
                0 if moved_at.elapsed() >= self.wait => return Err(self.late(jobs)),
                0 => self.sleep(conns, jobs, self.wait.saturating_sub(moved_at.elapsed())),
                _ => moved_at = Instant::now(),
            }
        }
    }

    fn progress(&self, conn: &mut Conn, buf: &mut [u8], job: &mut Job) -> Result<usize> {
        let (written, read) = (job.written, job.read);
        let done = write(conn, buf, job).and_then(|()| self.read(conn, buf, job));
        if job.read > read {
            self.shared.hear(job.peer);
        }
        match done {
            Ok(()) => Ok(job.written - written + job.read - read),
            Err(Broken::Disagree(what)) => Err(CommError::Mismatch(what)),
            Err(Broken::Ended) => {
                let before = format!("{} (call {})", self.call.kind.name(), self.call.seq);
                Err(CommError::Aborted(self.shared.why_gone(job.peer, &before)))
            }
        }
    }

    fn read(&self, conn: &mut Conn, buf: &mut [u8], job: &mut Job) -> std::result::Result<(), Broken> {
        let Some(room) = job.room.clone() else { return Ok(()) };
        let mut turn = 0;
        while job.read < HEADER + room.len() && turn < TURN {
            let to = match job.read.checked_sub(HEADER) {
                None => &mut job.head_in[job.read..],
                Some(at) => {
                    let end = room.len().min(at + TURN);
                    &mut buf[room.start + at..room.start + end]
                }
            };
            match conn.stream.read(to) {
                Ok(0) => return Err(Broken::Ended),
                Ok(n) => {
                    turn += n;
                    job.read += n;
                    if job.read == HEADER {
                        self.check(conn.got - 1, job.peer, &job.head_in, room.len())?;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Broken::Ended),
            }
        }
        Ok(())
    }

    /// The peer's header against what this rank expects.
    fn check(
        &self,
        number: u64,
        peer: usize,
        head: &[u8; HEADER],
        len: usize,
    ) -> std::result::Result<(), Broken> {
        let word = |i: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&head[i * 8..i * 8 + 8]);
            u64::from_le_bytes(bytes)
        };
        let me = self.topology.rank;
        self.call.agree(me, peer, [word(1), word(2), word(3)]).map_err(Broken::Disagree)?;
        if word(0) != number {
            let what = format!("rank {me} got message {} from rank {peer} instead of {number}", word(0));
            return Err(Broken::Disagree(what));
        }
        fits(peer, me, word(4), len as u64).map_err(Broken::Disagree)
    }

    fn sleep(&self, conns: &[Option<Conn>], jobs: &[Job], limit: Duration) {
        let mut fds = vec![self.shared.wake_fd()];
        for job in jobs.iter().filter(|j| j.writes() || j.reads()) {
            let mut events = PollFlags::empty();
            events.set(PollFlags::POLLIN, job.reads());
            events.set(PollFlags::POLLOUT, job.writes());
            if let Some(conn) = &conns[job.peer] {
                fds.push(PollFd::new(conn.stream.as_fd(), events));
            }
        }
        _ = poll(&mut fds, poll_limit(limit.min(GLANCE)));
    }

    fn late(&self, jobs: &[Job]) -> CommError {
        let mut missing: Vec<usize> =
            jobs.iter().filter(|j| j.reads() || j.writes()).map(|j| j.peer).collect();
        missing.sort_unstable();
        let (me, kind, seq) = (self.topology.rank, self.call.kind.name(), self.call.seq);
        let missing = call::ranks(&missing, self.topology.world());
        CommError::Io(format!(
            "rank {me} waited {:?} in {kind} (call {seq}) for {missing}, which did not come",
            self.wait
        ))
    }
}

fn connection(conns: &mut [Option<Conn>], peer: usize) -> Result<&mut Conn> {
    let conn = conns.get_mut(peer).and_then(Option::as_mut);
    conn.ok_or_else(|| CommError::Io(format!("there is no connection to rank {peer}")))
}

fn header(number: u64, call: &Call, len: usize) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    let [a, b, c] = call.words();
    for (to, word) in out.chunks_exact_mut(8).zip([number, a, b, c, len as u64]) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    out
}

fn write(conn: &Conn, buf: &[u8], job: &mut Job) -> std::result::Result<(), Broken> {
    let Some(out) = &job.out else { return Ok(()) };
    let total = HEADER + out.len();
    let mut turn = 0;
    while job.written < total && turn < TURN {
        let at = job.written.saturating_sub(HEADER);
        let body: &[u8] = match out {
            _ if at >= out.len() => &[],
            Source::Buffer(range) => &buf[range.start + at..range.end],
            Source::Parts(parts) => parts.contiguous(at),
        };
        let head = &job.head_out[job.written.min(HEADER)..];
        let slices = [IoSlice::new(head), IoSlice::new(&body[..body.len().min(TURN)])];
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match sendmsg::<()>(conn.stream.as_raw_fd(), &slices, &[], flags, None) {
            Ok(n) => {
                turn += n;
                job.written += n;
            }
            Err(nix::errno::Errno::EAGAIN) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return Err(Broken::Ended),
        }
    }
    Ok(())
}
