//! Functions that a new worker or agent process calls between fork and exec, such as resetting its
//! signals.
use nix::{
    errno::Errno,
    sys::{prctl, signal::Signal},
    unistd::Pid,
};
use std::io;

/// Makes the kernel send SIGKILL to the calling process as soon as the thread of its parent process
/// that has forked it ends. Fails if the parent has ended already. Async-signal-safe.
pub(super) fn die_with_parent(parent: Pid) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    if Pid::parent() != parent {
        return Err(Errno::ESRCH.into()); // the parent died before `set_pdeathsig` took effect
    }
    Ok(())
}

/// Resets all signals of the calling process to their default actions and unblocks all signals.
/// Async-signal-safe.
pub(super) fn reset_signals() {
    // The kernel's structure for an action; all zero is the default action. glibc's `signal` does
    // not reset the two signals that glibc reserves, which are inherited as ignored, too.
    let default = [0u64; 4];
    for signal in 1..=64 {
        // SAFETY: the kernel reads at most 32 bytes; SIGKILL and SIGSTOP give an error and stay
        // unchanged.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null_mut::<u64>(), 8)
        };
    }
    // SAFETY: `set` is an initialized, empty set, and a null pointer requests no previous set.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}
