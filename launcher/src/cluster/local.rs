//! [`LocalCluster`]: this machine as the only host of a job. [`LocalTransport`] starts the agent as
//! a child of the controller, with the control connection on its standard input and output.
use super::{
    host_target::HostTarget,
    provider::{Cluster, ClusterError},
    transport::{AgentHandle, AgentProcess, Transport},
};
use crate::core_dumps::restore_core_dumps_in_child;
use diagnostic::{Diagnostic, codes::host};
use jobspec::{JobSpec, env};
use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Command, Stdio},
};
use tokio::net::unix::pipe;

/// The largest permitted value of `LAUNCH_LOCAL_AGENTS`, with which a test starts several agents on
/// this machine as if they were hosts.
const MAX_LOCAL_AGENTS: usize = 64;

/// The provider of hosts for jobs that run on this machine only.
pub(super) struct LocalCluster;

impl Cluster for LocalCluster {
    /// Returns `true`, because this machine runs every job for which no other provider of hosts is
    /// responsible.
    fn detect(&self, _job: &JobSpec) -> Result<bool, ClusterError> {
        Ok(true)
    }

    /// Returns this machine as the only host of the job. Tests set `LAUNCH_LOCAL_AGENTS` to get
    /// several hosts, each with a separate agent on this machine.
    fn hosts(
        &self,
        _job: &JobSpec,
        local_host: &str,
        _warnings: &mut Vec<Diagnostic>,
    ) -> Result<Vec<HostTarget>, ClusterError> {
        let count = std::env::var(env::LAUNCH_LOCAL_AGENTS).ok().and_then(|n| n.parse().ok());
        let target = |name: String| HostTarget { name, slots: None, selected_slots: None, local: true };
        Ok(match count {
            Some(n @ 2..=MAX_LOCAL_AGENTS) => (0..n).map(|i| target(format!("{local_host}-{i}"))).collect(),
            _ => vec![target(local_host.to_owned())],
        })
    }

    fn transport(&self, _job: &JobSpec) -> Result<Box<dyn Transport>, ClusterError> {
        Ok(Box::new(LocalTransport))
    }
}

/// Starts agents on this machine, as child processes of the controller.
#[derive(Clone, Copy, Debug)]
struct LocalTransport;

impl Transport for LocalTransport {
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>> {
        let start = |name: &String| {
            start_local_agent().map_err(|error| {
                let message = format!("cannot start the agent of host {name} on this machine");
                Diagnostic::error(host::AGENT_START_FAILED, message).with_subject(name).with_cause(&error)
            })
        };
        hosts.iter().map(start).collect()
    }
}

/// Starts an agent on this machine as a child process of the controller, in a separate process
/// group. The controller has to reap the child.
pub(super) fn start_local_agent() -> io::Result<AgentProcess> {
    // This is the file that this process runs, even if its path was replaced meanwhile. So the
    // versions of controller and agent cannot differ.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("launch").arg("agent");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // In a separate group, the agent does not receive a terminal's Ctrl-C.
    command.process_group(0);
    restore_core_dumps_in_child(&mut command);
    let mut child = command.spawn()?;
    let (Some(input), Some(output), Some(stderr)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(io::Error::other("the agent has no pipes"));
    };
    Ok(AgentProcess {
        // Dropping `child` neither waits for it nor kills it; the controller reaps it.
        handle: AgentHandle::Child(child.id()),
        input: Box::new(pipe::Sender::from_owned_fd(OwnedFd::from(input))?),
        output: Box::new(pipe::Receiver::from_owned_fd(OwnedFd::from(output))?),
        stderr: Box::new(pipe::Receiver::from_owned_fd(OwnedFd::from(stderr))?),
        start_steps: None,
    })
}
