//! Reading a file that may still be written to, line by line.
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// Between two looks at a file that has nothing new.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);
/// Bytes read at once.
const CHUNK: usize = 64 << 10;
/// A longer line is given in pieces, bytes.
const LINE_MAX: usize = 1 << 20;

/// The lines of a file from some place on. A file that is put in its place, or cut, is read from its start.
#[derive(Debug)]
pub(crate) struct Lines {
    path: PathBuf,
    file: File,
    offset: u64,
    /// After the last line end.
    unfinished: Vec<u8>,
    buffer: Vec<u8>,
}

impl Lines {
    pub(crate) fn open(path: PathBuf, offset: u64) -> io::Result<Lines> {
        let mut file = File::open(&path)?;
        file.seek(SeekFrom::Start(offset))?;
        Ok(Lines { path, file, offset, unfinished: Vec::new(), buffer: vec![0; CHUNK] })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a piece and gives its whole lines; `false`: there is nothing more for now, and a line without its end was
    /// given as it is.
    pub(crate) fn read(&mut self, line: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        let n = self.file.read(&mut self.buffer)?;
        if n == 0 {
            if !self.unfinished.is_empty() {
                line(&std::mem::take(&mut self.unfinished));
            }
            return self.replaced();
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

    /// Goes on with what lies in the file's place now, if that is something else.
    fn replaced(&mut self) -> io::Result<bool> {
        let mine = self.file.metadata()?;
        let Ok(now) = std::fs::metadata(&self.path) else { return Ok(false) };
        let same = (mine.dev(), mine.ino()) == (now.dev(), now.ino());
        if same && now.len() >= self.offset {
            return Ok(now.len() > self.offset);
        }
        self.file = File::open(&self.path)?;
        self.offset = 0;
        Ok(now.len() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, io::Write};

    fn all(lines: &mut Lines) -> Vec<String> {
        let mut found = Vec::new();
        while lines.read(&mut |line| found.push(String::from_utf8_lossy(line).into_owned())).expect("read") {}
        found
    }

    #[test]
    fn a_growing_rotated_and_cut_file_is_followed() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("a.log");
        let append = |text: &str| {
            let file = fs::OpenOptions::new().append(true).create(true).open(&path);
            file.expect("file").write_all(text.as_bytes()).expect("written");
        };
        append("one\ntwo\nthr");
        let mut lines = Lines::open(path.clone(), 4).expect("open");
        assert_eq!(all(&mut lines), ["two", "thr"]);
        append("ee\n\nfour\n");
        assert_eq!(all(&mut lines), ["ee", "", "four"]);
        fs::rename(&path, dir.path().join("a.log.1")).expect("renamed");
        assert_eq!(all(&mut lines), Vec::<String>::new());
        append("new\n");
        assert_eq!(all(&mut lines), ["new"]);
        fs::write(&path, "x\n").expect("cut");
        assert_eq!(all(&mut lines), ["x"]);
        let long = "y".repeat(LINE_MAX + CHUNK);
        append(&long);
        assert_eq!(all(&mut lines).concat(), long);
    }
}
