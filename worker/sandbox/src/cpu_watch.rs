//! [`limit_cpu_time`]: ends a sandbox process if one piece of work on one of its threads needs too
//! much CPU time.
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Interval at which a sandbox process checks whether a piece of work has exceeded its limit of CPU
/// time.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A piece of work that runs on one thread of a sandbox process, and the CPU time that it may use.
struct LimitedWork {
    id: u64,
    /// The clock of the thread's CPU time.
    clock: libc::clockid_t,
    /// The reading of the clock at which the limit is exceeded.
    deadline: Duration,
    limit: Duration,
}

/// All pieces of work with a limit of CPU time that are running in this process.
static RUNNING_WORK: Mutex<Vec<LimitedWork>> = Mutex::new(Vec::new());

/// Runs `work` on this thread, and ends the sandbox process if the work needs more CPU time than
/// `limit`. Outside of a sandbox process, the limit has no effect.
pub fn limit_cpu_time<T>(limit: Duration, work: impl FnOnce() -> T) -> T {
    let _registered = WorkRegistration::new(limit);
    work()
}

/// Registration of a piece of work in [`RUNNING_WORK`], the list of work with a limit of CPU time,
/// which ends when this object is dropped, also after a panic.
struct WorkRegistration(u64);

impl WorkRegistration {
    /// Adds the work that begins now on this thread to [`RUNNING_WORK`], the list of work with a
    /// limit of CPU time; `limit` is its limit.
    fn new(limit: Duration) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let clock = find_thread_clock();
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

/// Blocks until a thread of this process exceeds the limit of CPU time of its piece of work, and
/// then calls `report` with the limit. `report` must end the process.
pub(crate) fn watch_cpu_time(report: impl Fn(Duration) -> std::convert::Infallible) {
    loop {
        thread::sleep(CHECK_INTERVAL);
        let running = RUNNING_WORK.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(work) = running.iter().find(|work| read_clock(work.clock) > work.deadline) {
            report(work.limit);
        }
    }
}

/// Returns the id of the clock that measures the CPU time of the calling thread.
fn find_thread_clock() -> libc::clockid_t {
    let mut clock = libc::CLOCK_THREAD_CPUTIME_ID;
    // SAFETY: the thread is this thread, and `clock` is valid for the write. After a failure
    // `clock` is unchanged.
    _ = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut clock) };
    clock
}

/// Returns the CPU time that a thread has used, which its clock `clock` measures. Returns zero if
/// the thread of the clock has ended.
fn read_clock(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the write. After a failure `time` is unchanged.
    _ = unsafe { libc::clock_gettime(clock, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
