//! The threads of the CPU backend.
//!
//! A job is a function and a number of tasks. The calling thread runs tasks like the helpers. A
//! helper that wakes up after the last task has begun finds the job closed, and the caller does not
//! wait for it. A short job on a busy machine therefore takes no longer than on one thread.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// How often a helper polls for a new job, and a caller for the end of the last task, before it
/// blocks. The loop takes some 10 µs.
const SPIN_ITERATIONS: usize = 1000;

/// Helper threads that run the tasks of a job together with the calling thread.
pub(crate) struct ThreadPool {
    shared: Arc<PoolShared>,
    helpers: Vec<JoinHandle<()>>,
    /// Held by the caller whose job the helpers run. Other callers run their jobs alone.
    job_turn: Mutex<()>,
}

/// State that callers and helpers share.
struct PoolShared {
    slot: Mutex<JobSlot>,
    /// Number of jobs so far; changed while `slot` is locked.
    job_count: AtomicU64,
    /// Number of helpers that run tasks of the job; changed while `slot` is locked.
    active_helpers: AtomicUsize,
    /// Signals a new job or the end of the pool.
    job_posted: Condvar,
    /// Signals that the last helper has left the job.
    helpers_done: Condvar,
}

/// The job, if there is one, and what helpers report about it.
#[derive(Default)]
struct JobSlot {
    /// The job that helpers may join.
    job: Option<Job>,
    shutting_down: bool,
    /// Number of helpers that wait for [`PoolShared::job_posted`].
    sleeping_helpers: usize,
    /// The first panic of a task on a helper.
    panic: Option<Box<dyn Any + Send>>,
}

/// A job. Both pointers are valid while it is in the slot or a helper is active.
#[derive(Clone, Copy)]
struct Job {
    run: *const (dyn Fn(usize) + Sync),
    /// Index of the next task that no thread has begun.
    next: *const AtomicUsize,
    /// Number of tasks.
    tasks: usize,
}

// SAFETY: the pointers are to Sync values, and are valid while a thread uses the job.
unsafe impl Send for Job {}

impl ThreadPool {
    /// Starts `threads − 1` helpers.
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(PoolShared {
            slot: Mutex::default(),
            job_count: AtomicU64::new(0),
            active_helpers: AtomicUsize::new(0),
            job_posted: Condvar::new(),
            helpers_done: Condvar::new(),
        });
        let helper = |i: usize| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("cpu-{i}"));
            thread.spawn(move || shared.run_helper()).expect("the system can start another thread")
        };
        let helpers = (1..threads).map(helper).collect();
        ThreadPool { shared, helpers, job_turn: Mutex::new(()) }
    }

    /// Returns the number of threads, including the caller's.
    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `run(i)` once for each `i` in `0..tasks`, on any thread and in any order, and returns
    /// when all calls have returned. Panics if a call panicked.
    pub(crate) fn run(&self, tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        let turn = match self.job_turn.try_lock() {
            _ if tasks < 2 || self.helpers.is_empty() => None,
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if turn.is_none() {
            return (0..tasks).for_each(run);
        }
        let next = AtomicUsize::new(0);
        // SAFETY: only the lifetime is changed. `CloseJobOnDrop` waits for the last helper before
        // `run` and `next` are dropped.
        let run =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(run) };
        let job = Job { run, next: &next, tasks };
        self.shared.post_job(job);
        let close_job = CloseJobOnDrop(&self.shared);
        job.run_tasks();
        drop(close_job);
        let panic = self.shared.lock().panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.lock().shutting_down = true;
        self.shared.job_posted.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper catches the panics of its tasks, so joining it cannot fail.
            let _ = helper.join();
        }
    }
}

/// Closes the job when the caller has run its last task, also if a task panicked.
struct CloseJobOnDrop<'a>(&'a PoolShared);

impl Drop for CloseJobOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close_job();
    }
}

impl Job {
    /// Runs tasks until all have begun.
    fn run_tasks(&self) {
        // SAFETY: the pointers are valid while this thread takes part in the job.
        let (run, next) = unsafe { (&*self.run, &*self.next) };
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= self.tasks {
                return;
            }
            run(i);
        }
    }
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, JobSlot> {
        // No thread panics while it holds the lock.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a job available to the helpers.
    fn post_job(&self, job: Job) {
        let mut slot = self.lock();
        slot.job = Some(job);
        self.job_count.fetch_add(1, Ordering::Release);
        let sleeping = slot.sleeping_helpers;
        drop(slot);
        if sleeping > 0 {
            self.job_posted.notify_all();
        }
    }

    /// Lets no further helper join the job, and waits for the helpers that have joined.
    fn close_job(&self) {
        self.lock().job = None;
        for _ in 0..SPIN_ITERATIONS {
            if self.active_helpers.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut slot = self.lock();
        while self.active_helpers.load(Ordering::Acquire) > 0 {
            slot = self.helpers_done.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs jobs until the pool ends; the main function of a helper.
    fn run_helper(&self) {
        let mut last_job = 0;
        while let Some((job_number, job)) = self.wait_for_job(last_job) {
            last_job = job_number;
            let Some(job) = job else { continue };
            let outcome = catch_unwind(AssertUnwindSafe(|| job.run_tasks()));
            let mut slot = self.lock();
            if let Err(panic) = outcome {
                slot.panic.get_or_insert(panic);
            }
            if self.active_helpers.fetch_sub(1, Ordering::Release) == 1 {
                self.helpers_done.notify_one();
            }
        }
    }

    /// Waits for a job after number `last_job` and joins it. Returns its number, and the job if it
    /// is still open; `None` if the pool ends.
    fn wait_for_job(&self, last_job: u64) -> Option<(u64, Option<Job>)> {
        for _ in 0..SPIN_ITERATIONS {
            if self.job_count.load(Ordering::Acquire) != last_job {
                break;
            }
            std::hint::spin_loop();
        }
        let mut slot = self.lock();
        while self.job_count.load(Ordering::Acquire) == last_job && !slot.shutting_down {
            slot.sleeping_helpers += 1;
            slot = self.job_posted.wait(slot).unwrap_or_else(PoisonError::into_inner);
            slot.sleeping_helpers -= 1;
        }
        if slot.shutting_down {
            return None;
        }
        if slot.job.is_some() {
            self.active_helpers.fetch_add(1, Ordering::Relaxed);
        }
        Some((self.job_count.load(Ordering::Acquire), slot.job))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_runs_exactly_once() {
        for threads in 1..=4 {
            let pool = ThreadPool::new(threads);
            for tasks in [0, 1, 2, 3, 100] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn helpers_run_tasks() {
        let pool = ThreadPool::new(2);
        let barrier = std::sync::Barrier::new(2);
        // Each of the two tasks waits for the other, so they must run on two threads.
        pool.run(2, &|_| {
            barrier.wait();
        });
    }

    #[test]
    fn a_nested_job_runs_on_the_calling_thread() {
        let pool = ThreadPool::new(2);
        let count = AtomicUsize::new(0);
        pool.run(3, &|_| {
            pool.run(5, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 15);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_remains_usable() {
        let pool = ThreadPool::new(3);
        for _ in 0..20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(10, &|i| assert!(i != 7, "task seven"));
            }));
            assert!(outcome.is_err());
            let count = AtomicUsize::new(0);
            pool.run(10, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 10);
        }
    }
}
