//! [`RankLog`]: the log file of a rank. [`RankLogWriter`] writes it on the thread of all logs of
//! an agent, so that a slow disk blocks neither the agent nor its workers.
use super::{log_thread::LogThread, log_times::LogTimesWriter};
use crate::{
    background_thread::{WriteRetrySwitch, is_transient, write_persistently},
    private_files::{create_private_dir, open_private_file_for_appending},
};
use diagnostic::{Diagnostic, codes::host::WORKER_LOG_UNWRITABLE};
use std::{
    fs::File,
    io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// The log file of a rank, to which output is appended up to a maximum size.
#[derive(Debug)]
pub(crate) struct RankLog {
    file: File,
    path: String,
    size: u64,
    max_size: u64,
    times: LogTimesWriter,
    /// Whether the log is full or can never be written again.
    closed: bool,
    /// Whether the agent is ending and the disk has rejected the last output.
    lost: bool,
}

impl RankLog {
    /// Opens or creates the log file of a rank at `path`, to append the output of the rank's
    /// workers to it. Creates the file and its directory if necessary. `max_size` is the maximum
    /// size of the log in bytes.
    pub(crate) fn open(path: &Path, max_size: u64) -> io::Result<RankLog> {
        if let Some(directory) = path.parent() {
            create_private_dir(directory)?;
        }
        let file = open_private_file_for_appending(path)?;
        let size = file.metadata()?.len();
        let times = LogTimesWriter::open(path);
        Ok(RankLog {
            file,
            path: path.display().to_string(),
            size,
            max_size,
            times,
            closed: false,
            lost: false,
        })
    }

    /// Writes `bytes`, output of a worker, at the end of the log of its rank. When the log reaches
    /// the maximum size, appends a notice and drops all later bytes. Blocks while the disk is full
    /// or stalls, until `retries` ends the repetitions of writes. `warn` is called with the first
    /// error. Returns the number of bytes that the disk has not accepted.
    fn append(&mut self, bytes: &[u8], retries: &WriteRetrySwitch, mut warn: impl FnMut(Diagnostic)) -> u64 {
        if self.closed {
            return if self.lost { bytes.len() as u64 } else { 0 };
        }
        let free = self.max_size.saturating_sub(self.size);
        let fits = if bytes.len() as u64 <= free {
            bytes.len()
        } else {
            self.closed = true;
            bytes[..free as usize].iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1)
        };
        self.times.record_size(self.size);
        self.size += fits as u64;
        let notice = match self.closed {
            true => format!(
                "[launch] this log ends here: it reached run.logs.max_size ({} bytes); later output was not kept\n",
                self.max_size
            ),
            false => String::new(),
        };
        let path = &self.path;
        let warn = |error: &io::Error| {
            let message = match is_transient(error) {
                true => format!(
                    "cannot write the log {path}; the worker continues, and the output is written when the disk \
                     accepts it, at the latest at the end of the run"
                ),
                false => format!("cannot write the log {path} any more; the worker continues without it"),
            };
            warn(Diagnostic::warning(WORKER_LOG_UNWRITABLE, message).with_subject(path).with_cause(error));
        };
        let text = [&bytes[..fits], notice.as_bytes()].concat();
        let Err((bytes, error)) = write_persistently(&mut self.file, &text, retries, warn) else { return 0 };
        (self.closed, self.lost) = (true, is_transient(&error));
        if self.lost { bytes } else { 0 }
    }
}

/// A function that shows the user the warning that the log of a rank cannot be written.
pub(crate) type WarningReporter = Arc<dyn Fn(Diagnostic) + Send + Sync>;

/// Appends the output of a worker to the log of its rank on a separate thread, so that a slow disk
/// does not block the caller.
pub(crate) struct RankLogWriter {
    log: Arc<Mutex<RankLog>>,
    path: String,
    thread: LogThread,
    warn: WarningReporter,
    /// The number of bytes that were dropped because the thread did not keep up, and that the log
    /// does not report yet.
    dropped_bytes: u64,
}

impl RankLogWriter {
    /// Creates a writer that appends a rank's output to `log` on the thread `thread`, and calls the
    /// function `warn` if the log cannot be written.
    pub(crate) fn new(log: RankLog, thread: LogThread, warn: WarningReporter) -> RankLogWriter {
        let path = log.path.clone();
        RankLogWriter { log: Arc::new(Mutex::new(log)), path, thread, warn, dropped_bytes: 0 }
    }

    /// Returns the path of the rank's log file to which this writer appends.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Queues `bytes`, output of a worker, to be appended to the log of its rank by the log thread.
    /// Drops and counts them if too much output waits for the disk.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        let text = [self.format_dropped_bytes_notice().as_bytes(), bytes].concat();
        if self.queue_log_write(text.len(), text) {
            self.dropped_bytes = 0;
        } else {
            self.dropped_bytes += bytes.len() as u64;
        }
    }

    /// Appends a line to the rank's log that states how many bytes of output were dropped because
    /// the disk was full or slow.
    pub(crate) fn write_dropped_bytes_notice(&mut self) {
        if self.dropped_bytes > 0 {
            self.queue_log_write(0, self.format_dropped_bytes_notice().into());
            self.dropped_bytes = 0;
        }
    }

    /// Queues `text` to be appended to the rank's log by the log thread, which accepts writes until
    /// the sum of their `size` values reaches a limit. Returns `false` if the queue has no space
    /// for it.
    fn queue_log_write(&self, size: usize, text: Vec<u8>) -> bool {
        let (log, warn) = (self.log.clone(), self.warn.clone());
        self.thread.queue_write(size, move |retries| {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            log.append(&text, retries, |warning| warn(warning))
        })
    }

    /// Formats a line for the rank's log that states how many bytes of output are missing in front
    /// of the line. Returns an empty text if no bytes were dropped.
    fn format_dropped_bytes_notice(&self) -> String {
        match self.dropped_bytes {
            0 => String::new(),
            n => format!("[launch] {n} bytes of output are missing here: the disk was full or too slow\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::time::Duration;

    /// Creates a log that appends to an open file, which may be a device.
    fn create_log(file: File, max_size: u64) -> RankLog {
        let times = LogTimesWriter::open(Path::new("/dev/null/x"));
        RankLog { file, path: "a.log".into(), size: 0, max_size, times, closed: false, lost: false }
    }

    #[test]
    fn output_that_a_stalled_disk_does_not_take_is_dropped_and_counted() {
        let thread = LogThread::with_capacity(100).expect("a thread");
        // A full pipe stands for a disk that stalls.
        let (reader, writer) = nix::unistd::pipe().expect("a pipe");
        let capacity =
            nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_GETPIPE_SZ).expect("a size") as usize;
        let mut log =
            RankLogWriter::new(create_log(writer.into(), 1 << 30), thread.clone(), Arc::new(|_| ()));
        log.queue_log_write(0, vec![b'x'; capacity + 1]);
        while thread.current_write_time().is_zero() {}
        for _ in 0..30 {
            log.append(b"line five\n");
        }
        log.write_dropped_bytes_notice();
        let (done, text) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            _ = io::Read::read_to_end(&mut File::from(reader), &mut bytes);
            _ = done.send(bytes);
        });
        assert!(thread.wait_for_queued_writes(Duration::from_secs(60)));
        drop(log);
        let text = String::from_utf8(text.recv().expect("text")).expect("UTF-8");
        insta::assert_snapshot!("log_of_a_stalled_disk", text.trim_start_matches('x'));
    }

    #[test]
    fn a_full_disk_is_reported_once_and_a_lasting_error_closes_the_log() {
        let full = OpenOptions::new().append(true).open("/dev/full").expect("/dev/full");
        let (warned, warnings) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut log = create_log(full, 1 << 20);
            log.append(b"text\n", &WriteRetrySwitch::default(), |warning| {
                _ = warned.send(warning.to_string())
            });
        });
        let warning = warnings.recv().expect("a warning");
        assert!(warnings.recv_timeout(Duration::from_millis(200)).is_err(), "one warning");
        let mut closed = create_log(File::open("/dev/null").expect("/dev/null"), 1 << 20);
        let mut texts = vec![warning];
        for _ in 0..2 {
            closed.append(b"text\n", &WriteRetrySwitch::default(), |warning| texts.push(warning.to_string()));
        }
        insta::assert_snapshot!("warnings_of_unwritable_logs", texts.join("\n"));
    }

    #[test]
    fn an_agent_that_ends_gives_up_a_full_disk_soon_and_counts_the_lost_output() {
        let thread = LogThread::with_capacity(1 << 20).expect("a thread");
        let full = OpenOptions::new().append(true).open("/dev/full").expect("/dev/full");
        let mut log = RankLogWriter::new(create_log(full, 1 << 20), thread.clone(), Arc::new(|_| ()));
        log.append(b"last\n");
        log.append(b"words\n");
        let began = std::time::Instant::now();
        let lost = thread.finish().expect("lost output");
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        insta::assert_snapshot!("lost_output", lost);
        let empty = LogThread::with_capacity(100).expect("a thread");
        assert_eq!(empty.finish(), None);
    }
}
