//! Starts a sandbox process (one that interprets untrusted files without access to the system),
//! sends requests to it, and receives its replies ([`SandboxProcess`]).
use crate::{
    confinement::Confinement,
    error::{SandboxError, SandboxFailure},
    limits::{RequestLimits, STACK_BYTES, SandboxSettings},
    messages::{ReplyDecoder, encode_request_header, encode_settings},
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::Signal,
        socket::{ControlMessage, MsgFlags, sendmsg},
    },
};
use std::{
    collections::VecDeque,
    ffi::OsString,
    fs::File,
    io::{self, IoSlice, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{
            net::UnixStream,
            process::{CommandExt, ExitStatusExt},
        },
    },
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Maximum duration of one `poll` call by the process that waits for a reply of its sandbox
/// process. A longer pause, during which this process itself was stopped, counts only as this long.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long a process waits for its sandbox process to end after the sandbox process has closed the
/// socket.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two checks of whether a sandbox process has ended.
const END_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Limits of CPU time, memory and reply size that apply to a sandbox process until it has reported
/// its successful start.
const START_LIMITS: RequestLimits =
    RequestLimits { cpu: Duration::from_secs(10), memory_bytes: 0, reply_bytes: 1 };

/// The executable, the arguments and the environment with which a sandbox process is started.
#[derive(Clone, Debug)]
pub struct SandboxCommand {
    /// The path of the program's executable file.
    pub program: OsString,
    /// The program's name in lists of processes, such as the output of `ps`.
    pub name: OsString,
    /// The arguments of the program.
    pub arguments: Vec<OsString>,
    /// The environment variables. The sandbox process gets no others.
    pub variables: Vec<(OsString, OsString)>,
}

/// Handle to a running sandbox process, which contains the child process, its socket, and the
/// limits of the requests that are not answered yet. Dropping the value ends the process.
///
/// Requests are answered in order. A caller may send requests before it has received the replies to
/// earlier ones. After an error other than [`SandboxError::Panicked`] and
/// [`SandboxError::ReplyTooLong`], the process has ended or ends, and the replies to later requests
/// are errors, too.
#[derive(Debug)]
pub struct SandboxProcess {
    child: Child,
    socket: UnixStream,
    decoder: ReplyDecoder,
    /// The limits of the requests whose replies are not decoded yet, in order.
    pending: VecDeque<RequestLimits>,
    /// Replies that are decoded and that [`SandboxProcess::receive_reply`] has not returned yet,
    /// and then the failure that ended the process.
    replies: VecDeque<Result<Vec<u8>, SandboxFailure>>,
    /// Whether the process failed, so that no further reply is decoded.
    has_failed: bool,
    /// How long the caller has waited for the next reply so far.
    waited: Duration,
    confinement: Confinement,
}

impl SandboxProcess {
    /// Starts a sandbox process, and waits until the process has given up its access to files,
    /// network and system calls.
    pub fn start(command: &SandboxCommand, settings: &SandboxSettings) -> Result<Self, SandboxError> {
        let (socket, other) = UnixStream::pair().map_err(SandboxError::NotStarted)?;
        let child = Command::new(&command.program)
            .arg0(&command.name)
            .args(&command.arguments)
            .env_clear()
            .envs(command.variables.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(other)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(SandboxError::NotStarted)?;
        let mut process = SandboxProcess {
            child,
            socket,
            decoder: ReplyDecoder::default(),
            pending: VecDeque::from([START_LIMITS]),
            replies: VecDeque::new(),
            has_failed: false,
            waited: Duration::ZERO,
            confinement: Confinement::default(),
        };
        process.exchange_settings(settings).map_err(|error| {
            SandboxError::NotStarted(io::Error::other(format!("{} ({error})", command.program.display())))
        })?;
        tracing::debug!(target: "sandbox", pid = process.child.id(), threads = settings.threads,
            memory_bytes = settings.memory_bytes, landlock = process.confinement.landlock,
            seccomp = process.confinement.seccomp, "started a sandbox process");
        Ok(process)
    }

    /// Sends the settings (threads and memory limit) to the new sandbox process, and waits until
    /// the process reports whether Landlock and seccomp are active.
    fn exchange_settings(&mut self, settings: &SandboxSettings) -> Result<(), SandboxError> {
        // The socket has capacity for the settings.
        self.socket.write_all(&encode_settings(settings)).map_err(SandboxError::NotStarted)?;
        self.socket.set_nonblocking(true).map_err(SandboxError::NotStarted)?;
        let reply = self.receive_reply().map_err(|failure| failure.error)?;
        let byte = reply.first().ok_or(SandboxError::InvalidReply)?;
        self.confinement = Confinement::from_byte(*byte);
        Ok(())
    }

    /// Returns which kernel facilities (Landlock, seccomp) confine the sandbox process.
    pub fn confinement(&self) -> Confinement {
        self.confinement
    }

    /// Returns the number of requests to the sandbox process whose replies the caller has not
    /// received yet.
    pub fn pending_requests(&self) -> usize {
        self.pending.len() + self.replies.len()
    }

    /// Sends the request `body` to the sandbox process, and passes the open file `file` with it if
    /// one is given. While the process cannot accept more bytes, reads the replies that arrive. If
    /// the process fails, [`SandboxProcess::receive_reply`] returns the reason after the replies
    /// that precede it.
    pub fn send_request(&mut self, body: &[u8], file: Option<&File>, limits: &RequestLimits) {
        let header = encode_request_header(body.len(), limits);
        self.pending.push_back(*limits);
        let (mut sent, mut descriptor) = (0, file.map(|file| [file.as_raw_fd()]));
        while sent < header.len() + body.len() && !self.has_failed {
            let (rest_of_header, rest_of_body) =
                (&header[sent.min(header.len())..], &body[sent.saturating_sub(header.len())..]);
            let parts = [IoSlice::new(rest_of_header), IoSlice::new(rest_of_body)];
            let control: Vec<ControlMessage> =
                descriptor.iter().map(|number| ControlMessage::ScmRights(number)).collect();
            match sendmsg::<()>(self.socket.as_raw_fd(), &parts, &control, MsgFlags::MSG_NOSIGNAL, None) {
                Ok(bytes) => {
                    sent += bytes;
                    descriptor = None;
                }
                Err(nix::errno::Errno::EINTR) => {}
                Err(nix::errno::Errno::EAGAIN) => {
                    self.wait_and_read_replies(PollFlags::POLLIN | PollFlags::POLLOUT);
                }
                // The process has closed its socket.
                Err(_) => return,
            }
        }
    }

    /// Waits for the reply to the oldest unanswered request to the sandbox process, and returns the
    /// reply.
    pub fn receive_reply(&mut self) -> Result<Vec<u8>, SandboxFailure> {
        loop {
            if let Some(reply) = self.replies.pop_front() {
                return reply;
            }
            if self.has_failed {
                let limits = self.pending.pop_front().unwrap_or(START_LIMITS);
                return Err(self.find_end_reason(&limits).into_failure_at_step(0));
            }
            self.wait_and_read_replies(PollFlags::POLLIN);
        }
    }

    /// Waits until the socket of the sandbox process is ready for reading or writing, as `events`
    /// requests, and decodes the replies that have arrived. Queues a failure after these replies,
    /// because they may arrive together with the end of the process.
    fn wait_and_read_replies(&mut self, events: PollFlags) {
        if let Err(failure) = self.wait_for_socket(events).and_then(|()| self.read_replies()) {
            self.has_failed = true;
            self.pending.pop_front();
            self.replies.push_back(Err(failure));
        }
    }

    /// Waits until bytes can be read from or written to the socket of the sandbox process,
    /// whichever `events` requests. Kills the process if the wait for the next reply takes too
    /// long.
    fn wait_for_socket(&mut self, events: PollFlags) -> Result<(), SandboxFailure> {
        loop {
            let began = Instant::now();
            let timeout = PollTimeout::try_from(POLL_INTERVAL).unwrap_or(PollTimeout::MAX);
            let ready = poll(&mut [PollFd::new(self.socket.as_fd(), events)], timeout);
            self.waited += began.elapsed().min(POLL_INTERVAL);
            let limit = self.pending.front().unwrap_or(&START_LIMITS).reply_timeout();
            if self.waited > limit {
                return Err(self.kill_because_of(SandboxError::TimedOut { limit }));
            }
            if ready.is_ok_and(|ready| ready > 0) {
                return Ok(());
            }
        }
    }

    /// Reads the bytes that the sandbox process has sent, and decodes complete replies.
    fn read_replies(&mut self) -> Result<(), SandboxFailure> {
        while let Some(limits) = self.pending.front().copied() {
            let (buffer, missing) = self.decoder.next_read_buffer();
            let read = (&self.socket).take(missing as u64).read_to_end(buffer);
            let is_closed = match &read {
                Ok(bytes) => *bytes < missing,
                Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
            };
            let step = self.decoder.current_step();
            match self.decoder.take_reply(limits.reply_bytes) {
                Ok(None) if is_closed => {
                    let reason = self.find_end_reason(&limits);
                    return Err(reason.into_failure_at_step(step));
                }
                Ok(None) if read.is_ok() => {}
                Ok(None) => return Ok(()),
                Err(error @ SandboxError::InvalidReply) => return Err(self.kill_because_of(error)),
                result => {
                    let result = result.map_err(|error| error.into_failure_at_step(step));
                    self.replies.extend(result.transpose());
                    self.pending.pop_front();
                    self.waited = Duration::ZERO;
                }
            }
        }
        Ok(())
    }

    /// Returns the process id of this sandbox process.
    #[cfg(test)]
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Shuts down the socket to the sandbox process, which makes the sandbox process end. Tests use
    /// this function.
    #[cfg(test)]
    pub(crate) fn shut_down_socket(&self) {
        self.socket.shutdown(std::net::Shutdown::Both).expect("the socket is open");
    }

    /// Waits for the end of a sandbox process that has closed its socket, and returns the reason as
    /// an error, such as an exceeded limit.
    fn find_end_reason(&mut self, limits: &RequestLimits) -> SandboxError {
        let deadline = Instant::now() + END_TIMEOUT;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(Some(status)) => return explain_end(status, limits),
                Ok(None) => thread::sleep(END_POLL_INTERVAL),
                Err(error) => return SandboxError::Ended(error.to_string()),
            }
        }
        self.kill();
        SandboxError::Ended("it closed its socket".to_owned())
    }

    /// Kills the sandbox process after `error`, and returns the error together with the step of the
    /// request that was in progress.
    fn kill_because_of(&mut self, error: SandboxError) -> SandboxFailure {
        self.kill();
        error.into_failure_at_step(self.decoder.current_step())
    }

    /// Kills the sandbox process, and waits until it has ended.
    fn kill(&mut self) {
        // A process that has ended cannot be killed.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Drop for SandboxProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the error for a sandbox process that ended with the exit status `status` during a
/// request, such as an exceeded memory limit for SIGABRT.
fn explain_end(status: ExitStatus, limits: &RequestLimits) -> SandboxError {
    let signal = status.signal().map(Signal::try_from);
    match signal {
        // A failed allocation aborts the process.
        Some(Ok(Signal::SIGABRT)) => SandboxError::OutOfMemory { limit_bytes: limits.memory_bytes },
        Some(Ok(Signal::SIGSEGV | Signal::SIGBUS)) => {
            SandboxError::StackOverflow { stack_bytes: STACK_BYTES as u64 }
        }
        Some(Ok(Signal::SIGXCPU)) => SandboxError::OutOfCpuTime { limit_s: limits.cpu_seconds() },
        Some(Ok(signal)) => SandboxError::Ended(format!("by signal {}", signal.as_str())),
        _ => SandboxError::Ended(status.to_string()),
    }
}
