//! Copies bytes between a process on a host, which runs through an SSH channel, and local sockets,
//! in both directions.
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};
use protocol::control::ExitStatus;
use ssh2::{BlockDirections, Channel, Session};
use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    str::FromStr,
};

/// The number of the stream in an SSH channel that carries the stderr of the remote process (RFC
/// 4254, 5.2).
pub(super) const STDERR_STREAM_ID: i32 = 1;
/// The interval, in seconds, at which keepalive messages are sent on an idle SSH connection.
const KEEPALIVE_INTERVAL_S: u32 = 15;
/// The size, in bytes, of each buffer through which bytes are copied between an SSH channel and a
/// local socket.
const BUFFER_BYTES: usize = 32 << 10;
/// How long, in milliseconds, the SSH server may take to report the exit status of a remote process
/// after the output of the process has ended.
const EXIT_STATUS_TIMEOUT_MS: u32 = 2000;

/// Copies bytes between a process on a host and local sockets until the process has closed its
/// output. Blocks. Fails if the connection fails or the other end of `local` is closed.
///
/// `local` receives `leftover` (output of the process that was read before) and then the rest of
/// the output, and provides the input of the process. `stderr` receives the standard error of the
/// process, which is dropped if `stderr` is `None`. Returns the exit status of the process, or
/// `None` if the host does not report it.
pub(super) fn relay_channel(
    session: &Session,
    channel: Channel,
    local: &UnixStream,
    stderr: Option<&UnixStream>,
    leftover: Vec<u8>,
) -> io::Result<Option<ExitStatus>> {
    local.set_nonblocking(true)?;
    if let Some(stderr) = stderr {
        stderr.set_nonblocking(true)?;
    }
    // Blocking calls of libssh2 fail when a keepalive message is due, even if their time limit has
    // not passed. So the messages begin here.
    session.set_keepalive(true, KEEPALIVE_INTERVAL_S);
    session.set_blocking(false);
    let mut relay = ChannelRelay {
        session,
        channel,
        local,
        stderr,
        to_host: RelayBuffer::default(),
        from_host: RelayBuffer::with_bytes(leftover),
        from_stderr: RelayBuffer::default(),
        input: RelayInputState::Open,
        blocked: None,
        keepalive_s: KEEPALIVE_INTERVAL_S,
    };
    relay.run_relay()?;
    Ok(relay.wait_for_exit_status())
}

/// A buffer for bytes on their way from an SSH channel to a local socket, or from a local socket to
/// an SSH channel.
#[derive(Default)]
pub(super) struct RelayBuffer {
    /// The content, up to `filled`. The rest was in an earlier content or is 0.
    bytes: Vec<u8>,
    filled: usize,
    /// The number of bytes at the start of `bytes` that were written already.
    written: usize,
}

impl RelayBuffer {
    /// Creates a buffer that already contains `bytes`, which must be written to the SSH channel or
    /// the local socket.
    pub(super) fn with_bytes(bytes: Vec<u8>) -> RelayBuffer {
        RelayBuffer { filled: bytes.len(), bytes, written: 0 }
    }

    /// Returns those bytes of the buffer that were not yet written to the SSH channel or the local
    /// socket.
    fn unwritten(&self) -> &[u8] {
        &self.bytes[self.written..self.filled]
    }

    /// Returns whether all bytes of the buffer were written to the SSH channel or the local socket.
    pub(super) fn is_empty(&self) -> bool {
        self.written >= self.filled
    }

    /// Discards the content.
    fn clear(&mut self) {
        (self.filled, self.written) = (0, 0);
    }

    /// Reads bytes from `source` into this buffer, in place of the earlier bytes, which were all
    /// written. The caller must first write out all earlier bytes. Returns the number of bytes that
    /// were read, which is 0 at the end of the stream.
    pub(super) fn fill_from(&mut self, mut source: impl Read) -> io::Result<usize> {
        // Many calls read nothing, so the buffer is initialized only once.
        if self.bytes.len() < BUFFER_BYTES {
            self.bytes.resize(BUFFER_BYTES, 0);
        }
        self.clear();
        self.filled = source.read(&mut self.bytes)?;
        Ok(self.filled)
    }

    /// Writes as many of the buffer's unwritten bytes to `sink` as `sink` accepts at once. Returns
    /// the number of bytes that were written.
    pub(super) fn write_to(&mut self, mut sink: impl Write) -> io::Result<usize> {
        let n = sink.write(self.unwritten())?;
        self.written += n;
        Ok(n)
    }
}

/// The state of the input for a process on a host: still open, ended on this machine, or also
/// reported as ended to the SSH server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RelayInputState {
    Open,
    /// The local socket has no more input, and the host was not informed yet.
    Ended,
    /// The end of the input was sent to the host.
    EofSent,
}

/// One of the operations of libssh2 that pass on the bytes of an SSH channel: write, send the end
/// of the input, read stdout, or read stderr. libssh2 requires that an operation that blocked in
/// the middle of a packet is repeated before any other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SshSessionOp {
    Write,
    SendEof,
    Read,
    ReadStderr,
}

/// Copies bytes in both directions between a process on a host, which runs through an SSH channel,
/// and local sockets of the controller.
struct ChannelRelay<'a> {
    session: &'a Session,
    channel: Channel,
    local: &'a UnixStream,
    stderr: Option<&'a UnixStream>,
    to_host: RelayBuffer,
    from_host: RelayBuffer,
    from_stderr: RelayBuffer,
    input: RelayInputState,
    /// The operation that has to be repeated before any other.
    blocked: Option<SshSessionOp>,
    /// Seconds to wait before the next keepalive message; 0 if the message is due.
    keepalive_s: u32,
}

impl ChannelRelay<'_> {
    /// Copies bytes between the remote process and the local sockets until the process has closed
    /// its output. Fails if the connection fails or the local socket is closed.
    fn run_relay(&mut self) -> io::Result<()> {
        loop {
            let mut progressed = self.relay_local_sockets()?;
            for op in
                [SshSessionOp::Write, SshSessionOp::SendEof, SshSessionOp::Read, SshSessionOp::ReadStderr]
            {
                if self.blocked.is_none_or(|blocked| blocked == op) {
                    progressed |= self.run_session_op(op)?;
                }
            }
            let drained = self.from_host.is_empty() && self.from_stderr.is_empty();
            if drained && self.blocked.is_none() && self.channel.eof() {
                return Ok(());
            }
            if !progressed {
                self.wait_for_io()?;
            }
        }
    }

    /// Reads available input for the remote process from the local sockets, and writes the remote
    /// process's buffered output to the local sockets. Returns whether any bytes moved.
    fn relay_local_sockets(&mut self) -> io::Result<bool> {
        let mut progressed = false;
        if self.input == RelayInputState::Open && self.to_host.is_empty() {
            match none_if_would_block(self.to_host.fill_from(self.local))? {
                Some(0) => self.input = RelayInputState::Ended,
                Some(_) => {}
                None => return self.write_to_local_sockets(progressed),
            }
            progressed = true;
        }
        self.write_to_local_sockets(progressed)
    }

    /// Writes buffered output of the remote process to the local sockets. Returns `true` if any
    /// bytes moved or `progressed` is set.
    fn write_to_local_sockets(&mut self, mut progressed: bool) -> io::Result<bool> {
        if !self.from_host.is_empty() {
            progressed |= none_if_would_block(self.from_host.write_to(self.local))?.is_some();
        }
        match self.stderr {
            Some(stderr) if !self.from_stderr.is_empty() => {
                match none_if_would_block(self.from_stderr.write_to(stderr)) {
                    Ok(written) => progressed |= written.is_some(),
                    // The reader of stderr has gone.
                    Err(_) => self.from_stderr.clear(),
                }
            }
            // A tunnel has no stderr.
            _ => self.from_stderr.clear(),
        }
        Ok(progressed)
    }

    /// Performs the operation `op` on the SSH channel (write, send EOF, read stdout or read stderr)
    /// if the relay's buffers permit it. Returns whether the operation progressed.
    fn run_session_op(&mut self, op: SshSessionOp) -> io::Result<bool> {
        let result = match op {
            SshSessionOp::Write if !self.to_host.is_empty() => {
                self.to_host.write_to(&mut self.channel).map(|_| true)
            }
            SshSessionOp::SendEof if self.input == RelayInputState::Ended && self.to_host.is_empty() => {
                let sent = self.channel.send_eof().map_err(io::Error::from);
                sent.map(|()| self.input = RelayInputState::EofSent).map(|()| true)
            }
            SshSessionOp::Read if self.from_host.is_empty() => {
                self.from_host.fill_from(&mut self.channel).map(|n| n > 0)
            }
            SshSessionOp::ReadStderr if self.from_stderr.is_empty() => {
                self.from_stderr.fill_from(self.channel.stream(STDERR_STREAM_ID)).map(|n| n > 0)
            }
            _ => Ok(false),
        };
        let result = none_if_would_block(result);
        let outbound =
            matches!(self.session.block_directions(), BlockDirections::Outbound | BlockDirections::Both);
        self.blocked = (outbound && matches!(result, Ok(None))).then_some(op);
        Ok(result?.unwrap_or(false))
    }

    /// Waits until the SSH connection or a local socket is ready to be read or written, or until a
    /// keepalive message is due. Sends a keepalive message that is due.
    fn wait_for_io(&mut self) -> io::Result<()> {
        if self.blocked.is_none() && self.keepalive_s == 0 {
            let next = self.session.keepalive_send().map_err(io::Error::from);
            self.keepalive_s = none_if_would_block(next)?.unwrap_or(1).max(1);
        }
        // SAFETY: the session owns its socket and outlives `ssh_socket`.
        let ssh_socket = unsafe { BorrowedFd::borrow_raw(self.session.as_raw_fd()) };
        let mut events = PollFlags::POLLIN;
        if self.blocked.is_some() {
            events |= PollFlags::POLLOUT;
        }
        let mut fds = vec![PollFd::new(ssh_socket, events)];
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLIN, self.input == RelayInputState::Open && self.to_host.is_empty());
        events.set(PollFlags::POLLOUT, !self.from_host.is_empty());
        fds.push(PollFd::new(self.local.as_fd(), events));
        if let Some(stderr) = self.stderr.filter(|_| !self.from_stderr.is_empty()) {
            fds.push(PollFd::new(stderr.as_fd(), PollFlags::POLLOUT));
        }
        let timeout = PollTimeout::try_from(u64::from(self.keepalive_s) * 1000).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            Ok(0) => self.keepalive_s = 0,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        // The owner of the other end of `local` has closed both directions.
        let hung_up = fds.get(1).and_then(|fd| fd.revents()).is_some_and(|r| r.contains(PollFlags::POLLHUP));
        if hung_up && self.input == RelayInputState::EofSent {
            return Err(io::Error::other("the local end was closed"));
        }
        Ok(())
    }

    /// Waits up to [`EXIT_STATUS_TIMEOUT_MS`] for the exit status of the remote process. Returns
    /// `None` if the host does not report it.
    fn wait_for_exit_status(&mut self) -> Option<ExitStatus> {
        self.session.set_blocking(true);
        self.session.set_timeout(EXIT_STATUS_TIMEOUT_MS);
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

/// Converts the I/O errors `WouldBlock` and `Interrupted` to `Ok(None)`, which means that the
/// nonblocking operation can be repeated later. Passes other errors on.
pub(super) fn none_if_would_block<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(e) => Err(e),
    }
}
