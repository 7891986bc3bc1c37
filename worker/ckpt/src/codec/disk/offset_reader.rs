//! [`OffsetReader`]: reads a file at any offset, with direct I/O where that is faster.
//!
//! Bytes in the page cache are copied from the cache. Other bytes are read with direct I/O, so that
//! a checkpoint that is read once does not evict other pages.
use super::buffer_pool::DiskBufferPool;
use super::crc::compute_file_crc;
use super::directory::Directory;
use super::io_units::DIRECT_IO_ALIGNMENT;
use super::sparse::find_data;
use crate::error::{CkptError, DamageReason, Result};
use nix::fcntl::OFlag;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Size in bytes of one read with direct I/O: a huge page, which is contiguous physical memory.
const DIRECT_READ_BYTES: usize = 2 << 20;
/// Size in bytes of one read from the page cache. The bytes stay in the CPU cache until they are
/// used.
const CACHED_READ_BYTES: usize = 256 << 10;
/// The smallest byte range, in bytes, that is read with direct I/O.
const DIRECT_READ_BYTES_MIN: u64 = 256 << 10;

/// Buffers for reading files at any offset, which are reused from file to file.
pub(crate) struct ReadBuffers {
    buffers: DiskBufferPool,
}

impl Default for ReadBuffers {
    fn default() -> ReadBuffers {
        // pieces end at aligned offsets, so they fit even after their start is aligned downwards
        ReadBuffers { buffers: DiskBufferPool::with_size(DIRECT_READ_BYTES) }
    }
}

/// An open file that is read at any offset, with direct I/O where the page cache lacks the bytes.
pub(crate) struct OffsetReader<'a> {
    directory: &'a Directory,
    name: &'a str,
    /// The file, opened without O_DIRECT.
    cached: File,
    /// A second handle to the file, opened with O_DIRECT when the first direct read needs it.
    direct: DirectFile,
    scratch: &'a ReadBuffers,
}

/// The state of direct I/O (O_DIRECT) for the file of an [`OffsetReader`]: not tried yet, open, or
/// unsupported by the file system.
enum DirectFile {
    /// The file has not been opened with O_DIRECT yet.
    Unopened,
    /// The file is open with O_DIRECT.
    Open(File),
    /// The file system does not support O_DIRECT.
    Unsupported,
}

impl<'a> OffsetReader<'a> {
    /// Opens the file `name` in `directory`. Returns the reader and the file's size in bytes.
    ///
    /// # Errors
    /// Fails if the file is missing, is not a regular file, or cannot be opened.
    pub(crate) fn open(
        directory: &'a Directory,
        name: &'a str,
        scratch: &'a ReadBuffers,
    ) -> Result<(OffsetReader<'a>, u64)> {
        let (cached, size) = directory.open_file(name, OFlag::empty())?;
        Ok((OffsetReader { directory, name, cached, direct: DirectFile::Unopened, scratch }, size))
    }

    /// Reads the byte range `bytes` of the file, and calls `sink` in order with consecutive pieces
    /// of at most [`DIRECT_READ_BYTES`] bytes.
    ///
    /// # Errors
    ///
    /// Fails if the range reaches beyond the end of the file, or a read fails. `sink` may already
    /// have received pieces from the beginning of the range.
    pub(crate) fn for_each_piece(
        &mut self,
        bytes: Range<u64>,
        mut sink: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let mut at = bytes.start;
        while at < bytes.end {
            let end = bytes.end.min(direct_read_end(at));
            if !self.try_read_direct(at..end, &mut sink)? {
                self.read_cached(at..end, &mut sink)?;
            }
            at = end;
        }
        Ok(())
    }

    /// Reads the byte range `bytes` of this open file and computes its CRC-32. Does not read the
    /// holes of a sparse file.
    ///
    /// # Errors
    /// Fails if the range reaches beyond the end of the file, or a read fails.
    pub(crate) fn compute_crc(&mut self, bytes: Range<u64>) -> io::Result<u32> {
        // a second handle, since the reads need the first one
        let file = self.cached.try_clone()?;
        compute_file_crc(&file, bytes, |data, hasher| self.for_each_piece(data, |piece| hasher.update(piece)))
    }

    /// Returns the first range of the file within `bytes` that is not in a hole of a sparse file,
    /// or an empty range.
    pub(crate) fn find_data(&self, bytes: Range<u64>) -> Range<u64> {
        find_data(&self.cached, bytes)
    }

    /// Counts how many bytes of the byte range `bytes` are in holes of a sparse file.
    pub(crate) fn count_hole_bytes(&self, bytes: Range<u64>) -> u64 {
        let (mut at, mut holes) = (bytes.start, 0);
        while at < bytes.end {
            let data = self.find_data(at..bytes.end);
            holes += data.start - at;
            at = data.end;
        }
        holes
    }

    /// Converts an I/O error of reading from this file to a [`CkptError`] with the name of the
    /// file. A file that ends early becomes [`DamageReason::Changed`].
    pub(super) fn convert_read_error(&self, e: io::Error) -> CkptError {
        match e.kind() {
            io::ErrorKind::UnexpectedEof => {
                CkptError::damaged(self.directory.path(), self.name, DamageReason::Changed)
            }
            _ => CkptError::io("read", &self.directory.path().join(self.name))(e),
        }
    }

    /// Fills `out` with the file's bytes starting at offset `at`. Reads them in consecutive pieces,
    /// and also passes each piece to `sink` in order, while its bytes are in the CPU cache.
    ///
    /// # Errors
    /// Fails if the file ends before `out` is full, or a read fails.
    pub(crate) fn read_into(
        &mut self,
        at: u64,
        out: &mut [u8],
        mut sink: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            let from = at + done as u64;
            let len = (out.len() - done).min((direct_read_end(from) - from) as usize);
            let now = &mut out[done..done + len];
            let mut filled = 0;
            let direct = self.try_read_direct(from..from + len as u64, &mut |piece| {
                now[filled..filled + piece.len()].copy_from_slice(piece);
                filled += piece.len();
                sink(piece);
            })?;
            if !direct {
                let mut from = from;
                for piece in now.chunks_mut(CACHED_READ_BYTES) {
                    self.cached.read_exact_at(piece, from)?;
                    from += piece.len() as u64;
                    sink(piece);
                }
            }
            done += len;
        }
        Ok(())
    }

    /// Reads the byte range `bytes` of this open file through the page cache, and passes
    /// consecutive pieces of it to the callback `sink`.
    fn read_cached(&mut self, bytes: Range<u64>, sink: &mut impl FnMut(&[u8])) -> io::Result<()> {
        let mut buffer = self.scratch.buffers.take()?;
        let mut at = bytes.start;
        while at < bytes.end {
            let len = (bytes.end - at).min(CACHED_READ_BYTES as u64) as usize;
            self.cached.read_exact_at(&mut buffer[..len], at)?;
            sink(&buffer[..len]);
            at += len as u64;
        }
        self.scratch.buffers.give_back(buffer);
        Ok(())
    }

    /// Reads the byte range `bytes` of this file with direct I/O and passes it to `sink`, unless
    /// the range is small, mostly cached, or direct I/O unsupported. Returns true if that was
    /// possible. The caller must limit the range with [`direct_read_end`].
    ///
    /// Returns false without a call of `sink` if the range is small, at least half of it is cached,
    /// or the file system does not support O_DIRECT. The caller must then read through the page
    /// cache.
    fn try_read_direct(&mut self, bytes: Range<u64>, sink: &mut impl FnMut(&[u8])) -> io::Result<bool> {
        if bytes.end - bytes.start < DIRECT_READ_BYTES_MIN || matches!(self.direct, DirectFile::Unsupported) {
            return Ok(false);
        }
        if is_mostly_cached(&self.cached, &bytes) {
            return Ok(false);
        }
        if matches!(self.direct, DirectFile::Unopened) {
            // the caller verifies checksums, which detect a file that was replaced meanwhile
            let opened = self.directory.open_file(self.name, OFlag::O_DIRECT);
            self.direct = opened.map_or(DirectFile::Unsupported, |(file, _)| DirectFile::Open(file));
        }
        let DirectFile::Open(file) = &self.direct else { return Ok(false) };
        let align = DIRECT_IO_ALIGNMENT as u64;
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
                    self.direct = DirectFile::Unsupported;
                    return Ok(false);
                }
                Err(e) => return Err(e),
            }
        }
        sink(&buffer[range]);
        self.scratch.buffers.give_back(buffer);
        Ok(true)
    }
}

/// Returns the file offset at which a direct read from offset `at` must end, so that the read is
/// aligned and fits into one buffer.
fn direct_read_end(at: u64) -> u64 {
    at.saturating_add(DIRECT_READ_BYTES as u64) / DIRECT_IO_ALIGNMENT as u64 * DIRECT_IO_ALIGNMENT as u64
}

/// The kernel's `struct cachestat_range`: the byte range about which the system call `cachestat` is
/// asked.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// The kernel's `struct cachestat`, the result of the system call `cachestat`: how many pages of a
/// byte range are in the page cache, and in which state.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Number of the system call `cachestat`, equal on every architecture. Linux has this call since
/// version 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

/// Returns true if at least half of the byte range `bytes` of the file is in the page cache, or if
/// the kernel cannot report this.
fn is_mostly_cached(file: &File, bytes: &Range<u64>) -> bool {
    let range = CachestatRange { offset: bytes.start, length: bytes.end - bytes.start };
    let mut found = Cachestat::default();
    // SAFETY: both structs have the kernel's layout and outlive the call, which writes only to
    // `found`
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut found, 0) };
    result != 0 || found.cached.saturating_mul(2 * DIRECT_IO_ALIGNMENT as u64) >= range.length
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

    /// Returns test content of `len` bytes, each of which differs from its neighbours.
    fn make_content(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i as u32).wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect()
    }

    /// Checks that reads of a cached file, an uncached file and a file in tmpfs return the bytes
    /// that were written.
    #[test]
    fn cached_and_direct_reads_are_equal() {
        let dirs = [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())];
        let bytes = make_content(2 * DIRECT_READ_BYTES + 12_345);
        let len = bytes.len() as u64;
        for dir in dirs {
            let dir = dir.expect("a directory");
            let path = dir.path().join("file");
            std::fs::write(&path, &bytes).expect("written");
            let directory = Directory::open(dir.path()).expect("exists");
            let scratch = ReadBuffers::default();
            for drop_first in [true, false] {
                for range in
                    [0..len, 1..len, 4095..DIRECT_READ_BYTES as u64 + 4097, len - 300_001..len, 77..78, 5..5]
                {
                    let file = File::open(&path).expect("exists");
                    if drop_first {
                        file.sync_all().expect("synced");
                        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
                    } else {
                        std::fs::read(&path).expect("read");
                    }
                    let expected = &bytes[range.start as usize..range.end as usize];
                    let (mut open, size) = OffsetReader::open(&directory, "file", &scratch).expect("opened");
                    assert_eq!(size, len);
                    let mut pieces = Vec::new();
                    open.for_each_piece(range.clone(), |piece| pieces.extend_from_slice(piece))
                        .expect("read");
                    assert!(pieces == expected, "{range:?}");
                    let (mut out, mut passed) = (vec![0u8; expected.len()], Vec::new());
                    open.read_into(range.start, &mut out, |piece| passed.extend_from_slice(piece))
                        .expect("read");
                    assert!(out == expected && passed == expected, "{range:?}");
                }
            }
        }
    }

    #[test]
    fn reading_beyond_the_end_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("file"), make_content(1 << 20)).expect("written");
        let file = File::open(dir.path().join("file")).expect("exists");
        file.sync_all().expect("synced");
        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        let (directory, scratch) = (Directory::open(dir.path()).expect("exists"), ReadBuffers::default());
        let (mut open, _) = OffsetReader::open(&directory, "file", &scratch).expect("opened");
        for end in [(1 << 20) + 1, 2 << 20, 9 << 20] {
            let e = open.for_each_piece(0..end, |_| {}).expect_err("beyond the end");
            assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof, "{end}");
        }
    }

    #[test]
    fn a_file_that_was_just_written_is_cached() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        std::fs::write(dir.path().join("file"), make_content(1 << 20)).expect("written");
        let file = File::open(dir.path().join("file")).expect("exists");
        assert!(is_mostly_cached(&file, &(0..1 << 20)));
    }
}
