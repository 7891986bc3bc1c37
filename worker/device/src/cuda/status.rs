//! Remembers the first failure of a GPU, for ops that cannot return errors ([`DeviceStatus`]).
use super::error::CudaError;
use crate::storage::DeviceError;
use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// The first failed GPU call of a GPU, if any, kept for operations that cannot return an error;
/// after a failure, all later calls are skipped.
#[derive(Default)]
pub(super) struct DeviceStatus {
    /// True if `failure` is set. Read before every call.
    has_failed: AtomicBool,
    failure: Mutex<Option<DeviceError>>,
}

impl DeviceStatus {
    /// Returns true if a failure of a GPU call is recorded.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Relaxed)
    }

    /// Returns the value of the GPU call's `result`, or stores its error as the GPU's first
    /// failure. Returns `None` if `result` is an error, and keeps an error that was recorded
    /// earlier.
    pub(super) fn ok_or_record_failure<T>(&self, result: Result<T, CudaError>) -> Option<T> {
        result.map_err(|error| self.record_failure(error.into())).ok()
    }

    /// Stores `failure` as the GPU's first failure, if none is stored yet; all later GPU calls are
    /// then skipped.
    pub(super) fn record_failure(&self, failure: DeviceError) {
        self.lock_first_failure().get_or_insert(failure);
        self.has_failed.store(true, Relaxed);
    }

    /// Fails with the first failure of a GPU call, if one was recorded.
    pub(super) fn check_no_failure(&self) -> Result<(), DeviceError> {
        if !self.has_failed() {
            return Ok(());
        }
        self.lock_first_failure().clone().map_or(Ok(()), Err)
    }

    /// Removes and returns the stored error of the first failed GPU call, so that later GPU calls
    /// are no longer skipped.
    pub(super) fn take_failure(&self) -> Result<(), DeviceError> {
        self.has_failed.store(false, Relaxed);
        self.lock_first_failure().take().map_or(Ok(()), Err)
    }

    /// Locks the mutex of the first recorded failure of a GPU call (`None` if no call has failed).
    fn lock_first_failure(&self) -> MutexGuard<'_, Option<DeviceError>> {
        // no code panics while it holds the lock
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
