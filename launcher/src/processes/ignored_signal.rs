//! Checks whether this process ignores a signal, as `nohup` makes a process do with SIGHUP.
use nix::sys::signal::Signal;

/// Returns whether this process currently ignores `signal`.
pub(crate) fn is_signal_ignored(signal: Signal) -> bool {
    // SAFETY: only queries the current action, and `action` is valid memory for the result.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal as i32, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}
