//! The agent's guard on another host. Should the agent be killed, nobody there would end the descendants of its workers that
//! went into sessions of their own: its workers die with it, but their children don't. So the process that sshd started is a
//! guard that does nothing but wait for the agent, its child, and then ends whatever was left to it. On the controller's own
//! machine the controller does that.
use super::{
    descendants::kill_descendants,
    process::{become_subreaper, reap, split},
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

/// Killed processes that take longer to go hang in the kernel.
const SWEEP_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks at what is left.
const LOOK: Duration = Duration::from_millis(2);
/// What a terminal, a batch system or an operator may send to everyone.
const SHIELDED: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];

/// Makes this process a guard and goes on as its child: `None` there, in the agent. `Some` in the guard, once the agent has ended and
/// nothing is left: the agent's exit code. Only while this process has one thread.
pub(super) fn stand() -> io::Result<Option<u8>> {
    become_subreaper()?;
    match split()? {
        None => Ok(None),
        Some(agent) => guard(agent).map(Some),
    }
}

fn guard(agent: Pid) -> io::Result<u8> {
    for number in SHIELDED {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { signal(number, SigHandler::SigIgn)? };
    }
    // The streams are the agent's alone: their end is its end.
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    _ = nix::sys::prctl::set_name(c"launch-guard");
    let ended = loop {
        match waitpid(agent, None) {
            Err(Errno::EINTR) => {}
            Ok(status @ (WaitStatus::Exited(..) | WaitStatus::Signaled(..))) => break status,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
    };
    sweep();
    Ok(as_code(ended))
}

/// Until no descendant is left.
fn sweep() {
    let began = Instant::now();
    loop {
        kill_descendants(&[]);
        if !reap(|_| false, |_, _| {}) || began.elapsed() > SWEEP_LIMIT {
            return;
        }
        thread::sleep(LOOK);
    }
}

/// The agent's exit code; where a signal ended it, this process ends by the same one, so that sshd tells which.
fn as_code(ended: WaitStatus) -> u8 {
    match ended {
        WaitStatus::Exited(_, code) => code as u8,
        WaitStatus::Signaled(_, number, _) => {
            // SAFETY: the default action installs no handler. SIGKILL has no other and can't be set.
            _ = unsafe { signal(number, SigHandler::SigDfl) };
            _ = kill(Pid::this(), number);
            128 + number as u8
        }
        _ => 1,
    }
}
