//! [`PendingAgent`]: the controller's streams to and from an agent that may not have connected yet,
//! and the slot that the agent's TCP connection fills.
use super::{srun, step::SlurmStep};
use crate::{
    cluster::transport::RemoteConnection,
    connection::{EncryptedReader, EncryptedStream, EncryptedWriter},
};
use diagnostic::{Diagnostic, codes::slurm};
use protocol::control::ExitStatus;
use std::{
    fmt,
    future::Future,
    io,
    net::Shutdown,
    os::fd::{AsFd, OwnedFd},
    pin::{Pin, pin},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::oneshot,
    time::{Sleep, sleep},
};

/// How long the end of an agent's stream is withheld from the controller while srun is running. If
/// srun ends within this time, its exit status is known when the controller asks why the stream has
/// ended.
const STEP_EXIT_TIMEOUT: Duration = Duration::from_millis(250);

/// The half of an agent's TCP connection that reads from the agent.
type AgentReader = EncryptedReader<OwnedReadHalf>;
/// The half of an agent's TCP connection that writes to the agent.
type AgentWriter = EncryptedWriter<OwnedWriteHalf>;

/// The controller's byte streams to and from an agent that may not have connected yet, and the
/// handle of the agent's connection.
pub(super) struct PendingAgent {
    pub(super) input: PendingAgentInput,
    pub(super) output: PendingAgentOutput,
    pub(super) connection: SlurmConnection,
}

impl PendingAgent {
    /// Returns the name of the agent's node.
    pub(super) fn name(&self) -> &str {
        &self.connection.name
    }
}

/// Creates the streams to and from the agent of one node, and the slot that the agent's TCP
/// connection fills.
pub(super) fn create_pending_agent(name: &str, step: &Arc<SlurmStep>) -> (PendingAgent, AgentConnectionSlot) {
    let (send_read_half, read_half) = oneshot::channel();
    let (send_write_half, write_half) = oneshot::channel();
    let state = Arc::new(Mutex::new(AgentSlotState::Waiting(send_read_half, send_write_half)));
    let connection = SlurmConnection { name: name.to_owned(), state: state.clone(), step: step.clone() };
    let output =
        PendingAgentOutput { stream: PendingStream::Pending(read_half), step: step.clone(), end: None };
    let agent =
        PendingAgent { input: PendingAgentInput(PendingStream::Pending(write_half)), output, connection };
    (agent, AgentConnectionSlot { name: name.to_owned(), state })
}

/// The state of an [`AgentConnectionSlot`]: whether its agent has connected.
enum AgentSlotState {
    /// The agent has not connected. Holds the channels that pass the two halves of the connection
    /// to the controller's streams.
    Waiting(oneshot::Sender<AgentReader>, oneshot::Sender<AgentWriter>),
    /// The agent has connected. Holds a duplicate of its socket, to shut the connection down.
    Connected(OwnedFd),
    /// The slot accepts no connection any more, or the connection was aborted.
    Closed,
}

/// The slot of one agent's TCP connection. [`AgentConnectionSlot::fill`] passes the connection to
/// the streams of the [`PendingAgent`].
pub(super) struct AgentConnectionSlot {
    pub(super) name: String,
    state: Arc<Mutex<AgentSlotState>>,
}

impl AgentConnectionSlot {
    /// Passes the TCP connection of the agent to the streams of the [`PendingAgent`]. Returns
    /// `false` if the slot does not wait for the agent, because the agent has connected before or
    /// the slot is closed.
    pub(super) fn fill(&self, stream: EncryptedStream<TcpStream>) -> io::Result<bool> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*state, AgentSlotState::Waiting(..)) {
            return Ok(false);
        }
        let socket = stream.transport().as_fd().try_clone_to_owned()?;
        let (read_half, write_half) = stream.into_halves(TcpStream::into_split);
        let connected = AgentSlotState::Connected(socket);
        if let AgentSlotState::Waiting(to_output, to_input) = std::mem::replace(&mut *state, connected) {
            _ = to_output.send(read_half);
            _ = to_input.send(write_half);
        }
        Ok(true)
    }

    /// Returns whether the agent has not connected and is still awaited.
    pub(super) fn is_waiting(&self) -> bool {
        matches!(*self.state.lock().unwrap_or_else(PoisonError::into_inner), AgentSlotState::Waiting(..))
    }

    /// Stops waiting for the agent, which ends the agent's streams. Does nothing if the agent has
    /// connected.
    pub(super) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, AgentSlotState::Waiting(..)) {
            *state = AgentSlotState::Closed;
        }
    }
}

/// The connection to an agent in a Slurm step, before and after the agent has connected.
pub(super) struct SlurmConnection {
    name: String,
    state: Arc<Mutex<AgentSlotState>>,
    step: Arc<SlurmStep>,
}

impl fmt::Debug for SlurmConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlurmConnection").field("name", &self.name).finish_non_exhaustive()
    }
}

impl RemoteConnection for SlurmConnection {
    fn abort(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let AgentSlotState::Connected(socket) = std::mem::replace(&mut *state, AgentSlotState::Closed) {
            let stream = std::net::TcpStream::from(socket);
            // An error means that the connection has ended already.
            _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn failure(&self) -> Option<Diagnostic> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let was_connected = matches!(*state, AgentSlotState::Connected(_));
        let name = &self.name;
        let (default_code, message) = match self.step.exit_status() {
            Some(ExitStatus::Code(0)) | None if was_connected => return None,
            Some(ExitStatus::Code(code)) => (
                slurm::SLURM_STEP_FAILED,
                format!("srun, which runs the agent of host {name}, ended with exit code {code}"),
            ),
            Some(ExitStatus::Signal(number, _)) => (
                slurm::SLURM_STEP_FAILED,
                format!("srun, which runs the agent of host {name}, was killed by signal {number}"),
            ),
            None => (
                slurm::SLURM_AGENT_FAILED,
                format!("the agent of host {name} ended before it connected to the controller"),
            ),
        };
        let output = self.step.join_output_tail();
        let known_code = srun::classify_output(&output);
        let message = if output.is_empty() { message } else { format!("{message}: {output}") };
        let diagnostic = Diagnostic::error(known_code.unwrap_or(default_code), message)
            .with_subject(name)
            .with_field("output", output);
        Some(if known_code.is_some() { diagnostic.with_remedy() } else { diagnostic })
    }

    fn exit_status(&self) -> Option<ExitStatus> {
        // srun reports one status for all tasks, which may be the status of another agent.
        None
    }
}

/// One direction of a TCP connection that may not exist yet.
enum PendingStream<S> {
    Pending(oneshot::Receiver<S>),
    Connected(S),
    Closed,
}

impl<S: Unpin> PendingStream<S> {
    /// Returns the stream once it is connected, or `None` if the slot was closed before a
    /// connection.
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

/// The stream of bytes to an agent that may not have connected yet.
pub(super) struct PendingAgentInput(PendingStream<AgentWriter>);

impl AsyncWrite for PendingAgentInput {
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

/// The stream of bytes from an agent that may not have connected yet.
///
/// The end of the stream is reported when srun has ended, or after [`STEP_EXIT_TIMEOUT`] if srun is
/// still running.
pub(super) struct PendingAgentOutput {
    stream: PendingStream<AgentReader>,
    step: Arc<SlurmStep>,
    end: Option<DelayedStreamEnd>,
}

/// The end of an agent's stream, which is held back until srun has ended or the deadline has
/// passed.
struct DelayedStreamEnd {
    result: io::Result<()>,
    deadline: Pin<Box<Sleep>>,
    step_exit: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl AsyncRead for PendingAgentOutput {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.end.is_none() {
            let filled_before = buffer.filled().len();
            let result = match ready!(self.stream.poll_connected(cx)) {
                Some(stream) => ready!(stream.poll_read(cx, buffer)),
                None => Ok(()),
            };
            if result.is_ok() && (buffer.filled().len() > filled_before || buffer.remaining() == 0) {
                return Poll::Ready(Ok(()));
            }
            let mut exit = self.step.watch_exit();
            let step_exit = Box::pin(async move { _ = exit.wait_for(Option::is_some).await });
            let deadline = Box::pin(sleep(STEP_EXIT_TIMEOUT));
            self.end = Some(DelayedStreamEnd { result, deadline, step_exit });
        }
        if let Some(end) = &mut self.end
            && end.deadline.as_mut().poll(cx).is_pending()
            && end.step_exit.as_mut().poll(cx).is_pending()
        {
            return Poll::Pending;
        }
        Poll::Ready(self.end.take().map_or(Ok(()), |end| end.result))
    }
}
