//! A channel's bytes to and from sockets of ours, both directions at once, on the thread that owns the session.
use contract::control::ExitStatus;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};
use ssh2::{BlockDirections, Channel, Session};
use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    str::FromStr,
};

/// Bytes on their way, in each direction.
const BUFFER: usize = 32 << 10;
/// For a host to say how the process ended, once its output has, milliseconds.
const LAST_WORDS: u32 = 2000;

/// How a channel ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct End {
    /// The connection broke; why.
    pub(super) broken: Option<String>,
    pub(super) status: Option<ExitStatus>,
}

/// Carries bytes until the process on the other side has ended, the connection breaks, or `local` is closed.
///
/// `local` gets its output (first `leftover`) and gives its input, `talk` gets what it says on stderr.
pub(super) fn pump(
    session: &Session,
    channel: Channel,
    local: &UnixStream,
    talk: Option<&UnixStream>,
    leftover: Vec<u8>,
) -> End {
    let ready =
        local.set_nonblocking(true).and_then(|()| talk.map_or(Ok(()), |talk| talk.set_nonblocking(true)));
    if let Err(error) = ready {
        return End { broken: Some(error.to_string()), status: None };
    }
    session.set_blocking(false);
    let mut pump = Pump {
        session,
        channel,
        local,
        talk,
        up: Buffer::default(),
        down: Buffer { bytes: leftover, sent: 0 },
        side: Buffer::default(),
        input: Input::Open,
        stuck: None,
        keepalive: super::connect::KEEPALIVE,
    };
    match pump.run() {
        Ok(()) => End { broken: None, status: pump.last_words() },
        Err(error) => End { broken: Some(error.to_string()), status: None },
    }
}

#[derive(Default)]
struct Buffer {
    bytes: Vec<u8>,
    sent: usize,
}

impl Buffer {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    fn is_empty(&self) -> bool {
        self.sent >= self.bytes.len()
    }

    /// Reads into it, when it is empty; the bytes that came.
    fn fill(&mut self, mut from: impl Read) -> io::Result<usize> {
        self.bytes.resize(BUFFER, 0);
        self.sent = 0;
        let result = from.read(&mut self.bytes);
        self.bytes.truncate(*result.as_ref().unwrap_or(&0));
        result
    }

    fn drain(&mut self, mut to: impl Write) -> io::Result<usize> {
        let n = to.write(self.rest())?;
        self.sent += n;
        Ok(n)
    }
}

/// The direction to the host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Input {
    Open,
    /// Nothing more will come from `local`; the host isn't told yet.
    Ended,
    Told,
}

/// What is done with the session. One that stopped in the middle of a packet has to be done again before any other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    Write,
    Eof,
    Read,
    Talk,
}

struct Pump<'a> {
    session: &'a Session,
    channel: Channel,
    local: &'a UnixStream,
    talk: Option<&'a UnixStream>,
    up: Buffer,
    down: Buffer,
    side: Buffer,
    input: Input,
    stuck: Option<Op>,
    /// Seconds to the next sign of life.
    keepalive: u32,
}

impl Pump<'_> {
    fn run(&mut self) -> io::Result<()> {
        loop {
            let mut moved = self.local()?;
            for op in [Op::Write, Op::Eof, Op::Read, Op::Talk] {
                if self.stuck.is_none_or(|stuck| stuck == op) {
                    moved |= self.remote(op)?;
                }
            }
            let drained = self.down.is_empty() && self.side.is_empty();
            if drained && self.stuck.is_none() && self.channel.eof() {
                return Ok(());
            }
            if !moved {
                self.wait()?;
            }
        }
    }

    /// What can be done with our own sockets.
    fn local(&mut self) -> io::Result<bool> {
        let mut moved = false;
        if self.input == Input::Open && self.up.is_empty() {
            match again(self.up.fill(self.local))? {
                Some(0) => self.input = Input::Ended,
                Some(_) => {}
                None => return self.out(moved),
            }
            moved = true;
        }
        self.out(moved)
    }

    fn out(&mut self, mut moved: bool) -> io::Result<bool> {
        if !self.down.is_empty() {
            moved |= again(self.down.drain(self.local))?.is_some();
        }
        match self.talk {
            Some(talk) if !self.side.is_empty() => match again(self.side.drain(talk)) {
                Ok(wrote) => moved |= wrote.is_some(),
                // nobody listens to the talk any more
                Err(_) => self.side = Buffer::default(),
            },
            // A bridge has no stderr.
            _ => self.side = Buffer::default(),
        }
        Ok(moved)
    }

    /// One thing with the session; whether it got on.
    fn remote(&mut self, op: Op) -> io::Result<bool> {
        let result = match op {
            Op::Write if !self.up.is_empty() => self.up.drain(&mut self.channel).map(|_| true),
            Op::Eof if self.input == Input::Ended && self.up.is_empty() => {
                let told = self.channel.send_eof().map_err(io::Error::from);
                told.map(|()| self.input = Input::Told).map(|()| true)
            }
            Op::Read if self.down.is_empty() => self.down.fill(&mut self.channel).map(|n| n > 0),
            Op::Talk if self.side.is_empty() => {
                self.side.fill(self.channel.stream(super::STDERR)).map(|n| n > 0)
            }
            _ => Ok(false),
        };
        let result = again(result);
        let outbound =
            matches!(self.session.block_directions(), BlockDirections::Outbound | BlockDirections::Both);
        self.stuck = (outbound && matches!(result, Ok(None))).then_some(op);
        Ok(result?.unwrap_or(false))
    }

    fn wait(&mut self) -> io::Result<()> {
        if self.stuck.is_none() && self.keepalive == 0 {
            let next = self.session.keepalive_send().map_err(io::Error::from);
            self.keepalive = again(next)?.unwrap_or(1).max(1);
        }
        // SAFETY: the session owns its socket, and lives longer than this call.
        let wire = unsafe { BorrowedFd::borrow_raw(self.session.as_raw_fd()) };
        let mut events = PollFlags::POLLIN;
        if self.stuck.is_some() {
            events |= PollFlags::POLLOUT;
        }
        let mut fds = vec![PollFd::new(wire, events)];
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLIN, self.input == Input::Open && self.up.is_empty());
        events.set(PollFlags::POLLOUT, !self.down.is_empty());
        fds.push(PollFd::new(self.local.as_fd(), events));
        if let Some(talk) = self.talk.filter(|_| !self.side.is_empty()) {
            fds.push(PollFd::new(talk.as_fd(), PollFlags::POLLOUT));
        }
        let timeout = PollTimeout::try_from(u64::from(self.keepalive) * 1000).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            Ok(0) => self.keepalive = 0,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Whoever owned the other end of `local` is gone altogether: there is nobody to carry for.
        let hung = fds.get(1).and_then(|fd| fd.revents()).is_some_and(|r| r.contains(PollFlags::POLLHUP));
        match hung && self.input == Input::Told {
            true => Err(io::Error::other("it was closed here")),
            false => Ok(()),
        }
    }

    /// How the process ended, when the host says so soon.
    fn last_words(&mut self) -> Option<ExitStatus> {
        self.session.set_blocking(true);
        self.session.set_timeout(LAST_WORDS);
        self.channel.wait_close().ok()?;
        let signal = self.channel.exit_signal().ok().and_then(|s| s.exit_signal);
        match signal {
            Some(name) => {
                Signal::from_str(&format!("SIG{name}")).ok().map(|s| ExitStatus::Signal(s as i32, false))
            }
            None => u8::try_from(self.channel.exit_status().ok()?).ok().map(ExitStatus::Code),
        }
    }
}

/// `None`: not now.
fn again<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(e) => Err(e),
    }
}
