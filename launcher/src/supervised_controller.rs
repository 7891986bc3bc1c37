//! [`ControllerSupervisor`]: runs controllers as child processes and passes on to them the signals
//! that this process receives, so that a controller that dies can be replaced.
//!
//! A scheduler such as Slurm signals the first or all processes of a batch job, depending on the
//! signal and the cluster. The supervisor passes on signals by a pipe, so that a controller can
//! distinguish them from those that it receives itself, and counts a signal to both processes once.
use crate::{detached_controller::create_stdin_file, processes};
use nix::{
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    sys::signal::Signal,
    unistd::pipe2,
};
use protocol::control::ExitStatus;
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command},
    sync::Arc,
};
use tokio::{
    runtime::Runtime,
    signal::unix::{Signal as SignalStream, SignalKind, signal},
    sync::mpsc,
};

/// The signals that control a run, each of which a supervisor passes on to its controller.
const CONTROL_SIGNALS: [Signal; 6] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGQUIT, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2];
/// The number of received signals that may wait until they are passed on.
const SIGNAL_QUEUE_CAPACITY: usize = 16;

/// A process that runs controllers of one run, one after the other, and passes on signals to them.
pub(crate) struct ControllerSupervisor {
    runtime: Runtime,
    signals: mpsc::Receiver<Signal>,
    child_ended: SignalStream,
    /// The signals that the last controller had not read when it died.
    unread: Vec<u8>,
}

impl ControllerSupervisor {
    /// Begins to catch the signals that control a run. Signals that are ignored stay ignored.
    pub(crate) fn start() -> io::Result<ControllerSupervisor> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (sender, signals) = mpsc::channel(SIGNAL_QUEUE_CAPACITY);
        let catch = || -> io::Result<SignalStream> {
            for caught in CONTROL_SIGNALS.into_iter().filter(|caught| !processes::is_signal_ignored(*caught))
            {
                let (mut stream, sender) = (signal(SignalKind::from_raw(caught as i32))?, sender.clone());
                tokio::spawn(async move {
                    while stream.recv().await.is_some() && sender.send(caught).await.is_ok() {}
                });
            }
            signal(SignalKind::child())
        };
        let child_ended = runtime.block_on(async { catch() })?;
        Ok(ControllerSupervisor { runtime, signals, child_ended, unread: Vec::new() })
    }

    /// Runs this executable as a controller, and passes on signals until the controller ends, also
    /// those that an earlier controller has not read. Returns the controller's pid and how it
    /// ended.
    ///
    /// The function `args` returns the arguments of the controller. Its parameter is the number of
    /// the file descriptor from which the controller creates its [`ForwardedSignals`]. The
    /// controller reads `input` from standard input.
    pub(crate) fn run_controller(
        &mut self,
        args: impl Fn(RawFd) -> Vec<OsString>,
        input: &[u8],
    ) -> io::Result<(u32, ExitStatus)> {
        let ControllerSupervisor { runtime, signals, child_ended, unread } = self;
        runtime.block_on(async {
            let (mut child, mut pipe) = start_controller(args, input)?;
            pipe.forward(unread);
            unread.clear();
            loop {
                if let Some(status) = child.try_wait()? {
                    // The pipe does not block, so this ends with an error if it has no more bytes.
                    _ = pipe.reader.read_to_end(unread);
                    return Ok((child.id(), processes::decode_wait_status(status.into_raw())));
                }
                tokio::select! {
                    Some(received) = signals.recv() => pipe.forward(&[received as u8]),
                    _ = child_ended.recv() => {}
                }
            }
        })
    }
}

/// The pipe through which a supervised controller gets signals. Each byte is the number of a
/// signal.
struct SignalPipe {
    /// The end from which the controller reads. The supervisor reads from it after the controller's
    /// end only.
    reader: File,
    writer: File,
}

impl SignalPipe {
    /// Sends the numbers of signals to the controller.
    fn forward(&mut self, numbers: &[u8]) {
        // An error means that the controller has not read 64 Ki earlier signals.
        _ = self.writer.write_all(numbers);
    }
}

/// Starts this executable as a supervised controller. Returns its process, and the pipe through
/// which it gets signals.
fn start_controller(args: impl Fn(RawFd) -> Vec<OsString>, input: &[u8]) -> io::Result<(Child, SignalPipe)> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    let fd = reader.as_raw_fd();
    // This is the file that this process runs, even if its path was replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("launch").args(args(fd)).stdin(create_stdin_file(input)?).process_group(0);
    // SAFETY: the closure only makes a system call that is allowed between fork and exec.
    unsafe {
        command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let child = command.spawn()?;
    Ok((child, SignalPipe { reader: File::from(reader), writer: File::from(writer) }))
}

/// The inherited pipe from which a supervised controller reads the signals that its supervisor has
/// received. Each byte is the number of a signal.
#[derive(Clone, Debug)]
pub(crate) struct ForwardedSignals(Arc<OwnedFd>);

impl ForwardedSignals {
    /// Takes ownership of `fd`, the pipe from the supervisor, and sets its close-on-exec flag. No
    /// other code may use or close the descriptor, so the function must be called at most once, and
    /// before this process opens files. Fails for the standard streams (0 to 2).
    pub(crate) fn from_inherited_fd(fd: RawFd) -> io::Result<ForwardedSignals> {
        if fd <= 2 {
            return Err(io::Error::other("a standard stream is not a pipe with signals"));
        }
        // SAFETY: the supervisor opened the descriptor for this process. This process takes it
        // once, before any other file is opened.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        Ok(ForwardedSignals(Arc::new(fd)))
    }

    /// Returns the pipe for reading within an asynchronous runtime.
    pub(crate) fn open_receiver(&self) -> io::Result<tokio::net::unix::pipe::Receiver> {
        tokio::net::unix::pipe::Receiver::from_owned_fd(self.0.try_clone()?)
    }
}
