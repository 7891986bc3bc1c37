//! [`AgentRequests`]: requests of the agent (launch's process on the host) to a worker, until the
//! training thread handles them.
use jobspec::ReloadValues;
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// The requests of the agent (launch's process on the host) that this worker has not handled yet:
/// to stop, to save, or to apply changed values of the job file. Reloads and saves take effect at
/// the next step boundary. A stop also ends evaluations and gathers early.
#[derive(Default)]
pub(super) struct AgentRequests {
    stop: AtomicBool,
    save: AtomicBool,
    reload_values: Mutex<Option<ReloadValues>>,
}

impl AgentRequests {
    /// Records that the agent (launch's process on the host) has requested this worker to save a
    /// checkpoint and stop.
    pub(super) fn request_stop(&self) {
        self.stop.store(true, Relaxed);
    }

    /// Returns whether the agent (launch's process on the host) has requested this worker to save a
    /// checkpoint and stop.
    pub(super) fn is_stop_requested(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Records that the agent (launch's process on the host) has requested a checkpoint.
    pub(super) fn request_save(&self) {
        self.save.store(true, Relaxed);
    }

    /// Returns whether the agent (launch's process on the host) has requested a checkpoint since
    /// the last call, and clears the request.
    pub(super) fn take_save_request(&self) -> bool {
        self.save.swap(false, Relaxed)
    }

    /// Returns whether values of a job file that the user changed during the run were received and
    /// not applied yet.
    pub(super) fn has_reload_values(&self) -> bool {
        self.reload_values.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Takes the newest received values of a job file that the user changed during the run, or
    /// returns `None` if there are none.
    pub(super) fn take_reload_values(&self) -> Option<ReloadValues> {
        self.reload_values.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Discards all requests of the agent (launch's process on the host), because they were for an
    /// earlier attempt (start of all workers).
    pub(super) fn clear(&self) {
        self.stop.store(false, Relaxed);
        self.save.store(false, Relaxed);
        self.take_reload_values();
    }

    /// Stores values of a job file that the user changed during the run, for the training loop to
    /// apply before the next step.
    pub(super) fn store_reload_values(&self, values: ReloadValues) {
        *self.reload_values.lock().unwrap_or_else(PoisonError::into_inner) = Some(values);
    }
}
