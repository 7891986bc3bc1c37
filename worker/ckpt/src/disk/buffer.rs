//! Reusable buffers in huge pages.
//!
//! A disk request is a list of contiguous ranges of physical memory. 2 MiB in small pages are 512
//! ranges; in a huge page they are one. On the disk of docs/benchmarks/checkpoints.md this
//! increased the throughput from 1 to 3 GB/s.
use super::WINDOW;
use memmap2::{Advice, MmapMut};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a huge page (of x86-64, and of AArch64 with pages of 4 KiB).
const HUGE_PAGE: usize = 2 << 20;

/// Memory that is aligned to a huge page.
#[derive(Debug)]
pub(crate) struct Buffer {
    map: MmapMut,
    start: usize,
    size: usize,
}

impl Buffer {
    fn new(size: usize) -> io::Result<Buffer> {
        // whole huge pages at any address of the map; untouched pages use no memory
        let mut map = MmapMut::map_anon(size.next_multiple_of(HUGE_PAGE) + HUGE_PAGE)?;
        // a kernel without huge pages uses small ones
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

/// A pool of buffers of equal size; clones share it.
#[derive(Clone)]
pub(crate) struct Buffers {
    size: usize,
    free: Arc<Mutex<Vec<Buffer>>>,
}

/// A pool of buffers of [`WINDOW`] bytes.
impl Default for Buffers {
    fn default() -> Buffers {
        Buffers::with_size(WINDOW)
    }
}

impl Buffers {
    /// A pool of buffers of `size` bytes.
    pub(crate) fn with_size(size: usize) -> Buffers {
        Buffers { size, free: Arc::default() }
    }

    /// Takes a buffer with arbitrary content.
    pub(crate) fn take(&self) -> io::Result<Buffer> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        free.map_or_else(|| Buffer::new(self.size), Ok)
    }

    /// Returns a buffer to the pool.
    pub(crate) fn give(&self, buffer: Buffer) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_to_huge_pages_and_reused() {
        for size in [4096, HUGE_PAGE, HUGE_PAGE + 4096, 4 * HUGE_PAGE] {
            let buffers = Buffers::with_size(size);
            let mut one = buffers.take().expect("memory");
            assert_eq!((one.len(), one.as_ptr() as usize % HUGE_PAGE), (size, 0));
            one.fill(7);
            let address = one.as_ptr();
            buffers.clone().give(one);
            let (again, other) = (buffers.take().expect("memory"), buffers.take().expect("memory"));
            assert_eq!(again.as_ptr(), address);
            assert_ne!(other.as_ptr(), address, "while the first is in use");
        }
    }
}
