//! [`LineSink`]: collects the lines of the debug log, and writes them to a file on a separate
//! thread.
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    mem,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};
use tracing_subscriber::fmt::MakeWriter;

/// The size in bytes at which a debug log file is full, so that launch renames the file and begins
/// a new one. A full file is renamed to `NAME.1`, which replaces an older one.
pub const MAX_FILE_BYTES: u64 = 8 << 20;
/// The largest number of debug log lines that a process keeps in memory until its log thread writes
/// them to the file. Further lines are dropped.
const MAX_QUEUED_LINES: usize = 1024;
/// How long a process that is about to end waits until its queued log lines are written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// A request to the thread that writes the log file: write a line, or notify the sender when all
/// earlier lines are written.
enum WriterRequest {
    Line(Vec<u8>),
    /// Asks the thread for an answer as soon as all earlier lines are written.
    Flush(SyncSender<()>),
}

/// The destination of new debug log lines: a list in memory before the log file is open, and the
/// queue of the log thread afterwards.
enum PendingLines {
    /// The collected lines, while no file is open yet.
    Memory(Vec<Vec<u8>>),
    /// The queue of the thread that writes the file.
    Thread(SyncSender<WriterRequest>),
}

/// Accepts lines of the debug log without blocking, and passes them to the thread that writes them
/// to the log file.
#[derive(Clone)]
pub(crate) struct LineSink {
    destination: Arc<Mutex<PendingLines>>,
    /// The number of dropped lines that the log file does not report yet.
    dropped: Arc<AtomicU64>,
}

impl LineSink {
    /// Creates a sink that collects log lines in memory until [`LineSink::open_file`] is called.
    pub(crate) fn new() -> LineSink {
        let destination = Arc::new(Mutex::new(PendingLines::Memory(Vec::new())));
        LineSink { destination, dropped: Arc::new(AtomicU64::new(0)) }
    }

    /// Opens the log file at `path`, starts the thread that writes it, and first writes the lines
    /// that were collected in memory. Does nothing if a file is open.
    ///
    /// Blocks while the disk stalls. Meanwhile, lines are collected in memory.
    pub(crate) fn open_file(&self, path: &Path) -> io::Result<()> {
        if matches!(&*self.lock(), PendingLines::Thread(_)) {
            return Ok(());
        }
        let mut file = CappedFile::open(path, MAX_FILE_BYTES)?;
        let mut destination = self.lock();
        let PendingLines::Memory(lines) = &mut *destination else { return Ok(()) };
        let (sender, requests) = sync_channel(MAX_QUEUED_LINES);
        let (lines, dropped) = (mem::take(lines), self.dropped.clone());
        thread::Builder::new().name("launch-debuglog".to_owned()).spawn(move || {
            for line in &lines {
                file.write_line(line);
            }
            write_received_lines(&mut file, &requests, &dropped);
        })?;
        *destination = PendingLines::Thread(sender);
        Ok(())
    }

    /// Waits until all lines that were queued so far are written to the file, but at most for
    /// [`FLUSH_TIMEOUT`].
    pub(crate) fn flush(&self) {
        let sender = match &*self.lock() {
            PendingLines::Thread(sender) => sender.clone(),
            PendingLines::Memory(_) => return,
        };
        let (answer, answered) = sync_channel(1);
        if sender.try_send(WriterRequest::Flush(answer)).is_ok() {
            _ = answered.recv_timeout(FLUSH_TIMEOUT);
        }
    }

    /// Passes a log line to the thread that writes the file, or stores the line in memory while no
    /// file is open, without blocking. Drops and counts the line if the queue is full.
    fn push(&self, line: &[u8]) {
        let is_queued = match &mut *self.lock() {
            PendingLines::Memory(lines) if lines.len() < MAX_QUEUED_LINES => {
                lines.push(line.to_vec());
                true
            }
            PendingLines::Memory(_) => false,
            PendingLines::Thread(sender) => sender.try_send(WriterRequest::Line(line.to_vec())).is_ok(),
        };
        if !is_queued {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Locks the mutex of the pending log lines, and ignores that a thread may have panicked while
    /// it held the lock.
    fn lock(&self) -> MutexGuard<'_, PendingLines> {
        self.destination.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Runs on the writing thread: writes the log lines that arrive through `requests` to `file`, until
/// all senders of requests are dropped. Before a line, reports how many lines were dropped.
fn write_received_lines(file: &mut CappedFile, requests: &Receiver<WriterRequest>, dropped: &AtomicU64) {
    for request in requests {
        match dropped.swap(0, Ordering::Relaxed) {
            0 => {}
            n => file.write_line(format!("{n} lines were dropped, because the queue was full\n").as_bytes()),
        }
        match request {
            WriterRequest::Line(line) => file.write_line(&line),
            WriterRequest::Flush(answer) => _ = answer.try_send(()),
        }
    }
}

/// The permissions of a new debug log file: `0600`, so that only the user who started launch can
/// read or write it.
const FILE_MODE: u32 = 0o600;

/// A log file whose size is limited: a full file is renamed to `NAME.1`, and a new one is begun.
struct CappedFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    max_bytes: u64,
}

impl CappedFile {
    /// Opens a log file of at most `max_bytes` bytes for appending. Creates the file and its
    /// directory if they do not exist.
    fn open(path: &Path, max_bytes: u64) -> io::Result<CappedFile> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        let file = OpenOptions::new().append(true).create(true).mode(FILE_MODE).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(CappedFile { path: path.to_owned(), file, bytes, max_bytes })
    }

    /// Appends a line to the log file, but first renames a full file to `NAME.1` and begins a new
    /// one. Ignores errors, because a full disk must not end the process.
    fn write_line(&mut self, line: &[u8]) {
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.max_bytes {
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            let renamed = fs::rename(&self.path, older);
            match renamed.and_then(|()| CappedFile::open(&self.path, self.max_bytes)) {
                Ok(new) => *self = new,
                Err(_) => return,
            }
        }
        if self.file.write_all(line).is_ok() {
            self.bytes += line.len() as u64;
        }
    }
}

/// A writer for the subscriber of `tracing`, which queues each line of the debug log for the thread
/// that writes the file. The subscriber writes each whole line with a single call.
pub(crate) struct LineSinkWriter<'a>(&'a LineSink);

impl Write for LineSinkWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LineSink {
    type Writer = LineSinkWriter<'a>;

    fn make_writer(&'a self) -> LineSinkWriter<'a> {
        LineSinkWriter(self)
    }
}

/// A function that prints a line of the debug log on the terminal of this process.
pub type PrintLineFn = fn(&str);

/// The writer through which `tracing` prints the lines of the debug log on the terminal, by calling
/// a [`PrintLineFn`] for each line.
#[derive(Clone, Copy)]
pub(crate) struct TerminalWriter(pub(crate) PrintLineFn);

impl Write for TerminalWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        (self.0)(&String::from_utf8_lossy(line));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for TerminalWriter {
    type Writer = TerminalWriter;

    fn make_writer(&self) -> TerminalWriter {
        *self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn collected_lines_are_written_when_the_file_is_opened() {
        let dir = tempfile::tempdir().expect("a directory");
        let (sink, path) = (LineSink::new(), dir.path().join("logs/controller.debug.log"));
        for n in 0..MAX_QUEUED_LINES + 3 {
            sink.push(format!("line {n}\n").as_bytes());
        }
        sink.open_file(&path).expect("opened");
        sink.push(b"last\n");
        sink.flush();
        let text = fs::read_to_string(&path).expect("written");
        assert!(text.starts_with("line 0\nline 1\n"), "{text}");
        assert!(text.ends_with("3 lines were dropped, because the queue was full\nlast\n"), "{text}");
    }

    #[test]
    fn a_blocked_writer_drops_lines_and_does_not_block_the_process() {
        let (sender, requests) = sync_channel(MAX_QUEUED_LINES);
        let sink = LineSink::new();
        *sink.lock() = PendingLines::Thread(sender);
        let began = Instant::now();
        for _ in 0..MAX_QUEUED_LINES + 5 {
            sink.push(b"line\n");
        }
        assert!(began.elapsed() < Duration::from_secs(10));
        assert_eq!(sink.dropped.load(Ordering::Relaxed), 5);
        drop(requests);
        sink.flush();
    }

    #[test]
    fn a_full_file_is_renamed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.log");
        let mut file = CappedFile::open(&path, 10).expect("opened");
        for line in ["12345678\n", "abc\n", "def\n", "ghi\n"] {
            file.write_line(line.as_bytes());
        }
        assert_eq!(fs::read_to_string(&path).expect("read"), "ghi\n");
        assert_eq!(fs::read_to_string(dir.path().join("a.log.1")).expect("read"), "abc\ndef\n");
        let file = CappedFile::open(&path, 10).expect("opened");
        assert_eq!(file.bytes, 4, "an existing file is continued");
    }
}
