//! [`run_login_shell`]: runs a script in a login shell, and returns what the script prints.
use super::child_setup::{die_with_parent, reset_signals};
use crate::core_dumps::restore_core_dumps_in_child;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, killpg},
    unistd::{Pid, setsid},
};
use protocol::control::ExitStatus;
use std::{
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The interval at which the agent checks whether a login shell that writes no output has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The number of bytes of the login shell's output that are read at once.
const CHUNK_BYTES: usize = 16 << 10;
/// The number of bytes, from the end of the stderr of a script in a login shell, that the agent
/// keeps.
const MAX_STDERR_BYTES: usize = 8 << 10;

/// The limits on the run time and the output size of a script in a login shell.
#[derive(Clone, Copy, Debug)]
pub(in crate::agent) struct ShellLimits {
    /// The time limit, after which the script is killed.
    pub(in crate::agent) time: Duration,
    /// The largest size of stdout, in bytes.
    pub(in crate::agent) stdout_bytes: usize,
}

/// The output and the exit status of a script that has ended in a login shell.
#[derive(Debug)]
pub(in crate::agent) struct ShellOutput {
    pub(in crate::agent) status: ExitStatus,
    pub(in crate::agent) stdout: Vec<u8>,
    /// The end of stderr.
    pub(in crate::agent) stderr: Vec<u8>,
}

/// The reason why a script in a login shell was killed or did not start.
#[derive(Debug)]
pub(in crate::agent) enum ShellError {
    /// The shell could not be started or observed.
    Io(io::Error),
    /// The script exceeded the time limit. The field is the end of its stderr.
    TimedOut(Vec<u8>),
    /// The script printed more than the limit.
    TooMuchOutput,
}

impl From<io::Error> for ShellError {
    fn from(error: io::Error) -> Self {
        ShellError::Io(error)
    }
}

/// Runs the shell script `script` in a login shell (bash or, without bash, sh) in the directory
/// `workdir`, and returns its output. The shell has the environment of this process without the
/// variables `hidden`. Blocks until the shell has ended, but not until processes that the script
/// leaves have ended.
///
/// The shell leads a separate session without a terminal. If the script exceeds a limit, its
/// process group is killed. No other thread may reap the shell.
pub(in crate::agent) fn run_login_shell(
    script: &str,
    workdir: &Path,
    hidden: &[String],
    limits: ShellLimits,
) -> Result<ShellOutput, ShellError> {
    let mut child = match start_shell("bash", script, workdir, hidden) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && workdir.is_dir() => {
            start_shell("sh", script, workdir, hidden)?
        }
        result => result?,
    };
    let output = read_until_shell_end(&mut child, limits);
    if output.is_err() {
        // The shell is not reaped yet, so the number of its group is still in use.
        _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
        _ = child.wait();
    }
    output
}

/// Starts a login shell that runs the shell script `script`, as the leader of a separate session.
fn start_shell(shell: &str, script: &str, workdir: &Path, hidden: &[String]) -> io::Result<Child> {
    let mut command = Command::new(shell);
    command.args(["-l", "-c", script]).current_dir(workdir);
    hidden.iter().for_each(|name| _ = command.env_remove(name));
    // Tests do not read the profile of the user, which may wait for a lock that a killed shell has
    // left.
    #[cfg(test)]
    command.env("HOME", "/nonexistent");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    restore_core_dumps_in_child(&mut command);
    let parent = Pid::this();
    // SAFETY: the closure only makes system calls that are allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            setsid()?;
            die_with_parent(parent)?;
            reset_signals();
            Ok(())
        });
    }
    command.spawn()
}

/// Reads the output of a login shell until the shell has ended or a limit is exceeded.
fn read_until_shell_end(child: &mut Child, limits: ShellLimits) -> Result<ShellOutput, ShellError> {
    let (Some(mut out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(io::Error::other("the shell has no output pipes").into());
    };
    set_nonblocking(out.as_fd())?;
    set_nonblocking(err.as_fd())?;
    let until = Instant::now() + limits.time;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut is_open = (true, true);
    loop {
        // The end is checked before the last read, so that the read gets all output.
        let ended = child.try_wait()?;
        if is_open.0 {
            is_open.0 = read_available(&mut out, &mut stdout, |text| text.len() <= limits.stdout_bytes)?;
        }
        if stdout.len() > limits.stdout_bytes {
            return Err(ShellError::TooMuchOutput);
        }
        if is_open.1 {
            is_open.1 = read_available(&mut err, &mut stderr, |text| {
                text.drain(..text.len().saturating_sub(MAX_STDERR_BYTES));
                true
            })?;
        }
        if let Some(status) = ended {
            let status = crate::processes::decode_wait_status(status.into_raw());
            return Ok(ShellOutput { status, stdout, stderr });
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ShellError::TimedOut(stderr));
        }
        let pause = left.min(POLL_INTERVAL);
        let mut files: Vec<PollFd<'_>> = Vec::new();
        files.extend(is_open.0.then(|| PollFd::new(out.as_fd(), PollFlags::POLLIN)));
        files.extend(is_open.1.then(|| PollFd::new(err.as_fd(), PollFlags::POLLIN)));
        if files.is_empty() {
            thread::sleep(pause.min(Duration::from_millis(1)));
        } else {
            _ = poll(&mut files, PollTimeout::try_from(pause).unwrap_or(PollTimeout::ZERO));
        }
    }
}

/// Appends the bytes that are available in a nonblocking pipe to `text`, and stops early if the
/// function `keeps_reading` returns `false`. Returns whether the pipe is still open.
fn read_available(
    pipe: &mut impl Read,
    text: &mut Vec<u8>,
    mut keeps_reading: impl FnMut(&mut Vec<u8>) -> bool,
) -> io::Result<bool> {
    let mut chunk = [0; CHUNK_BYTES];
    loop {
        match pipe.read(&mut chunk) {
            Ok(0) => return Ok(false),
            Ok(n) => text.extend_from_slice(&chunk[..n]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        if !keeps_reading(text) {
            return Ok(true);
        }
    }
}

/// Makes reads of an output pipe of the login shell return immediately if the pipe is empty.
fn set_nonblocking(pipe: BorrowedFd<'_>) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(pipe, FcntlArg::F_GETFL)?);
    fcntl(pipe, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, time_ms: u64, stdout_bytes: usize) -> Result<ShellOutput, ShellError> {
        let limits = ShellLimits { time: Duration::from_millis(time_ms), stdout_bytes };
        run_login_shell(script, Path::new("/"), &[], limits)
    }

    #[test]
    fn a_script_has_its_output_and_status_although_a_process_remains() {
        let began = Instant::now();
        let output =
            run("sleep 60 & echo $PWD; echo oops >&2; kill %1; exit 3", 30_000, 4096).expect("ended");
        assert_eq!(output.status, ExitStatus::Code(3));
        assert!(String::from_utf8_lossy(&output.stdout).ends_with("/\n"), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("oops\n"), "{output:?}");
        let output = run("exec 3>&1; sleep 5 >&3 & exit 0", 30_000, 4096).expect("ended");
        assert_eq!(output.status, ExitStatus::Code(0));
        assert!(began.elapsed() < Duration::from_secs(4), "waited for a process in the background");
    }

    #[test]
    fn a_script_that_exceeds_a_limit_is_killed() {
        let began = Instant::now();
        match run("echo waiting >&2; sleep 60", 4000, 4096) {
            Err(ShellError::TimedOut(text)) => assert!(String::from_utf8_lossy(&text).contains("waiting")),
            other => panic!("{other:?}"),
        }
        assert!(matches!(run("yes", 30_000, 1 << 16), Err(ShellError::TooMuchOutput)));
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}
