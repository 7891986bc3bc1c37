//! [`StreamedLogs`]: the console output of ranks on other hosts, stored for `launch logs`.
//!
//! Needed where the hosts do not share the run directory: the complete logs are then on the hosts
//! of the ranks, and the lines that were streamed to the console are in `streamed-rank-N.log` on
//! this host.
use contract::ids::Rank;
use std::{
    collections::{HashMap, hash_map::Entry},
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Limit of files that are open at the same time.
const MAX_OPEN: usize = 256;

/// The streamed logs of a run.
#[derive(Debug)]
pub(super) struct StreamedLogs {
    directory: PathBuf,
    /// Limit of the size of each file, bytes (`run.logs.max_size`).
    max_size: u64,
    /// Whether each rank of this attempt runs on another host.
    is_remote: Vec<bool>,
    files: HashMap<Rank, StreamedLog>,
}

#[derive(Debug)]
enum StreamedLog {
    Open {
        file: File,
        size: u64,
    },
    /// Not needed because the complete log is here, full, or failed.
    Closed,
}

impl StreamedLogs {
    pub(super) fn new(logs: PathBuf, max_size: u64) -> Self {
        StreamedLogs { directory: logs, max_size, is_remote: Vec::new(), files: HashMap::new() }
    }

    /// Begins an attempt: whether each rank runs on another host.
    pub(super) fn begin_attempt(&mut self, is_remote: Vec<bool>) {
        self.is_remote = is_remote;
        // Ranks may have moved to other hosts.
        self.files.clear();
    }

    /// Stores a line. Returns a warning when the file cannot be written, once per rank and attempt.
    pub(super) fn append(&mut self, rank: Rank, text: &str) -> Option<String> {
        if !self.is_remote.get(rank as usize).copied().unwrap_or(false) {
            return None;
        }
        let at_limit = self.files.len() >= MAX_OPEN;
        let log = match self.files.entry(rank) {
            Entry::Occupied(log) => log.into_mut(),
            Entry::Vacant(_) if at_limit => return None,
            Entry::Vacant(entry) => match open(&self.directory, rank) {
                Ok(log) => entry.insert(log),
                Err(error) => {
                    entry.insert(StreamedLog::Closed);
                    return Some(write_warning(rank, &error));
                }
            },
        };
        let StreamedLog::Open { file, size } = log else { return None };
        *size += text.len() as u64 + 1;
        let full = *size > self.max_size;
        let line = match full {
            true => format!(
                "[launch] output stops here: the file reached run.logs.max_size ({} bytes)\n",
                self.max_size
            ),
            false => format!("{text}\n"),
        };
        let written = file.write_all(line.as_bytes());
        if full || written.is_err() {
            *log = StreamedLog::Closed;
        }
        written.err().map(|error| write_warning(rank, &error))
    }
}

fn open(directory: &Path, rank: Rank) -> io::Result<StreamedLog> {
    if directory.join(format!("rank-{rank}.log")).exists() {
        return Ok(StreamedLog::Closed);
    }
    std::fs::create_dir_all(directory)?;
    let path = directory.join(format!("streamed-rank-{rank}.log"));
    let file = OpenOptions::new().append(true).create(true).open(path)?;
    let size = file.metadata()?.len();
    Ok(StreamedLog::Open { file, size })
}

fn write_warning(rank: Rank, error: &io::Error) -> String {
    format!("launch: cannot store the output of rank {rank} for `launch logs`: {error}; the job continues")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_remote_ranks_is_stored_up_to_a_size_where_their_logs_are_missing() {
        let dir = tempfile::tempdir().expect("a directory");
        let logs = dir.path().join("logs");
        std::fs::create_dir(&logs).expect("a directory");
        std::fs::write(logs.join("rank-2.log"), "own").expect("a file");
        let mut logs_of_run = StreamedLogs::new(logs.clone(), 20);
        logs_of_run.begin_attempt(vec![false, true, true]);
        for rank in [0, 1, 2, 3, 1] {
            assert_eq!(logs_of_run.append(rank, &format!("line of {rank}")), None);
        }
        let names = std::fs::read_dir(&logs).expect("entries").flatten();
        let mut names: Vec<String> = names.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        assert_eq!(names, ["rank-2.log", "streamed-rank-1.log"]);
        let read = || std::fs::read_to_string(logs.join("streamed-rank-1.log")).expect("text");
        assert_eq!(read(), "line of 1\nline of 1\n");
        // A later attempt appends to the same file, up to the same size.
        logs_of_run.begin_attempt(vec![true, true]);
        assert_eq!((logs_of_run.append(1, "x"), logs_of_run.append(1, "y")), (None, None));
        insta::assert_snapshot!("streamed_log_at_its_largest_size", read());
    }

    #[test]
    fn a_write_error_is_reported_once() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("logs"), "a file").expect("a file");
        let mut logs_of_run = StreamedLogs::new(dir.path().join("logs"), 1 << 20);
        logs_of_run.begin_attempt(vec![true]);
        assert!(logs_of_run.append(0, "a").is_some());
        assert_eq!(logs_of_run.append(0, "b"), None);
    }
}
