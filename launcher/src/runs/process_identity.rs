//! [`ProcessIdentity`]: identifies a process even after another process got the same pid.
use crate::processes::read_start_ticks;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};
use protocol::host_name::read_host_name;
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};

/// What identifies a process even after its pid was reused: machine, boot of the machine, pid and
/// start time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessIdentity {
    /// The host name of the machine on which the process was started.
    pub(crate) host: String,
    /// The kernel's identifier of the boot in which the process was started.
    pub(crate) boot: String,
    /// The process ID.
    pub(crate) pid: u32,
    /// The start time of the process, in clock ticks since the boot.
    #[serde(rename = "started")]
    pub(crate) start_ticks: u64,
}

impl ProcessIdentity {
    /// Returns the identity of the calling process. Fails if `/proc` is not readable.
    pub(crate) fn current() -> io::Result<ProcessIdentity> {
        let pid = std::process::id();
        let start_ticks =
            read_start_ticks(pid).ok_or_else(|| io::Error::other("/proc does not list this process"))?;
        Ok(ProcessIdentity { host: read_host_name(), boot: read_boot_id(), pid, start_ticks })
    }

    /// Returns whether the process with this identity was started on this machine, by comparing
    /// host names.
    pub(crate) fn is_on_this_host(&self) -> bool {
        self.host == read_host_name()
    }

    /// Returns whether the process with this identity was started on this machine after the
    /// machine's last boot.
    pub(crate) fn is_on_this_boot(&self) -> bool {
        self.is_on_this_host() && self.boot == read_boot_id()
    }

    /// Returns whether the identified process still runs on this machine. A zombie counts as ended.
    pub(crate) fn is_alive(&self) -> bool {
        self.is_on_this_boot() && read_start_ticks(self.pid) == Some(self.start_ticks)
    }

    /// Opens a handle of the process (pidfd), if it still runs on this machine. The handle never
    /// refers to a later process with the same pid. Returns `None` if the process has ended.
    pub(crate) fn open_handle(&self) -> io::Result<Option<ProcessHandle>> {
        // SAFETY: pidfd_open returns a new descriptor or fails.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid, 0) };
        match Errno::result(fd) {
            Err(Errno::ESRCH) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(fd) => {
                // SAFETY: the descriptor is new, and no other value owns it.
                let handle = ProcessHandle(unsafe { OwnedFd::from_raw_fd(fd as i32) });
                // Checked after the opening: if the process is still alive now, the handle cannot
                // refer to another process.
                Ok(self.is_alive().then_some(handle))
            }
        }
    }

    /// Returns, for tests, the identity of a process that was started later on this machine with
    /// the pid of this process.
    #[cfg(test)]
    pub(crate) fn with_other_start(&self) -> ProcessIdentity {
        ProcessIdentity { start_ticks: self.start_ticks + 1, ..self.clone() }
    }

    /// Returns, for tests, the identity of a process with this pid and start time that ran before
    /// the last boot of this machine.
    #[cfg(test)]
    pub(crate) fn with_other_boot(&self) -> ProcessIdentity {
        ProcessIdentity { boot: "earlier".into(), ..self.clone() }
    }

    /// Returns, for tests, the identity of a process with this pid and start time on another
    /// machine.
    #[cfg(test)]
    pub(crate) fn with_other_host(&self) -> ProcessIdentity {
        ProcessIdentity { host: "another".into(), ..self.clone() }
    }
}

/// An open handle of a process (pidfd), through which the process can be signalled and awaited.
#[derive(Debug)]
pub(crate) struct ProcessHandle(OwnedFd);

impl ProcessHandle {
    /// Sends a signal to the process of this handle. Fails if the process has been reaped.
    pub(crate) fn send_signal(&self, signal: Signal) -> io::Result<()> {
        let (fd, no_info) = (self.0.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
        // SAFETY: the descriptor is open; without siginfo the signal is sent as kill(2) sends it.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal as i32, no_info, 0) };
        Errno::result(sent).map(drop).map_err(io::Error::from)
    }

    /// Blocks until the process of this handle ends, at most for `limit`. Returns whether the
    /// process has ended.
    pub(crate) fn wait_for_exit(&self, limit: Duration) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        matches!(poll(&mut fds, limit), Ok(1..))
    }
}

/// Reads the kernel's random identifier of the current boot of this machine. Returns an empty text
/// if `/proc` is not readable.
fn read_boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_not_mistaken_for_one_that_had_its_pid() {
        let this = ProcessIdentity::current().expect("this process");
        assert!(this.is_alive() && !this.with_other_start().is_alive() && !this.with_other_host().is_alive());
        let earlier = this.with_other_boot();
        assert!(earlier.is_on_this_host() && !earlier.is_on_this_boot() && !earlier.is_alive());
        let handle = this.open_handle().expect("pidfd").expect("alive");
        assert!(!handle.wait_for_exit(Duration::from_millis(1)));
        assert!(this.with_other_start().open_handle().expect("pidfd").is_none());
        let absent = ProcessIdentity { pid: u32::MAX >> 1, ..this };
        assert!(absent.open_handle().is_ok_and(|handle| handle.is_none()));
    }
}
