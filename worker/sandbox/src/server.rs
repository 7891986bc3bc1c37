//! [`serve`]: the main function of a sandbox process, which answers the requests of its caller.
use crate::{
    confinement::{RequestLimiter, confine},
    cpu_watch::watch_cpu_time,
    limits::{MAX_QUEUED_REQUESTS, RequestLimits, SERVICE_STACK_BYTES, SandboxSettings},
    messages::{
        MAX_PANIC_BYTES, REQUEST_HEADER_BYTES, ReplyKind, SETTINGS_BYTES, decode_request_header,
        decode_settings, encode_reply_header,
    },
};
use nix::{
    cmsg_space,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigHandler, Signal, signal},
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
    },
};
use std::{
    convert::Infallible,
    fs::File,
    io::{self, IoSliceMut, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    panic::{self, AssertUnwindSafe, catch_unwind},
    process,
    sync::{
        Mutex, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

/// The exit code of a sandbox process that ends normally, because its caller has closed the socket.
const EXIT_DONE: u8 = 0;
/// Exit code of a sandbox process that ends because of a failure: it could not start, lost its
/// caller, or exceeded a limit.
const EXIT_FAILED: u8 = 1;

/// The message and the source location of the last panic in this sandbox process.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Callback by which a request handler reports to the caller the number of the step that it begins,
/// such as loading a tokenizer. An error of the request names the last reported step.
pub type ReportStepFn<'a> = dyn FnMut(u64) + 'a;

/// Handler of the requests to a sandbox process, for example of requests to parse a file.
pub trait RequestHandler {
    /// Handles `request`, for example by parsing the open file `file` if one was sent, and returns
    /// the bytes of the reply. A panic becomes an error of the caller, and the handler then gets
    /// the next request. No work with a limit of CPU time may run during a call of `report_step`.
    fn handle_request(
        &mut self,
        request: &[u8],
        file: Option<File>,
        report_step: &mut ReportStepFn,
    ) -> Vec<u8>;
}

/// A request that the sandbox process has received, with its limits and the open file that was sent
/// with it.
struct Request {
    body: Vec<u8>,
    file: Option<File>,
    limits: RequestLimits,
}

/// Runs the sandbox process: gives up access to the system, and answers requests from stdin (a
/// socket) until the caller closes it. Returns the exit code of the process.
pub fn serve(create_handler: impl FnOnce(&SandboxSettings) -> Box<dyn RequestHandler>) -> u8 {
    // SAFETY: the process was started with a socket as file 0, and no other code uses this number.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    match serve_socket(socket, create_handler) {
        Ok(()) => EXIT_DONE,
        Err(_) => EXIT_FAILED,
    }
}

/// Runs the sandbox process on `socket`: gives up all access that is not needed, and answers
/// requests until the caller closes the socket.
fn serve_socket(
    mut socket: UnixStream,
    create_handler: impl FnOnce(&SandboxSettings) -> Box<dyn RequestHandler>,
) -> io::Result<()> {
    // SAFETY: this process uses no inherited file but the standard streams.
    _ = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    set_signal_actions();
    let mut settings = [0; SETTINGS_BYTES];
    socket.read_exact(&mut settings)?;
    let settings = decode_settings(&settings);
    let (confinement, limiter) = confine(&settings)?;
    panic::set_hook(Box::new(record_panic));
    let (sender, requests) = sync_channel(MAX_QUEUED_REQUESTS);
    let (mut reader, watched, reporter) = (socket.try_clone()?, socket.try_clone()?, socket.try_clone()?);
    spawn_service_thread("watch", move || exit_when_caller_closes_socket(&watched))?;
    spawn_service_thread("read", move || read_requests(&mut reader, &sender))?;
    spawn_service_thread("watch-cpu", move || {
        watch_cpu_time(|limit| exit_out_of_cpu_time(&reporter, limit))
    })?;
    let mut handler = create_handler(&settings);
    send_reply(&socket, ReplyKind::Result, &[confinement.to_byte()])?;
    answer_requests(&socket, &requests, &limiter, handler.as_mut())
}

/// Reports to the caller that its request exceeded the CPU time `limit`, and ends the sandbox
/// process. The thread that answers requests sends nothing meanwhile, because limited work still
/// runs.
fn exit_out_of_cpu_time(socket: &UnixStream, limit: Duration) -> Infallible {
    // Without the reply, the caller reports that the process ended.
    _ = send_reply(socket, ReplyKind::OutOfCpuTime, &limit.as_secs().to_le_bytes());
    process::exit(EXIT_FAILED.into())
}

/// Starts a thread with a small stack for tasks of the sandbox process other than interpreting
/// files, such as reading requests.
fn spawn_service_thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).stack_size(SERVICE_STACK_BYTES).spawn(run).map(drop)
}

/// Makes the sandbox process ignore signals such as SIGINT and SIGTERM, which terminals and batch
/// systems send to all processes of a job. Restores the default action of the signals of a crash,
/// so that the caller sees the signal.
fn set_signal_actions() {
    let ignored =
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];
    // Without SIGXFSZ, a write to a file fails.
    let ignored =
        ignored.into_iter().chain([Signal::SIGPIPE, Signal::SIGXFSZ]).map(|s| (s, SigHandler::SigIgn));
    let crashes = [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGABRT, Signal::SIGXCPU];
    for (number, action) in ignored.chain(crashes.into_iter().map(|s| (s, SigHandler::SigDfl))) {
        // SAFETY: neither action installs a handler. The call does not fail for these signals.
        _ = unsafe { signal(number, action) };
    }
}

/// Stores the message and the source location of a panic, so that the reply to the current request
/// can contain them.
fn record_panic(info: &panic::PanicHookInfo) {
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or_default();
    let message = text[..text.floor_char_boundary(MAX_PANIC_BYTES)].to_owned();
    let place =
        info.location().map_or_else(String::new, |place| format!(" ({}:{})", place.file(), place.line()));
    *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = message + &place;
}

/// Blocks until the caller has closed the socket, and then ends the sandbox process without waiting
/// for a running request.
fn exit_when_caller_closes_socket(socket: &UnixStream) {
    // A closed connection is reported without being requested.
    let mut watched = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    while poll(&mut watched, PollTimeout::NONE) == Err(nix::errno::Errno::EINTR) {}
    process::exit(EXIT_DONE.into());
}

/// Reads requests of the caller from the socket, and passes them through `sender` to the thread
/// that answers them. Returns when the socket is closed.
fn read_requests(socket: &mut UnixStream, sender: &SyncSender<Request>) {
    while let Ok(request) = read_request(socket) {
        if sender.send(request).is_err() {
            return;
        }
    }
}

/// Reads one request of the caller, and the open file that was sent with it.
fn read_request(socket: &mut UnixStream) -> io::Result<Request> {
    let (mut header, mut filled, mut file) = ([0; REQUEST_HEADER_BYTES], 0, None);
    while filled < header.len() {
        let (bytes, received) = receive_header_bytes_and_file(socket, &mut header[filled..])?;
        if bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        filled += bytes;
        file = file.or(received);
    }
    let (length, limits) = decode_request_header(&header);
    let mut body = vec![0; length];
    socket.read_exact(&mut body)?;
    Ok(Request { body, file, limits })
}

/// Reads bytes of a request's header from `socket` into `buffer`, and receives the open file (file
/// descriptor) that was sent with these bytes. Returns the number of bytes, and the file if there
/// is one.
fn receive_header_bytes_and_file(
    socket: &UnixStream,
    buffer: &mut [u8],
) -> io::Result<(usize, Option<File>)> {
    let mut control = cmsg_space!(RawFd);
    let mut parts = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
    let mut file = None;
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = part {
            // SAFETY: the kernel has just created these descriptors for this process.
            file = numbers.into_iter().map(|number| unsafe { File::from_raw_fd(number) }).next();
        }
    }
    Ok((message.bytes, file))
}

/// Handles the requests that arrive through the channel `requests`, one after another, and sends
/// the replies, until the caller closes the socket.
fn answer_requests(
    socket: &UnixStream,
    requests: &Receiver<Request>,
    limiter: &RequestLimiter,
    handler: &mut dyn RequestHandler,
) -> io::Result<()> {
    for Request { body, file, limits } in requests {
        limiter.limit_request(&limits)?;
        // If the socket is closed, the reply fails, too.
        let mut report_step = |step: u64| _ = send_reply(socket, ReplyKind::Progress, &step.to_le_bytes());
        let reply = catch_unwind(AssertUnwindSafe(|| handler.handle_request(&body, file, &mut report_step)));
        match reply {
            Ok(reply) if reply.len() as u64 > limits.reply_bytes => {
                send_reply(socket, ReplyKind::TooLong, &(reply.len() as u64).to_le_bytes())?;
            }
            Ok(reply) => send_reply(socket, ReplyKind::Result, &reply)?,
            Err(_) => send_reply(socket, ReplyKind::Panicked, take_panic_message().as_bytes())?,
        }
    }
    Ok(())
}

/// Returns, and forgets, the message and the source location of the last panic in this process.
pub fn take_panic_message() -> String {
    let mut last = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner);
    let mut message = std::mem::take(&mut *last);
    message.truncate(message.floor_char_boundary(MAX_PANIC_BYTES));
    message
}

/// Sends a reply of the kind `kind` to the process that sent the request.
fn send_reply(mut socket: &UnixStream, kind: ReplyKind, body: &[u8]) -> io::Result<()> {
    socket.write_all(&encode_reply_header(kind, body.len()))?;
    socket.write_all(body)
}
