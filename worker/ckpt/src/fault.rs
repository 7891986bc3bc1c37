//! Fault points, at which tests kill a save with SIGKILL.
//!
//! [`point`] is called before and after every write, truncate, fsync, rename, mkdir and unlink. It
//! costs one relaxed atomic load until [`arm`] is called.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

static ARMED: AtomicBool = AtomicBool::new(false);
static FATAL: AtomicU64 = AtomicU64::new(0);
static PASSED: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Starts counting points from 1. The `n`-th point kills this process with SIGKILL; `n` = 0 only
/// counts.
pub fn arm(n: u64) {
    FATAL.store(n, Ordering::Relaxed);
    PASSED.lock().unwrap_or_else(PoisonError::into_inner).clear();
    ARMED.store(true, Ordering::Release);
}

/// Number of points passed since [`arm`]; 0 when not armed.
pub fn passed() -> u64 {
    PASSED.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
}

/// Names of the points passed since [`arm`], in order.
pub fn names() -> Vec<&'static str> {
    PASSED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Passes a fault point; `name` is the operation at this point.
#[inline]
pub fn point(name: &'static str) {
    if ARMED.load(Ordering::Relaxed) {
        pass_point(name);
    }
}

#[cold]
fn pass_point(name: &'static str) {
    let mut passed = PASSED.lock().unwrap_or_else(PoisonError::into_inner);
    passed.push(name);
    if passed.len() as u64 == FATAL.load(Ordering::Relaxed) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
    }
}

/// Runs `op` between two fault points of the same name.
pub(crate) fn around<T>(name: &'static str, op: impl FnOnce() -> T) -> T {
    point(name);
    let result = op();
    point(name);
    result
}
