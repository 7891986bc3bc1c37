//! [`CollectiveQueue`]: runs collectives on a separate thread, in the order of their submission,
//! while the caller computes.
//!
//! Every rank submits the same collectives in the same order. One thread and one queue keep that
//! order. On a GPU the thread has a separate stream. On that stream, a collective waits for the
//! caller's earlier work. The caller's work after [`PendingCollective::wait`] waits for the
//! collective.
use comm::{Comm, CommError, Result};
use device::{
    Ops,
    storage::{Event, extract_panic_message},
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
    mpsc,
};
use std::{thread::JoinHandle, time::Instant};

/// The largest number of collectives that may wait in the queue. Submitting another one blocks the
/// caller.
const QUEUE_LIMIT: usize = 64;

/// A closure that performs one collective when the thread of the queue calls it with the
/// communicator as its argument.
type CollectiveJob = Box<dyn FnOnce(&dyn Comm) + Send>;

/// A queue of collectives, which a separate thread runs in the order of their submission. With one
/// rank, collectives run on the caller's thread.
pub struct CollectiveQueue {
    comm: Arc<dyn Comm>,
    ops: Arc<dyn Ops>,
    waits: Arc<ExposedWaitTimes>,
    jobs: Option<mpsc::SyncSender<CollectiveJob>>,
    thread: Option<JoinHandle<()>>,
}

/// A collective that was submitted to the queue and whose result has not been taken yet.
pub struct PendingCollective<T> {
    result: mpsc::Receiver<Result<(T, Event)>>,
    /// Counts the time for which [`PendingCollective::wait`] delays computation; `None` if the
    /// collective ran on the caller's thread.
    waits: Option<Arc<ExposedWaitTimes>>,
}

impl<T> PendingCollective<T> {
    /// Blocks until the submitted collective's result is available. On a GPU the collective may
    /// still be running. Work that this thread submits afterwards waits for the collective.
    pub fn wait(self) -> Result<T> {
        let ended = |_| Err(CommError::ThreadEnded { message: None });
        let began = Instant::now();
        let (result, done) = self.result.recv().unwrap_or_else(ended)?;
        self.waits.iter().for_each(|waits| waits.wait_and_count_time(began, &done));
        Ok(result)
    }
}

/// The total time for which computations of this rank have waited for collectives (exposed
/// communication), and the total run time of the collectives.
struct ExposedWaitTimes {
    ops: Arc<dyn Ops>,
    /// The counted time in nanoseconds if operations are synchronous. Otherwise the backend counts
    /// the time.
    host_nanoseconds: AtomicU64,
    /// The time in nanoseconds for which collectives ran on the communication thread.
    collective_nanoseconds: AtomicU64,
}

impl ExposedWaitTimes {
    /// Makes this thread's later computations wait until a collective has completed (event `done`),
    /// and adds the waiting time to the total of this rank. If the backend computes synchronously,
    /// adds the time since `began` to the counted waiting time.
    fn wait_and_count_time(&self, began: Instant, done: &Event) {
        self.ops.make_stream_wait_timed(done);
        if self.ops.is_host() {
            self.host_nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Relaxed);
        }
    }
}

impl CollectiveQueue {
    /// Returns for how many seconds computation has waited for collectives since the previous call,
    /// and resets the count.
    pub fn take_exposed_seconds(&self) -> f64 {
        self.waits.host_nanoseconds.swap(0, Relaxed) as f64 / 1e9 + self.ops.take_stall_seconds()
    }

    /// Returns for how many seconds collectives have run since the previous call, and resets the
    /// count. On a GPU, this is only the time in which the host submitted them.
    pub fn take_collective_seconds(&self) -> f64 {
        self.waits.collective_nanoseconds.swap(0, Relaxed) as f64 / 1e9
    }

    /// Creates the queue of collectives, and starts the thread that runs them. With a single rank,
    /// no thread is started.
    pub fn new(comm: Arc<dyn Comm>, ops: Arc<dyn Ops>) -> std::io::Result<Self> {
        let waits = Arc::new(ExposedWaitTimes {
            ops: ops.clone(),
            host_nanoseconds: AtomicU64::new(0),
            collective_nanoseconds: AtomicU64::new(0),
        });
        if comm.world_size() == 1 {
            return Ok(CollectiveQueue { comm, ops, waits, jobs: None, thread: None });
        }
        let (jobs, todo) = mpsc::sync_channel::<CollectiveJob>(QUEUE_LIMIT);
        let (thread_comm, streams) = (comm.clone(), ops.clone());
        let work = move || {
            let comm = thread_comm.as_ref();
            // The stream is synchronized when the closure returns; peers must be aborted before
            // that.
            let run_jobs = || {
                streams.with_separate_stream(&mut || {
                    todo.iter().all(|job| run_or_abort_peers(comm, || job(comm)));
                });
            };
            run_or_abort_peers(comm, run_jobs);
        };
        let thread = std::thread::Builder::new().name("comm".into()).spawn(work)?;
        Ok(CollectiveQueue { comm, ops, waits, jobs: Some(jobs), thread: Some(thread) })
    }

    /// Returns the communicator, which any thread may use outside of the queue for calls that are
    /// not collectives, such as asking for the world size.
    pub fn comm(&self) -> &Arc<dyn Comm> {
        &self.comm
    }

    /// Appends the collective `f` to the queue, which runs it after all earlier collectives and
    /// after the computations that this thread has enqueued so far. Blocks only if the queue is
    /// full.
    pub fn submit<T: Send + 'static>(
        &self,
        f: impl FnOnce(&dyn Comm) -> Result<T> + Send + 'static,
    ) -> PendingCollective<T> {
        let (done, result) = mpsc::sync_channel(1);
        // without a communication thread no event is needed
        let record =
            |ops: &dyn Ops, has_thread: bool| if has_thread { ops.record_event() } else { Event::default() };
        let (ops, has_thread) = (self.ops.clone(), self.jobs.is_some());
        let before = record(ops.as_ref(), has_thread);
        let counts = self.waits.clone();
        let job: CollectiveJob = Box::new(move |comm| {
            let run = || {
                before.make_stream_wait();
                ops.check_status()?; // invalid data must not be sent
                let began = Instant::now();
                let result = f(comm)?;
                counts.collective_nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Relaxed);
                let after = record(ops.as_ref(), has_thread);
                ops.check_status()?;
                Ok((result, after))
            };
            // the caller may have dropped its `PendingCollective` after another error
            let panic = match catch_unwind(AssertUnwindSafe(run)) {
                Ok(result) => {
                    if let Err(error @ CommError::Device(_)) = &result {
                        comm.abort(&error.to_string()); // peers wait for this rank
                    }
                    return drop(done.send(result));
                }
                Err(panic) => panic,
            };
            let message = Some(extract_panic_message(panic.as_ref()));
            drop(done.send(Err(CommError::ThreadEnded { message })));
            resume_unwind(panic);
        });
        match &self.jobs {
            // sending fails only when the thread has ended; `wait` then returns the error
            Some(jobs) => drop(jobs.send(job)),
            None => job(self.comm.as_ref()),
        }
        PendingCollective { result, waits: has_thread.then(|| self.waits.clone()) }
    }

    /// Queues the collective `f`, which runs on the thread of the queue, and blocks until its
    /// result is available.
    pub fn run_and_wait<T: Send + 'static>(
        &self,
        f: impl FnOnce(&dyn Comm) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.submit(f).wait()
    }
}

/// Runs the collective `f` and, if it panics, aborts the collectives of all ranks so that the other
/// ranks do not wait forever. Returns whether `f` completed.
fn run_or_abort_peers(comm: &dyn Comm, f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f))
        .map_err(|panic| comm.abort(&extract_panic_message(panic.as_ref())))
        .is_ok()
}

impl Drop for CollectiveQueue {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(t) = self.thread.take() {
            // the caller has already received the error of a job that panicked
            let _ = t.join();
        }
    }
}
