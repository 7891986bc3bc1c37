//! [`ThreadGroup`]: state that all ranks of a group share, where each rank is a thread of one
//! process.
use super::{published_slice::PublishedSlice, thread_window::ThreadWindow};
use crate::{AbortReason, call::CollectiveCall};
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// State that all ranks of a group share, where each rank is a thread of one process.
pub(super) struct ThreadGroup {
    pub(super) timeout: Duration,
    pub(super) state: Mutex<GroupState>,
    /// The condition variable on which ranks wait for a change of the state.
    pub(super) changed: Condvar,
}

/// State of a group of threads that a mutex protects: the data exchanges that each rank has entered
/// and finished, and why the group was aborted.
pub(super) struct GroupState {
    pub(super) contributions: Vec<Option<Arc<Contribution>>>,
    /// By rank: the number of the last exchange that the rank entered.
    pub(super) entered: Vec<u64>,
    /// By rank: the number of the last exchange in which the rank has finished reading.
    pub(super) finished: Vec<u64>,
    /// By rank: whether the rank's communicator was dropped.
    pub(super) has_left: Vec<bool>,
    /// Number of ranks that are reading their peers' memory now.
    pub(super) readers: usize,
    /// The memory that rank 0 allocated for the latest [`crate::Comm::shared_window`].
    pub(super) window: Option<Arc<ThreadWindow>>,
    pub(super) aborted: Option<AbortReason>,
}

/// The call and the buffers that one rank makes readable for its peers in one data exchange of a
/// collective.
pub(super) struct Contribution {
    pub(super) call: CollectiveCall,
    pub(super) slices: Vec<PublishedSlice>,
    /// By rank: the number of elements that this rank expects in an all-to-all; empty in other
    /// collectives.
    pub(super) expected: Vec<usize>,
}

impl ThreadGroup {
    /// Creates the shared state of a group of `world` ranks before their first collective. A rank
    /// waits for its peers at most `timeout` in one exchange.
    pub(super) fn new(world: usize, timeout: Duration) -> Self {
        let state = GroupState {
            contributions: vec![None; world],
            entered: vec![0; world],
            finished: vec![0; world],
            has_left: vec![false; world],
            readers: 0,
            window: None,
            aborted: None,
        };
        ThreadGroup { timeout, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Locks the mutex of the group's state, which contains the progress of every rank.
    pub(super) fn lock_state(&self) -> MutexGuard<'_, GroupState> {
        // no code panics while it holds the lock, so the state is consistent
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until another thread signals a change of the group's state, or until `deadline`. The
    /// lock `state` is released meanwhile, and returned locked again.
    pub(super) fn wait_for_change<'a>(
        &self,
        state: MutexGuard<'a, GroupState>,
        deadline: Instant,
    ) -> MutexGuard<'a, GroupState> {
        let limit = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Aborts the group for `reason`, so that its collectives fail, and wakes all waiting ranks.
    /// Keeps the first reason if the group is already aborted.
    pub(super) fn abort(&self, reason: AbortReason) {
        self.lock_state().aborted.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// Records that `rank` has left the group, which makes every collective fail in which a peer
    /// waits for this rank. Aborts the group if the calling thread is panicking.
    pub(super) fn leave(&self, rank: usize) {
        let mut state = self.lock_state();
        state.has_left[rank] = true;
        if std::thread::panicking() {
            state.aborted.get_or_insert(AbortReason::RankPanicked { rank });
        }
        self.changed.notify_all();
    }
}
