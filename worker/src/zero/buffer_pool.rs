//! [`BufferPool`]: reuses the buffers for gathered parameters and whole gradients.
use device::{Buf, Dtype, Ops, ViewMut, storage::Event};

/// The number of elements to whose next multiple the length of every newly allocated buffer is
/// rounded up.
const LENGTH_GRANULARITY_ELEMENTS: usize = 1024;

/// Returns the first `len` elements of the buffer `buf`, which is replaced by a longer new buffer
/// if it is too short. Out-of-memory errors name `purpose`. The content is unspecified.
pub fn resize_buffer<'a>(ops: &dyn Ops, purpose: &'static str, buf: &'a mut Buf, len: usize) -> ViewMut<'a> {
    if buf.len() < len {
        let dtype = buf.dtype();
        // free the old buffer first, so that both do not exist at the same time
        *buf = ops.zeroed(dtype, 0);
        *buf = ops.zeroed_with_purpose(purpose, dtype, len.next_multiple_of(LENGTH_GRANULARITY_ELEMENTS));
    }
    buf.view_mut().slice(0..len)
}

/// A pool of reusable buffers with elements of one type, from which a caller gets the smallest free
/// buffer that is long enough, or a new one.
pub struct BufferPool {
    dtype: Dtype,
    /// The purpose of the buffers, which errors state.
    purpose: &'static str,
    /// Free buffers, each with the event after which it may be written.
    free: Vec<(Buf, Event)>,
}

impl BufferPool {
    /// Creates an empty pool of buffers with elements of the type `dtype`. Out-of-memory errors
    /// name `purpose` as the use of the memory.
    pub fn new(dtype: Dtype, purpose: &'static str) -> Self {
        BufferPool { dtype, purpose, free: Vec::new() }
    }

    /// Takes a buffer of at least `len` elements from the pool, or allocates one. The content of
    /// the buffer is unspecified.
    pub fn take(&mut self, ops: &dyn Ops, len: usize) -> Buf {
        // Of several equally long buffers, prefer one whose event has completed, at the lowest
        // address. Each step then uses the same buffers, so that CUDA graphs can be replayed.
        let keys = self.free.iter().map(|(buf, last_use)| {
            let at = if last_use.is_always_reached() { buf.view().address() } else { u64::MAX };
            (buf.len(), at)
        });
        match find_best_fit(keys, (len, 0)) {
            Some(i) => {
                let (buf, last_use) = self.free.remove(i);
                last_use.make_stream_wait();
                buf
            }
            None => ops.zeroed_with_purpose(self.purpose, self.dtype, len),
        }
    }

    /// Returns the buffer `buf` to the pool for immediate reuse. The next [`BufferPool::take`] may
    /// return it without waiting, so only the thread that takes buffers may have used the buffer.
    pub fn give_back(&mut self, buf: Buf) {
        self.give_back_after(buf, Event::default());
    }

    /// Returns the buffer `buf` to the pool, which waits for the event `last_use` before another
    /// use overwrites the buffer.
    pub fn give_back_after(&mut self, buf: Buf, last_use: Event) {
        self.free.push((buf, last_use));
    }
}

/// Simulates a [`BufferPool`] without allocating memory, and counts the elements that the pool
/// would allocate. Used by the memory estimate.
#[derive(Default, Clone)]
pub struct BufferPoolEstimate {
    free: Vec<usize>,
    /// The number of elements allocated so far.
    pub allocated: usize,
}

impl BufferPoolEstimate {
    /// Simulates taking a buffer of at least `len` elements, and returns the length of the buffer.
    pub fn take(&mut self, len: usize) -> usize {
        match find_best_fit(self.free.iter().copied(), len) {
            Some(i) => self.free.swap_remove(i),
            None => {
                self.allocated += len;
                len
            }
        }
    }

    /// Simulates giving a buffer of `len` elements back to the pool.
    pub fn give_back(&mut self, len: usize) {
        self.free.push(len);
    }
}

/// Returns the index of the smallest number in `free` that is at least `least`, or `None` if every
/// number is smaller.
fn find_best_fit<T: Ord + Copy>(free: impl Iterator<Item = T>, least: T) -> Option<usize> {
    free.enumerate().filter(|&(_, n)| n >= least).min_by_key(|&(_, n)| n).map(|(i, _)| i)
}
