//! [`SshSession`]: an SSH connection to a host, through launch's built-in client or through
//! OpenSSH's client.
use super::{
    bootstrap_scripts::wrap_in_shell_command,
    channel_relay::{STDERR_STREAM_ID, relay_channel},
    connect,
    connection_progress::ConnectionProgress,
    openssh::{OpenSshChannel, OpenSshSession, relay_streams},
    ssh_error::build_ssh_error,
    target::SshTarget,
};
use diagnostic::{Diagnostic, codes::ssh};
use protocol::control::ExitStatus;
use ssh2::{Channel, Session};
use std::{
    cell::RefCell,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::Arc,
    time::{Duration, Instant},
};

/// The largest number of bytes of the stderr of a command on a host that launch keeps for error
/// messages. Later bytes are ignored.
const MAX_STDERR_BYTES: u64 = 8 << 10;
/// The time, in milliseconds, between two checks for an early answer of a script on a host while a
/// write to the script's stdin blocks. On a slow connection, stderr output of the login shell may
/// arrive in this time.
const ANSWER_CHECK_INTERVAL_MS: u32 = 5000;

/// An SSH connection to a host after the login, through launch's built-in client or OpenSSH's
/// client.
pub(super) enum SshSession {
    Builtin(Session),
    OpenSsh(Box<OpenSshSession>),
}

impl SshSession {
    /// Connects to a host over SSH and logs in, with the client that was chosen for the host.
    /// Blocks.
    pub(super) fn open(
        target: &SshTarget,
        progress: &Arc<ConnectionProgress>,
    ) -> diagnostic::Result<SshSession> {
        match target.client {
            None => connect::open_session(target, progress).map(SshSession::Builtin),
            Some(_) => {
                OpenSshSession::open(target, progress).map(|session| SshSession::OpenSsh(Box::new(session)))
            }
        }
    }

    /// Sets the time limit, in milliseconds, of each blocking operation on the SSH connection.
    pub(super) fn set_timeout(&self, timeout_ms: u32) {
        match self {
            SshSession::Builtin(session) => session.set_timeout(timeout_ms),
            SshSession::OpenSsh(session) => session.set_timeout_ms(timeout_ms),
        }
    }

    /// Writes bytes, such as the executable to copy, to the stdin of a script on the host, until
    /// all are written or the script has printed an answer: more than the `unread` bytes of output
    /// that [`SshChannel::count_unread_bytes`] counted before the first write. Blocks. Fails if the
    /// host takes no bytes for `limit`, and soon after an answer if the host takes no bytes. (sshd
    /// closes the channel of a script that has ended, but a blocking write of libssh2 does not
    /// notice that.)
    pub(super) fn write_input_until_answer(
        &self,
        channel: &mut SshChannel,
        mut bytes: &[u8],
        unread: u32,
        limit: Duration,
    ) -> io::Result<()> {
        let limit_ms = limit.as_millis() as u32;
        let (session, channel) = match (self, channel) {
            (SshSession::Builtin(session), SshChannel::Builtin(channel)) => (session, channel),
            (_, channel) => {
                self.set_timeout(limit_ms);
                return channel.write_all(bytes);
            }
        };
        session.set_timeout(ANSWER_CHECK_INTERVAL_MS);
        let channel = RefCell::new(channel);
        let has_answered = || {
            let channel = channel.borrow();
            channel.eof() || channel.read_window().available > unread
        };
        let mut result = Ok(());
        while !bytes.is_empty() && result.is_ok() {
            // An attempt that has failed is repeated with the same bytes, as libssh2 requires.
            let written = write_unless_answered(limit, || channel.borrow_mut().write(bytes), has_answered);
            result = match written {
                Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    bytes = &bytes[count..];
                    Ok(())
                }
                Err(error) => Err(error),
            };
        }
        session.set_timeout(limit_ms);
        result
    }

    /// Runs `script`, a shell script of one line, on the host over this SSH connection. Blocks.
    pub(super) fn exec_script(&self, script: &str) -> Result<SshChannel, SshExecError> {
        match self {
            SshSession::Builtin(session) => {
                let open = session.channel_session().and_then(|mut channel| {
                    channel.exec(&wrap_in_shell_command(script))?;
                    Ok(channel)
                });
                open.map(SshChannel::Builtin).map_err(|error| SshExecError::Rejected(error.message().into()))
            }
            SshSession::OpenSsh(session) => {
                session.exec_script(script).map(SshChannel::OpenSsh).map_err(SshExecError::Connection)
            }
        }
    }

    /// Copies the agent's input, output and stderr between the SSH connection and local sockets,
    /// until the agent has closed its output. Blocks. Fails if the connection fails or the other
    /// end of `local` is closed.
    ///
    /// `local` receives `leftover` (output of the agent that was read before) and then the rest of
    /// the output, and provides the input of the agent. `stderr` receives the standard error of the
    /// agent. Returns the exit status of the agent, or `None` if the host does not report it.
    pub(super) fn relay_agent_streams(
        &self,
        target: &SshTarget,
        channel: SshChannel,
        leftover: Vec<u8>,
        (local, stderr): (&UnixStream, &UnixStream),
    ) -> diagnostic::Result<Option<ExitStatus>> {
        let lost = |error: io::Error| {
            let message = format!("the SSH connection to host {} was lost", target.name);
            build_ssh_error(target, ssh::SSH_CONNECTION_LOST, message)
                .with_cause(&error)
                .with_help("check that the host is up and reachable")
        };
        match (self, channel) {
            (SshSession::Builtin(session), SshChannel::Builtin(channel)) => {
                relay_channel(session, channel, local, Some(stderr), leftover).map_err(lost)
            }
            (_, SshChannel::OpenSsh(channel)) => relay_streams(&channel, target, local, stderr, leftover),
            (SshSession::OpenSsh(_), SshChannel::Builtin(_)) => Err(lost(io::ErrorKind::InvalidInput.into())),
        }
    }
}

/// Repeats a write with a short time limit to a script's stdin, until the write succeeds, the
/// script has answered, or the time `limit` has passed. Returns the number of bytes. Fails after
/// `limit`, and as soon as `has_answered` returns `true`: the host then takes no more bytes.
fn write_unless_answered(
    limit: Duration,
    mut try_write: impl FnMut() -> io::Result<usize>,
    has_answered: impl Fn() -> bool,
) -> io::Result<usize> {
    let deadline = Instant::now() + limit;
    loop {
        match try_write() {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                if has_answered() {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                if Instant::now() >= deadline {
                    return Err(error);
                }
            }
            result => return result,
        }
    }
}

/// Why a shell script could not be run on a host: the SSH server has rejected the request, or the
/// connection has failed.
pub(super) enum SshExecError {
    /// The host does not allow it, with the message of the host.
    Rejected(String),
    /// Another connection to the host was necessary and failed.
    Connection(Diagnostic),
}

/// The stdin and stdout of a process on a host over SSH, which is a setup script or the agent that
/// the script has started with `exec`.
pub(super) enum SshChannel {
    Builtin(Channel),
    OpenSsh(OpenSshChannel),
}

impl SshChannel {
    /// Returns the number of bytes of the script's output, on stdout and stderr, that have arrived
    /// and were not read. Through OpenSSH's client, the number is unknown, and 0 is returned.
    pub(super) fn count_unread_bytes(&self) -> u32 {
        match self {
            SshChannel::Builtin(channel) => channel.read_window().available,
            SshChannel::OpenSsh(_) => 0,
        }
    }

    /// Sends the end of input to a script on the host, except through OpenSSH's client, where later
    /// scripts read from the same stdin.
    pub(super) fn end_input(&mut self) -> io::Result<()> {
        match self {
            SshChannel::Builtin(channel) => Ok(channel.send_eof()?),
            // Later scripts use the same input.
            SshChannel::OpenSsh(_) => Ok(()),
        }
    }

    /// Closes the SSH channel of a script that has ended on the host, so that another script can
    /// use the SSH connection.
    pub(super) fn close(&mut self) {
        if let SshChannel::Builtin(channel) = self {
            // An error means that the connection has ended. The next script fails, too.
            _ = channel.close();
        }
    }

    /// Returns the SSH connection error because of which the remote command's output ended, or
    /// `None` if no such error is known.
    pub(super) fn explain_output_end(&self, target: &SshTarget) -> Option<Diagnostic> {
        match self {
            SshChannel::Builtin(_) => None,
            SshChannel::OpenSsh(channel) => channel.explain_output_end(target),
        }
    }

    /// Waits for the end of the command on the host, and returns its exit code (-1 if unknown) and
    /// the first [`MAX_STDERR_BYTES`] of its stderr.
    pub(super) fn wait_for_exit(&mut self) -> (i32, String) {
        match self {
            SshChannel::Builtin(channel) => {
                let mut stderr = Vec::new();
                _ = channel.stream(STDERR_STREAM_ID).take(MAX_STDERR_BYTES).read_to_end(&mut stderr);
                _ = channel.send_eof();
                let code = channel.wait_close().and_then(|()| channel.exit_status()).unwrap_or(-1);
                (code, String::from_utf8_lossy(&stderr).into_owned())
            }
            SshChannel::OpenSsh(channel) => channel.end_input_and_wait_for_exit(),
        }
    }
}

impl Read for SshChannel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            SshChannel::Builtin(channel) => channel.read(buffer),
            SshChannel::OpenSsh(channel) => channel.read(buffer),
        }
    }
}

impl Write for SshChannel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            SshChannel::Builtin(channel) => channel.write(bytes),
            SshChannel::OpenSsh(channel) => channel.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            SshChannel::Builtin(channel) => channel.flush(),
            SshChannel::OpenSsh(channel) => channel.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_write_ends_soon_after_an_answer_of_the_host() {
        let attempts = Cell::new(0);
        let block = || {
            attempts.set(attempts.get() + 1);
            Err(io::ErrorKind::TimedOut.into())
        };
        let limit = Duration::from_secs(60);
        let error = write_unless_answered(limit, block, || attempts.get() == 3).expect_err("no space");
        assert_eq!((error.kind(), attempts.get()), (io::ErrorKind::BrokenPipe, 3));
        let error = write_unless_answered(Duration::ZERO, block, || false).expect_err("no answer");
        assert_eq!((error.kind(), attempts.get()), (io::ErrorKind::TimedOut, 4));
        // A slow host takes bytes at the second attempt.
        let retry = || if attempts.get() > 4 { Ok(7) } else { block() };
        assert_eq!(write_unless_answered(limit, retry, || false).ok(), Some(7));
    }
}
