//! The watchdog is the parent process of an agent that was started over SSH, and kills the
//! processes that the agent leaves behind when it ends.
//!
//! If the agent is killed, its workers are killed, too, but processes that the workers started in
//! other sessions survive. Therefore the process that sshd started is a watchdog, and the agent is
//! the child of the watchdog. The watchdog waits for the end of the agent and then kills every
//! process that is left, and removes the agent's temporary files. On the controller's machine, the
//! controller kills these processes.
use super::{hang::choose_directory_path, process::fork_process};
use crate::processes::{become_subreaper, kill_descendants, reap_children};
use nix::{
    errno::Errno,
    sys::{
        signal::{SigHandler, Signal, kill, signal},
        wait::{WaitStatus, waitpid},
    },
    unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout},
};
use std::{
    fs::{self, OpenOptions},
    io, thread,
    time::{Duration, Instant},
};

/// The time limit for killing the processes that the watchdog's agent has left behind, and for
/// waiting for their end.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two searches for processes that the watchdog's agent has left behind.
const SWEEP_INTERVAL: Duration = Duration::from_millis(2);
/// The signals that the watchdog ignores, because a terminal, a batch system or an operator may
/// send them to the whole process group.
const IGNORED_SIGNALS: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// Forks this process: the parent becomes the watchdog, which kills what the agent leaves behind,
/// and the child continues as the agent.
///
/// In the agent, returns `None` immediately. In the watchdog, blocks until the agent has ended and
/// the remaining processes are killed, and returns the agent's exit code. The process must have
/// only one thread when it calls this function.
pub(super) fn fork_agent_below_watchdog() -> io::Result<Option<u8>> {
    become_subreaper()?;
    choose_directory_path();
    match fork_process()? {
        None => Ok(None),
        Some(agent) => watch_agent(agent).map(Some),
    }
}

/// Blocks until the agent has ended, and then kills the processes that the agent has left behind.
/// Returns the agent's exit code. Replaces the standard streams of this process by `/dev/null`.
fn watch_agent(agent: Pid) -> io::Result<u8> {
    for number in IGNORED_SIGNALS {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { signal(number, SigHandler::SigIgn)? };
    }
    // Only the agent may keep the streams open, so that the streams end when the agent ends.
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    _ = nix::sys::prctl::set_name(c"launch-watchdog");
    let status = loop {
        match waitpid(agent, None) {
            Err(Errno::EINTR) => {}
            Ok(status @ (WaitStatus::Exited(..) | WaitStatus::Signaled(..))) => break status,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
    };
    kill_all_descendants();
    // An agent that was not killed has removed the directory.
    _ = fs::remove_dir_all(choose_directory_path());
    Ok(mirror_agent_exit(status))
}

/// Kills and reaps the descendants of this process until no descendant is left or [`SWEEP_TIMEOUT`]
/// has passed.
fn kill_all_descendants() {
    let start = Instant::now();
    loop {
        kill_descendants(&[]);
        if !reap_children(|_| false, |_, _| {}) || start.elapsed() > SWEEP_TIMEOUT {
            return;
        }
        thread::sleep(SWEEP_INTERVAL);
    }
}

/// Returns the exit code of the agent, which has ended with `status`, as the exit code with which
/// the watchdog process ends. If a signal killed the agent, sends the same signal to this process
/// instead, so that sshd reports the signal.
fn mirror_agent_exit(status: WaitStatus) -> u8 {
    match status {
        WaitStatus::Exited(_, code) => code as u8,
        WaitStatus::Signaled(_, number, _) => {
            // SAFETY: the default action installs no handler. SIGKILL's action cannot be changed.
            _ = unsafe { signal(number, SigHandler::SigDfl) };
            _ = kill(Pid::this(), number);
            128 + number as u8
        }
        _ => 1,
    }
}
