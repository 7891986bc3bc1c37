//! Reaps child processes and decodes how they ended.
use nix::{
    errno::Errno,
    sys::{
        prctl,
        signal::{Signal, killpg},
    },
    unistd::Pid,
};
use protocol::control::ExitStatus;
use std::{
    io,
    os::unix::process::ExitStatusExt,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Makes this process the subreaper of its descendants: a descendant whose parent has died becomes
/// a child of this process instead of init.
pub(crate) fn become_subreaper() -> io::Result<()> {
    Ok(prctl::set_child_subreaper(true)?)
}

/// Returns a lock that prevents other threads of this process from starting, reaping or killing
/// child processes while the caller holds it.
///
/// Transports start processes on several threads. Without the lock, a process could be reaped, or
/// killed as an unknown one, before its transport has listed it.
pub(crate) fn lock_children() -> MutexGuard<'static, ()> {
    /// The lock that a thread of this process holds while it starts, reaps or kills child
    /// processes.
    static CHILDREN_LOCK: Mutex<()> = Mutex::new(());
    CHILDREN_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reaps every child process that has ended, and calls `on_exit` with the pid and the exit status
/// of each. Returns whether children are left. Does not block.
///
/// If `is_leader` returns `true` for the pid of an ended child, kills the process group of the
/// child before the child is reaped. The kernel cannot reuse the number of the group before that
/// time.
pub(crate) fn reap_children(
    is_leader: impl Fn(u32) -> bool,
    mut on_exit: impl FnMut(u32, ExitStatus),
) -> bool {
    loop {
        // SAFETY: waitid fills the zeroed siginfo; with WNOHANG it stays zero when no child has
        // ended.
        let (rc, pid) = unsafe {
            let mut info = std::mem::zeroed::<libc::siginfo_t>();
            let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            let rc = libc::waitid(libc::P_ALL, 0, &mut info, flags);
            (rc, info.si_pid())
        };
        match rc {
            0 if pid == 0 => return true,
            0 => {}
            _ if Errno::last() == Errno::EINTR => continue,
            _ => return false, // ECHILD
        }
        if is_leader(pid as u32) {
            // An error means that the process group has ended.
            _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let mut status = 0;
        // SAFETY: waits for a child that has ended; `status` is valid for writes.
        if unsafe { libc::waitpid(pid, &mut status, 0) } == pid {
            on_exit(pid as u32, decode_wait_status(status));
        }
    }
}

/// Reaps the child process `pid` if it has ended, after killing the remaining processes of its
/// process group, and returns its exit status. Returns `None` if the process has not ended. Does
/// not block.
pub(crate) fn reap_group_leader(pid: u32) -> Option<ExitStatus> {
    // SAFETY: waitid fills the zeroed siginfo, and neither blocks nor reaps.
    let has_ended = unsafe {
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        libc::waitid(libc::P_PID, pid, &mut info, flags) == 0 && info.si_pid() == pid as i32
    };
    if !has_ended {
        return None;
    }
    // An error means that the process group has ended.
    _ = killpg(Pid::from_raw(pid as i32), Signal::SIGKILL);
    reap_child(pid)
}

/// Reaps the child process `pid` if it has ended, and returns its exit status. Returns `None` if
/// the process has not ended. Does not block.
fn reap_child(pid: u32) -> Option<ExitStatus> {
    let mut status = 0;
    // SAFETY: waits for a child without blocking; `status` is valid for writes.
    let reaped = unsafe { libc::waitpid(pid as i32, &mut status, libc::WNOHANG) };
    (reaped == pid as i32).then(|| decode_wait_status(status))
}

/// Converts `status`, a wait status from `waitpid`, to the exit code or the signal that it encodes.
pub(crate) fn decode_wait_status(status: i32) -> ExitStatus {
    let status = std::process::ExitStatus::from_raw(status);
    match status.signal() {
        Some(signal) => ExitStatus::Signal(signal, status.core_dumped()),
        None => ExitStatus::Code(status.code().unwrap_or(0) as u8),
    }
}
