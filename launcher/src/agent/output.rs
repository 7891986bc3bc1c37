//! A worker's output: pumped by one thread per rank from its pipes into its log, the last lines kept, and shown ranks'
//! lines offered to the controller. A slow console costs lines on the console, never the worker's time.
use super::times::Times;
use crate::link::{Outbox, Priority};
use contract::{control::FromAgent, ids::Rank};
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

/// Last lines kept of each rank.
pub(crate) const TAIL_LINES: usize = 20;
/// A longer line is cut for the console and the tail (the log has all of it), bytes.
pub(crate) const LINE_MAX: usize = 4 << 10;
/// An unfinished line goes into the log after this long without more of it, milliseconds.
const UNFINISHED_MS: u16 = 200;
/// Bytes read at once; also the longest unfinished line held back.
const CHUNK: usize = 64 << 10;
/// Between two tellings of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// What a pump tells the agent.
#[derive(Debug)]
pub(crate) enum PumpEvent {
    /// The answer to [`Pump::drain`].
    Drained(Vec<String>),
    /// A line with the marker of progress, told about once a second at most.
    Progress,
    /// The log can't be written any more; the worker goes on.
    Trouble(String),
}

/// How a rank's output is treated.
#[derive(Clone, Debug)]
pub(crate) struct PumpPlan {
    pub(crate) rank: Rank,
    /// Offer lines to the controller.
    pub(crate) show: bool,
    /// Lines with this text are progress.
    pub(crate) marker: Option<String>,
}

/// The handle of a pump thread; dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Pump {
    order: Arc<(AtomicU8, EventFd)>,
    show: Arc<AtomicBool>,
}

const GO_ON: u8 = 0;
const DRAIN: u8 = 1;
const QUIT: u8 = 2;

impl Pump {
    /// Starts pumping. `events` carries the rank, the worker's pid and what there is to tell.
    pub(crate) fn start(
        plan: PumpPlan,
        pid: u32,
        log: Log,
        stdout: OwnedFd,
        stderr: OwnedFd,
        console: Outbox<FromAgent>,
        events: mpsc::Sender<(Rank, u32, PumpEvent)>,
    ) -> io::Result<Pump> {
        for fd in [&stdout, &stderr] {
            fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let order = Arc::new((AtomicU8::new(GO_ON), wake));
        let streams = [Stream::new(stdout, false), Stream::new(stderr, true)];
        let show = Arc::new(AtomicBool::new(plan.show));
        let (shown, tail, lost, progress_told) = (show.clone(), VecDeque::new(), 0, None);
        let sink = Sink { plan, shown, pid, log, console, events, tail, lost, progress_told };
        let work = Work { order: order.clone(), streams, sink };
        thread::Builder::new().name("output".into()).stack_size(256 << 10).spawn(move || work.run())?;
        Ok(Pump { order, show })
    }

    /// Offer lines to the controller from now on, or don't.
    pub(crate) fn show(&self, show: bool) {
        self.show.store(show, Ordering::Relaxed);
    }

    /// The worker has ended: put what is in its pipes into the log and answer with the last lines.
    pub(crate) fn drain(&self) {
        self.give(DRAIN);
    }

    fn give(&self, order: u8) {
        self.order.0.store(order, Ordering::Release);
        _ = self.order.1.write(1);
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.give(QUIT);
    }
}

struct Stream {
    /// `None` after its end.
    pipe: Option<File>,
    stderr: bool,
    /// What came after the last line end.
    unfinished: Vec<u8>,
}

impl Stream {
    fn new(fd: OwnedFd, stderr: bool) -> Self {
        Stream { pipe: Some(fd.into()), stderr, unfinished: Vec::new() }
    }

    /// Reads once; bytes read, 0 at the end (the pipe is closed then), `None` when there is nothing now.
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

struct Work {
    order: Arc<(AtomicU8, EventFd)>,
    streams: [Stream; 2],
    sink: Sink,
}

impl Work {
    fn run(mut self) {
        let mut buffer = vec![0; CHUNK];
        loop {
            let ready = self.wait();
            match self.order.0.swap(GO_ON, Ordering::AcqRel) {
                QUIT => {
                    self.order.0.store(QUIT, Ordering::Release);
                    return self.finish_lines();
                }
                DRAIN => self.drain(&mut buffer),
                _ => {}
            }
            for stream in &mut self.streams {
                if let Some(n) = stream.read(&mut buffer) {
                    self.sink.take(stream, &buffer[..n]);
                }
            }
            if !ready {
                self.finish_lines();
            }
        }
    }

    /// Waits for output or an order; `false`: nothing came for a while and a line is unfinished.
    fn wait(&self) -> bool {
        let mut fds = vec![PollFd::new(self.order.1.as_fd(), PollFlags::POLLIN)];
        let open = self.streams.iter().filter_map(|s| s.pipe.as_ref());
        fds.extend(open.map(|p| PollFd::new(p.as_fd(), PollFlags::POLLIN)));
        let unfinished = self.streams.iter().any(|s| !s.unfinished.is_empty());
        let limit = if unfinished { PollTimeout::from(UNFINISHED_MS) } else { PollTimeout::NONE };
        let ready = !matches!(poll(&mut fds, limit), Ok(0));
        _ = self.order.1.read();
        ready
    }

    /// Everything the worker wrote is in the pipes by now; what a descendant writes on is not waited for.
    fn drain(&mut self, buffer: &mut [u8]) {
        for stream in &mut self.streams {
            let size = stream.pipe.as_ref().and_then(|p| fcntl(p, FcntlArg::F_GETPIPE_SZ).ok());
            let mut left = size.map_or(0, |n| n.unsigned_abs() as usize);
            while left > 0 {
                let Some(n) = stream.read(buffer) else { break };
                self.sink.take(stream, &buffer[..n]);
                left = if stream.pipe.is_none() { 0 } else { left.saturating_sub(n) };
            }
        }
        self.finish_lines();
        self.sink.drained();
    }

    fn finish_lines(&mut self) {
        for stream in &mut self.streams {
            self.sink.finish(stream);
        }
    }
}

/// Where output goes.
struct Sink {
    plan: PumpPlan,
    shown: Arc<AtomicBool>,
    pid: u32,
    log: Log,
    console: Outbox<FromAgent>,
    events: mpsc::Sender<(Rank, u32, PumpEvent)>,
    tail: VecDeque<String>,
    /// Lines the console did not get.
    lost: u64,
    progress_told: Option<Instant>,
}

impl Sink {
    /// Takes new bytes of a stream; whole lines go on, the rest waits for more.
    fn take(&mut self, stream: &mut Stream, bytes: &[u8]) {
        let Some(end) = bytes.iter().rposition(|b| *b == b'\n') else {
            stream.unfinished.extend_from_slice(bytes);
            if stream.pipe.is_none() || stream.unfinished.len() > CHUNK {
                self.finish(stream);
            }
            return;
        };
        let (whole, rest) = bytes.split_at(end + 1);
        if stream.unfinished.is_empty() {
            self.lines(whole, stream.stderr);
        } else {
            let mut joined = std::mem::take(&mut stream.unfinished);
            joined.extend_from_slice(whole);
            self.lines(&joined, stream.stderr);
        }
        stream.unfinished.extend_from_slice(rest);
    }

    /// Lets an unfinished line go as it is.
    fn finish(&mut self, stream: &mut Stream) {
        if !stream.unfinished.is_empty() {
            let rest = std::mem::take(&mut stream.unfinished);
            self.lines(&rest, stream.stderr);
        }
    }

    /// Whole lines of one stream.
    fn lines(&mut self, bytes: &[u8], stderr: bool) {
        if let Some(trouble) = self.log.write(bytes) {
            self.tell(PumpEvent::Trouble(trouble));
        }
        self.look_for_progress(bytes);
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        if self.shown.load(Ordering::Relaxed) {
            for line in bytes.split(|b| *b == b'\n') {
                self.show(readable(line), stderr);
            }
        }
        let last: Vec<&[u8]> = bytes.rsplit(|b| *b == b'\n').take(TAIL_LINES).collect();
        for line in last.into_iter().rev() {
            if self.tail.len() == TAIL_LINES {
                self.tail.pop_front();
            }
            self.tail.push_back(readable(line));
        }
    }

    fn look_for_progress(&mut self, bytes: &[u8]) {
        let Some(marker) = self.plan.marker.as_ref().map(String::as_bytes) else { return };
        let due = self.progress_told.is_none_or(|at| at.elapsed() >= PROGRESS_EVERY);
        if due && bytes.windows(marker.len()).any(|piece| piece == marker) {
            self.progress_told = Some(Instant::now());
            // When the agent is busy the next line will tell.
            _ = self.events.try_send((self.plan.rank, self.pid, PumpEvent::Progress));
        }
    }

    fn show(&mut self, text: String, stderr: bool) {
        let rank = self.plan.rank;
        if self.lost > 0 && self.console.send(Priority::Chatter, self.loss()) {
            self.lost = 0;
        }
        if self.lost > 0 || !self.console.send(Priority::Chatter, FromAgent::Line { rank, stderr, text }) {
            self.lost += 1;
        }
    }

    fn loss(&self) -> FromAgent {
        let text = format!("[{} lines are only in {}]", self.lost, self.log.path);
        FromAgent::Line { rank: self.plan.rank, stderr: true, text }
    }

    fn drained(&mut self) {
        if self.lost > 0 && self.console.send(Priority::News, self.loss()) {
            self.lost = 0;
        }
        let tail = self.tail.iter().cloned().collect();
        self.tell(PumpEvent::Drained(tail));
    }

    fn tell(&self, event: PumpEvent) {
        // The agent reads these at once; when it is gone nobody needs them.
        _ = self.events.blocking_send((self.plan.rank, self.pid, event));
    }
}

/// A line as a person reads it: as a terminal would leave it after carriage returns, cut, and valid UTF-8.
fn readable(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let line = line.rsplit(|b| *b == b'\r').next().unwrap_or(line);
    let mut text = String::from_utf8_lossy(&line[..line.len().min(LINE_MAX)]).into_owned();
    if line.len() > LINE_MAX {
        text.push_str(" […]");
    }
    text
}

/// A rank's log file: appended to, up to a size.
#[derive(Debug)]
pub(crate) struct Log {
    file: File,
    path: String,
    size: u64,
    max_size: u64,
    times: Times,
    /// Full, or broken and said so.
    closed: bool,
}

impl Log {
    /// Opens (and creates) the log and its directory.
    pub(crate) fn open(path: &Path, max_size: u64) -> io::Result<Log> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let size = file.metadata()?.len();
        let times = Times::open(path);
        Ok(Log { file, path: path.display().to_string(), size, max_size, times, closed: false })
    }

    /// Appends; what to tell a person when this is the first that can't be.
    fn write(&mut self, bytes: &[u8]) -> Option<String> {
        if self.closed {
            return None;
        }
        let room = self.max_size.saturating_sub(self.size);
        let fits = if bytes.len() as u64 <= room {
            bytes.len()
        } else {
            self.closed = true;
            bytes[..room as usize].iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1)
        };
        self.times.mark(self.size);
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
        Some(format!("{} can't be written any more ({error}); the worker goes on without its log", self.path))
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
