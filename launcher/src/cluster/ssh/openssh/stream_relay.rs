//! [`relay_streams`]: copies an agent's stdin, stdout and stderr between a process of OpenSSH's
//! client (`ssh`) and sockets of the controller.
use super::session::{ClientProcess, OpenSshChannel};
use crate::cluster::ssh::{
    channel_relay::{RelayBuffer, none_if_would_block},
    ssh_error::build_ssh_error,
    target::SshTarget,
};
use diagnostic::codes::ssh;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use protocol::control::ExitStatus;
use std::{io, net::Shutdown, os::fd::AsFd, os::unix::net::UnixStream};

/// Copies bytes between local sockets of the controller and an agent that was started through
/// OpenSSH's client, until the agent has closed its output. Blocks. Fails if the connection fails
/// or the other end of `local` is closed.
///
/// `local` receives `leftover` (output of the agent that was read before) and then the rest of the
/// output, and provides the input of the agent. `stderr` receives the standard error of the agent.
/// Returns the exit status of the agent, or `None` if the host does not report it.
pub(in crate::cluster::ssh) fn relay_streams(
    channel: &OpenSshChannel,
    target: &SshTarget,
    local: &UnixStream,
    stderr: &UnixStream,
    leftover: Vec<u8>,
) -> diagnostic::Result<Option<ExitStatus>> {
    let client = &*channel.client;
    client.discard_stderr();
    let relay = StreamRelay {
        client,
        local,
        stderr,
        to_host: RelayBuffer::default(),
        from_host: RelayBuffer::with_bytes(leftover),
        from_stderr: RelayBuffer::default(),
        has_input: true,
        has_output: true,
    };
    relay.run().map_err(|error| {
        let message = format!("the SSH connection to host {} was lost", target.name);
        build_ssh_error(target, ssh::SSH_CONNECTION_LOST, message).with_cause(&error).with_remedy()
    })?;
    client.remote_exit_status(target)
}

/// The streams and buffers for copying one agent's stdin, stdout and stderr between OpenSSH's
/// client (`ssh`) and sockets of the controller.
struct StreamRelay<'a> {
    client: &'a ClientProcess,
    local: &'a UnixStream,
    stderr: &'a UnixStream,
    to_host: RelayBuffer,
    from_host: RelayBuffer,
    from_stderr: RelayBuffer,
    /// Whether the local socket may have more input for the agent.
    has_input: bool,
    /// Whether the agent may have more output.
    has_output: bool,
}

impl StreamRelay<'_> {
    /// Copies bytes between the agent on the host and the local sockets in both directions, until
    /// the agent has closed its output.
    fn run(mut self) -> io::Result<()> {
        self.local.set_nonblocking(true)?;
        self.stderr.set_nonblocking(true)?;
        loop {
            let progressed = self.relay_input()? | self.relay_output()? | self.relay_stderr();
            self.client.read_log();
            if !self.has_output && self.from_host.is_empty() && self.from_stderr.is_empty() {
                return Ok(());
            }
            if !progressed {
                self.wait_for_io()?;
            }
        }
    }

    /// Copies what the controller has written to the local socket to the input of the agent on the
    /// host. Returns whether any bytes moved.
    fn relay_input(&mut self) -> io::Result<bool> {
        let mut progressed = false;
        if self.has_input && self.to_host.is_empty() {
            match none_if_would_block(self.to_host.fill_from(self.local))? {
                Some(0) => {
                    self.has_input = false;
                    // An error means that the client has ended.
                    _ = self.client.stream.shutdown(Shutdown::Write);
                }
                Some(_) => progressed = true,
                None => {}
            }
        }
        if !self.to_host.is_empty() {
            match none_if_would_block(self.to_host.write_to(&self.client.stream)) {
                Ok(written) => progressed |= written.is_some(),
                // The client has ended. Its exit status explains why.
                Err(_) => (self.to_host, self.has_input) = (RelayBuffer::default(), false),
            }
        }
        Ok(progressed)
    }

    /// Copies bytes that the agent on the host has written to stdout into the local socket from
    /// which the controller reads them. Returns whether any bytes moved.
    fn relay_output(&mut self) -> io::Result<bool> {
        let mut progressed = false;
        if self.has_output && self.from_host.is_empty() {
            match none_if_would_block(self.from_host.fill_from(&self.client.stream)) {
                Ok(Some(0)) | Err(_) => (self.has_output, progressed) = (false, true),
                Ok(Some(_)) => progressed = true,
                Ok(None) => {}
            }
        }
        if !self.from_host.is_empty() {
            progressed |= none_if_would_block(self.from_host.write_to(self.local))?.is_some();
        }
        Ok(progressed)
    }

    /// Copies what the agent on the host has written to its standard error to a local socket, from
    /// which the controller reads. Returns whether any bytes moved.
    fn relay_stderr(&mut self) -> bool {
        let mut progressed = false;
        if !self.client.has_stderr_ended() && self.from_stderr.is_empty() {
            match none_if_would_block(self.from_stderr.fill_from(&self.client.stderr)) {
                Ok(Some(0)) | Err(_) => self.client.set_stderr_ended(),
                Ok(Some(_)) => progressed = true,
                Ok(None) => {}
            }
        }
        if !self.from_stderr.is_empty() {
            match none_if_would_block(self.from_stderr.write_to(self.stderr)) {
                Ok(written) => progressed |= written.is_some(),
                // The reader of stderr has gone.
                Err(_) => self.from_stderr = RelayBuffer::default(),
            }
        }
        progressed
    }

    /// Waits until a stream of the agent or a local socket is ready to be read or written.
    fn wait_for_io(&self) -> io::Result<()> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLIN, self.has_output && self.from_host.is_empty());
        events.set(PollFlags::POLLOUT, !self.to_host.is_empty());
        let mut fds = Vec::new();
        // A stream without events would report its end again and again.
        if !events.is_empty() {
            fds.push(PollFd::new(self.client.stream.as_fd(), events));
        }
        if !self.from_stderr.is_empty() {
            fds.push(PollFd::new(self.stderr.as_fd(), PollFlags::POLLOUT));
        } else {
            fds.extend(self.client.list_output_fds());
        }
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLIN, self.has_input && self.to_host.is_empty());
        events.set(PollFlags::POLLOUT, !self.from_host.is_empty());
        let watches_local = !events.is_empty() || !self.has_input;
        fds.extend(watches_local.then(|| PollFd::new(self.local.as_fd(), events)));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        // The owner of the other end of `local` has closed both directions.
        let hung_up = fds.last().and_then(PollFd::revents).is_some_and(|r| r.contains(PollFlags::POLLHUP));
        if hung_up && watches_local && !self.has_input {
            return Err(io::Error::other("the local end was closed"));
        }
        Ok(())
    }
}
