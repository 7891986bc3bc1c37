//! [`ConnectionProgress`]: the stage that the SSH connection to one host has reached and its end,
//! which the thread of the connection reports to the controller.
use crate::cluster::transport::{AgentStartStep, ConnectionStage, RemoteAgentConnection};
use diagnostic::{Diagnostic, codes::ssh};
use nix::sys::socket::{Shutdown, shutdown};
use protocol::control::ExitStatus;
use std::{
    fmt,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::sync::mpsc;

/// The stage of the SSH connection to one host and the result of its end, which the thread of the
/// connection records and the controller reads.
#[derive(Default)]
pub(crate) struct ConnectionProgress {
    state: Mutex<ProgressState>,
    aborted: AtomicBool,
    /// Receives the steps of the start; `None` if no reader exists.
    start_steps: Option<mpsc::Sender<AgentStartStep>>,
}

/// The capacity of the channel that reports the steps of an agent's start over SSH, such as copying
/// the executable, to the controller. A start has at most eight steps.
const START_STEP_CAPACITY: usize = 8;

/// The values in the progress record of an SSH connection, such as its stage, its current socket
/// and the error that ended it.
#[derive(Default)]
struct ProgressState {
    stage: ConnectionStage,
    /// A duplicate of the socket in use, which an abort shuts down.
    socket: Option<OwnedFd>,
    failure: Option<Diagnostic>,
    exit_status: Option<ExitStatus>,
    /// The output of the login shell before the agent answered.
    shell_output: String,
    /// The client that carries the connection, if it is not the built-in client.
    client: Option<String>,
}

impl ConnectionProgress {
    /// Creates the progress record of an SSH connection, and the channel that reports the steps of
    /// starting the agent to the controller.
    pub(super) fn new() -> (ConnectionProgress, mpsc::Receiver<AgentStartStep>) {
        let (sender, receiver) = mpsc::channel(START_STEP_CAPACITY);
        (ConnectionProgress { start_steps: Some(sender), ..ConnectionProgress::default() }, receiver)
    }

    /// Reports a step of starting the agent over SSH, such as copying the executable, to the
    /// controller, which then changes how long it waits for the agent. Never blocks.
    pub(super) fn report_start_step(&self, step: AgentStartStep) {
        if let Some(steps) = &self.start_steps {
            // An error means that the controller no longer waits for the agent.
            _ = steps.try_send(step);
        }
    }

    /// Locks the mutex around the recorded progress of the SSH connection, even if another thread
    /// has panicked while it held the lock.
    fn lock_state(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the SSH connection has reached the stage `stage`, such as the login.
    pub(super) fn set_stage(&self, stage: ConnectionStage) {
        self.lock_state().stage = stage;
    }

    /// Records which external SSH client launch uses for this connection instead of the built-in
    /// client, and why.
    pub(super) fn set_external_client(&self, client: Option<String>) {
        self.lock_state().client = client;
    }

    /// Records the text that the login shell of the host printed before the agent answered. Keeps
    /// an earlier text if there is no new one, because several scripts may run in one shell.
    pub(super) fn set_shell_output(&self, output: &[u8]) {
        let text = String::from_utf8_lossy(output).trim().to_owned();
        if !text.is_empty() {
            self.lock_state().shell_output = text;
        }
    }

    /// Stores a duplicate of `socket`, over which the SSH connection runs, so that the controller
    /// can abort the connection by shutting the socket down. If the connection was aborted already,
    /// shuts the socket down immediately.
    pub(super) fn set_socket(&self, socket: &OwnedFd) {
        self.lock_state().socket = socket.try_clone().ok();
        if self.aborted.load(Ordering::SeqCst) {
            self.shut_down_current_socket();
        }
    }

    /// Returns whether the controller has aborted the SSH connection.
    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Fails if the controller has aborted the SSH connection. `name` is the host's name for the
    /// error.
    pub(super) fn check_not_aborted(&self, name: &str) -> diagnostic::Result<()> {
        if !self.aborted.load(Ordering::SeqCst) {
            return Ok(());
        }
        let message = format!("the SSH connection to host {name} was aborted before its agent was running");
        Err(Diagnostic::error(ssh::SSH_CONNECTION_ABORTED, message).with_subject(name))
    }

    /// Records how the SSH connection ended: the error that ended it, or the exit status of the
    /// agent. Closes the duplicate of the socket.
    pub(super) fn record_connection_end(&self, failure: Option<Diagnostic>, exit_status: Option<ExitStatus>) {
        let mut state = self.lock_state();
        (state.failure, state.exit_status, state.socket) = (failure, exit_status, None);
    }

    /// Shuts down the socket that the SSH connection uses at present, if there is one.
    pub(super) fn shut_down_current_socket(&self) {
        if let Some(socket) = &self.lock_state().socket {
            _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
    }
}

impl fmt::Debug for ConnectionProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock_state();
        write!(f, "{:?} {:?} {:?}", state.stage, state.failure, state.exit_status)
    }
}

impl RemoteAgentConnection for Arc<ConnectionProgress> {
    fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.shut_down_current_socket();
    }

    fn failure(&self) -> Option<Diagnostic> {
        self.lock_state().failure.clone()
    }

    fn exit_status(&self) -> Option<ExitStatus> {
        self.lock_state().exit_status
    }

    fn stage(&self) -> ConnectionStage {
        self.lock_state().stage
    }

    fn shell_output(&self) -> String {
        self.lock_state().shell_output.clone()
    }

    fn external_client_description(&self) -> Option<String> {
        self.lock_state().client.clone()
    }
}
