//! Buffers in huge pages, kept for the next use.
//!
//! A disk is given a request as stretches of physical memory: in small pages 2 MiB are 512 of them, in a huge page one. On the
//! disk of docs/benchmarks/checkpoints.md that made the difference between 1 and 3 GB/s.
use super::WINDOW;
use memmap2::{Advice, MmapMut};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a huge page (of x86-64, and of AArch64 with pages of 4 KiB).
const HUGE_PAGE: usize = 2 << 20;

/// Memory that begins where a huge page does.
#[derive(Debug)]
pub(crate) struct Buffer {
    map: MmapMut,
    start: usize,
    size: usize,
}

impl Buffer {
    fn new(size: usize) -> io::Result<Buffer> {
        // whole huge pages, wherever the kernel puts the map; what isn't touched costs nothing
        let mut map = MmapMut::map_anon(size.next_multiple_of(HUGE_PAGE) + HUGE_PAGE)?;
        // a kernel without huge pages goes on with small ones
        let _ = map.advise(Advice::HugePage);
        let start = map.as_mut_ptr().align_offset(HUGE_PAGE);
        Ok(Buffer { map, start, size })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map[self.start..self.start + self.size]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..self.start + self.size]
    }
}

/// A store of buffers of equal size; clones share it.
#[derive(Clone)]
pub(crate) struct Buffers {
    size: usize,
    kept: Arc<Mutex<Vec<Buffer>>>,
}

/// Of [`WINDOW`] bytes.
impl Default for Buffers {
    fn default() -> Buffers {
        Buffers::of(WINDOW)
    }
}

impl Buffers {
    /// Of `size` bytes.
    pub(crate) fn of(size: usize) -> Buffers {
        Buffers { size, kept: Arc::default() }
    }

    /// A buffer with arbitrary content.
    pub(crate) fn take(&self) -> io::Result<Buffer> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.map_or_else(|| Buffer::new(self.size), Ok)
    }

    /// Keeps a buffer for the next [`Buffers::take`].
    pub(crate) fn give(&self, buffer: Buffer) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_at_huge_pages_and_come_back() {
        for size in [4096, HUGE_PAGE, HUGE_PAGE + 4096, 4 * HUGE_PAGE] {
            let buffers = Buffers::of(size);
            let mut one = buffers.take().expect("memory");
            assert_eq!((one.len(), one.as_ptr() as usize % HUGE_PAGE), (size, 0));
            one.fill(7);
            let place = one.as_ptr();
            buffers.clone().give(one);
            let (again, other) = (buffers.take().expect("memory"), buffers.take().expect("memory"));
            assert_eq!(again.as_ptr(), place);
            assert_ne!(other.as_ptr(), place, "while the first is in use");
        }
    }
}
