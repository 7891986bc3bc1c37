//! [`Session`]: the control connection of a worker to its agent.
//!
//! One thread reads requests (stop, save, reload, abort), one sends a heartbeat each second. Events
//! are sent by the thread in which they happen.
use crate::error::{Error, Result, thread_start_error};
use contract::{
    control::{FromWorker, Peers, ToWorker, VERSION, WorkerInit},
    env,
    event::{Event, Phase},
    exit::WorkerExit,
    frame,
    job::ReloadValues,
};
use diagnostic::{Diagnostic, codes};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    io::{Read, Write},
    net::SocketAddr,
    os::{
        fd::{AsFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait for a message that the agent must send.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait until all ranks of the job accept connections; they start at about the same time.
const PEERS_TIMEOUT: Duration = Duration::from_secs(120);
/// The reason of an abort when the agent ended.
const AGENT_ENDED: &str = "the agent closed the control connection";

/// The agent's requests to stop, save or reload, which take effect at the next step boundary.
#[derive(Default)]
pub struct AgentRequests {
    stop: AtomicBool,
    save: AtomicBool,
    reload_values: Mutex<Option<ReloadValues>>,
}

impl AgentRequests {
    /// Whether the agent requested to save and stop.
    pub fn stop_requested(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Whether the agent requested a checkpoint since the last call.
    pub fn take_save_request(&self) -> bool {
        self.save.swap(false, Relaxed)
    }

    /// Whether values of a changed job file are waiting to be taken.
    pub fn has_reload(&self) -> bool {
        self.reload_values.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Takes the newest values of a changed job file.
    pub fn take_reload(&self) -> Option<ReloadValues> {
        self.reload_values.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set_reload(&self, values: ReloadValues) {
        *self.reload_values.lock().unwrap_or_else(PoisonError::into_inner) = Some(values);
    }
}

/// The worker's end of the control connection to its agent.
pub struct Session {
    write: Mutex<UnixStream>,
    /// Requests that the agent sent.
    pub requests: AgentRequests,
    phase: Mutex<Phase>,
    step: AtomicU64,
    aborts: Mutex<AbortHandlers>,
}

/// A function that an abort calls with its reason, to end blocked operations.
type AbortHandler = Box<dyn Fn(&str) + Send>;

/// The handlers of [`Session::on_abort`], and the reason of the abort if it has happened.
#[derive(Default)]
struct AbortHandlers {
    handlers: Vec<AbortHandler>,
    /// Why the group was aborted; `None` before an abort.
    reason: Option<String>,
}

/// The open descriptor whose number is in the environment variable `name`; `None` if it is not set.
///
/// # Errors
/// The value is not the number of an open, inherited descriptor.
pub fn inherited_descriptor(name: &str) -> Result<Option<OwnedFd>> {
    let Some(value) = std::env::var_os(name) else { return Ok(None) };
    let invalid = |cause: Option<std::io::Error>| {
        let message = format!("{name}={value:?} is not an open, inherited descriptor");
        let diagnostic = Diagnostic::error(codes::training::INHERITED_DESCRIPTOR_INVALID, message);
        let diagnostic = diagnostic.with_subject(name);
        cause.map_or(diagnostic.clone(), |e| diagnostic.with_cause(&e))
    };
    let fd: Option<RawFd> = value.to_str().and_then(|v| v.parse().ok()).filter(|fd| *fd > 2);
    let fd = fd.ok_or_else(|| invalid(None))?;
    // SAFETY: fcntl only sets a flag of the descriptor and fails if it is not open.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(invalid(Some(std::io::Error::last_os_error())).into());
    }
    // SAFETY: the agent opened this descriptor for this process only; each variable is read once.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}

impl Session {
    /// Opens the control connection and waits for the agent's first message. Returns the session,
    /// the stream that [`Session::start_threads`] will read, and the worker's instructions.
    pub fn connect() -> Result<(Arc<Session>, UnixStream, WorkerInit)> {
        let fd = inherited_descriptor(env::LAUNCH_CONTROL_FD)?.ok_or_else(|| {
            let message = "`launch worker` was started without an agent";
            Diagnostic::error(codes::training::WORKER_STARTED_DIRECTLY, message)
                .with_help("run `launch job.yaml`, whose agents start the workers")
        })?;
        let mut read = UnixStream::from(fd);
        let write = read.try_clone().map_err(connection_lost_error)?;
        let session = Session {
            write: Mutex::new(write),
            requests: AgentRequests::default(),
            phase: Mutex::new(Phase::Starting),
            step: AtomicU64::new(0),
            aborts: Mutex::default(),
        };
        session.send(&FromWorker::Hello { version: VERSION, pid: std::process::id() })?;
        read.set_read_timeout(Some(MESSAGE_TIMEOUT)).map_err(connection_lost_error)?;
        let init = match receive_message(&mut read)? {
            Some(ToWorker::Init(init)) if init.version == VERSION => *init,
            Some(ToWorker::Init(init)) => {
                let message = format!(
                    "the agent uses version {} of the control protocol, this worker version {VERSION}",
                    init.version
                );
                return Err(Diagnostic::error(codes::run::AGENT_VERSION_MISMATCH, message)
                    .with_field("agent_version", init.version)
                    .with_field("worker_version", VERSION)
                    .with_help("install the same version of launch on every host")
                    .into());
            }
            other => {
                let message = format!("the agent's first message has no instructions: {other:?}");
                return Err(Error::new(codes::training::AGENT_MESSAGE_INVALID, message));
            }
        };
        read.set_read_timeout(None).map_err(connection_lost_error)?;
        Ok((Arc::new(session), read, init))
    }

    /// Starts the threads that read requests and send heartbeats. `abort` ends every collective; it
    /// is called when the agent requests an abort or ends.
    pub fn start_threads(
        self: &Arc<Self>,
        mut read: UnixStream,
        abort: impl Fn(&str) + Send + 'static,
    ) -> Result<()> {
        let session = self.clone();
        let reader = std::thread::Builder::new().name("session".into()).spawn(move || {
            loop {
                match receive_message(&mut read) {
                    Ok(Some(ToWorker::Stop)) => session.requests.stop.store(true, Relaxed),
                    Ok(Some(ToWorker::Save)) => session.requests.save.store(true, Relaxed),
                    Ok(Some(ToWorker::Reload(values))) => session.requests.set_reload(values),
                    Ok(Some(ToWorker::Abort { reason })) => {
                        abort(&reason);
                        session.call_abort_handlers(&reason);
                    }
                    Ok(Some(ToWorker::Init(_) | ToWorker::Peers(_))) => {}
                    Ok(None) | Err(_) => {
                        abort(AGENT_ENDED);
                        session.call_abort_handlers(AGENT_ENDED);
                        std::process::exit(WorkerExit::Aborted.code().into());
                    }
                }
            }
        });
        reader.map_err(|e| thread_start_error("session", &e))?;
        let session = self.clone();
        let heartbeat = std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            // Ends with the process. A failed send means that the agent ended, which the reader
            // notices.
            while session.send_progress().is_ok() {
                std::thread::sleep(HEARTBEAT_INTERVAL);
            }
        });
        heartbeat.map_err(|e| thread_start_error("heartbeat", &e))?;
        Ok(())
    }

    /// Adds a handler of aborts. Calls it immediately after an abort.
    pub fn on_abort(&self, abort: impl Fn(&str) + Send + 'static) {
        let mut aborts = self.aborts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = &aborts.reason {
            abort(reason);
        }
        aborts.handlers.push(Box::new(abort));
    }

    fn call_abort_handlers(&self, reason: &str) {
        let mut aborts = self.aborts.lock().unwrap_or_else(PoisonError::into_inner);
        aborts.handlers.iter().for_each(|abort| abort(reason));
        aborts.reason.get_or_insert_with(|| reason.to_owned());
    }

    /// Reports the addresses on which this rank accepts connections, and waits for those of all
    /// ranks. Called before [`Session::start_threads`], so it sends the heartbeats itself.
    pub fn exchange_addresses(
        &self,
        read: &mut UnixStream,
        addresses: Vec<SocketAddr>,
        attempt: u32,
    ) -> Result<Peers> {
        self.send_progress()?;
        self.send(&FromWorker::Listening { addresses })?;
        let deadline = Instant::now() + PEERS_TIMEOUT;
        loop {
            read.set_read_timeout(Some(HEARTBEAT_INTERVAL)).map_err(connection_lost_error)?;
            if !poll_readable(read)? {
                if Instant::now() >= deadline {
                    return Err(peers_not_listening_error());
                }
                self.send_progress()?;
                continue;
            }
            read.set_read_timeout(Some(MESSAGE_TIMEOUT)).map_err(connection_lost_error)?;
            match receive_message(read)? {
                Some(ToWorker::Peers(peers)) if peers.attempt == attempt => {
                    read.set_read_timeout(None).map_err(connection_lost_error)?;
                    return Ok(peers);
                }
                Some(ToWorker::Peers(_) | ToWorker::Init(_)) => {}
                Some(ToWorker::Stop) => self.requests.stop.store(true, Relaxed),
                Some(ToWorker::Save) => self.requests.save.store(true, Relaxed),
                Some(ToWorker::Reload(values)) => self.requests.set_reload(values),
                Some(ToWorker::Abort { reason }) => {
                    return Err(Error::aborted(Diagnostic::error(
                        codes::collective::COLLECTIVE_ABORTED,
                        reason,
                    )));
                }
                None => {
                    let code = codes::training::AGENT_CONNECTION_LOST;
                    return Err(Error::aborted(Diagnostic::error(code, AGENT_ENDED)));
                }
            }
        }
    }

    /// Sets the phase of this rank and reports it.
    pub fn set_phase(&self, phase: Phase) -> Result<()> {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
        self.send_progress()
    }

    /// Sets the number of optimizer steps done, which the next heartbeat reports.
    pub fn set_step(&self, step: u64) {
        self.step.store(step, Relaxed);
    }

    /// Sends the phase and the step of this rank, which also serves as heartbeat.
    fn send_progress(&self) -> Result<()> {
        let phase = *self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        self.send(&FromWorker::Progress { phase, step: self.step.load(Relaxed) })
    }

    /// Reports an event to the controller.
    pub fn send_event(&self, event: Event) -> Result<()> {
        self.send(&FromWorker::Event(event))
    }

    /// Reports why this worker ends. If the report is lost, the exit code still has the category.
    pub fn report_failure(&self, e: &Error) {
        let _ = self.send(&FromWorker::Fatal { exit: e.exit(), diagnostic: e.diagnostic().clone() });
    }

    fn send(&self, message: &FromWorker) -> Result<()> {
        let frame = frame::encode(message).map_err(invalid_message_error)?;
        let mut write = self.write.lock().unwrap_or_else(PoisonError::into_inner);
        write.write_all(&frame).map_err(connection_lost_error)
    }
}

/// Waits for data or the end of the stream, at most for the stream's read timeout. Returns whether
/// there is something to read.
fn poll_readable(read: &UnixStream) -> Result<bool> {
    let timeout = read.read_timeout().map_err(connection_lost_error)?.unwrap_or(MESSAGE_TIMEOUT);
    let mut fds = [PollFd::new(read.as_fd(), PollFlags::POLLIN)];
    match poll(&mut fds, PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX)) {
        Ok(n) => Ok(n > 0),
        Err(nix::errno::Errno::EINTR) => Ok(false),
        Err(e) => Err(connection_lost_error(e.into())),
    }
}

/// Reads one message; `None` if the agent closed the connection.
fn receive_message(read: &mut UnixStream) -> Result<Option<ToWorker>> {
    let mut header = [0; frame::HEADER];
    match read.read_exact(&mut header) {
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other.map_err(connection_lost_error)?,
    }
    let mut body = vec![0; frame::body_length(header).map_err(invalid_message_error)? as usize];
    read.read_exact(&mut body).map_err(connection_lost_error)?;
    frame::decode(&body).map(Some).map_err(invalid_message_error)
}

fn peers_not_listening_error() -> Error {
    let seconds = PEERS_TIMEOUT.as_secs();
    let message = format!("not all ranks of the job accepted connections within {seconds} s");
    let diagnostic = Diagnostic::error(codes::training::PEERS_NOT_LISTENING, message);
    diagnostic.with_field("timeout_seconds", seconds).into()
}

fn invalid_message_error(error: frame::FrameError) -> Error {
    let message = "a message on the control connection to the agent is not valid";
    Diagnostic::error(codes::training::AGENT_MESSAGE_INVALID, message).with_cause(&error).into()
}

fn connection_lost_error(error: std::io::Error) -> Error {
    let message = "the control connection to the agent failed";
    Error::aborted(Diagnostic::error(codes::training::AGENT_CONNECTION_LOST, message).with_cause(&error))
}
