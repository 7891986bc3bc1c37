//! Ends a sandbox process as soon as a function in it that was started with [`limit_cpu_time`] has
//! used more CPU time than allowed.
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Interval between two checks in a sandbox process of whether a running function has exceeded its
/// CPU time limit.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A function that a thread of a sandbox process is running, with the CPU time that it may use.
struct LimitedWork {
    id: u64,
    /// The clock of the CPU time of the thread or of the process.
    clock: libc::clockid_t,
    /// The reading of the clock at which the limit is exceeded.
    deadline: Duration,
    limit: Duration,
}

/// The functions that threads of this process are running with a limit of CPU time
/// ([`limit_cpu_time`]).
static RUNNING_WORK: Mutex<Vec<LimitedWork>> = Mutex::new(Vec::new());

/// Runs `work` on this thread, and ends the sandbox process if the work needs more CPU time than
/// `limit`. Outside of a sandbox process, the limit has no effect.
pub fn limit_cpu_time<T>(limit: Duration, work: impl FnOnce() -> T) -> T {
    let _registered = WorkRegistration::new(find_thread_clock(), limit);
    work()
}

/// Runs `work`, which may use several threads, and ends the sandbox process if the process needs
/// more CPU time for the work than `limit`. Outside of a sandbox process, the limit has no effect.
pub fn limit_process_cpu_time<T>(limit: Duration, work: impl FnOnce() -> T) -> T {
    let _registered = WorkRegistration::new(libc::CLOCK_PROCESS_CPUTIME_ID, limit);
    work()
}

/// Guard that removes a function from [`RUNNING_WORK`], the list of functions with a CPU time
/// limit, when the function ends or panics.
struct WorkRegistration(u64);

impl WorkRegistration {
    /// Adds the function that this thread is about to run to the list [`RUNNING_WORK`], with
    /// `limit` as the function's limit of CPU time, which `clock` counts.
    fn new(clock: libc::clockid_t, limit: Duration) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let work = LimitedWork { id, clock, deadline: read_clock(clock) + limit, limit };
        RUNNING_WORK.lock().unwrap_or_else(PoisonError::into_inner).push(work);
        WorkRegistration(id)
    }
}

impl Drop for WorkRegistration {
    fn drop(&mut self) {
        let mut running = RUNNING_WORK.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = running.iter().position(|work| work.id == self.0) {
            running.swap_remove(at);
        }
    }
}

/// Waits until a function with a CPU time limit exceeds the limit in any thread of this process,
/// and then calls `report` with that limit. `report` must end the process.
pub(crate) fn watch_cpu_time(report: impl Fn(Duration) -> std::convert::Infallible) {
    loop {
        thread::sleep(CHECK_INTERVAL);
        let running = RUNNING_WORK.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(work) = running.iter().find(|work| read_clock(work.clock) > work.deadline) {
            report(work.limit);
        }
    }
}

/// Returns the id of the POSIX clock that counts the CPU time of the calling thread. Other threads
/// can read this clock, too.
fn find_thread_clock() -> libc::clockid_t {
    let mut clock = libc::CLOCK_THREAD_CPUTIME_ID;
    // SAFETY: the thread is this thread, and `clock` is valid for the write. After a failure
    // `clock` is unchanged.
    _ = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut clock) };
    clock
}

/// Returns the CPU time that a thread or this process has used so far, read from `clock`, its POSIX
/// clock. Returns zero if the thread of the clock has ended.
fn read_clock(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the write. After a failure `time` is unchanged.
    _ = unsafe { libc::clock_gettime(clock, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
