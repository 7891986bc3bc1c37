//! A new file, written in large aligned blocks while the next ones are hashed.
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

/// How the bytes go to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Past the page cache where the file system allows it.
    Direct,
    /// Through the page cache: small files.
    Buffered,
}

/// Windows in flight per file: one being filled, one waiting, one being written.
const WINDOWS: usize = 3;
/// Bytes of a window where many files are written at once: not much slower than [`WINDOW`], and a quarter of the memory.
pub(crate) const NARROW: usize = 2 << 20;

/// The file itself: windows go in one after the other.
struct Target {
    file: File,
    /// O_DIRECT is on.
    direct: bool,
    /// Bytes written so far, with the padding of the last window.
    at: u64,
}

impl Target {
    fn create(path: &std::path::Path, how: Path) -> io::Result<Target> {
        let open = |flags: OFlag| {
            OpenOptions::new()
                .write(true)
                .create_new(true)
                .custom_flags((OFlag::O_NOFOLLOW | flags).bits())
                .open(path)
        };
        if how == Path::Direct {
            match fault::around("create", || open(OFlag::O_DIRECT)) {
                Ok(file) => return Ok(Target { file, direct: true, at: 0 }),
                // the file system has no O_DIRECT; some leave the new file behind
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => drop(std::fs::remove_file(path)),
                Err(e) => return Err(e),
            }
        }
        let file = fault::around("create", || open(OFlag::empty()))?;
        Ok(Target { file, direct: false, at: 0 })
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
                Err(e) if self.direct && e.raw_os_error() == Some(libc::EINVAL) => self.leave_direct()?,
                Err(e) => return Err(e),
            }
        }
    }

    /// The file system takes O_DIRECT at open but not for this write.
    fn leave_direct(&mut self) -> io::Result<()> {
        let flags = OFlag::from_bits_retain(fcntl(&self.file, FcntlArg::F_GETFL)?);
        fcntl(&self.file, FcntlArg::F_SETFL(flags - OFlag::O_DIRECT))?;
        self.direct = false;
        Ok(())
    }

    /// Cuts the padding off and, with `sync`, makes the content durable.
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

/// Who writes the windows.
enum Back {
    /// The caller: files of up to one window.
    Here(Target),
    /// A thread of its own.
    Thread {
        full: SyncSender<(Buffer, usize)>,
        empty: Receiver<Buffer>,
        thread: JoinHandle<io::Result<Target>>,
    },
    /// After an error.
    Gone,
}

/// Writes one new file; nothing is durable before [`FileWriter::finish`].
pub(crate) struct FileWriter {
    path: PathBuf,
    back: Back,
    window: Buffer,
    filled: usize,
    buffers: Buffers,
    taken: usize,
    len: u64,
    /// BLAKE3 per [`BLOCK`], when wanted.
    hashes: Option<Vec<Hash>>,
}

impl FileWriter {
    /// A new file; an existing one is an error.
    pub(crate) fn create(path: PathBuf, how: Path, hashed: bool) -> Result<FileWriter> {
        FileWriter::with(path, how, hashed, Buffers::default())
    }

    /// The same with three windows of these, which come back to them.
    pub(crate) fn with(path: PathBuf, how: Path, hashed: bool, buffers: Buffers) -> Result<FileWriter> {
        let target = Target::create(&path, how).map_err(CkptError::io("create", &path))?;
        let window = buffers.take().map_err(CkptError::io("get memory to write", &path))?;
        let hashes = hashed.then(Vec::new);
        Ok(FileWriter {
            path,
            back: Back::Here(target),
            window,
            filled: 0,
            buffers,
            taken: 1,
            len: 0,
            hashes,
        })
    }

    /// Appends.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.len += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.filled == self.window.len() {
                self.send().map_err(CkptError::io("write", &self.path))?;
            }
            // block by block, so that a block is hashed while it is still in the cache
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
            hashes.push(Hash::of(&self.window[self.filled - n..self.filled]));
        }
    }

    /// Hands the full window over and gets an empty one.
    fn send(&mut self) -> io::Result<()> {
        if let Back::Here(_) = self.back
            && let Back::Here(target) = std::mem::replace(&mut self.back, Back::Gone)
        {
            self.back = spawn(target)?;
        }
        let Back::Thread { full, empty, .. } = &self.back else {
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

    /// Waits until all windows handed over are written.
    fn join(&mut self) -> io::Result<Target> {
        match std::mem::replace(&mut self.back, Back::Gone) {
            Back::Here(target) => Ok(target),
            Back::Thread { full, empty, thread } => {
                drop(full);
                let done = thread.join();
                empty.try_iter().for_each(|window| self.buffers.give(window));
                done.unwrap_or_else(|_| Err(io::Error::other("the writing thread panicked")))
            }
            Back::Gone => Err(io::Error::other("an earlier write failed")),
        }
    }

    /// Writes the rest and makes the file durable: its size and, when wanted, the hash of every block.
    pub(crate) fn finish(self) -> Result<(u64, Vec<Hash>)> {
        self.finish_with(true)
    }

    /// Writes the rest and returns the size; many files are made durable at once by [`super::sync_all_of`].
    pub(crate) fn finish_unsynced(self) -> Result<u64> {
        Ok(self.finish_with(false)?.0)
    }

    fn finish_with(mut self, sync: bool) -> Result<(u64, Vec<Hash>)> {
        if !self.filled.is_multiple_of(BLOCK) {
            self.hash(self.filled % BLOCK);
        }
        let done = self.join().and_then(|mut target| {
            target.append(&mut self.window, self.filled)?;
            target.finish(self.len, sync)
        });
        done.map_err(CkptError::io("write", &self.path))?;
        self.buffers.give(self.window);
        Ok((self.len, self.hashes.take().unwrap_or_default()))
    }
}

/// Moves the target to a thread that writes what it is sent and gives the windows back.
fn spawn(mut target: Target) -> io::Result<Back> {
    let (full, inbox) = sync_channel::<(Buffer, usize)>(WINDOWS);
    let (outbox, empty): (Sender<Buffer>, _) = channel();
    let write = move || {
        for (mut window, len) in inbox {
            target.append(&mut window, len)?;
            // the other side is gone only when it needs no more windows
            let _ = outbox.send(window);
        }
        Ok(target)
    };
    let thread = std::thread::Builder::new().name("ckpt-write".into()).spawn(write)?;
    Ok(Back::Thread { full, empty, thread })
}

/// A small file in one go, durable when this returns.
pub(crate) fn write_file(path: PathBuf, content: &[u8]) -> Result<u64> {
    let mut file = FileWriter::create(path, Path::Buffered, false)?;
    file.write(content)?;
    Ok(file.finish()?.0)
}

#[cfg(test)]
mod tests {
    use super::super::WINDOW;
    use super::*;

    /// Writes `len` bytes in uneven parts and compares content and hashes.
    fn check(dir: &std::path::Path, how: Path, window: usize, len: usize) {
        let bytes: Vec<u8> =
            (0..len).map(|i| (i as u32).wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect();
        let path = dir.join(format!("{how:?}-{window}-{len}"));
        let mut writer = FileWriter::with(path.clone(), how, true, Buffers::of(window)).expect("made");
        let (mut rest, mut n) = (bytes.as_slice(), 1);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(n.min(rest.len()));
            writer.write(now).expect("written");
            (rest, n) = (later, n * 3 + 1);
        }
        let (written, hashes) = writer.finish().expect("finished");
        assert_eq!(written, len as u64);
        assert!(std::fs::read(path).expect("read") == bytes, "{how:?}, {len} bytes");
        assert_eq!(hashes, bytes.chunks(BLOCK).map(Hash::of).collect::<Vec<_>>());
    }

    #[test]
    fn every_length_arrives_past_and_through_the_page_cache() {
        // where the machine's disk is, and where its memory is: not every file system takes O_DIRECT
        let dirs = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())];
        for dir in dirs {
            let dir = dir.expect("a directory");
            for how in [Path::Direct, Path::Buffered] {
                for window in [NARROW, WINDOW] {
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
    fn writing_goes_on_when_a_file_system_refuses_direct_writes() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        let mut target = Target::create(&path, Path::Direct).expect("made");
        let mut window = vec![0; WINDOW];
        window.fill(7);
        target.append(&mut window, WINDOW).expect("written");
        target.leave_direct().expect("left");
        target.append(&mut window, 4099).expect("written");
        target.finish(WINDOW as u64 + 4099, true).expect("durable");
        assert!(std::fs::read(&path).expect("read") == vec![7u8; WINDOW + 4099]);
    }

    #[test]
    fn an_existing_file_is_not_touched() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        std::fs::write(&path, "mine").expect("written");
        for how in [Path::Direct, Path::Buffered] {
            assert!(FileWriter::create(path.clone(), how, false).is_err());
        }
        assert_eq!(std::fs::read(&path).expect("read"), b"mine");
    }
}
