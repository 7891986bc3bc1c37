//! Temporary memory for ops on the CPU, which later ops reuse ([`ScratchPool`]).
use crate::{buffer::Buf, huge_pages};
use std::{
    ops::{Deref, DerefMut},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Minimum number of elements for which a scratch buffer's size is rounded up to whole huge pages.
const HUGE_PAGE_MIN_LEN: usize = 64 << 10;

/// Pool of `f32` buffers that ops on the CPU borrow as temporary memory.
#[derive(Default)]
pub(crate) struct ScratchPool {
    free: Mutex<Vec<Buf>>,
    /// Bytes of all buffers of the pool, free or in use.
    bytes: AtomicUsize,
}

impl ScratchPool {
    /// Borrows a buffer of at least `len` `f32` elements with arbitrary content, and allocates one
    /// if no free buffer is large enough.
    pub(crate) fn borrow_buf(&self, len: usize) -> ScratchBuf<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = (0..free.len()).filter(|&i| free[i].len() >= len).min_by_key(|&i| free[i].len());
        // If no buffer is large enough, the largest is freed, so that the pool does not grow with
        // every new length.
        let index = fits.or_else(|| (0..free.len()).max_by_key(|&i| free[i].len()));
        let candidate = index.map(|i| free.swap_remove(i));
        drop(free);
        let buf = match candidate {
            Some(buf) if buf.len() >= len => buf,
            smaller => {
                let freed_bytes = smaller.map_or(0, |b| b.len() * 4);
                // Lengths are rounded up, so that similar lengths share a buffer. Large buffers
                // fill huge pages, because matmuls read packed panels faster from them.
                let len = len.next_multiple_of(if len < HUGE_PAGE_MIN_LEN {
                    1024
                } else {
                    huge_pages::HUGE_PAGE_BYTES / 4
                });
                self.bytes.fetch_add(len * 4, Ordering::Relaxed);
                self.bytes.fetch_sub(freed_bytes, Ordering::Relaxed);
                Buf::zeroed(len)
            }
        };
        ScratchBuf { buf: Some(buf), pool: self }
    }

    /// Returns the number of bytes of all scratch buffers of the pool, free or in use.
    pub(crate) fn total_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// A temporary buffer that an op borrows from a [`ScratchPool`], and that goes back to the pool
/// when dropped.
pub(crate) struct ScratchBuf<'a> {
    buf: Option<Buf>,
    pool: &'a ScratchPool,
}

impl Deref for ScratchBuf<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        self.buf.as_ref().map_or(&[], |b| b.host_slice())
    }
}

impl DerefMut for ScratchBuf<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.buf.as_mut().map_or(&mut [], |b| b.host_slice_mut())
    }
}

impl Drop for ScratchBuf<'_> {
    fn drop(&mut self) {
        if let Some(buf) = self.buf.take() {
            self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_replaced_by_larger_ones() {
        let scratch = ScratchPool::default();
        let first = scratch.borrow_buf(5000).as_ptr();
        assert_eq!(scratch.borrow_buf(4000).as_ptr(), first);
        let bytes = scratch.total_bytes();
        drop(scratch.borrow_buf(9000));
        assert_eq!(
            scratch.total_bytes(),
            9000usize.next_multiple_of(1024) * 4,
            "a larger buffer replaces the one of {bytes} bytes"
        );
    }
}
