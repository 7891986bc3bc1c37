//! Starts a controller that outlives the terminal: this executable again, in a separate session,
//! with its output in a file.
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

/// The result of starting a detached controller.
#[derive(Debug)]
pub(crate) enum DetachedStart {
    /// All workers run. The pid of the controller.
    Started(u32),
    /// The controller ended before all workers ran.
    Ended(ExitStatus),
}

/// Starts this executable as a detached controller. Blocks until the job has started or the
/// controller has ended.
///
/// `args` returns the arguments, given the descriptor of which [`StartNotifier`] takes hold.
/// Standard output and standard error go to `console`.
pub(crate) fn start_and_wait(
    args: impl Fn(RawFd) -> Vec<OsString>,
    console: File,
) -> io::Result<DetachedStart> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    let fd = writer.as_raw_fd();
    // The file that this process runs, even if it was replaced meanwhile.
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
    let mut notification = Vec::new();
    // Returns at the latest when the controller gives up on an agent that does not answer.
    File::from(reader).take(1).read_to_end(&mut notification)?;
    if notification.is_empty() {
        let status = std::os::unix::process::ExitStatusExt::into_raw(child.wait()?);
        return Ok(DetachedStart::Ended(crate::agent::exit_status(status)));
    }
    Ok(DetachedStart::Started(child.id()))
}

/// Notifies the process that started a detached controller, once, that the job has started.
#[derive(Clone, Debug)]
pub struct StartNotifier(Arc<OwnedFd>);

impl StartNotifier {
    /// Takes the inherited descriptor of this number and sets its close-on-exec flag.
    pub(crate) fn from_inherited_fd(fd: RawFd) -> io::Result<StartNotifier> {
        if fd <= 2 {
            return Err(io::Error::other("a standard stream is not a descriptor to notify on"));
        }
        // SAFETY: the parent names a descriptor that it opened for this process. It is taken once,
        // before any other file is opened.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        Ok(StartNotifier(Arc::new(fd)))
    }

    /// Reports that all workers run.
    pub(crate) fn notify(self) {
        // The process that waits may have ended.
        if let Ok(fd) = self.0.try_clone() {
            _ = File::from(fd).write_all(b"s");
        }
    }
}
