//! Starts agents on other hosts over SSH.
//!
//! Each host has one SSH connection on a separate thread, which connects, starts the executable on
//! the host (copying it first if necessary), and then relays the control connection. No TCP port is
//! opened, and only one path passes through the login shell.
mod auth;
mod bootstrap;
mod config;
mod connect;
mod known_hosts;
mod progress;
mod relay;
mod target;

pub(crate) use progress::{ConnectionProgress, ConnectionStage};

use super::{AgentHandle, AgentProcess, Transport};
use bootstrap::{Executable, RemoteAgent};
use contract::{control::ExitStatus, hosts::HostAddress, job::SshSpec};
use diagnostic::{Code, Diagnostic, codes::host};
use std::{
    collections::HashMap,
    io,
    os::unix::net::UnixStream as StdStream,
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};
use target::{SshTarget, TargetResolver};
use tokio::net::UnixStream;

/// The number of the stream that carries a remote process's stderr (RFC 4254, 5.2).
const STDERR: i32 = 1;
/// The stack size of a connection's thread, in bytes. There may be thousands of threads.
const THREAD_STACK_BYTES: usize = 512 << 10;
/// Connections that are set up through one jump host at once. By default sshd drops callers from
/// the eleventh on (`MaxStartups`).
const MAX_JUMP_FANOUT: u32 = 8;

/// Starts agents on other hosts over SSH.
pub(crate) struct SshTransport {
    /// The hosts by name.
    hosts: HashMap<String, HostAddress>,
    resolver: Arc<TargetResolver>,
    executable: &'static Executable,
    fanout: Arc<FanoutLimit>,
    jump_fanout: Arc<FanoutLimit>,
}

impl SshTransport {
    /// Reads the SSH configuration and the executable. Relative paths of the job are relative to
    /// `base`.
    pub(crate) fn new(
        spec: &SshSpec,
        hosts: &[HostAddress],
        base: &Path,
    ) -> diagnostic::Result<SshTransport> {
        Ok(SshTransport {
            hosts: hosts.iter().map(|host| (host.name(), host.clone())).collect(),
            executable: Executable::current()?,
            resolver: Arc::new(TargetResolver::new(spec, base)?),
            fanout: Arc::new(FanoutLimit::new(spec.fanout)),
            jump_fanout: Arc::new(FanoutLimit::new(spec.fanout.min(MAX_JUMP_FANOUT))),
        })
    }

    /// Starts an agent on the host of this name. Also returns the connection's progress.
    pub(crate) fn start_agent(
        &self,
        name: &str,
    ) -> diagnostic::Result<(AgentProcess, Arc<ConnectionProgress>)> {
        let host = self.hosts.get(name).ok_or_else(|| {
            Diagnostic::error(host::HOST_UNKNOWN, format!("the job has no host {name}")).with_subject(name)
        })?;
        self.spawn_connection(host).map_err(|error| {
            Diagnostic::error(
                host::SSH_SESSION_LIMIT,
                format!("cannot open an SSH connection to host {name}"),
            )
            .with_subject(name)
            .with_cause(&error)
        })
    }

    fn spawn_connection(&self, host: &HostAddress) -> io::Result<(AgentProcess, Arc<ConnectionProgress>)> {
        let (control, control_end) = StdStream::pair()?;
        let (stderr, stderr_end) = StdStream::pair()?;
        let progress = Arc::new(ConnectionProgress::default());
        let connection = SshConnection {
            host: host.clone(),
            resolver: self.resolver.clone(),
            executable: self.executable,
            fanout: self.fanout.clone(),
            jump_fanout: self.jump_fanout.clone(),
            progress: progress.clone(),
            control: control_end,
            stderr: stderr_end,
        };
        thread::Builder::new()
            .name("ssh".into())
            .stack_size(THREAD_STACK_BYTES)
            .spawn(move || connection.run())?;
        let (output, input) = to_async(control)?.into_split();
        let process = AgentProcess {
            handle: AgentHandle::Connection(Box::new(progress.clone())),
            input: Box::new(input),
            output: Box::new(output),
            stderr: Box::new(to_async(stderr)?),
        };
        Ok((process, progress))
    }
}

fn to_async(stream: StdStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// An error about the connection to `target`. The message must name the host.
fn ssh_error(target: &SshTarget, code: Code, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(code, message).with_subject(&target.name)
}

impl Transport for SshTransport {
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>> {
        hosts.iter().map(|name| self.start_agent(name).map(|(process, _)| process)).collect()
    }

    fn update_hosts(&mut self, hosts: &[HostAddress]) {
        self.hosts.extend(hosts.iter().map(|host| (host.name(), host.clone())));
    }
}

/// The connection to one host, on its thread.
struct SshConnection {
    host: HostAddress,
    resolver: Arc<TargetResolver>,
    executable: &'static Executable,
    fanout: Arc<FanoutLimit>,
    jump_fanout: Arc<FanoutLimit>,
    progress: Arc<ConnectionProgress>,
    control: StdStream,
    stderr: StdStream,
}

impl SshConnection {
    /// Blocks until the agent or the connection has ended.
    fn run(self) {
        let (failure, status) = match self.start_and_relay() {
            Ok(status) => (None, status),
            Err(failure) => (Some(failure), None),
        };
        self.progress.finish(failure, status);
        // The streams end when `self` is dropped, so the reason is known before.
    }

    fn start_and_relay(&self) -> diagnostic::Result<Option<ExitStatus>> {
        let target = self.resolver.target(&self.host)?;
        let (session, agent) = self.start_agent(&target)?;
        relay::relay(&session, agent.channel, &self.control, Some(&self.stderr), agent.leftover).map_err(
            |error| {
                let message = format!("the SSH connection to host {} was lost", target.name);
                ssh_error(&target, host::SSH_CONNECTION_LOST, message)
                    .with_cause(&error)
                    .with_help("check that the host is up and reachable")
            },
        )
    }

    /// Connects to the host and starts the agent. Blocks until the fanout limit permits another
    /// connection, and holds the permit until the agent runs.
    fn start_agent(&self, target: &SshTarget) -> diagnostic::Result<(ssh2::Session, RemoteAgent)> {
        let fanout = if target.jumps.is_empty() { &self.fanout } else { &self.jump_fanout };
        let _permit = fanout.acquire();
        self.progress.check_not_aborted(&target.name)?;
        let session = connect::connect(target, &self.progress)?;
        let agent = bootstrap::start_agent(target, &session, self.executable, &self.progress)?;
        Ok((session, agent))
    }
}

/// Limits how many connections are set up at once.
#[derive(Debug)]
struct FanoutLimit {
    free: Mutex<u32>,
    released: Condvar,
}

impl FanoutLimit {
    fn new(limit: u32) -> FanoutLimit {
        FanoutLimit { free: Mutex::new(limit.max(1)), released: Condvar::new() }
    }

    /// Blocks until a permit is free.
    fn acquire(&self) -> FanoutPermit<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free =
            self.released.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        FanoutPermit(self)
    }
}

/// The right to set up one connection, released when dropped.
struct FanoutPermit<'a>(&'a FanoutLimit);

impl Drop for FanoutPermit<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.released.notify_one();
    }
}
