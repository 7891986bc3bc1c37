//! An agent on this machine: a child of the controller with the control stream on its stdin and stdout.
use super::{AgentProcess, Carrier, Transport};
use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Command, Stdio},
};
use tokio::net::unix::pipe;

/// This machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local;

impl Transport for Local {
    fn start(&mut self, hosts: &[String]) -> Vec<io::Result<AgentProcess>> {
        hosts.iter().map(|_| start()).collect()
    }
}

fn start() -> io::Result<AgentProcess> {
    // The very file this process runs, even if another was put in its place meanwhile: versions can't differ.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("launch").arg("agent");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A group of its own: a terminal's Ctrl-C is for the controller alone.
    command.process_group(0);
    let mut child = command.spawn()?;
    let (Some(input), Some(output), Some(talk)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(io::Error::other("the agent has no pipes"));
    };
    Ok(AgentProcess {
        // Dropping `child` neither waits for nor kills it; the controller reaps.
        carrier: Carrier::Child(child.id()),
        input: Box::new(pipe::Sender::from_owned_fd(OwnedFd::from(input))?),
        output: Box::new(pipe::Receiver::from_owned_fd(OwnedFd::from(output))?),
        talk: Box::new(pipe::Receiver::from_owned_fd(OwnedFd::from(talk))?),
    })
}
