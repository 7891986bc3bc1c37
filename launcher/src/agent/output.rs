//! [`OutputPump`]: copies a worker's output from the worker's pipes to the log of the rank, on one
//! thread per rank.
//!
//! The pump also keeps the last lines, and forwards the lines of shown ranks to the controller. If
//! the controller reads slowly, lines are not forwarded, so that the worker is never blocked.
use super::{error_file, hang::TimeoutEvidence, rank_log::RankLogWriter};
use crate::connection::{MessagePriority, Outbox};
use diagnostic::Diagnostic;
use jobspec::ids::Rank;
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use protocol::{control::FromAgent, hang::RankEvidence};
use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// How many of the last lines of each rank's output are kept, so that a report of the rank's
/// failure can contain them. These lines are the tail.
pub(crate) const TAIL_LINES: usize = 20;
/// The length, in bytes, to which a line of a worker's output is truncated on the user's console
/// and in failure reports. The log contains the whole lines.
pub(crate) const MAX_LINE_BYTES: usize = 4 << 10;
/// How long, in milliseconds, the agent waits for the rest of an unfinished output line before the
/// agent writes its beginning to the log.
const UNFINISHED_LINE_MS: u16 = 200;
/// The largest number of bytes of a worker's output that are read at once. An unfinished line that
/// is longer is written to the log in several parts.
const MAX_READ_BYTES: usize = 64 << 10;
/// The shortest time between two progress reports for a worker whose output contains matches of the
/// user's `run.progress_pattern`.
const MIN_PROGRESS_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// An event from the thread that copies a worker's output to the agent's event loop, for example
/// that all output was copied.
#[derive(Debug)]
pub(crate) enum PumpEvent {
    /// The pipes were drained. The answer to [`OutputPump::request_drain`].
    Drained {
        /// The last lines of output.
        tail: Vec<String>,
        /// The error that the program recorded in its error file, if any.
        error: Option<String>,
        /// What the worker leaves about its collectives, if torch has detected a hang.
        timeout: Option<Box<RankEvidence>>,
    },
    /// A line contains the progress pattern. Reported at most once per
    /// [`MIN_PROGRESS_REPORT_INTERVAL`].
    Progress,
    /// The log cannot be written. Contains the warning for the user. The worker continues.
    LogFailed(Diagnostic),
}

/// The options of the thread that copies the output of one rank's worker, such as the pattern that
/// shows progress.
#[derive(Clone, Debug)]
pub(crate) struct PumpOptions {
    pub(crate) rank: Rank,
    /// Whether output lines are forwarded to the controller from the start.
    pub(crate) show: bool,
    /// The text that marks a line of output as progress (`run.progress_pattern`); `None` if output
    /// does not count as progress.
    pub(crate) progress_pattern: Option<String>,
    /// The file in which the program may record its error (`TORCHELASTIC_ERROR_FILE`).
    pub(crate) error_file: Option<PathBuf>,
    /// What the output of the worker contains about collectives is added here; `None` if hangs are
    /// not detected.
    pub(crate) timeout_evidence: Option<TimeoutEvidence>,
}

/// The queue through which the threads that copy workers' output send lines to the present
/// controller, which shows them to the user. All [`OutputPump`]s of an agent share the queue.
#[derive(Clone, Debug)]
pub(crate) struct ControllerLineQueue(Arc<Mutex<Outbox<FromAgent>>>);

impl ControllerLineQueue {
    /// Creates the queue that passes lines of workers' output to `outbox`, the queue of messages to
    /// the present controller.
    pub(crate) fn new(outbox: Outbox<FromAgent>) -> ControllerLineQueue {
        ControllerLineQueue(Arc::new(Mutex::new(outbox)))
    }

    /// Sends all later lines of workers' output to another controller, through that controller's
    /// message queue `outbox`.
    pub(crate) fn set_controller_outbox(&self, outbox: Outbox<FromAgent>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = outbox;
    }

    /// Adds a message with a line of output to the queue of messages to the controller. Returns
    /// `false` if the queue is full or there is no controller.
    fn send_message(&self, priority: MessagePriority, message: FromAgent) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).send_message(priority, message)
    }
}

/// The handle of the thread that copies the output of one worker to the log of its rank. Dropping
/// the handle requests that the thread end, and does not wait for it.
#[derive(Debug)]
pub(crate) struct OutputPump {
    command: Arc<(AtomicU8, EventFd)>,
    show: Arc<AtomicBool>,
}

/// The value for no command to the thread that copies a worker's output, with which the thread only
/// copies available output.
const COMMAND_CONTINUE: u8 = 0;
/// The command that makes the thread of an ended worker copy all output that is left in the
/// worker's pipes, and then report the last lines.
const COMMAND_DRAIN: u8 = 1;
/// The command by which the thread that copies a worker's output ends.
const COMMAND_QUIT: u8 = 2;

impl OutputPump {
    /// Starts the thread that copies what a worker writes to its output pipes `stdout` and `stderr`
    /// to the log of the worker's rank.
    ///
    /// `console` is the queue of lines to the controller. Each event is sent to `events` with the
    /// rank and the pid of the worker.
    pub(crate) fn start(
        options: PumpOptions,
        pid: u32,
        log: RankLogWriter,
        stdout: OwnedFd,
        stderr: OwnedFd,
        console: ControllerLineQueue,
        events: mpsc::Sender<(Rank, u32, PumpEvent)>,
    ) -> io::Result<OutputPump> {
        for fd in [&stdout, &stderr] {
            fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let command = Arc::new((AtomicU8::new(COMMAND_CONTINUE), wake));
        let streams = [OutputStream::new(stdout, false), OutputStream::new(stderr, true)];
        let show = Arc::new(AtomicBool::new(options.show));
        let sink = OutputDestinations {
            options,
            shown: show.clone(),
            pid,
            log,
            console,
            events,
            tail: VecDeque::new(),
            dropped_lines: 0,
            progress_reported_at: None,
        };
        let thread = PumpThread { command: command.clone(), streams, sink };
        thread::Builder::new()
            .name("output".into())
            .stack_size(256 << 10)
            .spawn(move || thread.copy_until_quit())?;
        Ok(OutputPump { command, show })
    }

    /// Sets whether the worker's output lines are forwarded to the controller, which shows them to
    /// the user, from now on.
    pub(crate) fn set_console_forwarding(&self, show: bool) {
        self.show.store(show, Ordering::Relaxed);
    }

    /// Requests that the thread copy the output that remains in the worker's pipes to the log, and
    /// then report the last lines to the agent's event loop. Does not block.
    ///
    /// The agent calls this method after the worker has ended.
    pub(crate) fn request_drain(&self) {
        self.send_command(COMMAND_DRAIN);
    }

    /// Sends a command (drain the pipes or quit) to the thread that copies the worker's output, and
    /// wakes the thread.
    fn send_command(&self, command: u8) {
        self.command.0.store(command, Ordering::Release);
        _ = self.command.1.write(1);
    }
}

impl Drop for OutputPump {
    fn drop(&mut self) {
        self.send_command(COMMAND_QUIT);
    }
}

/// One of a worker's two output streams (stdout or stderr): the pipe, and the beginning of a line
/// whose end was not yet read.
struct OutputStream {
    /// The read end of the pipe; `None` after the end of the stream.
    pipe: Option<File>,
    stderr: bool,
    /// The bytes that were read after the last line end.
    unfinished: Vec<u8>,
}

impl OutputStream {
    fn new(fd: OwnedFd, stderr: bool) -> Self {
        OutputStream { pipe: Some(fd.into()), stderr, unfinished: Vec::new() }
    }

    /// Reads the output of the worker that is available in the pipe into `buffer`, without
    /// blocking. Returns the number of bytes, or `None` if no output is available or the stream has
    /// ended before.
    ///
    /// At the end of the stream, closes the pipe and returns 0.
    fn read(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let pipe = self.pipe.as_mut()?;
        match pipe.read(buffer) {
            Ok(n) if n > 0 => Some(n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Some(0),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
            _ => {
                self.pipe = None;
                Some(0)
            }
        }
    }
}

/// The state of the thread that copies the output of one worker: the worker's pipes, the commands
/// to the thread, and the destinations of the output.
struct PumpThread {
    command: Arc<(AtomicU8, EventFd)>,
    streams: [OutputStream; 2],
    sink: OutputDestinations,
}

impl PumpThread {
    /// Copies the worker's output to the log, the controller and the list of last lines until the
    /// command to end arrives.
    fn copy_until_quit(mut self) {
        let mut buffer = vec![0; MAX_READ_BYTES];
        loop {
            let ready = self.wait_for_output();
            match self.command.0.swap(COMMAND_CONTINUE, Ordering::AcqRel) {
                COMMAND_QUIT => {
                    self.command.0.store(COMMAND_QUIT, Ordering::Release);
                    return self.write_unfinished_lines();
                }
                COMMAND_DRAIN => self.drain_pipes(&mut buffer),
                _ => {}
            }
            for stream in &mut self.streams {
                if let Some(n) = stream.read(&mut buffer) {
                    self.sink.write_complete_lines(stream, &buffer[..n]);
                }
            }
            if !ready {
                self.write_unfinished_lines();
            }
        }
    }

    /// Blocks until the worker has written output to its pipes, or until a command to this thread
    /// arrives. Returns `false` if a line without a line end is waiting and nothing arrived within
    /// [`UNFINISHED_LINE_MS`].
    fn wait_for_output(&self) -> bool {
        let mut fds = vec![PollFd::new(self.command.1.as_fd(), PollFlags::POLLIN)];
        let open = self.streams.iter().filter_map(|s| s.pipe.as_ref());
        fds.extend(open.map(|p| PollFd::new(p.as_fd(), PollFlags::POLLIN)));
        let unfinished = self.streams.iter().any(|s| !s.unfinished.is_empty());
        let timeout = if unfinished { PollTimeout::from(UNFINISHED_LINE_MS) } else { PollTimeout::NONE };
        let ready = !matches!(poll(&mut fds, timeout), Ok(0));
        _ = self.command.1.read();
        ready
    }

    /// Copies the output that an ended worker left in its pipes to the log, and reports the last
    /// lines to the agent's event loop. Does not wait for descendants of the worker that keep a
    /// pipe open.
    fn drain_pipes(&mut self, buffer: &mut [u8]) {
        for stream in &mut self.streams {
            let size = stream.pipe.as_ref().and_then(|p| fcntl(p, FcntlArg::F_GETPIPE_SZ).ok());
            let mut remaining = size.map_or(0, |n| n.unsigned_abs() as usize);
            while remaining > 0 {
                let Some(n) = stream.read(buffer) else { break };
                self.sink.write_complete_lines(stream, &buffer[..n]);
                remaining = if stream.pipe.is_none() { 0 } else { remaining.saturating_sub(n) };
            }
        }
        self.write_unfinished_lines();
        self.sink.report_drained();
    }

    /// Writes the last lines of the worker's stdout and stderr that have no line end yet to the
    /// log, as if they were complete.
    fn write_unfinished_lines(&mut self) {
        for stream in &mut self.streams {
            self.sink.write_unfinished_line(stream);
        }
    }
}

/// The destinations of one worker's output: the log of its rank, the user's console (through the
/// controller), and the last lines for failure reports.
struct OutputDestinations {
    options: PumpOptions,
    shown: Arc<AtomicBool>,
    pid: u32,
    log: RankLogWriter,
    console: ControllerLineQueue,
    events: mpsc::Sender<(Rank, u32, PumpEvent)>,
    tail: VecDeque<String>,
    /// The number of lines that were not forwarded to the controller because the queue was full,
    /// and that the console does not report yet.
    dropped_lines: u64,
    progress_reported_at: Option<Instant>,
}

impl OutputDestinations {
    /// Passes the complete lines in `bytes`, the output of a worker, to the rank's log, the user's
    /// console and the last lines for failure reports. Keeps the bytes after the last line end in
    /// `stream` until the line is complete.
    fn write_complete_lines(&mut self, stream: &mut OutputStream, bytes: &[u8]) {
        let Some(end) = bytes.iter().rposition(|b| *b == b'\n') else {
            stream.unfinished.extend_from_slice(bytes);
            if stream.pipe.is_none() || stream.unfinished.len() > MAX_READ_BYTES {
                self.write_unfinished_line(stream);
            }
            return;
        };
        let (whole, rest) = bytes.split_at(end + 1);
        if stream.unfinished.is_empty() {
            self.write_lines(whole, stream.stderr);
        } else {
            let mut joined = std::mem::take(&mut stream.unfinished);
            joined.extend_from_slice(whole);
            self.write_lines(&joined, stream.stderr);
        }
        stream.unfinished.extend_from_slice(rest);
    }

    /// Treats a line of a worker's output without a line end as complete, and writes it to the
    /// rank's log, the controller and the list of last lines.
    fn write_unfinished_line(&mut self, stream: &mut OutputStream) {
        if !stream.unfinished.is_empty() {
            let rest = std::mem::take(&mut stream.unfinished);
            self.write_lines(&rest, stream.stderr);
        }
    }

    /// Writes complete lines of a worker's output to the rank's log, to the console if the user
    /// wants them, and to the last lines for failure reports. Reports progress if the lines contain
    /// the progress pattern.
    fn write_lines(&mut self, bytes: &[u8], stderr: bool) {
        self.log.append(bytes);
        self.detect_progress(bytes);
        if let Some(evidence) = &self.options.timeout_evidence {
            evidence.output().add_output(bytes);
        }
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        if self.shown.load(Ordering::Relaxed) {
            for line in bytes.split(|b| *b == b'\n') {
                self.forward_line_to_controller(format_display_line(line), stderr);
            }
        }
        let last: Vec<&[u8]> = bytes.rsplit(|b| *b == b'\n').take(TAIL_LINES).collect();
        for line in last.into_iter().rev() {
            if self.tail.len() == TAIL_LINES {
                self.tail.pop_front();
            }
            self.tail.push_back(format_display_line(line));
        }
    }

    /// Reports to the agent that the worker makes progress, if `bytes`, a part of the worker's
    /// output, contains the user's `run.progress_pattern`. Reports at most once per
    /// [`MIN_PROGRESS_REPORT_INTERVAL`].
    fn detect_progress(&mut self, bytes: &[u8]) {
        let Some(pattern) = self.options.progress_pattern.as_ref().map(String::as_bytes) else { return };
        let is_due = self.progress_reported_at.is_none_or(|at| at.elapsed() >= MIN_PROGRESS_REPORT_INTERVAL);
        if is_due && bytes.windows(pattern.len()).any(|part| part == pattern) {
            self.progress_reported_at = Some(Instant::now());
            // If the queue to the agent is full, a later line reports the progress.
            _ = self.events.try_send((self.options.rank, self.pid, PumpEvent::Progress));
        }
    }

    /// Sends a line of the worker's output to the controller, which shows the line to the user. If
    /// lines were dropped before, a notice with their number precedes the line. If the queue is
    /// full, the line is dropped and counted.
    fn forward_line_to_controller(&mut self, text: String, stderr: bool) {
        let rank = self.options.rank;
        if self.dropped_lines > 0
            && self.console.send_message(MessagePriority::Low, self.format_dropped_lines_notice())
        {
            self.dropped_lines = 0;
        }
        if self.dropped_lines > 0
            || !self.console.send_message(MessagePriority::Low, FromAgent::Line { rank, stderr, text })
        {
            self.dropped_lines += 1;
        }
    }

    /// Formats a notice with the number of output lines that the user's console left out, and with
    /// the path of the log that contains them.
    fn format_dropped_lines_notice(&self) -> FromAgent {
        let text = match self.dropped_lines {
            1 => format!("[1 line is only in {}]", self.log.path()),
            n => format!("[{n} lines are only in {}]", self.log.path()),
        };
        FromAgent::Line { rank: self.options.rank, stderr: true, text }
    }

    /// Reports to the agent's event loop that all output of the ended worker was copied, together
    /// with the last lines of the output. If lines were dropped, first forwards a notice with their
    /// number to the controller.
    fn report_drained(&mut self) {
        if self.dropped_lines > 0
            && self.console.send_message(MessagePriority::Normal, self.format_dropped_lines_notice())
        {
            self.dropped_lines = 0;
        }
        self.log.write_dropped_bytes_notice();
        let tail = self.tail.iter().cloned().collect();
        let error = self.options.error_file.as_deref().and_then(error_file::read_error_message);
        let timeout = self.options.timeout_evidence.as_ref().and_then(TimeoutEvidence::read);
        self.send_event(PumpEvent::Drained { tail, error, timeout });
    }

    fn send_event(&self, event: PumpEvent) {
        // The agent reads events immediately. An error means that the agent has ended.
        _ = self.events.blocking_send((self.options.rank, self.pid, event));
    }
}

/// Converts a line of output to the text that a terminal would show, for example after carriage
/// returns.
fn format_display_line(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let line = line.rsplit(|b| *b == b'\r').next().unwrap_or(line);
    let mut text = String::from_utf8_lossy(&line[..line.len().min(MAX_LINE_BYTES)]).into_owned();
    if line.len() > MAX_LINE_BYTES {
        text.push_str(" […]");
    }
    text
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
