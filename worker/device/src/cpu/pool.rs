//! Threads of the CPU backend, and scratch memory that outlives a call.
//!
//! A job is a number of tasks and a function; the calling thread takes tasks like every other. A helper that wakes too
//! late finds the job closed and is not waited for, so short jobs on a busy machine cost no more than running alone.
use crate::{huge, mem::Buf};
use std::any::Any;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// Turns that an idle helper looks for a new job, or a caller for the last task's end, before it sleeps (some 10 µs).
const SPINS: usize = 1000;

/// A set of threads that run tasks together with the caller.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Held by the caller whose job it is; who doesn't get it runs alone.
    turn: Mutex<()>,
}

struct Shared {
    slot: Mutex<Slot>,
    /// Number of jobs so far; changed under `slot`'s lock.
    epoch: AtomicU64,
    /// Helpers inside the job; changed under `slot`'s lock.
    active: AtomicUsize,
    /// A job came, or the pool ends.
    wake: Condvar,
    /// The last helper left the job.
    left: Condvar,
}

#[derive(Default)]
struct Slot {
    job: Option<Job>,
    quit: bool,
    sleeping: usize,
    panic: Option<Box<dyn Any + Send>>,
}

/// What helpers run; both pointers are valid while the job is in the slot or a helper is active.
#[derive(Clone, Copy)]
struct Job {
    run: *const (dyn Fn(usize) + Sync),
    next: *const AtomicUsize,
    tasks: usize,
}

// SAFETY: the pointers are to Sync things, and valid as said above.
unsafe impl Send for Job {}

impl Pool {
    /// `threads` in all, the caller's included.
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            slot: Mutex::default(),
            epoch: AtomicU64::new(0),
            active: AtomicUsize::new(0),
            wake: Condvar::new(),
            left: Condvar::new(),
        });
        let helper = |i: usize| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("cpu-{i}"));
            thread.spawn(move || shared.help()).expect("the system starts a thread")
        };
        let helpers = (1..threads).map(helper).collect();
        Pool { shared, helpers, turn: Mutex::new(()) }
    }

    /// Threads in all, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `run(i)` once for each `i` in `0..tasks`, on any thread, in any order; returns when all are done.
    pub(crate) fn run(&self, tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        let turn = match self.turn.try_lock() {
            _ if tasks < 2 || self.helpers.is_empty() => None,
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if turn.is_none() {
            return (0..tasks).for_each(run);
        }
        let next = AtomicUsize::new(0);
        // SAFETY: only the lifetime is changed; `Closing` below waits for the last helper before `run` and `next` end.
        let run =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(run) };
        let job = Job { run, next: &next, tasks };
        self.shared.open(job);
        let closing = Closing(&self.shared);
        job.work();
        drop(closing);
        let panic = self.shared.lock().panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().quit = true;
        self.shared.wake.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper catches the panics of tasks, so it has none of its own to report.
            let _ = helper.join();
        }
    }
}

/// Closes the job when the caller is done with it, also when it panics.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Job {
    fn work(&self) {
        // SAFETY: valid while this thread is inside the job.
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Slot> {
        // Nothing panics while it holds the lock.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, job: Job) {
        let mut slot = self.lock();
        slot.job = Some(job);
        self.epoch.fetch_add(1, Ordering::Release);
        let sleeping = slot.sleeping;
        drop(slot);
        if sleeping > 0 {
            self.wake.notify_all();
        }
    }

    /// No helper enters any more; waits for those inside.
    fn close(&self) {
        self.lock().job = None;
        for _ in 0..SPINS {
            if self.active.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut slot = self.lock();
        while self.active.load(Ordering::Acquire) > 0 {
            slot = self.left.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The life of a helper.
    fn help(&self) {
        let mut seen = 0;
        while let Some((epoch, job)) = self.await_job(seen) {
            seen = epoch;
            let Some(job) = job else { continue };
            let outcome = catch_unwind(AssertUnwindSafe(|| job.work()));
            let mut slot = self.lock();
            if let Err(panic) = outcome {
                slot.panic.get_or_insert(panic);
            }
            if self.active.fetch_sub(1, Ordering::Release) == 1 {
                self.left.notify_one();
            }
        }
    }

    /// Enters the next job, if it is still open. None: the pool ends.
    fn await_job(&self, seen: u64) -> Option<(u64, Option<Job>)> {
        for _ in 0..SPINS {
            if self.epoch.load(Ordering::Acquire) != seen {
                break;
            }
            std::hint::spin_loop();
        }
        let mut slot = self.lock();
        while self.epoch.load(Ordering::Acquire) == seen && !slot.quit {
            slot.sleeping += 1;
            slot = self.wake.wait(slot).unwrap_or_else(PoisonError::into_inner);
            slot.sleeping -= 1;
        }
        if slot.quit {
            return None;
        }
        if slot.job.is_some() {
            self.active.fetch_add(1, Ordering::Relaxed);
        }
        Some((self.epoch.load(Ordering::Acquire), slot.job))
    }
}

/// A slice whose disjoint parts are written by different tasks.
pub(crate) struct Parts<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: as &mut [T], given that parts are disjoint.
unsafe impl<T: Send> Sync for Parts<'_, T> {}
// SAFETY: as &mut [T].
unsafe impl<T: Send> Send for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(x: &'a mut [T]) -> Self {
        Parts { ptr: x.as_mut_ptr(), len: x.len(), life: PhantomData }
    }

    /// The elements of `r`. Panics when `r` is outside.
    /// # Safety
    /// No other part that is in use overlaps `r`.
    #[allow(clippy::mut_from_ref)] // disjointness is the caller's promise
    pub(crate) unsafe fn part(&self, r: Range<usize>) -> &mut [T] {
        assert!(r.start <= r.end && r.end <= self.len, "part {r:?} outside 0..{}", self.len);
        // SAFETY: inside the slice, and exclusive as promised.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r.start), r.len()) }
    }

    /// The first element's address.
    pub(crate) fn as_mut_ptr(&self) -> *mut T {
        self.ptr
    }
}

/// Elements from which scratch fills huge pages.
const HUGE: usize = 64 << 10;

/// Buffers that wait for their next use.
#[derive(Default)]
pub(crate) struct Scratch {
    free: Mutex<Vec<Buf>>,
    bytes: AtomicUsize,
}

impl Scratch {
    /// At least `len` elements with any contents.
    pub(crate) fn take(&self, len: usize) -> Borrowed<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = (0..free.len()).filter(|&i| free[i].len() >= len).min_by_key(|&i| free[i].len());
        // When none is large enough the largest gives way, so that the stock doesn't grow with every new size.
        let chosen = fits.or_else(|| (0..free.len()).max_by_key(|&i| free[i].len()));
        let held = chosen.map(|i| free.swap_remove(i));
        drop(free);
        let buf = match held {
            Some(buf) if buf.len() >= len => buf,
            smaller => {
                let dropped = smaller.map_or(0, |b| b.len() * 4);
                // Whole pages: sizes that differ little share a buffer, and panels that fill caches lie in huge ones.
                let len = len.next_multiple_of(if len < HUGE { 1024 } else { huge::HUGE_PAGE_BYTES / 4 });
                self.bytes.fetch_add(len * 4, Ordering::Relaxed);
                self.bytes.fetch_sub(dropped, Ordering::Relaxed);
                Buf::zeroed(len)
            }
        };
        Borrowed { buf: Some(buf), home: self }
    }

    /// Bytes held now, in use or waiting.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Scratch in use; goes home when dropped.
pub(crate) struct Borrowed<'a> {
    buf: Option<Buf>,
    home: &'a Scratch,
}

impl Deref for Borrowed<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        self.buf.as_ref().map_or(&[], |b| b.host())
    }
}

impl DerefMut for Borrowed<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.buf.as_mut().map_or(&mut [], |b| b.host_mut())
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        if let Some(buf) = self.buf.take() {
            self.home.free.lock().unwrap_or_else(PoisonError::into_inner).push(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in 1..=4 {
            let pool = Pool::new(threads);
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
    fn helpers_take_part() {
        let pool = Pool::new(2);
        let both = std::sync::Barrier::new(2);
        // Each of the two tasks waits for the other, so they must run on two threads.
        pool.run(2, &|_| {
            both.wait();
        });
    }

    #[test]
    fn a_job_inside_a_job_runs_alone() {
        let pool = Pool::new(2);
        let count = AtomicUsize::new(0);
        pool.run(3, &|_| {
            pool.run(5, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 15);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
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

    #[test]
    fn scratch_is_used_again() {
        let scratch = Scratch::default();
        let first = scratch.take(5000).as_ptr();
        assert_eq!(scratch.take(4000).as_ptr(), first);
        let bytes = scratch.bytes();
        drop(scratch.take(9000));
        assert_eq!(
            scratch.bytes(),
            9000usize.next_multiple_of(1024) * 4,
            "the larger took the smaller's place of {bytes}"
        );
    }
}
