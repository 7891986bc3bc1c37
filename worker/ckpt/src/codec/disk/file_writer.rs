//! [`FileWriter`]: writes a new file in large aligned buffers, on a separate thread. A thread
//! writes a window while the caller fills and hashes the next window.
use super::buffer_pool::{AlignedBuffer, DiskBufferPool};
use super::io_units::{BLOCK_BYTES, DIRECT_IO_ALIGNMENT, disable_direct_io};
use crate::error::{CkptError, Result};
use crate::fault_points;
use crate::hash::{FileHasher, Hash};
use nix::fcntl::OFlag;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Whether a file is written through the page cache or directly (O_DIRECT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoMode {
    /// Writes with O_DIRECT, which bypasses the page cache, if the file system supports it.
    Direct,
    /// Writes through the page cache. Small files use this mode.
    Buffered,
}

/// The selection of hashes that a [`FileWriter`] computes while it writes: none, one per 1 MiB
/// block, or one of the whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HashMode {
    /// Computes no hashes.
    Off,
    /// Computes one hash for each [`BLOCK_BYTES`].
    Blocks,
    /// Computes one hash of the whole file.
    File,
}

/// Description of a file that a [`FileWriter`] has written: its size and its hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WrittenFile {
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// The hash of each block. Empty unless requested with [`HashMode::Blocks`].
    pub(crate) blocks: Vec<Hash>,
    /// The hash of the whole file, if requested with [`HashMode::File`].
    pub(crate) digest: Option<Hash>,
}

/// The intermediate state of the hashes of a file that a [`FileWriter`] is still writing: no hash,
/// one hash per 1 MiB block, or one for the whole file.
enum RunningHashes {
    Off,
    Blocks(Vec<Hash>),
    File(Box<FileHasher>),
}

impl RunningHashes {
    /// Creates the initial state of the hashes that `hashing` selects, for a file without content.
    fn new(hashing: HashMode) -> RunningHashes {
        match hashing {
            HashMode::Off => RunningHashes::Off,
            HashMode::Blocks => RunningHashes::Blocks(Vec::new()),
            HashMode::File => RunningHashes::File(Box::default()),
        }
    }

    /// Adds `bytes`, the next block of the file, to the hashes. The last block may be shorter than
    /// the others.
    fn add_block(&mut self, bytes: &[u8]) {
        match self {
            RunningHashes::Off => {}
            RunningHashes::Blocks(blocks) => blocks.push(Hash::digest(bytes)),
            RunningHashes::File(hasher) => hasher.update(bytes),
        }
    }

    /// Returns the description of a completed file: the size `bytes`, and the hashes that were
    /// computed while the file was written.
    fn describe_file(self, bytes: u64) -> WrittenFile {
        match self {
            RunningHashes::Off => WrittenFile { bytes, blocks: Vec::new(), digest: None },
            RunningHashes::Blocks(blocks) => WrittenFile { bytes, blocks, digest: None },
            RunningHashes::File(hasher) => {
                WrittenFile { bytes, blocks: Vec::new(), digest: Some(hasher.finish()) }
            }
        }
    }
}

/// Number of buffers with which one file is written, so that one can be filled while a second waits
/// and a third is written.
const WINDOWS_PER_FILE: usize = 3;
/// Size in bytes of each write buffer of a file, for callers that write many files at the same
/// time. Windows of this size are only a little slower than windows of [`super::WINDOW_BYTES`]
/// bytes, and need a quarter of the memory.
pub(crate) const SMALL_WINDOW_BYTES: usize = 2 << 20;

/// An open file to which a [`FileWriter`] appends the contents of full write buffers.
struct OutputFile {
    file: File,
    /// True while the file is written with O_DIRECT.
    direct: bool,
    /// Bytes written so far, including the padding of the last window.
    at: u64,
}

impl OutputFile {
    /// Creates a file for writing, with O_DIRECT if `io_mode` requests it. Falls back to writes
    /// through the page cache if the file system does not support O_DIRECT.
    ///
    /// # Errors
    /// Fails if the path exists.
    fn create(path: &std::path::Path, io_mode: IoMode) -> io::Result<OutputFile> {
        let open = |flags: OFlag| {
            OpenOptions::new()
                .write(true)
                .create_new(true)
                .custom_flags((OFlag::O_NOFOLLOW | flags).bits())
                .open(path)
        };
        if io_mode == IoMode::Direct {
            match fault_points::run_between_fault_points("create", || open(OFlag::O_DIRECT)) {
                Ok(file) => return Ok(OutputFile { file, direct: true, at: 0 }),
                // the file system does not support O_DIRECT, but may have created the file
                // nevertheless
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => drop(std::fs::remove_file(path)),
                Err(e) => return Err(e),
            }
        }
        let file = fault_points::run_between_fault_points("create", || open(OFlag::empty()))?;
        Ok(OutputFile { file, direct: false, at: 0 })
    }

    /// Appends the first `len` bytes of the buffer `window` to the file. With O_DIRECT, pads the
    /// bytes with zeros to a multiple of [`DIRECT_IO_ALIGNMENT`]. Only for the last window of a
    /// file may `len` differ from a multiple of [`DIRECT_IO_ALIGNMENT`].
    fn append_window(&mut self, window: &mut [u8], len: usize) -> io::Result<()> {
        let padded = len.next_multiple_of(DIRECT_IO_ALIGNMENT);
        window[len..padded].fill(0);
        let mut done = 0;
        loop {
            let end = if self.direct { padded } else { len };
            if done >= end {
                self.at += end as u64;
                return Ok(());
            }
            match fault_points::run_between_fault_points("write", || {
                self.file.write_at(&window[done..end], self.at + done as u64)
            }) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if self.direct && e.raw_os_error() == Some(libc::EINVAL) => {
                    disable_direct_io(&self.file)?;
                    self.direct = false;
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Truncates the file to `len` bytes, which removes the padding that O_DIRECT requires. With
    /// `sync`, makes the content durable.
    fn finish(self, len: u64, sync: bool) -> io::Result<()> {
        if self.at > len {
            fault_points::run_between_fault_points("truncate", || self.file.set_len(len))?;
        }
        match sync {
            true => fault_points::run_between_fault_points("fsync file", || self.file.sync_all()),
            false => Ok(()),
        }
    }
}

/// The way in which a [`FileWriter`] writes full buffers to its file: in the thread of the caller,
/// or in a separate thread.
enum WindowWriter {
    /// The calling thread writes. Used for files of up to one window.
    Inline(OutputFile),
    /// A separate thread writes. Used for files of more than one window.
    Thread {
        /// Sends filled windows, each with its number of bytes, to the thread.
        full: SyncSender<(AlignedBuffer, usize)>,
        /// Receives written windows back from the thread.
        empty: Receiver<AlignedBuffer>,
        /// The thread, which returns the file or the first write error.
        thread: JoinHandle<io::Result<OutputFile>>,
    },
    /// Writing has failed or finished, and no further windows are accepted.
    Closed,
}

/// Writes a new file through large aligned buffers, and computes hashes of the content if
/// requested. No byte is durable before [`FileWriter::finish`].
pub(crate) struct FileWriter {
    path: PathBuf,
    writer: WindowWriter,
    /// The window that is being filled.
    window: AlignedBuffer,
    /// Number of bytes of `window` that are filled.
    filled: usize,
    buffers: DiskBufferPool,
    /// Windows taken from `buffers`, at most [`WINDOWS_PER_FILE`].
    taken: usize,
    /// Bytes given to [`FileWriter::write`] so far.
    len: u64,
    hashes: RunningHashes,
}

impl FileWriter {
    /// Creates the file at `path`, to which the writer will write. The writer computes the hashes
    /// that `hashing` requests.
    ///
    /// # Errors
    /// Fails if the path exists.
    pub(crate) fn create(path: PathBuf, io_mode: IoMode, hashing: HashMode) -> Result<FileWriter> {
        FileWriter::with_buffers(path, io_mode, hashing, DiskBufferPool::default())
    }

    /// Creates the file at `path` for writing, with write buffers that are taken from the pool
    /// `buffers` and returned to it at the end.
    pub(crate) fn with_buffers(
        path: PathBuf,
        io_mode: IoMode,
        hashing: HashMode,
        buffers: DiskBufferPool,
    ) -> Result<FileWriter> {
        let output = OutputFile::create(&path, io_mode).map_err(CkptError::io("create", &path))?;
        let window = buffers.take().map_err(CkptError::io("allocate memory to write", &path))?;
        Ok(FileWriter {
            path,
            writer: WindowWriter::Inline(output),
            window,
            filled: 0,
            buffers,
            taken: 1,
            len: 0,
            hashes: RunningHashes::new(hashing),
        })
    }

    /// Copies bytes to the write buffer of the file, and writes the buffer to the file whenever it
    /// is full. An error may therefore concern bytes of an earlier call.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.len += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.filled == self.window.len() {
                self.send_window().map_err(CkptError::io("write", &self.path))?;
            }
            // copied block by block, so that each block is hashed while it is in the CPU cache
            let n = (BLOCK_BYTES - self.filled % BLOCK_BYTES).min(bytes.len());
            self.window[self.filled..self.filled + n].copy_from_slice(&bytes[..n]);
            self.filled += n;
            bytes = &bytes[n..];
            if self.filled.is_multiple_of(BLOCK_BYTES) {
                self.hash_block(BLOCK_BYTES);
            }
        }
        Ok(())
    }

    /// Adds the `n` bytes that were appended last to the write buffer to the hashes of the file.
    fn hash_block(&mut self, n: usize) {
        self.hashes.add_block(&self.window[self.filled - n..self.filled]);
    }

    /// Sends the full write buffer to the thread that writes the file, and takes an empty buffer
    /// for the following bytes. Starts the thread at the first call. Blocks while all other windows
    /// wait to be written.
    fn send_window(&mut self) -> io::Result<()> {
        if let WindowWriter::Inline(_) = self.writer
            && let WindowWriter::Inline(output) = std::mem::replace(&mut self.writer, WindowWriter::Closed)
        {
            self.writer = spawn_writer_thread(output)?;
        }
        let WindowWriter::Thread { full, empty, .. } = &self.writer else {
            return Err(io::Error::other("an earlier write failed"));
        };
        let next = match self.taken < WINDOWS_PER_FILE {
            true => self.buffers.take().map(Some)?,
            false => empty.recv().ok(),
        };
        self.taken = (self.taken + 1).min(WINDOWS_PER_FILE);
        let filled = std::mem::take(&mut self.filled);
        if let Some(next) = next
            && full.send((std::mem::replace(&mut self.window, next), filled)).is_ok()
        {
            return Ok(());
        }
        Err(self
            .wait_for_writes()
            .err()
            .unwrap_or_else(|| io::Error::other("the writing thread ended early")))
    }

    /// Waits until the writing thread has written all full buffers and has ended, and returns the
    /// open file, to which the caller appends the last buffer.
    fn wait_for_writes(&mut self) -> io::Result<OutputFile> {
        match std::mem::replace(&mut self.writer, WindowWriter::Closed) {
            WindowWriter::Inline(output) => Ok(output),
            WindowWriter::Thread { full, empty, thread } => {
                drop(full);
                let done = thread.join();
                empty.try_iter().for_each(|window| self.buffers.give_back(window));
                done.unwrap_or_else(|_| Err(io::Error::other("the writing thread panicked")))
            }
            WindowWriter::Closed => Err(io::Error::other("an earlier write failed")),
        }
    }

    /// Writes the remaining bytes of the buffer, and makes the file durable with fsync.
    pub(crate) fn finish(self) -> Result<WrittenFile> {
        self.finish_file(true)
    }

    /// Writes the remaining bytes of the buffer, without making the file durable. After many files
    /// were written, one call of [`super::sync_file_system`] makes all of them durable.
    pub(crate) fn finish_unsynced(self) -> Result<WrittenFile> {
        self.finish_file(false)
    }

    /// Writes the remaining bytes of the buffer, returns the buffer to its pool, and makes the file
    /// durable if `sync` is true.
    fn finish_file(mut self, sync: bool) -> Result<WrittenFile> {
        if !self.filled.is_multiple_of(BLOCK_BYTES) {
            self.hash_block(self.filled % BLOCK_BYTES);
        }
        let done = self.wait_for_writes().and_then(|mut output| {
            output.append_window(&mut self.window, self.filled)?;
            output.finish(self.len, sync)
        });
        done.map_err(CkptError::io("write", &self.path))?;
        self.buffers.give_back(self.window);
        Ok(self.hashes.describe_file(self.len))
    }
}

/// Starts a thread that appends the contents of each received buffer to `output`, and sends the
/// buffer back for reuse.
fn spawn_writer_thread(mut output: OutputFile) -> io::Result<WindowWriter> {
    let (full, inbox) = sync_channel::<(AlignedBuffer, usize)>(WINDOWS_PER_FILE);
    let (outbox, empty) = sync_channel(WINDOWS_PER_FILE);
    let write = move || {
        for (mut window, len) in inbox {
            output.append_window(&mut window, len)?;
            // the `FileWriter` closes the receiver only when it needs no more windows
            let _ = outbox.send(window);
        }
        Ok(output)
    };
    let thread = std::thread::Builder::new().name("ckpt-write".into()).spawn(write)?;
    Ok(WindowWriter::Thread { full, empty, thread })
}

/// Writes a small file durably, through the page cache. Returns its size in bytes.
///
/// # Errors
/// Fails if the path exists or a write fails.
pub(crate) fn write_file(path: PathBuf, content: &[u8]) -> Result<u64> {
    let mut file = FileWriter::create(path, IoMode::Buffered, HashMode::Off)?;
    file.write(content)?;
    Ok(file.finish()?.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::disk::io_units::WINDOW_BYTES;

    /// Writes a file of `len` bytes in pieces of different sizes, through buffers of `window`
    /// bytes. Checks the content of the file and the returned hashes.
    fn assert_written_file(dir: &std::path::Path, io_mode: IoMode, window: usize, len: usize) {
        let bytes: Vec<u8> =
            (0..len).map(|i| (i as u32).wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect();
        for hashing in [HashMode::Off, HashMode::Blocks, HashMode::File] {
            let path = dir.join(format!("{io_mode:?}-{window}-{len}-{hashing:?}"));
            let pool = DiskBufferPool::with_size(window);
            let mut writer = FileWriter::with_buffers(path.clone(), io_mode, hashing, pool).expect("made");
            let (mut rest, mut n) = (bytes.as_slice(), 1);
            while !rest.is_empty() {
                let (now, later) = rest.split_at(n.min(rest.len()));
                writer.write(now).expect("written");
                (rest, n) = (later, n * 3 + 1);
            }
            let blocks: Vec<Hash> = bytes.chunks(BLOCK_BYTES).map(Hash::digest).collect();
            let expected = WrittenFile {
                bytes: len as u64,
                blocks: if hashing == HashMode::Blocks { blocks } else { Vec::new() },
                digest: (hashing == HashMode::File).then(|| Hash::digest(&bytes)),
            };
            assert_eq!(writer.finish().expect("finished"), expected);
            assert!(std::fs::read(path).expect("read") == bytes, "{io_mode:?}, {len} bytes");
        }
    }

    #[test]
    fn files_of_every_length_are_written_with_direct_and_buffered_io() {
        // on a disk and in tmpfs, since not every file system supports O_DIRECT
        let dirs = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())];
        for dir in dirs {
            let dir = dir.expect("a directory");
            for io_mode in [IoMode::Direct, IoMode::Buffered] {
                for window in [SMALL_WINDOW_BYTES, WINDOW_BYTES] {
                    for len in [
                        0,
                        1,
                        4095,
                        4096,
                        BLOCK_BYTES - 1,
                        BLOCK_BYTES,
                        window,
                        window + 1,
                        4 * window + BLOCK_BYTES + 5,
                    ] {
                        assert_written_file(dir.path(), io_mode, window, len);
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
        let mut window = vec![0; WINDOW_BYTES];
        window.fill(7);
        output.append_window(&mut window, WINDOW_BYTES).expect("written");
        disable_direct_io(&output.file).expect("left");
        output.direct = false;
        output.append_window(&mut window, 4099).expect("written");
        output.finish(WINDOW_BYTES as u64 + 4099, true).expect("durable");
        assert!(std::fs::read(&path).expect("read") == vec![7u8; WINDOW_BYTES + 4099]);
    }

    #[test]
    fn creating_an_existing_file_fails_and_leaves_it_unchanged() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        std::fs::write(&path, "other").expect("written");
        for io_mode in [IoMode::Direct, IoMode::Buffered] {
            assert!(FileWriter::create(path.clone(), io_mode, HashMode::Off).is_err());
        }
        assert_eq!(std::fs::read(&path).expect("read"), b"other");
    }
}
