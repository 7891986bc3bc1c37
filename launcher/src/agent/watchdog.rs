//! The watchdog above an agent on another host.
//!
//! When the agent is killed, its workers die with it, but processes that the workers started in
//! other sessions do not. Therefore the process that sshd started is a watchdog, and the agent is
//! its child. The watchdog waits for the end of the agent and then kills every process that is
//! left. On the controller's machine the controller does this.
use super::{
    descendants::kill_descendants,
    process::{become_subreaper, fork_process, reap_children},
};
use nix::{
    errno::Errno,
    sys::{
        signal::{SigHandler, Signal, kill, signal},
        wait::{WaitStatus, waitpid},
    },
    unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout},
};
use std::{
    fs::OpenOptions,
    io, thread,
    time::{Duration, Instant},
};

/// How long the watchdog waits for killed processes to end.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two searches for processes that are left.
const SWEEP_INTERVAL: Duration = Duration::from_millis(2);
/// The signals that the watchdog ignores, because a terminal, a batch system or an operator may
/// send them to the whole process group.
const IGNORED_SIGNALS: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// Forks this process. The parent becomes the watchdog, and the child continues as the agent.
///
/// Returns `None` in the agent at once. In the watchdog, blocks until the agent has ended and no
/// process is left, and returns the agent's exit code. The caller must have only one thread.
pub(super) fn fork_below_watchdog() -> io::Result<Option<u8>> {
    become_subreaper()?;
    match fork_process()? {
        None => Ok(None),
        Some(agent) => watch_agent(agent).map(Some),
    }
}

/// Blocks until the agent has ended, and then kills the processes that it left. Returns the agent's
/// exit code. Closes the standard streams.
fn watch_agent(agent: Pid) -> io::Result<u8> {
    for number in IGNORED_SIGNALS {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { signal(number, SigHandler::SigIgn)? };
    }
    // Only the agent keeps the streams open, so that they end when the agent ends.
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
    sweep_descendants();
    Ok(exit_like_agent(status))
}

/// Kills descendants until none is left or [`SWEEP_TIMEOUT`] has passed.
fn sweep_descendants() {
    let start = Instant::now();
    loop {
        kill_descendants(&[]);
        if !reap_children(|_| false, |_, _| {}) || start.elapsed() > SWEEP_TIMEOUT {
            return;
        }
        thread::sleep(SWEEP_INTERVAL);
    }
}

/// Returns the exit code of an agent that ended with `status`. If a signal killed the agent, this
/// process kills itself with the same signal instead, so that sshd reports the signal.
fn exit_like_agent(status: WaitStatus) -> u8 {
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
