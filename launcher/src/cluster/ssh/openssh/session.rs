//! [`OpenSshSession`]: a connection to a host through a process of OpenSSH's client (`ssh`).
use super::{
    client_failure::ClientFailure, client_log::ClientLogParser, client_options::divide_connect_timeout,
    supervised_child::SupervisedChild,
};
use crate::cluster::{
    ssh::{connection_progress::ConnectionProgress, ssh_error::build_ssh_error, target::SshTarget},
    transport::ConnectionStage,
};
use diagnostic::{Diagnostic, codes::ssh};
use jobspec::env;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use protocol::control::ExitStatus;
use std::{
    cell::{Cell, RefCell},
    fs::File,
    io::{self, PipeWriter, Read, Write},
    net::{Shutdown, ToSocketAddrs},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

/// The command that OpenSSH's client runs on the host: a shell that executes each line of its input
/// as a script. A script may replace the shell.
const REMOTE_COMMAND: &str = "exec /bin/sh -c 'while IFS= read -r c; do eval \"$c\"; done'";
/// The number of bytes of the stderr of OpenSSH's client that are kept for error messages of
/// launch.
const MAX_STDERR_BYTES: usize = 8 << 10;
/// How long launch waits for the process of OpenSSH's client to end, after the client has closed
/// its output.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// The largest number of times that OpenSSH's client is started for one host, as long as the server
/// closes the connection during the handshake.
const MAX_CONNECT_ATTEMPTS: u32 = 6;
/// The pause before OpenSSH's client is started for the second time, after the server has closed
/// the connection. The pause doubles with each further attempt.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(200);

/// A connection to a host through a process of OpenSSH's client (`ssh`), over which shell scripts
/// are run one after another. A host that ends the shell, because a script has failed, gets another
/// connection for the next script.
pub(in crate::cluster::ssh) struct OpenSshSession {
    target: SshTarget,
    progress: Arc<ConnectionProgress>,
    client: RefCell<Rc<ClientProcess>>,
    /// The time limit of each read and write.
    timeout: Rc<Cell<Duration>>,
}

impl OpenSshSession {
    /// Connects to a host through OpenSSH's client and logs in. Blocks.
    pub(in crate::cluster::ssh) fn open(
        target: &SshTarget,
        progress: &Arc<ConnectionProgress>,
    ) -> diagnostic::Result<OpenSshSession> {
        let client = connect_with_retries(target, progress)?;
        Ok(OpenSshSession {
            target: target.clone(),
            progress: progress.clone(),
            client: RefCell::new(Rc::new(client)),
            timeout: Rc::new(Cell::new(target.timeout)),
        })
    }

    /// Sets the time limit, in milliseconds, of each read and write on the connection to the host.
    pub(in crate::cluster::ssh) fn set_timeout_ms(&self, timeout_ms: u32) {
        self.timeout.set(Duration::from_millis(timeout_ms.into()));
    }

    /// Runs `script`, a shell script of one line, on the host through OpenSSH's client. Blocks.
    pub(in crate::cluster::ssh) fn exec_script(&self, script: &str) -> diagnostic::Result<OpenSshChannel> {
        if self.client.borrow().has_ended.get() {
            let client = connect_with_retries(&self.target, &self.progress)?;
            *self.client.borrow_mut() = Rc::new(client);
            self.progress.set_stage(ConnectionStage::Exec);
        }
        let client = self.client.borrow().clone();
        client.read_log_and_stderr();
        client.state.borrow_mut().stderr.clear();
        let mut channel = OpenSshChannel { client, timeout: self.timeout.clone() };
        // If the connection has ended, reading the answer fails with the reason.
        _ = channel.write_all(format!("{script}\n").as_bytes());
        Ok(channel)
    }
}

/// Starts OpenSSH's client and waits for its login to a host, with several attempts if the server
/// closes the connection.
fn connect_with_retries(
    target: &SshTarget,
    progress: &Arc<ConnectionProgress>,
) -> diagnostic::Result<ClientProcess> {
    let mut delay = FIRST_RETRY_DELAY;
    let mut attempt = 1;
    loop {
        progress.check_not_aborted(&target.name)?;
        progress.set_stage(ConnectionStage::Name);
        let client = ClientProcess::spawn(target)?;
        let duplicate = client.stream.try_clone().map_err(|error| build_resource_error(target, &error))?;
        progress.set_socket(&OwnedFd::from(duplicate));
        let Err(failure) = client.wait_for_login(target) else { return Ok(client) };
        progress.check_not_aborted(&target.name)?;
        progress.set_stage(failure.stage);
        if !failure.is_closed_by_server || attempt >= MAX_CONNECT_ATTEMPTS {
            return Err(failure.into_diagnostic(target));
        }
        drop(client);
        std::thread::sleep(delay);
        delay *= 2;
        attempt += 1;
    }
}

/// Builds the `ConnectTimeout` option of `ssh` for a host with several addresses, so that trying
/// all addresses takes no longer than the configured limit. Blocks while the name of the host is
/// resolved.
///
/// With a proxy, this machine does not connect to these addresses. Without an answer about the
/// name, the client reports the reason.
fn build_address_options(target: &SshTarget) -> Vec<String> {
    if target.client.as_ref().is_none_or(|options| options.proxy.is_some()) {
        return Vec::new();
    }
    let addresses = (target.hostname.as_str(), target.port).to_socket_addrs().map_or(0, |all| all.count());
    let seconds = divide_connect_timeout(target.timeout, addresses);
    // The first value of an option is the one that counts.
    seconds.map_or(Vec::new(), |seconds| vec!["-o".to_owned(), format!("ConnectTimeout={seconds}")])
}

/// Builds the error that OpenSSH's client cannot be used because this machine lacks a resource,
/// such as free file descriptors.
fn build_resource_error(target: &SshTarget, error: &io::Error) -> Diagnostic {
    let message = format!("cannot open an SSH connection to host {}", target.name);
    build_ssh_error(target, ssh::SSH_SESSION_LIMIT, message).with_cause(error)
}

/// The text that a process of OpenSSH's client has written to its log and stderr so far, with the
/// parsed state of the log.
#[derive(Default)]
struct ClientLogAndStderr {
    log: ClientLogParser,
    /// The first bytes of stderr since the last script.
    stderr: Vec<u8>,
    has_log_ended: bool,
    has_stderr_ended: bool,
}

/// A running process of OpenSSH's client (`ssh`), with its log, its stderr, and the stream to the
/// command on the host. Dropping the value kills the process.
pub(super) struct ClientProcess {
    child: SupervisedChild,
    /// The stdin and stdout of the remote command.
    pub(super) stream: UnixStream,
    pub(super) stderr: File,
    pub(super) log: File,
    /// The end of the log's pipe that the client opens by its path. Closed once the client has
    /// written to the log.
    log_writer: RefCell<Option<PipeWriter>>,
    state: RefCell<ClientLogAndStderr>,
    has_ended: Cell<bool>,
}

impl ClientProcess {
    /// Starts OpenSSH's client with the options for the host `target`.
    fn spawn(target: &SshTarget) -> diagnostic::Result<ClientProcess> {
        let options = target.client.as_ref().unwrap_or_else(|| unreachable!("OpenSSH's client was chosen"));
        let arguments = [build_address_options(target), options.arguments.clone()].concat();
        Self::spawn_with_arguments(&arguments).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                let message = format!("cannot start `ssh` to connect to host {}", target.name);
                build_ssh_error(target, ssh::SSH_CLIENT_MISSING, message).with_cause(&error).with_remedy()
            }
            _ => build_resource_error(target, &error),
        })
    }

    /// Starts OpenSSH's client with the options `arguments` and with the command that the client
    /// runs on the host.
    fn spawn_with_arguments(arguments: &[String]) -> io::Result<ClientProcess> {
        let (stream, client_end) = UnixStream::pair()?;
        let (stderr, stderr_writer) = io::pipe()?;
        let (log, log_writer) = io::pipe()?;
        let mut command = Command::new("ssh");
        // The log is separate from the stderr of the remote command, so a host cannot forge it.
        let log_path = format!("/proc/{}/fd/{}", std::process::id(), log_writer.as_raw_fd());
        command.args(["-E", &log_path]).args(arguments).arg(REMOTE_COMMAND);
        // In the C locale. `SendEnv` of the configuration must not pass it on to the host.
        let locale =
            std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(env::is_locale_variable));
        locale.for_each(|(name, _)| _ = command.env_remove(name));
        command.stdin(OwnedFd::from(client_end.try_clone()?));
        command.stdout(OwnedFd::from(client_end)).stderr(Stdio::from(stderr_writer));
        let (child, _) = SupervisedChild::spawn(&mut command)?;
        drop(command); // closes the copies of the client's ends
        stream.set_nonblocking(true)?;
        let (stderr, log) = (File::from(OwnedFd::from(stderr)), File::from(OwnedFd::from(log)));
        for file in [&stderr, &log] {
            fcntl(file, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(ClientProcess {
            child,
            stream,
            stderr,
            log,
            log_writer: RefCell::new(Some(log_writer)),
            state: RefCell::default(),
            has_ended: Cell::new(false),
        })
    }

    /// Waits until OpenSSH's client has logged in to the host, or until the host sends output.
    fn wait_for_login(&self, target: &SshTarget) -> Result<(), ClientFailure> {
        let limit = target.client.as_ref().map_or(target.timeout, |options| options.login_timeout);
        let deadline = Instant::now() + limit;
        loop {
            if self.state.borrow().log.is_logged_in {
                return Ok(());
            }
            match self.poll_stream_and_output(PollFlags::POLLIN, deadline) {
                Ok(true) => {
                    let mut byte = [0];
                    let flags = nix::sys::socket::MsgFlags::MSG_PEEK;
                    return match nix::sys::socket::recv(self.stream.as_raw_fd(), &mut byte, flags) {
                        Ok(1..) => Ok(()),
                        _ => Err(self
                            .explain_client_end(target)
                            .unwrap_or_else(|| self.explain_login_timeout(limit, target))),
                    };
                }
                Ok(false) => {}
                Err(_) => return Err(self.explain_login_timeout(limit, target)),
            }
        }
    }

    /// Describes a login timeout: OpenSSH's client has not logged in to the host within the time
    /// `limit`.
    fn explain_login_timeout(&self, limit: Duration, target: &SshTarget) -> ClientFailure {
        let state = self.state.borrow();
        ClientFailure::from_login_timeout(limit, &state.log, &state.stderr, target)
    }

    /// Waits until the stream to the host is ready to be read or written (`events`), or until
    /// OpenSSH's client has written to its log or stderr. Returns whether the stream is ready.
    /// Fails after the deadline.
    fn poll_stream_and_output(&self, events: PollFlags, deadline: Instant) -> io::Result<bool> {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A millisecond more, because the limit of `poll` is rounded down.
        let limit = PollTimeout::try_from(remaining.as_millis() + 1).unwrap_or(PollTimeout::MAX);
        let mut fds = vec![PollFd::new(self.stream.as_fd(), events)];
        fds.extend(self.list_output_fds());
        match poll(&mut fds, limit) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let is_ready = fds[0].any().unwrap_or(false);
        drop(fds);
        self.read_log_and_stderr();
        Ok(is_ready)
    }

    /// Returns the file descriptors to poll for text from OpenSSH's client: the log and stderr, as
    /// far as they have not ended.
    pub(super) fn list_output_fds(&self) -> Vec<PollFd<'_>> {
        let state = self.state.borrow();
        let log = (!state.has_log_ended).then(|| PollFd::new(self.log.as_fd(), PollFlags::POLLIN));
        let stderr = (!state.has_stderr_ended).then(|| PollFd::new(self.stderr.as_fd(), PollFlags::POLLIN));
        log.into_iter().chain(stderr).collect()
    }

    /// Reads and parses what OpenSSH's client has newly written to its log and to stderr. Never
    /// blocks.
    fn read_log_and_stderr(&self) {
        self.read_log();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let kept = &mut state.stderr;
        state.has_stderr_ended |= read_available(&self.stderr, |bytes| {
            let free = MAX_STDERR_BYTES.saturating_sub(kept.len()).min(bytes.len());
            kept.extend(&bytes[..free]);
        });
    }

    /// Reads and parses what OpenSSH's client has newly written to its log. Never blocks.
    pub(super) fn read_log(&self) {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (log, mut has_begun) = (&mut state.log, false);
        state.has_log_ended |= read_available(&self.log, |bytes| {
            has_begun = true;
            log.parse_chunk(bytes);
        });
        if has_begun {
            self.log_writer.replace(None);
        }
    }

    /// Returns whether the stderr of OpenSSH's client has ended, so that nothing more can be read
    /// from it.
    pub(super) fn has_stderr_ended(&self) -> bool {
        self.state.borrow().has_stderr_ended
    }

    /// Records that the stderr of OpenSSH's client has ended, so that it is not read again.
    pub(super) fn set_stderr_ended(&self) {
        self.state.borrow_mut().has_stderr_ended = true;
    }

    /// Discards the stderr text of OpenSSH's client that has arrived so far, such as output of the
    /// host's login shell.
    pub(super) fn discard_stderr(&self) {
        self.read_log_and_stderr();
        self.state.borrow_mut().stderr.clear();
    }

    /// Waits for at most [`EXIT_TIMEOUT`] until the process of OpenSSH's client exits, after the
    /// client has closed its output. Returns the exit status, or `None` if the client still runs.
    fn wait_for_client_end(&self) -> Option<ExitStatus> {
        self.has_ended.set(true);
        let status = self.child.wait_timeout(EXIT_TIMEOUT);
        self.read_log_and_stderr();
        status
    }

    /// Waits for the end of OpenSSH's client and returns why the client failed, or `None` if the
    /// client has not failed.
    fn explain_client_end(&self, target: &SshTarget) -> Option<ClientFailure> {
        let status = self.wait_for_client_end();
        let state = self.state.borrow();
        ClientFailure::from_client_end(status, &state.log, &state.stderr, target)
    }

    /// Waits until OpenSSH's client has exited, and returns the exit status of the remote command,
    /// or `None` if the host did not report the status. Fails if the connection was lost.
    pub(super) fn remote_exit_status(&self, target: &SshTarget) -> diagnostic::Result<Option<ExitStatus>> {
        if let Some(failure) = self.explain_client_end(target) {
            return Err(failure.into_diagnostic(target));
        }
        let is_known = !self.state.borrow().log.has_exit_signal;
        Ok(self.child.try_exit_status().filter(|_| is_known))
    }
}

/// Reads the available bytes of a nonblocking file, and passes them to the function `consume`.
/// Returns whether the file has ended.
fn read_available(mut file: &File, mut consume: impl FnMut(&[u8])) -> bool {
    let mut buffer = [0; 4096];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return true,
            Ok(n) => consume(&buffer[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

/// The stdin and stdout of a script on a host, carried by a running process of OpenSSH's client.
pub(in crate::cluster::ssh) struct OpenSshChannel {
    pub(super) client: Rc<ClientProcess>,
    timeout: Rc<Cell<Duration>>,
}

impl OpenSshChannel {
    /// Returns the failure of OpenSSH's client because of which the output of the remote command
    /// ended, or `None` if the command ended normally.
    pub(in crate::cluster::ssh) fn explain_output_end(&self, target: &SshTarget) -> Option<Diagnostic> {
        self.client.explain_client_end(target).map(|failure| failure.into_diagnostic(target))
    }

    /// Closes the input of the shell that OpenSSH's client runs on the host, and waits until the
    /// shell has ended. Returns its exit code (-1 if unknown), and what the last script wrote to
    /// stderr.
    pub(in crate::cluster::ssh) fn end_input_and_wait_for_exit(&mut self) -> (i32, String) {
        _ = self.client.stream.shutdown(Shutdown::Write);
        _ = io::copy(self, &mut io::sink());
        let code = match self.client.wait_for_client_end() {
            Some(ExitStatus::Code(code)) => i32::from(code),
            Some(ExitStatus::Signal(..)) | None => -1,
        };
        let state = self.client.state.borrow();
        (code, String::from_utf8_lossy(&state.stderr).into_owned())
    }

    /// Calls `operation`, a nonblocking read or write on the stream to the host, until the call
    /// does not have to wait or the time limit is reached.
    fn retry_until_timeout<T>(
        &self,
        events: PollFlags,
        mut operation: impl FnMut(&UnixStream) -> io::Result<T>,
    ) -> io::Result<T> {
        let deadline = Instant::now() + self.timeout.get();
        loop {
            match operation(&self.client.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.client.poll_stream_and_output(events, deadline)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

impl Read for OpenSshChannel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.retry_until_timeout(PollFlags::POLLIN, |mut stream| stream.read(buffer)) {
            // The client has ended without reading all of its input.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(0),
            result => result,
        }
    }
}

impl Write for OpenSshChannel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.retry_until_timeout(PollFlags::POLLOUT, |mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
