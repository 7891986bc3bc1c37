//! [`LaunchExecCommands`]: the commands of `launch exec` that run on the host, and the readers of
//! their output.
use crate::agent::core::FINAL_OUTPUT_TIMEOUT;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use protocol::control::{EXEC_CHUNK_BYTES, ExecId, ExitStatus};
use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};
use tokio::{
    io::AsyncReadExt,
    net::unix::pipe,
    sync::{Semaphore, mpsc, watch},
    time::timeout,
};

/// The number of events of `launch exec` commands, such as output, that may wait for the agent's
/// event loop.
const EXEC_EVENT_QUEUE_CAPACITY: usize = 16;

/// A command that the user runs with `launch exec` next to a worker on this host: its process, its
/// output pipes, and how it ended.
pub(super) struct ExecCommand {
    /// The pid of the command; `None` before its start and after it was reaped.
    pub(super) pid: Option<u32>,
    pub(super) status: Option<ExitStatus>,
    /// The number of output pipes that are still read.
    pub(super) open_pipes: usize,
    /// The number of bytes that may be read until the client has written earlier output.
    pub(super) window: Arc<Semaphore>,
    /// Whether the command has ended, for the readers of its output.
    pub(super) has_ended: watch::Sender<bool>,
    pub(super) is_cancelled: bool,
    /// The command that ends the container of this command, until the process has started.
    pub(super) removal: Option<Vec<String>>,
}

/// An event of a `launch exec` command that its reader threads or timers report to the agent's
/// event loop, such as output or the end of the output.
pub(super) enum ExecEvent {
    /// The command has printed `bytes`.
    Output { stderr: bool, bytes: Vec<u8> },
    /// An output pipe of the command is read to its end.
    PipeEnded,
    /// The grace period of a cancelled command is over.
    GraceEnded,
}

/// The sender and the receiver of the events of all `launch exec` commands of the host.
type ExecEventChannel = (mpsc::Sender<(ExecId, ExecEvent)>, mpsc::Receiver<(ExecId, ExecEvent)>);

/// The `launch exec` commands that run on this host next to workers, with the channel for their
/// events.
pub(super) struct LaunchExecCommands {
    pub(super) commands: HashMap<ExecId, ExecCommand>,
    /// The pids of the commands that have not been reaped.
    pub(super) leaders: HashMap<u32, ExecId>,
    pub(super) events: ExecEventChannel,
}

impl LaunchExecCommands {
    /// Creates the list of running `launch exec` commands of this host, which is empty at first.
    pub(super) fn new() -> LaunchExecCommands {
        LaunchExecCommands {
            commands: HashMap::new(),
            leaders: HashMap::new(),
            events: mpsc::channel(EXEC_EVENT_QUEUE_CAPACITY),
        }
    }

    /// Waits for the next event of a `launch exec` command, such as output. Cancel-safe.
    pub(super) async fn receive_event(&mut self) -> (ExecId, ExecEvent) {
        match self.events.1.recv().await {
            Some(event) => event,
            // This value has a sender, so the channel is open.
            None => std::future::pending().await,
        }
    }

    /// Returns the pids of the `launch exec` commands that have not been reaped.
    pub(super) fn unreaped_pids(&self) -> impl Iterator<Item = u32> {
        self.leaders.keys().copied()
    }

    /// Returns whether `pid` is the process of a command of `launch exec` that has not been reaped.
    pub(super) fn is_running_command(&self, pid: u32) -> bool {
        self.leaders.contains_key(&pid)
    }
}

/// Reads one output pipe (stdout or stderr) of a `launch exec` command, and sends the output to the
/// agent's event loop.
pub(super) struct ExecOutputReader {
    pub(super) id: ExecId,
    pub(super) stderr: bool,
    pub(super) window: Arc<Semaphore>,
    pub(super) has_ended: watch::Receiver<bool>,
    pub(super) events: mpsc::Sender<(ExecId, ExecEvent)>,
}

impl ExecOutputReader {
    /// Reads the pipe of a `launch exec` command to its end, and sends each piece of output to the
    /// agent's event loop. Also ends if the command has ended and prints nothing for
    /// [`FINAL_OUTPUT_TIMEOUT`], because processes that it left may hold the pipe.
    pub(super) async fn read_to_end(mut self, mut pipe: pipe::Receiver) {
        let mut chunk = vec![0; EXEC_CHUNK_BYTES as usize];
        while let Ok(permit) = self.window.clone().acquire_many_owned(EXEC_CHUNK_BYTES).await {
            let read = match self.read_chunk(&mut pipe, &mut chunk).await {
                Some(read @ 1..) => read,
                _ => break,
            };
            // The client returns as many permits as it has written bytes.
            permit.forget();
            self.window.add_permits(EXEC_CHUNK_BYTES as usize - read);
            let output = ExecEvent::Output { stderr: self.stderr, bytes: chunk[..read].to_vec() };
            if self.events.send((self.id, output)).await.is_err() {
                return;
            }
        }
        // An error means that the agent has ended.
        _ = self.events.send((self.id, ExecEvent::PipeEnded)).await;
    }

    /// Waits until the `launch exec` command writes output to the pipe, and reads the available
    /// bytes into `chunk`. Returns `None` at the end.
    async fn read_chunk(&mut self, pipe: &mut pipe::Receiver, chunk: &mut [u8]) -> Option<usize> {
        if !*self.has_ended.borrow() {
            tokio::select! {
                read = pipe.read(chunk) => return read.ok(),
                _ = self.has_ended.changed() => {}
            }
        }
        timeout(FINAL_OUTPUT_TIMEOUT, pipe.read(chunk)).await.ok()?.ok()
    }
}

/// Makes the output pipe of a `launch exec` command nonblocking, and wraps it in a reader of the
/// async runtime.
pub(super) fn into_async_pipe(pipe: OwnedFd) -> io::Result<pipe::Receiver> {
    let flags = OFlag::from_bits_retain(fcntl(pipe.as_fd(), FcntlArg::F_GETFL)?);
    fcntl(pipe.as_fd(), FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    pipe::Receiver::from_owned_fd(pipe)
}
