//! Starts a detached controller, which controls the job in the background and outlives the
//! terminal. This executable runs again in a separate session, with its output in a file.
use nix::{
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
    unistd::{pipe2, setsid},
};
use protocol::control::ExitStatus;
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Command, Stdio},
    sync::Arc,
};

/// The result of starting a detached controller, which controls the job in the background: its
/// process, and whether the workers run.
#[derive(Debug)]
pub(crate) enum DetachedStart {
    /// All workers run. Holds the pid of the controller.
    Started(u32),
    /// The controller ended before all workers ran. Holds its exit status.
    Ended(ExitStatus),
}

/// Starts this executable again as a detached controller, which controls the job in a separate
/// session and outlives the terminal. Blocks until the job has started or the controller has ended.
///
/// The function `args` returns the arguments of the controller. Its parameter is the number of the
/// file descriptor from which the controller creates its [`StartNotifier`]. The controller reads
/// `input` from standard input. Its standard output and standard error go to `console`.
pub(crate) fn start_detached_controller(
    args: impl Fn(RawFd) -> Vec<OsString>,
    input: &[u8],
    console: File,
) -> io::Result<DetachedStart> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    let fd = writer.as_raw_fd();
    // This is the file that this process runs, even if its path was replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("launch").args(args(fd));
    let errors = console.try_clone()?;
    command.stdin(create_stdin_file(input)?).stdout(console).stderr(errors);
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
    // The read ends at the latest when the controller gives up on an agent that does not answer.
    File::from(reader).take(1).read_to_end(&mut notification)?;
    if notification.is_empty() {
        let status = std::os::unix::process::ExitStatusExt::into_raw(child.wait()?);
        return Ok(DetachedStart::Ended(crate::processes::decode_wait_status(status)));
    }
    Ok(DetachedStart::Started(child.id()))
}

/// Writes `content` to an unnamed file in memory (memfd), which becomes the standard input of a
/// controller that this process starts.
pub(crate) fn create_stdin_file(content: &[u8]) -> io::Result<Stdio> {
    if content.is_empty() {
        return Ok(Stdio::null());
    }
    let mut file = File::from(memfd_create(c"input", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(content)?;
    file.rewind()?;
    Ok(file.into())
}

/// Notifies the process that has started a detached controller as soon as all workers of the job
/// run. The notification is one byte on an inherited pipe.
#[derive(Clone, Debug)]
pub(crate) struct StartNotifier(Arc<OwnedFd>);

impl StartNotifier {
    /// Takes ownership of `fd`, the pipe to the process that started this detached controller, and
    /// sets its close-on-exec flag. No other code may use or close the descriptor, so the function
    /// must be called at most once, and before this process opens files. Fails for the standard
    /// streams (0 to 2).
    pub(crate) fn from_inherited_fd(fd: RawFd) -> io::Result<StartNotifier> {
        if fd <= 2 {
            return Err(io::Error::other("a standard stream is not a descriptor to notify on"));
        }
        // SAFETY: the parent process opened the descriptor for this process. This process takes it
        // once, before any other file is opened.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        Ok(StartNotifier(Arc::new(fd)))
    }

    /// Notifies the process that has started this detached controller that all workers run.
    pub(crate) fn notify_started(self) {
        // An error means that the waiting process has ended.
        if let Ok(fd) = self.0.try_clone() {
            _ = File::from(fd).write_all(b"s");
        }
    }
}
