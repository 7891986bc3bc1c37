//! When a log's lines were written: beside `rank-0.log` lies `rank-0.log.times`, pairs of little-endian u64: milliseconds
//! since 1970 and how many bytes the log had then. One pair a second at most, and none while nothing is written.
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

/// Between two pairs.
const SPACING: Duration = Duration::from_secs(1);
/// A pair, bytes.
const PAIR: usize = 16;
/// Most bytes of pairs that are read or written: twelve days without a silent second.
const MOST: u64 = 16 << 20;

/// Writes the pairs of one log. Without a place to write there are none; the log is complete all the same.
#[derive(Debug)]
pub(super) struct Times {
    file: Option<File>,
    size: u64,
    last: Option<Instant>,
}

impl Times {
    pub(super) fn open(log: &Path) -> Times {
        let file = OpenOptions::new().append(true).create(true).open(place(log)).ok();
        let size = file.as_ref().and_then(|f| f.metadata().ok()).map_or(0, |m| m.len());
        // A pair that a crash cut would shift all later ones.
        let whole = size - size % PAIR as u64;
        let size = file.as_ref().filter(|f| f.set_len(whole).is_ok()).map_or(size, |_| whole);
        Times { file, size, last: None }
    }

    /// The log has `bytes`, and more is written now.
    pub(super) fn mark(&mut self, bytes: u64) {
        if self.last.is_some_and(|last| last.elapsed() < SPACING) || self.size >= MOST {
            return;
        }
        self.last = Some(Instant::now());
        let mut pair = [0; PAIR];
        pair[..8].copy_from_slice(&now_ms().to_le_bytes());
        pair[8..].copy_from_slice(&bytes.to_le_bytes());
        self.size += PAIR as u64;
        let written = self.file.as_mut().map_or(Ok(()), |file| file.write_all(&pair));
        if written.is_err() {
            self.file = None;
        }
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// Where the part of a log begins that was written at this time or later, to about a second; 0 where nothing is known of
/// the times. `end`: the log's size, when all of it is older.
pub(crate) fn offset_at(log: &Path, since_ms: u64, end: u64) -> u64 {
    let mut bytes = Vec::new();
    let read = File::open(place(log)).and_then(|f| f.take(MOST).read_to_end(&mut bytes));
    if read.is_err() || bytes.len() < PAIR {
        return 0;
    }
    let pairs = bytes.chunks_exact(PAIR).map(|pair| {
        let number = |at: usize| pair[at..at + 8].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        (number(0), number(8))
    });
    let mut last = 0;
    for (at, offset) in pairs {
        if at >= since_ms {
            return offset.min(end);
        }
        last = at;
    }
    // Up to a second after its pair is of the same time.
    let modified = fs::metadata(log).and_then(|m| m.modified()).ok();
    let modified = modified.and_then(|t| t.duration_since(SystemTime::UNIX_EPOCH).ok());
    let newest = modified.map_or(last, |d| d.as_millis() as u64);
    if newest < since_ms { end } else { bytes.chunks_exact(PAIR).next_back().map_or(0, offset_of).min(end) }
}

fn offset_of(pair: &[u8]) -> u64 {
    pair[8..].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
}

fn place(log: &Path) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(".times");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_a_time_is_found() {
        let dir = tempfile::tempdir().expect("directory");
        let log = dir.path().join("rank-0.log");
        fs::write(&log, "x".repeat(300)).expect("log");
        assert_eq!(offset_at(&log, 0, 300), 0, "nothing is known");
        let pairs: Vec<u8> = [(1000u64, 0u64), (2000, 100), (5000, 200)]
            .iter()
            .flat_map(|(at, offset)| [at.to_le_bytes(), offset.to_le_bytes()].concat())
            .chain(*b"torn")
            .collect();
        fs::write(place(&log), pairs).expect("times");
        for (since, want) in
            [(0, 0), (1000, 0), (1001, 100), (2001, 200), (5000, 200), (5001, 200), (u64::MAX, 300)]
        {
            assert_eq!(offset_at(&log, since, 300), want, "{since}");
        }
        assert_eq!(offset_at(&log, 5000, 150), 150, "the log was cut");
    }

    #[test]
    fn pairs_are_written_once_a_second_at_most() {
        let dir = tempfile::tempdir().expect("directory");
        let log = dir.path().join("rank-0.log");
        let mut times = Times::open(&log);
        let before = now_ms();
        (0..1000).for_each(|n| times.mark(n));
        let bytes = fs::read(place(&log)).expect("times");
        assert!(bytes.len() >= PAIR && bytes.len() <= 5 * PAIR, "{} bytes", bytes.len());
        assert_eq!(offset_at(&log, before, 1000), 0);
        let mut nowhere = Times::open(Path::new("/proc/nowhere/x.log"));
        nowhere.mark(1);
    }
}
