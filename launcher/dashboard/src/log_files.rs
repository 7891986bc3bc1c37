//! Reads the end of the log files of ranks, and searches in them.
use crate::{journal_line::truncate_text, run_source::RunSource};
use diagnostic::terminal_text::filter_line;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// The number of bytes at the end of a log file that the first request for this log returns.
const TAIL_BYTES: u64 = 64 << 10;
/// The largest number of bytes of a log file that one request returns.
const MAX_READ_BYTES: u64 = 256 << 10;
/// The longest line of a log file that is returned, in bytes. The rest of a longer line is replaced
/// by an ellipsis.
const MAX_LINE_BYTES: usize = 4 << 10;
/// The largest number of entries of a run's log directory that are read.
const MAX_DIR_ENTRIES: usize = 64 << 10;
/// The largest number of lines that a search in log files returns.
const MAX_MATCHES: usize = 500;
/// The largest number of bytes of log files that one search reads.
const MAX_SEARCH_BYTES: u64 = 64 << 20;
/// The longest text that a user can search for in log files, in bytes.
const MAX_PATTERN_BYTES: usize = 256;
/// The prefix `streamed-` of the names of log files in which the controller stores the console
/// output of ranks on other hosts.
const STREAMED_LOG_PREFIX: &str = "streamed-";

/// Consecutive lines of a rank's log file, with the byte position in the file from which the next
/// request reads on.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct LogPart {
    /// Lines without unprintable characters.
    pub(crate) lines: Vec<String>,
    /// The position in the file after the last line, from which the next request continues.
    pub(crate) end: u64,
    /// The identity of the file. Another file has replaced the log when it changes.
    pub(crate) file: u64,
    /// Whether lines before the first one were left out.
    pub(crate) is_cut: bool,
}

/// A line of a rank's log that contains the searched text.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct LogMatch {
    rank: u32,
    line: String,
}

/// The log lines that a search has found, and whether the search ended early at a limit.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct LogMatches {
    pub(crate) matches: Vec<LogMatch>,
    /// Whether the search ended at a limit, so that there may be more matches.
    pub(crate) is_cut: bool,
}

/// Finds the newest log file of each rank in the directory `logs` of a run. If the log of a rank is
/// on another host, lists the copy of its console output.
pub(crate) fn list_logs(logs: &Path) -> BTreeMap<u32, PathBuf> {
    let (mut found, mut copies) = (BTreeMap::new(), BTreeMap::new());
    for entry in fs::read_dir(logs).into_iter().flatten().flatten().take(MAX_DIR_ENTRIES) {
        let path = entry.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let parse = |name: &str| name.strip_prefix("rank-")?.strip_suffix(".log")?.parse::<u32>().ok();
        if let Some(rank) = parse(name) {
            found.insert(rank, path);
        } else if let Some(rank) = name.strip_prefix(STREAMED_LOG_PREFIX).and_then(parse) {
            copies.insert(rank, path);
        }
    }
    copies.into_iter().for_each(|(rank, path)| _ = found.entry(rank).or_insert(path));
    found
}

/// Returns how long ago the log file of each rank was last written, for the `limit` lowest ranks
/// that have a log file.
pub(crate) fn read_log_ages(logs: &Path, limit: usize) -> BTreeMap<u32, Duration> {
    let now = SystemTime::now();
    let age = |path: &Path| now.duration_since(fs::symlink_metadata(path).ok()?.modified().ok()?).ok();
    list_logs(logs).into_iter().take(limit).filter_map(|(rank, path)| Some((rank, age(&path)?))).collect()
}

/// Reads the last lines of a rank's log file, or the lines after the file position at which an
/// earlier call ended.
pub(crate) fn read_log_part(
    source: &dyn RunSource,
    path: &Path,
    position: Option<(u64, u64)>,
) -> io::Result<LogPart> {
    let mut file = source.open_file(path)?;
    let metadata = file.metadata()?;
    let (length, identity) = (metadata.len(), metadata.ino());
    let continued = position.filter(|(file, end)| *file == identity && *end <= length);
    let start = continued.map_or(length.saturating_sub(TAIL_BYTES), |(_, end)| end);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(MAX_READ_BYTES).read_to_end(&mut bytes)?;
    let is_full = bytes.len() as u64 == MAX_READ_BYTES;
    // The last line is returned when its end is written, unless it is too long.
    let complete = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    let used = if complete == 0 && is_full { bytes.len() } else { complete };
    let mut part = LogPart { end: start + used as u64, file: identity, ..LogPart::default() };
    let mut lines: Vec<&[u8]> = bytes[..used].split(|b| *b == b'\n').collect();
    lines.pop_if(|last| last.is_empty());
    part.is_cut = continued.is_none() && start > 0;
    // The first line of the end of a file begins before the part.
    let skipped = usize::from(part.is_cut && lines.len() > 1);
    part.lines = lines[skipped..].iter().map(|line| to_printable_line(line)).collect();
    Ok(part)
}

/// Searches for a text in the log files of ranks, without regard to the case of ASCII letters.
/// Returns the newest matches of each log.
pub(crate) fn search_logs(
    source: &dyn RunSource,
    logs: &BTreeMap<u32, PathBuf>,
    pattern: &str,
) -> LogMatches {
    let (mut found, mut bytes_left) = (LogMatches::default(), MAX_SEARCH_BYTES);
    let pattern = pattern.as_bytes();
    if pattern.is_empty() || pattern.len() > MAX_PATTERN_BYTES {
        return found;
    }
    for (rank, path) in logs {
        let Ok(bytes) = read_end_of_file(source, path, bytes_left) else { continue };
        bytes_left -= bytes.len() as u64;
        let matching = bytes.rsplit(|b| *b == b'\n').filter(|line| contains_ignoring_case(line, pattern));
        let limit = MAX_MATCHES - found.matches.len();
        let mut lines: Vec<&[u8]> = matching.take(limit + 1).collect();
        found.is_cut |= lines.len() > limit || bytes_left == 0;
        lines.truncate(limit);
        found
            .matches
            .extend(lines.iter().rev().map(|line| LogMatch { rank: *rank, line: to_printable_line(line) }));
        if found.matches.len() == MAX_MATCHES || bytes_left == 0 {
            break;
        }
    }
    found
}

/// Reads at most `limit` bytes at the end of a file.
fn read_end_of_file(source: &dyn RunSource, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut file = source.open_file(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(limit)))?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns whether `line` contains `pattern`, without regard to the case of ASCII letters.
fn contains_ignoring_case(line: &[u8], pattern: &[u8]) -> bool {
    line.windows(pattern.len()).any(|part| part.eq_ignore_ascii_case(pattern))
}

/// Converts a line of a log to text of at most [`MAX_LINE_BYTES`] bytes, without color sequences
/// and unprintable characters.
pub(crate) fn to_printable_line(line: &[u8]) -> String {
    let line = &line[..line.len().min(4 * MAX_LINE_BYTES)];
    let text = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line));
    truncate_text(filter_line(&remove_colors(&text).replace('\t', "    ")), MAX_LINE_BYTES)
}

/// Removes the terminal color sequences (`ESC [ … m`) from a text.
fn remove_colors(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\u{1b}[") {
        plain.push_str(&rest[..at]);
        let sequence = &rest[at + 2..];
        let end = sequence.find(|c: char| !c.is_ascii_digit() && c != ';');
        match end.filter(|end| sequence[*end..].starts_with('m')) {
            Some(end) => rest = &sequence[end + 1..],
            None => {
                plain.push('\u{1b}');
                rest = &rest[at + 1..];
            }
        }
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::AnyFileSource;
    use std::io::Write;

    #[test]
    fn the_end_of_a_log_and_new_lines_are_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("rank-3.log");
        let append = |text: &str| {
            let file = fs::OpenOptions::new().append(true).create(true).open(&path);
            file.expect("file").write_all(text.as_bytes()).expect("written");
        };
        append("\u{1b}[31mred\u{1b}[0m\ttab\r\n\u{1b}]0;title\u{7}\nhalf");
        let part = read_log_part(&AnyFileSource, &path, None).expect("read");
        assert_eq!(part.lines, ["red    tab", "\u{fffd}]0;title\u{fffd}"]);
        append(" line\n");
        let more = read_log_part(&AnyFileSource, &path, Some((part.file, part.end))).expect("read");
        assert_eq!((more.lines.as_slice(), more.is_cut), (&["half line".to_owned()][..], false));
        let other = read_log_part(&AnyFileSource, &path, Some((part.file + 1, 0))).expect("read");
        assert_eq!(other.lines.len(), 3);
        append(&"0123456789\n".repeat(100_000));
        let end = read_log_part(&AnyFileSource, &path, None).expect("read");
        assert!(end.is_cut && end.lines.len() < 7000 && end.lines.iter().all(|l| l == "0123456789"));
        append(&"y".repeat(3 << 20));
        let mut position = (end.file, end.end);
        for _ in 0..12 {
            let part = read_log_part(&AnyFileSource, &path, Some(position)).expect("read");
            assert!(part.end > position.1 && part.lines[0].len() <= MAX_LINE_BYTES + 3);
            position = (part.file, part.end);
        }
    }

    #[test]
    fn logs_are_listed_and_searched() {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text) in [
            ("rank-0.log", "a Needle\nb\n"),
            ("rank-0.log.1", "needle\n"),
            ("streamed-rank-0.log", "needle\n"),
            ("streamed-rank-12.log", "c\nneEdle <b>\n"),
            ("rank-x.log", "needle\n"),
            ("rank-1.log.times", ""),
        ] {
            fs::write(dir.path().join(name), text).expect("written");
        }
        let logs = list_logs(dir.path());
        assert_eq!(logs.keys().copied().collect::<Vec<_>>(), [0, 12]);
        let found = search_logs(&AnyFileSource, &logs, "needle");
        let lines: Vec<_> = found.matches.iter().map(|m| (m.rank, m.line.as_str())).collect();
        assert_eq!((lines, found.is_cut), (vec![(0, "a Needle"), (12, "neEdle <b>")], false));
        assert_eq!(search_logs(&AnyFileSource, &logs, "").matches, []);
        assert_eq!(search_logs(&AnyFileSource, &logs, &"x".repeat(9999)).matches, []);
        fs::write(dir.path().join("rank-0.log"), "needle\n".repeat(2000)).expect("written");
        let found = search_logs(&AnyFileSource, &logs, "needle");
        assert_eq!((found.matches.len(), found.is_cut), (MAX_MATCHES, true));
        assert_eq!(read_log_ages(dir.path(), 1).len(), 1);
    }
}
