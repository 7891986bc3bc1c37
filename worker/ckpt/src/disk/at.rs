//! Reads at any place of a file: what the page cache has comes out of it, what it hasn't comes past it. So a checkpoint
//! that is read once takes nobody else's pages from the cache, and costs no pages of its own.
use super::{ALIGN, Buffers, Folder};
use crate::error::Result;
use nix::fcntl::OFlag;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Bytes read past the page cache at a time: a huge page, which is one stretch of memory for the disk.
const DIRECT: usize = 2 << 20;
/// Bytes read out of the page cache at a time: they are still in the core's cache when they are looked at.
const CACHED: usize = 256 << 10;
/// Fewer bytes than this aren't worth to be read past the page cache.
const DIRECT_MIN: u64 = 256 << 10;

/// Buffers of one thread, kept for the next file.
pub(crate) struct Scratch {
    buffers: Buffers,
}

impl Default for Scratch {
    fn default() -> Scratch {
        // pieces end where blocks do, so with what is before them they are no longer
        Scratch { buffers: Buffers::of(DIRECT) }
    }
}

/// An open file, read at any place.
pub(crate) struct ReadAt<'a> {
    folder: &'a Folder,
    name: &'a str,
    cached: File,
    direct: Direct,
    scratch: &'a Scratch,
}

/// The file opened a second time, past the page cache.
enum Direct {
    Unopened,
    Open(File),
    /// The file system has no such thing.
    Never,
}

impl<'a> ReadAt<'a> {
    /// Opens it; returns its size as well.
    pub(crate) fn open(folder: &'a Folder, name: &'a str, scratch: &'a Scratch) -> Result<(ReadAt<'a>, u64)> {
        let (cached, size) = folder.open_file(name, OFlag::empty())?;
        Ok((ReadAt { folder, name, cached, direct: Direct::Unopened, scratch }, size))
    }

    /// Hands the bytes of a range to `sink`, piece after piece.
    pub(crate) fn each(&mut self, bytes: Range<u64>, mut sink: impl FnMut(&[u8])) -> io::Result<()> {
        let mut at = bytes.start;
        while at < bytes.end {
            let end = bytes.end.min(end_of_piece(at));
            if !self.past_the_cache(at..end, &mut sink)? {
                self.out_of_the_cache(at..end, &mut sink)?;
            }
            at = end;
        }
        Ok(())
    }

    /// Fills `out` with the bytes from `at` on; `sink` gets them as well, piece after piece.
    pub(crate) fn fill(&mut self, at: u64, out: &mut [u8], mut sink: impl FnMut(&[u8])) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            let from = at + done as u64;
            let len = (out.len() - done).min((end_of_piece(from) - from) as usize);
            let now = &mut out[done..done + len];
            let mut filled = 0;
            let direct = self.past_the_cache(from..from + len as u64, &mut |piece| {
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

    fn out_of_the_cache(&mut self, bytes: Range<u64>, sink: &mut impl FnMut(&[u8])) -> io::Result<()> {
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

    /// At most [`DIRECT`] bytes. False when they have to come out of the page cache.
    fn past_the_cache(&mut self, bytes: Range<u64>, sink: &mut impl FnMut(&[u8])) -> io::Result<bool> {
        if bytes.end - bytes.start < DIRECT_MIN || matches!(self.direct, Direct::Never) {
            return Ok(false);
        }
        if mostly_cached(&self.cached, &bytes) {
            return Ok(false);
        }
        if matches!(self.direct, Direct::Unopened) {
            // a file that was exchanged since is found by its checksums
            let opened = self.folder.open_file(self.name, OFlag::O_DIRECT);
            self.direct = opened.map_or(Direct::Never, |(file, _)| Direct::Open(file));
        }
        let Direct::Open(file) = &self.direct else { return Ok(false) };
        let align = ALIGN as u64;
        let start = bytes.start / align * align;
        let end = bytes.end.next_multiple_of(align);
        let wanted = (bytes.start - start) as usize..(bytes.end - start) as usize;
        let (mut buffer, mut filled) = (self.scratch.buffers.take()?, 0);
        while filled < wanted.end {
            let window = &mut buffer[filled..(end - start) as usize];
            match file.read_at(window, start + filled as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // it wants another alignment, or takes O_DIRECT at open alone
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    self.direct = Direct::Never;
                    return Ok(false);
                }
                Err(e) => return Err(e),
            }
        }
        sink(&buffer[wanted]);
        self.scratch.buffers.give(buffer);
        Ok(true)
    }
}

/// Where a piece that begins at `at` ends at the latest, so that the next one begins as O_DIRECT wants it.
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

/// The same number on every architecture; since Linux 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

/// True when the page cache has at least half of these bytes, or when that can't be known.
fn mostly_cached(file: &File, bytes: &Range<u64>) -> bool {
    let range = CachestatRange { offset: bytes.start, length: bytes.end - bytes.start };
    let mut found = Cachestat::default();
    // SAFETY: both structs are laid out as the kernel's and outlive the call, which writes to the second alone
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

    /// Every beginning and end, with the file in the cache, out of it, and on a file system that is nothing but a cache.
    #[test]
    fn all_ways_read_the_same() {
        let dirs = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())];
        let bytes = content(2 * DIRECT + 12_345);
        let len = bytes.len() as u64;
        for dir in dirs {
            let dir = dir.expect("a directory");
            let path = dir.path().join("file");
            std::fs::write(&path, &bytes).expect("written");
            let folder = Folder::open(dir.path()).expect("there");
            let scratch = Scratch::default();
            for drop_first in [true, false] {
                for range in [0..len, 1..len, 4095..DIRECT as u64 + 4097, len - 300_001..len, 77..78, 5..5] {
                    let file = File::open(&path).expect("there");
                    if drop_first {
                        file.sync_all().expect("synced");
                        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
                    } else {
                        std::fs::read(&path).expect("read");
                    }
                    let wanted = &bytes[range.start as usize..range.end as usize];
                    let (mut open, size) = ReadAt::open(&folder, "file", &scratch).expect("opened");
                    assert_eq!(size, len);
                    let mut seen = Vec::new();
                    open.each(range.clone(), |piece| seen.extend_from_slice(piece)).expect("read");
                    assert!(seen == wanted, "{range:?}");
                    let (mut out, mut told) = (vec![0u8; wanted.len()], Vec::new());
                    open.fill(range.start, &mut out, |piece| told.extend_from_slice(piece)).expect("read");
                    assert!(out == wanted && told == wanted, "{range:?}");
                }
            }
        }
    }

    #[test]
    fn the_end_of_the_file_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("file"), content(1 << 20)).expect("written");
        let file = File::open(dir.path().join("file")).expect("there");
        file.sync_all().expect("synced");
        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        let (folder, scratch) = (Folder::open(dir.path()).expect("there"), Scratch::default());
        let (mut open, _) = ReadAt::open(&folder, "file", &scratch).expect("opened");
        for end in [(1 << 20) + 1, 2 << 20, 9 << 20] {
            let e = open.each(0..end, |_| {}).expect_err("cut short");
            assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof, "{end}");
        }
    }

    #[test]
    fn what_was_just_written_is_in_the_cache() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        std::fs::write(dir.path().join("file"), content(1 << 20)).expect("written");
        let file = File::open(dir.path().join("file")).expect("there");
        assert!(mostly_cached(&file, &(0..1 << 20)));
    }
}
