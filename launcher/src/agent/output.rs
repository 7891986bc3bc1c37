//! Copies a worker's output from its pipes to its log, on one thread per rank.
//!
//! The pump also keeps the last lines and forwards the lines of shown ranks to the controller. If
//! the controller reads slowly, lines are not forwarded, so that the worker is never blocked.
use super::log_times::LogTimesWriter;
use crate::connection::{MessagePriority, Outbox};
use contract::{control::FromAgent, ids::Rank};
use diagnostic::{Diagnostic, codes::host::WORKER_LOG_UNWRITABLE};
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// The number of last lines of each rank that are kept.
pub(crate) const TAIL_LINES: usize = 20;
/// The length in bytes to which lines are truncated on the console and in the tail. The log has the
/// whole lines.
pub(crate) const MAX_LINE_BYTES: usize = 4 << 10;
/// The time without more output after which an unfinished line is written to the log, in
/// milliseconds.
const UNFINISHED_LINE_MS: u16 = 200;
/// The number of bytes that are read at once, and the longest unfinished line that is held back.
const CHUNK_BYTES: usize = 64 << 10;
/// The shortest time between two reports of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// An event that a pump reports to the agent.
#[derive(Debug)]
pub(crate) enum PumpEvent {
    /// The last lines; the answer to [`OutputPump::request_drain`].
    Drained(Vec<String>),
    /// A line contains the progress pattern. Reported about once a second at most.
    Progress,
    /// The warning that the log cannot be written any more. The worker continues.
    LogFailed(Diagnostic),
}

/// The options of an output pump for one rank.
#[derive(Clone, Debug)]
pub(crate) struct PumpOptions {
    pub(crate) rank: Rank,
    /// Whether the lines are forwarded to the controller.
    pub(crate) show: bool,
    /// The text of lines that count as progress (`run.progress_pattern`).
    pub(crate) progress_pattern: Option<String>,
}

/// The handle of a pump thread; dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct OutputPump {
    command: Arc<(AtomicU8, EventFd)>,
    show: Arc<AtomicBool>,
}

/// Command to a pump thread: continue.
const COMMAND_CONTINUE: u8 = 0;
/// Command to a pump thread: write what is left in the pipes, and report the last lines.
const COMMAND_DRAIN: u8 = 1;
/// Command to a pump thread: end.
const COMMAND_QUIT: u8 = 2;

impl OutputPump {
    /// Starts the thread that copies `stdout` and `stderr` of a worker. `events` receives the rank,
    /// the worker's pid and the event.
    pub(crate) fn start(
        options: PumpOptions,
        pid: u32,
        log: RankLog,
        stdout: OwnedFd,
        stderr: OwnedFd,
        console: Outbox<FromAgent>,
        events: mpsc::Sender<(Rank, u32, PumpEvent)>,
    ) -> io::Result<OutputPump> {
        for fd in [&stdout, &stderr] {
            fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let command = Arc::new((AtomicU8::new(COMMAND_CONTINUE), wake));
        let streams = [OutputStream::new(stdout, false), OutputStream::new(stderr, true)];
        let show = Arc::new(AtomicBool::new(options.show));
        let sink = OutputSink {
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
        thread::Builder::new().name("output".into()).stack_size(256 << 10).spawn(move || thread.run())?;
        Ok(OutputPump { command, show })
    }

    /// Sets whether lines are forwarded to the controller from now on.
    pub(crate) fn set_shown(&self, show: bool) {
        self.show.store(show, Ordering::Relaxed);
    }

    /// Requests that the thread write what is left in the pipes to the log and report the last
    /// lines ([`PumpEvent::Drained`]). Called after the worker has ended. Does not block.
    pub(crate) fn request_drain(&self) {
        self.send_command(COMMAND_DRAIN);
    }

    /// Sets the command of the thread and wakes the thread.
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

/// One of the worker's output pipes.
struct OutputStream {
    /// `None` after the end of the stream.
    pipe: Option<File>,
    stderr: bool,
    /// Bytes after the last line end.
    unfinished: Vec<u8>,
}

impl OutputStream {
    fn new(fd: OwnedFd, stderr: bool) -> Self {
        OutputStream { pipe: Some(fd.into()), stderr, unfinished: Vec::new() }
    }

    /// Reads once without blocking. Returns the number of bytes, or `None` if no output is
    /// available. Closes the pipe at the end of the stream and returns 0.
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

/// The state of a pump's thread.
struct PumpThread {
    command: Arc<(AtomicU8, EventFd)>,
    streams: [OutputStream; 2],
    sink: OutputSink,
}

impl PumpThread {
    /// Copies output until the command [`COMMAND_QUIT`] arrives.
    fn run(mut self) {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let ready = self.wait_for_output();
            match self.command.0.swap(COMMAND_CONTINUE, Ordering::AcqRel) {
                COMMAND_QUIT => {
                    self.command.0.store(COMMAND_QUIT, Ordering::Release);
                    return self.finish_lines();
                }
                COMMAND_DRAIN => self.drain_pipes(&mut buffer),
                _ => {}
            }
            for stream in &mut self.streams {
                if let Some(n) = stream.read(&mut buffer) {
                    self.sink.push_bytes(stream, &buffer[..n]);
                }
            }
            if !ready {
                self.finish_lines();
            }
        }
    }

    /// Waits for output or a command. Returns `false` if a line is unfinished and no more output
    /// came within [`UNFINISHED_LINE_MS`].
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

    /// Reads the output that the worker left in the pipes, and reports the last lines. Does not
    /// wait for descendants of the worker that keep a pipe open.
    fn drain_pipes(&mut self, buffer: &mut [u8]) {
        for stream in &mut self.streams {
            let size = stream.pipe.as_ref().and_then(|p| fcntl(p, FcntlArg::F_GETPIPE_SZ).ok());
            let mut remaining = size.map_or(0, |n| n.unsigned_abs() as usize);
            while remaining > 0 {
                let Some(n) = stream.read(buffer) else { break };
                self.sink.push_bytes(stream, &buffer[..n]);
                remaining = if stream.pipe.is_none() { 0 } else { remaining.saturating_sub(n) };
            }
        }
        self.finish_lines();
        self.sink.report_drained();
    }

    /// Distributes the unfinished lines of both streams.
    fn finish_lines(&mut self) {
        for stream in &mut self.streams {
            self.sink.finish_line(stream);
        }
    }
}

/// Distributes the output of a worker to the log, the tail and the console.
struct OutputSink {
    options: PumpOptions,
    shown: Arc<AtomicBool>,
    pid: u32,
    log: RankLog,
    console: Outbox<FromAgent>,
    events: mpsc::Sender<(Rank, u32, PumpEvent)>,
    tail: VecDeque<String>,
    /// Lines that were not sent to the console.
    dropped_lines: u64,
    progress_reported_at: Option<Instant>,
}

impl OutputSink {
    /// Distributes the whole lines of new bytes, and keeps the rest in the stream until its line is
    /// complete.
    fn push_bytes(&mut self, stream: &mut OutputStream, bytes: &[u8]) {
        let Some(end) = bytes.iter().rposition(|b| *b == b'\n') else {
            stream.unfinished.extend_from_slice(bytes);
            if stream.pipe.is_none() || stream.unfinished.len() > CHUNK_BYTES {
                self.finish_line(stream);
            }
            return;
        };
        let (whole, rest) = bytes.split_at(end + 1);
        if stream.unfinished.is_empty() {
            self.push_lines(whole, stream.stderr);
        } else {
            let mut joined = std::mem::take(&mut stream.unfinished);
            joined.extend_from_slice(whole);
            self.push_lines(&joined, stream.stderr);
        }
        stream.unfinished.extend_from_slice(rest);
    }

    /// Distributes an unfinished line as if it had ended.
    fn finish_line(&mut self, stream: &mut OutputStream) {
        if !stream.unfinished.is_empty() {
            let rest = std::mem::take(&mut stream.unfinished);
            self.push_lines(&rest, stream.stderr);
        }
    }

    /// Distributes whole lines of one stream, and looks for the progress pattern in them.
    fn push_lines(&mut self, bytes: &[u8], stderr: bool) {
        if let Some(error) = self.log.append(bytes) {
            self.send_event(PumpEvent::LogFailed(error));
        }
        self.detect_progress(bytes);
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        if self.shown.load(Ordering::Relaxed) {
            for line in bytes.split(|b| *b == b'\n') {
                self.forward_text(format_display_line(line), stderr);
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

    /// Reports progress if the bytes contain the progress pattern, at most once per
    /// [`PROGRESS_INTERVAL`].
    fn detect_progress(&mut self, bytes: &[u8]) {
        let Some(pattern) = self.options.progress_pattern.as_ref().map(String::as_bytes) else { return };
        let is_due = self.progress_reported_at.is_none_or(|at| at.elapsed() >= PROGRESS_INTERVAL);
        if is_due && bytes.windows(pattern.len()).any(|part| part == pattern) {
            self.progress_reported_at = Some(Instant::now());
            // If the agent is busy, the next line reports the progress.
            _ = self.events.try_send((self.options.rank, self.pid, PumpEvent::Progress));
        }
    }

    /// Forwards a line to the controller, after a notice about dropped lines if there are any.
    /// Counts the line as dropped if the queue is full.
    fn forward_text(&mut self, text: String, stderr: bool) {
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

    /// Returns the notice that names the log for the lines that were not forwarded.
    fn format_dropped_lines_notice(&self) -> FromAgent {
        let text = match self.dropped_lines {
            1 => format!("[1 line is only in {}]", self.log.path),
            n => format!("[{n} lines are only in {}]", self.log.path),
        };
        FromAgent::Line { rank: self.options.rank, stderr: true, text }
    }

    /// Forwards a notice about dropped lines, and reports the last lines to the agent.
    fn report_drained(&mut self) {
        if self.dropped_lines > 0
            && self.console.send_message(MessagePriority::Normal, self.format_dropped_lines_notice())
        {
            self.dropped_lines = 0;
        }
        let tail = self.tail.iter().cloned().collect();
        self.send_event(PumpEvent::Drained(tail));
    }

    fn send_event(&self, event: PumpEvent) {
        // The agent reads events at once; an error means that it has ended.
        _ = self.events.blocking_send((self.options.rank, self.pid, event));
    }
}

/// Returns a line as a terminal shows it: the text after the last carriage return, as valid UTF-8,
/// truncated to [`MAX_LINE_BYTES`].
fn format_display_line(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let line = line.rsplit(|b| *b == b'\r').next().unwrap_or(line);
    let mut text = String::from_utf8_lossy(&line[..line.len().min(MAX_LINE_BYTES)]).into_owned();
    if line.len() > MAX_LINE_BYTES {
        text.push_str(" […]");
    }
    text
}

/// The log file of a rank, up to a maximum size.
#[derive(Debug)]
pub(crate) struct RankLog {
    file: File,
    path: String,
    size: u64,
    max_size: u64,
    times: LogTimesWriter,
    /// Whether the log is full or could not be written.
    closed: bool,
}

impl RankLog {
    /// Opens the log for appending. Creates it and its directory if they do not exist.
    pub(crate) fn open(path: &Path, max_size: u64) -> io::Result<RankLog> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let size = file.metadata()?.len();
        let times = LogTimesWriter::open(path);
        Ok(RankLog { file, path: path.display().to_string(), size, max_size, times, closed: false })
    }

    /// Appends bytes to the log. A full log ends with a notice, and later bytes are dropped.
    /// Returns a warning when writing fails for the first time.
    fn append(&mut self, bytes: &[u8]) -> Option<Diagnostic> {
        if self.closed {
            return None;
        }
        let free = self.max_size.saturating_sub(self.size);
        let fits = if bytes.len() as u64 <= free {
            bytes.len()
        } else {
            self.closed = true;
            bytes[..free as usize].iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1)
        };
        self.times.record_size(self.size);
        let mut result = self.file.write_all(&bytes[..fits]);
        self.size += fits as u64;
        if self.closed && result.is_ok() {
            result = writeln!(
                self.file,
                "[launch] this log ends here: it reached run.logs.max_size ({} bytes); later output was not kept",
                self.max_size
            );
        }
        let error = result.err()?;
        self.closed = true;
        let message = format!("cannot write the log {} any more; the worker continues without it", self.path);
        Some(Diagnostic::warning(WORKER_LOG_UNWRITABLE, message).with_subject(&self.path).with_cause(&error))
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
