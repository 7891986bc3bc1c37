//! [`NodeRelay`]: passes the messages of the control connection between node 0 and the agent of
//! this node.
use super::{node_0_connection::JoinedNode, node_signals::NodeSignals};
use crate::{
    cluster::{
        local::start_local_agent,
        transport::{AgentHandle, AgentOutput},
    },
    connection::{FrameError, read_frames, write_frames},
    processes::reap_children,
    report::command_output::write_message,
    worker_end::describe_process_end,
};
use diagnostic::Diagnostic;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use protocol::control::{ExitStatus, FromAgent, ToAgent};
use std::{io, time::Duration};
use tokio::{
    io::AsyncReadExt as _,
    sync::mpsc::{self, error::TrySendError},
    time::{Instant, sleep_until},
};

/// The number of messages between node 0 and the agent of this node that may wait in each
/// direction. A full queue stops the reader.
const QUEUE_CAPACITY: usize = 256;
/// How long the agent of this node may take to end after its control connection was closed, before
/// it is killed.
const AGENT_EXIT_TIMEOUT: Duration = Duration::from_secs(20);
/// How long this process waits, before it ends, until its last messages have reached node 0.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of bytes of the agent's stderr that are read at once.
const STDERR_CHUNK_BYTES: usize = 4 << 10;

/// Why this node no longer takes part in a run: the run or the agent has ended, or the connection
/// to node 0 was lost, for example.
#[derive(Debug)]
pub(super) enum NodeEndReason {
    /// The run has ended with this exit code.
    RunEnded(u8),
    /// The run continues without this node.
    Released,
    /// A second signal ended the node, which exits with this code.
    Signalled(u8),
    /// The connection to node 0 ended, or node 0 was silent.
    ControllerLost,
    /// The agent reported an error.
    AgentFailed(Diagnostic),
    /// The process of the agent ended by itself. The text describes how, such as "exited with code
    /// 1".
    AgentEnded(String),
}

/// The result of a read from node 0 or from the agent of this node: a message, `Ok(None)` at the
/// end of the stream, or an error.
type IncomingMessage<T> = ((), Result<Option<T>, FrameError>);

/// A message between node 0 and this node's agent, with a reserved place for the message in the
/// queue of its receiver. The message is `None` at the end of the stream, and the place is `None`
/// if the queue is closed.
type MessageWithQueuePlace<T> = (Option<T>, Option<mpsc::OwnedPermit<T>>);

/// Passes the messages of the control connection between node 0 and the agent of this node, which
/// is a child process, and watches that process.
pub(super) struct NodeRelay {
    agent: u32,
    /// The queue of messages to the agent; `None` after its control stream was closed.
    to_agent: Option<mpsc::Sender<ToAgent>>,
    /// The queue of messages to node 0; `None` after the connection was closed.
    to_controller: Option<mpsc::Sender<FromAgent>>,
    from_controller: mpsc::Receiver<IncomingMessage<ToAgent>>,
    from_agent: mpsc::Receiver<IncomingMessage<FromAgent>>,
    /// The task that writes messages to node 0. It ends when the last message was written.
    writer: tokio::task::JoinHandle<()>,
    /// The result that node 0 sent when it no longer needed this node; `None` before.
    end: Option<NodeEndReason>,
    is_controller_gone: bool,
    failure: Option<Diagnostic>,
    /// Whether a signal was received whose request to node 0 did not fit into the queue.
    is_stop_unsent: bool,
    /// The exit code for the most recent signal that this process received; `None` before a signal.
    signalled: Option<u8>,
    is_killed: bool,
    agent_status: Option<ExitStatus>,
    /// The time at which the agent is killed if it has not ended; `None` if no kill is scheduled.
    kill_at: Option<Instant>,
}

impl NodeRelay {
    /// Starts the agent of this node as a child process, and the tasks that read and write the
    /// messages of node 0 and of the agent.
    pub(super) fn start(joined: JoinedNode) -> io::Result<NodeRelay> {
        let process = start_local_agent()?;
        let AgentHandle::Child(agent) = process.handle else {
            return Err(io::Error::other("the agent is not a child process"));
        };
        let (to_agent, agent_queue) = mpsc::channel(QUEUE_CAPACITY);
        let (to_controller, controller_queue) = mpsc::channel(QUEUE_CAPACITY);
        let (controller_inbox, from_controller) = mpsc::channel(QUEUE_CAPACITY);
        let (agent_inbox, from_agent) = mpsc::channel(QUEUE_CAPACITY);
        tokio::spawn(write_frames(process.input, agent_queue));
        tokio::spawn(read_frames((), process.output, agent_inbox));
        tokio::spawn(read_frames((), joined.reader, controller_inbox));
        tokio::spawn(show_stderr(process.stderr));
        let writer = tokio::spawn(write_frames(joined.writer, controller_queue));
        Ok(NodeRelay {
            agent,
            to_agent: Some(to_agent),
            to_controller: Some(to_controller),
            from_controller,
            from_agent,
            writer,
            end: None,
            is_controller_gone: false,
            failure: None,
            is_stop_unsent: false,
            signalled: None,
            is_killed: false,
            agent_status: None,
            kill_at: None,
        })
    }

    /// Passes messages between node 0 and the agent of this node until the agent has ended.
    pub(super) async fn relay_until_agent_end(mut self, signals: &mut NodeSignals) -> NodeEndReason {
        while self.agent_status.is_none() || self.to_controller.is_some() {
            let kill_at = self.kill_at;
            let kill_time = async {
                match kill_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                next = receive_with_reserved_place(&mut self.from_controller, self.to_agent.as_ref()),
                    if !self.is_controller_gone => self.pass_to_agent(next),
                next = receive_with_reserved_place(&mut self.from_agent, self.to_controller.as_ref()),
                    if self.to_controller.is_some() => self.pass_to_controller(next),
                signal = signals.receive_end_or_child_signal() => match signal {
                    Some(code) => self.stop_on_signal(code),
                    None => self.reap_agent(),
                },
                () = kill_time => self.kill_agent(),
            }
        }
        // The last messages explain the end of the node to node 0.
        _ = tokio::time::timeout(FLUSH_TIMEOUT, &mut self.writer).await;
        self.determine_node_end()
    }

    /// Returns why this node no longer takes part in the run, such as a signal, a failed agent or a
    /// lost controller, once the node's agent has ended.
    fn determine_node_end(self) -> NodeEndReason {
        let how = |status| format!("was {}", describe_process_end(status, false));
        match (self.end, self.signalled.filter(|_| self.is_killed), self.failure) {
            (Some(end), ..) => end,
            (None, Some(code), _) => NodeEndReason::Signalled(code),
            (None, None, Some(failure)) => NodeEndReason::AgentFailed(failure),
            (None, None, None) if self.is_controller_gone => NodeEndReason::ControllerLost,
            (None, None, None) => match self.agent_status {
                Some(ExitStatus::Code(code)) => NodeEndReason::AgentEnded(format!("exited with code {code}")),
                Some(status) => NodeEndReason::AgentEnded(how(status)),
                None => NodeEndReason::AgentEnded("ended".to_owned()),
            },
        }
    }

    /// Passes a message of node 0 to the agent, or closes the agent's control stream if the
    /// connection to node 0 has ended.
    fn pass_to_agent(&mut self, (message, place): MessageWithQueuePlace<ToAgent>) {
        let Some(message) = message else {
            self.is_controller_gone = true;
            return self.close_agent_stream();
        };
        if let (ToAgent::End { exit_code }, true) = (&message, self.to_agent.is_some()) {
            self.end = Some(exit_code.map_or(NodeEndReason::Released, NodeEndReason::RunEnded));
        }
        // Without a place, the agent has ended.
        place.map(|place| place.send(message));
    }

    /// Passes a message of the agent to node 0, or closes the connection to node 0 if the agent's
    /// stream has ended.
    fn pass_to_controller(&mut self, (message, place): MessageWithQueuePlace<FromAgent>) {
        let Some(message) = message else {
            self.to_controller = None;
            return self.close_agent_stream();
        };
        self.failure = self.failure.take().or_else(|| find_agent_failure(&message));
        // Without a place, the connection has ended.
        place.map(|place| place.send(message));
        if self.is_stop_unsent {
            self.request_save_and_stop_of_run();
        }
    }

    /// Asks node 0 to make all workers of the run save a checkpoint and stop. If no message fits
    /// into the queue, the request follows the next message of the agent.
    fn request_save_and_stop_of_run(&mut self) {
        self.is_stop_unsent = self.to_controller.as_ref().is_some_and(|queue| {
            matches!(queue.try_send(FromAgent::Terminating), Err(TrySendError::Full(_)))
        });
    }

    /// Handles a signal that ends launch on this node, by asking node 0 to make all workers of the
    /// run save a checkpoint and stop. A second signal ends the workers of this node.
    fn stop_on_signal(&mut self, code: u8) {
        if self.signalled.replace(code).is_some() {
            write_message("launch: a second signal ends the workers of this node\n");
            self.is_killed = true;
            return self.close_agent_stream();
        }
        write_message(
            "launch: asked node 0 to save and stop the run; a second signal ends the workers of this node\n",
        );
        self.request_save_and_stop_of_run();
    }

    /// Closes the control connection to the agent of this node, after which the agent ends its
    /// workers and exits. Schedules a kill of the agent.
    fn close_agent_stream(&mut self) {
        self.to_agent = None;
        self.kill_at.get_or_insert(Instant::now() + AGENT_EXIT_TIMEOUT);
    }

    /// Reaps ended child processes, and records how the agent of this node ended.
    fn reap_agent(&mut self) {
        let agent = self.agent;
        reap_children(
            |_| false,
            |pid, status| {
                if pid == agent {
                    self.agent_status = Some(status);
                }
            },
        );
    }

    /// Kills the agent of this node, because it has not ended within [`AGENT_EXIT_TIMEOUT`].
    fn kill_agent(&mut self) {
        self.kill_at = None;
        if self.agent_status.is_none() {
            // The child was not reaped, so no other process can have its pid.
            _ = kill(Pid::from_raw(self.agent as i32), Signal::SIGKILL);
        }
        // A process that holds the agent's stdout open must not delay the end.
        self.to_controller = None;
    }
}

/// Waits for free space in `queue` and then for the next message from `from`, so that the caller
/// can queue the message without waiting. Cancel-safe. Returns no place if the queue is closed, and
/// no message at the end of the stream.
async fn receive_with_reserved_place<T>(
    from: &mut mpsc::Receiver<IncomingMessage<T>>,
    queue: Option<&mpsc::Sender<T>>,
) -> MessageWithQueuePlace<T> {
    let place = match queue {
        Some(queue) => queue.clone().reserve_owned().await.ok(),
        None => None,
    };
    let message = from.recv().await.and_then(|(_, message)| message.ok().flatten());
    (message, place)
}

/// Returns the error in a message with which an agent reports that it cannot continue.
fn find_agent_failure(message: &FromAgent) -> Option<Diagnostic> {
    match message {
        FromAgent::Report { message, .. } => find_agent_failure(message),
        FromAgent::Failed { rank: None, diagnostic, .. } => Some(diagnostic.clone()),
        _ => None,
    }
}

/// Copies the standard error of this node's agent to the stderr of this process, where the user of
/// the node sees it.
async fn show_stderr(mut stream: AgentOutput) {
    let mut buffer = [0; STDERR_CHUNK_BYTES];
    while let Ok(n @ 1..) = stream.read(&mut buffer).await {
        write_message(&String::from_utf8_lossy(&buffer[..n]));
    }
}
