//! A controller that outlives the terminal: this executable again, in a session of its own, its output in a file.
use contract::control::ExitStatus;
use nix::{
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    unistd::{pipe2, setsid},
};
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Command, Stdio},
    sync::Arc,
};

/// What became of the start.
#[derive(Debug)]
pub(crate) enum Start {
    /// All workers run; the controller's pid.
    Started(u32),
    /// It ended before.
    Ended(ExitStatus),
}

/// Starts this executable with the arguments that `args` makes of a descriptor's number, and waits until it says that the
/// job has started or ends. What it prints goes to `console`.
pub(crate) fn start(args: impl Fn(RawFd) -> Vec<OsString>, console: File) -> io::Result<Start> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    let fd = writer.as_raw_fd();
    // The very file this process runs, even if another was put in its place meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("launch").args(args(fd));
    let errors = console.try_clone()?;
    command.stdin(Stdio::null()).stdout(console).stderr(errors);
    // SAFETY: the closure only makes system calls that are allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            setsid()?;
            match libc::fcntl(fd, libc::F_SETFD, 0) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
    }
    let mut child = command.spawn()?;
    drop(writer);
    let mut said = Vec::new();
    // Ends at the latest when an agent that doesn't answer is given up.
    File::from(reader).take(1).read_to_end(&mut said)?;
    if said.is_empty() {
        let status = child.wait()?;
        return Ok(Start::Ended(crate::agent::exit_status(std::os::unix::process::ExitStatusExt::into_raw(
            status,
        ))));
    }
    Ok(Start::Started(child.id()))
}

/// The end of a controller that was started so: says once that the job has started.
#[derive(Clone, Debug)]
pub struct Starter(Arc<OwnedFd>);

impl Starter {
    /// Takes the inherited descriptor of this number; it isn't passed on.
    pub(crate) fn inherited(fd: RawFd) -> io::Result<Starter> {
        if fd <= 2 {
            return Err(io::Error::other("that is no descriptor to inherit"));
        }
        // SAFETY: whoever named it on the command line gave it to this process; it is taken once, before any other file
        // is opened.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        Ok(Starter(Arc::new(fd)))
    }

    /// All workers run.
    pub(crate) fn started(self) {
        // Whoever waited may have gone.
        if let Ok(fd) = self.0.try_clone() {
            _ = File::from(fd).write_all(b"s");
        }
    }
}
