//! Records the size of a rank's log at several times, so that `launch logs --since` can find the
//! lines that were written after a given time.
//!
//! `rank-0.log.times` next to `rank-0.log` holds pairs of little-endian u64: milliseconds since
//! 1970, and the size of the log in bytes at that time. At most one pair is written per second, and
//! none while the log does not grow.
use crate::{
    clock::read_unix_time_ms,
    private_files::{open_private_file_for_appending, open_regular_file},
};
use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

/// The shortest time between two entries in the file `rank-N.log.times`, each of which records the
/// size of a rank's log at one time.
const MIN_RECORD_INTERVAL: Duration = Duration::from_secs(1);
/// The size in bytes of one entry of the file `rank-N.log.times`: a time and the size of the log at
/// that time.
const TIME_ENTRY_BYTES: usize = 16;
/// The largest size, in bytes, of the file `rank-N.log.times`, which records the size of a rank's
/// log at several times. It is reached after twelve days with output every second. After that, no
/// more times are recorded.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Records how a rank's log grows, by appending pairs of time and log size to the file
/// `rank-N.log.times`. Write errors end the recording, but do not affect the log.
#[derive(Debug)]
pub(super) struct LogTimesWriter {
    file: Option<File>,
    size: u64,
    last: Option<Instant>,
}

impl LogTimesWriter {
    /// Opens or creates `rank-N.log.times`, the file that records how the log file `log` of a rank
    /// grows, and removes an incomplete last entry. If the file cannot be opened, the writer
    /// records nothing.
    pub(super) fn open(log: &Path) -> LogTimesWriter {
        let file = open_private_file_for_appending(&log_times_path(log)).ok();
        let size = file.as_ref().and_then(|f| f.metadata().ok()).map_or(0, |m| m.len());
        // A pair that a crash truncated would misalign all later ones.
        let whole = size - size % TIME_ENTRY_BYTES as u64;
        let size = file.as_ref().filter(|f| f.set_len(whole).is_ok()).map_or(size, |_| whole);
        LogTimesWriter { file, size, last: None }
    }

    /// Records in `rank-N.log.times` that the log of the rank has the size `bytes` now. Does
    /// nothing within [`MIN_RECORD_INTERVAL`] of the last recorded size, or if the file of times
    /// has reached [`MAX_FILE_BYTES`].
    ///
    /// The caller must call this function before each write to the log.
    pub(super) fn record_size(&mut self, bytes: u64) {
        if self.last.is_some_and(|last| last.elapsed() < MIN_RECORD_INTERVAL) || self.size >= MAX_FILE_BYTES {
            return;
        }
        self.last = Some(Instant::now());
        let mut pair = [0; TIME_ENTRY_BYTES];
        pair[..8].copy_from_slice(&read_unix_time_ms().to_le_bytes());
        pair[8..].copy_from_slice(&bytes.to_le_bytes());
        self.size += TIME_ENTRY_BYTES as u64;
        let written = self.file.as_mut().map_or(Ok(()), |file| file.write_all(&pair));
        if written.is_err() {
            self.file = None;
        }
    }
}

/// Returns the offset in a log of the first byte that was written at or after the time `since_ms`
/// (milliseconds since 1970), accurate to about a second.
///
/// `end` must be the size of the log. It is returned if the whole log was written before
/// `since_ms`. If no times are recorded for the log, returns 0.
pub(crate) fn find_offset_at(log: &Path, since_ms: u64, end: u64) -> u64 {
    let mut bytes = Vec::new();
    let read =
        open_regular_file(&log_times_path(log)).and_then(|f| f.take(MAX_FILE_BYTES).read_to_end(&mut bytes));
    if read.is_err() || bytes.len() < TIME_ENTRY_BYTES {
        return 0;
    }
    let pairs = bytes.chunks_exact(TIME_ENTRY_BYTES).map(|pair| {
        let number =
            |start: usize| pair[start..start + 8].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        (number(0), number(8))
    });
    let mut last = 0;
    for (at, offset) in pairs {
        if at >= since_ms {
            return offset.min(end);
        }
        last = at;
    }
    // All pairs are older than `since_ms`, but the bytes after the last pair may have been written
    // at any time until the log was last modified.
    let modified = fs::metadata(log).and_then(|m| m.modified()).ok();
    let modified = modified.and_then(|t| t.duration_since(SystemTime::UNIX_EPOCH).ok());
    let newest = modified.map_or(last, |d| d.as_millis() as u64);
    if newest < since_ms {
        end
    } else {
        bytes.chunks_exact(TIME_ENTRY_BYTES).next_back().map_or(0, decode_log_size).min(end)
    }
}

/// Decodes the log size, in bytes, from an entry of `rank-N.log.times`, which contains a time and
/// the size at that time.
fn decode_log_size(pair: &[u8]) -> u64 {
    pair[8..].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
}

/// Returns the path of `rank-N.log.times`, the file that records how the log file `log` of a rank
/// has grown.
fn log_times_path(log: &Path) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(".times");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_a_time_is_found() {
        let dir = tempfile::tempdir().expect("directory");
        let log = dir.path().join("rank-0.log");
        fs::write(&log, "x".repeat(300)).expect("log");
        assert_eq!(find_offset_at(&log, 0, 300), 0, "no times are recorded");
        let pairs: Vec<u8> = [(1000u64, 0u64), (2000, 100), (5000, 200)]
            .iter()
            .flat_map(|(at, offset)| [at.to_le_bytes(), offset.to_le_bytes()].concat())
            .chain(*b"torn")
            .collect();
        fs::write(log_times_path(&log), pairs).expect("times");
        for (since, expected) in
            [(0, 0), (1000, 0), (1001, 100), (2001, 200), (5000, 200), (5001, 200), (u64::MAX, 300)]
        {
            assert_eq!(find_offset_at(&log, since, 300), expected, "{since}");
        }
        assert_eq!(find_offset_at(&log, 5000, 150), 150, "the log was truncated");
    }

    #[test]
    fn at_most_one_pair_per_second_is_written() {
        let dir = tempfile::tempdir().expect("directory");
        let log = dir.path().join("rank-0.log");
        let mut times = LogTimesWriter::open(&log);
        let before = read_unix_time_ms();
        (0..1000).for_each(|n| times.record_size(n));
        let bytes = fs::read(log_times_path(&log)).expect("times");
        assert!(
            bytes.len() >= TIME_ENTRY_BYTES && bytes.len() <= 5 * TIME_ENTRY_BYTES,
            "{} bytes",
            bytes.len()
        );
        assert_eq!(find_offset_at(&log, before, 1000), 0);
        let mut unwritable = LogTimesWriter::open(Path::new("/proc/nowhere/x.log"));
        unwritable.record_size(1);
    }
}
