//! [`ThreadComm`]: the communicator of one rank, in a group whose ranks are threads of one process.
use super::group::ThreadGroup;
use crate::{
    CommError, Result,
    call::{CollectiveCall, GroupPosition},
    call_error::ArgumentError,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The communicator of one rank, in a group whose ranks are threads of one process.
///
/// Dropping it leaves the group: peers that need this rank then get [`CommError::Aborted`].
pub struct ThreadComm {
    pub(super) position: GroupPosition,
    pub(super) group: Arc<ThreadGroup>,
    /// The call state of this rank. A collective holds the lock, so that collectives of one rank
    /// never overlap.
    pub(super) call_state: Mutex<ThreadCallState>,
}

/// Counters of one rank's communicator: the collectives that the rank has begun, and the data
/// exchanges within these collectives.
pub(super) struct ThreadCallState {
    /// Number of collectives called so far.
    pub(super) calls: u64,
    /// Number of exchanges entered so far.
    pub(super) exchanges: u64,
}

impl ThreadComm {
    /// Begins a collective: locks the counters of this rank's calls and assigns the next number to
    /// the call. Fails if the group is aborted or the arguments are invalid. Invalid arguments
    /// abort the group.
    pub(super) fn begin_call(
        &self,
        call: std::result::Result<CollectiveCall, ArgumentError>,
    ) -> Result<(MutexGuard<'_, ThreadCallState>, CollectiveCall)> {
        let mut call_state = self.call_state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = self.group.lock_state().aborted.clone() {
            return Err(CommError::Aborted(reason));
        }
        let rank = self.position.rank;
        let call = call
            .map_err(|error| self.abort_on_error(CommError::InvalidArguments { rank, error }))?
            .with_call_number(call_state.calls);
        call_state.calls += 1;
        Ok((call_state, call))
    }

    /// Aborts the group because of `error`, so that every rank fails, and returns `error`. Without
    /// the abort, this rank's later calls would be paired with the wrong calls of its peers.
    pub(super) fn abort_on_error(&self, error: CommError) -> CommError {
        self.group.abort(error.to_abort_reason(self.position.rank));
        error
    }
}
