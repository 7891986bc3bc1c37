//! [`SharedPlanner`]: the planner of the tree of agents, for the threads that start agents and wait
//! for its decisions.
use super::planner::TreePlanner;
use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The interval at which a thread that waits for a free place for its agent in the tree of agents
/// checks whether the start of the agent was canceled.
const GIVE_UP_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The [`TreePlanner`] of the controller behind a mutex, with condition variables that wake threads
/// after the planner's state has changed.
///
/// A change wakes one thread of each kind, and a thread that gets its decision wakes the next one.
/// So the work for each decision does not depend on the number of threads.
#[derive(Debug)]
pub(super) struct SharedPlanner {
    planner: Mutex<TreePlanner>,
    /// Wakes threads that wait for a free place of their agent.
    pub(super) places: Condvar,
    /// Wakes threads that wait for a host from which they can fetch the executable.
    pub(super) sources: Condvar,
}

impl SharedPlanner {
    /// Makes `planner`, the planner of a tree of agents, available to several threads.
    pub(super) fn new(planner: TreePlanner) -> SharedPlanner {
        SharedPlanner { planner: Mutex::new(planner), places: Condvar::new(), sources: Condvar::new() }
    }

    /// Locks the planner of the tree of agents, even if another thread has panicked while it held
    /// the lock.
    pub(super) fn lock_planner(&self) -> MutexGuard<'_, TreePlanner> {
        self.planner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state of the planner of the tree of agents with the function `change`, and wakes
    /// all threads that wait for a decision of the planner.
    pub(super) fn change_and_wake(&self, change: impl FnOnce(&mut TreePlanner)) {
        change(&mut self.lock_planner());
        self.places.notify_one();
        self.sources.notify_one();
    }

    /// Blocks until the planner of the tree of agents can decide on a request, such as one for a
    /// free place, or until the waiter gives up. Checks `is_given_up` every
    /// [`GIVE_UP_CHECK_INTERVAL`].
    pub(super) fn wait_for_decision<T>(
        &self,
        changed: &Condvar,
        mut decide: impl FnMut(&mut TreePlanner) -> Option<T>,
        is_given_up: impl Fn() -> bool,
    ) -> Option<T> {
        let mut planner = self.lock_planner();
        loop {
            if is_given_up() {
                changed.notify_one();
                return None;
            }
            if let Some(decision) = decide(&mut planner) {
                changed.notify_one();
                return Some(decision);
            }
            let waited = changed.wait_timeout(planner, GIVE_UP_CHECK_INTERVAL);
            planner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
