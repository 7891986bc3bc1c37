//! [`SshTransport`]: starts agents on other hosts over SSH.
//!
//! Each host has one SSH connection, which a thread serves. The thread connects, starts the
//! executable on the host (copying it first if necessary), and then relays the control connection.
//! No TCP port is opened. Only one path, that of the executable on the host, passes through the
//! login shell. In a [tree](super::tree), the connection ends once the agent is connected with
//! another one.
use super::{
    agent_bootstrap::{self, AgentStartInputs, LaunchExecutable, RemoteAgent},
    client_notice::{OpenSshNotice, StderrAfterNotice, describe_external_client},
    connection_progress::ConnectionProgress,
    connection_threads::{ConnectionThreadPool, ThreadTask},
    openssh::{list_unreaped_children, record_child_exit},
    ssh_error::build_ssh_error,
    ssh_session::SshSession,
    target::{SshTarget, TargetResolver},
    tree::{TreeHub, TreePlace, TreeSettings},
};
use crate::{
    cluster::transport::{
        AgentHandle, AgentProcess, AgentStartStep, ArrivalLimits, DESCRIPTORS_PER_CONNECTION, Transport,
    },
    connection::tree::StreamId,
};
use diagnostic::{
    Diagnostic,
    codes::{host, ssh},
};
use jobspec::{JobSpec, SshClient, SshSpec, hosts::HostAddress};
use protocol::control::ExitStatus;
use std::{
    collections::HashMap,
    io,
    os::unix::net::UnixStream as StdStream,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};
use tokio::{net::UnixStream, sync::oneshot};

/// The largest number of SSH connections through jump hosts that are set up at the same time. All
/// of them may use one jump host, whose sshd by default drops connections from the eleventh on
/// (`MaxStartups`).
const MAX_JUMP_FANOUT: u32 = 8;

/// The largest number of hosts that may copy launch's executable or wait for it at the same time,
/// as a multiple of the limit `cluster.ssh.fanout` on SSH logins. These hosts need no further
/// logins, so they leave their turns to other hosts.
const COPIES_PER_FANOUT: u32 = 2;
/// The number of file descriptors that the controller needs for the SSH connection to one host
/// while the agent there is started and connected to another agent.
const DESCRIPTORS_PER_TREE_SETUP: u64 = 2;

/// The number of file descriptors for the log and stderr of OpenSSH's client that an SSH connection
/// through this client needs in addition.
const DESCRIPTORS_PER_OPENSSH_CLIENT: u64 = 2;

/// The transport that starts the agents of a job on other hosts over SSH, and connects the agents
/// with the controller.
pub(crate) struct SshTransport {
    /// The hosts by their names in the job.
    hosts: HashMap<String, HostAddress>,
    resolver: Arc<TargetResolver>,
    executable: &'static LaunchExecutable,
    limits: Arc<ConnectionLimits>,
    /// The tree of agents; `None` if the controller is connected with each agent.
    tree: Option<Arc<TreeHub>>,
    spec: SshSpec,
    threads: Arc<ConnectionThreadPool<SshConnection>>,
    notice: Arc<OpenSshNotice>,
}

/// The limits on how many SSH connections are set up at the same time, and on how many hosts get
/// launch's executable at the same time.
struct ConnectionLimits {
    /// Limits direct connections.
    direct: FanoutLimit,
    /// Limits connections through jump hosts, over all jump hosts.
    through_jump_hosts: FanoutLimit,
    /// Limits connections to hosts of a tree that get the executable.
    copies: FanoutLimit,
}

impl SshTransport {
    /// Creates the transport that starts the agents of the job `job` on the hosts `hosts` over SSH.
    /// Reads the SSH configuration and hashes the executable. Relative paths in the job are
    /// relative to its working directory.
    pub(crate) fn new(job: &JobSpec, hosts: &[HostAddress]) -> diagnostic::Result<SshTransport> {
        let spec = &job.cluster.ssh;
        let settings = TreeSettings {
            width: spec.fanout,
            host_lease: Duration::from_millis(job.run.host_lease_ms),
            interface: job.cluster.interface.clone(),
            ports: job.cluster.ports,
        };
        let tree = (hosts.len() > spec.fanout as usize).then(|| TreeHub::start(settings)).transpose();
        let tree = tree.map_err(|error| {
            Diagnostic::error(ssh::SSH_SESSION_LIMIT, "cannot start the thread of the tree of agents")
                .with_cause(&error)
        })?;
        Ok(SshTransport {
            hosts: hosts.iter().map(|host| (host.name_with_port(), host.clone())).collect(),
            executable: LaunchExecutable::open_current()?,
            resolver: Arc::new(TargetResolver::new(spec, &job.run.workdir)?),
            limits: Arc::new(ConnectionLimits {
                direct: FanoutLimit::new(spec.fanout),
                through_jump_hosts: FanoutLimit::new(spec.fanout.min(MAX_JUMP_FANOUT)),
                copies: FanoutLimit::new(spec.fanout.saturating_mul(COPIES_PER_FANOUT)),
            }),
            // In a tree, most threads wait for a turn, a place or the executable.
            threads: Arc::new(ConnectionThreadPool::new(match tree {
                Some(_) => spec.fanout.saturating_mul(1 + COPIES_PER_FANOUT) as usize,
                None => usize::MAX,
            })),
            tree: tree.map(Arc::new),
            spec: spec.clone(),
            notice: Arc::default(),
        })
    }

    /// Begins to start an agent over SSH on the host with the name `name`; the connection is set up
    /// in the background. A separate thread sets up the connection, and the function returns
    /// without waiting for it. Fails if the job has no such host.
    fn begin_agent_start(&self, name: &str) -> diagnostic::Result<AgentProcess> {
        let host = self.hosts.get(name).ok_or_else(|| {
            Diagnostic::error(host::HOST_UNKNOWN, format!("the job has no host {name}")).with_subject(name)
        })?;
        self.submit_connection(host).map_err(|error| {
            Diagnostic::error(ssh::SSH_SESSION_LIMIT, format!("cannot open an SSH connection to host {name}"))
                .with_subject(name)
                .with_cause(&error)
        })
    }

    /// Queues the SSH connection to a host for a thread of the pool, and returns the streams by
    /// which the controller will communicate with the agent there.
    fn submit_connection(&self, host: &HostAddress) -> io::Result<AgentProcess> {
        let (progress, start_steps) = ConnectionProgress::new();
        let progress = Arc::new(progress);
        let (mut process, carrier) = match &self.tree {
            Some(tree) => {
                let stream = tree.open_agent_stream(&host.name_with_port(), progress.clone());
                let process = AgentProcess {
                    handle: AgentHandle::Connection(Box::new(stream.connection)),
                    input: Box::new(stream.halves.output),
                    output: Box::new(stream.halves.input),
                    stderr: Box::new(stream.stderr),
                    start_steps: Some(start_steps),
                };
                (process, ControlStreamCarrier::Tree { tree: tree.clone(), stream: stream.id, place: None })
            }
            None => {
                let (control, control_end) = StdStream::pair()?;
                let (stderr, stderr_end) = StdStream::pair()?;
                let (output, input) = into_async_stream(control)?.into_split();
                let process = AgentProcess {
                    handle: AgentHandle::Connection(Box::new(progress.clone())),
                    input: Box::new(input),
                    output: Box::new(output),
                    stderr: Box::new(into_async_stream(stderr)?),
                    start_steps: Some(start_steps),
                };
                (process, ControlStreamCarrier::Direct { control: control_end, stderr: stderr_end })
            }
        };
        let (notice_sender, stderr) = StderrAfterNotice::new(process.stderr);
        process.stderr = Box::new(stderr);
        let connection = SshConnection {
            host: host.clone(),
            notice: self.notice.clone(),
            notice_sender: Some(notice_sender),
            resolver: self.resolver.clone(),
            executable: self.executable,
            limits: self.limits.clone(),
            progress: progress.clone(),
            carrier,
            threads: self.threads.clone(),
        };
        if self.tree.is_some() {
            // For a thread, a place and a turn.
            progress.report_start_step(AgentStartStep::Waiting);
        }
        self.threads.submit(connection)?;
        Ok(process)
    }
}

/// Returns how many file descriptors the controller needs for its connections with the agents of
/// `hosts` other hosts over SSH. `uses_tree` states whether the agents form a tree.
pub(super) fn count_ssh_descriptors(spec: &SshSpec, uses_tree: bool, hosts: usize) -> u64 {
    let of_connection = match spec.client {
        SshClient::Builtin => DESCRIPTORS_PER_CONNECTION,
        SshClient::Auto | SshClient::OpenSsh => DESCRIPTORS_PER_CONNECTION + DESCRIPTORS_PER_OPENSSH_CLIENT,
    };
    if !uses_tree {
        return hosts as u64 * of_connection;
    }
    let setups = u64::from(1 + COPIES_PER_FANOUT) * DESCRIPTORS_PER_TREE_SETUP;
    u64::from(spec.fanout).min(hosts as u64) * (of_connection + setups)
}

/// Converts a Unix socket of the standard library into a nonblocking Unix socket of tokio.
fn into_async_stream(stream: StdStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

impl Transport for SshTransport {
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>> {
        hosts.iter().map(|name| self.begin_agent_start(name)).collect()
    }

    fn arrival_limits(&self) -> ArrivalLimits {
        ArrivalLimits { reconnects_while_running: true, ..ArrivalLimits::default() }
    }

    fn count_descriptors(&self, hosts: usize) -> u64 {
        count_ssh_descriptors(&self.spec, self.tree.is_some(), hosts)
    }

    fn child_processes(&self) -> Vec<u32> {
        list_unreaped_children()
    }

    fn children_with_killed_groups(&self) -> Vec<u32> {
        list_unreaped_children()
    }

    fn record_child_exit(&mut self, pid: u32, status: ExitStatus) {
        record_child_exit(pid, status);
    }

    fn update_hosts(&mut self, hosts: &[HostAddress]) {
        self.hosts.extend(hosts.iter().map(|host| (host.name_with_port(), host.clone())));
    }
}

/// How an agent's control connection reaches the controller: over the SSH connection to its host,
/// or through other agents in the tree of agents.
enum ControlStreamCarrier {
    /// The SSH connection, which ends with the agent.
    Direct { control: StdStream, stderr: StdStream },
    /// The tree of agents. `place` is the place of the agent in the tree; `None` if the agent has
    /// to wait for one.
    Tree { tree: Arc<TreeHub>, stream: StreamId, place: Option<TreePlace> },
}

/// The task of one thread: connects to a host over SSH, starts the agent there, and copies data
/// between the agent and the controller.
struct SshConnection {
    host: HostAddress,
    notice: Arc<OpenSshNotice>,
    /// Passes the notice on to the stderr of the agent, which begins with it.
    notice_sender: Option<oneshot::Sender<String>>,
    resolver: Arc<TargetResolver>,
    executable: &'static LaunchExecutable,
    limits: Arc<ConnectionLimits>,
    progress: Arc<ConnectionProgress>,
    carrier: ControlStreamCarrier,
    threads: Arc<ConnectionThreadPool<SshConnection>>,
}

impl ThreadTask for SshConnection {
    /// Decides, if this is possible without waiting, whether the agent of this SSH connection
    /// connects to the controller or to another agent.
    fn prepare(&mut self) {
        if let ControlStreamCarrier::Tree { tree, stream, place } = &mut self.carrier {
            *place = tree.try_place_agent(*stream);
        }
    }

    /// Starts the agent over SSH, copies bytes between the agent and the controller until the
    /// connection has ended, and records the result for the controller. The connection ends with
    /// the agent, or once the agent is connected with another one.
    fn run(mut self) {
        let target = self.resolver.resolve_target(&self.host);
        self.progress.set_external_client(target.as_ref().ok().and_then(describe_external_client));
        let notice = target.as_ref().ok().and_then(|target| self.notice.take_notice_text(target));
        if let (Some(sender), Some(text)) = (self.notice_sender.take(), notice) {
            // An error means that the controller no longer waits for the agent.
            _ = sender.send(text);
        }
        let (failure, status) = match target.and_then(|target| self.start_and_relay_agent(&target)) {
            Ok(status) => (None, status),
            Err(failure) => (Some(failure), None),
        };
        let has_failed = failure.is_some();
        self.progress.record_connection_end(failure, status);
        // The streams end when `self` is dropped. So the result is recorded before they end.
        if let ControlStreamCarrier::Tree { tree, stream, .. } = &self.carrier
            && has_failed
        {
            tree.abort_agent_stream(*stream);
        }
    }
}

impl SshConnection {
    /// Starts the agent on the host `target`, and copies data between agent and controller until
    /// the agent has ended or reaches the controller through another agent. Returns the agent's
    /// exit status, or `None` if the host does not report it. Fails if the connection is lost.
    fn start_and_relay_agent(&self, target: &SshTarget) -> diagnostic::Result<Option<ExitStatus>> {
        match &self.carrier {
            ControlStreamCarrier::Direct { control, stderr } => {
                let (session, agent) = self.start_agent(target, None)?;
                session.relay_agent_streams(target, agent.channel, agent.leftover, (control, stderr))
            }
            ControlStreamCarrier::Tree { tree, stream, place } => {
                let place =
                    place.clone().or_else(|| tree.wait_for_place(*stream, || self.progress.is_aborted()));
                self.progress.check_not_aborted(&target.name)?;
                let Some(place) = place else { return Ok(None) };
                let (session, agent) = self.start_agent(target, Some(tree))?;
                self.join_tree(target, (&session, agent), tree, *stream, place)
            }
        }
    }

    /// Lets a started agent connect to the controller, either directly over SSH or through another
    /// agent that forwards its messages. If the agent is connected with the controller, relays its
    /// streams until it ends.
    fn join_tree(
        &self,
        target: &SshTarget,
        (session, agent): (&SshSession, RemoteAgent),
        tree: &TreeHub,
        stream: StreamId,
        place: TreePlace,
    ) -> diagnostic::Result<Option<ExitStatus>> {
        match place {
            TreePlace::Below(planned) => {
                // Agents may have ended, and others become ready, while this one was started.
                let present = tree.list_possible_parents(stream);
                let parents = if present.is_empty() { planned } else { present };
                let setup = tree.build_first_message(stream, &target.name, parents);
                let start = AgentStartInputs {
                    target,
                    session,
                    executable: self.executable,
                    progress: &self.progress,
                };
                agent_bootstrap::make_agent_join_tree(&start, agent, setup).map(|()| None)
            }
            TreePlace::Root => {
                let pairs = StdStream::pair().and_then(|control| Ok((control, StdStream::pair()?)));
                let ((control, control_end), (stderr, stderr_end)) = pairs.map_err(|error| {
                    let message = format!("cannot open a connection to the agent on host {}", target.name);
                    build_ssh_error(target, ssh::SSH_SESSION_LIMIT, message).with_cause(&error)
                })?;
                tree.add_top_agent(
                    tree.build_first_message(stream, &target.name, Vec::new()),
                    control,
                    stderr,
                );
                self.threads.run_without_thread_limit(|| {
                    session.relay_agent_streams(
                        target,
                        agent.channel,
                        agent.leftover,
                        (&control_end, &stderr_end),
                    )
                })
            }
        }
    }

    /// Opens an SSH session with the host, and starts the agent on the host through this session.
    /// First blocks until the fanout limit permits another connection, and holds the permit until
    /// the agent runs, or until the executable is copied in a tree.
    fn start_agent(
        &self,
        target: &SshTarget,
        tree: Option<&Arc<TreeHub>>,
    ) -> diagnostic::Result<(SshSession, RemoteAgent)> {
        let limits = &self.limits;
        let limit = if target.is_direct() { &limits.direct } else { &limits.through_jump_hosts };
        let mut turn = Some(limit.try_acquire_permit().unwrap_or_else(|| {
            self.progress.report_start_step(AgentStartStep::Waiting);
            limit.acquire_permit()
        }));
        self.progress.report_start_step(AgentStartStep::Started);
        self.progress.check_not_aborted(&target.name)?;
        let session = SshSession::open(target, &self.progress)?;
        let mut copy_turn = None;
        let begin_copy = || {
            if tree.is_some() {
                copy_turn = Some(limits.copies.acquire_permit());
                turn = None;
            }
        };
        let bootstrap = AgentStartInputs {
            target,
            session: &session,
            executable: self.executable,
            progress: &self.progress,
        };
        let agent = agent_bootstrap::start_remote_agent(&bootstrap, tree.map(Arc::as_ref), begin_copy)?;
        drop((turn, copy_turn));
        Ok((session, agent))
    }
}

/// A semaphore with one permit for each SSH connection that may be set up at the same time.
#[derive(Debug)]
struct FanoutLimit {
    /// The number of permits that are free.
    free: Mutex<u32>,
    released: Condvar,
}

impl FanoutLimit {
    /// Creates a limit that permits the setup of at most `limit` SSH connections at the same time.
    /// A limit of 0 counts as 1.
    fn new(limit: u32) -> FanoutLimit {
        FanoutLimit { free: Mutex::new(limit.max(1)), released: Condvar::new() }
    }

    /// Takes a permit to set up one SSH connection, if one is available. Returns `None` if no
    /// permit is free.
    fn try_acquire_permit(&self) -> Option<FanoutPermit<'_>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        *free = free.checked_sub(1)?;
        Some(FanoutPermit(self))
    }

    /// Waits for a permit to set up one SSH connection, and takes it. Blocks until a permit is
    /// free.
    fn acquire_permit(&self) -> FanoutPermit<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free =
            self.released.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        FanoutPermit(self)
    }
}

/// A permit to set up one SSH connection, which returns to the limit when the value is dropped.
struct FanoutPermit<'a>(&'a FanoutLimit);

impl Drop for FanoutPermit<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.released.notify_one();
    }
}
