//! [`ThreadWindow`]: the memory of a shared window ([`crate::Comm::shared_window`]) if all ranks
//! are threads of one process.
use crate::shared_window::WindowMemory;
use device::{Buf, Dtype};
use std::{ops::Range, ptr::NonNull};

/// Memory that all ranks of a group share ([`crate::Comm::shared_window`]) when the ranks are
/// threads of one process. It is ordinary memory.
pub(super) struct ThreadWindow {
    /// The address of the window's first element.
    pub(super) start: NonNull<u8>,
    /// Keeps the window's memory allocated. Ranks access the memory through buffers over its parts.
    _memory: Buf,
}

// SAFETY: an address and the memory behind it. `Comm::shared_window` states who accesses it when.
unsafe impl Send for ThreadWindow {}
// SAFETY: see `Send`.
unsafe impl Sync for ThreadWindow {}

impl ThreadWindow {
    /// Allocates zeroed memory for `len` elements of the type `dtype`, which all ranks of a group
    /// (threads of this process) share.
    pub(super) fn new(dtype: Dtype, len: usize) -> Self {
        let mut memory = Buf::zeroed_as(dtype, len);
        let start = NonNull::from(memory.view_mut().host_bytes_mut()).cast();
        ThreadWindow { start, _memory: memory }
    }
}

impl WindowMemory for ThreadWindow {
    /// Does nothing, because threads of one process share the window's pages, which the kernel
    /// counts only once.
    fn release_pages(&self, _: Range<usize>) {}
}
