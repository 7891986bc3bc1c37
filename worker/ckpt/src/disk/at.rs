//! [`ReadAt`]: reads at any offset of a file.
//!
//! Bytes in the page cache are read from it. Other bytes are read with direct I/O, so that a
//! checkpoint that is read once does not evict other pages.
use super::{ALIGN, Buffers, Directory};
use crate::error::Result;
use nix::fcntl::OFlag;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Bytes per direct read: a huge page, which is contiguous physical memory.
const DIRECT: usize = 2 << 20;
/// Bytes per cached read, so that they stay in the CPU cache until they are used.
const CACHED: usize = 256 << 10;
/// Minimum bytes of a range that is read with direct I/O.
const DIRECT_MIN: u64 = 256 << 10;

/// Buffers for direct reads, which are reused from file to file.
pub(crate) struct Scratch {
    buffers: Buffers,
}

impl Default for Scratch {
    fn default() -> Scratch {
        // pieces end at aligned offsets, so with the alignment at their start they are not longer
        // than this
        Scratch { buffers: Buffers::with_size(DIRECT) }
    }
}

/// An open file that is read at any offset.
pub(crate) struct ReadAt<'a> {
    directory: &'a Directory,
    name: &'a str,
    cached: File,
    direct: Direct,
    scratch: &'a Scratch,
}

/// The file opened a second time, with O_DIRECT.
enum Direct {
    /// Not opened yet.
    Unopened,
    /// Open with O_DIRECT.
    Open(File),
    /// The file system does not support O_DIRECT.
    Unsupported,
}

impl<'a> ReadAt<'a> {
    /// Opens the file. Returns the reader and the file's size.
    pub(crate) fn open(
        directory: &'a Directory,
        name: &'a str,
        scratch: &'a Scratch,
    ) -> Result<(ReadAt<'a>, u64)> {
        let (cached, size) = directory.open_file(name, OFlag::empty())?;
        Ok((ReadAt { directory, name, cached, direct: Direct::Unopened, scratch }, size))
    }

    /// Passes the bytes of a range to `sink`, piece by piece.
    pub(crate) fn each(&mut self, bytes: Range<u64>, mut sink: impl FnMut(&[u8])) -> io::Result<()> {
        let mut at = bytes.start;
        while at < bytes.end {
            let end = bytes.end.min(end_of_piece(at));
            if !self.read_direct(at..end, &mut sink)? {
                self.read_cached(at..end, &mut sink)?;
            }
            at = end;
        }
        Ok(())
    }

    /// Fills `out` with the bytes at offset `at`, and also passes them to `sink`, piece by piece.
    pub(crate) fn fill(&mut self, at: u64, out: &mut [u8], mut sink: impl FnMut(&[u8])) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            let from = at + done as u64;
            let len = (out.len() - done).min((end_of_piece(from) - from) as usize);
            let now = &mut out[done..done + len];
            let mut filled = 0;
            let direct = self.read_direct(from..from + len as u64, &mut |piece| {
                now[filled..filled + piece.len()].copy_from_slice(piece);
                filled += piece.len();
                sink(piece);
            })?;
            if !direct {
                let mut from = from;
                for piece in now.chunks_mut(CACHED) {
                    self.cached.read_exact_at(piece, from)?;
                    from += piece.len() as u64;
                    sink(piece);
                }
            }
            done += len;
        }
        Ok(())
    }

    fn read_cached(&mut self, bytes: Range<u64>, sink: &mut impl FnMut(&[u8])) -> io::Result<()> {
        let mut buffer = self.scratch.buffers.take()?;
        let mut at = bytes.start;
        while at < bytes.end {
            let len = (bytes.end - at).min(CACHED as u64) as usize;
            self.cached.read_exact_at(&mut buffer[..len], at)?;
            sink(&buffer[..len]);
            at += len as u64;
        }
        self.scratch.buffers.give(buffer);
        Ok(())
    }

    /// Reads at most [`DIRECT`] bytes with direct I/O. Returns false if they must be read through
    /// the page cache.
    fn read_direct(&mut self, bytes: Range<u64>, sink: &mut impl FnMut(&[u8])) -> io::Result<bool> {
        if bytes.end - bytes.start < DIRECT_MIN || matches!(self.direct, Direct::Unsupported) {
            return Ok(false);
        }
        if mostly_cached(&self.cached, &bytes) {
            return Ok(false);
        }
        if matches!(self.direct, Direct::Unopened) {
            // a file that was replaced meanwhile is detected by its checksums
            let opened = self.directory.open_file(self.name, OFlag::O_DIRECT);
            self.direct = opened.map_or(Direct::Unsupported, |(file, _)| Direct::Open(file));
        }
        let Direct::Open(file) = &self.direct else { return Ok(false) };
        let align = ALIGN as u64;
        let start = bytes.start / align * align;
        let end = bytes.end.next_multiple_of(align);
        let range = (bytes.start - start) as usize..(bytes.end - start) as usize;
        let (mut buffer, mut filled) = (self.scratch.buffers.take()?, 0);
        while filled < range.end {
            let window = &mut buffer[filled..(end - start) as usize];
            match file.read_at(window, start + filled as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // the file system needs another alignment, or supports O_DIRECT only at open
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    self.direct = Direct::Unsupported;
                    return Ok(false);
                }
                Err(e) => return Err(e),
            }
        }
        sink(&buffer[range]);
        self.scratch.buffers.give(buffer);
        Ok(true)
    }
}

/// The offset at which a read from offset `at` ends: at most [`DIRECT`] bytes later, and aligned
/// for O_DIRECT.
fn end_of_piece(at: u64) -> u64 {
    at.saturating_add(DIRECT as u64) / ALIGN as u64 * ALIGN as u64
}

/// `struct cachestat_range` of the kernel.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// `struct cachestat` of the kernel.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Number of the system call on every architecture; since Linux 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

/// True when the page cache has at least half of these bytes, or when this is unknown.
fn mostly_cached(file: &File, bytes: &Range<u64>) -> bool {
    let range = CachestatRange { offset: bytes.start, length: bytes.end - bytes.start };
    let mut found = Cachestat::default();
    // SAFETY: both structs have the kernel's layout and outlive the call, which writes only to the
    // second
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut found, 0) };
    result != 0 || found.cached.saturating_mul(2 * ALIGN as u64) >= range.length
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

    fn content(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i as u32).wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect()
    }

    /// Various ranges of a cached file, of an uncached file, and of a file in tmpfs.
    #[test]
    fn cached_and_direct_reads_are_equal() {
        let dirs = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())];
        let bytes = content(2 * DIRECT + 12_345);
        let len = bytes.len() as u64;
        for dir in dirs {
            let dir = dir.expect("a directory");
            let path = dir.path().join("file");
            std::fs::write(&path, &bytes).expect("written");
            let directory = Directory::open(dir.path()).expect("exists");
            let scratch = Scratch::default();
            for drop_first in [true, false] {
                for range in [0..len, 1..len, 4095..DIRECT as u64 + 4097, len - 300_001..len, 77..78, 5..5] {
                    let file = File::open(&path).expect("exists");
                    if drop_first {
                        file.sync_all().expect("synced");
                        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
                    } else {
                        std::fs::read(&path).expect("read");
                    }
                    let expected = &bytes[range.start as usize..range.end as usize];
                    let (mut open, size) = ReadAt::open(&directory, "file", &scratch).expect("opened");
                    assert_eq!(size, len);
                    let mut pieces = Vec::new();
                    open.each(range.clone(), |piece| pieces.extend_from_slice(piece)).expect("read");
                    assert!(pieces == expected, "{range:?}");
                    let (mut out, mut passed) = (vec![0u8; expected.len()], Vec::new());
                    open.fill(range.start, &mut out, |piece| passed.extend_from_slice(piece)).expect("read");
                    assert!(out == expected && passed == expected, "{range:?}");
                }
            }
        }
    }

    #[test]
    fn reading_beyond_the_end_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("file"), content(1 << 20)).expect("written");
        let file = File::open(dir.path().join("file")).expect("exists");
        file.sync_all().expect("synced");
        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        let (directory, scratch) = (Directory::open(dir.path()).expect("exists"), Scratch::default());
        let (mut open, _) = ReadAt::open(&directory, "file", &scratch).expect("opened");
        for end in [(1 << 20) + 1, 2 << 20, 9 << 20] {
            let e = open.each(0..end, |_| {}).expect_err("beyond the end");
            assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof, "{end}");
        }
    }

    #[test]
    fn a_file_that_was_just_written_is_cached() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        std::fs::write(dir.path().join("file"), content(1 << 20)).expect("written");
        let file = File::open(dir.path().join("file")).expect("exists");
        assert!(mostly_cached(&file, &(0..1 << 20)));
    }
}
