//! [`StreamedLogs`]: the console output of ranks on other hosts, stored for `launch logs`.
//!
//! If the hosts do not share the run directory, the complete logs are on the hosts of the ranks.
//! The controller then stores the lines that were streamed to the console in `streamed-rank-N.log`.
//! A separate thread writes the files, so that a slow disk does not block the controller.
mod streamed_log_files;

use crate::background_thread::BackgroundThread;
use jobspec::ids::Rank;
use std::{
    collections::HashMap,
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use streamed_log_files::StreamedLogFiles;
use tokio::sync::mpsc;

/// The largest amount of console output of ranks on other hosts that may wait for the disk, in
/// bytes. Further lines are dropped and counted.
const MAX_WAITING_BYTES: usize = 32 << 20;

/// Stores the console output of ranks on other hosts. Never blocks.
#[derive(Debug)]
pub(super) struct StreamedLogs {
    thread: BackgroundThread,
    files: Arc<Mutex<StreamedLogFiles>>,
    /// For each rank of the current attempt, whether the rank runs on another machine than the
    /// controller.
    is_remote: Vec<bool>,
    /// The number of dropped lines that the log of a rank does not report yet.
    dropped: HashMap<Rank, u64>,
    /// Receives warnings for the user.
    warnings: mpsc::Sender<String>,
}

impl StreamedLogs {
    /// Prepares to store the console output of ranks in files in the directory `logs`, each of at
    /// most `max_size` bytes. Starts the thread that writes them, and opens no file. Warnings for
    /// the user are sent to `warnings`.
    pub(super) fn start(logs: PathBuf, max_size: u64, warnings: mpsc::Sender<String>) -> io::Result<Self> {
        Ok(StreamedLogs {
            thread: BackgroundThread::start("streamed-logs", MAX_WAITING_BYTES)?,
            files: Arc::new(Mutex::new(StreamedLogFiles::new(logs, max_size))),
            is_remote: Vec::new(),
            dropped: HashMap::new(),
            warnings,
        })
    }

    /// Closes the console output files of the previous attempt (start of all workers), and stores
    /// which ranks now run on other hosts. `is_remote` states for each rank whether the rank runs
    /// on another machine than the controller.
    pub(super) fn begin_attempt(&mut self, is_remote: Vec<bool>) {
        self.is_remote = is_remote;
        self.dropped.clear();
        let files = self.files.clone();
        // Ranks may have moved to other hosts.
        let close = move || files.lock().unwrap_or_else(PoisonError::into_inner).close();
        self.thread.enqueue_job(0, close);
    }

    /// Queues a line of a rank's console output, which a separate thread writes to the file of the
    /// rank. Ignores ranks on the controller's machine. Drops and counts the line if too much
    /// output waits for the disk.
    pub(super) fn append_line(&mut self, rank: Rank, text: &str) {
        if !self.is_remote.get(rank as usize).copied().unwrap_or(false) {
            return;
        }
        let dropped = self.dropped.remove(&rank).unwrap_or(0);
        let line = match dropped {
            0 => text.to_owned(),
            n => {
                format!(
                    "[launch] {n} lines of output are missing here: the disk was full or too slow\n{text}"
                )
            }
        };
        let (files, warnings) = (self.files.clone(), self.warnings.clone());
        let accepted = self.thread.enqueue_job(line.len(), move || {
            let warning = files.lock().unwrap_or_else(PoisonError::into_inner).append_line(rank, &line);
            // The warning is dropped if too many messages wait for the user.
            _ = warning.map(|warning| warnings.try_send(warning));
        });
        if !accepted {
            self.dropped.insert(rank, dropped + 1);
        }
    }

    /// Waits until all queued lines of console output are written to the files, but at most for
    /// `limit`. Returns whether they are written.
    pub(super) fn flush(&self, limit: Duration) -> bool {
        self.thread.flush(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_remote_ranks_are_stored_and_lines_beyond_the_queue_are_counted() {
        let dir = tempfile::tempdir().expect("a directory");
        let (warnings, mut warned) = mpsc::channel(8);
        let mut logs = StreamedLogs::start(dir.path().into(), 1 << 30, warnings).expect("a thread");
        logs.begin_attempt(vec![false, true]);
        assert!(logs.flush(Duration::from_secs(60)));
        let files = logs.files.clone();
        let stalled_disk = files.lock().expect("not poisoned");
        let long = "x".repeat(MAX_WAITING_BYTES / 2);
        logs.append_line(0, "a line of a rank on this machine");
        (0..5).for_each(|_| logs.append_line(1, &long));
        drop(stalled_disk);
        assert!(logs.flush(Duration::from_secs(60)));
        logs.append_line(1, "last");
        assert!(logs.flush(Duration::from_secs(60)));
        let text = std::fs::read_to_string(dir.path().join("streamed-rank-1.log")).expect("text");
        let stored = text.matches(&long).count();
        assert!((2..=3).contains(&stored), "{stored}");
        let end = text.trim_start_matches(['x', '\n']).replace(&(5 - stored).to_string(), "N");
        insta::assert_snapshot!("lines_beyond_the_queue", end);
        assert!(!dir.path().join("streamed-rank-0.log").exists());
        assert!(warned.try_recv().is_err());
    }
}
