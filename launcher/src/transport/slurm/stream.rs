//! The streams of an agent that hasn't connected yet, and the connection they become.
use super::{srun, step::Step};
use crate::transport::{Connection, Refusal};
use contract::control::ExitStatus;
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

/// When a connection ends: how long srun's own end is waited for, which would explain it.
const EXPLANATION: Duration = Duration::from_millis(250);

/// The controller's side of a place for one host.
pub(super) struct Seat {
    pub(super) input: Input,
    pub(super) output: Output,
    pub(super) connection: Joined,
}

impl Seat {
    pub(super) fn name(&self) -> &str {
        &self.connection.name
    }
}

/// A place for the agent of one host, and who may take it.
pub(super) fn seat(name: &str, step: &Arc<Step>) -> (Seat, Taker) {
    let (to_output, read) = oneshot::channel();
    let (to_input, write) = oneshot::channel();
    let state = Arc::new(Mutex::new(State::Free(to_output, to_input)));
    let connection = Joined { name: name.to_owned(), state: state.clone(), step: step.clone() };
    let output = Output { stream: Later::Coming(read), step: step.clone(), end: None };
    let seat = Seat { input: Input(Later::Coming(write)), output, connection };
    (seat, Taker { name: name.to_owned(), state })
}

enum State {
    Free(oneshot::Sender<OwnedReadHalf>, oneshot::Sender<OwnedWriteHalf>),
    /// A second descriptor of its socket.
    Taken(OwnedFd),
    Closed,
}

/// Where an agent is let in.
pub(super) struct Taker {
    pub(super) name: String,
    state: Arc<Mutex<State>>,
}

impl Taker {
    /// The agent is here; `false`: another one was, or nobody waits for it any more.
    pub(super) fn take(&self, stream: TcpStream) -> io::Result<bool> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*state, State::Free(..)) {
            return Ok(false);
        }
        let second = stream.as_fd().try_clone_to_owned()?;
        let (read, write) = stream.into_split();
        if let State::Free(to_output, to_input) = std::mem::replace(&mut *state, State::Taken(second)) {
            _ = to_output.send(read);
            _ = to_input.send(write);
        }
        Ok(true)
    }

    /// Is it still waited for?
    pub(super) fn free(&self) -> bool {
        matches!(*self.state.lock().unwrap_or_else(PoisonError::into_inner), State::Free(..))
    }

    /// It won't come any more: its streams end.
    pub(super) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Free(..)) {
            *state = State::Closed;
        }
    }
}

/// The connection to an agent, before and after it came.
pub(super) struct Joined {
    name: String,
    state: Arc<Mutex<State>>,
    step: Arc<Step>,
}

impl fmt::Debug for Joined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joined").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Connection for Joined {
    fn break_off(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Taken(socket) = std::mem::replace(&mut *state, State::Closed) {
            let stream = std::net::TcpStream::from(socket);
            // An error: it is broken already.
            _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn why(&self) -> Option<Refusal> {
        let words = self.step.last_words();
        let said = if words.is_empty() { String::new() } else { format!(": {words}") };
        let came = matches!(*self.state.lock().unwrap_or_else(PoisonError::into_inner), State::Taken(_));
        let what = if came { "which held its agent," } else { "which was to start its agent," };
        let message = match self.step.status() {
            Some(ExitStatus::Code(0)) | None if came => return None,
            Some(ExitStatus::Code(code)) => format!("srun, {what} ended with exit code {code}{said}"),
            Some(ExitStatus::Signal(number, _)) => format!("srun, {what} was ended by signal {number}{said}"),
            None => format!("its agent ended before it had connected{said}"),
        };
        Some(Refusal { message, hint: srun::advice(&words).map(str::to_owned) })
    }

    fn status(&self) -> Option<ExitStatus> {
        // srun tells one status for all of its tasks: it isn't this agent's.
        None
    }
}

/// A stream that is still to come.
enum Later<S> {
    Coming(oneshot::Receiver<S>),
    Here(S),
    Never,
}

impl<S: Unpin> Later<S> {
    /// The stream, once it is here; `None`: it won't come.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Pin<&mut S>>> {
        if let Later::Coming(receiver) = self {
            *self = ready!(pin!(receiver).poll(cx)).map_or(Later::Never, Later::Here);
        }
        Poll::Ready(match self {
            Later::Here(stream) => Some(Pin::new(stream)),
            _ => None,
        })
    }
}

/// Bytes to an agent that may not be here yet.
pub(super) struct Input(Later<OwnedWriteHalf>);

impl AsyncWrite for Input {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match ready!(self.0.poll(cx)) {
            Some(stream) => stream.poll_write(cx, bytes),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            Later::Here(stream) => Pin::new(stream).poll_flush(cx),
            _ => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.0 {
            Later::Here(stream) => Pin::new(stream).poll_shutdown(cx),
            _ => Poll::Ready(Ok(())),
        }
    }
}

/// Bytes from an agent that may not be here yet. Its end waits a moment for srun's, which would explain it.
pub(super) struct Output {
    stream: Later<OwnedReadHalf>,
    step: Arc<Step>,
    end: Option<End>,
}

/// How the stream ended, the moment until which srun's end is waited for, and srun's end.
type End = (io::Result<()>, Pin<Box<Sleep>>, Pin<Box<dyn Future<Output = ()> + Send>>);

impl AsyncRead for Output {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.end.is_none() {
            let before = buffer.filled().len();
            let read = match ready!(self.stream.poll(cx)) {
                Some(stream) => ready!(stream.poll_read(cx, buffer)),
                None => Ok(()),
            };
            if read.is_ok() && (buffer.filled().len() > before || buffer.remaining() == 0) {
                return Poll::Ready(Ok(()));
            }
            let mut fate = self.step.fate();
            let gone = Box::pin(async move { _ = fate.wait_for(Option::is_some).await });
            self.end = Some((read, Box::pin(sleep(EXPLANATION)), gone));
        }
        if let Some((_, moment, gone)) = &mut self.end
            && moment.as_mut().poll(cx).is_pending()
            && gone.as_mut().poll(cx).is_pending()
        {
            return Poll::Pending;
        }
        Poll::Ready(self.end.take().map_or(Ok(()), |(read, ..)| read))
    }
}
