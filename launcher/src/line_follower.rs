//! [`LineFollower`]: reads a growing file line by line, as `tail -F` does.
use crate::private_files::open_regular_file;
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// The interval at which users of [`LineFollower`] check whether the file that they follow has
/// grown.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The largest number of bytes that one call of [`LineFollower::read_lines`] reads.
const CHUNK_BYTES: u64 = 64 << 10;
/// The length in bytes from which on an unfinished line of the followed file counts as a whole
/// line.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Reads the lines of a growing file, beginning at a byte offset. If the file at the path is
/// replaced or truncated, reading continues at the start of the new content.
#[derive(Debug)]
pub(crate) struct LineFollower {
    path: PathBuf,
    file: File,
    offset: u64,
    /// The bytes that were read after the last line end.
    unfinished: Vec<u8>,
}

impl LineFollower {
    /// Opens the file at `path`, to read its lines beginning at byte `offset`.
    pub(crate) fn open(path: PathBuf, offset: u64) -> io::Result<LineFollower> {
        let mut file = open_regular_file(&path)?;
        file.seek(SeekFrom::Start(offset))?;
        Ok(LineFollower { path, file, offset, unfinished: Vec::new() })
    }

    /// Returns the path of the file that is read.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads up to 64 KiB of the file and passes each complete line, without the line end, to
    /// `line`. Returns whether there may be more to read.
    ///
    /// At the end of the file, a last line without a line end is passed to `line`, too.
    pub(crate) fn read_lines(&mut self, line: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        let n = (&self.file).take(CHUNK_BYTES).read_to_end(&mut self.unfinished)?;
        if n == 0 {
            // Thousands of files may be followed at once, so a buffer that is not used is freed.
            let last = std::mem::take(&mut self.unfinished);
            if !last.is_empty() {
                line(&last);
            }
            return self.reopen_if_replaced();
        }
        self.offset += n as u64;
        let mut start = 0;
        while let Some(length) = self.unfinished[start..].iter().position(|b| *b == b'\n') {
            line(&self.unfinished[start..start + length]);
            start += length + 1;
        }
        self.unfinished.drain(..start);
        if self.unfinished.len() > MAX_LINE_BYTES {
            line(&std::mem::take(&mut self.unfinished));
        }
        Ok(true)
    }

    /// Opens the followed file again if its path now belongs to another file, or if the open file
    /// was truncated. Returns whether there is more to read.
    fn reopen_if_replaced(&mut self) -> io::Result<bool> {
        let open = self.file.metadata()?;
        let Ok(current) = std::fs::metadata(&self.path) else { return Ok(false) };
        let same = (open.dev(), open.ino()) == (current.dev(), current.ino());
        if same && current.len() >= self.offset {
            return Ok(current.len() > self.offset);
        }
        self.file = open_regular_file(&self.path)?;
        self.offset = 0;
        Ok(current.len() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, io::Write};

    /// Reads until the current end of the file and returns the lines. Panics if reading fails.
    fn read_all(lines: &mut LineFollower) -> Vec<String> {
        let mut texts = Vec::new();
        while lines
            .read_lines(&mut |line| texts.push(String::from_utf8_lossy(line).into_owned()))
            .expect("read")
        {}
        texts
    }

    #[test]
    fn a_growing_rotated_and_truncated_file_is_followed() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("a.log");
        let append = |text: &str| {
            let file = fs::OpenOptions::new().append(true).create(true).open(&path);
            file.expect("file").write_all(text.as_bytes()).expect("written");
        };
        append("one\ntwo\nthree");
        let mut lines = LineFollower::open(path.clone(), 4).expect("open");
        assert_eq!(read_all(&mut lines), ["two", "three"]);
        append("fold\n\nfour\n");
        assert_eq!(read_all(&mut lines), ["fold", "", "four"]);
        fs::rename(&path, dir.path().join("a.log.1")).expect("renamed");
        assert_eq!(read_all(&mut lines), Vec::<String>::new());
        append("new\n");
        assert_eq!(read_all(&mut lines), ["new"]);
        fs::write(&path, "x\n").expect("truncated");
        assert_eq!(read_all(&mut lines), ["x"]);
        let long = "y".repeat(MAX_LINE_BYTES + CHUNK_BYTES as usize);
        append(&long);
        assert_eq!(read_all(&mut lines).concat(), long);
    }
}
