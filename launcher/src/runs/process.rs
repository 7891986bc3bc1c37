//! A process that is known again: by machine, boot, pid and the moment it started.
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};

/// Who a process is, as its own machine knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Me {
    pub(crate) host: String,
    /// The kernel's name for the time since the machine was started.
    pub(crate) boot: String,
    pub(crate) pid: u32,
    /// Clock ticks from the machine's start to the process's.
    pub(crate) started: u64,
}

impl Me {
    /// This process.
    pub(crate) fn find() -> io::Result<Me> {
        let pid = std::process::id();
        let started = started(pid).ok_or_else(|| io::Error::other("/proc doesn't show this process"))?;
        Ok(Me { host: host(), boot: boot(), pid, started })
    }

    /// Was it started on this machine, since the machine was?
    pub(crate) fn is_of_this_machine(&self) -> bool {
        self.host == host() && self.boot == boot()
    }

    /// Does it run here?
    pub(crate) fn is_alive(&self) -> bool {
        self.is_of_this_machine() && started(self.pid) == Some(self.started)
    }

    /// A hold on the process, whoever gets its number later; `None` when it is gone.
    pub(crate) fn hold(&self) -> io::Result<Option<Handle>> {
        // SAFETY: pidfd_open makes a new descriptor or fails.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid, 0) };
        match Errno::result(fd) {
            Err(Errno::ESRCH) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(fd) => {
                // SAFETY: new, and ours alone.
                let handle = Handle(unsafe { OwnedFd::from_raw_fd(fd as i32) });
                // Looked at after it is held: from here on the number can't become another's.
                Ok(self.is_alive().then_some(handle))
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn never(&self) -> Me {
        Me { started: self.started + 1, ..self.clone() }
    }

    #[cfg(test)]
    pub(crate) fn elsewhere(&self) -> Me {
        Me { host: "another".into(), ..self.clone() }
    }
}

/// A process that is held.
#[derive(Debug)]
pub(crate) struct Handle(OwnedFd);

impl Handle {
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        let (fd, nothing) = (self.0.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
        // SAFETY: the descriptor is open; without siginfo the signal is sent as kill(2) sends it.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal as i32, nothing, 0) };
        Errno::result(sent).map(drop).map_err(io::Error::from)
    }

    /// Waits for its end; `false`: it goes on.
    pub(crate) fn ended_within(&self, limit: Duration) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        matches!(poll(&mut fds, limit), Ok(1..))
    }
}

/// Field 22 of /proc/PID/stat, after the name, which may contain anything. A process that has ended and waits for its
/// parent doesn't count.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (state != "Z" && state != "X").then(|| fields.nth(18)?.parse().ok()).flatten()
}

fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_one_that_had_its_number() {
        let me = Me::find().expect("myself");
        assert!(me.is_alive() && !me.never().is_alive() && !me.elsewhere().is_alive());
        let held = me.hold().expect("a hold").expect("alive");
        assert!(!held.ended_within(Duration::from_millis(1)));
        assert!(me.never().hold().expect("asked").is_none());
        let nobody = Me { pid: u32::MAX >> 1, ..me };
        assert!(nobody.hold().is_ok_and(|h| h.is_none()));
    }
}
