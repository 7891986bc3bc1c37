//! [`StreamedLogFiles`]: the files in which the controller stores the console output of ranks on
//! other hosts.
use crate::private_files::{create_private_dir, open_private_file_for_appending};
use jobspec::ids::Rank;
use std::{
    collections::HashMap,
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

/// The largest number of console output files of ranks that are open at the same time. The file of
/// each further rank is opened again for every line.
const MAX_OPEN_FILES: usize = 256;

/// The files in which the controller stores the console output of the ranks on other hosts.
#[derive(Debug)]
pub(super) struct StreamedLogFiles {
    directory: PathBuf,
    /// The largest size of a file, in bytes (`run.logs.max_size`). Output that would exceed it is
    /// replaced by a note, and no later output of the rank is stored in this attempt.
    max_size: u64,
    files: HashMap<Rank, StreamedLogFile>,
}

/// The state of the file for the console output of one rank on another host: open, or closed
/// because no output of the rank is stored.
#[derive(Debug)]
enum StreamedLogFile {
    Open {
        /// The file to which output is appended; `None` if the file is opened again for every
        /// line.
        file: Option<File>,
        /// The size of the file in bytes, compared with `run.logs.max_size`.
        size: u64,
    },
    /// No output is stored, because the complete log is on this machine, the file is full, or a
    /// write has failed.
    Closed,
}

impl StreamedLogFiles {
    /// Creates the set of files of console output in the directory `logs`. Opens no file.
    pub(super) fn new(logs: PathBuf, max_size: u64) -> Self {
        StreamedLogFiles { directory: logs, max_size, files: HashMap::new() }
    }

    /// Closes all files of console output at the end of an attempt (start of all workers), because
    /// the next attempt may place ranks on other hosts.
    pub(super) fn close(&mut self) {
        self.files.clear();
    }

    /// Appends a line of a rank's console output to the file of the rank. Returns a warning if the
    /// file cannot be written, once per rank and attempt. Blocks while the disk stalls.
    pub(super) fn append_line(&mut self, rank: Rank, text: &str) -> Option<String> {
        if !self.files.contains_key(&rank) {
            let opened = self.open_log(rank);
            let warning = opened.as_ref().err().map(|error| format_write_warning(rank, error));
            self.files.insert(rank, opened.unwrap_or(StreamedLogFile::Closed));
            if warning.is_some() {
                return warning;
            }
        }
        let Some(StreamedLogFile::Open { file, size }) = self.files.get_mut(&rank) else { return None };
        *size += text.len() as u64 + 1;
        let full = *size > self.max_size;
        let line = match full {
            true => format!(
                "[launch] output stops here: the file reached run.logs.max_size ({} bytes)\n",
                self.max_size
            ),
            false => format!("{text}\n"),
        };
        let written = match file {
            Some(file) => file.write_all(line.as_bytes()),
            None => {
                open_for_appending(&self.directory, rank).and_then(|mut file| file.write_all(line.as_bytes()))
            }
        };
        if full || written.is_err() {
            self.files.insert(rank, StreamedLogFile::Closed);
        }
        written.err().map(|error| format_write_warning(rank, &error))
    }

    /// Opens the file for the console output of a rank for appending. The file stays open if fewer
    /// than [`MAX_OPEN_FILES`] are. If the complete log of the rank is in the directory, opens
    /// nothing and returns [`StreamedLogFile::Closed`].
    fn open_log(&self, rank: Rank) -> io::Result<StreamedLogFile> {
        if self.directory.join(format!("rank-{rank}.log")).exists() {
            return Ok(StreamedLogFile::Closed);
        }
        create_private_dir(&self.directory)?;
        let file = open_for_appending(&self.directory, rank)?;
        let size = file.metadata()?.len();
        let is_open = |log: &&StreamedLogFile| matches!(log, StreamedLogFile::Open { file: Some(_), .. });
        let has_space = self.files.values().filter(is_open).count() < MAX_OPEN_FILES;
        Ok(StreamedLogFile::Open { file: has_space.then_some(file), size })
    }
}

/// Opens the file for the console output of a rank on another host for appending. Creates the file
/// if it does not exist.
fn open_for_appending(directory: &Path, rank: Rank) -> io::Result<File> {
    open_private_file_for_appending(&directory.join(format!("streamed-rank-{rank}.log")))
}

/// Formats the warning that the console output of a rank cannot be stored.
fn format_write_warning(rank: Rank, error: &io::Error) -> String {
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
        let mut logs_of_run = StreamedLogFiles::new(logs.clone(), 20);
        for rank in [1, 2, 1] {
            assert_eq!(logs_of_run.append_line(rank, &format!("line of {rank}")), None);
        }
        let names = std::fs::read_dir(&logs).expect("entries").flatten();
        let mut names: Vec<String> = names.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        assert_eq!(names, ["rank-2.log", "streamed-rank-1.log"]);
        let read = || std::fs::read_to_string(logs.join("streamed-rank-1.log")).expect("text");
        assert_eq!(read(), "line of 1\nline of 1\n");
        // A later attempt appends to the file of the first one, up to the size limit.
        logs_of_run.close();
        assert_eq!((logs_of_run.append_line(1, "x"), logs_of_run.append_line(1, "y")), (None, None));
        insta::assert_snapshot!("streamed_log_at_its_largest_size", read());
    }

    #[test]
    fn output_of_ranks_beyond_the_limit_of_open_files_is_stored() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut logs_of_run = StreamedLogFiles::new(dir.path().join("logs"), 1 << 20);
        let ranks = MAX_OPEN_FILES + 2;
        for text in ["first", "second"] {
            for rank in 0..ranks as Rank {
                assert_eq!(logs_of_run.append_line(rank, text), None);
            }
        }
        for rank in 0..ranks {
            let text = std::fs::read_to_string(dir.path().join(format!("logs/streamed-rank-{rank}.log")));
            assert_eq!(text.expect("text"), "first\nsecond\n", "rank {rank}");
        }
    }

    #[test]
    fn a_write_error_is_reported_once() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("logs"), "a file").expect("a file");
        let mut logs_of_run = StreamedLogFiles::new(dir.path().join("logs"), 1 << 20);
        assert!(logs_of_run.append_line(0, "a").is_some());
        assert_eq!(logs_of_run.append_line(0, "b"), None);
    }
}
