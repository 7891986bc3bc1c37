//! Accepts the connections of `launch exec`, which runs a command on a host of a running job, at a
//! Unix socket of the controller.
use super::core::HostIndex;
use crate::{
    connection::{FrameError, Outbox, read_frames, write_frames},
    runs::{bind_controller_socket, is_peer_own_or_root},
};
use protocol::control::{ExecId, ExecReply, ExecRequest};
use std::{
    hash::{BuildHasher, RandomState},
    io,
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::UnixListener,
    sync::{Semaphore, mpsc},
    task::JoinHandle,
    time::sleep,
};

/// The largest number of open connections of `launch exec` processes to the controller. Further
/// clients wait.
const MAX_CONNECTIONS: usize = 64;
/// How long the controller waits after it could not accept a connection of `launch exec`, for
/// example because this process has too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The largest number of messages of `launch exec` processes that wait for the controller's event
/// loop.
const INBOX_CAPACITY: usize = 64;

/// A connected `launch exec` process, with the queue of messages to it and the state of its
/// command.
pub(super) struct ExecClient {
    pub(super) outbox: Outbox<ExecReply>,
    pub(super) command: ExecClientCommand,
}

/// The state of the command of a `launch exec` process.
pub(super) enum ExecClientCommand {
    /// The command was not requested yet.
    Unknown,
    /// The request waits until the worker has started.
    Waiting(ExecRequest),
    /// The request was sent to the agent of this host.
    Requested(HostIndex),
}

impl ExecClient {
    /// Returns the host to whose agent the command was sent.
    pub(super) fn host(&self) -> Option<HostIndex> {
        match self.command {
            ExecClientCommand::Requested(host) => Some(host),
            ExecClientCommand::Unknown | ExecClientCommand::Waiting(_) => None,
        }
    }
}

/// An event from a `launch exec` process at the controller: its new connection, a request, or the
/// end of the connection.
pub(super) enum ExecClientEvent {
    /// A client has connected. Replies to it are queued in the outbox.
    Connected(ExecId, Outbox<ExecReply>),
    /// A request of a client, or the end of its connection.
    Request(ExecId, Result<Option<ExecRequest>, FrameError>),
}

/// A request of a `launch exec` process or the end of its connection, together with the number that
/// identifies the connection.
type ExecClientMessage = (ExecId, Result<Option<ExecRequest>, FrameError>);

/// The Unix socket of the controller to which `launch exec` connects when it requests that a
/// command be run on a host of the job.
pub(super) struct ExecSocket {
    messages: mpsc::Receiver<ExecClientMessage>,
    connections: mpsc::Receiver<(ExecId, Outbox<ExecReply>)>,
    /// The task that accepts connections.
    accepting: JoinHandle<()>,
}

impl ExecSocket {
    /// Creates the Unix socket of the run with the ID `run`, and starts to accept connections of
    /// `launch exec` processes at this socket. Needs a runtime of tokio.
    pub(super) fn open(run: &str) -> io::Result<ExecSocket> {
        let listener = bind_controller_socket(run)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let (message_sender, messages) = mpsc::channel(INBOX_CAPACITY);
        // A connection is announced before its first message is read.
        let (connection_sender, connections) = mpsc::channel(1);
        let accepting = tokio::spawn(accept_clients(listener, connection_sender, message_sender));
        Ok(ExecSocket { messages, connections, accepting })
    }

    /// Waits until a `launch exec` process connects, sends a request or disconnects, and returns
    /// this event. Cancel-safe.
    pub(super) async fn receive_event(&mut self) -> ExecClientEvent {
        tokio::select! {
            biased;
            Some((id, outbox)) = self.connections.recv() => ExecClientEvent::Connected(id, outbox),
            Some((id, request)) = self.messages.recv() => ExecClientEvent::Request(id, request),
            else => std::future::pending().await,
        }
    }
}

impl Drop for ExecSocket {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Accepts connections of `launch exec` processes of this user or of root, and starts two tasks for
/// each connection: one that reads and one that writes.
async fn accept_clients(
    listener: UnixListener,
    connections: mpsc::Sender<(ExecId, Outbox<ExecReply>)>,
    messages: mpsc::Sender<ExecClientMessage>,
) {
    // An agent may still run commands of an earlier controller, with the numbers of its clients.
    let mut id: ExecId = RandomState::new().hash_one("first client");
    let limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(permit) = limit.clone().acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        if !is_peer_own_or_root(&stream) {
            continue;
        }
        id = id.wrapping_add(1);
        let (reader, writer) = stream.into_split();
        let (outbox, outgoing) = Outbox::channel();
        if connections.send((id, outbox)).await.is_err() {
            return;
        }
        tokio::spawn(write_frames(writer, outgoing));
        let messages = messages.clone();
        tokio::spawn(async move {
            read_frames(id, reader, messages).await;
            drop(permit);
        });
    }
}
