//! [`ConnectionThreadPool`]: a thread pool that sets up and serves SSH connections.
use super::connect::THREAD_STACK_BYTES;
use std::{
    collections::VecDeque,
    io,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

/// A blocking task for a thread pool, such as setting up and serving one SSH connection.
pub(super) trait ThreadTask: Send + 'static {
    /// Performs the part of the task that must happen in queue order, such as choosing an agent's
    /// place in the tree of agents, just before the task runs. Must not block.
    fn prepare(&mut self);

    /// Executes the task, which may block, on a thread of the pool.
    fn run(self);
}

/// A pool of threads that execute blocking tasks in the order of their submission.
#[derive(Debug)]
pub(super) struct ConnectionThreadPool<T> {
    /// The largest number of threads, without those in
    /// [`ConnectionThreadPool::run_without_thread_limit`].
    limit: usize,
    state: Mutex<ThreadPoolState<T>>,
}

/// The waiting tasks of a thread pool, and the number of its threads.
#[derive(Debug)]
struct ThreadPoolState<T> {
    /// The tasks that wait for a thread.
    waiting: VecDeque<T>,
    /// The number of threads, and how many of them are in
    /// [`ConnectionThreadPool::run_without_thread_limit`].
    threads: usize,
    long: usize,
}

impl<T: ThreadTask> ConnectionThreadPool<T> {
    /// Creates a thread pool that will start at most `limit` threads, as soon as there are tasks.
    pub(super) fn new(limit: usize) -> Self {
        let state = ThreadPoolState { waiting: VecDeque::new(), threads: 0, long: 0 };
        ConnectionThreadPool { limit, state: Mutex::new(state) }
    }

    /// Locks the mutex around the pool's waiting tasks and thread counts, even if a task has
    /// panicked.
    fn lock_state(&self) -> MutexGuard<'_, ThreadPoolState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a task to the queue of the pool, and starts another thread if the pool may have more
    /// threads. Fails if there is no thread, and none can be started.
    pub(super) fn submit(self: &Arc<Self>, task: T) -> io::Result<()> {
        let mut state = self.lock_state();
        state.waiting.push_back(task);
        let has_threads = state.threads > state.long;
        if state.threads - state.long < self.limit
            && let Err(error) = self.spawn_thread(&mut state)
            && !has_threads
        {
            state.waiting.pop_back();
            return Err(error);
        }
        Ok(())
    }

    /// Calls the function `run` on this thread, which meanwhile does not count toward the thread
    /// limit of the pool, because `run` may last long.
    pub(super) fn run_without_thread_limit<R>(self: &Arc<Self>, run: impl FnOnce() -> R) -> R {
        let mut state = self.lock_state();
        state.long += 1;
        if !state.waiting.is_empty() {
            // An error leaves the tasks to the other threads.
            _ = self.spawn_thread(&mut state);
        }
        drop(state);
        let result = run();
        self.lock_state().long -= 1;
        result
    }

    /// Starts another thread, which executes the waiting tasks of the pool.
    fn spawn_thread(self: &Arc<Self>, state: &mut ThreadPoolState<T>) -> io::Result<()> {
        let threads = self.clone();
        let run = move || {
            while let Some(task) = threads.take_next_task() {
                // A task that panics drops what it owns, which ends the connection.
                _ = panic::catch_unwind(AssertUnwindSafe(|| task.run()));
            }
        };
        thread::Builder::new().name("ssh".into()).stack_size(THREAD_STACK_BYTES).spawn(run)?;
        state.threads += 1;
        Ok(())
    }

    /// Removes the task that has waited longest from the queue of the pool, and prepares it for
    /// execution. Returns `None` if the thread is to end.
    fn take_next_task(&self) -> Option<T> {
        let mut state = self.lock_state();
        let is_surplus = state.threads - state.long > self.limit;
        let task = if is_surplus { None } else { state.waiting.pop_front() };
        match task {
            Some(mut task) => {
                task.prepare();
                Some(task)
            }
            None => {
                state.threads -= 1;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A task that reports its number, waits for a signal, and may wait for another one as a long
    /// part.
    struct TestTask {
        number: usize,
        prepared: mpsc::Sender<usize>,
        started: mpsc::Sender<usize>,
        wait: mpsc::Receiver<()>,
        threads: Arc<ConnectionThreadPool<TestTask>>,
    }

    impl ThreadTask for TestTask {
        fn prepare(&mut self) {
            self.prepared.send(self.number).expect("the test runs");
        }

        fn run(self) {
            self.started.send(self.number).expect("the test runs");
            match self.number {
                0 => self.threads.run_without_thread_limit(|| _ = self.wait.recv()),
                1 => panic!("a panic for the test"),
                _ => _ = self.wait.recv(),
            }
        }
    }

    #[test]
    fn tasks_wait_for_a_thread_in_their_order_and_long_parts_take_none() {
        let threads = Arc::new(ConnectionThreadPool::new(2));
        let ((prepared, order), (started, numbers)) = (mpsc::channel(), mpsc::channel());
        let mut signals: Vec<mpsc::Sender<()>> = (0..6)
            .map(|number| {
                let (signal, wait) = mpsc::channel();
                let (prepared, started) = (prepared.clone(), started.clone());
                threads
                    .submit(TestTask { number, prepared, started, wait, threads: threads.clone() })
                    .expect("a thread");
                signal
            })
            .collect();
        // The long task 0 and the panic of task 1 leave both threads to the tasks 2 and 3.
        let mut first: Vec<usize> = numbers.iter().take(4).collect();
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2, 3]);
        assert!(numbers.try_recv().is_err(), "the others wait");
        signals.drain(2..4);
        let mut rest: Vec<usize> = numbers.iter().take(2).collect();
        rest.sort_unstable();
        assert_eq!(rest, [4, 5]);
        assert_eq!(order.iter().take(6).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        drop(signals);
        while threads.lock_state().threads > 0 {
            thread::yield_now();
        }
        assert_eq!(threads.lock_state().long, 0);
    }
}
