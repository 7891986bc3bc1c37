//! [`Watchdog`]: a thread that watches the collectives of an NCCL communicator until they are
//! complete.
//!
//! NCCL reports a network error only to callers that poll the communicator. The kernels of the
//! failed collective never end, and a thread that waits for the GPU does not poll. The watchdog
//! polls for it, and aborts the communicator and the group of ranks on an error. It also aborts the
//! communicator if another rank has aborted the group.
//!
//! A collective is watched from its beginning. A thread may already wait while it enqueues the
//! work: NCCL connects two ranks when they first exchange data, and a full queue of the GPU blocks
//! its caller. These waits never end if another rank has ended.
use super::raw_comm::RawNcclComm;
use crate::{
    CommError, Result, call::CollectiveCall, communicator::Comm, nccl_error::NcclError, staged::StagedComm,
};
use device::{Cuda, storage::Event};
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// The time between two polls of the communicator while a collective is not complete.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of collectives on the GPU that the watchdog tracks at a time, after which it
/// stops tracking the oldest ones. If there are more, an error names a later collective than the
/// one that failed.
const MAX_RUNNING_CALLS: usize = 1024;
/// How long a rank whose NCCL has lost a peer waits until the transport between host memories
/// reports why the peer ended.
const ABORT_REASON_TIMEOUT: Duration = Duration::from_millis(500);
/// The time between two checks whether that transport has been aborted.
const ABORT_REASON_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The thread that watches the collectives of one NCCL communicator until they are complete, and
/// aborts the group if one fails. Dropping it ends its thread.
pub(super) struct Watchdog {
    shared: Arc<WatchdogState>,
    thread: Option<JoinHandle<()>>,
}

/// State that the watchdog's thread shares with the threads that call collectives: the
/// communicators and the watched collectives.
struct WatchdogState {
    group: Arc<RawNcclComm>,
    host_comm: Arc<StagedComm>,
    calls: Mutex<WatchedCalls>,
    /// Notified when a collective begins while there is no other, and when the watchdog is to end.
    changed: Condvar,
}

/// Unfinished collectives of one NCCL communicator that the watchdog thread watches, and the first
/// error that the thread found.
#[derive(Default)]
struct WatchedCalls {
    /// The collectives that threads of the rank are enqueuing.
    entered: Vec<WatchedCall>,
    /// The collectives that run on the GPU, with the events that their streams reach when they are
    /// complete, oldest first.
    running: VecDeque<(WatchedCall, Event)>,
    /// How many collectives were watched, which is the number of the next one.
    count: u64,
    error: Option<NcclError>,
    is_ending: bool,
}

/// An unfinished collective that the watchdog watches, and the time at which the rank called it.
#[derive(Clone, Copy)]
struct WatchedCall {
    call: CollectiveCall,
    entered_at: Instant,
}

/// A collective whose work the calling thread has not completely enqueued on the GPU yet. Dropping
/// it ends the watch.
pub(super) struct EnteredCall<'a> {
    watchdog: &'a WatchdogState,
    watched: WatchedCall,
}

impl EnteredCall<'_> {
    /// Makes the watchdog watch this collective, whose work is enqueued on the GPU, until the GPU
    /// reaches the event `done`.
    pub(super) fn watch_until(self, done: Event) {
        let mut calls = self.watchdog.lock_calls();
        calls.forget_complete_calls();
        if calls.running.len() == MAX_RUNNING_CALLS {
            calls.running.pop_front();
        }
        calls.running.push_back((self.watched, done));
        // Dropping `self` needs the lock.
        drop(calls);
    }
}

impl Drop for EnteredCall<'_> {
    fn drop(&mut self) {
        let number = self.watched.call.number;
        self.watchdog.lock_calls().entered.retain(|entered| entered.call.number != number);
    }
}

impl Watchdog {
    /// Starts a thread that watches the collectives of `group` while they run on the GPU. On an
    /// error, the watchdog also aborts `host_comm`, so that every rank ends.
    pub(super) fn start(
        group: Arc<RawNcclComm>,
        host_comm: Arc<StagedComm>,
        cuda: Arc<Cuda>,
    ) -> Result<Watchdog> {
        let (calls, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(WatchdogState { group, host_comm, calls, changed });
        let watched = shared.clone();
        let thread = std::thread::Builder::new().name("nccl-watchdog".into()).spawn(move || {
            // without a context, events seem to be reached, and nothing is watched
            if cuda.make_current().is_ok() {
                watched.run_watch_loop();
            }
        });
        let thread = thread.map_err(|error| CommError::Transport {
            operation: "start the watchdog of NCCL",
            error: error.to_string(),
        })?;
        Ok(Watchdog { shared, thread: Some(thread) })
    }

    /// Begins to watch `call`, and assigns its number among the collectives of this communicator.
    /// Fails with the error that the watchdog has found, if it has found one.
    pub(super) fn enter_call(&self, call: CollectiveCall) -> Result<EnteredCall<'_>> {
        let mut calls = self.shared.lock_calls();
        if let Some(error) = &calls.error {
            return Err(error.clone().into());
        }
        let watched = WatchedCall { call: call.with_call_number(calls.count), entered_at: Instant::now() };
        calls.count += 1;
        let was_idle = calls.entered.is_empty() && calls.running.is_empty();
        calls.entered.push(watched);
        drop(calls);
        if was_idle {
            // Otherwise the thread wakes up at its next poll.
            self.shared.changed.notify_all();
        }
        Ok(EnteredCall { watchdog: &self.shared, watched })
    }

    /// Returns the reason of the group's abort in place of `error`, if `error` is NCCL's report
    /// that a peer is gone and the group is aborted soon. Returns `error` in all other cases.
    pub(super) fn replace_by_abort_reason(&self, error: NcclError) -> NcclError {
        self.shared.replace_by_abort_reason(error)
    }

    /// Returns the watchdog's error if the watchdog has found one, and `result` otherwise, since
    /// the watchdog's error is the root cause of later errors. An abort of the group that follows
    /// from such an error is thus reported as the error.
    pub(super) fn replace_result_by_found_error<T>(&self, result: Result<T>) -> Result<T> {
        match &self.shared.lock_calls().error {
            Some(error) => Err(error.clone().into()),
            None => result,
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.lock_calls().is_ending = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // a panic of the thread was printed, and concerns no caller any more
            let _ = thread.join();
        }
    }
}

impl WatchdogState {
    /// Locks the mutex of the watched collectives.
    fn lock_calls(&self) -> MutexGuard<'_, WatchedCalls> {
        // no code panics while it changes the collectives
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Main function of the watchdog thread: checks the unfinished collectives for errors and
    /// timeouts until the watchdog is dropped or the group is aborted.
    fn run_watch_loop(&self) {
        let mut calls = self.lock_calls();
        loop {
            calls.forget_complete_calls();
            if calls.is_ending {
                return;
            }
            let Some(oldest) = calls.find_oldest() else {
                calls = self.changed.wait(calls).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let operation = format!("{} of rank {}", oldest.call, self.group.rank());
            let running_for = oldest.entered_at.elapsed();
            drop(calls);
            if let Some(reason) = self.host_comm.abort_reason() {
                // a peer has ended, so the work of this rank would never end
                return self.group.abort_with_reason(reason);
            }
            if let Err(error) = self.group.check_running_call(&operation, running_for) {
                return self.record_error_and_abort(self.replace_by_abort_reason(error));
            }
            calls = self.lock_calls();
            if !calls.is_ending {
                let waited = self.changed.wait_timeout(calls, POLL_INTERVAL);
                calls = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// See [`Watchdog::replace_by_abort_reason`]. If a process ends, NCCL and the transport between
    /// host memories report it in any order, and only the transport names the rank.
    fn replace_by_abort_reason(&self, error: NcclError) -> NcclError {
        let deadline = Instant::now() + ABORT_REASON_TIMEOUT;
        while error.is_connection_failure() {
            if let Some(reason) = self.host_comm.abort_reason() {
                return NcclError::Aborted(reason);
            }
            if Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(ABORT_REASON_POLL_INTERVAL);
        }
        error
    }

    /// Stores the NCCL error `error` as the watchdog's result and aborts the group of ranks, unless
    /// `error` is itself the report of an abort. An abort that another rank or the caller requested
    /// is no error of this rank.
    fn record_error_and_abort(&self, error: NcclError) {
        if matches!(error, NcclError::Aborted(_)) {
            return;
        }
        let message = error.to_string();
        self.lock_calls().error = Some(error);
        self.host_comm.abort(&message);
    }
}

impl WatchedCalls {
    /// Removes finished collectives from the list of collectives that run on the GPU. Collectives
    /// complete in their order.
    fn forget_complete_calls(&mut self) {
        while self.running.front().is_some_and(|(_, done)| done.is_reached()) {
            self.running.pop_front();
        }
    }

    /// Returns the collective that has been watched for the longest time.
    fn find_oldest(&self) -> Option<WatchedCall> {
        let running = self.running.front().map(|(watched, _)| watched);
        running.into_iter().chain(&self.entered).min_by_key(|watched| watched.entered_at).copied()
    }
}
