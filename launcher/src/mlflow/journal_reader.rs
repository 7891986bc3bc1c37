//! Defines [`JournalReader`], which reads those events of a run's journal (its file of events) that
//! were not sent to MLflow yet.
use crate::private_files::open_own_file;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::PathBuf,
};

/// The number of bytes that one call of [`JournalReader::read_lines`] reads from the journal (the
/// run's file of events). A longer line is not recorded.
const CHUNK_BYTES: u64 = 1 << 20;

/// The position in a run's journal (its file of events) before which all events were sent to
/// MLflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct JournalPosition {
    /// The number of bytes before the place.
    offset: u64,
    /// The length of the line before the place, in bytes, with its line end.
    line_bytes: u64,
    /// The CRC-32C of that line. It shows whether the journal still contains the line there: a
    /// takeover rewrites the journal.
    line_checksum: u32,
}

/// Reads the lines of a run's journal (its file of events), which may grow.
#[derive(Debug)]
pub(super) struct JournalReader {
    path: PathBuf,
}

impl JournalReader {
    /// Creates a reader of the journal (the file of a run's events) at `path`, which need not exist
    /// yet.
    pub(super) fn new(path: PathBuf) -> JournalReader {
        JournalReader { path }
    }

    /// Returns the stored position if the journal (the run's file of events) has not changed before
    /// this position, and otherwise the start of the journal. Whatever is read twice is recorded
    /// twice, with equal values.
    pub(super) fn resolve_position(&self, position: JournalPosition) -> io::Result<JournalPosition> {
        let mut file = open_own_file(&self.path)?;
        let is_possible = position.line_bytes <= position.offset.min(CHUNK_BYTES);
        if !is_possible || file.metadata()?.len() < position.offset {
            return Ok(JournalPosition::default());
        }
        let line = read_file_part(&mut file, position.offset - position.line_bytes, position.line_bytes)?;
        let is_same = crc32c::crc32c(&line) == position.line_checksum;
        Ok(if is_same { position } else { JournalPosition::default() })
    }

    /// Calls `on_line` with each complete line of the journal (the run's file of events) after
    /// `position`, until `on_line` returns `false`. Reads a limited part of the journal. Returns
    /// the place after the last of these lines.
    pub(super) fn read_lines(
        &self,
        position: JournalPosition,
        on_line: &mut dyn FnMut(&str) -> bool,
    ) -> io::Result<JournalPosition> {
        let mut file = match open_own_file(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(position),
            file => file?,
        };
        let bytes = read_file_part(&mut file, position.offset, CHUNK_BYTES)?;
        let mut place = position;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let is_complete = line.ends_with(b"\n");
            if !is_complete && (line.len() as u64) < CHUNK_BYTES {
                break;
            }
            place = JournalPosition {
                offset: place.offset + line.len() as u64,
                line_bytes: line.len() as u64,
                line_checksum: crc32c::crc32c(line),
            };
            // The rest of a line that is too long is no event either.
            let text = str::from_utf8(line).unwrap_or_default().trim_end();
            if is_complete && !on_line(text) {
                break;
            }
        }
        Ok(place)
    }
}

/// Reads at most `length` bytes of a file, beginning at the byte `offset`.
fn read_file_part(file: &mut File, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(offset))?;
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::private_files::open_private_file_for_appending;
    use std::{fs, io::Write, path::Path};

    fn append(path: &Path, text: &str) {
        open_private_file_for_appending(path).expect("opened").write_all(text.as_bytes()).expect("written");
    }

    fn read(reader: &JournalReader, position: &mut JournalPosition, limit: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let on_line = &mut |line: &str| {
            lines.push(line.to_owned());
            lines.len() < limit
        };
        *position = reader.read_lines(*position, on_line).expect("read");
        lines
    }

    #[test]
    fn lines_are_read_once_and_unfinished_lines_later() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("events.jsonl");
        let (reader, mut position) = (JournalReader::new(path.clone()), JournalPosition::default());
        assert!(read(&reader, &mut position, 9).is_empty(), "the file does not exist");
        append(&path, "one\ntwo\nthr");
        assert_eq!(read(&reader, &mut position, 1), ["one"]);
        assert_eq!(read(&reader, &mut position, 9), ["two"]);
        assert!(read(&reader, &mut position, 9).is_empty());
        append(&path, "ee\n");
        assert_eq!(read(&reader, &mut position, 9), ["three"]);
        append(&path, &format!("{}\nfour\n", "x".repeat(2 << 20)));
        let mut lines = Vec::new();
        while lines.last().is_none_or(|line| line != "four") {
            lines.extend(read(&reader, &mut position, 9));
        }
        assert!(lines.iter().all(|line| line.len() < 1 << 20));
    }

    #[test]
    fn a_position_is_valid_only_in_an_unchanged_journal() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("events.jsonl");
        let (reader, mut position) = (JournalReader::new(path.clone()), JournalPosition::default());
        append(&path, "one\ntwo\n");
        read(&reader, &mut position, 9);
        append(&path, "three\n");
        assert_eq!(reader.resolve_position(position).expect("read"), position);
        for content in ["", "one\n", "one\ntwx\nthree\n", "oone\ntwo\n"] {
            fs::write(&path, content).expect("written");
            assert_eq!(reader.resolve_position(position).expect("read"), JournalPosition::default());
        }
        let damaged = JournalPosition { line_bytes: u64::MAX, ..position };
        assert_eq!(reader.resolve_position(damaged).expect("read"), JournalPosition::default());
    }
}
