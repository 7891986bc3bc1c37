//! [`SharedWindow`]: memory shared by the ranks of a group, in which each rank writes its own
//! elements and reads all elements in place.
use device::{Buf, Dtype, View};
use std::{ops::Range, ptr::NonNull, sync::Arc};

/// Memory of a shared window (memory that all ranks of a group share), which stays valid until this
/// object is dropped.
pub(crate) trait WindowMemory: Send + Sync {
    /// Removes the complete memory pages in the byte range `bytes` of the window from this
    /// process's page tables, so that the kernel no longer counts them for the process. Their
    /// contents stay, and the next access maps them again.
    fn release_pages(&self, bytes: Range<usize>);
}

/// Handle of one rank for memory that all ranks of a group share, in which the rank writes its own
/// elements and reads those of all ranks.
pub struct SharedWindow {
    /// This rank's elements of the window. Only this rank writes them.
    pub owned: Buf,
    /// Read access to the elements of all ranks, in rank order.
    pub view: SharedView,
}

/// Read-only access to all elements of a shared window, the memory in which each rank of a group
/// writes a part.
pub struct SharedView {
    elements: Buf,
    /// The byte range of this rank's elements within the window.
    owned_bytes: Range<usize>,
    memory: Arc<dyn WindowMemory>,
}

impl SharedWindow {
    /// Creates the handle of rank `rank` for the shared window at the address `start`, which is
    /// memory that all ranks of a group share. `counts[r]` elements of the window belong to rank r.
    ///
    /// # Safety
    ///
    /// The caller must guarantee that `start` points to `Σ counts` elements, aligned to their type,
    /// for as long as `memory` lives.
    pub(crate) unsafe fn new<M: WindowMemory + 'static>(
        memory: Arc<M>,
        start: NonNull<u8>,
        dtype: Dtype,
        counts: &[usize],
        rank: usize,
    ) -> SharedWindow {
        let before = counts[..rank].iter().sum::<usize>();
        // SAFETY: inside the window, by the caller's promise.
        let owned_start = unsafe { start.add(before * dtype.size()) };
        // SAFETY: the caller's promise. `Comm::shared_window` states who accesses the memory when.
        let (owned, elements) = unsafe {
            let owned = Buf::from_raw_parts(memory.clone(), owned_start, dtype, counts[rank]);
            (owned, Buf::from_raw_parts(memory.clone(), start, dtype, counts.iter().sum()))
        };
        let owned_bytes = before * dtype.size()..(before + owned.len()) * dtype.size();
        SharedWindow { owned, view: SharedView { elements, owned_bytes, memory } }
    }
}

impl SharedView {
    /// Returns a read-only view of the elements of all ranks in the shared window.
    ///
    /// # Safety
    ///
    /// The caller must guarantee that no rank, this rank included, writes elements of the window
    /// while the view is in use. [`Comm::shared_window`](crate::Comm::shared_window) states how the
    /// ranks agree on that.
    pub unsafe fn view(&self) -> View<'_> {
        self.elements.view()
    }

    /// Removes the memory pages that contain no elements of this rank from the process's page
    /// tables, so that the kernel no longer counts them for the process. The next access maps them
    /// again.
    pub fn release_peer_pages(&self) {
        let end = self.elements.len() * self.elements.dtype().size();
        self.memory.release_pages(0..self.owned_bytes.start);
        self.memory.release_pages(self.owned_bytes.end..end);
    }
}
