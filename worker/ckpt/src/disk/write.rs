//! [`FileWriter`]: writes a new file in large aligned windows while the next ones are hashed.
use super::{ALIGN, BLOCK, Buffer, Buffers};
use crate::error::{CkptError, Result};
use crate::fault;
use crate::hash::Hash;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

/// How bytes are written to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoMode {
    /// Bypasses the page cache (O_DIRECT), if the file system supports it.
    Direct,
    /// Writes through the page cache. Small files use this mode.
    Buffered,
}

/// Windows per file: one is filled, one waits, one is written.
const WINDOWS: usize = 3;
/// Bytes per window when many files are written at once. Such windows are little slower than those
/// of [`WINDOW`] bytes and need a quarter of the memory.
pub(crate) const SMALL_WINDOW: usize = 2 << 20;

/// The file, to which windows are appended.
struct OutputFile {
    file: File,
    /// O_DIRECT is in use.
    direct: bool,
    /// Bytes written so far, including the padding of the last window.
    at: u64,
}

impl OutputFile {
    fn create(path: &std::path::Path, how: IoMode) -> io::Result<OutputFile> {
        let open = |flags: OFlag| {
            OpenOptions::new()
                .write(true)
                .create_new(true)
                .custom_flags((OFlag::O_NOFOLLOW | flags).bits())
                .open(path)
        };
        if how == IoMode::Direct {
            match fault::around("create", || open(OFlag::O_DIRECT)) {
                Ok(file) => return Ok(OutputFile { file, direct: true, at: 0 }),
                // the file system does not support O_DIRECT; some create the file nevertheless
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => drop(std::fs::remove_file(path)),
                Err(e) => return Err(e),
            }
        }
        let file = fault::around("create", || open(OFlag::empty()))?;
        Ok(OutputFile { file, direct: false, at: 0 })
    }

    /// Appends `len` bytes; only the last window of a file may be shorter than the others.
    fn append(&mut self, window: &mut [u8], len: usize) -> io::Result<()> {
        let padded = len.next_multiple_of(ALIGN);
        window[len..padded].fill(0);
        let mut done = 0;
        loop {
            let end = if self.direct { padded } else { len };
            if done >= end {
                self.at += end as u64;
                return Ok(());
            }
            match fault::around("write", || self.file.write_at(&window[done..end], self.at + done as u64)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if self.direct && e.raw_os_error() == Some(libc::EINVAL) => self.disable_direct()?,
                Err(e) => return Err(e),
            }
        }
    }

    /// Turns O_DIRECT off, for file systems that accept it when the file is opened but not for this
    /// write.
    fn disable_direct(&mut self) -> io::Result<()> {
        let flags = OFlag::from_bits_retain(fcntl(&self.file, FcntlArg::F_GETFL)?);
        fcntl(&self.file, FcntlArg::F_SETFL(flags - OFlag::O_DIRECT))?;
        self.direct = false;
        Ok(())
    }

    /// Removes the padding and, with `sync`, makes the content durable.
    fn finish(self, len: u64, sync: bool) -> io::Result<()> {
        if self.at > len {
            fault::around("truncate", || self.file.set_len(len))?;
        }
        match sync {
            true => fault::around("fsync file", || self.file.sync_all()),
            false => Ok(()),
        }
    }
}

/// Where windows are written.
enum Writer {
    /// In the calling thread; for files of up to one window.
    Inline(OutputFile),
    /// In a separate thread.
    Thread {
        full: SyncSender<(Buffer, usize)>,
        empty: Receiver<Buffer>,
        thread: JoinHandle<io::Result<OutputFile>>,
    },
    /// The writer has failed or finished.
    Closed,
}

/// Writes one new file; nothing is durable before [`FileWriter::finish`].
pub(crate) struct FileWriter {
    path: PathBuf,
    writer: Writer,
    window: Buffer,
    filled: usize,
    buffers: Buffers,
    taken: usize,
    len: u64,
    /// BLAKE3 hash per [`BLOCK`], if requested.
    hashes: Option<Vec<Hash>>,
}

impl FileWriter {
    /// Creates a file; an existing file is an error.
    pub(crate) fn create(path: PathBuf, how: IoMode, hashed: bool) -> Result<FileWriter> {
        FileWriter::with_buffers(path, how, hashed, Buffers::default())
    }

    /// Creates a file whose windows are taken from a pool and returned to it.
    pub(crate) fn with_buffers(
        path: PathBuf,
        how: IoMode,
        hashed: bool,
        buffers: Buffers,
    ) -> Result<FileWriter> {
        let output = OutputFile::create(&path, how).map_err(CkptError::io("create", &path))?;
        let window = buffers.take().map_err(CkptError::io("allocate memory to write", &path))?;
        let hashes = hashed.then(Vec::new);
        Ok(FileWriter {
            path,
            writer: Writer::Inline(output),
            window,
            filled: 0,
            buffers,
            taken: 1,
            len: 0,
            hashes,
        })
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.len += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.filled == self.window.len() {
                self.send().map_err(CkptError::io("write", &self.path))?;
            }
            // block by block, so that each block is hashed while it is in the CPU cache
            let n = (BLOCK - self.filled % BLOCK).min(bytes.len());
            self.window[self.filled..self.filled + n].copy_from_slice(&bytes[..n]);
            self.filled += n;
            bytes = &bytes[n..];
            if self.filled.is_multiple_of(BLOCK) {
                self.hash(BLOCK);
            }
        }
        Ok(())
    }

    /// Hashes the last `n` bytes of the window.
    fn hash(&mut self, n: usize) {
        if let Some(hashes) = &mut self.hashes {
            hashes.push(Hash::digest(&self.window[self.filled - n..self.filled]));
        }
    }

    /// Passes the current window to the writing thread and continues with an empty one. Starts the
    /// thread at the first call.
    fn send(&mut self) -> io::Result<()> {
        if let Writer::Inline(_) = self.writer
            && let Writer::Inline(output) = std::mem::replace(&mut self.writer, Writer::Closed)
        {
            self.writer = spawn(output)?;
        }
        let Writer::Thread { full, empty, .. } = &self.writer else {
            return Err(io::Error::other("an earlier write failed"));
        };
        let next = match self.taken < WINDOWS {
            true => self.buffers.take().map(Some)?,
            false => empty.recv().ok(),
        };
        self.taken = (self.taken + 1).min(WINDOWS);
        let filled = std::mem::take(&mut self.filled);
        if let Some(next) = next
            && full.send((std::mem::replace(&mut self.window, next), filled)).is_ok()
        {
            return Ok(());
        }
        Err(self.join().err().unwrap_or_else(|| io::Error::other("the writing thread ended early")))
    }

    /// Waits until all windows are written.
    fn join(&mut self) -> io::Result<OutputFile> {
        match std::mem::replace(&mut self.writer, Writer::Closed) {
            Writer::Inline(output) => Ok(output),
            Writer::Thread { full, empty, thread } => {
                drop(full);
                let done = thread.join();
                empty.try_iter().for_each(|window| self.buffers.give(window));
                done.unwrap_or_else(|_| Err(io::Error::other("the writing thread panicked")))
            }
            Writer::Closed => Err(io::Error::other("an earlier write failed")),
        }
    }

    /// Writes the remaining bytes and makes the file durable. Returns its size and the requested
    /// hashes.
    pub(crate) fn finish(self) -> Result<(u64, Vec<Hash>)> {
        self.finish_with(true)
    }

    /// Writes the remaining bytes and returns the size. [`super::sync_all_of`] makes many files
    /// durable at once.
    pub(crate) fn finish_unsynced(self) -> Result<u64> {
        Ok(self.finish_with(false)?.0)
    }

    fn finish_with(mut self, sync: bool) -> Result<(u64, Vec<Hash>)> {
        if !self.filled.is_multiple_of(BLOCK) {
            self.hash(self.filled % BLOCK);
        }
        let done = self.join().and_then(|mut output| {
            output.append(&mut self.window, self.filled)?;
            output.finish(self.len, sync)
        });
        done.map_err(CkptError::io("write", &self.path))?;
        self.buffers.give(self.window);
        Ok((self.len, self.hashes.take().unwrap_or_default()))
    }
}

/// Starts a thread that writes the windows it receives, and returns them.
fn spawn(mut output: OutputFile) -> io::Result<Writer> {
    let (full, inbox) = sync_channel::<(Buffer, usize)>(WINDOWS);
    let (outbox, empty): (Sender<Buffer>, _) = channel();
    let write = move || {
        for (mut window, len) in inbox {
            output.append(&mut window, len)?;
            // the receiver is closed only when it needs no more windows
            let _ = outbox.send(window);
        }
        Ok(output)
    };
    let thread = std::thread::Builder::new().name("ckpt-write".into()).spawn(write)?;
    Ok(Writer::Thread { full, empty, thread })
}

/// Writes a small file durably.
pub(crate) fn write_file(path: PathBuf, content: &[u8]) -> Result<u64> {
    let mut file = FileWriter::create(path, IoMode::Buffered, false)?;
    file.write(content)?;
    Ok(file.finish()?.0)
}

#[cfg(test)]
mod tests {
    use super::super::WINDOW;
    use super::*;

    /// Writes `len` bytes in pieces of different sizes and compares content and hashes.
    fn check(dir: &std::path::Path, how: IoMode, window: usize, len: usize) {
        let bytes: Vec<u8> =
            (0..len).map(|i| (i as u32).wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect();
        let path = dir.join(format!("{how:?}-{window}-{len}"));
        let mut writer =
            FileWriter::with_buffers(path.clone(), how, true, Buffers::with_size(window)).expect("made");
        let (mut rest, mut n) = (bytes.as_slice(), 1);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(n.min(rest.len()));
            writer.write(now).expect("written");
            (rest, n) = (later, n * 3 + 1);
        }
        let (written, hashes) = writer.finish().expect("finished");
        assert_eq!(written, len as u64);
        assert!(std::fs::read(path).expect("read") == bytes, "{how:?}, {len} bytes");
        assert_eq!(hashes, bytes.chunks(BLOCK).map(Hash::digest).collect::<Vec<_>>());
    }

    #[test]
    fn files_of_every_length_are_written_with_direct_and_buffered_io() {
        // on a disk and in tmpfs, since not every file system supports O_DIRECT
        let dirs = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())];
        for dir in dirs {
            let dir = dir.expect("a directory");
            for how in [IoMode::Direct, IoMode::Buffered] {
                for window in [SMALL_WINDOW, WINDOW] {
                    for len in
                        [0, 1, 4095, 4096, BLOCK - 1, BLOCK, window, window + 1, 4 * window + BLOCK + 5]
                    {
                        check(dir.path(), how, window, len);
                    }
                }
            }
        }
    }

    #[test]
    fn writing_continues_when_direct_writes_are_disabled() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        let mut output = OutputFile::create(&path, IoMode::Direct).expect("made");
        let mut window = vec![0; WINDOW];
        window.fill(7);
        output.append(&mut window, WINDOW).expect("written");
        output.disable_direct().expect("left");
        output.append(&mut window, 4099).expect("written");
        output.finish(WINDOW as u64 + 4099, true).expect("durable");
        assert!(std::fs::read(&path).expect("read") == vec![7u8; WINDOW + 4099]);
    }

    #[test]
    fn an_existing_file_is_not_touched() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        std::fs::write(&path, "other").expect("written");
        for how in [IoMode::Direct, IoMode::Buffered] {
            assert!(FileWriter::create(path.clone(), how, false).is_err());
        }
        assert_eq!(std::fs::read(&path).expect("read"), b"other");
    }
}
