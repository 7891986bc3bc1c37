//! The communication thread: collectives in the order they were asked for, while the caller computes.
//!
//! Every rank submits the same collectives in the same order; one thread and one queue keep that order. On a GPU the thread has a
//! stream of its own: a collective waits there for what the caller had asked for before, and what the caller asks for after
//! waiting for a ticket waits for the collective.
use comm::{Comm, CommError, Result};
use device::{
    Ops,
    storage::{Event, said},
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
    mpsc,
};
use std::{thread::JoinHandle, time::Instant};

/// Collectives that may wait at once; submitting more blocks the caller.
const QUEUE_LIMIT: usize = 64;

type Job = Box<dyn FnOnce(&dyn Comm) + Send>;

/// Submits collectives to the communication thread. With one rank everything runs at once on the caller's thread.
pub struct Queue {
    comm: Arc<dyn Comm>,
    ops: Arc<dyn Ops>,
    waits: Arc<Waits>,
    jobs: Option<mpsc::SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// The result of a submitted collective, once it is there.
pub struct Ticket<T> {
    result: mpsc::Receiver<Result<(T, Event)>>,
    /// None where it ran at once.
    waits: Option<Arc<Waits>>,
}

impl<T> Ticket<T> {
    /// Waits for it. On a GPU it may not have happened yet: what this thread asks for from now on comes after it.
    pub fn wait(self) -> Result<T> {
        let ended = |_| Err(CommError::Io("the communication thread ended".into()));
        let began = Instant::now();
        let (result, done) = self.result.recv().unwrap_or_else(ended)?;
        self.waits.iter().for_each(|waits| waits.count(began, &done));
        Ok(result)
    }
}

/// How long whoever computes had to wait for collectives.
struct Waits {
    ops: Arc<dyn Ops>,
    /// Where ops are done on return; elsewhere the backend counts.
    host_nanoseconds: AtomicU64,
}

impl Waits {
    fn count(&self, began: Instant, done: &Event) {
        self.ops.follow_timed(done);
        if self.ops.is_host() {
            self.host_nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Relaxed);
        }
    }
}

impl Queue {
    /// Seconds since this was asked last in which nothing could be computed for waiting for collectives: those that are not
    /// hidden behind computation.
    pub fn exposed(&self) -> f64 {
        self.waits.host_nanoseconds.swap(0, Relaxed) as f64 / 1e9 + self.ops.stood_still()
    }

    /// Starts the thread (none for a single rank).
    pub fn new(comm: Arc<dyn Comm>, ops: Arc<dyn Ops>) -> std::io::Result<Self> {
        let waits = Arc::new(Waits { ops: ops.clone(), host_nanoseconds: AtomicU64::new(0) });
        if comm.world() == 1 {
            return Ok(Queue { comm, ops, waits, jobs: None, thread: None });
        }
        let (jobs, todo) = mpsc::sync_channel::<Job>(QUEUE_LIMIT);
        let (there, streams) = (comm.clone(), ops.clone());
        let work = move || {
            let comm = there.as_ref();
            // A stream ends when its work is done: peers learn of a failure before that.
            let all = || {
                streams.in_own_stream(&mut || {
                    todo.iter().all(|job| survives(comm, || job(comm)));
                });
            };
            survives(comm, all);
        };
        let thread = std::thread::Builder::new().name("comm".into()).spawn(work)?;
        Ok(Queue { comm, ops, waits, jobs: Some(jobs), thread: Some(thread) })
    }

    /// The collectives themselves, for what is callable from any thread (rank, world, abort).
    pub fn comm(&self) -> &Arc<dyn Comm> {
        &self.comm
    }

    /// Runs `f` after everything submitted before, and everything that this thread asked for before.
    pub fn submit<T: Send + 'static>(
        &self,
        f: impl FnOnce(&dyn Comm) -> Result<T> + Send + 'static,
    ) -> Ticket<T> {
        let (done, result) = mpsc::sync_channel(1);
        // One thread is in order with itself.
        let mark = |ops: &dyn Ops, two: bool| if two { ops.mark() } else { Event::default() };
        let (ops, two) = (self.ops.clone(), self.jobs.is_some());
        let before = mark(ops.as_ref(), two);
        let job: Job = Box::new(move |comm| {
            let all = || {
                before.follow();
                let result = f(comm)?;
                Ok((result, mark(ops.as_ref(), two)))
            };
            // The caller may have dropped its ticket after an error elsewhere.
            let panic = match catch_unwind(AssertUnwindSafe(all)) {
                Ok(result) => return drop(done.send(result)),
                Err(panic) => panic,
            };
            drop(done.send(Err(CommError::Io(said(panic.as_ref())))));
            resume_unwind(panic);
        });
        match &self.jobs {
            // A send fails only when the thread is gone; then the ticket says so.
            Some(jobs) => drop(jobs.send(job)),
            None => job(self.comm.as_ref()),
        }
        Ticket { result, waits: two.then(|| self.waits.clone()) }
    }

    /// Runs `f` after everything submitted before and waits for it.
    pub fn run<T: Send + 'static>(
        &self,
        f: impl FnOnce(&dyn Comm) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.submit(f).wait()
    }
}

/// Runs `f`. When it panics the caller knows why; its peers wait for this rank.
fn survives(comm: &dyn Comm, f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).map_err(|panic| comm.abort(&said(panic.as_ref()))).is_ok()
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(t) = self.thread.take() {
            // A panic in a job has already reached the caller as a dropped ticket.
            let _ = t.join();
        }
    }
}
