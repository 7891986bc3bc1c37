//! [`SupervisedChild`]: a child process, such as `ssh`, that is started and killed by a connection
//! thread, but reaped by the main thread.
use crate::processes::lock_children;
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
    collections::BTreeMap,
    io,
    os::unix::process::CommandExt,
    process::{Child, Command, Output},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The interval at which a thread that waits for a child process checks whether the process has
/// ended.
const WAIT_INTERVAL: Duration = Duration::from_millis(5);

/// A shared cell for the exit status of a child process, which the main thread fills when it reaps
/// the process.
type ReapedStatus = Arc<Mutex<Option<ExitStatus>>>;

/// The pids of the child processes of SSH connections that the main thread has not reaped yet, each
/// with the shared cell for its exit status.
static UNREAPED_CHILDREN: Mutex<BTreeMap<u32, ReapedStatus>> = Mutex::new(BTreeMap::new());

/// Locks a mutex, even if another thread has panicked while it held the lock.
fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the pids of the child processes of SSH connections ([`SupervisedChild`]) that were not
/// reaped.
pub(in crate::cluster::ssh) fn list_unreaped_children() -> Vec<u32> {
    lock_ignoring_poison(&UNREAPED_CHILDREN).keys().copied().collect()
}

/// Stores the exit status of the reaped child process `pid` for the thread that has started this
/// process. The caller holds [`lock_children`]. Ignores processes that were not started here.
pub(in crate::cluster::ssh) fn record_child_exit(pid: u32, status: ExitStatus) {
    if let Some(reaped) = lock_ignoring_poison(&UNREAPED_CHILDREN).remove(&pid) {
        *lock_ignoring_poison(&reaped) = Some(status);
    }
}

/// A child process, such as `ssh`, in a separate process group, which is killed together with this
/// group when the value is dropped. The kernel also kills the process if the thread that started it
/// ends. The process is reaped by the thread that reaps all children of this process, which calls
/// [`record_child_exit`].
#[derive(Debug)]
pub(in crate::cluster::ssh) struct SupervisedChild {
    pid: u32,
    reaped: ReapedStatus,
}

impl SupervisedChild {
    /// Starts a child process in a separate process group, so that a Ctrl-C at the terminal does
    /// not reach it. Also returns its pipes.
    pub(super) fn spawn(command: &mut Command) -> io::Result<(SupervisedChild, Child)> {
        let owner = Pid::this();
        command.process_group(0);
        // SAFETY: the closure only makes system calls that are allowed between fork and exec.
        unsafe {
            command.pre_exec(move || {
                prctl::set_pdeathsig(Signal::SIGKILL)?;
                if Pid::parent() != owner {
                    return Err(Errno::ESRCH.into()); // this process died before `set_pdeathsig`
                }
                Ok(())
            });
        }
        // The child must be listed before another thread reaps it, or kills unknown processes.
        let _lock = lock_children();
        let child = command.spawn()?;
        let reaped = ReapedStatus::default();
        lock_ignoring_poison(&UNREAPED_CHILDREN).insert(child.id(), reaped.clone());
        Ok((SupervisedChild { pid: child.id(), reaped }, child))
    }

    /// Runs a command, such as `ssh -G`, until it ends, and returns its exit status and its output.
    /// Kills the command and fails if it takes longer than `limit`, or if its output does not fit
    /// into a pipe.
    pub(in crate::cluster::ssh) fn run_to_end(command: &mut Command, limit: Duration) -> io::Result<Output> {
        use std::{io::Read, os::unix::process::ExitStatusExt, process::Stdio};
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (process, mut child) = SupervisedChild::spawn(command)?;
        let status = process.wait_timeout(limit).ok_or(io::ErrorKind::TimedOut)?;
        // Kills descendants that hold the pipes.
        drop(process);
        let read = |pipe: Option<&mut dyn Read>| -> io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            pipe.map_or(Ok(0), |pipe| pipe.read_to_end(&mut bytes))?;
            Ok(bytes)
        };
        let stdout = read(child.stdout.as_mut().map(|pipe| pipe as &mut dyn Read))?;
        let stderr = read(child.stderr.as_mut().map(|pipe| pipe as &mut dyn Read))?;
        let raw = match status {
            ExitStatus::Code(code) => i32::from(code) << 8,
            ExitStatus::Signal(signal, _) => signal,
        };
        Ok(Output { status: std::process::ExitStatus::from_raw(raw), stdout, stderr })
    }

    /// Returns the exit status of the child process if it has ended, or `None` if it still runs.
    pub(super) fn try_exit_status(&self) -> Option<ExitStatus> {
        let _lock = lock_children();
        // The lock is held, so a process without a recorded status was not reaped.
        lock_ignoring_poison(&self.reaped).or_else(|| peek_exit_status(self.pid))
    }

    /// Waits for the end of the child process, for at most `limit`. Returns the exit status, or
    /// `None` if the process still runs.
    pub(super) fn wait_timeout(&self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.try_exit_status() {
                None if Instant::now() < deadline => thread::sleep(WAIT_INTERVAL),
                status => return status,
            }
        }
    }
}

impl Drop for SupervisedChild {
    fn drop(&mut self) {
        let _lock = lock_children();
        if lock_ignoring_poison(&self.reaped).is_none() {
            // The process was not reaped, so no other group can have its number.
            _ = killpg(Pid::from_raw(self.pid as i32), Signal::SIGKILL);
        }
    }
}

/// Returns the exit status of the child process `pid` if it has ended, without reaping it.
fn peek_exit_status(pid: u32) -> Option<ExitStatus> {
    // SAFETY: waitid fills the zeroed siginfo, and neither blocks nor reaps.
    let (ended, code, status) = unsafe {
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        let ended = libc::waitid(libc::P_PID, pid, &mut info, flags) == 0 && info.si_pid() == pid as i32;
        (ended, info.si_code, if ended { info.si_status() } else { 0 })
    };
    ended.then_some(match code {
        libc::CLD_EXITED => ExitStatus::Code(status as u8),
        code => ExitStatus::Signal(status, code == libc::CLD_DUMPED),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::reap_group_leader;

    /// Reaps a child process, as the main thread does.
    fn reap(child: &SupervisedChild) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while list_unreaped_children().contains(&child.pid) {
            assert!(Instant::now() < deadline, "the child has not ended");
            let _lock = lock_children();
            if let Some(status) = reap_group_leader(child.pid) {
                record_child_exit(child.pid, status);
            }
        }
    }

    #[test]
    fn the_exit_status_is_known_before_and_after_the_child_is_reaped() {
        let (child, _) = SupervisedChild::spawn(Command::new("sh").args(["-c", "exit 7"])).expect("a child");
        assert_eq!(child.wait_timeout(Duration::from_secs(20)), Some(ExitStatus::Code(7)));
        assert!(list_unreaped_children().contains(&child.pid), "not reaped yet");
        reap(&child);
        assert_eq!(child.try_exit_status(), Some(ExitStatus::Code(7)));
    }

    #[test]
    fn dropping_a_child_kills_its_group() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 100 & echo $!; wait"]).stdout(std::process::Stdio::piped());
        let (child, mut pipes) = SupervisedChild::spawn(&mut shell).expect("a child");
        assert_eq!(child.wait_timeout(Duration::from_millis(20)), None);
        let again = SupervisedChild { pid: child.pid, reaped: child.reaped.clone() };
        drop(child);
        assert_eq!(again.wait_timeout(Duration::from_secs(20)), Some(ExitStatus::Signal(9, false)));
        // The pipe ends when the sleeping process has ended, too.
        let mut output = String::new();
        let stdout = pipes.stdout.as_mut().expect("a pipe");
        std::io::Read::read_to_string(stdout, &mut output).expect("text");
        reap(&again);
    }

    #[test]
    fn a_command_that_takes_too_long_is_killed() {
        let began = Instant::now();
        let error = SupervisedChild::run_to_end(Command::new("sleep").arg("100"), Duration::from_millis(50));
        assert_eq!(error.expect_err("too slow").kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < Duration::from_secs(50));
        let output = SupervisedChild::run_to_end(Command::new("echo").arg("a"), Duration::from_secs(20));
        assert_eq!(output.expect("output").stdout, b"a\n");
    }
}
