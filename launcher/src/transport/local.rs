//! [`LocalTransport`]: starts the agent on this machine as a child of the controller, with the
//! control connection on its standard input and output.
use super::{AgentHandle, AgentProcess, Transport};
use diagnostic::{Diagnostic, codes::host};
use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Command, Stdio},
};
use tokio::net::unix::pipe;

/// The transport that starts agents on this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalTransport;

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

/// Starts an agent as a child process in a separate process group. The controller has to reap the
/// child.
fn start_local_agent() -> io::Result<AgentProcess> {
    // This is the file that this process runs, even if its path was replaced meanwhile. So the
    // versions of controller and agent cannot differ.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("launch").arg("agent");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // In a separate group, the agent does not receive a terminal's Ctrl-C.
    command.process_group(0);
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
    })
}
