//! The communication thread: collectives in the order they were asked for, while the caller computes.
//!
//! Every rank submits the same collectives in the same order; one thread and one queue keep that order.
use comm::{Comm, CommError, Result};
use device::storage::said;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Collectives that may wait at once; submitting more blocks the caller.
const QUEUE_LIMIT: usize = 64;

type Job = Box<dyn FnOnce(&dyn Comm) + Send>;

/// Submits collectives to the communication thread. With one rank everything runs at once on the caller's thread.
pub struct Queue {
    comm: Arc<dyn Comm>,
    jobs: Option<mpsc::SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// The result of a submitted collective, once it is there.
pub struct Ticket<T>(mpsc::Receiver<Result<T>>);

impl<T> Ticket<T> {
    /// Waits for it.
    pub fn wait(self) -> Result<T> {
        self.0.recv().unwrap_or_else(|_| Err(CommError::Io("the communication thread ended".into())))
    }
}

impl Queue {
    /// Starts the thread (none for a single rank).
    pub fn new(comm: Arc<dyn Comm>) -> std::io::Result<Self> {
        if comm.world() == 1 {
            return Ok(Queue { comm, jobs: None, thread: None });
        }
        let (jobs, todo) = mpsc::sync_channel::<Job>(QUEUE_LIMIT);
        let on_thread = comm.clone();
        let thread = std::thread::Builder::new().name("comm".into()).spawn(move || {
            for job in todo {
                // The caller knows what failed; its peers wait for this rank.
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(on_thread.as_ref()))) {
                    on_thread.abort(&said(panic.as_ref()));
                    break;
                }
            }
        })?;
        Ok(Queue { comm, jobs: Some(jobs), thread: Some(thread) })
    }

    /// The collectives themselves, for what is callable from any thread (rank, world, abort).
    pub fn comm(&self) -> &Arc<dyn Comm> {
        &self.comm
    }

    /// Runs `f` after everything submitted before.
    pub fn submit<T: Send + 'static>(
        &self,
        f: impl FnOnce(&dyn Comm) -> Result<T> + Send + 'static,
    ) -> Ticket<T> {
        let (done, result) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |comm| {
            // The caller may have dropped its ticket after an error elsewhere.
            let panic = match catch_unwind(AssertUnwindSafe(|| f(comm))) {
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
        Ticket(result)
    }

    /// Runs `f` after everything submitted before and waits for it.
    pub fn run<T: Send + 'static>(
        &self,
        f: impl FnOnce(&dyn Comm) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.submit(f).wait()
    }
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
