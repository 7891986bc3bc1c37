//! [`PendingAgent`]: the byte streams between the controller and an agent, which the controller can
//! use before the agent has connected over TCP.
use crate::connection::{EncryptedReader, EncryptedStream, EncryptedWriter};
use std::{
    future::Future,
    io,
    net::Shutdown,
    os::fd::{AsFd, OwnedFd},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::oneshot,
};

/// The half of an agent's TCP connection that reads from the agent.
pub(super) type AgentReader = EncryptedReader<OwnedReadHalf>;
/// The half of an agent's TCP connection that writes to the agent.
pub(super) type AgentWriter = EncryptedWriter<OwnedWriteHalf>;

/// The TCP connection of an agent that has proved that it has the job's key, split into its two
/// directions.
pub(super) struct AgentConnection {
    pub(super) reader: AgentReader,
    pub(super) writer: AgentWriter,
    /// A duplicate of the socket, to shut the connection down.
    socket: OwnedFd,
}

impl AgentConnection {
    /// Splits the encrypted connection of an agent into a half that reads and a half that writes.
    pub(super) fn new(stream: EncryptedStream<TcpStream>) -> io::Result<AgentConnection> {
        let socket = stream.transport().as_fd().try_clone_to_owned()?;
        let (reader, writer) = stream.into_halves(TcpStream::into_split);
        Ok(AgentConnection { reader, writer, socket })
    }
}

/// The byte streams between the controller and an agent that may not have connected yet, with the
/// object that attaches the agent's later TCP connection.
pub(super) struct PendingAgent {
    pub(super) input: PendingAgentWriter,
    pub(super) output: PendingAgentReader,
    pub(super) slot: AgentConnectionSlot,
}

impl PendingAgent {
    /// Creates byte streams to and from an agent that has not connected yet, and the slot that
    /// attaches the agent's later TCP connection to the streams.
    pub(super) fn new(name: &str) -> PendingAgent {
        let (send_read_half, read_half) = oneshot::channel();
        let (send_write_half, write_half) = oneshot::channel();
        let state = Mutex::new(AgentArrivalState::Waiting(send_read_half, send_write_half));
        let received = Arc::new(AtomicU64::new(0));
        let shared = Arc::new(SharedSlotState { state, received: received.clone() });
        PendingAgent {
            input: PendingAgentWriter(PendingStream::Pending(write_half)),
            output: PendingAgentReader { stream: PendingStream::Pending(read_half), received },
            slot: AgentConnectionSlot { name: name.to_owned(), shared },
        }
    }
}

/// Whether the agent for which the controller waits has connected, can still connect, or cannot
/// connect any more.
enum AgentArrivalState {
    /// The agent has not connected. Holds the channels that pass the two halves of the connection
    /// to the controller's streams.
    Waiting(oneshot::Sender<AgentReader>, oneshot::Sender<AgentWriter>),
    /// The agent has connected. Holds a duplicate of its socket, to shut the connection down.
    Connected(OwnedFd),
    /// The slot accepts no connection any more, or the connection was aborted.
    Closed,
}

/// Whether the agent has connected, and a counter of successful reads by which node 0 notices that
/// the agent is alive, shared by all clones of an [`AgentConnectionSlot`].
struct SharedSlotState {
    state: Mutex<AgentArrivalState>,
    /// The number of reads that returned bytes of the agent.
    received: Arc<AtomicU64>,
}

/// The object that attaches an agent's TCP connection, once the agent connects, to byte streams
/// that the controller already uses for the agent. [`AgentConnectionSlot::connect`] passes the
/// connection to the streams of the [`PendingAgent`]. Clones are the same slot.
#[derive(Clone)]
pub(super) struct AgentConnectionSlot {
    pub(super) name: String,
    shared: Arc<SharedSlotState>,
}

impl AgentConnectionSlot {
    /// Locks the mutex around the state of this slot, which records whether the agent has
    /// connected.
    fn lock_state(&self) -> MutexGuard<'_, AgentArrivalState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attaches the TCP connection that an agent has opened to the byte streams that the controller
    /// already uses for this agent. Returns `false` if the slot does not wait for the agent,
    /// because the agent has connected before or the slot is closed.
    pub(super) fn connect(&self, connection: AgentConnection) -> bool {
        let mut state = self.lock_state();
        if !matches!(*state, AgentArrivalState::Waiting(..)) {
            return false;
        }
        let connected = AgentArrivalState::Connected(connection.socket);
        if let AgentArrivalState::Waiting(to_output, to_input) = std::mem::replace(&mut *state, connected) {
            _ = to_output.send(connection.reader);
            _ = to_input.send(connection.writer);
        }
        true
    }

    /// Returns whether the controller still waits for the agent to connect.
    pub(super) fn is_waiting(&self) -> bool {
        matches!(*self.lock_state(), AgentArrivalState::Waiting(..))
    }

    /// Returns whether the agent has connected and its connection was not aborted since. The
    /// connection may have ended by itself.
    pub(super) fn is_connected(&self) -> bool {
        matches!(*self.lock_state(), AgentArrivalState::Connected(_))
    }

    /// Returns how many reads from the agent's connection have returned bytes so far, because a
    /// growing number proves to node 0 that the agent is alive.
    pub(super) fn count_reads(&self) -> u64 {
        self.shared.received.load(Ordering::Relaxed)
    }

    /// Stops waiting for the agent to connect, which ends the streams to and from the agent. Does
    /// nothing if the agent has connected.
    pub(super) fn stop_waiting(&self) {
        let mut state = self.lock_state();
        if matches!(*state, AgentArrivalState::Waiting(..)) {
            *state = AgentArrivalState::Closed;
        }
    }

    /// Stops waiting for the agent to connect or, if it has connected, closes its connection.
    pub(super) fn abort(&self) {
        let previous = std::mem::replace(&mut *self.lock_state(), AgentArrivalState::Closed);
        if let AgentArrivalState::Connected(socket) = previous {
            let stream = std::net::TcpStream::from(socket);
            // An error means that the connection has ended already.
            _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// One direction of an agent's TCP connection: not connected yet, connected, or closed because the
/// agent can no longer connect.
enum PendingStream<S> {
    Pending(oneshot::Receiver<S>),
    Connected(S),
    Closed,
}

impl<S: Unpin> PendingStream<S> {
    /// Waits until the agent has connected, and returns one direction of its connection, or `None`
    /// if the agent can no longer connect.
    fn poll_connected(&mut self, cx: &mut Context<'_>) -> Poll<Option<Pin<&mut S>>> {
        if let PendingStream::Pending(receiver) = self {
            *self = ready!(pin!(receiver).poll(cx)).map_or(PendingStream::Closed, PendingStream::Connected);
        }
        Poll::Ready(match self {
            PendingStream::Connected(stream) => Some(Pin::new(stream)),
            _ => None,
        })
    }
}

/// The stream on which the controller writes to an agent that may not have connected yet.
pub(super) struct PendingAgentWriter(PendingStream<AgentWriter>);

impl AsyncWrite for PendingAgentWriter {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match ready!(self.0.poll_connected(cx)) {
            Some(stream) => stream.poll_write(cx, bytes),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            PendingStream::Connected(stream) => Pin::new(stream).poll_flush(cx),
            _ => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            PendingStream::Connected(stream) => Pin::new(stream).poll_shutdown(cx),
            _ => Poll::Ready(Ok(())),
        }
    }
}

/// The stream on which the controller reads from an agent that may not have connected yet.
pub(super) struct PendingAgentReader {
    stream: PendingStream<AgentReader>,
    /// The number of reads that have returned bytes. The agent's slot reads this counter.
    received: Arc<AtomicU64>,
}

impl AsyncRead for PendingAgentReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled_before = buffer.filled().len();
        match ready!(self.stream.poll_connected(cx)) {
            Some(stream) => ready!(stream.poll_read(cx, buffer))?,
            None => return Poll::Ready(Ok(())),
        }
        if buffer.filled().len() > filled_before {
            self.received.fetch_add(1, Ordering::Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}
