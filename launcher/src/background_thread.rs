//! [`BackgroundThread`]: runs jobs that may block, such as writes to a slow disk, one after the
//! other on a separate thread. [`write_persistently`] repeats failed writes on such a thread.
use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The pause between the first failure of a file write, for example on a full disk, and its first
/// repetition. Each further failure doubles the pause.
pub(crate) const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause between two repetitions of a failed file write.
pub(crate) const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(2);

/// A function in the queue of a [`BackgroundThread`], which calls the function once on its separate
/// thread. Unlike a job of a cluster, it is not described by job.yaml.
type QueuedFunction = Box<dyn FnOnce() + Send>;

/// A handle through which functions are queued for a separate thread, which calls them one after
/// the other. The thread ends after the last job once all clones of the handle are dropped.
#[derive(Clone, Debug)]
pub(crate) struct BackgroundThread {
    /// The queue of the thread, which is closed when the last handle is dropped.
    queue: Arc<QueueCloser>,
}

/// Closes the queue of a [`BackgroundThread`] when the last handle of the thread is dropped, so
/// that the thread ends once it has called all queued functions.
#[derive(Debug)]
struct QueueCloser(Arc<JobQueue>);

impl Drop for QueueCloser {
    fn drop(&mut self) {
        self.0.lock_state().is_closed = true;
        self.0.changed.notify_all();
    }
}

/// The queue of functions (jobs) that a [`BackgroundThread`] will call, and the state of the
/// thread.
#[derive(Debug)]
struct JobQueue {
    /// The limit of the size of the waiting jobs, in bytes.
    max_bytes: usize,
    state: Mutex<QueueState>,
    /// Notifies waiting threads of every change of the state.
    changed: Condvar,
}

/// The functions that wait in a [`JobQueue`], with their total size, and the state of the thread
/// that calls them.
#[derive(Default)]
struct QueueState {
    jobs: VecDeque<(usize, QueuedFunction)>,
    /// The size of the waiting jobs, in bytes.
    bytes: usize,
    /// The time at which the running job began; `None` if no job runs.
    busy_since: Option<Instant>,
    /// The number of jobs that have ended.
    ended: u64,
    /// The number of jobs that were accepted.
    accepted: u64,
    /// Whether the last handle was dropped, so that no further job can arrive.
    is_closed: bool,
}

impl std::fmt::Debug for QueueState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueState").field("jobs", &self.jobs.len()).field("bytes", &self.bytes).finish()
    }
}

impl JobQueue {
    /// Locks the mutex around the waiting functions and the state of the thread, even if a thread
    /// has panicked while it held the lock.
    fn lock_state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the queued functions (jobs) on the calling thread until the queue is closed and empty.
    fn run_jobs(&self) {
        let mut state = self.lock_state();
        loop {
            if let Some((bytes, job)) = state.jobs.pop_front() {
                state.bytes -= bytes;
                state.busy_since = Some(Instant::now());
                drop(state);
                job();
                state = self.lock_state();
                state.busy_since = None;
                state.ended += 1;
                self.changed.notify_all();
            } else if state.is_closed {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl BackgroundThread {
    /// Starts a thread that calls queued functions, and returns the handle through which they are
    /// queued. The thread gets the name `name`, which may have at most 15 bytes. `max_bytes` limits
    /// the size of the jobs that wait.
    pub(crate) fn start(name: &str, max_bytes: usize) -> io::Result<BackgroundThread> {
        let queue = Arc::new(JobQueue { max_bytes, state: Mutex::default(), changed: Condvar::new() });
        let jobs = queue.clone();
        thread::Builder::new().name(name.to_owned()).spawn(move || jobs.run_jobs())?;
        Ok(BackgroundThread { queue: Arc::new(QueueCloser(queue)) })
    }

    /// Queues the function `job`, which the thread calls after all earlier ones. Returns `false`
    /// and drops the job if the waiting jobs would be too large. A job of 0 bytes is always
    /// accepted. Never blocks.
    pub(crate) fn enqueue_job(&self, bytes: usize, job: impl FnOnce() + Send + 'static) -> bool {
        let queue = &self.queue.0;
        let mut state = queue.lock_state();
        if bytes > 0 && state.bytes + bytes > queue.max_bytes {
            return false;
        }
        state.bytes += bytes;
        state.accepted += 1;
        state.jobs.push_back((bytes, Box::new(job)));
        queue.changed.notify_all();
        true
    }

    /// Returns for how long the function that the thread currently calls has been running. Returns
    /// zero if no job runs.
    pub(crate) fn busy_time(&self) -> Duration {
        self.queue.0.lock_state().busy_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Blocks until the thread has called all functions that were queued so far, but at most for
    /// `limit`. Returns whether all of them have ended.
    pub(crate) fn flush(&self, limit: Duration) -> bool {
        let queue = &self.queue.0;
        let state = queue.lock_state();
        let target = state.accepted;
        let waited = queue.changed.wait_timeout_while(state, limit, |state| state.ended < target);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// A switch that several threads share; once it is off, they no longer repeat failed file writes,
/// so that the program can end.
#[derive(Clone, Debug, Default)]
pub(crate) struct WriteRetrySwitch(Arc<(Mutex<bool>, Condvar)>);

impl WriteRetrySwitch {
    /// Makes all threads that share this switch stop repeating failed file writes at once.
    pub(crate) fn switch_off(&self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }

    /// Sleeps for `pause` before a failed file write is repeated, or until this switch is turned
    /// off. Returns `false` once the repetitions have ended.
    fn wait_before_retry(&self, pause: Duration) -> bool {
        let has_ended = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.1.wait_timeout_while(has_ended, pause, |has_ended| !*has_ended);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Writes all of `bytes` to a file, and repeats writes with temporary errors, such as a full disk,
/// until they succeed or `retries` is switched off. A write that succeeded in part continues behind
/// its last byte. `on_failure` is called with the first error. Fails with the number of unwritten
/// bytes and the last error if `retries` ends the repetitions, or if the error is permanent, such
/// as that of a closed descriptor.
///
/// Blocks for as long as the disk is full or stalls, so it is called in jobs of a
/// [`BackgroundThread`] only.
pub(crate) fn write_persistently(
    file: &mut (impl Write + ?Sized),
    mut bytes: &[u8],
    retries: &WriteRetrySwitch,
    mut on_failure: impl FnMut(&io::Error),
) -> Result<(), (u64, io::Error)> {
    let mut pauses = RetryPauses::default();
    while !bytes.is_empty() {
        let left = bytes.len() as u64;
        match file.write(bytes) {
            Ok(0) => return Err((left, io::ErrorKind::WriteZero.into())),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                if pauses.is_before_first_retry() {
                    on_failure(&error);
                }
                if !is_transient(&error) || !retries.wait_before_retry(pauses.next_pause()) {
                    return Err((left, error));
                }
            }
        }
    }
    Ok(())
}

/// Computes the pauses before each repetition of a failed operation, such as a file write; each
/// pause is longer than the one before.
#[derive(Debug, Default)]
pub(crate) struct RetryPauses {
    failures: u32,
}

impl RetryPauses {
    /// Returns whether the operation has failed only once so far, so that it was not repeated yet.
    pub(crate) fn is_before_first_retry(&self) -> bool {
        self.failures == 0
    }

    /// Returns how long to wait before the failed operation is repeated the next time. The pauses
    /// double up to [`LONGEST_RETRY_PAUSE`].
    pub(crate) fn next_pause(&mut self) -> Duration {
        self.failures += 1;
        FIRST_RETRY_PAUSE.saturating_mul(1 << (self.failures - 1).min(16)).min(LONGEST_RETRY_PAUSE)
    }
}

/// Returns whether a file operation that failed with this error may succeed if it is repeated
/// later, such as after a full disk.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    let transient = [
        libc::ENOSPC,
        libc::EDQUOT,
        libc::EIO,
        libc::ESTALE,
        libc::EAGAIN,
        libc::ETIMEDOUT,
        libc::EHOSTDOWN,
        libc::EHOSTUNREACH,
        libc::ENETDOWN,
        libc::ENETUNREACH,
        libc::ENOTCONN,
        libc::ENOMEM,
        libc::EMFILE,
        libc::ENFILE,
    ];
    error.raw_os_error().is_some_and(|code| transient.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn jobs_run_in_order_and_a_full_queue_drops_the_next_one() {
        let thread = BackgroundThread::start("test", 10).expect("a thread");
        let (gate, opened) = mpsc::channel::<()>();
        let (done, order) = mpsc::channel();
        assert!(thread.enqueue_job(0, move || _ = opened.recv()));
        let push = |bytes, n| {
            let done = done.clone();
            thread.enqueue_job(bytes, move || _ = done.send(n))
        };
        let began = Instant::now();
        while thread.busy_time().is_zero() {
            assert!(began.elapsed() < Duration::from_secs(30));
        }
        assert!(push(6, 1) && push(4, 2) && !push(1, 3) && push(0, 4));
        assert!(!thread.flush(Duration::from_millis(20)), "the first job blocks");
        gate.send(()).expect("the job waits");
        assert!(thread.flush(Duration::from_secs(30)));
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [1, 2, 4]);
        assert!(push(10, 5) && thread.busy_time() < Duration::from_secs(30));
        // The thread ends after its last job.
        drop((thread, done));
        assert_eq!(order.recv(), Ok(5));
        assert!(order.recv().is_err());
    }

    /// A file that accepts at most three bytes per write, and fails every second write.
    struct FlakyFile {
        written: Vec<u8>,
        calls: u32,
        code: i32,
    }

    impl Write for FlakyFile {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.calls += 1;
            if self.calls.is_multiple_of(2) {
                return Err(io::Error::from_raw_os_error(self.code));
            }
            let n = bytes.len().min(3);
            self.written.extend(&bytes[..n]);
            Ok(n)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_repeated_write_neither_loses_nor_repeats_a_byte_and_reports_one_error() {
        let mut file = FlakyFile { written: Vec::new(), calls: 0, code: libc::ENOSPC };
        let mut errors = Vec::new();
        let retries = WriteRetrySwitch::default();
        write_persistently(&mut file, b"hello world", &retries, |e| errors.push(e.raw_os_error()))
            .expect("written");
        assert_eq!((file.written.as_slice(), errors), (&b"hello world"[..], vec![Some(libc::ENOSPC)]));
        let mut file = FlakyFile { written: Vec::new(), calls: 0, code: libc::EBADF };
        let lasting = write_persistently(&mut file, b"hello", &retries, |_| ());
        assert_eq!(lasting.expect_err("a lasting error ends the writes").0, 2);
        let mut file = FlakyFile { written: Vec::new(), calls: 0, code: libc::ENOSPC };
        retries.switch_off();
        let given_up = write_persistently(&mut file, b"hello", &retries, |_| ());
        assert_eq!(given_up.expect_err("no write is repeated").0, 2);
    }

    #[test]
    fn pauses_double_up_to_a_limit() {
        let mut pauses = RetryPauses::default();
        let taken: Vec<u128> = (0..8).map(|_| pauses.next_pause().as_millis()).collect();
        assert_eq!(taken, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
    }
}
