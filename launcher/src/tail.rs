//! [`LineFollower`]: reads a growing file line by line, as `tail -F` does.
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// Time between two reads of a file that has nothing new.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes per read.
const CHUNK: usize = 64 << 10;
/// A longer line is passed on in parts, bytes.
const LINE_MAX: usize = 1 << 20;

/// The lines of a file from an offset on. A file that replaces it, and a file that was truncated,
/// is read from its start.
#[derive(Debug)]
pub(crate) struct LineFollower {
    path: PathBuf,
    file: File,
    offset: u64,
    /// The bytes after the last line end.
    unfinished: Vec<u8>,
    buffer: Vec<u8>,
}

impl LineFollower {
    /// Opens the file and starts reading at `offset`.
    pub(crate) fn open(path: PathBuf, offset: u64) -> io::Result<LineFollower> {
        let mut file = File::open(&path)?;
        file.seek(SeekFrom::Start(offset))?;
        Ok(LineFollower { path, file, offset, unfinished: Vec::new(), buffer: vec![0; CHUNK] })
    }

    /// The path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads once and passes the complete lines to `line`. `false`: the end of the file is reached
    /// for now, and a last line without its line end was passed on too.
    pub(crate) fn read(&mut self, line: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        let n = self.file.read(&mut self.buffer)?;
        if n == 0 {
            if !self.unfinished.is_empty() {
                line(&std::mem::take(&mut self.unfinished));
            }
            return self.reopen_if_replaced();
        }
        self.offset += n as u64;
        self.unfinished.extend_from_slice(&self.buffer[..n]);
        let mut start = 0;
        while let Some(length) = self.unfinished[start..].iter().position(|b| *b == b'\n') {
            line(&self.unfinished[start..start + length]);
            start += length + 1;
        }
        self.unfinished.drain(..start);
        if self.unfinished.len() > LINE_MAX {
            line(&std::mem::take(&mut self.unfinished));
        }
        Ok(true)
    }

    /// Continues with the file that is at the path now, if it is another one or was truncated.
    /// Returns whether there is more to read.
    fn reopen_if_replaced(&mut self) -> io::Result<bool> {
        let open = self.file.metadata()?;
        let Ok(current) = std::fs::metadata(&self.path) else { return Ok(false) };
        let same = (open.dev(), open.ino()) == (current.dev(), current.ino());
        if same && current.len() >= self.offset {
            return Ok(current.len() > self.offset);
        }
        self.file = File::open(&self.path)?;
        self.offset = 0;
        Ok(current.len() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, io::Write};

    fn read_all(lines: &mut LineFollower) -> Vec<String> {
        let mut texts = Vec::new();
        while lines.read(&mut |line| texts.push(String::from_utf8_lossy(line).into_owned())).expect("read") {}
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
        let long = "y".repeat(LINE_MAX + CHUNK);
        append(&long);
        assert_eq!(read_all(&mut lines).concat(), long);
    }
}
