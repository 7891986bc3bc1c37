//! How far the connection to one host is and how it ended, shared by the connection's thread and
//! the controller.
use crate::transport::RemoteConnection;
use contract::control::ExitStatus;
use diagnostic::{Diagnostic, codes::host};
use nix::sys::socket::{Shutdown, shutdown};
use std::{
    fmt,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// The stages of starting an agent over SSH, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ConnectionStage {
    /// Evaluate the job and the SSH configuration.
    #[default]
    Config,
    /// Resolve the host's name.
    Name,
    /// Connect over TCP.
    Tcp,
    /// Check the host's key.
    HostKey,
    /// Log in.
    Authentication,
    /// Run a shell and the executable.
    Exec,
    /// The agent runs.
    Agent,
}

/// Written by a connection's thread, read by the controller or by `launch check`.
#[derive(Default)]
pub(crate) struct ConnectionProgress {
    state: Mutex<ProgressState>,
    aborted: AtomicBool,
}

#[derive(Default)]
struct ProgressState {
    stage: ConnectionStage,
    /// A duplicate of the socket in use, to shut it down.
    socket: Option<OwnedFd>,
    failure: Option<Diagnostic>,
    exit_status: Option<ExitStatus>,
    /// What the login shell printed before the agent answered.
    shell_output: String,
}

impl ConnectionProgress {
    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_stage(&self, stage: ConnectionStage) {
        self.lock().stage = stage;
    }

    /// The stage that was reached, or that failed if [`Self::connection_failure`] is set.
    pub(crate) fn stage(&self) -> ConnectionStage {
        self.lock().stage
    }

    /// What the login shell printed before the agent answered.
    pub(crate) fn shell_output(&self) -> String {
        self.lock().shell_output.clone()
    }

    pub(super) fn set_shell_output(&self, output: &[u8]) {
        self.lock().shell_output = String::from_utf8_lossy(output).trim().to_owned();
    }

    /// Sets the socket that [`RemoteConnection::abort`] shuts down.
    pub(super) fn set_socket(&self, socket: &OwnedFd) {
        self.lock().socket = socket.try_clone().ok();
        if self.aborted.load(Ordering::SeqCst) {
            self.shut_down();
        }
    }

    /// Returns an error after the connection was aborted.
    pub(super) fn check_not_aborted(&self, name: &str) -> diagnostic::Result<()> {
        if !self.aborted.load(Ordering::SeqCst) {
            return Ok(());
        }
        let message = format!("the SSH connection to host {name} was aborted before its agent was running");
        Err(Diagnostic::error(host::SSH_CONNECTION_ABORTED, message).with_subject(name))
    }

    /// Records how the connection ended.
    pub(super) fn finish(&self, failure: Option<Diagnostic>, exit_status: Option<ExitStatus>) {
        let mut state = self.lock();
        (state.failure, state.exit_status, state.socket) = (failure, exit_status, None);
    }

    /// Why the connection failed, once it has.
    pub(crate) fn connection_failure(&self) -> Option<Diagnostic> {
        self.lock().failure.clone()
    }

    fn shut_down(&self) {
        if let Some(socket) = &self.lock().socket {
            _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
    }
}

impl fmt::Debug for ConnectionProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        write!(f, "{:?} {:?} {:?}", state.stage, state.failure, state.exit_status)
    }
}

impl RemoteConnection for Arc<ConnectionProgress> {
    fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.shut_down();
    }

    fn failure(&self) -> Option<Diagnostic> {
        self.connection_failure()
    }

    fn exit_status(&self) -> Option<ExitStatus> {
        self.lock().exit_status
    }
}
