//! [`AgentSession`]: the connection of a worker to its agent (launch's process on the host, which
//! starts and watches workers).
//!
//! One thread reads requests (stop, save, reload, abort), and another one sends a heartbeat each
//! second. Events are sent by the thread in which they happen.
use crate::{
    consensus::is_any_true,
    error::{Error, Result, build_thread_start_error},
    runtime::{agent_requests::AgentRequests, status_writer::StatusWriter},
    zero::collective_queue::CollectiveQueue,
};
use diagnostic::{Diagnostic, codes};
use jobspec::env;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use protocol::{
    control::{FromWorker, PROTOCOL_VERSION, ToWorker, WorkerInit, WorkerPeers},
    event::{Event, WorkerPhase},
    exit::WorkerExit,
    frame,
};
use std::{
    io::{IoSliceMut, Read, Write},
    net::SocketAddr,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// The time between two signs of life (heartbeats) that a worker sends to its agent (launch's
/// process on the host).
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The longest wait of a worker for a message that its agent (launch's process on the host) must
/// send.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest wait of a rank until all ranks of the job accept connections. Ranks start at about
/// the same time.
const PEERS_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a rank whose collective failed before the first step waits for a stop request, to find
/// out whether a stop of other ranks caused the failure. The request reaches all ranks at about the
/// same time.
const STOP_ARRIVAL_TIMEOUT: Duration = Duration::from_secs(5);
/// The time between two checks whether the agent (launch's process on the host) has requested this
/// rank to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long a rank waits before it reports that another rank aborted its collectives, so that the
/// controller first hears of the rank that really failed. The controller then learns of the failed
/// rank or host first.
const ABORT_ARRIVAL_TIME: Duration = Duration::from_millis(100);
/// How long a rank whose collectives were aborted waits for the controller's decision whether its
/// process stays alive for the next attempt (start of all workers). The controller may need this
/// long to notice that a host is lost.
const LEAVE_DECISION_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest time for sending the user the notice that a run stopped before its first step. After
/// it, the run stops without the notice.
const STOP_NOTICE_TIMEOUT: Duration = Duration::from_secs(1);
/// The abort reason that a rank reports if the connection to its agent (launch's process on the
/// host) is closed.
const AGENT_ENDED_REASON: &str = "the agent closed the control connection";

/// Whether this rank prepares its first step, waits for other ranks or already trains, on which
/// depends whether a stop request ends the process at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FirstStepReadiness {
    /// The rank prepares data, model or checkpoint. A stop request ends the process, because no
    /// state would be lost.
    Preparing,
    /// The rank waits for the others. The first step may already have begun on other ranks, so a
    /// stop request no longer ends the process.
    Waiting,
    /// Every rank is ready. A stop request takes effect at the next stop point.
    Training,
}

/// The worker's end of the connection to its agent (launch's process on the host, which starts and
/// watches workers).
pub(super) struct AgentSession {
    write: Mutex<UnixStream>,
    /// The requests that the agent sent.
    pub(super) requests: AgentRequests,
    phase: Mutex<WorkerPhase>,
    step: AtomicU64,
    aborts: Mutex<AbortHandlers>,
    readiness: Mutex<FirstStepReadiness>,
    inbox: Mutex<Inbox>,
    /// Signals that a message has arrived in `inbox`, or that the attempt was aborted.
    arrived: Condvar,
    /// Whether the final report of the attempt was sent.
    is_failure_reported: AtomicBool,
    /// The socket over which the agent passes the shared memory of later attempts; `None` if this
    /// process takes part in one attempt only.
    attempts: Option<UnixStream>,
    /// Whether this rank reports events for all ranks.
    is_leader: bool,
    /// The status of this rank in memory that the agent reads.
    pub(super) status: Arc<StatusWriter>,
}

/// The two messages of the agent for which the training thread may wait: the instructions for the
/// next attempt (start of all workers), and the addresses of all ranks.
#[derive(Default)]
struct Inbox {
    /// The instructions for the next attempt.
    init: Option<Box<WorkerInit>>,
    /// The addresses of all ranks.
    peers: Option<WorkerPeers>,
    /// Whether this rank has left its attempt and waits for the next one.
    has_left: bool,
}

/// A function that ends a blocked operation, such as a collective, when the agent (launch's process
/// on the host) aborts the attempt, and gets the reason as its argument.
type AbortHandler = Box<dyn Fn(&str) + Send>;

/// The functions to call when the agent (launch's process on the host) aborts the attempt, and the
/// reason of an abort that has happened.
#[derive(Default)]
struct AbortHandlers {
    handlers: Vec<AbortHandler>,
    /// The reason why the group was aborted, or `None` before an abort.
    reason: Option<String>,
    /// Whether this rank may leave the aborted attempt and wait for the next one.
    may_leave: bool,
}

/// Takes ownership of the inherited file descriptor whose number is the value of the environment
/// variable `name`. Returns `None` if the variable is not set.
///
/// The caller must not call this function twice with the same `name`, because two owners would
/// close one descriptor twice.
///
/// # Errors
///
/// Fails if the value is not the number of an open, inherited descriptor.
pub(super) fn take_inherited_descriptor(name: &str) -> Result<Option<OwnedFd>> {
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

impl AgentSession {
    /// Creates a session that sends messages to the agent (launch's process on the host) over the
    /// socket `write`.
    pub(super) fn new(write: UnixStream) -> Self {
        AgentSession {
            write: Mutex::new(write),
            requests: AgentRequests::default(),
            phase: Mutex::new(WorkerPhase::Starting),
            step: AtomicU64::new(0),
            aborts: Mutex::default(),
            readiness: Mutex::new(FirstStepReadiness::Preparing),
            inbox: Mutex::default(),
            arrived: Condvar::new(),
            is_failure_reported: AtomicBool::new(false),
            attempts: None,
            is_leader: false,
            status: Arc::default(),
        }
    }

    /// Connects to the agent (launch's process on the host), and waits for its first message, which
    /// contains the instructions for this worker. Returns the session, the stream that
    /// [`AgentSession::start_threads`] reads, and the worker's instructions.
    pub(super) fn connect() -> Result<(Arc<AgentSession>, UnixStream, WorkerInit)> {
        let fd = take_inherited_descriptor(env::LAUNCH_CONTROL_FD)?.ok_or_else(|| {
            let message = "`launch worker` was started without an agent";
            Diagnostic::error(codes::training::WORKER_STARTED_DIRECTLY, message)
                .with_help("run `launch job.yaml`, whose agents start the workers")
        })?;
        let mut read = UnixStream::from(fd);
        let write = read.try_clone().map_err(build_connection_lost_error)?;
        let mut session = AgentSession::new(write);
        session.send_message(&FromWorker::Hello { version: PROTOCOL_VERSION, pid: std::process::id() })?;
        read.set_read_timeout(Some(MESSAGE_TIMEOUT)).map_err(build_connection_lost_error)?;
        let init = match receive_message(&mut read)? {
            Some(ToWorker::Init(init)) if init.version == PROTOCOL_VERSION => *init,
            Some(ToWorker::Init(init)) => {
                let message = format!(
                    "the agent uses version {} of the control protocol, this worker version {PROTOCOL_VERSION}",
                    init.version
                );
                return Err(Diagnostic::error(codes::run::AGENT_VERSION_MISMATCH, message)
                    .with_field("agent_version", init.version)
                    .with_field("worker_version", PROTOCOL_VERSION)
                    .with_help("install the same version of launch on every host")
                    .into());
            }
            other => {
                let problem = if other.is_some() { "has no instructions" } else { "is missing" };
                let message = format!("the agent's first message {problem}");
                return Err(Error::new(codes::training::AGENT_MESSAGE_INVALID, message));
            }
        };
        read.set_read_timeout(None).map_err(build_connection_lost_error)?;
        session.is_leader = init.rank == 0;
        session.attempts = take_inherited_descriptor(env::LAUNCH_ATTEMPT_FD)?.map(UnixStream::from);
        session.status = Arc::new(StatusWriter::new(take_inherited_descriptor(env::LAUNCH_STATUS_FD)?));
        Ok((Arc::new(session), read, init))
    }

    /// Starts the threads that read the requests of the agent (launch's process on the host) and
    /// send it signs of life (heartbeats). The reading thread calls the abort handlers when the
    /// agent requests an abort or ends.
    ///
    /// The process exits when the agent ends.
    pub(super) fn start_threads(self: &Arc<Self>, mut read: UnixStream) -> Result<()> {
        let session = self.clone();
        let reader = std::thread::Builder::new().name("session".into()).spawn(move || {
            loop {
                match receive_message(&mut read) {
                    Ok(Some(message)) => session.dispatch_message(message),
                    Ok(None) | Err(_) => {
                        session.call_abort_handlers(AGENT_ENDED_REASON, false);
                        std::process::exit(WorkerExit::Aborted.exit_code().into());
                    }
                }
            }
        });
        reader.map_err(|e| build_thread_start_error("session", &e))?;
        let session = self.clone();
        let heartbeat = std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            // The loop ends with the process. A failed send means that the agent ended, which the
            // reading thread notices.
            while session.send_progress().is_ok() {
                std::thread::sleep(HEARTBEAT_INTERVAL);
            }
        });
        heartbeat.map_err(|e| build_thread_start_error("heartbeat", &e))?;
        Ok(())
    }

    /// Handles a message of the agent (launch's process on the host): records a request, aborts the
    /// attempt, or passes the message to the training thread.
    fn dispatch_message(&self, message: ToWorker) {
        match message {
            ToWorker::Stop => self.record_stop_or_exit(),
            ToWorker::Save => self.requests.request_save(),
            ToWorker::Reload(values) => self.requests.store_reload_values(values),
            ToWorker::Abort { reason, keep } => self.call_abort_handlers(&reason, keep),
            ToWorker::Peers(peers) => {
                self.lock_inbox().peers = Some(peers);
                self.arrived.notify_all();
            }
            ToWorker::Init(init) => self.begin_attempt(init),
        }
    }

    /// Starts the next attempt (start of all workers) on this rank by passing the instructions
    /// `init` to the waiting training thread. Does nothing if this rank has not left its last
    /// attempt. Requests that arrive after `init` are for the new attempt.
    fn begin_attempt(&self, init: Box<WorkerInit>) {
        let mut inbox = self.lock_inbox();
        if !inbox.has_left {
            return;
        }
        self.requests.clear();
        *self.aborts.lock().unwrap_or_else(PoisonError::into_inner) = AbortHandlers::default();
        self.set_readiness(FirstStepReadiness::Preparing);
        self.is_failure_reported.store(false, Relaxed);
        *inbox = Inbox { init: Some(init), ..Inbox::default() };
        self.arrived.notify_all();
    }

    /// Locks the mutex of the messages for which the training thread waits.
    fn lock_inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the agent's messages contain what the function `take` looks for, and returns it,
    /// or `None` if the attempt is aborted or `limit` passes first.
    fn wait_for_message<T>(
        &self,
        limit: Duration,
        mut take: impl FnMut(&mut Inbox) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + limit;
        let mut inbox = self.lock_inbox();
        loop {
            if let Some(taken) = take(&mut inbox) {
                return Some(taken);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.find_abort_reason().is_some() {
                return None;
            }
            (inbox, _) = self.arrived.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns why the agent (launch's process on the host) has aborted this attempt (start of all
    /// workers), or `None` if it has not.
    fn find_abort_reason(&self) -> Option<String> {
        self.aborts.lock().unwrap_or_else(PoisonError::into_inner).reason.clone()
    }

    /// Waits for the decision whether this process stays alive after the failure `error` to take
    /// part in the next attempt (start of all workers), and returns it. Waits up to
    /// [`LEAVE_DECISION_TIMEOUT`] for the decision.
    ///
    /// A rank leaves only if `error` is the consequence of another failure.
    pub(super) fn wait_for_leave_decision(&self, error: &Error, init: &WorkerInit) -> bool {
        let keeps_workers = init.job.checkpoint.memory.as_ref().is_some_and(|memory| memory.keep_workers);
        let can_leave = self.attempts.is_some() && keeps_workers;
        if !can_leave || error.to_worker_exit() != WorkerExit::Aborted {
            return false;
        }
        self.wait_for_message(ABORT_ARRIVAL_TIME, |_| None::<()>);
        if self.find_abort_reason().is_none() {
            // The controller has not noticed the failure yet, and ends the attempt after this
            // report.
            self.report_failure(error);
            self.wait_for_message(LEAVE_DECISION_TIMEOUT, |_| None::<()>);
        }
        self.aborts.lock().unwrap_or_else(PoisonError::into_inner).may_leave
    }

    /// Reports that this rank has left its attempt (start of all workers), and waits for the
    /// instructions for the next one. The attempt must have no threads and no communicator any
    /// more.
    ///
    /// The wait has no limit. It ends with the process if the agent ends.
    pub(super) fn wait_for_next_attempt(&self, attempt: u32) -> Result<WorkerInit> {
        self.aborts.lock().unwrap_or_else(PoisonError::into_inner).handlers.clear();
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = WorkerPhase::Starting;
        self.set_step(0);
        self.lock_inbox().has_left = true;
        tracing::info!(target: "worker", attempt, "left the attempt");
        self.send_message(&FromWorker::Left { attempt })?;
        let mut inbox = self.lock_inbox();
        loop {
            match inbox.init.take() {
                Some(init) => return Ok(*init),
                None => inbox = self.arrived.wait(inbox).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Receives the memory that the ranks of this host share in the next attempt (start of all
    /// workers), which the agent passes as a file descriptor.
    pub(super) fn receive_shared_memory(&self) -> Result<OwnedFd> {
        let failed = |error: std::io::Error| {
            let message = "the agent did not pass the shared memory of the attempt";
            Error::from(Diagnostic::error(codes::training::SHARED_MEMORY_MISSING, message).with_cause(&error))
        };
        let socket = self.attempts.as_ref().ok_or_else(|| failed(std::io::ErrorKind::NotConnected.into()))?;
        socket.set_read_timeout(Some(MESSAGE_TIMEOUT)).map_err(failed)?;
        receive_file_descriptor(socket).map_err(failed)
    }

    /// Handles a stop request of the agent: exits at once if this rank still prepares its first
    /// step, otherwise records the request for the training loop.
    ///
    /// The preparation may take long (tokenizing, reading a checkpoint), and no part of it is lost
    /// that a kill would not lose. The other ranks get the same request.
    fn record_stop_or_exit(&self) {
        let readiness = self.readiness.lock().unwrap_or_else(PoisonError::into_inner);
        self.requests.request_stop();
        if *readiness != FirstStepReadiness::Preparing {
            return;
        }
        // The lock is still locked, so that the rank does not become ready meanwhile.
        self.report_stop_before_first_step();
        tracing::info!(target: "worker", "stopped before the first step");
        // SAFETY: ends the process without the destructors of libraries, which would wait for the
        // threads that still work.
        unsafe { libc::_exit(WorkerExit::Stopped.exit_code().into()) }
    }

    /// Waits until every rank is ready for the first step. Returns false if a rank was asked to
    /// stop before, so that no rank begins the step. Collective: every rank must call it.
    pub(super) fn wait_for_first_step(&self, queue: &CollectiveQueue) -> Result<bool> {
        self.set_readiness(FirstStepReadiness::Waiting);
        let is_stopping = is_any_true(queue, self.requests.is_stop_requested())?;
        if is_stopping {
            self.report_stop_before_first_step();
        } else {
            self.set_readiness(FirstStepReadiness::Training);
        }
        Ok(!is_stopping)
    }

    /// Returns whether a collective failed only because another rank stopped on request before the
    /// first step, in which case this rank gets a stop request, too. Waits up to
    /// [`STOP_ARRIVAL_TIMEOUT`] for the request.
    pub(super) fn is_stopped_before_first_step(&self, error: &Error) -> bool {
        let readiness = *self.readiness.lock().unwrap_or_else(PoisonError::into_inner);
        if readiness == FirstStepReadiness::Training || error.to_worker_exit() != WorkerExit::Aborted {
            return false;
        }
        let deadline = Instant::now() + STOP_ARRIVAL_TIMEOUT;
        while !self.requests.is_stop_requested() {
            if self.find_abort_reason().is_some() || Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(STOP_POLL_INTERVAL);
        }
        true
    }

    /// Records how far this rank is in preparing its first step: preparing, waiting for other
    /// ranks, or training.
    fn set_readiness(&self, readiness: FirstStepReadiness) {
        *self.readiness.lock().unwrap_or_else(PoisonError::into_inner) = readiness;
    }

    /// On rank 0, reports to the controller of the run that the run stopped on request before its
    /// first step. Omits the report if the agent does not read it in time.
    fn report_stop_before_first_step(&self) {
        if !self.is_leader {
            return;
        }
        let message = "stopped before the first step, so there is no new state to save";
        let event = FromWorker::Event(Event::new_notice(None, message.to_owned()));
        let (Ok(frame), Ok(mut write)) = (frame::encode_frame(&event), self.write.try_lock()) else { return };
        // Without a notice the run stops, too.
        _ = write.set_write_timeout(Some(STOP_NOTICE_TIMEOUT)).and_then(|()| write.write_all(&frame));
    }

    /// Registers `abort`, a function that ends blocked operations, to be called when the agent
    /// (launch's process on the host) aborts the attempt or ends. If the session was aborted
    /// already, calls the handler immediately.
    pub(super) fn add_abort_handler(&self, abort: impl Fn(&str) + Send + 'static) {
        let mut aborts = self.aborts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = &aborts.reason {
            abort(reason);
        }
        aborts.handlers.push(Box::new(abort));
    }

    /// Aborts this attempt (start of all workers) on this rank for the reason `reason`, by calling
    /// all functions that end blocked operations. `may_leave` states whether this rank may leave
    /// the attempt and wait for the next one.
    fn call_abort_handlers(&self, reason: &str, may_leave: bool) {
        let mut aborts = self.aborts.lock().unwrap_or_else(PoisonError::into_inner);
        aborts.handlers.iter().for_each(|abort| abort(reason));
        aborts.reason.get_or_insert_with(|| reason.to_owned());
        aborts.may_leave = may_leave;
        drop(aborts);
        // A waiting thread that has just seen no abort waits again before the lock is free.
        drop(self.lock_inbox());
        self.arrived.notify_all();
    }

    /// Sends this rank's listen addresses to the agent (launch's process on the host), and waits
    /// for the listen addresses of all ranks.
    pub(super) fn exchange_addresses(&self, addresses: Vec<SocketAddr>, attempt: u32) -> Result<WorkerPeers> {
        self.send_message(&FromWorker::Listening { addresses })?;
        let peers = self.wait_for_message(PEERS_TIMEOUT, |inbox| {
            inbox.peers.take().filter(|peers| peers.attempt == attempt)
        });
        peers.ok_or_else(|| match self.find_abort_reason() {
            Some(reason) => {
                Error::new_aborted(Diagnostic::error(codes::collective::COLLECTIVE_ABORTED, reason))
            }
            None => build_peers_not_listening_error(),
        })
    }

    /// Records the phase that this rank has entered, such as loading or training, and reports it to
    /// the agent (launch's process on the host).
    pub(super) fn set_phase(&self, phase: WorkerPhase) -> Result<()> {
        tracing::info!(target: "worker::phase", phase = ?phase, step = self.step.load(Relaxed), "entering phase");
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
        self.status.set_phase(phase);
        self.send_progress()
    }

    /// Sets the number of completed optimizer steps, which the next sign of life (heartbeat)
    /// reports.
    pub(super) fn set_step(&self, step: u64) {
        self.status.set_step(step);
        self.step.store(step, Relaxed);
    }

    /// Sends this rank's phase (such as loading or training) and number of completed steps to the
    /// agent (launch's process on the host), which also serves as a heartbeat.
    fn send_progress(&self) -> Result<()> {
        let phase = *self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        self.send_message(&FromWorker::Progress { phase, step: self.step.load(Relaxed) })
    }

    /// Sends an event, such as a completed step, to the agent (launch's process on the host), which
    /// passes it on to the controller of the run.
    pub(super) fn send_event(&self, event: Event) -> Result<()> {
        self.send_message(&FromWorker::Event(event))
    }

    /// Reports the error that ends this worker to its agent (launch's process on the host). If the
    /// report is lost, the exit code still has the category.
    pub(super) fn report_failure(&self, e: &Error) {
        if self.is_failure_reported.swap(true, Relaxed) {
            return;
        }
        let _ = self.send_message(&FromWorker::Fatal {
            exit: e.to_worker_exit(),
            diagnostic: e.diagnostic().clone(),
        });
    }

    /// Sends the message `message`, such as an event or a heartbeat, over the socket to the agent
    /// (launch's process on the host). Blocks while the agent does not read.
    pub(super) fn send_message(&self, message: &FromWorker) -> Result<()> {
        let frame = frame::encode_frame(message).map_err(build_invalid_message_error)?;
        let mut write = self.write.lock().unwrap_or_else(PoisonError::into_inner);
        write.write_all(&frame).map_err(build_connection_lost_error)
    }
}

/// Receives one file descriptor from the agent over a Unix socket, together with a byte without
/// meaning. Fails after the socket's read timeout.
fn receive_file_descriptor(socket: &UnixStream) -> std::io::Result<OwnedFd> {
    let mut byte = [0];
    let mut buffers = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!(RawFd);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut buffers, Some(&mut space), flags)?;
    let fds = received.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
        _ => None,
    });
    let fd = fds.ok_or(std::io::ErrorKind::UnexpectedEof)?;
    // SAFETY: the kernel has created this descriptor for the message, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads one message that the agent (launch's process on the host) has sent to this worker. Returns
/// `None` if the agent closed the connection.
fn receive_message(read: &mut UnixStream) -> Result<Option<ToWorker>> {
    let mut header = [0; frame::HEADER_BYTES];
    match read.read_exact(&mut header) {
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other.map_err(build_connection_lost_error)?,
    }
    let mut body = vec![0; frame::decode_body_length(header).map_err(build_invalid_message_error)? as usize];
    read.read_exact(&mut body).map_err(build_connection_lost_error)?;
    frame::decode_body(&body).map(Some).map_err(build_invalid_message_error)
}

/// Builds the error which reports that not all ranks of the job accepted connections in time.
fn build_peers_not_listening_error() -> Error {
    let seconds = PEERS_TIMEOUT.as_secs();
    let message = format!("not all ranks of the job accepted connections within {seconds} s");
    let diagnostic = Diagnostic::error(codes::training::PEERS_NOT_LISTENING, message);
    diagnostic.with_field("timeout_seconds", seconds).into()
}

/// Builds the error which reports that the agent (launch's process on the host) has sent an invalid
/// message.
fn build_invalid_message_error(error: frame::FrameError) -> Error {
    let message = "a message on the control connection to the agent is not valid";
    Diagnostic::error(codes::training::AGENT_MESSAGE_INVALID, message).with_cause(&error).into()
}

/// Builds the error which reports that the connection to the agent (launch's process on the host)
/// failed. It is never a root cause.
fn build_connection_lost_error(error: std::io::Error) -> Error {
    let message = "the control connection to the agent failed";
    Error::new_aborted(Diagnostic::error(codes::training::AGENT_CONNECTION_LOST, message).with_cause(&error))
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
