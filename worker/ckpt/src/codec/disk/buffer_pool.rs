//! [`DiskBufferPool`]: a pool of buffers for reading and writing files, in huge pages.
//!
//! A disk request is a list of contiguous ranges of physical memory. 2 MiB are 512 ranges in pages
//! of 4 KiB, and one range in a huge page. On the disk of docs/benchmarks/checkpoints.md, huge
//! pages increased the throughput from 1 to 3 GB/s.
use super::io_units::WINDOW_BYTES;
use memmap2::{Advice, MmapMut};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Size of a huge page in bytes on x86-64, and on AArch64 with pages of 4 KiB.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A buffer that begins at a multiple of the huge page size.
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    map: MmapMut,
    /// Offset of the first aligned byte in `map`.
    start: usize,
    /// Number of usable bytes of `map` starting at `start`.
    size: usize,
}

impl AlignedBuffer {
    /// Maps anonymous memory for a buffer of `size` bytes. The kernel is asked for huge pages and
    /// falls back to small ones.
    fn new(size: usize) -> io::Result<AlignedBuffer> {
        // one huge page more than needed, so that the start can be aligned (untouched pages use no
        // memory)
        let mut map = MmapMut::map_anon(size.next_multiple_of(HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES)?;
        // a kernel without huge pages uses small ones
        let _ = map.advise(Advice::HugePage);
        let start = map.as_mut_ptr().align_offset(HUGE_PAGE_BYTES);
        Ok(AlignedBuffer { map, start, size })
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map[self.start..self.start + self.size]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..self.start + self.size]
    }
}

/// A pool of buffers of equal size for reading and writing files. Clones share the pool.
#[derive(Clone)]
pub(crate) struct DiskBufferPool {
    size: usize,
    free: Arc<Mutex<Vec<AlignedBuffer>>>,
}

impl Default for DiskBufferPool {
    fn default() -> DiskBufferPool {
        DiskBufferPool::with_size(WINDOW_BYTES)
    }
}

impl DiskBufferPool {
    /// Creates an empty pool whose buffers have `size` bytes each.
    pub(crate) fn with_size(size: usize) -> DiskBufferPool {
        DiskBufferPool { size, free: Arc::default() }
    }

    /// Takes a buffer out of the pool, or allocates one if the pool is empty. The content of the
    /// buffer is arbitrary.
    pub(crate) fn take(&self) -> io::Result<AlignedBuffer> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        free.map_or_else(|| AlignedBuffer::new(self.size), Ok)
    }

    /// Puts a buffer back into the pool, so that the next [`DiskBufferPool::take`] reuses its
    /// memory.
    pub(crate) fn give_back(&self, buffer: AlignedBuffer) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_to_huge_pages_and_reused() {
        for size in [4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 4096, 4 * HUGE_PAGE_BYTES] {
            let buffers = DiskBufferPool::with_size(size);
            let mut one = buffers.take().expect("memory");
            assert_eq!((one.len(), one.as_ptr() as usize % HUGE_PAGE_BYTES), (size, 0));
            one.fill(7);
            let address = one.as_ptr();
            buffers.clone().give_back(one);
            let (again, other) = (buffers.take().expect("memory"), buffers.take().expect("memory"));
            assert_eq!(again.as_ptr(), address);
            assert_ne!(other.as_ptr(), address, "while the first is in use");
        }
    }
}
