//! Fault points: places in the code at which a test can kill the process with SIGKILL.
//!
//! [`pass_fault_point`] is called before and after every write, truncate, fsync, rename, mkdir and
//! unlink of this crate, and around the end of a copy in memory. Until [`arm_fault_points`] is
//! called, a call costs one relaxed atomic load.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// True if this process counts the fault points that it passes, which are places at which a test
/// can kill it.
static ARE_POINTS_ARMED: AtomicBool = AtomicBool::new(false);
/// The number of the fault point at which this process kills itself with SIGKILL, counted from 1 in
/// the order in which the process passes fault points.
static KILL_POINT_NUMBER: AtomicU64 = AtomicU64::new(0);
/// The name of the fault points among which this process counts to the one at which it kills
/// itself, or `None` to count all of them.
static KILL_POINT_NAME: Mutex<Option<String>> = Mutex::new(None);
/// The names of the fault points that this process has passed, which are places at which a test can
/// kill it, in order of time.
static PASSED_POINTS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Starts to count the fault points that this process passes, which are places in the code at which
/// a test can kill it. The fault point with the number `n` kills the process with SIGKILL. If `n`
/// is 0, points are only counted.
pub fn arm_fault_points(n: u64) {
    arm_points(None, n);
}

/// Makes this process kill itself with SIGKILL when it passes the `n`-th fault point that is named
/// `name`.
pub fn arm_named_fault_point(name: &str, n: u64) {
    arm_points(Some(name.to_owned()), n);
}

/// Starts to count the fault points with the name `name`, or all fault points, so that the process
/// kills itself at the `n`-th one.
fn arm_points(name: Option<String>, n: u64) {
    *KILL_POINT_NAME.lock().unwrap_or_else(PoisonError::into_inner) = name;
    KILL_POINT_NUMBER.store(n, Ordering::Relaxed);
    PASSED_POINTS.lock().unwrap_or_else(PoisonError::into_inner).clear();
    ARE_POINTS_ARMED.store(true, Ordering::Release);
}

/// Returns the number of fault points that this process has passed since the call of
/// [`arm_fault_points`], or 0 without such a call.
pub fn count_passed_points() -> u64 {
    PASSED_POINTS.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
}

/// Returns the names of the fault points that this process has passed since the call of
/// [`arm_fault_points`], in order of time.
pub fn list_passed_points() -> Vec<&'static str> {
    PASSED_POINTS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Marks a place in the code, a fault point, at which a test can let this process kill itself with
/// SIGKILL. Does nothing before a call of [`arm_fault_points`]. After such a call, records the
/// point, and kills the process if this call selected the number of the point. `name` is the
/// operation that follows or precedes the point.
#[inline]
pub fn pass_fault_point(name: &'static str) {
    if ARE_POINTS_ARMED.load(Ordering::Relaxed) {
        record_passed_point(name);
    }
}

#[cold]
/// Records that this process has passed the fault point `name`, and kills the process with SIGKILL
/// if a test has selected this point.
fn record_passed_point(name: &'static str) {
    let mut passed = PASSED_POINTS.lock().unwrap_or_else(PoisonError::into_inner);
    passed.push(name);
    let selected = KILL_POINT_NAME.lock().unwrap_or_else(PoisonError::into_inner);
    let is_selected = |point: &&&str| selected.as_deref().is_none_or(|name| **point == name);
    let number = passed.iter().filter(is_selected).count() as u64;
    if is_selected(&&name) && number == KILL_POINT_NUMBER.load(Ordering::Relaxed) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
    }
}

/// Runs `op` between two fault points named `name`, so that a test can kill the process directly
/// before or after `op`.
pub(crate) fn run_between_fault_points<T>(name: &'static str, op: impl FnOnce() -> T) -> T {
    pass_fault_point(name);
    let result = op();
    pass_fault_point(name);
    result
}
