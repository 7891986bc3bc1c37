//! [`SshTransport`]: starts agents on other hosts over SSH.
//!
//! Each host has one SSH connection on a separate thread. The thread connects, starts the
//! executable on the host (copying it first if necessary), and then relays the control connection.
//! No TCP port is opened. Only one path, that of the executable on the host, passes through the
//! login shell.
use super::{
    bootstrap::{self, Executable, RemoteAgent},
    connect::{self, THREAD_STACK_BYTES},
    connection_progress::ConnectionProgress,
    relay,
    ssh_error::build_ssh_error,
    target::{SshTarget, TargetResolver},
};
use crate::cluster::transport::{AgentHandle, AgentProcess, StartStep, Transport};
use diagnostic::{
    Diagnostic,
    codes::{host, ssh},
};
use jobspec::{SshSpec, hosts::HostAddress};
use protocol::control::ExitStatus;
use std::{
    collections::HashMap,
    io,
    os::unix::net::UnixStream as StdStream,
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};
use tokio::net::UnixStream;

/// The largest number of connections that are set up simultaneously through jump hosts. All of them
/// may use one jump host, whose sshd by default drops connections from the eleventh on
/// (`MaxStartups`).
const MAX_JUMP_FANOUT: u32 = 8;

/// The transport that starts agents on other hosts over SSH.
pub(crate) struct SshTransport {
    /// The hosts by their names in the job.
    hosts: HashMap<String, HostAddress>,
    resolver: Arc<TargetResolver>,
    executable: &'static Executable,
    /// Limits how many direct connections are set up simultaneously.
    fanout: Arc<FanoutLimit>,
    /// Limits how many connections through jump hosts are set up simultaneously, over all jump
    /// hosts.
    jump_fanout: Arc<FanoutLimit>,
}

impl SshTransport {
    /// Creates the transport: reads the SSH configuration and hashes the executable. Relative paths
    /// in `spec` are relative to `base`.
    pub(crate) fn new(
        spec: &SshSpec,
        hosts: &[HostAddress],
        base: &Path,
    ) -> diagnostic::Result<SshTransport> {
        Ok(SshTransport {
            hosts: hosts.iter().map(|host| (host.name_with_port(), host.clone())).collect(),
            executable: Executable::open_current()?,
            resolver: Arc::new(TargetResolver::new(spec, base)?),
            fanout: Arc::new(FanoutLimit::new(spec.fanout)),
            jump_fanout: Arc::new(FanoutLimit::new(spec.fanout.min(MAX_JUMP_FANOUT))),
        })
    }

    /// Begins to start an agent on the host with this name. A separate thread sets up the
    /// connection, and the function returns without waiting for it. Fails if the job has no such
    /// host.
    fn start_agent(&self, name: &str) -> diagnostic::Result<AgentProcess> {
        let host = self.hosts.get(name).ok_or_else(|| {
            Diagnostic::error(host::HOST_UNKNOWN, format!("the job has no host {name}")).with_subject(name)
        })?;
        self.spawn_connection(host).map_err(|error| {
            Diagnostic::error(ssh::SSH_SESSION_LIMIT, format!("cannot open an SSH connection to host {name}"))
                .with_subject(name)
                .with_cause(&error)
        })
    }

    /// Starts the thread of the connection to a host. Returns the agent's streams, which carry data
    /// once the connection is set up.
    fn spawn_connection(&self, host: &HostAddress) -> io::Result<AgentProcess> {
        let (control, control_end) = StdStream::pair()?;
        let (stderr, stderr_end) = StdStream::pair()?;
        let (progress, start_steps) = ConnectionProgress::new();
        let progress = Arc::new(progress);
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
            .spawn(move || connection.run_to_end())?;
        let (output, input) = into_async_stream(control)?.into_split();
        Ok(AgentProcess {
            handle: AgentHandle::Connection(Box::new(progress)),
            input: Box::new(input),
            output: Box::new(output),
            stderr: Box::new(into_async_stream(stderr)?),
            start_steps: Some(start_steps),
        })
    }
}

/// Converts a socket of the standard library into a nonblocking socket of tokio.
fn into_async_stream(stream: StdStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

impl Transport for SshTransport {
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>> {
        hosts.iter().map(|name| self.start_agent(name)).collect()
    }

    fn update_hosts(&mut self, hosts: &[HostAddress]) {
        self.hosts.extend(hosts.iter().map(|host| (host.name_with_port(), host.clone())));
    }
}

/// The connection to one host, owned by the thread of the connection.
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
    /// Starts the agent and relays its streams. Blocks until the agent or the connection has ended,
    /// and records the result in `progress`.
    fn run_to_end(self) {
        let (failure, status) = match self.start_and_relay_agent() {
            Ok(status) => (None, status),
            Err(failure) => (Some(failure), None),
        };
        self.progress.record_end(failure, status);
        // The streams end when `self` is dropped. So the result is recorded before they end.
    }

    /// Starts the agent and relays its streams until the agent ends. Returns the agent's exit
    /// status, or `None` if the host does not report it. Fails if the connection is lost.
    fn start_and_relay_agent(&self) -> diagnostic::Result<Option<ExitStatus>> {
        let target = self.resolver.resolve_target(&self.host)?;
        let (session, agent) = self.start_agent(&target)?;
        relay::relay_channel(&session, agent.channel, &self.control, Some(&self.stderr), agent.leftover)
            .map_err(|error| {
                let message = format!("the SSH connection to host {} was lost", target.name);
                build_ssh_error(&target, ssh::SSH_CONNECTION_LOST, message)
                    .with_cause(&error)
                    .with_help("check that the host is up and reachable")
            })
    }

    /// Connects to the host and starts the agent. First blocks until the fanout limit permits
    /// another connection, and holds the permit until the agent runs.
    fn start_agent(&self, target: &SshTarget) -> diagnostic::Result<(ssh2::Session, RemoteAgent)> {
        let fanout = if target.jumps.is_empty() { &self.fanout } else { &self.jump_fanout };
        let _permit = fanout.try_acquire_permit().unwrap_or_else(|| {
            self.progress.report_start_step(StartStep::Waiting);
            fanout.acquire_permit()
        });
        self.progress.report_start_step(StartStep::Started);
        self.progress.check_not_aborted(&target.name)?;
        let session = connect::open_session(target, &self.progress)?;
        let agent = bootstrap::start_remote_agent(target, &session, self.executable, &self.progress)?;
        Ok((session, agent))
    }
}

/// A limit of the connections that are set up simultaneously, as a semaphore.
#[derive(Debug)]
struct FanoutLimit {
    /// The number of permits that are free.
    free: Mutex<u32>,
    released: Condvar,
}

impl FanoutLimit {
    /// Creates a limit of `limit` connections. A limit of 0 counts as 1.
    fn new(limit: u32) -> FanoutLimit {
        FanoutLimit { free: Mutex::new(limit.max(1)), released: Condvar::new() }
    }

    /// Takes a permit to set up one connection. Returns `None` if no permit is free.
    fn try_acquire_permit(&self) -> Option<FanoutPermit<'_>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        *free = free.checked_sub(1)?;
        Some(FanoutPermit(self))
    }

    /// Takes a permit to set up one connection. Blocks until a permit is free.
    fn acquire_permit(&self) -> FanoutPermit<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free =
            self.released.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        FanoutPermit(self)
    }
}

/// The right to set up one connection. Dropping it releases the permit.
struct FanoutPermit<'a>(&'a FanoutLimit);

impl Drop for FanoutPermit<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.released.notify_one();
    }
}
