//! How far the way to one agent is, and how it ended: written by the connection's thread, read by the controller.
use crate::transport::{Connection, Refusal};
use contract::control::ExitStatus;
use nix::sys::socket::{Shutdown, shutdown};
use std::{
    fmt,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Steps on the way to an agent, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// The job and the SSH configuration say how.
    #[default]
    Config,
    /// Name → address.
    Name,
    Tcp,
    HostKey,
    Authentication,
    /// A shell answers and the executable runs.
    Exec,
    /// The agent runs.
    Agent,
}

/// Shared by a connection's thread and whoever watches it.
#[derive(Default)]
pub(crate) struct Progress {
    inner: Mutex<Inner>,
    broken: AtomicBool,
}

#[derive(Default)]
struct Inner {
    stage: Stage,
    /// A duplicate of the socket, to break it off.
    wire: Option<OwnedFd>,
    refusal: Option<Refusal>,
    status: Option<ExitStatus>,
    /// What the login shell said on its own.
    noise: String,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn at(&self, stage: Stage) {
        self.lock().stage = stage;
    }

    /// The stage that was reached; it failed there when there is a refusal.
    pub(crate) fn stage(&self) -> Stage {
        self.lock().stage
    }

    /// What the login shell printed before the agent answered.
    pub(crate) fn noise(&self) -> String {
        self.lock().noise.clone()
    }

    pub(super) fn heard(&self, noise: &[u8]) {
        self.lock().noise = String::from_utf8_lossy(noise).trim().to_owned();
    }

    /// The socket that is in use from now on.
    pub(super) fn watch(&self, wire: &OwnedFd) {
        self.lock().wire = wire.try_clone().ok();
        if self.broken.load(Ordering::SeqCst) {
            self.cut();
        }
    }

    /// An error once it was broken off.
    pub(super) fn check(&self, name: &str) -> Result<(), Refusal> {
        match self.broken.load(Ordering::SeqCst) {
            true => Err(Refusal { message: format!("{name}: the connection was given up"), hint: None }),
            false => Ok(()),
        }
    }

    pub(super) fn end(&self, refusal: Option<Refusal>, status: Option<ExitStatus>) {
        let mut inner = self.lock();
        (inner.refusal, inner.status, inner.wire) = (refusal, status, None);
    }

    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.lock().refusal.clone()
    }

    fn cut(&self) {
        if let Some(wire) = &self.lock().wire {
            _ = shutdown(wire.as_raw_fd(), Shutdown::Both);
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.lock();
        write!(f, "{:?} {:?} {:?}", inner.stage, inner.refusal, inner.status)
    }
}

impl Connection for Arc<Progress> {
    fn break_off(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.cut();
    }

    fn why(&self) -> Option<Refusal> {
        self.refusal()
    }

    fn status(&self) -> Option<ExitStatus> {
        self.lock().status
    }
}
