//! [`GrowingFileReader`]: reads the lines of a file that another process extends, such as a
//! journal, with a limit on the bytes per call.
use crate::run_source::RunSource;
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::PathBuf,
};

/// The largest number of bytes of the growing file that one system call reads.
const BUFFER_BYTES: usize = 256 << 10;
/// The largest length of a line that is read, in bytes. The content of a longer line is skipped,
/// and the line counts as damaged.
const MAX_LINE_BYTES: usize = 1 << 20;

/// A reader of the lines of a file that another process extends, and may replace by another file.
#[derive(Debug)]
pub(crate) struct GrowingFileReader {
    path: PathBuf,
    file: Option<File>,
    offset: u64,
    /// The bytes that were read after the last line end.
    unfinished: Vec<u8>,
    /// Whether the start of the current line was dropped because the line is too long.
    is_skipping: bool,
}

/// The result of reading a part of a growing file: how far the file was read, and whether it was
/// replaced by another file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ReadProgress {
    /// Whether the file was replaced or truncated, so that the next call begins at its start.
    pub(crate) is_replaced: bool,
    /// Whether the end of the file was reached.
    pub(crate) is_at_end: bool,
    /// The share of the file that was read, from 0 to 1.
    pub(crate) share: f64,
}

impl GrowingFileReader {
    /// Creates a reader that starts at the beginning of the file at `path`, and opens the file at
    /// the first read.
    pub(crate) fn new(path: PathBuf) -> GrowingFileReader {
        GrowingFileReader { path, file: None, offset: 0, unfinished: Vec::new(), is_skipping: false }
    }

    /// Reads about `limit` more bytes of the file, and passes each complete line, without its line
    /// end, to `on_line`. Passes an empty line in place of a line that is too long.
    pub(crate) fn read_lines(
        &mut self,
        source: &dyn RunSource,
        limit: u64,
        on_line: &mut dyn FnMut(&[u8]),
    ) -> io::Result<ReadProgress> {
        let mut file = match self.file.take() {
            Some(file) => file,
            None => source.open_file(&self.path)?,
        };
        let (mut buffer, end) = (vec![0; BUFFER_BYTES], self.offset.saturating_add(limit));
        let mut is_at_end = false;
        while self.offset < end && !is_at_end {
            let n = file.read(&mut buffer)?;
            is_at_end = n == 0;
            self.offset += n as u64;
            self.emit_complete_lines(&buffer[..n], on_line);
        }
        let opened = file.metadata()?;
        let current = std::fs::metadata(&self.path).ok();
        let is_same = current.is_none_or(|c| (c.dev(), c.ino()) == (opened.dev(), opened.ino()));
        let is_replaced = is_at_end && (!is_same || opened.len() < self.offset);
        let share = if opened.len() == 0 { 1.0 } else { self.offset as f64 / opened.len() as f64 };
        match is_replaced {
            true => *self = GrowingFileReader::new(self.path.clone()),
            false => self.file = Some(file),
        }
        Ok(ReadProgress { is_replaced, is_at_end, share: share.min(1.0) })
    }

    /// Splits `bytes`, the next bytes of the file, into lines, and passes each line that is
    /// complete to `on_line`.
    fn emit_complete_lines(&mut self, mut bytes: &[u8], on_line: &mut dyn FnMut(&[u8])) {
        while let Some(length) = bytes.iter().position(|b| *b == b'\n') {
            let (line, rest) = (&bytes[..length], &bytes[length + 1..]);
            bytes = rest;
            if std::mem::take(&mut self.is_skipping) {
                on_line(&[]);
            } else if self.unfinished.is_empty() {
                on_line(line);
            } else {
                self.unfinished.extend_from_slice(line);
                on_line(&self.unfinished);
            }
            self.unfinished.clear();
        }
        if !self.is_skipping {
            self.unfinished.extend_from_slice(bytes);
        }
        if self.unfinished.len() > MAX_LINE_BYTES {
            self.unfinished.clear();
            self.is_skipping = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::AnyFileSource;
    use std::{fs, io::Write};

    #[test]
    fn a_growing_and_replaced_file_is_followed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a");
        let append = |text: &str| {
            let file = fs::OpenOptions::new().append(true).create(true).open(&path);
            file.expect("file").write_all(text.as_bytes()).expect("written");
        };
        let mut lines = GrowingFileReader::new(path.clone());
        lines.read_lines(&AnyFileSource, 10, &mut |_| ()).expect_err("no file");
        append("one\ntwo\nthr");
        let read = |lines: &mut GrowingFileReader| {
            let mut texts = Vec::new();
            let on_line = &mut |line: &[u8]| texts.push(String::from_utf8_lossy(line).into_owned());
            let progress = lines.read_lines(&AnyFileSource, 64 << 20, on_line).expect("read");
            (texts, progress)
        };
        assert_eq!(read(&mut lines).0, ["one", "two"]);
        append("ee\n");
        assert_eq!(read(&mut lines).0, ["three"]);
        append(&"x".repeat(3 * MAX_LINE_BYTES));
        append("\nfour\n");
        let (texts, progress) = read(&mut lines);
        assert_eq!(texts, ["", "four"]);
        assert!(progress.is_at_end && !progress.is_replaced && progress.share == 1.0);
        fs::write(dir.path().join("b"), "new\n").expect("written");
        fs::rename(dir.path().join("b"), &path).expect("renamed");
        assert!(read(&mut lines).1.is_replaced);
        assert_eq!(read(&mut lines).0, ["new"]);
        fs::write(&path, "x\n").expect("truncated");
        assert!(read(&mut lines).1.is_replaced);
        assert_eq!(read(&mut lines).0, ["x"]);
    }

    #[test]
    fn a_call_reads_about_as_much_as_its_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a");
        fs::write(&path, "0123456789\n".repeat(200_000)).expect("written");
        let (mut lines, mut count) = (GrowingFileReader::new(path), 0);
        let progress = lines.read_lines(&AnyFileSource, 1, &mut |_| count += 1).expect("read");
        assert!(!progress.is_at_end && progress.share < 0.2 && count < 30_000, "{progress:?} {count}");
        while !lines.read_lines(&AnyFileSource, 1, &mut |_| count += 1).expect("read").is_at_end {}
        assert_eq!(count, 200_000);
    }
}
