//! Runs the tasks of an op on the threads of the CPU backend ([`ThreadPool`]).
//!
//! A task set is a function and the number of tasks for which the function is called. The calling
//! thread and the helpers run tasks. A helper that wakes up after the last task has begun finds the
//! task set closed, and the caller does not wait for this helper. A short task set on a busy
//! machine therefore takes no longer than on one thread.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// Number of times that a thread of the pool checks for tasks, or for their completion, in a busy
/// loop before it sleeps. The polling takes some 10 µs.
const SPIN_ITERATIONS: usize = 1000;

/// The helper threads with which the CPU backend computes ops in parallel. They run the tasks of an
/// op together with the calling thread.
pub(crate) struct ThreadPool {
    shared: Arc<PoolState>,
    helpers: Vec<JoinHandle<()>>,
    /// Locked by the thread whose set of tasks the helpers run. Other threads run their task sets
    /// alone.
    task_set_turn: Mutex<()>,
}

/// The state that the calling threads and the helper threads of a thread pool share.
struct PoolState {
    slot: Mutex<TaskSetSlot>,
    /// Number of task sets that callers have posted so far. It changes only while `slot` is locked.
    task_set_count: AtomicU64,
    /// Number of helpers that run tasks of the task set. It changes only while `slot` is locked.
    active_helpers: AtomicUsize,
    /// Signals a new task set or the end of the pool.
    task_set_posted: Condvar,
    /// Signals that the last helper has left the task set.
    helpers_done: Condvar,
}

/// State of a thread pool that a mutex protects: the current set of tasks, the number of sleeping
/// helper threads, and the first panic.
#[derive(Default)]
struct TaskSetSlot {
    /// The task set that helpers may join.
    task_set: Option<TaskSet>,
    shutting_down: bool,
    /// Number of helpers that wait for [`PoolState::task_set_posted`].
    sleeping_helpers: usize,
    /// The first panic of a task on a helper.
    panic: Option<Box<dyn Any + Send>>,
}

/// The tasks of one op on a thread pool: a function, the number of calls, and a counter of the
/// calls that threads have begun. Both pointers are valid while the task set is in the slot or a
/// helper is active.
#[derive(Clone, Copy)]
struct TaskSet {
    run: *const (dyn Fn(usize) + Sync),
    /// Address of the counter whose value is the index of the first task that no thread has begun.
    next: *const AtomicUsize,
    /// Number of tasks in the task set.
    tasks: usize,
}

// SAFETY: the pointers are to Sync values, and are valid while a thread uses the task set.
unsafe impl Send for TaskSet {}

impl ThreadPool {
    /// Creates a pool of `threads` threads: the caller's, and `threads − 1` helper threads that are
    /// started now. Panics if the system cannot start another thread.
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(PoolState {
            slot: Mutex::default(),
            task_set_count: AtomicU64::new(0),
            active_helpers: AtomicUsize::new(0),
            task_set_posted: Condvar::new(),
            helpers_done: Condvar::new(),
        });
        let helper = |i: usize| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("cpu-{i}"));
            thread.spawn(move || shared.run_helper()).expect("the system can start another thread")
        };
        let helpers = (1..threads).map(helper).collect();
        ThreadPool { shared, helpers, task_set_turn: Mutex::new(()) }
    }

    /// Returns the number of threads that run tasks, including the caller's.
    pub(crate) fn thread_count(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `run(i)` once for each `i` in `0..tasks`, on any thread and in any order. Returns when
    /// all calls have returned. Panics if a call panicked.
    ///
    /// A call from within a task, or while the helpers run another caller's tasks, runs all its
    /// tasks on the calling thread.
    pub(crate) fn run(&self, tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        let turn = match self.task_set_turn.try_lock() {
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
        let task_set = TaskSet { run, next: &next, tasks };
        self.shared.post_task_set(task_set);
        let close_on_drop = CloseTaskSetOnDrop(&self.shared);
        task_set.run_tasks();
        drop(close_on_drop);
        let panic = self.shared.lock_task_set_slot().panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.lock_task_set_slot().shutting_down = true;
        self.shared.task_set_posted.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper catches the panics of its tasks, so joining it cannot fail.
            let _ = helper.join();
        }
    }
}

/// Guard that closes the pool's current set of tasks when dropped, and waits until no helper thread
/// uses the set any more.
struct CloseTaskSetOnDrop<'a>(&'a PoolState);

impl Drop for CloseTaskSetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close_task_set();
    }
}

impl TaskSet {
    /// Calls the task function for one task number after another on this thread, until the pool's
    /// threads have begun all tasks.
    fn run_tasks(&self) {
        // SAFETY: the pointers are valid while this thread takes part in the task set.
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

impl PoolState {
    /// Locks the mutex that protects the thread pool's current set of tasks.
    fn lock_task_set_slot(&self) -> MutexGuard<'_, TaskSetSlot> {
        // No thread panics while it holds the lock.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a task set (a function and its number of tasks) available to the helper threads.
    fn post_task_set(&self, task_set: TaskSet) {
        let mut slot = self.lock_task_set_slot();
        slot.task_set = Some(task_set);
        self.task_set_count.fetch_add(1, Ordering::Release);
        let sleeping = slot.sleeping_helpers;
        drop(slot);
        if sleeping > 0 {
            self.task_set_posted.notify_all();
        }
    }

    /// Closes the current set of tasks to further helper threads, and blocks until the helpers that
    /// work on the set are done.
    fn close_task_set(&self) {
        self.lock_task_set_slot().task_set = None;
        for _ in 0..SPIN_ITERATIONS {
            if self.active_helpers.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut slot = self.lock_task_set_slot();
        while self.active_helpers.load(Ordering::Acquire) > 0 {
            slot = self.helpers_done.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The main function of a helper thread: runs tasks of each task set that the pool gets, until
    /// the pool is dropped.
    fn run_helper(&self) {
        let mut last_number = 0;
        while let Some((task_set_number, task_set)) = self.wait_for_task_set(last_number) {
            last_number = task_set_number;
            let Some(task_set) = task_set else { continue };
            let outcome = catch_unwind(AssertUnwindSafe(|| task_set.run_tasks()));
            let mut slot = self.lock_task_set_slot();
            if let Err(panic) = outcome {
                slot.panic.get_or_insert(panic);
            }
            if self.active_helpers.fetch_sub(1, Ordering::Release) == 1 {
                self.helpers_done.notify_one();
            }
        }
    }

    /// Blocks a helper thread until the pool gets a set of tasks with a number above `last_number`,
    /// and registers the thread as a helper for this set. Returns the number of the new task set,
    /// and the task set itself if it is still open. Returns `None` if the pool ends.
    fn wait_for_task_set(&self, last_number: u64) -> Option<(u64, Option<TaskSet>)> {
        for _ in 0..SPIN_ITERATIONS {
            if self.task_set_count.load(Ordering::Acquire) != last_number {
                break;
            }
            std::hint::spin_loop();
        }
        let mut slot = self.lock_task_set_slot();
        while self.task_set_count.load(Ordering::Acquire) == last_number && !slot.shutting_down {
            slot.sleeping_helpers += 1;
            slot = self.task_set_posted.wait(slot).unwrap_or_else(PoisonError::into_inner);
            slot.sleeping_helpers -= 1;
        }
        if slot.shutting_down {
            return None;
        }
        if slot.task_set.is_some() {
            self.active_helpers.fetch_add(1, Ordering::Relaxed);
        }
        Some((self.task_set_count.load(Ordering::Acquire), slot.task_set))
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
    fn nested_tasks_run_on_the_calling_thread() {
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
